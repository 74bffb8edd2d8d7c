"""Text byte after byte, of any file: bits/byte, time for an iteration at long context, what a longer context is worth.

Paper     Child et al. 2019, arXiv:1904.10509, §7.2: enwik8 at a context of 12,288; Table 3, the least context during
          evaluation, is `context_table`
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from subquad.checks import at_least, refuse
from subquad.data import text
from subquad.models import LSTM, LanguageModel
from subquad.models.config import GRIDS
from subquad.models.loss import cross_entropy
from subquad.tasks.recurrent import lstm_fields
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split, Sums, Task

IGNORED = -100
COLUMNS = 128  # of a grid of positions: the paper's stride
TABLE_3 = (6144, 9216, 10752, 11904, 12096, 12160)  # least contexts, of 12,288


@dataclass(frozen=True)
class Text(Task):
    set: str = "text8.first12.5MB"  # one of data.text.SETS, or the path of any file
    length: int = 1024  # bytes a window holds
    context: int = 0  # in evaluation: the least number of bytes before a predicted one, the very first window aside

    name: ClassVar[str] = "text"
    metric: ClassVar[str] = "bits/byte"
    model: ClassVar[Mapping[str, Any]] = {
        "mechanism": "softmax",
        "dim": 256,
        "depth": 6,
        "heads": 8,
        "dropout": 0.1,
    }
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=10_000, batch=32, optimiser="adamw", lr=1e-3, betas=(0.9, 0.95), warmup=200, schedule="cosine"
    )

    def __post_init__(self) -> None:
        at_least(self, length=1, context=0)
        if self.context >= self.length:
            refuse("context", self.context, f"less than length={self.length}")

    @property
    def data_name(self) -> str:
        return text.load(self.set).name

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        """positions on a grid get the paper's rows of 128 bytes."""
        if fields.get("mechanism") == "lstm":
            return LSTM(**{"vocab": text.VOCAB, **lstm_fields(fields, self.model)})
        given: dict[str, Any] = {"vocab": text.VOCAB, "max_length": self.length, **fields}
        if given.get("positions") in GRIDS:
            given.setdefault("shape", (-(-self.length // COLUMNS), COLUMNS))
        return LanguageModel(**given)

    def source(self, split: Split) -> Source:
        corpus = text.load(self.set)
        smallest = min(len(part) for part in (corpus.train, corpus.validation, corpus.test))
        if self.length >= smallest:
            accepted = f"1 to {smallest - 1:,}: a part of {corpus.name} has {smallest:,} bytes"
            refuse("data.length", self.length, accepted)
        if split == "train":
            return text.Windows(corpus.train, self.length, shifted=True)
        return text.Windows(getattr(corpus, split), self.length, self.context)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return _score(model, batch)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        return {"nats": _score(model, batch)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        total, count = sums["nats"]
        mean = total / max(count, 1)
        return {"bits/byte": mean / math.log(2), "perplexity": math.exp(min(mean, 50.0))}


def _score(model: nn.Module, batch: Batch) -> Loss:
    tokens, first = batch["tokens"].long(), batch["first"]
    at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    targets = tokens[:, 1:].masked_fill(at < first[:, None], IGNORED)  # what is before gives context
    total = cross_entropy(model(tokens[:, :-1]), targets, ignore_index=IGNORED, reduction="sum")
    return Loss(total, (targets != IGNORED).sum())


@torch.no_grad()
def context_table(
    model: LanguageModel,
    tokens: np.ndarray,
    length: int,
    contexts: Iterable[int] | None = None,
    *,
    batch: int = 4,
    precision: torch.dtype | None = None,
) -> list[dict[str, Any]]:
    """bits/byte at each least context (Table 3's by default, in proportion to `length`), over the same bytes.

    Those are the bytes after the first window: whatever the context, none of them has less.
    """
    if contexts is None:
        contexts = [context * length // 12288 for context in TABLE_3]
    rows = []
    model.eval()
    for context in contexts:
        windows = text.Windows(tokens, length, context)
        if len(windows) < 2:
            raise ValueError(f"tokens holds {len(tokens):,}: accepted are more than one window of {length:,}")
        total = count = torch.zeros((), dtype=torch.float64, device=model.device)
        for start in range(1, len(windows), batch):
            made = windows.batch(np.arange(start, min(start + batch, len(windows))))
            made = {name: tensor.to(model.device) for name, tensor in made.items()}
            with torch.autocast(model.device.type, precision, enabled=precision is not None):
                found = _score(model, made)
            total, count = total + found.total, count + found.count
        bits: Tensor = total / count / math.log(2)
        rows.append({"context": context, "bits/byte": float(bits), "bytes": int(count)})
    return rows
