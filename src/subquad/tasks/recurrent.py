"""The LSTM beside the transformers of a task, by `--mechanism lstm`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from subquad.models.config import EmbeddingConfig, TransformerConfig
from subquad.models.lstm import LSTMConfig

KNOWN = {f.name for kind in (LSTMConfig, EmbeddingConfig) for f in dataclasses.fields(kind)} - {"positions", "shape"}

OTHERS = (
    {f.name for kind in (TransformerConfig, EmbeddingConfig) for f in dataclasses.fields(kind)} - KNOWN - {"mechanism"}
)


def lstm_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of an LSTM from those of a transformer: what it has not is left out as long as nobody asked for it.

    What somebody did ask for, such as heads=4, stays, and the LSTM refuses it.
    """
    return {
        name: value
        for name, value in fields.items()
        if name != "mechanism" and (name in KNOWN or value != defaults.get(name))
    }
