"""The copy task of "Transformers are RNNs": repeat a word of random length, over 10 symbols, after a separator.

Paper     Katharopoulos et al. 2020, arXiv:2006.16236, §4.1.1: maximum length 128, 4 layers, 8 heads, width 256, batch
          64, RAdam, lr 1e-3 and a tenth of it from step 3,000 on
Departs   evaluation is on a held-out set of words instead of fresh ones; an LSTM is added to the comparison
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.data import copy as words
from subquad.models import LanguageModel
from subquad.models.loss import cross_entropy
from subquad.ranks import even_sizes
from subquad.tasks.kinds import make_kind
from subquad.training.config import TrainingConfig
from subquad.training.task import SPLITS, Batch, Loss, Source, Split, Sums, Task, Trial, means

HELD_OUT = 1280  # examples each for validation and test: 20 batches, as in the paper
IGNORED = -100
PAPER_MODEL: Mapping[str, Any] = {  # of all transformers in this paper
    "mechanism": "linear",
    "dim": 256,
    "depth": 4,
    "heads": 8,
    "positions": "sinusoidal_concat",
    "norm_position": "post",
    "activation": "relu",
    "dropout": 0.1,
    "ff_dropout": 0.1,
    "attention_dropout": 0.1,
}
PAPER_TRAINING = TrainingConfig(optimiser="radam", clip_by="tensor", schedule="constant", lr=1e-4)


@dataclass(frozen=True)
class Copy(Task):
    length: int = 128
    symbols: int = 10
    seed: int = 0

    name: ClassVar[str] = "copy"
    metric: ClassVar[str] = "bits/symbol"
    model: ClassVar[Mapping[str, Any]] = PAPER_MODEL
    training: ClassVar[TrainingConfig] = dataclasses.replace(
        PAPER_TRAINING, steps=10_000, batch=64, lr=1e-3, schedule="step", drop_at=3000
    )

    @classmethod
    def trial(cls) -> Trial:
        return Trial(causal=cls(), examples=256)

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        vocab = {"vocab": self.symbols + 1}
        given = {**vocab, "max_length": self.length}
        return make_kind(LanguageModel, fields, self.model, given=given, lstm=vocab)

    def source(self, split: Split) -> Source:
        seed = 3 * self.seed + SPLITS.index(split)
        if split == "train":
            return words.Copy(self.length, self.symbols, seed=seed)
        return words.Copy(self.length, self.symbols, HELD_OUT, seed)

    def part(self, batch: Batch, rank: int, world: int) -> Batch:
        sizes = even_sizes(batch["tokens"].shape[1], world)
        return {name: tensor.split(sizes, 1)[rank] for name, tensor in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self._loss_and_correct(model, batch)[0]

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        loss, correct = self._loss_and_correct(model, batch)
        return {"nats": loss, "accuracy": (correct, loss.count)}

    def _loss_and_correct(self, model: nn.Module, batch: Batch) -> tuple[Loss, Tensor]:
        """Only the separator and the second word count, as in the authors' code."""
        logits, mask = model(batch["tokens"]), batch["mask"]
        targets = batch["targets"].masked_fill(~mask, IGNORED)
        loss = Loss(cross_entropy(logits, targets, reduction="sum"), mask.sum())
        return loss, (logits.argmax(-1) == targets).sum()

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        mean = means(sums)
        return {**super().summary(sums), "loss": mean["nats"], "accuracy": mean["accuracy"]}
