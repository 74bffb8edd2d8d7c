"""Prefix joins: from a result for each block, the joined result of all blocks up to it, in linear time."""

from collections.abc import Callable

import torch
from torch import Tensor

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
