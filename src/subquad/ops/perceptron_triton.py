"""The kernels of `perceptron`: the activation, and its gradient with the sum over tokens.

gelu(h) = h Φ(h) in 16 bits: 2 Φ(-|h|) = erfc(z) with z = |h|/√2, which is exp(-z²) times a polynomial in 1/(1 + pz).
Its relative error is at most 3.3e-5 everywhere, a tenth of that of rounding to float16, and the gradient needs the same
exponential. The library's erf takes longer than reading and writing the numbers.

Legend: R rows, D width, BM rows and BN columns of a tile, P programs for the same columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.column_sums_triton import column_sums
from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch

FLAT, FLAT_WARPS = 2048, 4  # elements of a program of `gelu`; measured best on an H200
TILE, COLUMNS = 2048, 128
PROGRAMS = 3  # of the backward per multiprocessor
WARPS = 8


@triton.jit
def _normal(h):
    """Φ(h), and exp(-h²/2)."""
    t = 1.0 / (1.0 + 0.53 * 0.7071067811865476 * tl.abs(h))
    e = tl.exp2(-0.7213475204444817 * h * h)
    p = -0.18101591 * t + 0.40090593
    p = p * t + 0.16688093
    p = p * t + 0.315293
    p = p * t + 0.2979373
    p = 0.5 * p * t * e
    return tl.where(h < 0, p, 1.0 - p), e


@triton.jit
def activate(h, a, N, BN: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    x = tl.load(h + n, mask=n < N, other=0.0).to(tl.float32)
    phi, _ = _normal(x)
    tl.store(a + n, (x * phi).to(a.dtype.element_ty), mask=n < N)


@triton.jit
def gradients(
    h, da, dh, a, parts, R, D, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """dh = da act'(h), the part of this program's rows in its sum: parts [P, D], and without relu a = gelu(h)."""
    d = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for r0 in range(tl.program_id(1) * BM, R, P * BM):
        r = r0 + tl.arange(0, BM)
        tile = r.to(tl.int64)[:, None] * D + d[None, :]
        there = (r < R)[:, None] & (d < D)[None, :]
        x = tl.load(h + tile, mask=there, other=0.0).to(tl.float32)
        g = tl.load(da + tile, mask=there, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(x > 0, g, 0.0)
        else:
            phi, e = _normal(x)
            g *= phi + 0.3989422804014327 * x * e
            tl.store(a + tile, (x * phi).to(a.dtype.element_ty), mask=there)
        g = g.to(dh.dtype.element_ty)
        tl.store(dh + tile, g, mask=there)
        total += g.to(tl.float32)
    tl.store(parts + tl.program_id(1) * D + d, tl.sum(total, 0), mask=d < D)


def gelu(h: Tensor) -> Tensor:
    a = torch.empty_like(h)
    size = h.numel()
    launch(activate, (h, a), Plan((blocks_of(size, FLAT),), (size,), {"BN": FLAT}, FLAT_WARPS))
    return a


def backward(h: Tensor, da: Tensor, relu: bool, sums: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """dh [R, D], over da; gelu(h) [R, D], or h for relu; the sum of dh over rows [D], in the type `sums`"""
    rows, width = h.shape
    columns = min(COLUMNS, triton.next_power_of_2(width))
    tile, blocks = max(1, TILE // columns), blocks_of(width, columns)
    most = 3 if INTERPRETED else PROGRAMS * torch.cuda.get_device_properties(h.device).multi_processor_count
    programs = min(blocks_of(rows, tile), max(1, most // blocks))
    a = h if relu else torch.empty_like(h)
    parts = h.new_empty((programs, width), dtype=torch.float32)
    constants = {"BM": tile, "BN": columns, "P": programs, "RELU": relu}
    launch(gradients, (h, da, da, a, parts), Plan((blocks, programs), (rows, width), constants, WARPS))
    return da, a, column_sums(parts, sums)
