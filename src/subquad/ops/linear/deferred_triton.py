"""The kernel of `deferred`: one head of one row a program.

Legend: B batch, H heads, K key width, V value width, GROUP tokens between two writes of S.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.launch import EARLY, Plan, launch, tile_of
from subquad.ops.linear.deferred import GROUP
from subquad.ops.linear.maps_triton import phi
from subquad.ops.linear.spec import Spec
from subquad.ops.turned_triton import row_stride, turned

TILE = 1024  # numbers of S a warp holds: with fewer, what concerns the whole head is computed by more warps than needed


@triton.jit
def _once(x):
    """x [N] itself, fenced: else the compiler computes φ again wherever it wants x in another layout."""
    return tl.sum(x[None, :], 0)


@triton.jit
def kernel(
    q, k, v, s, z, keys, values, start, position, cos, sin, o, eps,
    H: tl.constexpr, qb: tl.constexpr, qh: tl.constexpr, kb: tl.constexpr, kh: tl.constexpr, vb: tl.constexpr,
    vh: tl.constexpr, sb: tl.constexpr, sh: tl.constexpr, zb: tl.constexpr, zh: tl.constexpr, wb: tl.constexpr,
    wn: tl.constexpr, wh: tl.constexpr, xb: tl.constexpr, xn: tl.constexpr, xh: tl.constexpr, tb: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """o = φ(q)(S + Σ φ(kⱼ)vⱼᵀ) / (φ(q)z + Σ φ(q)φ(kⱼ)) over the tokens that wait and this one, the last.

    S is loaded before anything is waited for, as [BK/GROUP, GROUP, BV]: its rows add up within a thread to the shape
    of the queue, and what is left is summed across threads once. The last token of a group adds all of them to S and z.
    """
    pid = tl.program_id(0)
    b = (pid // H).to(tl.int64)
    h = pid % H
    dk, dn, cols = tl.arange(0, BK), tl.arange(0, GROUP), tl.arange(0, BV)
    rows = tl.arange(0, BK // GROUP)[:, None] * GROUP + dn[None, :]  # [BK/GROUP, GROUP]: 0 to BK
    s += b * sb + h * sh
    z += b * zb + h * zh
    k += b * kb + h * kh
    v += b * vb + h * vh
    keys += b * wb + h * wh
    values += b * xb + h * xh
    x = tl.load(s + rows[:, :, None] * V + cols[None, None, :], mask=(rows < K)[:, :, None] & (cols < V), other=0.0)
    zx = tl.load(z + dk, mask=dk < K, other=0.0)
    n = ((tl.load(position + b) - tl.load(start + b)) & (GROUP - 1)).to(tl.int32)
    held = (dn < GROUP - 1)[:, None]
    waiting = tl.load(keys + dn[:, None] * wn + dk[None, :], mask=held & (dk < K)[None, :], other=0.0)
    theirs = tl.load(values + dn[:, None] * xn + cols[None, :], mask=held & (cols < V)[None, :], other=0.0)
    if EARLY:  # q, k and v come from the kernel before; nothing else does
        gdc_wait()
        gdc_launch_dependents()
    qx = turned(q + b * qb + h * qh, cos + b * tb, sin + b * tb, dk, K, TURN)
    qf = phi(qx.to(tl.float32), MAP)
    qf = _once(qf if K == BK else tl.where(dk < K, qf, 0.0))
    new = turned(k, cos + b * tb, sin + b * tb, dk, K, TURN)
    waiting = tl.where(dn[:, None] < n, waiting, new[None, :])
    scores = tl.where(dn <= n, tl.sum(phi(waiting.to(tl.float32), MAP) * qf[None, :], 1), 0.0)  # [GROUP]
    d = tl.sum(qf * zx, 0) + tl.sum(scores, 0)
    if NORM:
        if SIGNED:
            d = tl.where(d < 0.0, -tl.maximum(-d, eps), tl.maximum(d, eps))
        else:
            d = d + eps
    if n < GROUP - 1:
        tl.store(keys + n * wn + dk, new, mask=dk < K)
    else:
        for j in tl.static_range(GROUP - 1):
            zx += phi(tl.load(keys + j * wn + dk, mask=dk < K, other=0.0).to(tl.float32), MAP)
        zx += phi(new.to(tl.float32), MAP)
        tl.store(z + dk, zx, mask=dk < K)
    spread = tl.reshape(qf, (BK // GROUP, GROUP))
    for v0 in tl.static_range(0, V, BV):
        dv = v0 + cols
        if v0 > 0:
            theirs = tl.load(values + dn[:, None] * xn + dv[None, :], mask=held & (dv < V)[None, :], other=0.0)
        mine = tl.load(v + dv, mask=dv < V, other=0.0)
        added = tl.where(dn[:, None] < n, theirs, mine[None, :]).to(tl.float32)  # from n on, scores are 0 but for n
        y = tl.sum(tl.sum(spread[:, :, None] * x, 0) + scores[:, None] * added, 0)
        if NORM:
            y = y / d
        tl.store(o + (b * H + h) * V + dv, y.to(o.dtype.element_ty), mask=dv < V)
        if n < GROUP - 1:
            tl.store(values + n * xn + dv, mine, mask=dv < V)
        else:
            for j in tl.static_range(GROUP):
                kj = (tl.load(keys + j * wn + dk, mask=dk < K, other=0.0) if j < GROUP - 1 else new).to(tl.float32)
                vj = tl.load((values + j * xn if j < GROUP - 1 else v) + dv, mask=dv < V, other=0.0).to(tl.float32)
                x += tl.reshape(_once(phi(kj, MAP)), (BK // GROUP, GROUP))[:, :, None] * vj[None, None, :]
            tile = s + rows[:, :, None] * V + dv[None, None, :]
            tl.store(tile, x, mask=(rows < K)[:, :, None] & (dv < V)[None, None, :])
        if v0 + BV < V:
            ahead = (dv + BV)[None, None, :]
            x = tl.load(s + rows[:, :, None] * V + ahead, mask=(rows < K)[:, :, None] & (ahead < V), other=0.0)


# known when it is compiled, which saves a hundred instructions of address arithmetic
STRIDES = ("H", *(x + d for x in "qkvsz" for d in "bh"), *(x + d for x in "wx" for d in "bnh"), "tb")


def warps(block_k: int, block_v: int) -> int:
    return max(1, block_k * block_v // TILE)


def step(tensors: tuple[Any, ...], spec: Spec) -> Tensor:
    """o of one token for every row and head, from the tensors before o in the kernel's arguments.

    keys and values are None without a queue: s and z are then written at once. So are cos and sin without turns.
    """
    q, k, v, s, z, keys, values, start, position, cos, sin = tensors
    if not (s[0, 0].is_contiguous() and z.stride(-1) == 1 and s.dtype == torch.float32):
        raise ValueError(f"s is {s.dtype} with strides {s.stride()}: accepted is float32, K and V contiguous")
    b, h, width_k = q.shape
    width_v = v.shape[2]
    block_k = tile_of(width_k)
    block_v = min(tile_of(width_v), max(16, 4096 // block_k))
    o = q.new_empty(v.shape)
    strides = [d for x in (q, k, v, s, z) for d in x.stride()[:2]]
    strides += [0 if x is None else x.stride(d) for x in (keys, values) for d in range(3)]
    constants = {
        **dict(zip(STRIDES, (h, *strides, row_stride(cos)), strict=True)),
        "K": width_k, "V": width_v, "BK": block_k, "BV": block_v, "GROUP": 1 if keys is None else GROUP,
        "MAP": spec.feature_map, "SIGNED": spec.signed, "NORM": spec.normalize, "TURN": cos is not None,
        "EARLY": EARLY,
    }  # fmt: skip
    plan = Plan((b * h,), (spec.eps,), constants, warps(block_k, block_v), early=EARLY)
    others = (k if keys is None else keys, v if values is None else values, start, position)
    launch(kernel, (q, k, v, s, z, *others, q if cos is None else cos, q if sin is None else sin, o), plan)
    return o
