"""The kernels of `layer_norm`: tiles of whole rows, which stay in registers after they are read.

Legend: R rows, D width, W its next power of two, BM rows of a tile, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch

TILE = 2048  # elements of a tile: 16 of each tensor per thread
PROGRAMS = 4  # programs of the backward per multiprocessor
WARPS, STAGES = 4, 2


@triton.jit
def normalise(x, g, c, y, mean, scale, R, eps, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr):
    """y, and the mean and scale of each row."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, W)
    tile = r.to(tl.int64)[:, None] * D + d[None, :]
    there = (r < R)[:, None] & (d < D)[None, :]
    h = tl.load(x + tile, mask=there, other=0.0).to(tl.float32)
    m = tl.sum(h, 1) / D
    h = tl.where(there, h - m[:, None], 0.0)
    s = tl.rsqrt(tl.sum(h * h, 1) / D + eps)
    gain = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)
    shift = tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)
    h = h * s[:, None] * gain[None, :] + shift[None, :]
    tl.store(y + tile, h.to(y.dtype.element_ty), mask=there)
    tl.store(mean + r, m, mask=r < R)
    tl.store(scale + r, s, mask=r < R)


@triton.jit
def gradients(
    dy, x, g, mean, scale, dx, parts, R, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """dx, and the part of this program's rows in dg and dc: parts [P, 2, D]."""
    d = tl.arange(0, W)
    gain = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)
    dg, dc = tl.zeros((BM, W), tl.float32), tl.zeros((BM, W), tl.float32)
    for r0 in range(tl.program_id(0) * BM, R, P * BM):
        r = r0 + tl.arange(0, BM)
        tile = r.to(tl.int64)[:, None] * D + d[None, :]
        there = (r < R)[:, None] & (d < D)[None, :]
        u = tl.load(dy + tile, mask=there, other=0.0).to(tl.float32)
        h = tl.load(x + tile, mask=there, other=0.0).to(tl.float32)
        m, s = tl.load(mean + r, mask=r < R, other=0.0), tl.load(scale + r, mask=r < R, other=0.0)
        h = tl.where(there, (h - m[:, None]) * s[:, None], 0.0)
        dg += u * h
        dc += u
        u *= gain[None, :]
        u = (u - (tl.sum(u, 1) / D)[:, None] - h * (tl.sum(u * h, 1) / D)[:, None]) * s[:, None]
        tl.store(dx + tile, u.to(dx.dtype.element_ty), mask=there)
    at = parts + tl.program_id(0) * 2 * D + d
    tl.store(at, tl.sum(dg, 0), mask=d < D)
    tl.store(at + D, tl.sum(dc, 0), mask=d < D)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., D], and the mean and 1/√(variance + eps) of each row [R]"""
    rows, width, wide, tile = _sizes(x)
    y = torch.empty_like(x, dtype=out)
    mean, scale = x.new_empty((2, rows), dtype=torch.float32)
    constants = {"D": width, "W": wide, "BM": tile}
    plan = Plan((blocks_of(rows, tile),), (rows, eps), constants, WARPS, STAGES)
    launch(normalise, (x, weight, bias, y, mean, scale), plan)
    return y, mean, scale


def backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx [..., D], dweight [D], dbias [D]"""
    rows, width, wide, tile = _sizes(x)
    most = 3 if INTERPRETED else PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(blocks_of(rows, tile), most)
    dx = torch.empty_like(x)
    parts = x.new_empty((programs, 2, width), dtype=torch.float32)
    constants = {"D": width, "W": wide, "BM": tile, "P": programs}
    launch(gradients, (grad, x, weight, mean, scale, dx, parts), Plan((programs,), (rows,), constants, WARPS, STAGES))
    dg, dc = parts.sum(0).to(weight.dtype)
    return dx, dg, dc


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    width = x.shape[-1]
    wide: int = triton.next_power_of_2(width)
    return x.numel() // width, width, wide, max(1, TILE // wide)
