"""Exact softmax attention in memory that does not grow with T·S."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.ops.lengths import symbolic

PAIRS = 1 << 20  # weights alive at once, if torch would make all of them
ROWS = 512  # queries at a time against a cache, which keeps the mask of a long prompt small


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q·k·scale) v: q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> [B, T, H, V].

    mask [B, 1, 1 or T, S] is True where a query may read. causal replaces a mask: query t reads keys up to t.
    torch's attention needs little memory, except on a CPU with dropout, where it makes every weight. There we compute
    some queries at a time, and compute their weights again in backward.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, K]
    size, keys = q.shape[2], k.shape[2]
    whole = not dropout or q.device.type != "cpu" or symbolic(*q.shape, keys)
    rows = size if whole else max(1, PAIRS // max(1, q.shape[0] * q.shape[1] * keys))
    if rows >= size:
        o = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal, scale=scale)
        return o.transpose(1, 2)

    def attend(part: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(part, k, v, seen, dropout_p=dropout, scale=scale)

    parts = []
    for start in range(0, size, rows):
        part, seen = q[:, :, start : start + rows], mask
        if causal:
            at = torch.arange(start, start + part.shape[2], device=q.device)[:, None]
            seen = torch.arange(keys, device=q.device) <= at  # [T, S]
        elif mask is not None and mask.shape[-2] > 1:
            seen = mask[..., start : start + rows, :]
        parts.append(checkpoint(attend, part, k, v, seen, use_reentrant=False))
    return torch.cat(parts, dim=2).transpose(1, 2)


def counted_attention(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Attention to a cache: query t sees the first counts[b, t] >= 1 of the keys; counts [B or 1, T].

    q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]. G divides H: with grouped queries each key head
    serves H/G query heads, one after the other.
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    if H != G:  # the queries of a group are like more tokens, so that no key is copied
        q = q.unflatten(2, (G, -1)).transpose(2, 3).flatten(1, 2)  # [B, T·H/G, G, K]
        o = counted_attention(q, k, v, counts.repeat_interleave(H // G, 1), scale=scale, dropout=dropout)
        return o.unflatten(1, (T, -1)).transpose(2, 3).flatten(2, 3)
    slots, k, v = torch.arange(k.shape[1], device=q.device), k.to(q.dtype), v.to(q.dtype)

    def attend(q: Tensor, counts: Tensor) -> Tensor:
        return dense_attention(q, k, v, slots < counts[:, None, :, None], scale=scale, dropout=dropout)

    if symbolic(q.shape[1]):
        return attend(q, counts)
    starts = range(0, q.shape[1], ROWS)
    return torch.cat([attend(q[:, n : n + ROWS], counts[:, n : n + ROWS]) for n in starts], dim=1)


def hide_future(scores: Tensor) -> Tensor:
    """The scores [..., T, S], with -inf where s > t."""
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
