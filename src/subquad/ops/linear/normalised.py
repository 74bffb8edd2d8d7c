"""Efficient attention on a GPU: a softmax of q over channels, and of k over positions, without storing either.

o_t = Σ_c softmax(q_t)_c Σ_s e^{k_sc} v_s / Σ_s e^{k_sc}, over s <= t when causal. The torch expression of the same is
mechanisms/efficient.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad import ranks
from subquad.ops.impl import Impl, choose, exporting
from subquad.ops.linear.operators import operator
from subquad.ops.linear.spec import arguments
from subquad.ops.precision import wide_type

NOTHING = -1e30  # a channel's largest key before the first; finite, so that differences are numbers

Last = tuple[Tensor, Tensor, Tensor]  # s [B, H, K, V], z [B, H, K], both in units of exp(max), and max [B, H, K]


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, S, H, K]
    v: Tensor  # [B, S, H, V]
    lengths: Tensor | None = None  # [B] of the keys
    s0: Tensor | None = None  # the state before the first token, at least float32
    z0: Tensor | None = None
    max0: Tensor | None = None


def fuses(impl: Impl, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels can take this call."""
    if ranks.active() is not None or exporting():
        return False
    if q.dtype == torch.float64 or not q.dtype == k.dtype == v.dtype or max(q.shape[-1], v.shape[-1]) > 256:
        return False
    if any(t.numel() == 0 for t in (q, k, v)):
        return False
    return choose(impl, "normalised_attention", q) == "triton"


def normalised_attention(x: Inputs, causal: bool, state: bool = False) -> tuple[Tensor, Last]:
    """o [B, T, H, V], and with `state` the state after the last token. Gradients go from o to q, k and v; a
    state has none."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in x[:3])
    s0, z0, max0 = (None if t is None else t.contiguous() for t in x[4:])
    o, *last = torch.ops.subquad.normalised_attention(q, k, v, x.lengths, s0, z0, max0, causal, state)
    return o, tuple(last)


def _shapes(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = Inputs(*args[: len(Inputs._fields)])
    o = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]), dtype=x.v.dtype)
    shape: tuple[int, ...] = (x.k.shape[0], *x.k.shape[2:])
    sizes = ((*shape, x.v.shape[3]), shape, shape) if args[-1] else ((0,), (0,), (0,))  # no state, if none is wanted
    s, z, m = (x.q.new_empty(size, dtype=wide_type(x.q)) for size in sizes)
    return o, s, z, m


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from subquad.ops.linear import normalised_triton

    *inputs, causal, state = args
    o, s, z, most = _shapes(*args)
    normalised_triton.forward(Inputs(*inputs), causal, o, (s, z, most) if state else None)
    return o, s, z, most


def _backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    from subquad.ops.linear import normalised_triton

    *inputs, causal = args
    return normalised_triton.backward(do if do.stride(-1) == 1 else do.contiguous(), Inputs(*inputs), causal)


def _backward_shapes(do: Tensor, *args: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(t.new_empty(t.shape) for t in args[:3])


_INPUTS = arguments(Inputs)
operator("normalised_attention", f"{_INPUTS}, bool causal, bool state", 4, _forward, _shapes)
operator("normalised_attention_backward", f"Tensor do, {_INPUTS}, bool causal", 3, _backward, _backward_shapes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors  # read once: checkpointing computes them at every reading
    if do is None:
        return (None,) * (len(inputs) + 2)
    dq, dk, dv = torch.ops.subquad.normalised_attention_backward(do, *inputs, ctx.causal)
    return dq, dk, dv, *[None] * (len(inputs) - 1)


torch.library.register_autograd("subquad::normalised_attention", _gradient, setup_context=_setup)


def normalised_step(q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, ...], inplace: bool) -> tuple[Tensor, Last]:
    """One token without gradients: q, k [B, H, K], v [B, H, V] -> o [B, H, V] and the new s, z and max."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    s, z, most = state if inplace else (t.clone(memory_format=torch.contiguous_format) for t in state)
    return torch.ops.subquad.normalised_step(q, k, v, s, z, most), (s, z, most)


def _step(*args: Tensor) -> Tensor:
    from subquad.ops.linear import normalised_triton

    return normalised_triton.step(*args)


def _step_shape(_q: Tensor, _k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return v.new_empty(v.shape)


_STEP = "Tensor q, Tensor k, Tensor v, Tensor(a!) s, Tensor(b!) z, Tensor(c!) most"
operator("normalised_step", _STEP, 1, _step, _step_shape)
