"""Rows of unequal lengths as one tensor, in few shapes: a GPU's kernels are chosen, compiled and captured by shape."""

from collections.abc import Sequence

from torch import Tensor

LENGTHS = 8  # that batches of one data set come in
UNIT = 16  # what a length is a multiple of, unless that is much of it: kernels have a faster form for those


def pad(rows: Sequence[Tensor], longest: int, lengths: int = LENGTHS) -> Tensor:
    """[B, T, ...] of rows [t, ...] with zeros behind.

    T is the least of `lengths` even steps that holds all of them; the last step holds `longest`, the longest row that
    any batch may have.
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
