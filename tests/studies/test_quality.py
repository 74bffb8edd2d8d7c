from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.studies.quality import CLOSE, copy_task, expressions, load_tokens, make_task, own_task, quality
from subquad.studies.settings import Settings


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
    def fails(settings: Settings, causal: bool) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("subquad.studies.quality.make_task", fails)
    assert quality(Settings(task="digits", threads=1), "linear")["reason"] == "RuntimeError: no luck"


def test_copy_asks_for_the_second_word_only() -> None:
    seen = {}

    class Spy:
        device = "cpu"

        def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen["tokens"], seen["targets"] = tokens, targets
            return torch.tensor(1.0)

    copy_task().loss(Spy(), torch.Generator().manual_seed(0))
    for tokens, targets in zip(seen["tokens"], seen["targets"], strict=True):
        n = int((tokens == 0).nonzero()[0])
        assert 32 <= n <= 62
        assert torch.equal(targets[n : 2 * n], tokens[:n])  # what comes next after the separator is the word
        assert (targets[:n] == -100).all()
        assert (targets[2 * n :] == -100).all()


def _value(tokens: list[int]) -> int:
    """By a stack, which the generator does not have."""
    stack: list[list[int]] = [[]]
    for token in tokens:
        if token < 10:
            stack[-1].append(token)
        elif token == CLOSE:
            operator, *values = stack.pop()
            stack[-1].append((min, max, lambda v: int(np.median(v)), lambda v: sum(v) % 10)[operator - 10](values))
        else:
            stack.append([token])
    return stack[0][0]


def test_listops_labels_are_the_values_of_the_expressions() -> None:
    tokens, lengths, values = expressions(40, seed=3)
    for row, n, value in zip(tokens, lengths, values, strict=True):
        assert _value(row[:n].tolist()) == int(value)
    assert len(set(values.tolist())) > 5


def test_own_tokens_from_npy_and_from_text(tmp_path: Path) -> None:
    stream = np.arange(2000, dtype=np.uint16) % 7
    np.save(tmp_path / "stream.npy", stream)
    assert torch.equal(load_tokens(tmp_path / "stream.npy"), torch.from_numpy(stream.astype(np.int64)))
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


def test_the_last_tenth_is_for_testing_only() -> None:
    tokens = torch.cat((torch.zeros(900, dtype=torch.int64), torch.ones(100, dtype=torch.int64)))
    seen = []

    class Spy:
        device = "cpu"

        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(tokens)
            return torch.tensor(1.0)

    task = own_task(tokens, "mine")
    task.loss(Spy(), torch.Generator())
    task.evaluate(Spy())
    assert seen[0].max() == 0
    assert seen[1].min() == 1


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
    both = make_task(Settings(task="listops", threads=1), causal=False)
    assert both is not None
    assert both.name == "listops"
