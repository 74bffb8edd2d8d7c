"""Image: which of ten things is on a grey CIFAR-10 photograph, read as 1,024 bytes row by row.

Sizes     45,000 for training, 5,000 for validation, 10,000 for test
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from subquad.data import cifar10
from subquad.data.generated import Arrays, generated, kept
from subquad.tasks.lra.pack import packed
from subquad.tasks.lra.task import Labelled, Picture
from subquad.training.task import Source, Split

SPLITS: dict[Split, slice] = {
    "train": slice(0, 45_000),
    "validation": slice(45_000, 50_000),
    "test": slice(50_000, 60_000),
}


def grey() -> Arrays:
    """All 60,000 photographs, those of the test last."""
    parts = [cifar10.grey(images) for images in cifar10.load()]
    tokens, labels = (np.concatenate([getattr(p, name).numpy() for p in parts]) for name in ("pixels", "labels"))
    return {"tokens": tokens.astype(np.uint8), "labels": labels.astype(np.uint8)}


@dataclass(frozen=True)
class Image(Picture):
    name: ClassVar[str] = "image"
    classes: ClassVar[int] = 10

    def positions(self) -> int:
        return 1024

    def source(self, split: Split) -> Source:
        arrays = kept(generated() / "image", lambda: packed("image") or grey())
        return Labelled(arrays["tokens"][SPLITS[split]], arrays["labels"][SPLITS[split]])
