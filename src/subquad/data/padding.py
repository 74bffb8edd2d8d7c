"""Rows of unequal lengths as one array. There are few shapes, as kernels are chosen, compiled and captured by shape."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

LENGTHS = 8  # number of different lengths that batches of a data set have
UNIT = 16  # longer lengths are multiples of this, for which kernels are faster


def pad(rows: Sequence[Tensor], longest: int, lengths: int = LENGTHS) -> Tensor:
    """Rows [t, ...] as [B, T, ...], padded with zeros.

    T is the smallest of `lengths` even steps up to `longest`, the longest row of the data set, that fits all rows.
    """
    size = padded_length(max(map(len, rows)), longest, lengths)
    made = rows[0].new_zeros(len(rows), size, *rows[0].shape[1:])
    for row, part in zip(made, rows, strict=True):
        row[: len(part)] = part
    return made


def padded_length(size: int, longest: int, lengths: int = LENGTHS) -> int:
    step = max(1, -(-longest // lengths))
    step = step if step < UNIT else -(-step // UNIT) * UNIT
    return max(1, -(-size // step)) * step


def first_bytes(texts: Mapping[str, np.ndarray], rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(the first `length` bytes of some texts [B, length], padded with zeros; the number of bytes of each text [B])

    Text i is texts["text"][starts[i] : starts[i + 1]].
    """
    first, end = texts["starts"][rows], texts["starts"][rows + 1]
    lengths = np.minimum(end - first, length).astype(np.int64)
    at = np.arange(length)
    inside = at < lengths[:, None]
    return np.where(inside, texts["text"][np.where(inside, first[:, None] + at, 0)], 0).astype(np.uint8), lengths
