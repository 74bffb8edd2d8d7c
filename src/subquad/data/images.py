"""Images as sequences of bytes, all of a set in one tensor, so that a batch is one index."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    pixels: Tensor  # [N, T] uint8, row by row, the channels of a pixel beside each other; may be memory-mapped
    labels: Tensor  # [N] int64; -1 where a set has none
    shape: tuple[int, ...]  # of one: (28, 28), (32, 32, 3)

    def part(self, rows: slice) -> "Images":
        return Images(self.pixels[rows], self.labels[rows], self.shape)


def hold_out(training: Images, count: int) -> tuple[Images, Images]:
    """(training, validation): the last `count` images become the validation part."""
    if not 0 < count < len(training.labels):
        raise ValueError(f"count={count} cannot work: accepted is 1 to {len(training.labels) - 1}")
    return training.part(slice(None, -count)), training.part(slice(-count, None))


@dataclass(frozen=True)
class Pixels:
    """A source of images: {"pixels": [B, T] uint8, "labels": [B] int64}."""

    images: Images

    def __len__(self) -> int:
        return len(self.images.labels)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        return {"pixels": self.images.pixels[rows], "labels": self.images.labels[rows]}
