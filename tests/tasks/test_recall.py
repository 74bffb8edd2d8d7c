import math

import numpy as np
import pytest
import torch
from torch import Tensor

from subquad.data.recall import NOT_ASKED
from subquad.models import LSTM, LanguageModel
from subquad.tasks.recall import Recall
from subquad.training.config import TrainingConfig
from subquad.training.train import learn

SMALL = {"dim": 16, "depth": 1, "heads": 2}


@pytest.mark.usefixtures("no_gradients")
def test_only_the_queries_count() -> None:
    task = Recall(length=32, pairs=(2, 8), vocab=40)
    batch = task.source("train").batch(np.arange(4), 0)
    logits = torch.randn(4, 32, 40)
    loss = task.loss(Fixed(logits), batch)
    assert int(loss.count) == 2 + 8 + 2 + 8
    asked = batch["answers"] != NOT_ASKED
    rows, columns = asked.nonzero(as_tuple=True)
    places = batch["places"][rows, columns]
    expected = torch.nn.functional.cross_entropy(logits[rows, places], batch["answers"][asked], reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    other = torch.randn(4, 32, 40)
    other[rows, places] = logits[rows, places]
    torch.testing.assert_close(task.loss(Fixed(other), batch).total, loss.total)
    other[rows[0], places[0]] += torch.randn(40)
    assert not torch.allclose(task.loss(Fixed(other), batch).total, loss.total)


class Fixed(torch.nn.Module):
    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == self.logits.shape[:2]
        return self.logits


class Dictionary(torch.nn.Module):
    """Looks a key up among the pairs before it; wrong about rows of `wrong` pairs."""

    def __init__(self, vocab: int, wrong: int | None = None):
        super().__init__()
        self.vocab, self.wrong = vocab, wrong

    def forward(self, tokens: Tensor) -> Tensor:
        answers = torch.zeros_like(tokens)
        for row, line in enumerate(tokens.tolist()):
            known: dict[int, int] = {}
            for place, token in enumerate(line[:-1]):
                answers[row, place] = known.setdefault(token, line[place + 1])
            if sum(token != 0 for token in line) == 3 * (self.wrong or 0):
                answers[row] = 0
        return 50.0 * torch.nn.functional.one_hot(answers, self.vocab).float()


@pytest.mark.usefixtures("no_gradients")
def test_a_dictionary_is_right_in_every_measure() -> None:
    task = Recall(length=32, pairs=(2, 8), vocab=40)
    batch = task.source("test").batch(np.arange(8), 0)

    def measured(model: torch.nn.Module) -> dict[str, float]:
        return task.summary({name: (float(a), float(b)) for name, (a, b) in task.measure(model, batch).items()})

    found = measured(Dictionary(40))
    assert found == pytest.approx(
        {"accuracy": 1.0, "bits/value": 0.0, "accuracy, 2 pairs": 1.0, "accuracy, 8 pairs": 1.0}, abs=1e-6
    )
    found = measured(Dictionary(40, wrong=8))
    assert found["accuracy"] == pytest.approx(0.2)  # 2 queries of 10
    assert (found["accuracy, 2 pairs"], found["accuracy, 8 pairs"]) == (1.0, 0.0)
    assert found["bits/value"] == pytest.approx(0.8 * 50 / math.log(2), rel=1e-3)
    one = Recall(length=32, vocab=40)
    assert set(one.summary({"nats": (1.0, 1.0), "accuracy": (1.0, 1.0)})) == {"accuracy", "bits/value"}


@pytest.mark.usefixtures("no_gradients")
def test_splits_differ_and_each_kind_of_model_is_made() -> None:
    task = Recall()
    first = [task.source(split).batch(np.arange(3), 0)["tokens"] for split in ("train", "validation", "test")]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert len(task.source("train")) > 10**6
    assert len(task.source("validation")) == len(task.source("test")) == 3000
    other = Recall(seed=1)
    assert not torch.equal(other.source("train").batch(np.arange(3), 0)["tokens"], first[2])
    for mechanism in ("linear", "softmax"):
        made = task.make_model({**task.model, **SMALL, "mechanism": mechanism})
        assert isinstance(made, LanguageModel)
        assert made(first[0]).shape == (3, 128, 1024)
    lstm = task.make_model({**task.model, "dim": 16, "mechanism": "lstm"})
    assert isinstance(lstm, LSTM)
    assert lstm(first[0]).shape == (3, 128, 1024)


def test_options_are_checked_when_the_task_is_made() -> None:
    assert Recall.from_options({"pairs": [2, 4], "length": 32}).numbers == (2, 4)
    assert Recall.from_options({"pairs": 4}).numbers == (4,)
    for options, said in (
        ({"pairs": 64}, r"pairs=\[64\] cannot work"),
        ({"pairs": "many"}, "data.pairs"),
        ({"held_out": 0}, "held_out=0"),
        ({"length": 7}, "length=7"),
    ):
        with pytest.raises(ValueError, match=said):
            Recall.from_options(options)


def test_softmax_learns_it_and_forgets_nothing() -> None:
    """In a few hundred small steps; chance is one of 15 values."""
    task = Recall(length=16, pairs=3, vocab=30, held_out=200)
    training = TrainingConfig(steps=300, batch=32, lr=5e-3, betas=(0.9, 0.98), warmup=20, precision="fp32")
    fields = {**task.model, "dim": 32, "mechanism": "softmax"}
    assert learn(task, fields, training).measures["accuracy"] > 0.9
