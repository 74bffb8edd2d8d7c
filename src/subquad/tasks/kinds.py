"""Which kind of model a task's fields ask for, a transformer or the LSTM beside it (`--mechanism lstm`), in which
direction it reads, and how long a sequence it can write."""

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


def make_kind(
    transformer: type[Model],
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
    lstm: Mapping[str, Any],
) -> Model:
    """A model of these fields and those that the data decides: `given` for a transformer, `lstm` for an LSTM.

    An LSTM ignores a task's `defaults` that it does not know, such as heads=8. It refuses those that the user chose.
    """
    if fields.get("mechanism") != "lstm":
        return transformer(**{**given, **fields})
    known = {
        name: value
        for name, value in fields.items()
        if name != "mechanism" and (name in LSTM_FIELDS or value != defaults.get(name))
    }
    return LSTM(**{**lstm, **known})


def directed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an encoder: causal where a mechanism is causal only, which is said aloud, unless they say it."""
    if "causal" in fields or fields.get("mechanism") in (None, "lstm"):
        return dict(fields)
    one_way = causal_only(mixer.name for mixer in mixers(fields["mechanism"], "mechanism"))
    if not one_way:
        return dict(fields)
    logger.warning("this model reads from left to right only (causal=True), since that is all %s can", one_way)
    return {**fields, "causal": True}


def positions_of(model: LanguageModel) -> int | None:
    """How many tokens a model can write at most; None if its positions are not learned."""
    embedding = model.config.embedding
    if embedding.positions in GRIDS and embedding.shape is not None:
        return math.prod(embedding.shape)
    return model.config.transformer.max_length if embedding.positions == "learned" else None
