"""The operators subquad::sparse and subquad::sparse_backward, so that programs compile and export.

An operator accepts only tensors and plain types, so it gets the fields of a Spec one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops.impl import transformed
from subquad.ops.precision import wide_type
from subquad.ops.sparse import plain, torch_path
from subquad.ops.sparse.spec import Inputs, Spec

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? key_lengths"
SPEC = "str pattern, SymInt[] draws, SymInt[] shifts, bool causal, float scale, bool return_lse, str impl"


def attend(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] and its log-sum-exp [B, T, H], with gradients."""
    if transformed():
        return plain.attend(x, spec)
    return torch.ops.subquad.sparse(*x, *spec)


def _arguments(plain: Sequence[Any]) -> tuple[Inputs, Spec]:
    """The arguments of the operator as Inputs and Spec."""
    pattern, draws, shifts, *rest = plain[5:]
    return Inputs(*plain[:5]), Spec(pattern, tuple(draws), tuple(shifts), *rest)


def _path(spec: Spec) -> Any:
    if spec.impl == "torch":
        return torch_path
    from subquad.ops.sparse import triton_path

    return triton_path


def _forward(*plain: Any) -> tuple[Tensor, Tensor]:
    x, spec = _arguments(plain)
    return _path(spec).forward(x, spec)


def _forward_shapes(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    if others[-1] == "triton":  # which writes [B, H, T]
        return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=wide_type(q)).transpose(1, 2)
    return q.new_empty(q.shape), q.new_empty((B, T, H), dtype=wide_type(q))


def _gradients(do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *plain: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, spec = _arguments(plain)
    return _path(spec).backward(x, spec, o, lse, do, dlse)


def _gradient_shapes(do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.spec = Spec(*inputs[5:])


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.subquad.sparse_backward(do, dlse if ctx.spec.return_lse else None, *ctx.saved_tensors, *ctx.spec)
    return *grads, *(None for _ in range(len(Inputs._fields) - 3 + len(ctx.spec)))


_operator = torch.library.custom_op(
    "subquad::sparse", _forward, mutates_args=(), schema=f"({INPUTS}, {SPEC}) -> (Tensor, Tensor)"
)
_operator.register_fake(_forward_shapes)
_operator.register_autograd(_backward, setup_context=_save)
torch.library.custom_op(
    "subquad::sparse_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dlse, Tensor o, Tensor lse, {INPUTS}, {SPEC}) -> (Tensor, Tensor, Tensor)",
).register_fake(_gradient_shapes)
