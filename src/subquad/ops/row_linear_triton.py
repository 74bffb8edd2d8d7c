"""The kernels of `row_linear`: for few rows, whole rows of the weights in registers; for more, tiles of a product.

A kernel may start while the one before it still runs (`early` of Plan): it loads its weights, which nothing writes,
and then waits for what the other writes.

Legend: B rows, K width of x, N width of y.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.launch import EARLY, INTERPRETED, Plan, blocks_of, launch, tile_of
from subquad.ops.row_linear import FEW

PROGRAMS = 132  # multiprocessors of an H200; with fewer programs some would be idle
TILE = 16384  # weights that a program of `few` holds


@triton.jit
def _end(acc, b, r, n, B, m, N: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr):
    """What follows the product: acc [BM, BN], rows m and columns n."""
    if BIAS:
        acc += tl.load(b + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACT == "relu":
        acc = tl.maximum(acc, 0.0)
    if ACT == "gelu":
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if ADD:
        there = (m < B)[:, None] & (n < N)[None, :]
        acc += tl.load(r + m.to(tl.int64)[:, None] * N + n[None, :], mask=there, other=0.0).to(tl.float32)
    return acc


@triton.jit
def few(
    x, w, b, g, c, r, y, B, eps, xb,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    SHIFT: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of y for all rows."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    tile = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    if NORM != "none":
        gain = tl.load(g + k, mask=k < K, other=0.0).to(tl.float32)
    if SHIFT:
        shift = tl.load(c + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for m in range(B):
        h = tl.load(x + m * xb + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM == "layer":
            h = tl.where(k < K, h - tl.sum(h, 0) / K, 0.0)
        if NORM != "none":
            h = h * tl.rsqrt(tl.sum(h * h, 0) / K + eps) * gain
        if SHIFT:
            h += shift
        acc = tl.sum(tile.to(tl.float32) * h[None, :], 1)[None, :]
        rows = m + tl.arange(0, 1)
        acc = _end(acc, b, r, n, B, rows, N, BIAS, ACT, ADD)
        tl.store(y + rows[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=(n < N)[None, :])


@triton.jit
def tiles(
    x, w, b, g, c, r, y, B, eps, xb,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, SHIFT: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A tile [BM, BN] of y. The norm of its rows is computed first, in one pass over them."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    here = m.to(tl.int64)[:, None] * xb + k[None, :]
    theirs = n[:, None] * K + k[None, :]
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mean = tl.zeros((BM,), tl.float32)
    spread = tl.zeros((BM,), tl.float32)  # the sum of squares around the mean
    if NORM != "none":
        for k0 in range(0, K, BK):
            h = tl.load(x + here + k0, mask=(m < B)[:, None] & (k0 + k < K)[None, :], other=0.0).to(tl.float32)
            if NORM == "layer":  # merges the statistics of two parts (Chan et al. 1979), which loses no digits
                size = tl.minimum(K - k0, BK).to(tl.float32)
                own = tl.sum(h, 1) / size
                h = tl.where((k0 + k < K)[None, :], h - own[:, None], 0.0)
                apart = own - mean
                spread += tl.sum(h * h, 1) + apart * apart * (k0 * size / (k0 + size))
                mean += apart * (size / (k0 + size))
            else:
                spread += tl.sum(h * h, 1)
        scale = tl.rsqrt(spread / K + eps)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        h = tl.load(x + here + k0, mask=(m < B)[:, None] & (k0 + k < K)[None, :], other=0.0)
        if NORM != "none":
            gain = tl.load(g + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
            h = (h.to(tl.float32) - mean[:, None]) * scale[:, None] * gain[None, :]
            if SHIFT:
                h += tl.load(c + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)[None, :]
        tile = tl.load(w + theirs + k0, mask=(n < N)[:, None] & (k0 + k < K)[None, :], other=0.0)
        acc = tl.dot(h.to(DOT), tl.trans(tile.to(DOT)), acc)
    acc = _end(acc, b, r, n, B, m, N, BIAS, ACT, ADD)
    there = (m < B)[:, None] & (n < N)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=there)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None, eps: float, norm: str,
    activation: str, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    rows, (columns, width) = x.shape[0], weight.shape
    y = x.new_empty(rows, columns)
    constants = {
        "N": columns, "K": width, "NORM": norm, "BIAS": bias is not None, "SHIFT": shift is not None,
        "ACT": activation, "ADD": residual is not None, "EARLY": EARLY,
    }  # fmt: skip
    tensors = (x, weight, *(weight if t is None else t for t in (bias, gain, shift, residual)), y)
    numbers = (rows, eps, x.stride(0))
    if rows <= FEW:
        block, wide = few_blocks(columns, width)
        constants |= {"BN": block, "BK": wide}
        warps = min(8, max(2, block * wide // 1024))
        plan = Plan((blocks_of(columns, block),), numbers, constants, warps, early=EARLY)
        launch(few, tensors, plan)
        return y
    sizes = tile_blocks(rows, columns, width)
    half = tl.float16 if x.dtype is torch.float16 else tl.bfloat16
    constants |= {"BM": sizes[0], "BN": sizes[1], "BK": sizes[2], "DOT": tl.float32 if INTERPRETED else half}
    grid = (blocks_of(rows, sizes[0]), blocks_of(columns, sizes[1]))
    launch(tiles, tensors, Plan(grid, numbers, constants, sizes[3], sizes[4], early=EARLY))
    return y


def few_blocks(columns: int, width: int) -> tuple[int, int]:
    """BN and BK of `few`: as many columns a program as leave a program for each multiprocessor."""
    wide = tile_of(width)
    block = 16
    while block > 1 and (block * wide > TILE or columns < block * PROGRAMS):
        block //= 2
    return block, wide


def tile_blocks(rows: int, columns: int, width: int) -> tuple[int, int, int, int, int]:
    """BM, BN, BK, warps and stages of `tiles`."""
    tall = min(64, tile_of(rows))
    wide = 64
    while wide > 16 and blocks_of(rows, tall) * blocks_of(columns, wide) < PROGRAMS:
        wide //= 2
    return tall, wide, 128 if width >= 2048 else 64, 4, 4
