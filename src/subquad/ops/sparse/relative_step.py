"""One token over the newest keys, with scores of their distances: a decoding step of Transformer-XL.

The key at distance d, from 0, the token itself, to `back`, has the score (q + u)·k + (q + w)·far[back - d]. The keys
and values of the last `back` tokens are in a ring: position j is in slot j mod back.
"""

from functools import lru_cache

import torch
from torch import Tensor

from subquad.ops.impl import Impl, choose
from subquad.ops.sparse.cache import fused_step, unfit
from subquad.ops.sparse.reads import Head, Reads

Bias = tuple[Tensor, Tensor, Tensor]  # u and w [H, K], far [back + 1, H, K]


def relative_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    bias: Bias,
    scale: float,
    impl: Impl = "auto",
    moves: bool = True,
) -> Tensor:
    """q, k [B, H, K], v [B, H, V], a ring [B, back, H, ·], position [B] -> o [B, H, V], without gradients.

    It writes the token into the ring and, if it `moves`, adds 1 to the position.
    """
    if choose(impl, "relative_step", q, unfit(q, keys, values, position)) == "triton":
        u, w, far = (t.contiguous() for t in bias)
        return fused_step(q, k, v, keys, values, position, _reads(keys.shape[1]), scale, moves, None, None, u, w, far)
    u, w, far = bias
    back, rows = keys.shape[1], torch.arange(len(q), device=q.device)
    slots = torch.arange(back, device=q.device)
    distance = (position[:, None] - 1 - slots) % back + 1  # of the key in each slot, [B, back]
    content = torch.einsum("bhk,bshk->bhs", q + u, keys.to(q.dtype))
    offsets = torch.einsum("bhk,dhk->bhd", q + w, far)
    placed = offsets.gather(-1, (back - distance)[:, None].expand(-1, q.shape[1], -1))
    scores = (content + placed).masked_fill((distance > position[:, None])[:, None], -torch.inf)
    own = ((q + u) * k).sum(-1) + offsets[..., -1]
    weights = (torch.cat((scores, own[..., None]), -1) * scale).softmax(-1)
    o = torch.einsum("bhs,bshv->bhv", weights[..., :-1], values.to(q.dtype)) + weights[..., -1:] * v
    for ring, new in ((keys, k), (values, v)):
        ring.index_put_((rows, position % back), new.to(ring.dtype))
    if moves:
        position.add_(1)
    return o


@lru_cache(maxsize=64)
def _reads(back: int) -> str:
    return str(Reads(False, 0, back, 1, 0, (Head(before=back),)))
