"""Image: classify grey CIFAR-10 photographs into ten classes, read as 1,024 bytes row by row."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from subquad.data import cifar10
from subquad.data.generated import Arrays, generated, kept
from subquad.tasks.lra.pack import packed
from subquad.tasks.lra.task import Picture, cut
from subquad.training.task import Source, Split

SIZES = (45_000, 5_000, 10_000)  # photographs for training, validation and test


def grey() -> Arrays:
    """All 60,000 photographs; the test photographs come last."""
    parts = [cifar10.grey(images) for images in cifar10.load()]
    tokens, labels = (np.concatenate([getattr(p, name).numpy() for p in parts]) for name in ("pixels", "labels"))
    return {"tokens": tokens.astype(np.uint8), "labels": labels.astype(np.uint8)}


@dataclass(frozen=True)
class Image(Picture):
    name: ClassVar[str] = "image"
    classes: ClassVar[int] = 10
    augmentations: ClassVar[tuple[str, ...]] = ("flips", "crops")

    def positions(self) -> int:
        return 1024

    def source(self, split: Split) -> Source:
        return cut(kept(generated() / "image", lambda: packed("image") or grey()), split, *SIZES)
