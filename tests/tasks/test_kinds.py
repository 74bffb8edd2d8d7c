"""Models that label a whole sequence, with mechanisms that can only look back."""

import logging
from typing import Any

import pytest
import torch

from subquad.models import Classifier, Matcher
from subquad.tasks import TASKS
from subquad.tasks.kinds import directed
from subquad.tasks.lra.retrieval import Retrieval


@pytest.mark.parametrize("mechanism", ["gla", "linear, gla", ["gla", {"rank": 4}], [["linear", {}], "gla"]])
def test_a_mechanism_that_is_causal_only_labels_from_left_to_right_and_says_so(
    mechanism: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"mechanism": mechanism, "dim": 16, "heads": 2, "depth": 2}
    with caplog.at_level(logging.WARNING, "subquad"):
        model: Any = TASKS["listops"]().make_model(fields)
    assert isinstance(model, Classifier)
    assert model.config.transformer.causal
    assert "left to right only" in caplog.text
    assert "gla" in caplog.text
    tokens = torch.randint(0, 15, (2, 20))
    assert torch.isfinite(model(tokens, torch.tensor([20, 3]))).all()


def test_a_matcher_too() -> None:
    model: Any = Retrieval().make_model({"mechanism": "deltanet", "dim": 16, "heads": 2})
    assert isinstance(model, Matcher)
    assert model.config.transformer.causal


def test_who_sees_both_sides_goes_on_doing_so(caplog: pytest.LogCaptureFixture) -> None:
    for fields in ({"mechanism": "linear"}, {"mechanism": "lstm"}, {}, {"mechanism": "retnet", "causal": True}):
        assert directed(fields) == fields
    assert not caplog.text


def test_what_was_asked_for_is_not_changed() -> None:
    with pytest.raises(ValueError, match="causal=False cannot work: GLA is causal only"):
        TASKS["listops"]().make_model({"mechanism": "gla", "causal": False, "dim": 16, "heads": 2})
    with pytest.raises(ValueError, match="pooling='cls' cannot work"):
        TASKS["listops"]().make_model({"mechanism": "gla", "pooling": "cls", "dim": 16, "heads": 2})
