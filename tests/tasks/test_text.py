import math
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.models import LSTM, LanguageModel
from subquad.tasks.text import Text, context_table

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}


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
        """Knows how often each byte came so far: the longer it looks, the better it guesses."""

        device = torch.device("cpu")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen = torch.nn.functional.one_hot(tokens, 256).float().cumsum(1)
            return (seen + 1 / 64).log()

    test = np.random.default_rng(1).choice(np.arange(97, 105, dtype=np.uint8), 2000, p=[0.65] + [0.05] * 7)
    rows = context_table(Counts(), test, 128, contexts=(0, 64, 120))
    assert [row["bytes"] for row in rows] == [2000 - 1 - 128] * 3
    assert rows[0]["bits/byte"] > rows[1]["bits/byte"] > rows[2]["bits/byte"]
    scaled = context_table(Counts(), test, 128)
    assert [row["context"] for row in scaled] == [64, 96, 112, 124, 126, 126]


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
