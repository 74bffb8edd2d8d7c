from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.studies.quality import quality, trial_of
from subquad.studies.settings import Settings
from subquad.tasks.tokens import Tokens, load_tokens


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("task", "causal", "metric", "lower"),
    [
        ("copy", True, "bits/symbol", True),
        ("digits", True, "bits/dim", True),
        ("digits", False, "accuracy", False),
        ("listops", False, "accuracy", False),
    ],
)
def test_a_short_training_gives_a_record(task: str, causal: bool, metric: str, lower: bool) -> None:
    settings = Settings(task=task, causal=causal, steps=2, threads=1)
    record = quality(settings, "linear")
    assert (record["task"], record["metric"], record["lower_is_better"]) == (task, metric, lower)
    assert record["steps"] == 2
    assert [step for step, _ in record["curve"]] == [1, 2]
    assert 0 <= record["value"] < 10


def test_what_cannot_learn_a_task_says_why() -> None:
    assert quality(Settings(task="digits", causal=True, threads=1), "fnet")["reason"] == "has no causal form"
    assert "needs" in quality(Settings(task="copy", threads=1), "fnet")["reason"]


def test_what_raises_while_learning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: Settings) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("subquad.studies.quality.trial_of", fails)
    assert quality(Settings(task="digits", threads=1), "linear")["reason"] == "RuntimeError: no luck"


def test_own_tokens_from_npy_and_from_text(tmp_path: Path) -> None:
    stream = np.arange(2000, dtype=np.uint16) % 7
    np.save(tmp_path / "stream.npy", stream)
    assert np.array_equal(load_tokens(tmp_path / "stream.npy"), stream)
    np.save(tmp_path / "rows.npy", stream.reshape(100, 20))
    assert load_tokens(tmp_path / "rows.npy").shape == (100, 20)
    (tmp_path / "mine.txt").write_text("äb" * 50, encoding="utf-8")
    assert load_tokens(tmp_path / "mine.txt").tolist() == list(("äb" * 50).encode())
    for name in ("stream.npy", "rows.npy", "mine.txt"):
        settings = Settings(data=str(tmp_path / name), causal=True, steps=2, threads=1)
        record = quality(settings, "linear")
        assert record["task"] == name
        assert record["metric"] == "bits/token"
        assert 0 < record["value"] < 10


@pytest.mark.parametrize("shape", [(1000,), (50, 20)])
def test_the_last_tenth_is_for_testing_only(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "mine.npy", np.repeat([0, 1], [900, 100]).reshape(shape))
    task = Tokens(str(tmp_path / "mine.npy"))
    training, test = task.source("train"), task.source("test")
    for epoch in range(3):
        assert training.batch(np.arange(len(training)), epoch)["tokens"].max() == 0
    assert test.batch(np.arange(len(test)), 0)["tokens"].min() == 1


def test_rows_are_windows_of_their_sequence_at_other_places_each_epoch(tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", np.arange(40 * 400).reshape(40, 400) % 1000)
    source = Tokens(str(tmp_path / "mine.npy")).source("train")
    assert len(source) == 36
    batches = [source.batch(np.array([3, 7]), epoch)["tokens"] for epoch in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert batches[0].shape == (2, 257)
    assert ((batches[0][1] - batches[0][0]) % 1000 == 4 * 400 % 1000).all()


def test_data_that_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_tokens(tmp_path / "nothing.npy")
    np.save(tmp_path / "float.npy", np.zeros(100))
    with pytest.raises(ValueError, match=r"float64 of shape \[100\]: accepted are integer tokens"):
        load_tokens(tmp_path / "float.npy")
    np.save(tmp_path / "negative.npy", np.arange(-50, 50))
    with pytest.raises(ValueError, match="from -50 to 49"):
        load_tokens(tmp_path / "negative.npy")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="at least 32"):
        load_tokens(tmp_path / "short.txt")


def test_a_task_is_chosen_by_form() -> None:
    both = trial_of(Settings(task="listops", threads=1)).form(causal=False)
    assert both is not None
    assert both.name == "listops"
