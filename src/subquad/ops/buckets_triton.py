"""The Triton path of `buckets.step`: one token enters the lists of its buckets and reads their newest chunks.

One program for each row and head. It changes the cache and the lists in place.
"""

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, launch, tile_of
from subquad.ops.sparse.kernels import LOG2E

MEMBERS = 64  # of a list at a time


@triton.jit
def _reach(total, asked, bucket, at, lists, members_row, C: tl.constexpr):
    """Of the lists `at`: where the one that is read lies, whether the new token enters it, and the first and the end of
    the ranks in reach, without the new token."""
    want = tl.load(asked + at).to(tl.int64)
    own = tl.load(bucket + at).to(tl.int64)
    before = tl.load(total + at * lists + want).to(tl.int32)
    newest = (before + (want == own).to(tl.int32) + C - 1) // C - 1
    return at * members_row + want * (2 * C), want == own, tl.maximum((newest - 1) * C, 0), before


@triton.jit(do_not_specialize=["lists", "members_row"])
def step_kernel(
    q, k, v, keys, values, members, total, asked, bucket, position, o,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, keys_batch, keys_place, values_batch, values_place, lists,
    members_row, scale,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    b = (tl.program_id(0) // H).to(tl.int64)
    d = tl.arange(0, BD)
    here = d < D
    place = tl.load(position + b).to(tl.int64)
    query = tl.load(q + b * q_batch + h * q_head + d, mask=here, other=0.0).to(tl.float32) * scale
    key = tl.load(k + b * k_batch + h * k_head + d, mask=here, other=0.0)
    value = tl.load(v + b * v_batch + h * v_head + d, mask=here, other=0.0)
    keys += b * keys_batch + h * D
    values += b * values_batch + h * D
    tl.store(keys + place * keys_place + d, key.to(keys.dtype.element_ty), mask=here)
    tl.store(values + place * values_place + d, value.to(values.dtype.element_ty), mask=here)
    first = (b * H + h) * R
    m = tl.full((), float("-inf"), tl.float32)
    z = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    itself = place < 0
    for r in tl.range(0, R):
        mine, same, lo, hi = _reach(total, asked, bucket, first + r, lists, members_row, C)
        itself = itself | same
        for f in tl.range(lo, hi, BN):
            rank = f + tl.arange(0, BN)
            p = tl.load(members + mine + rank % (2 * C), mask=rank < hi, other=-1)
            ok = p >= 0
            for e in tl.range(0, r):  # those that an earlier round sees as well
                other, _, start, stop = _reach(total, asked, bucket, first + e, lists, members_row, C)
                for g in tl.range(start, stop, BN):
                    rank = g + tl.arange(0, BN)
                    x = tl.load(members + other + rank % (2 * C), mask=rank < stop, other=-2)
                    ok = ok & (tl.max((p[:, None] == x[None, :]).to(tl.int32), 1) == 0)
            at = tl.maximum(p, 0).to(tl.int64)[:, None]
            there = ok[:, None] & here[None, :]
            kt = tl.load(keys + at * keys_place + d[None, :], mask=there, other=0.0).to(tl.float32)
            vt = tl.load(values + at * values_place + d[None, :], mask=there, other=0.0).to(tl.float32)
            s = tl.where(ok, tl.sum(kt * query[None, :], 1), float("-inf"))
            top = tl.maximum(m, tl.max(s, 0))
            base = tl.where(top == float("-inf"), 0.0, top)
            w = tl.exp2(s - base)
            fade = tl.exp2(m - base)
            z = z * fade + tl.sum(w, 0)
            acc = acc * fade + tl.sum(w[:, None] * vt, 0)
            m = top
    if APART:
        alone = z == 0
        acc = tl.where(alone, value.to(tl.float32), acc)
        z = tl.where(alone, 1.0, z)
    else:
        s = tl.where(itself, tl.sum(key.to(tl.float32) * query, 0), float("-inf"))
        top = tl.maximum(m, s)
        base = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(s - base)
        fade = tl.exp2(m - base)
        z = z * fade + w
        acc = acc * fade + w * value.to(tl.float32)
    tl.store(o + (b * H + h) * D + d, (acc / tl.where(z > 0, z, 1.0)).to(o.dtype.element_ty), mask=here)
    tl.debug_barrier()  # all have read the lists
    for r in tl.range(0, R):
        own = tl.load(bucket + first + r).to(tl.int64)
        rank = tl.load(total + (first + r) * lists + own)
        tl.debug_barrier()
        at = (first + r) * members_row + own * (2 * C) + rank % (2 * C)
        tl.store(members + at, place.to(members.dtype.element_ty))
        tl.store(total + (first + r) * lists + own, rank + 1)


def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, members: Tensor, total: Tensor, asked: Tensor,
    bucket: Tensor, position: Tensor, scale: float, apart: bool,
) -> Tensor:  # fmt: skip
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, width = q.shape
    rounds = bucket.shape[2]
    o = q.new_empty(batch, heads, width)
    lists, both = members.shape[-2:]  # `admit` leaves a gap after the lists of a round
    numbers = (
        *(n for x in (q, k, v) for n in x.stride()[:2]), *keys.stride()[:2], *values.stride()[:2], lists,
        members.stride(1) // rounds, scale * LOG2E.value,
    )  # fmt: skip
    wide = tile_of(width)
    block = max(16, min(MEMBERS, tile_of(both), 4096 // wide))
    constants = {"H": heads, "R": rounds, "C": both // 2, "APART": apart, "D": width, "BD": wide, "BN": block}
    tensors = (q, k, v, keys, values, members, total, asked.contiguous(), bucket.contiguous(), position, o)
    launch(step_kernel, tensors, Plan((batch * heads,), numbers, constants, warps=4, stages=2))
    return o
