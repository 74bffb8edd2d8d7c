"""A small transformer learns real handwritten digits pixel by pixel, then writes new ones as an RNN."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from subquad.data import digits
from subquad.models import LanguageModel
from subquad.models.sampling import Sampling
from subquad.training.config import TrainingConfig
from subquad.training.short import short_run
from subquad.training.task import Batch, Loss, Split, Sums, Task

PIXELS = digits.SIDE**2
START = digits.SHADES  # the token before the first pixel
HELD_OUT = 150  # of the training images, to choose weights by
Told = Callable[[int, float], None]  # (step, bits/dim)


def make_model(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    """A pixel-by-pixel model of 8 x 8 images: 17 shades and a start token, positions by row and column."""
    return LanguageModel(
        **{
            "vocab": digits.SHADES + 1,
            "dim": 64,
            "depth": 3,
            "heads": 4,
            "mechanism": mechanism,
            "positions": "grid",
            "shape": (digits.SIDE, digits.SIDE),
            "max_length": PIXELS,
            "dropout": 0.1,
            **changes,
        }
    )


@dataclass(frozen=True)
class Images:
    """Examples by index, each with the start token before it."""

    images: Tensor  # [N, 64]

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:  # noqa: ARG002, the same images in every epoch
        return {"tokens": with_start(self.images[torch.from_numpy(indices.copy())])}


@dataclass(frozen=True)
class DigitsTask(Task):
    """The digits that ship with the package, pixel by pixel: a minute on a CPU, and nothing to download."""

    name: ClassVar[str] = "digits"
    metric: ClassVar[str] = "bits/dim"
    model: ClassVar[Mapping[str, Any]] = {"mechanism": "linear"}
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=700, batch=32, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05, warmup=35
    )

    def make_model(self, fields: Mapping[str, Any]) -> LanguageModel:
        return make_model(**fields)

    def source(self, split: Split) -> Images:
        training, test = digits.load()
        held_out = {"train": training.images[:-HELD_OUT], "validation": training.images[-HELD_OUT:]}
        return Images(held_out.get(split, test.images))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens = batch["tokens"]
        total = cast(LanguageModel, model).loss(tokens, reduction="sum")
        return Loss(total, torch.full((), tokens[:, 1:].numel(), device=tokens.device))

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        total, count = self.loss(model, batch)
        return {"nats": (total, count)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        nats, count = sums["nats"]
        return {"bits/dim": nats / count / math.log(2)}


def with_start(images: Tensor) -> Tensor:
    """[N, 64] -> [N, 65]: every pixel, the first one included, is predicted from what comes before it."""
    return torch.cat((torch.full_like(images[:, :1], START), images), dim=1)


def train(model: LanguageModel, images: Tensor, steps: int, told: Told | None = None, batch: int = 32) -> list[float]:
    """A short run; returns bits/dim a step, and tells each to `told`."""
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        return model.loss(with_start(images[torch.randint(len(images), (batch,), generator=generator)]))

    curve: list[float] = []
    for nats in short_run(model, loss, steps, lr=3e-3, weight_decay=0.05):
        curve.append(nats.item() / math.log(2))
        if told is not None:
            told(len(curve), curve[-1])
    return curve


@torch.no_grad()
def bits_per_dim(model: LanguageModel, images: Tensor) -> float:
    model.eval()
    return float(model.loss(with_start(images))) / math.log(2)


@torch.no_grad()
def standard_error(model: LanguageModel, images: Tensor) -> float:
    """Of bits_per_dim: how far as many other images would move it."""
    model.eval()
    bits = model.loss(with_start(images), reduction="none").mean(1) / math.log(2)  # [N]
    return float(bits.std() / math.sqrt(len(bits)))


def generate(model: LanguageModel, count: int, seed: int = 0, temperature: float = 1.0) -> Tensor:
    """`count` images at once, one pixel a step: [count, 64]."""
    shades = Sampling(exclude=(START,), temperature=temperature)  # a pixel is a shade, never the start token
    return model.generate(torch.full((count, 1), START), PIXELS, sampling=shades, seed=seed)


def picture(real: Tensor, generated: Tensor, path: Path, title: str, columns: int = 16) -> None:
    """Two sheets one above the other: images of the data set, and images of a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained")
    for axis, images, name in zip(axes, (real, generated), ("real", title), strict=True):
        rows = len(images) // columns
        sheet = images[: rows * columns].view(rows, columns, digits.SIDE, digits.SIDE)
        sheet = torch.nn.functional.pad(sheet, (1, 0, 1, 0)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        axis.imshow(sheet.numpy(), cmap="gray_r", vmin=0, vmax=digits.SHADES - 1)
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    plt.close(figure)
