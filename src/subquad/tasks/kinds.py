"""Make the kind of model that a task's fields ask for, a transformer or an LSTM (`--mechanism lstm`); the direction in
which it reads, and the longest sequence that it can write."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from subquad.disk import logger
from subquad.mechanisms import causal_only
from subquad.models import LSTM, LanguageModel, Model
from subquad.models.config import GRIDS, EmbeddingConfig, TransformerConfig, mixers
from subquad.models.lstm import LSTMConfig


def _names(*configs: type) -> set[str]:
    return {field.name for config in configs for field in dataclasses.fields(config)}


LSTM_FIELDS = _names(LSTMConfig, EmbeddingConfig) - {"positions", "shape"}
TRANSFORMER_ONLY = _names(TransformerConfig, EmbeddingConfig) - LSTM_FIELDS - {"mechanism"}


def is_lstm(mechanism: object) -> bool:
    """Whether what stands in the place of a mechanism asks for the recurrent baseline."""
    return mechanism == "lstm"


def without(mechanism: object) -> set[str]:
    """The model settings of others that a model of this kind cannot have: an LSTM has no heads."""
    return TRANSFORMER_ONLY if is_lstm(mechanism) else set()


def make_kind(
    transformer: type[Model],
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
    lstm: Mapping[str, Any],
) -> Model:
    """A model from these fields and those that follow from the data: `given` for a transformer, `lstm` for an LSTM.

    An LSTM ignores `defaults` of the task that it does not know, such as heads=8, but refuses them from the user.
    """
    if not is_lstm(fields.get("mechanism")):
        return transformer(**{**given, **fields})
    known = {
        name: value
        for name, value in fields.items()
        if name != "mechanism" and (name in LSTM_FIELDS or value != defaults.get(name))
    }
    return LSTM(**{**lstm, **known})


def directed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an encoder. If a mechanism is causal only, they get causal=True, with a warning."""
    mechanism = fields.get("mechanism")
    if "causal" in fields or mechanism is None or is_lstm(mechanism):
        return dict(fields)
    one_way = causal_only(mixer.name for mixer in mixers(mechanism, "mechanism"))
    if not one_way:
        return dict(fields)
    logger.warning("this model reads from left to right only (causal=True), because %s is causal only", one_way)
    return {**fields, "causal": True}


def positions_of(model: LanguageModel) -> int | None:
    """The most tokens that a model can write; None if its positions are not learned, so that there is no limit."""
    embedding = model.config.embedding
    if embedding.positions in GRIDS and embedding.shape is not None:
        return math.prod(embedding.shape)
    return model.config.transformer.max_length if embedding.positions == "learned" else None
