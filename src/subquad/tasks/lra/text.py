"""Text: is an IMDb review favourable, read as bytes. Called "Text" in the arena and `imdb` here.

Sizes     22,500 for training, 2,500 for validation, 25,000 for test; the first `length` bytes, 1,000 to 4,000
Departs   validation is held out of the training part; the arena validates on the test part itself
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from subquad.data import imdb
from subquad.data.generated import Arrays, generated, kept
from subquad.tasks.lra.pack import packed
from subquad.tasks.lra.task import Classification, Labelled
from subquad.training.task import Source, Split

LONGEST = 4096  # bytes of a review that are kept
HELD_OUT = 2_500


def reviews(longest: int = LONGEST) -> Arrays:
    """All 50,000, those of the test last: text, one after the other; starts [N + 1], labels [N], films [N]."""
    pieces, labels, films = [], [], []
    for part in imdb.load():
        pieces += [part.text[start:end][:longest] for start, end in zip(part.starts, part.starts[1:], strict=False)]
        labels.append(part.labels)
        films.append(part.films)
    return {
        "text": np.concatenate(pieces),
        "starts": np.cumsum([0, *map(len, pieces)]),
        "labels": np.concatenate(labels).astype(np.uint8),
        "films": np.concatenate(films),
    }


def stored() -> Arrays:
    return kept(generated() / "imdb", lambda: packed("imdb") or reviews())


def padded(found: Arrays, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(the first `length` bytes of each [B, length], how many count [B])"""
    first = found["starts"][rows]
    lengths = np.minimum(found["starts"][rows + 1] - first, length)
    at = np.arange(length)
    inside = at < lengths[:, None]
    return np.where(inside, found["text"][np.where(inside, first[:, None] + at, 0)], 0).astype(np.uint8), lengths


def shuffled(count: int, seed: int) -> np.ndarray:
    """0 .. count - 1 in an order that is the same with every version of NumPy."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, count])).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Text(Classification):
    length: int = 1000

    name: ClassVar[str] = "imdb"
    classes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LONGEST:
            raise ValueError(f"length={self.length} cannot work: accepted is 1 to {LONGEST}")

    def positions(self) -> int:
        return self.length

    def source(self, split: Split) -> Source:
        found = stored()
        longest = int(np.diff(found["starts"]).max())
        if len(found["labels"]) >= 50_000 and longest < self.length:
            raise ValueError(f"length={self.length} cannot work: reviews were packed to {longest} bytes")
        half = len(found["labels"]) // 2
        order, held = shuffled(half, 0), HELD_OUT * half // 25_000
        rows = {"train": order[held:], "validation": order[:held], "test": np.arange(half, 2 * half)}[split]
        arrays = kept(generated() / f"imdb_{self.length}_{split}_{len(rows)}", lambda: self._make(found, rows))
        return Labelled(arrays["tokens"], arrays["labels"], arrays["lengths"])

    def _make(self, found: Arrays, rows: np.ndarray) -> Arrays:
        tokens, lengths = padded(found, rows, self.length)
        return {"tokens": tokens, "labels": found["labels"][rows], "lengths": lengths.astype(np.int16)}
