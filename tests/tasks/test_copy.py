import math

import numpy as np
import pytest
import torch

from subquad.models import LSTM, LanguageModel
from subquad.tasks.copy import Copy

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}


def test_only_the_separator_and_the_second_word_count() -> None:
    task = Copy(length=20, symbols=3)
    batch = task.source("train").batch(np.arange(4), 0)
    model = task.make_model({**task.model, **SMALL}).eval()
    loss = task.loss(model, batch)
    words = [int((row == 0).int().argmax()) for row in batch["tokens"]]
    assert int(loss.count) == sum(n + 1 for n in words)
    before = batch["targets"].clone()
    batch["targets"][:, : min(words) - 1] = 1  # tokens before the separator are not predicted
    torch.testing.assert_close(task.loss(model, batch).total, loss.total)
    assert not torch.equal(before, batch["targets"])


def test_a_model_that_knows_the_answer_is_right_in_every_measure() -> None:
    task = Copy(length=20, symbols=3)
    batch = task.source("test").batch(np.arange(8), 0)

    class Oracle(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 50.0 * torch.nn.functional.one_hot(batch["targets"], 4).float()

    sums = {name: (float(a), float(b)) for name, (a, b) in task.measure(Oracle(), batch).items()}
    found = task.summary(sums)
    assert found["accuracy"] == 1.0
    assert found["bits/symbol"] == pytest.approx(0.0, abs=1e-6)
    assert found["loss"] == pytest.approx(found["bits/symbol"] * math.log(2))


def test_splits_differ_and_each_kind_of_model_is_made() -> None:
    task = Copy()
    first = [task.source(split).batch(np.arange(3), 0)["tokens"] for split in ("train", "validation", "test")]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    for mechanism in ("linear", "softmax", ["reformer", {"rounds": 4, "buckets": 64, "chunk": 32}]):
        made = task.make_model({**task.model, **SMALL, "mechanism": mechanism})
        assert isinstance(made, LanguageModel)
        assert made(first[0]).shape == (3, 128, 11)
    lstm = task.make_model({**task.model, "dim": 16, "mechanism": "lstm"})
    assert isinstance(lstm, LSTM)
    assert lstm(first[0]).shape == (3, 128, 11)
    with pytest.raises(TypeError, match="heads"):
        task.make_model({**task.model, "heads": 4, "mechanism": "lstm"})
