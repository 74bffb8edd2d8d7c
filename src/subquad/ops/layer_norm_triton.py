"""The kernels of `layer_norm` and `add_norm`: tiles of whole rows, which stay in registers after they are read.

Legend: R rows, D width, W its next power of two, BM rows of a tile, P programs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.column_sums_triton import column_sums
from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch
from subquad.ops.uniform_triton import stream_of, uniform

if TYPE_CHECKING:
    from subquad.ops.layer_norm import Drop

TILE = 1024  # elements of a tile: 16 of each tensor per thread
PROGRAMS = 6  # programs of the backward per multiprocessor
WARPS, STAGES = 2, 2


@triton.jit
def _dropped(x, seed, r, d, share):
    """Tile x of rows r and columns d as `Drop.apply` gives it."""
    kept = uniform(stream_of(tl.load(seed), r)[:, None], d[None, :]) >= share
    return tl.where(kept, x / (1.0 - share), 0.0)


@triton.jit
def normalise(
    x, a, g, c, s, y, h, mean, scale, seed, R, eps, share,
    D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, ADD: tl.constexpr, RMS: tl.constexpr, TWO: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """s = x + a, y = norm(s), h = y in another type, and the mean and scale of each row."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, W)
    tile = r.to(tl.int64)[:, None] * D + d[None, :]
    there = (r < R)[:, None] & (d < D)[None, :]
    u = tl.load(x + tile, mask=there, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(a + tile, mask=there, other=0.0).to(tl.float32)
        if DROP:
            added = _dropped(added, seed, r, d, share)
        total = (u + added).to(s.dtype.element_ty)
        tl.store(s + tile, total, mask=there)
        u = total.to(tl.float32)
    if not RMS:
        m = tl.sum(u, 1) / D
        tl.store(mean + r, m, mask=r < R)
        u = tl.where(there, u - m[:, None], 0.0)
    k = tl.rsqrt(tl.sum(u * u, 1) / D + eps)
    tl.store(scale + r, k, mask=r < R)
    u = u * k[:, None] * tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if not RMS:
        u += tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y + tile, u.to(y.dtype.element_ty), mask=there)
    if TWO:
        tl.store(h + tile, u.to(h.dtype.element_ty), mask=there)


@triton.jit
def gradients(
    ds, dy, dh, x, g, mean, scale, dx, da, parts, seed, R, share,
    D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, P: tl.constexpr, RMS: tl.constexpr,
    SUM: tl.constexpr, TWO: tl.constexpr, ADDED: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dx from the gradients ds of the sum and dy + dh of its norm, da = dx in another type or dropped, and the part of
    this program's rows in dg and dc: parts [P, 2, D]."""
    d = tl.arange(0, W)
    gain = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)
    dg, dc = tl.zeros((BM, W), tl.float32), tl.zeros((BM, W), tl.float32)
    for r0 in range(tl.program_id(0) * BM, R, P * BM):
        r = r0 + tl.arange(0, BM)
        tile = r.to(tl.int64)[:, None] * D + d[None, :]
        there = (r < R)[:, None] & (d < D)[None, :]
        u = tl.load(dy + tile, mask=there, other=0.0).to(tl.float32)
        if TWO:
            u += tl.load(dh + tile, mask=there, other=0.0).to(tl.float32)
        h = tl.load(x + tile, mask=there, other=0.0).to(tl.float32)
        k = tl.load(scale + r, mask=r < R, other=0.0)
        if not RMS:
            h = tl.where(there, h - tl.load(mean + r, mask=r < R, other=0.0)[:, None], 0.0)
        h *= k[:, None]
        dg += u * h
        dc += u
        u *= gain[None, :]
        along = (tl.sum(u * h, 1) / D)[:, None] * h
        if not RMS:
            along += (tl.sum(u, 1) / D)[:, None]
        u = (u - along) * k[:, None]
        if SUM:
            u += tl.load(ds + tile, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + tile, u.to(dx.dtype.element_ty), mask=there)
        if ADDED:
            if DROP:
                u = _dropped(u, seed, r, d, share)
            tl.store(da + tile, u.to(da.dtype.element_ty), mask=there)
    at = parts + tl.program_id(0) * 2 * D + d
    tl.store(at, tl.sum(dg, 0), mask=d < D)
    tl.store(at + D, tl.sum(dc, 0), mask=d < D)


def forward(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    total: torch.dtype, out: torch.dtype, twice: torch.dtype | None, drop: "Drop | None",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """x + added in the type `total`, its norm in `out` and in `twice`, each row's mean and 1/√(variance + eps) [R]"""
    x = x.contiguous()
    rows, width, wide, tile, warps = _sizes(x)
    s = x if added is None else torch.empty_like(x, dtype=total)
    y = torch.empty_like(x, dtype=out)
    h = None if twice is None else torch.empty_like(x, dtype=twice)
    mean, scale = x.new_empty((2, rows), dtype=torch.float32)
    constants = {
        "D": width, "W": wide, "BM": tile, "ADD": added is not None, "RMS": bias is None, "TWO": h is not None,
        "DROP": drop is not None,
    }  # fmt: skip
    share, seed = (0.0, mean) if drop is None else drop
    plan = Plan((blocks_of(rows, tile),), (rows, eps, share), constants, warps, STAGES)
    tensors = x, x if added is None else added.contiguous(), weight, weight if bias is None else bias
    launch(normalise, (*tensors, s, y, y if h is None else h, mean, scale, seed), plan)
    return s, y, h, mean, scale


def backward(
    of_sum: Tensor | None, of_norm: Sequence[Tensor], x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, *,
    rms: bool, added: torch.dtype | None, drop: "Drop | None",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """dx [..., D], the same in the type `added`, dweight [D], dbias [D]"""
    rows, width, wide, tile, warps = _sizes(x)
    most = 3 if INTERPRETED else PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(blocks_of(rows, tile), most)
    dx = torch.empty_like(x)
    da = dx if added is None or (added == x.dtype and drop is None) else torch.empty_like(x, dtype=added)
    parts = x.new_empty((programs, 2, width), dtype=torch.float32)
    constants = {
        "D": width, "W": wide, "BM": tile, "P": programs, "RMS": rms,
        "SUM": of_sum is not None, "TWO": len(of_norm) == 2, "ADDED": da is not dx,
        "DROP": drop is not None,
    }  # fmt: skip
    share, seed = (0.0, mean) if drop is None else drop
    ds = of_norm[0] if of_sum is None else of_sum
    tensors = ds, of_norm[0], of_norm[-1], x, weight, mean, scale, dx, da, parts, seed
    launch(gradients, tensors, Plan((programs,), (rows, share), constants, warps, STAGES))
    dg, dc = column_sums(parts.flatten(1), weight.dtype).view(2, width)
    return dx, None if added is None else da, dg, None if rms else dc


def _sizes(x: Tensor) -> tuple[int, int, int, int, int]:
    width = x.shape[-1]
    wide: int = triton.next_power_of_2(width)
    return x.numel() // width, width, wide, max(1, TILE // wide), WARPS * max(1, wide // TILE)
