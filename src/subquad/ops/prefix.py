"""Running results in blocks, in linear time: a plain scan over a few long rows leaves most of a GPU idle."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.lengths import first as first_entries
from subquad.ops.lengths import padding

SUM_BLOCK = 64
MAX_BLOCK = 128
Pair = tuple[Tensor, Tensor]


def join_softmax(a: Pair, b: Pair) -> Pair:
    """Attention over two sets of keys, each (log-sum-exp [..., 1], output [..., V]), joined to attention over both."""
    mass = torch.logaddexp(a[0], b[0])
    return mass, torch.lerp(a[1], b[1], (b[0] - mass).exp().expand_as(b[1]))


def join_top(a: Pair, b: Pair) -> Pair:
    """The best of two lists of (scores, keys)."""
    score, order = torch.cat((a[0], b[0]), dim=-1).topk(a[0].shape[-1], dim=-1)
    return score, torch.cat((a[1], b[1]), dim=-1).gather(-1, order)


def prefix(items: Pair, join: Callable[[Pair, Pair], Pair]) -> Pair:
    """Join each block [..., N, ·] with all before it, in about 2N joins: pairs of neighbours, then recursion."""
    blocks = items[0].shape[-2]
    if blocks == 1:
        return items
    (a, b), (c, d) = ((t[..., : blocks - 1 : 2, :], t[..., 1::2, :]) for t in items)
    odd = prefix(join((a, c), (b, d)), join)  # up to blocks 1, 3, 5, ...
    until = (blocks - 1) // 2
    (a, b), (c, d) = (t[..., :until, :] for t in odd), (t[..., 2::2, :] for t in items)
    even = join((a, b), (c, d))  # up to blocks 2, 4, 6, ...
    order = torch.arange(blocks, device=items[0].device)
    order = torch.where(order % 2 == 0, order // 2, order // 2 + until + 1)
    first, second = (
        torch.cat((t[..., :1, :], e, o), dim=-2).index_select(-2, order)
        for t, e, o in zip(items, even, odd, strict=True)
    )
    return first, second


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
    return first_entries(torch.maximum(within, before[..., None]).flatten(-2), x.shape[-1], -1)
