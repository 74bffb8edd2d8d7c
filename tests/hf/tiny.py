"""Small models of every kind of state, and what the tests of several files need."""

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from subquad.models import LanguageModel

logging.disable_progress_bar()

VOCAB = 23
# mechanisms by the kind of their state, and positions
KINDS: dict[str, dict[str, Any]] = {
    "constant": {"mechanism": "linear, gated_deltanet"},
    "constant, taps": {"mechanism": "retnet", "taps": (1, 2), "positions": "none"},
    "window": {"mechanism": ("local", {"window": 4}), "rotary": True, "positions": "none"},
    "growing": {"mechanism": "softmax", "positions": "learned", "tie": True},
    "growing, sparse": {"mechanism": (("strided", {"stride": 3}), ("fixed", {"block": 4, "summary": 1}))},
    "hybrid": {"mechanism": ("linear", ("bigbird", {"block": 3, "random": 1}), "softmax"), "depth": 3},
    "recomputed": {"mechanism": ("synthesizer", {"kind": "dense"}), "positions": "learned"},
}


def make(kind: str, seed: int = 0, **fields: Any) -> LanguageModel:
    """A small language model with that kind of state, in eval mode, that prefers some tokens clearly."""
    torch.manual_seed(seed)
    sizes = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "max_length": 64}
    model = LanguageModel(**{**sizes, **KINDS[kind], **fields}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save(folder)
    return folder


def padded(rows: list[torch.Tensor], side: str, filler: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths as ids and mask, padded on that side with any token."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), filler)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for b, row in enumerate(rows):
        own = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[b, own], mask[b, own] = row, 1
    return ids, mask
