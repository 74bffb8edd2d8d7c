"""The kernel of `feed_forward`: a program takes BM rows through both products, BF inner columns at a time.

It is like flash attention: the rows of W₁ are the keys, the columns of W₂ the values, the activation the softmax.

Legend: R rows, D width, F inner width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, multiprocessors, shared_memory

INNER, STAGES = 64, 3  # INNER is BF; fewer stages on a GPU with little shared memory
MANY, FEW = (128, 8), (64, 4)  # rows and warps of a program: few rows where each program then has a multiprocessor


@triton.jit
def _normed(h, g, c, eps, D: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr):
    """The norm of the rows of h [BM, D], float32."""
    d = tl.arange(0, D)
    if not RMS:
        h -= (tl.sum(h, 1) / D)[:, None]
    h *= tl.rsqrt(tl.sum(h * h, 1) / D + eps)[:, None]
    h *= tl.load(g + d).to(tl.float32)[None, :]
    if BIAS:
        h += tl.load(c + d).to(tl.float32)[None, :]
    return h


@triton.jit
def block(
    x, w1, b1, w2, b2, g, c, o, w0, b0, g0, c0, y, R, eps,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    GELU: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, PRE: tl.constexpr, MIX: tl.constexpr,
    AFTER: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """y = norm(x + W₂ act(W₁x + b₁) + b₂), or with PRE the norm before W₁.

    MIX: x is first x + W₀o + b₀, with AFTER normed by g0 and c0. It waits in y until it is added.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    f = tl.arange(0, BF)
    tile = r.to(tl.int64)[:, None] * D + d[None, :]
    there = (r < R)[:, None]
    h = tl.load(x + tile, mask=there, other=0.0)
    if MIX:
        acc = h.to(tl.float32) + tl.load(b0 + d).to(tl.float32)[None, :]
        for f0 in range(0, D, BF):
            part = tl.load(o + r.to(tl.int64)[:, None] * D + (f0 + f)[None, :], mask=there, other=0.0).to(DOT)
            third = tl.load(w0 + d[:, None] * D + (f0 + f)[None, :]).to(DOT)  # [D, BF]
            acc = tl.dot(part, tl.trans(third), acc)
        if AFTER:
            acc = _normed(acc, g0, c0, eps, D, RMS, BIAS)
        h = acc.to(x.dtype.element_ty)
        tl.store(y + tile, h, mask=there)
        tl.debug_barrier()  # other threads of this program read it
    if PRE:
        h = _normed(h.to(tl.float32), g, c, eps, D, RMS, BIAS)
    h = h.to(DOT)
    acc = tl.zeros((BM, D), tl.float32)
    for f0 in range(0, F, BF):
        first = tl.load(w1 + (f0 + f)[:, None] * D + d[None, :]).to(DOT)  # [BF, D]
        u = tl.dot(h, tl.trans(first)) + tl.load(b1 + f0 + f).to(tl.float32)[None, :]
        if GELU:
            u = 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))
        else:
            u = tl.maximum(u, 0.0)
        second = tl.load(w2 + d[:, None] * F + (f0 + f)[None, :]).to(DOT)  # [D, BF]
        acc = tl.dot(u.to(DOT), tl.trans(second), acc)
    acc += tl.load((y if MIX else x) + tile, mask=there, other=0.0).to(tl.float32)
    acc += tl.load(b2 + d).to(tl.float32)[None, :]
    if not PRE:
        acc = _normed(acc, g, c, eps, D, RMS, BIAS)
    tl.store(y + tile, acc.to(y.dtype.element_ty), mask=there)


def feed_forward(
    x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, weight: Tensor, bias: Tensor | None,
    o: Tensor | None, w_mix: Tensor | None, b_mix: Tensor | None, mix_weight: Tensor | None, mix_bias: Tensor | None,
    eps: float, activation: str, norm: str, pre: bool,
) -> Tensor:  # fmt: skip
    rows, width = x.shape
    y = torch.empty_like(x)
    size, warps = FEW if blocks_of(rows, FEW[0]) <= multiprocessors(x.device) else MANY
    stage = 2 * INNER * width * x.element_size()  # bytes of both weights
    stages = max(1, min(STAGES, shared_memory(x.device) // stage))
    half = tl.float16 if x.dtype is torch.float16 else tl.bfloat16
    constants = {
        "D": width, "F": w_in.shape[0], "BM": size, "BF": INNER, "GELU": activation == "gelu", "RMS": norm == "rms",
        "BIAS": bias is not None, "PRE": pre, "MIX": o is not None, "AFTER": mix_weight is not None,
        "DOT": tl.float32 if INTERPRETED else half,
    }  # fmt: skip
    more = (x if t is None else t.contiguous() for t in (o, w_mix, b_mix, mix_weight, mix_bias))
    tensors = (x, w_in, b_in, w_out, b_out, weight, weight if bias is None else bias, *more, y)
    launch(block, tensors, Plan((blocks_of(rows, size),), (rows, eps), constants, warps, stages))
    return y
