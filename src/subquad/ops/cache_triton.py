"""The Triton path of `cache.cached_attention`: one pass over the entries of a cache, in splits if there are few rows.

Legend: B batch, C capacity, H heads, K key width, V value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, launch, tile_of

PROGRAMS = 1056  # about eight for each of an H200's 132 multiprocessors
BLOCK = 8192  # elements of the keys, and of the values, at a time
LOG2E = 1.4426950408889634
TWICE = tl.constexpr(2.8853900817779268)  # exp(2x) = exp2(TWICE·x)


@triton.jit
def decode(
    q, k, v, n, o, high, mass, weight,
    scale, H, qb, qh, kb, kc, kh, vb, vc, vh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    ADDITIVE: tl.constexpr,
):  # fmt: skip
    """One head of one row over one split of its keys: the running softmax of flash attention, in base 2.

    The score is q·k, or with ADDITIVE weight·tanh(q + k).
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = (row // H).to(tl.int64)
    h = (row % H).to(tl.int64)
    count = tl.load(n + b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(count, SPLITS), BC) * BC
    start = split * share
    end = tl.minimum(start + share, count)
    dk, dv, dc = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    query = tl.load(q + b * qb + h * qh + dk, mask=dk < K, other=0.0).to(tl.float32)
    if ADDITIVE:
        factor = tl.load(weight + h * K + dk, mask=dk < K, other=0.0).to(tl.float32) * scale
    else:
        query *= scale
    m = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BV,), tl.float32)
    k += b * kb + h * kh
    v += b * vb + h * vh
    for first in range(start, end, BC):
        at = first + dc
        there = at < end
        at = at.to(tl.int64)
        keys = tl.load(k + at[:, None] * kc + dk[None, :], mask=there[:, None] & (dk < K)[None, :], other=0.0)
        values = tl.load(v + at[:, None] * vc + dv[None, :], mask=there[:, None] & (dv < V)[None, :], other=0.0)
        if ADDITIVE:
            power = tl.exp2(tl.minimum((keys.to(tl.float32) + query[None, :]) * TWICE, 126.0))
            scores = tl.sum((1.0 - 2.0 / (1.0 + power)) * factor[None, :], 1)  # tanh
        else:
            scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
        scores = tl.where(there, scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 0))
        weights = tl.exp2(scores - new)
        fade = tl.exp2(m - new)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * values.to(tl.float32), 0)
        m = new
    out = (row.to(tl.int64) * SPLITS + split) * V
    if SPLITS == 1:
        tl.store(o + out + dv, (acc / total).to(o.dtype.element_ty), mask=dv < V)
    else:
        tl.store(o + out + dv, acc, mask=dv < V)
        tl.store(high + row * SPLITS + split, m)
        tl.store(mass + row * SPLITS + split, total)


def attend(q_t: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, score: Tensor | None = None) -> Tensor:
    """q_t [B, H, K], k [B, C, H, K], v [B, C, H, V], count [B], score [H, K] -> o [B, H, V]."""
    q_t, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_t, k, v))
    b, h, width_k = q_t.shape
    width_v = v.shape[-1]
    wide_k, wide_v = tile_of(width_k), tile_of(width_v)
    block = BLOCK // max(wide_k, wide_v)
    splits = 1
    while splits * b * h < PROGRAMS and splits * 4 * block < k.shape[1]:
        splits *= 2
    partial = splits > 1
    o = torch.empty(b, h, splits, width_v, device=q_t.device, dtype=torch.float32 if partial else q_t.dtype)
    high, mass = (torch.empty(b, h, splits, device=q_t.device) if partial else o for _ in range(2))
    numbers = (scale * LOG2E, h, *q_t.stride()[:2], *k.stride()[:3], *v.stride()[:3])
    constants = {"K": width_k, "V": width_v, "BK": wide_k, "BV": wide_v, "BC": block, "SPLITS": splits, "ADDITIVE": score is not None}
    weight = q_t if score is None else score.contiguous()
    launch(decode, (q_t, k, v, count, o, high, mass, weight), Plan((b * h, splits), numbers, constants, stages=3))
    if not partial:
        return o[:, :, 0]
    weights = torch.exp2(high - high.amax(-1, keepdim=True))  # an empty split has weight 0
    total = (weights * mass).sum(-1, keepdim=True)
    return ((weights[..., None] * o).sum(-2) / total).to(q_t.dtype)
