"""What the arena's tasks share: labelled sequences of bytes, a classifier of the re-runs' size, accuracy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from subquad.checks import one_of, refuse
from subquad.data.generated import Arrays
from subquad.models import Classifier
from subquad.models.loss import cross_entropy
from subquad.tasks.kinds import directed
from subquad.training.config import TrainingConfig
from subquad.training.task import SPLITS, Batch, Loss, Split, Sums, Task, means

# of the PyTorch re-runs (Xiong et al. 2021, arXiv:2102.03902), the same for every mechanism
SMALL: Mapping[str, Any] = {
    "mechanism": "linear",
    "dim": 64,
    "depth": 2,
    "heads": 2,
    "ff_dim": 128,
    "positions": "learned",
    "pooling": "mean",
    "dropout": 0.1,
}
TRAINING = TrainingConfig(steps=2000, batch=32, lr=1e-3, betas=(0.9, 0.98), warmup=200, schedule="linear")
SHIFT = 4  # pixels, at most, of a picture that "crops" moves


@dataclass(frozen=True)
class Labelled:
    """Sequences and their labels, by index."""

    tokens: np.ndarray  # [N, T] uint8
    labels: np.ndarray  # [N]
    lengths: np.ndarray | None = None  # [N]; None: all are of length T

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:  # noqa: ARG002
        arrays = {"tokens": self.tokens[indices], "labels": self.labels[indices].astype(np.int64)}
        if self.lengths is not None:
            arrays["lengths"] = self.lengths[indices].astype(np.int64)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def cut(arrays: Arrays, split: Split, *sizes: int) -> Labelled:
    """The examples of a split, from arrays that hold training, validation and test one after the other."""
    at = SPLITS.index(split)
    rows = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
    return Labelled(**{name: array[rows] for name, array in arrays.items()})


class Classification(Task):
    """Tokens [B, T] -> a class."""

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    model: ClassVar[Mapping[str, Any]] = SMALL
    training: ClassVar[TrainingConfig] = TRAINING
    vocab: ClassVar[int] = 256
    classes: ClassVar[int]
    stand_in: ClassVar[str | None] = None  # the name of the data that replaces the paper's

    length: int  # of the longest sequence; a task without this option defines `positions`

    def positions(self) -> int:
        """The longest sequence."""
        return self.length

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        given = {"vocab": self.vocab, "classes": self.classes, "max_length": self.positions()}
        return Classifier(**{**given, **directed(fields)})

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the model reads of tokens [B, T]."""
        return tokens

    def unlabelled(self, batch: Batch) -> Batch:
        """The tokens of a batch, and their lengths if they have any."""
        return {name: batch[name] for name in ("tokens", "lengths") if name in batch}

    def augmented(self, batch: Batch) -> Batch:
        """A training batch, changed at random in ways that keep the label; for tasks that have an option for it."""
        return batch

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(self.inputs(batch["tokens"]), batch.get("lengths"))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self._loss(self.logits(model, self.augmented(batch)), batch["labels"])

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        logits, labels = self.logits(model, batch), batch["labels"]
        loss = self._loss(logits, labels)
        return {"nats": loss, "accuracy": ((logits.argmax(-1) == labels).sum(), loss.count)}

    @staticmethod
    def _loss(logits: torch.Tensor, labels: torch.Tensor) -> Loss:
        return Loss(cross_entropy(logits, labels, reduction="sum"), labels.new_full((), len(labels)))

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        mean = means(sums)
        return {"accuracy": 100 * mean["accuracy"], "loss": mean["nats"]}


@dataclass(frozen=True)
class Picture(Classification):
    """Pixels row by row, as tokens or as brightness."""

    # "tokens": one learned vector for each of 256 values, as in the arena; "values": brightness times one vector
    pixels: Literal["tokens", "values"] = "tokens"
    augment: str = "none"  # of training pictures: one or more of `augmentations`, such as "flips+crops"

    augmentations: ClassVar[tuple[str, ...]] = ("flips",)

    def __post_init__(self) -> None:
        one_of(self, pixels=("tokens", "values"))
        chosen = self.augment.split("+")
        if self.augment != "none" and not (set(chosen) <= {*self.augmentations} and len({*chosen}) == len(chosen)):
            joined = "+".join(self.augmentations)
            refuse("augment", self.augment, ", ".join(dict.fromkeys(("none", *self.augmentations, joined))))

    @property
    def side(self) -> int:
        return math.isqrt(self.positions())

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        return super().make_model(fields if self.pixels == "tokens" else {"vocab": None, "features": 1, **fields})

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.pixels == "tokens" else tokens[..., None].float() / 127.5 - 1  # black is -1, white 1

    def augmented(self, batch: Batch) -> Batch:
        if self.augment == "none":
            return batch
        pictures = batch["tokens"].unflatten(1, (self.side, self.side))  # [B, Y, X]
        for name in self.augment.split("+"):
            pictures = self.change(pictures, name)
        return {**batch, "tokens": pictures.flatten(1)}

    def change(self, pictures: torch.Tensor, name: str) -> torch.Tensor:
        """Flip each picture [B, Y, X] from left to right or not, or shift it by a few pixels."""
        if name == "flips":
            return torch.where(coins(pictures), pictures.flip(2), pictures)
        batch, side = pictures.shape[0], self.side
        # rows and columns of a window of a picture with a black border of SHIFT pixels
        at = torch.arange(side, device=pictures.device)
        down, across = torch.randint(-SHIFT, SHIFT + 1, (2, batch, 1), device=pictures.device) + at  # [B, side]
        inside = (down % side == down)[:, :, None] & (across % side == across)[:, None, :]
        place = (down.clamp(0, side - 1) * side)[:, :, None] + across.clamp(0, side - 1)[:, None, :]
        moved = pictures.flatten(1).gather(1, place.flatten(1)).view_as(pictures)
        return moved * inside


def coins(pictures: torch.Tensor) -> torch.Tensor:
    """One random truth value for each picture, [B, 1, 1]."""
    return torch.rand(pictures.shape[0], 1, 1, device=pictures.device) < 0.5
