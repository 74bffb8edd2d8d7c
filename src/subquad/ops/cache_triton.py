"""The Triton path of `cache`: one pass over the entries of a cache, in splits if there are few rows.

Legend: B batch, C capacity, H heads of queries, G heads of keys and values, K key width, V value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.launch import EARLY, Plan, launch, tile_of
from subquad.ops.rotary import Turns
from subquad.ops.turned_triton import row_stride, turned

PROGRAMS = 1056  # about eight for each of an H200's 132 multiprocessors
BLOCK = 8192  # elements of the keys, and of the values, at a time
LOG2E = 1.4426950408889634
TWICE = tl.constexpr(2.8853900817779268)  # exp(2x) = exp2(TWICE·x)


@triton.jit
def decode(
    q, k, v, n, kn, vn, cos, sin, o, high, mass, weight,
    scale, C, H, qb, qh, kb, kc, kh, vb, vc, vh, xb, xh, wb, wh, tb,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    NEW: tl.constexpr, TURN: tl.constexpr, ADDITIVE: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row over one split of its keys: the running softmax of flash attention, in base 2.

    NEW: n is the position of the new key and value kn, vn. The first split counts them in and writes them there.
    The score is q·k, or with ADDITIVE, which takes no new key, weight·tanh(q + k).
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = (row // H).to(tl.int64)
    h = (row % H).to(tl.int64)
    dk, dv, dc = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    if NEW:
        count = tl.load(n + b)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if not NEW:  # the kernel before may have counted
        count = tl.load(n + b)
    count = tl.minimum(count, C).to(tl.int32)
    share = tl.cdiv(tl.cdiv(count, SPLITS), BC) * BC
    start = split * share
    end = tl.minimum(start + share, count)
    query = turned(q + b * qb + h * qh, cos + b * tb, sin + b * tb, dk, K, TURN).to(tl.float32)
    if ADDITIVE:
        factor = tl.load(weight + h * K + dk, mask=dk < K, other=0.0).to(tl.float32) * scale
    else:
        query *= scale
    m = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BV,), tl.float32)
    k += b * kb + (h // GROUP) * kh
    v += b * vb + (h // GROUP) * vh
    if NEW:
        key = turned(kn + b * xb + h * xh, cos + b * tb, sin + b * tb, dk, K, TURN)
        value = tl.load(vn + b * wb + h * wh + dv, mask=dv < V, other=0.0)
        if split == 0:
            at = count.to(tl.int64)
            tl.store(k + at * kc + dk, key, mask=(dk < K) & (count < C))
            tl.store(v + at * vc + dv, value, mask=(dv < V) & (count < C))
            m = tl.sum(key.to(tl.float32) * query, 0)
            total = tl.full((), 1.0, tl.float32)
            acc = value.to(tl.float32)
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


@triton.jit
def joined(parts, high, mass, row, V: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr):
    """The output of a row and head from its splits, [BV]; an empty split has weight 0."""
    n, dv = tl.arange(0, SPLITS), tl.arange(0, BV)
    m = tl.load(high + row * SPLITS + n)
    weights = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weights * tl.load(mass + row * SPLITS + n), 0)
    rows = (row * SPLITS + n) * V
    acc = tl.load(parts + rows[:, None] + dv[None, :], mask=(dv < V)[None, :], other=0.0)
    return tl.sum(weights[:, None] * acc, 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def gather(parts, high, mass, o, V: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """Join the splits of a head."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BV)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    y = joined(parts, high, mass, row, V, BV, SPLITS)
    tl.store(o + row * V + dv, y.to(o.dtype.element_ty), mask=dv < V)


def attend(
    q_t: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, new: tuple[Tensor, Tensor] | None = None,
    by: Turns | None = None, score: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q_t [B, H, K], k [B, C, G, K], v [B, C, G, V], count [B] -> o [B, H, V]; G divides H.

    score [H, K]: the weights of additive attention, in place of the dot product.
    new: a key [B, H, K] and a value [B, H, V], written to place `count` and attended to; then G is H. `by` turns q_t
    and that key.
    """
    q_t, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_t, k, v))
    b, h, width_k = q_t.shape
    width_v = v.shape[-1]
    wide_k, wide_v = tile_of(width_k), tile_of(width_v)
    block = BLOCK // max(wide_k, wide_v)
    splits = 1
    while splits * b * h < PROGRAMS and splits * 2 * block < k.shape[1]:
        splits *= 2
    partial = splits > 1
    o = torch.empty(b, h, splits, width_v, device=q_t.device, dtype=torch.float32 if partial else q_t.dtype)
    high, mass = (torch.empty(b, h, splits, device=q_t.device) if partial else o for _ in range(2))
    key, value = (q_t, q_t) if new is None else new
    cos, sin = (q_t, q_t) if by is None else by
    strides = [*q_t.stride()[:2], *k.stride()[:3], *v.stride()[:3], *key.stride()[:2], *value.stride()[:2]]
    numbers = (scale * LOG2E, k.shape[1], h, *strides, row_stride(None if by is None else cos))
    constants = {
        "K": width_k, "V": width_v, "BK": wide_k, "BV": wide_v, "BC": block, "SPLITS": splits, "NEW": new is not None,
        "TURN": by is not None, "ADDITIVE": score is not None, "GROUP": h // k.shape[2], "EARLY": EARLY,
    }  # fmt: skip
    plan = Plan((b * h, splits), numbers, constants, stages=3, early=EARLY)
    weight = q_t if score is None else score.contiguous()
    launch(decode, (q_t, k, v, count, key, value, cos, sin, o, high, mass, weight), plan)
    if not partial:
        return o[:, :, 0]
    y = q_t.new_empty(b, h, width_v)
    constants = {"V": width_v, "BV": wide_v, "SPLITS": splits, "EARLY": EARLY}
    launch(gather, (o, high, mass, y), Plan((b * h,), (), constants, warps=2, early=EARLY))
    return y
