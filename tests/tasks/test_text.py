import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from subquad.cli import app
from subquad.models import LSTM, LanguageModel
from subquad.tasks.text import Text, measure_context

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}
TEXT = "the sea was grey and every ship in harbour lay still while rain came down on cold stone"
WORDS = TEXT.split()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 101, 3000).astype(np.uint8)))
    return path


def bits(task: Text, model: torch.nn.Module, split: str = "test") -> tuple[float, int]:
    source = task.source(split)
    sums = [task.measure(model, source.batch(np.array([i]), 0))["nats"] for i in range(len(source))]
    total, count = (sum(float(s[i]) for s in sums) for i in (0, 1))
    return task.summary({"nats": (total, count)})["bits/byte"], int(count)


def test_every_byte_of_a_split_is_counted_once_whatever_the_context(file: Path) -> None:
    for context in (0, 16, 31):
        task = Text(set=str(file), length=32, context=context)
        model = task.make_model({**task.model, **SMALL}).eval()
        found, count = bits(task, model)
        assert count == 150 - 1
        assert 4 < found < 12


def test_more_context_helps_a_model_that_uses_it(file: Path) -> None:
    class Counts(torch.nn.Module):
        """Predicts from the byte counts so far: the longer its context, the better it guesses."""

        device = torch.device("cpu")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen = torch.nn.functional.one_hot(tokens, 256).float().cumsum(1)
            return (seen + 1 / 64).log()

    test = np.random.default_rng(1).choice(np.arange(97, 105, dtype=np.uint8), 2000, p=[0.65] + [0.05] * 7)
    bits, counts = zip(
        *(measure_context(Counts(), test, 128, context, 4, None) for context in (0, 64, 120)), strict=True
    )
    assert counts == (2000 - 1 - 128,) * 3
    assert bits[0] > bits[1] > bits[2]


def test_training_sees_other_windows_each_epoch(file: Path) -> None:
    source = Text(set=str(file), length=32).source("train")
    first, again, later = (source.batch(np.arange(3), epoch) for epoch in (0, 0, 1))
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["tokens"], later["tokens"])


def test_models_of_every_row_are_made(file: Path) -> None:
    task = Text(set=str(file), length=256)
    tokens = torch.randint(256, (1, 256))
    for mechanism in (
        "softmax",
        "linear",
        ["fixed", {"block": 32, "summary": 8}],
        ["strided", {"stride": 32}],
        ["transformer_xl", {"memory": 64}],
    ):
        model = task.make_model({**task.model, **SMALL, "mechanism": mechanism, "positions": "none"})
        assert model(tokens).shape == (1, 256, 256)
    grid = task.make_model({**task.model, **SMALL, "positions": "grid"})
    assert isinstance(grid, LanguageModel)
    assert grid.config.embedding.shape == (2, 128)
    assert isinstance(task.make_model({**task.model, "mechanism": "lstm", "dim": 16}), LSTM)
    with pytest.raises(ValueError, match="context"):
        Text(length=8, context=8)
    assert Text().summary({"nats": (math.log(2), 1.0)})["bits/byte"] == pytest.approx(1.0)


def test_a_length_that_the_smallest_part_does_not_hold_is_named(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data.length=150 cannot work: accepted is 1 to 149: .*text.txt has 150 bytes"
    ):
        Text(set=str(file), length=150).source("train")


def test_a_short_run_on_ones_own_file_learns_and_writes(tmp_path: Path) -> None:
    """A model that knows only letter frequencies reaches their entropy; one that knows the words beats half of it."""
    drawn = np.random.default_rng(0).choice(WORDS, 8000)
    file, run = tmp_path / "my.txt", tmp_path / "run"
    file.write_text("".join(word + (".\n" if n % 9 == 8 else " ") for n, word in enumerate(drawn)))
    _, counts = np.unique(np.frombuffer(file.read_bytes(), np.uint8), return_counts=True)
    share = counts / counts.sum()
    entropy = float(-(share * np.log2(share)).sum())
    command = ["train", "text", "--data", str(file), "--out", str(run), "--mechanism", "linear", "--device", "cpu"]
    for setting in (
        "training.steps=120", "training.batch=16", "training.lr=1e-2", "training.evaluate_every=120", "data.length=64",
        "model.dim=32", "model.depth=2", "model.heads=2", "model.taps=[1,2,3]", "model.positions=none",
    ):  # fmt: skip
        command += ["--set", setting]
    with torch.enable_grad():
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    measured = json.loads((run / "result.json").read_text())["test"]["bits/byte"]
    assert measured < 0.4 * entropy
    written = CliRunner().invoke(app, ["generate", str(run), "--prompt", "the ", "--steps", "300", "--seed", "1"])
    assert written.exit_code == 0, written.output
    words = written.output.replace(".", " ").split()
    assert len(words) > 30
    assert sum(word in WORDS for word in words) > 0.6 * len(words)  # about a third, if all steps were warm-up
