"""Positions as vectors: computed waves, learned tables, rows and columns.

Every kind maps positions, [T] or a row at a time [B, T], to vectors [..., width], so that a step at position p and a
whole sequence get the same numbers. Rotary positions are not here: they live inside the mixers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def sinusoid(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """sin and cos of p / 10000^(2j/width), interleaved: Vaswani et al. 2017, arXiv:1706.03762, §3.5."""
    # a 16-bit angle would be off by whole turns at a few thousand positions
    exact = torch.promote_types(dtype, torch.float32)
    rates = 10000 ** -(torch.arange(0, width, 2, device=positions.device, dtype=exact) / width)
    angle = positions.to(exact)[..., None] * rates
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :width].to(dtype)


class Sinusoidal(nn.Module):
    """Waves; any length."""

    limit: int | None = None

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return sinusoid(positions, self.width, dtype)


class Grid(nn.Module):
    """The sum of one learned vector per axis: position p of a (rows, columns, channels) grid read in order.

    With one axis this is the learned position embedding. If it starts as waves, each axis in its own part of the
    vector, then "one row up" is the same rotation everywhere and need not be learned place by place.
    """

    def __init__(self, shape: Sequence[int], width: int, waves: bool = False):
        super().__init__()
        self.shape = tuple(shape)
        self.limit: int | None = math.prod(self.shape)
        self.scale = math.sqrt(width)  # as for tokens: small weights that learn fast, unit-size vectors
        tables = _waves(self.shape, width) if waves else _noise(self.shape, width)
        self.tables = nn.ParameterList(nn.Parameter(table / self.scale) for table in tables)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        rows, *others = self.tables
        total: Tensor | float = 0.0
        for table in reversed(others):
            total = total + nn.functional.embedding(positions % table.shape[0], table)
            positions = positions // table.shape[0]
        # the rest is the row; beyond the last row the lookup fails, as it should
        return ((total + nn.functional.embedding(positions, rows)) * self.scale).to(dtype)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


def _noise(shape: Sequence[int], width: int) -> list[Tensor]:
    return [torch.randn(size, width) / math.sqrt(len(shape)) for size in shape]


def _waves(shape: Sequence[int], width: int) -> list[Tensor]:
    """For each axis [size, width]: waves from a period of four places to one of twice the axis, zero beside them."""
    tables, pairs = [], width // (2 * len(shape))
    for axis, size in enumerate(shape):
        rates = math.pi / torch.logspace(1, math.log2(max(size, 2)), pairs, base=2)
        angle = torch.arange(size)[:, None] * rates
        table = torch.zeros(size, width)
        table[:, 2 * pairs * axis : 2 * pairs * (axis + 1)] = math.sqrt(2) * torch.cat((angle.sin(), angle.cos()), 1)
        tables.append(table)
    return tables
