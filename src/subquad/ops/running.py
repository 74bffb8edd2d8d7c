"""Running sums and maxima, computed in blocks: a plain scan over a few long rows leaves most of a GPU idle."""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.lengths import first, padding

SUM_BLOCK = 64
MAX_BLOCK = 128


def running_sum(x: Tensor, start: Tensor) -> Tensor:
    """start + Σ_{s<=t} x_s: x [B, T, D], start [B, D] -> [B, T, D].

    The sums within a block are a product with a triangle of ones; the sums of blocks are added up in the same way.
    """
    batch, length, width = x.shape
    size = min(SUM_BLOCK, length)
    blocks = F.pad(x, (0, 0, 0, -length % size)) if length % size else x
    blocks = blocks.unflatten(1, (-1, size))  # [B, N, C, D]
    before = start[:, None]
    if length > size:
        before = torch.cat((before, running_sum(blocks[:, :-1].sum(2), start)), dim=1)  # [B, N, D]
    ones = x.new_ones(size, size).tril().expand(batch * blocks.shape[1], -1, -1)
    within = torch.bmm(ones, blocks.flatten(0, 1)).view_as(blocks)
    return (within + before[:, :, None]).view(batch, -1, width)[:, :length]


def running_max(x: Tensor) -> Tensor:
    """The same numbers as x.cummax(-1).values: [..., T] -> [..., T]."""
    blocks = F.pad(x, (0, padding(x.shape[-1], MAX_BLOCK)), value=-torch.inf).unflatten(-1, (-1, MAX_BLOCK))
    within = blocks.cummax(-1).values
    before = F.pad(within[..., -1].cummax(-1).values, (1, -1), value=-torch.inf)
    return first(torch.maximum(within, before[..., None]).flatten(-2), x.shape[-1], -1)
