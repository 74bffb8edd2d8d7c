"""Text: is an IMDb review, read as bytes, positive? Called "Text" in the arena and `imdb` here.

Sizes     22,500 for training, 2,500 for validation, 25,000 for test; the first `length` bytes, 1,000 to 4,000
Departs   validation is a held-out part of the training data; the arena validates on the test data
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch

from subquad.data import imdb
from subquad.data.generated import Arrays, generated, kept
from subquad.data.order import permutation
from subquad.data.padding import first_bytes
from subquad.tasks.lra.pack import packed
from subquad.tasks.lra.task import Classification
from subquad.training.task import Batch, Source, Split

LONGEST = 4096  # bytes of a review that are kept
HELD_OUT = 2_500


def reviews(longest: int = LONGEST) -> Arrays:
    """All 50,000 reviews, the test reviews last: joined text, starts [N + 1], labels [N], films [N]."""
    parts = imdb.load()
    pieces = [part["text"][start:end][:longest] for part in parts for start, end in pairwise(part["starts"])]
    labels, films = (np.concatenate([part[name] for part in parts]) for name in ("labels", "films"))
    starts = np.cumsum([0, *map(len, pieces)])
    return {"text": np.concatenate(pieces), "starts": starts, "labels": labels.astype(np.uint8), "films": films}


def stored() -> Arrays:
    return kept(generated() / "imdb", lambda: packed("imdb") or reviews())


@dataclass(frozen=True, eq=False)
class Texts:
    """Labelled texts, or pairs of texts, by index: {"tokens": .., "lengths": ..} or {"a": .., "a_lengths": .., ..}."""

    texts: Arrays
    columns: Mapping[str, np.ndarray]  # name -> the index of its text for each example, [N]
    labels: np.ndarray  # [N]
    length: int  # bytes of each text that are read

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:  # noqa: ARG002
        made = {"labels": self.labels[indices].astype(np.int64)}
        for name, column in self.columns.items():
            lengths = "lengths" if name == "tokens" else f"{name}_lengths"
            made[name], made[lengths] = first_bytes(self.texts, column[indices], self.length)
        return {name: torch.from_numpy(array) for name, array in made.items()}


@dataclass(frozen=True)
class Text(Classification):
    length: int = 1000

    name: ClassVar[str] = "imdb"
    classes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LONGEST:
            raise ValueError(f"length={self.length} cannot work: accepted is 1 to {LONGEST}")

    def source(self, split: Split) -> Source:
        texts = stored()
        count, longest = len(texts["labels"]), int(np.diff(texts["starts"]).max())
        if count >= 50_000 and longest < self.length:
            raise ValueError(f"length={self.length} cannot work: reviews were packed to {longest} bytes")
        half = count // 2
        order, held = permutation(half, 0, half), HELD_OUT * half // 25_000
        rows = {"train": order[held:], "validation": order[:held], "test": np.arange(half, 2 * half)}[split]
        return Texts(texts, {"tokens": rows}, texts["labels"][rows], self.length)
