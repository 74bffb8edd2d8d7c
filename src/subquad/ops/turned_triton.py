"""Rotary positions inside kernels that read one token a row: `rotary.turned` of a head, in registers; and its turns."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, launch, tile_of
from subquad.ops.rotary import Turns

TWO_PI = tl.constexpr(2 * math.pi)


@triton.jit
def turned(x, cos, sin, d, D: tl.constexpr, TURN: tl.constexpr):
    """The head at x, channels d of D, turned by cosines and sines [D/2] and rounded to its type, as rotary._fast."""
    y = tl.load(x + d, mask=d < D, other=0.0)
    if TURN:
        half: tl.constexpr = D // 2
        pair = tl.where(d < half, d, d - half)
        other = tl.load(x + tl.where(d < half, d + half, d - half), mask=d < D, other=0.0).to(tl.float32)
        c = tl.load(cos + pair, mask=d < D, other=0.0)
        s = tl.load(sin + pair, mask=d < D, other=0.0)
        y = (y.to(tl.float32) * c + other * tl.where(d < half, -s, s)).to(y.dtype)
    return y


def row_stride(cos: Tensor | None) -> int:
    """From the turns of one row to those of the next: 0 where all rows have the same."""
    return 0 if cos is None or cos.dim() == 3 or cos.shape[0] == 1 else cos.stride(0)


@triton.jit
def angles(p, cos, sin, RATE: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """The turns of one position, in float64. RATE is a constant because a number would be passed as float32."""
    j = tl.arange(0, BW)
    at = tl.load(p + tl.program_id(0)).to(tl.float64)
    angle = at * tl.exp(j.to(tl.float64) * RATE)
    angle -= tl.floor(angle / TWO_PI) * TWO_PI
    row = tl.program_id(0).to(tl.int64) * W
    tl.store(cos + row + j, tl.cos(angle).to(tl.float32), mask=j < W)
    tl.store(sin + row + j, tl.sin(angle).to(tl.float32), mask=j < W)


def turns(positions: Tensor, width: int, base: float) -> Turns:
    """`rotary.turns` of positions [B, 1] in one kernel, float32."""
    rows, half = positions.shape[0], width // 2
    both = torch.empty(2, rows, 1, 1, half, device=positions.device)
    # the rate of pair j is base^(-2j/D)
    constants = {"RATE": -2 * math.log(base) / width, "W": half, "BW": tile_of(half)}
    plan = Plan((rows,), (), constants, warps=1)
    launch(angles, (positions.contiguous(), both[0], both[1]), plan)
    return Turns(both[0], both[1])
