"""Key-value recall: read pairs of a key and a value, then answer each key with its value.

Paper     Arora et al. 2023, "Zoology", arXiv:2312.04927 (MQAR), and its code: 2 layers, 1 head, width 64 to 512,
          AdamW with cosine decay, the best of four lr; a convolution over 3 tokens in place of positions, as in the
          configurations for Arora et al. 2024, arXiv:2402.18668
Departs   the convolution stands before each mixer (`taps`) and not in a layer of its own; layers have a feed-forward
          part; 1,024 tokens instead of 8,192; one lr; new examples in every step instead of 100,000 in 64 epochs
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.checks import at_least
from subquad.data import recall
from subquad.models import LanguageModel
from subquad.models.loss import cross_entropy
from subquad.tasks.kinds import make_kind
from subquad.training.config import TrainingConfig
from subquad.training.task import SPLITS, Batch, Loss, Source, Split, Sums, Task, means

HELD_OUT = 3000  # examples of validation and of test, as theirs
MODEL: Mapping[str, Any] = {
    "mechanism": "softmax",
    "dim": 64,
    "depth": 2,
    "heads": 1,
    "positions": "none",
    "taps": [1, 2],
}


@dataclass(frozen=True)
class Recall(Task):
    length: int = 128
    pairs: int | tuple[int, ...] = 8  # of several numbers each example has one, and each has its own accuracy
    vocab: int = 1024
    held_out: int = HELD_OUT
    seed: int = 0

    name: ClassVar[str] = "recall"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    model: ClassVar[Mapping[str, Any]] = MODEL
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=4000, batch=256, lr=2e-3, betas=(0.9, 0.98), warmup=200, weight_decay=0.1
    )

    def __post_init__(self) -> None:
        at_least(self, held_out=1, seed=0)
        self._data("test")  # refuses what cannot work

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.pairs,) if isinstance(self.pairs, int) else tuple(self.pairs)

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        vocab = {"vocab": self.vocab}
        given = {**vocab, "max_length": self.length}
        return make_kind(LanguageModel, fields, self.model, given=given, lstm=vocab)

    def source(self, split: Split) -> Source:
        return self._data(split)

    def _data(self, split: Split) -> recall.Recall:
        count = {} if split == "train" else {"count": self.held_out}
        return recall.Recall(self.length, self.numbers, self.vocab, seed=3 * self.seed + SPLITS.index(split), **count)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self._loss(self._answers(model, batch), batch)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        logits, answers = self._answers(model, batch), batch["answers"]
        asked = answers != recall.NOT_ASKED
        correct, pairs = ((logits.argmax(-1) == answers) & asked).sum(1), asked.sum(1)  # [B]
        parts = {self._part(n): (correct[pairs == n].sum(), pairs[pairs == n].sum()) for n in self._parts}
        return {"nats": self._loss(logits, batch), "accuracy": (correct.sum(), pairs.sum()), **parts}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        mean = means(sums)
        parts = {self._part(n): mean[self._part(n)] for n in self._parts}
        return {"accuracy": mean["accuracy"], "bits/value": mean["nats"] / math.log(2), **parts}

    @property
    def _parts(self) -> tuple[int, ...]:
        """The numbers of pairs for which accuracy is measured separately."""
        return tuple(sorted(set(self.numbers))) if len(set(self.numbers)) > 1 else ()

    @staticmethod
    def _part(pairs: int) -> str:
        return f"accuracy, {pairs} pairs"

    def _answers(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits at the queries [B, P, vocab]: only they count."""
        logits: Tensor = model(batch["tokens"])
        return logits.take_along_dim(batch["places"][..., None], 1)

    def _loss(self, logits: Tensor, batch: Batch) -> Loss:
        answers = batch["answers"]
        loss = cross_entropy(logits, answers, ignore_index=recall.NOT_ASKED, reduction="sum")
        return Loss(loss, (answers != recall.NOT_ASKED).sum())
