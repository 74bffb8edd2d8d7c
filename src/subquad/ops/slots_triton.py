"""The Triton path of slots.py: one program writes one head of the new key, or value, of one row.

Legend: B batch, C slots, H heads, K head width, S stride.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.launch import EARLY, Plan, launch, tile_of
from subquad.ops.rotary import Turns
from subquad.ops.slots import Convolution, Slots
from subquad.ops.sparse.cache_triton import arrive, seen
from subquad.ops.turned_triton import row_stride

WEIGHTS = 4096  # of one token of a slot, at a time


@triton.jit
def convolved(
    last, x, weight, bias, do, ls, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Some outputs `do` of the convolution over the tokens in `last` and x, in float32."""
    dk = tl.arange(0, BK)
    inside = (do < K)[:, None] & (dk < K)[None, :]
    acc = tl.load(bias + do, mask=do < K, other=0.0).to(tl.float32)
    for i in range(S):
        token = tl.load(last + i * ls + dk, mask=(dk < K) & (i < S - 1), other=0.0).to(tl.float32)
        token = tl.where(i < S - 1, token, x.to(tl.float32))
        w = tl.load(weight + (do[:, None] * K + dk[None, :]) * S + i, mask=inside, other=0.0)
        acc += tl.sum(w.to(tl.float32) * token[None, :], 1)
    return acc


@triton.jit
def write(
    new, slots, last, weight, bias, empty, cos, sin, p, C, ss, ls,
    S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, EMPTY: tl.constexpr, ZERO: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """One head of one row: the slot that the token finishes, or the token. EMPTY: fill the first slot until then."""
    dk = tl.arange(0, BK)
    x = tl.load(new + dk, mask=dk < K, other=0.0)
    slot = p // S
    if p % S == S - 1:
        for first in range(0, K, BO):
            do = first + tl.arange(0, BO)
            y = convolved(last, x, weight, bias, do, ls, S, K, BK)
            if TURN:
                half: tl.constexpr = K // 2
                other = tl.where(do < half, do + half, do - half)
                z = convolved(last, x, weight, bias, other, ls, S, K, BK)
                pair = tl.minimum(do, other)
                c = tl.load(cos + pair, mask=do < K, other=0.0)
                s = tl.load(sin + pair, mask=do < K, other=0.0)
                y = y * c + z * tl.where(do < half, -s, s)
            at = slots + slot.to(tl.int64) * ss + do
            tl.store(at, y.to(slots.dtype.element_ty), mask=(do < K) & (slot < C))
    else:
        tl.store(last + (p % S) * ls + dk, x.to(last.dtype.element_ty), mask=dk < K)
        if EMPTY:
            value = tl.load(empty + dk, mask=(dk < K) & (not ZERO), other=0.0)
            tl.store(slots + dk, value.to(slots.dtype.element_ty), mask=(dk < K) & (slot == 0))


@triton.jit(do_not_specialize=["C"])
def step(
    k, v, keys, last_k, values, last_v, position, key_weight, key_bias, value_weight, value_bias, nothing, cos, sin,
    count,
    H, C, kb, kh, vb, vh, ksb, kss, ksh, vsb, vss, vsh, klb, kls, klh, vlb, vls, vlh, tb,
    S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, EMPTY: tl.constexpr, TURN: tl.constexpr,
    MOVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    p = seen(position, b)
    w = h * K * K * S
    if tl.program_id(1) == 0:
        write(
            k + b * kb + h * kh, keys + b * ksb + h * ksh, last_k + b * klb + h * klh, key_weight + w,
            key_bias + h * K, nothing, cos + b * tb, sin + b * tb, p, C, kss, kls, S, K, BK, BO, EMPTY, True, TURN,
        )  # fmt: skip
        tl.store(count + b, tl.maximum((p + 1) // S, 1).to(tl.int64))  # the same number for all heads
    else:
        write(
            v + b * vb + h * vh, values + b * vsb + h * vsh, last_v + b * vlb + h * vlh, value_weight + w,
            value_bias + h * K, nothing + h * K, cos, sin, p, C, vss, vls, S, K, BK, BO, EMPTY, False, False,
        )  # fmt: skip
    if MOVES:
        arrive(position, b, 2 * H)


def step_(
    k: Tensor,
    v: Tensor,
    keys: Slots,
    values: Slots,
    position: Tensor,
    key: Convolution,
    value: Convolution,
    nothing: Tensor | None,
    moves: bool,
    by: Turns | None,
) -> Tensor:
    """As `slots.slots_step`."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    key, value = (Convolution(*(t.contiguous() for t in conv)) for conv in (key, value))
    b, h, width = k.shape
    count = torch.empty_like(position)
    empty = key.bias if nothing is None else nothing.contiguous()
    tensors = (k, v, *keys, *values, position, *key, *value, empty, *(by or (k, k)), count)
    strides = (*k.stride()[:2], *v.stride()[:2])
    strides += tuple(n for t in (keys.slots, values.slots, keys.last, values.last) for n in t.stride()[:3])
    strides += (row_stride(None if by is None else by.cos),)
    wide = tile_of(width)
    constants = {"S": key.weight.shape[2], "K": width, "BK": wide, "BO": min(wide, WEIGHTS // wide)}
    constants |= {"EMPTY": nothing is not None, "TURN": by is not None, "MOVES": moves, "EARLY": EARLY}
    plan = Plan((b * h, 2), (h, keys.slots.shape[1], *strides), constants, early=EARLY)
    launch(step, tensors, plan)
    return count
