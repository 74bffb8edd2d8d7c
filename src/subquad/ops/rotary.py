"""Rotary positions: turn pairs of channels by an angle that grows with the position, so q·k sees only differences.

The cosines and sines depend on positions alone: a model makes them once, for q and k of all its layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops.impl import choose
from subquad.ops.precision import wide, wide_type


class Turns(NamedTuple):
    """The cosines and sines of some positions, at least float32."""

    cos: Tensor  # [T, 1, D/2], or [B, T, 1, D/2] if rows differ
    sin: Tensor


def turns(positions: Tensor, width: int, dtype: torch.dtype = torch.float32, base: float = 10000.0) -> Turns:
    """Turns for `rotate`, of the pairs of `width` channels at positions [T] or [B, T].

    Angles are float64: in float32 an angle of p radians would be off by p/2²⁴.
    """
    # Under torch.compile one operator: Inductor would put plain expressions into the loops of those who read them, and
    # compute cosines anew for each head of each layer. An exported program has plain expressions, and needs no subquad.
    inside = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return Turns(*(torch.ops.subquad.turns if inside else _turns)(positions, width, dtype, base))


def _turns(positions: Tensor, width: int, dtype: torch.dtype, base: float) -> tuple[Tensor, Tensor]:
    step = positions.dim() == 2 and positions.shape[1] == 1 and dtype is torch.float32  # a token for each row
    if step and positions.is_cuda and type(positions) is Tensor and choose("auto", "turns", positions) == "triton":
        from subquad.ops import turned_triton

        return turned_triton.turns(positions, width, base)
    exact = torch.float32 if positions.device.type == "mps" else torch.float64  # which that device lacks
    last = 2 / width - 1  # rates base^(-2j/D) from 1 to base^last
    rates = torch.logspace(0, last, width // 2, base=base, device=positions.device, dtype=exact)
    angle = positions[..., None, None] * rates  # [T, 1, D/2] or [B, T, 1, D/2]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _shapes(positions: Tensor, width: int, dtype: torch.dtype, base: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    cos = positions.new_empty(*positions.shape, 1, width // 2, dtype=dtype)
    return cos, torch.empty_like(cos)


torch.library.custom_op("subquad::turns", _turns, mutates_args=()).register_fake(_shapes)


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
    return turned(x, turns(positions, width, wide_type(x), base))


def turned(x: Tensor, by: Turns, way: int = 1) -> Tensor:
    """`rotate` with the turns of x's positions; way=-1 turns back. Products and sums are at least float32."""
    if _traced():
        return _plain(x, by if way == 1 else Turns(by.cos, -by.sin))
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Turned.apply(x, *by, way)
        return y
    return _fast(x, *by, way)


def turned_pair(both: Tensor, by: Turns) -> tuple[Tensor, Tensor]:
    """q and k, turned, of `both` [B, T, 2·H, D], which has the heads of q and then those of k."""
    if not _traced() and torch.is_grad_enabled() and both.requires_grad:
        pair: tuple[Tensor, Tensor] = _TurnedPair.apply(both, *by)
        return pair
    q, k = turned(both, by).chunk(2, dim=2)
    return q, k


def _traced() -> bool:
    """A compiler fuses the plain expression, and torch.func and exported programs can only differentiate that one."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _plain(x: Tensor, by: Turns) -> Tensor:
    (a, b), (cos, sin) = wide(x).chunk(2, dim=-1), by
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _fast(x: Tensor, cos: Tensor, sin: Tensor, way: int, y: Tensor | None = None) -> Tensor:
    """`_plain` in three operations, into y if given. A new y is contiguous, so that heads are merged without a copy."""
    y = x.new_empty(x.shape) if y is None else y
    halves = (*x.shape[:-1], 2, x.shape[-1] // 2)
    pairs = x.view(halves)
    (a, b), (to_a, to_b) = pairs.unbind(-2), y.view(halves).unbind(-2)
    kept_a, kept_b = (pairs * cos.unsqueeze(-2)).unbind(-2)
    torch.addcmul(kept_a, b, sin, value=-way, out=to_a)
    torch.addcmul(kept_b, a, sin, value=way, out=to_b)
    return y


class _Turned(torch.autograd.Function):
    """Its gradient is turned back, so only the turns are kept, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.way = way
        return _fast(x, cos, sin, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return turned(grad, Turns(*ctx.saved_tensors), -ctx.way), None, None, None


class _TurnedPair(torch.autograd.Function):
    """The same, where the gradients of q and k are turned back into one tensor."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _fast(both, cos, sin, 1).chunk(2, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        by = Turns(*ctx.saved_tensors)
        if torch.is_grad_enabled():  # of a gradient that is differentiated itself
            return turned(torch.cat(grads, dim=2), by, -1), None, None
        batch, size, heads, width = grads[0].shape
        both = grads[0].new_empty(batch, size, 2 * heads, width)
        for grad, part in zip(grads, both.chunk(2, dim=2), strict=True):
            _fast(grad, *by, -1, part)
        return both, None, None
