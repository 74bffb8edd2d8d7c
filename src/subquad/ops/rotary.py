"""Rotary positions: turn pairs of channels by an angle that grows with the position, so q·k sees only differences.

The cosines and sines depend on positions alone: a model makes them once, for q and k of all its layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops.impl import Impl, choose, exporting, traced
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
    inside = torch.compiler.is_compiling() and not exporting()
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


def turned(x: Tensor, by: Turns, way: int = 1, *, impl: Impl = "auto") -> Tensor:
    """`rotate` with the turns of x's positions; way=-1 turns back. Products and sums are at least float32."""
    if traced():
        return _plain(x, by if way == 1 else Turns(by.cos, -by.sin))
    how = choose(impl, "rotary", x, _unsupported(x))
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Turned.apply(x, *by, way, how)
        return y
    return _fast(x, *by, way, how)


def turned_qkv(qkv: Tensor, by: Turns, heads: int, keys: int, *, impl: Impl = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v, of all three side by side: qkv [B, T, 2·keys + H·V] -> [B, T, H, ·] each.

    Its gradient is written at once, where autograd would turn the parts back, and then put them side by side.
    """
    if not traced() and torch.is_grad_enabled() and qkv.requires_grad:
        how = choose(impl, "rotary", qkv, _unsupported(qkv))
        q, k, v = _TurnedQKV.apply(qkv, *by, heads, keys, how)
        return q, k, v
    both, v = _in_two(qkv, heads, keys)
    q, k = turned(both, by, impl=impl).chunk(2, dim=2)
    return q, k, v


def _in_two(qkv: Tensor, heads: int, keys: int) -> tuple[Tensor, Tensor]:
    """q and k [B, T, 2·H, K], v [B, T, H, V]"""
    # methods of torch itself: its wrappers in Python, split and unflatten, cost as much as a small product
    both, v = qkv.split_with_sizes((2 * keys, qkv.shape[-1] - 2 * keys), -1)
    shape = qkv.shape[:-1]
    return both.view(*shape, 2 * heads, -1), v.view(*shape, heads, -1)


def _unsupported(x: Tensor) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {x.dtype}"
    return "no elements" if x.numel() == 0 else None


def _plain(x: Tensor, by: Turns) -> Tensor:
    # a compiler reads a flipped pair in the same loop, where it would make a cat of two halves one half at a time
    pairs, (cos, sin) = wide(x).unflatten(-1, (2, -1)), by
    signed = sin.unsqueeze(-2) * torch.arange(-1, 2, 2, device=x.device, dtype=sin.dtype)[:, None]  # [..., 2, D/2]
    return (pairs * cos.unsqueeze(-2) + pairs.flip(-2) * signed).flatten(-2).to(x.dtype)


def _fast(x: Tensor, cos: Tensor, sin: Tensor, way: int, how: str) -> Tensor:
    """`_plain` in few operations. The result is contiguous, so that heads are merged without a copy."""
    if how == "triton":
        from subquad.ops import rotary_triton

        return rotary_triton.turned(x, cos, sin, way)
    return _turn_into(x, cos, sin, way, x.new_empty(x.shape))


def _turn_into(x: Tensor, cos: Tensor, sin: Tensor, way: int, y: Tensor) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, way: int, how: Impl) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.way, ctx.how = way, how
        return _fast(x, cos, sin, way, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return turned(grad, Turns(*ctx.saved_tensors), -ctx.way, impl=ctx.how), None, None, None, None


class _TurnedQKV(torch.autograd.Function):
    """The same, where the gradients of q and k are turned back into one tensor, beside that of v."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, keys: int, how: Impl
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.how = how
        both, v = _in_two(qkv, heads, keys)
        return *_fast(both, cos, sin, 1, how).chunk(2, dim=2), v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        by = Turns(*ctx.saved_tensors)
        if torch.is_grad_enabled():  # of a gradient that is differentiated itself
            both = turned(torch.cat((dq, dk), dim=2), by, -1, impl=ctx.how)
            return torch.cat((both.flatten(2), dv.flatten(2)), -1), None, None, None, None, None
        keys, values = dq.shape[2] * dq.shape[3], dv.shape[2] * dv.shape[3]
        dqkv = dq.new_empty(*dq.shape[:2], 2 * keys + values)
        if ctx.how == "triton":
            from subquad.ops import rotary_triton

            rotary_triton.turned_back(dq, dk, dv, *by, dqkv)
        else:
            both, to_v = _in_two(dqkv, dq.shape[2], keys)
            for grad, part in zip((dq, dk), both.chunk(2, dim=2), strict=True):
                _turn_into(grad, *by, -1, part)
            to_v.copy_(dv)
        return dqkv, None, None, None, None, None
