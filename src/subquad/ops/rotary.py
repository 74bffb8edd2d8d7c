"""Rotary positions: turn pairs of channels by an angle that grows with the position, so q·k sees only differences."""

import torch
from torch import Tensor

from subquad.ops.precision import wide_type


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn the pair (x_j, x_{j + D/2}) at position p by p / base^(2j/D) radians.

    x [B, T, H, D] with D even, positions [T], or [B, T] if rows differ -> the shape and type of x.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)}: accepted is a floating point tensor [B, T, H, D]")
    batch, length, _, width = x.shape
    if width % 2 or width == 0:
        raise ValueError(f"x has head width {width}: channels turn in pairs, so accepted is an even width")
    given = tuple(positions.shape)
    if given not in ((length,), (batch, length)):
        raise ValueError(f"positions has shape {given}: accepted are [T] = {(length,)}, [B, T] = {(batch, length)}")
    if positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions has type {positions.dtype}: accepted are integers and floating point numbers")
    if base <= 0:
        raise ValueError(f"base={base}: accepted is a positive number")
    # a 16-bit angle would be off by whole turns at a few thousand positions
    exact = wide_type(x)
    turns = torch.arange(0, width, 2, device=x.device, dtype=exact) / width
    angle = positions.to(exact)[..., None, None] * base**-turns  # [T, 1, D/2] or [B, T, 1, D/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(exact).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
