"""The kernels of `convolve`: a block of tokens is a product of a banded matrix with the tokens around it.

Legend: C tokens of a block, N blocks; tap j of a kernel reads the token j - HALF further on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch

CHUNK = 64
PROGRAMS = 1056  # of the kernels' gradient
_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,  # the interpreter has no bfloat16 dot
    torch.float32: tl.float32,
}


@triton.jit
def _around(v, t, T, VT: tl.constexpr, v0, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """Rows t .. t + C of values, zeros before the first token and after the last; t may be negative."""
    at = t + tl.arange(0, C)
    cv = v0 + tl.arange(0, BV)
    there = ((at >= 0) & (at < T))[:, None] & (cv < V)[None, :]
    return tl.load(v + at.to(tl.int64)[:, None] * VT + cv[None, :], mask=there, other=0.0)


@triton.jit
def banded(
    v, w, o, T, N, vb, vh,
    VT: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = (2 * C + WIDTH - 2) // C
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    t = pid // NV % N * C
    bh = pid // NV // N
    b = (bh // H).to(tl.int64)
    h = bh % H
    v += b * vb + h.to(tl.int64) * vh
    i = tl.arange(0, C)
    y = tl.zeros([C, BV], tl.float32)
    for block in tl.static_range(BLOCKS):
        tap = block * C + i[None, :] - i[:, None]
        band = tl.load(w + h * WIDTH + tap, mask=(tap >= 0) & (tap < WIDTH), other=0.0).to(DOT)
        x = _around(v, t - WIDTH // 2 + block * C, T, VT, v0, V, C, BV).to(DOT)
        y += tl.dot(band, x, input_precision="tf32x3", out_dtype=tl.float32)
    cv = v0 + tl.arange(0, BV)
    to = o + (b * T * H + h) * V + (t + i).to(tl.int64)[:, None] * (H * V) + cv[None, :]
    if o.dtype.element_ty == tl.float16:
        y = tl.minimum(tl.maximum(y, -65504.0), 65504.0)
    tl.store(to, y.to(o.dtype.element_ty), mask=(t + i < T)[:, None] & (cv < V)[None, :])


@triton.jit
def taps(
    do, v, parts, T, N, PER, SEGMENTS, ob, oh, vb, vh,
    OT: tl.constexpr, VT: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Of PER blocks of tokens, what one block of their surroundings adds to the gradient of a kernel."""
    BLOCKS: tl.constexpr = (2 * C + WIDTH - 2) // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    segment = pid // BLOCKS % SEGMENTS
    bh = pid // BLOCKS // SEGMENTS
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    do += b * ob + h * oh
    v += b * vb + h * vh
    i = tl.arange(0, C)
    g = tl.zeros([C, C], tl.float32)
    begin = segment * PER
    for n in range(begin, tl.minimum(begin + PER, N)):
        for v0 in range(0, V, BV):
            x = _around(v, n * C - WIDTH // 2 + block * C, T, VT, v0, V, C, BV).to(DOT)
            y = _around(do, n * C, T, OT, v0, V, C, BV).to(DOT)
            g += tl.dot(y, tl.trans(x), input_precision="tf32x3", out_dtype=tl.float32)
    tap = block * C + i[None, :] - i[:, None]
    for j in range(WIDTH):
        tl.store(parts + pid * WIDTH + j, tl.sum(tl.sum(tl.where(tap == j, g, 0.0), 1), 0))


def _constants(v: Tensor, width: int) -> dict[str, Any]:
    block = 64 if v.shape[3] > 32 or v.element_size() == 2 else 32
    return {"V": v.shape[3], "H": v.shape[2], "C": CHUNK, "BV": block, "WIDTH": width, "DOT": _DOT[v.dtype]}


def convolve(v: Tensor, kernel: Tensor) -> Tensor:
    batch, length, heads, values = v.shape
    o = v.new_empty(v.shape)
    constants = {"VT": v.stride(1)} | _constants(v, kernel.shape[1])
    blocks = blocks_of(length, CHUNK)
    programs = batch * heads * blocks * blocks_of(values, constants["BV"])
    launch(banded, (v, kernel, o), Plan((programs,), (length, blocks, v.stride(0), v.stride(2)), constants))
    return o


def gradient(grad: Tensor, v: Tensor, width: int) -> Tensor:
    """The gradient of the kernels, [H, width] in float32."""
    batch, length, heads, _ = v.shape
    blocks, across = blocks_of(length, CHUNK), blocks_of(CHUNK + width - 1, CHUNK)
    segments = min(blocks, max(1, PROGRAMS // (batch * heads * across)))
    parts = v.new_empty((batch, heads, segments * across, width), dtype=torch.float32)
    constants = {"OT": grad.stride(1), "VT": v.stride(1)} | _constants(v, width)
    numbers = (length, blocks, blocks_of(blocks, segments), segments)
    strides = (grad.stride(0), grad.stride(2), v.stride(0), v.stride(2))
    plan = Plan((parts.numel() // width,), (*numbers, *strides), constants)
    launch(taps, (grad, v, parts), plan)
    return parts.sum((0, 2))
