"""The rules that multiply the state by a matrix, as torch operators: one for whole sequences, two for a token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops.impl import transformed
from subquad.ops.linear import plain, rule_chunked, rule_fused
from subquad.ops.linear.operators import filled, operator
from subquad.ops.linear.spec import RuleInputs, arguments

_PATHS: dict[str, Any] = {"torch": rule_chunked, "triton": rule_fused}  # each has outputs, forward and backward
_N = len(RuleInputs._fields)


def recur(x: RuleInputs, wide: bool, impl: str) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V], at least float32 if `wide`, otherwise of v's type, and the state after the last token.

    The arguments have been checked.
    """
    if transformed():
        return plain.recur(x, wide)
    x = x if x.s0 is None else x._replace(s0=x.s0.contiguous())
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    o, s, *_ = torch.ops.subquad.linear_attention_rule(*x, wide, impl, save or impl == "torch")
    return o, s


def _forward(*args: Any) -> tuple[Tensor, ...]:
    x, (wide, impl, save) = RuleInputs(*args[:_N]), args[_N:]
    return filled(x.q, _PATHS[impl].forward(x, wide, save))


def _forward_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, (wide, impl, save) = RuleInputs(*args[:_N]), args[_N:]
    return filled(x.q, _PATHS[impl].outputs(x, wide, save))


def _differentiable(x: RuleInputs) -> tuple[Tensor | None, ...]:
    return x.q, x.k, x.v, x.log_gate, x.beta, x.s0


def _backward(do: Tensor, ds: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    x, (impl, *done) = RuleInputs(*args[:_N]), args[_N:]
    return filled(x.q, _PATHS[impl].backward(do, ds, x, done))


def _backward_shapes(_do: Tensor, _ds: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    x = RuleInputs(*args[:_N])
    return filled(x.q, [None if t is None else t.new_empty(t.shape) for t in _differentiable(x)])


_INPUTS = arguments(RuleInputs)
_DONE = "Tensor o, Tensor s, Tensor kept"
operator("linear_attention_rule", f"{_INPUTS}, bool wide, str impl, bool save", 3, _forward, _forward_shapes)
_GRADIENTS = f"Tensor do, Tensor? ds, {_INPUTS}, str impl, {_DONE}"
operator("linear_attention_rule_backward", _GRADIENTS, 6, _backward, _backward_shapes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wide, ctx.impl, ctx.saved = inputs[_N:]
    ctx.set_materialize_grads(False)
    if ctx.saved:
        ctx.save_for_backward(*inputs[:_N], *output)


def _gradient(ctx: Any, do: Tensor | None, ds: Tensor | None, _kept: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.saved:
        raise RuntimeError("linear_attention was called with save=False, so it kept nothing for a backward pass")
    tensors = ctx.saved_tensors  # read once: checkpointing computes them at every reading
    x, done = RuleInputs(*tensors[:_N]), tensors[_N:]
    if torch.is_grad_enabled():  # the gradients will be differentiated themselves
        wide = ctx.wide
        return *plain.gradients(lambda *x: plain.recur(RuleInputs(*x), wide), x, (do, ds)), None, None, None
    do = torch.zeros_like(done[0]) if do is None else do
    made: Sequence[Tensor] = torch.ops.subquad.linear_attention_rule_backward(do, ds, *x, ctx.impl, *done)
    dq, dk, dv, dgate, dbeta, ds0 = (None if t is None else g for t, g in zip(_differentiable(x), made, strict=True))
    return dq, dk, dv, dgate, dbeta, None, None, ds0, None, None, None


torch.library.register_autograd("subquad::linear_attention_rule", _gradient, setup_context=_setup)
