"""Linear attention as torch operators, so that autograd, torch.compile, export and CUDA graphs see one node.

An operator takes plain types: here, and only here, `Inputs` and `Spec` are taken apart and put together again.
Registering costs nothing: triton is imported when a Triton kernel first runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from subquad.gradients import refuse_second
from subquad.ops.feature_maps import FUSED
from subquad.ops.impl import transformed
from subquad.ops.linear import chunked, fused, plain
from subquad.ops.linear.spec import INPUTS, SPEC, Inputs, Spec

_PATHS: dict[str, Any] = {"torch": chunked, "triton": fused}  # each has outputs, forward and backward
_N, _M = len(Inputs._fields), len(Spec._fields)


def attend(x: Inputs, spec: Spec, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] and the states after the last token, s [N, H, K, V] and z [N, H, K]; `api` checks the inputs."""
    if spec.feature_map not in FUSED:
        raise ValueError(f"feature_map={spec.feature_map!r}: the operators accept {', '.join(map(repr, FUSED))}")
    if transformed():
        return plain.attend(x, spec)
    if impl == "triton":
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in x[:3])
        s0, z0 = (None if t is None else t.to(fused.state_type(q)).contiguous() for t in (x.s0, x.z0))
        x = x._replace(q=q, k=k, v=v, s0=s0, z0=z0)
    # the torch path keeps no more when it saves
    save = impl == "torch" or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x))
    work: Callable[..., Any] = torch.ops.subquad.linear_attention
    if impl == "triton" and _eager(x.q):
        work = _Eager.apply if save else _forward
    o, s, z, *_ = work(*x, *spec, impl, save)
    return o, s, z


def operator(name: str, inputs: str, results: int, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Register subquad::<name>. One that computes gradients, <name>_backward, refuses to be differentiated again."""
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    torch.library.define(f"subquad::{name}", f"({inputs}) -> {returned}")
    torch.library.impl(f"subquad::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"subquad::{name}", shapes)
    if name.endswith("_backward"):
        torch.library.register_autograd(f"subquad::{name}", refuse_second)


def _joined(args: Sequence[Any]) -> tuple[Inputs, Spec, Sequence[Any]]:
    return Inputs(*args[:_N]), Spec(*args[_N : _N + _M]), args[_N + _M :]


def filled(like: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """An operator returns tensors: empty ones for None."""
    return tuple(like.new_empty((0,), dtype=fused.state_type(like)) if t is None else t for t in tensors)


def _forward(*args: Any) -> Any:
    x, spec, (impl, save) = _joined(args)
    return _PATHS[impl].forward(x, spec, save)


def _forward_filled(*args: Any) -> tuple[Tensor, ...]:
    return filled(args[0], _forward(*args))


def _forward_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, spec, (impl, save) = _joined(args)
    return filled(x.q, _PATHS[impl].outputs(x, spec, save))


operator("linear_attention", f"{INPUTS}, {SPEC}, str impl, bool save", 5, _forward_filled, _forward_shapes)


def _backward(do: Tensor, ds: Tensor | None, dz: Tensor | None, *args: Any) -> Any:
    x, spec, (impl, *done) = _joined(args)
    return _PATHS[impl].backward(do, ds, dz, x, spec, done)


def _backward_filled(*args: Any) -> tuple[Tensor, ...]:
    return filled(args[0], _backward(*args))


def _backward_shapes(do: Tensor, _ds: Tensor | None, _dz: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return filled(do, [None if t is None else t.new_empty(t.shape) for t in _differentiable(args)])


def _differentiable(inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    q, k, v, log_gate, _, _, s0, z0 = inputs[:_N]
    return q, k, v, log_gate, s0, z0


_GIVEN, _DONE = "Tensor do, Tensor? ds, Tensor? dz", "Tensor o, Tensor s, Tensor z, Tensor kept, Tensor states"
_GRADIENTS = f"{_GIVEN}, {INPUTS}, {SPEC}, str impl, {_DONE}"
operator("linear_attention_backward", _GRADIENTS, 6, _backward_filled, _backward_shapes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *ctx.spec, ctx.saved = inputs[_N:]
    ctx.set_materialize_grads(False)
    if ctx.saved:
        ctx.save_for_backward(*inputs[:_N], *output)


def _gradient(ctx: Any, do: Tensor | None, ds: Tensor | None, dz: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.saved:
        raise RuntimeError("linear_attention was called with save=False, so it kept nothing for a backward pass")
    tensors = ctx.saved_tensors  # read once: checkpointing computes them at every reading
    inputs, done = tensors[:_N], tensors[_N:]
    if torch.is_grad_enabled():  # the gradients will be differentiated themselves
        return _plain_gradient(ctx, inputs, (do, ds, dz))
    do = torch.zeros_like(done[0]) if do is None else do
    if ctx.spec[-1] == "triton" and _eager(do):
        x, spec = _joined((*inputs, *ctx.spec))[:2]
        grads = _PATHS["triton"].backward(do, ds, dz, x, spec, done, together=True)
    else:
        grads = torch.ops.subquad.linear_attention_backward(do, ds, dz, *inputs, *ctx.spec, *filled(do, done))
        grads = tuple(None if t is None else g for t, g in zip(_differentiable(inputs), grads, strict=True))
    dq, dk, dv, dg, ds0, dz0 = grads
    return dq, dk, dv, dg, None, None, ds0, dz0, *[None] * (_M + 2)


def _plain_gradient(ctx: Any, inputs: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    spec = Spec(*ctx.spec[:_M])
    return *plain.gradients(lambda *x: plain.attend(Inputs(*x), spec), inputs, grads), *[None] * (_M + 2)


torch.library.register_autograd("subquad::linear_attention", _gradient, setup_context=_setup)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher, whose layers would take longer than the kernels."""

    backward = staticmethod(_gradient)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _forward(*inputs)
        _setup(ctx, inputs, output)
        return output


def _eager(x: Tensor) -> bool:
    """Whether nothing traces, fakes or counts operations, so that kernels can be started directly."""
    return type(x) in (Tensor, Parameter) and not (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    )


def fused_step(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor,
    spec: Spec, inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token by the Triton kernel, by any rule and without gradients; the arguments are those of `chunked.step`."""
    q_t, k_t, v_t = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_t, k_t, v_t))
    if log_gate is not None and log_gate.dim() == 3 and log_gate.stride(-1) != 1:
        log_gate = log_gate.contiguous()
    if inplace:
        if not (s[0, 0].is_contiguous() and z.stride(-1) == 1):
            raise ValueError(f"inplace=True with strides {s.stride()} of s: K and V of the state must be contiguous")
        return torch.ops.subquad.linear_attention_step_(q_t, k_t, v_t, log_gate, beta, s, z, *spec), s, z
    o, s, z = torch.ops.subquad.linear_attention_step(
        q_t, k_t, v_t, log_gate, beta, s.contiguous(), z.contiguous(), *spec
    )
    return o, s, z


def _step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor, *spec: Any
) -> Any:  # fmt: skip
    from subquad.ops.linear import launches_triton

    snew, znew = s.new_empty(s.shape), z.new_empty(z.shape)
    return launches_triton.step(q, k, v, log_gate, beta, s, z, snew, znew, Spec(*spec)), snew, znew


def _step_inplace(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor, *spec: Any
) -> Tensor:  # fmt: skip
    from subquad.ops.linear import launches_triton

    return launches_triton.step(q, k, v, log_gate, beta, s, z, s, z, Spec(*spec))


def _step_deferred(*args: Any) -> Tensor:
    from subquad.ops.linear import deferred_triton

    tensors, spec = args[:-_M], Spec(*args[-_M:])
    return deferred_triton.step(tensors, spec)


def _step_shapes(q: Tensor, _k: Tensor, v: Tensor, _g: Any, _beta: Any, s: Tensor, z: Tensor, *_spec: Any) -> Any:
    return q.new_empty(v.shape), s.new_empty(s.shape), z.new_empty(z.shape)


def _output_shape(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(v.shape)


_STEP = "Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor? beta, Tensor s, Tensor z"
operator("linear_attention_step", f"{_STEP}, {SPEC}", 3, _step, _step_shapes)
_STEP = "Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor? beta, Tensor(a!) s, Tensor(b!) z"
operator("linear_attention_step_", f"{_STEP}, {SPEC}", 1, _step_inplace, _output_shape)
_QUEUE = "Tensor(c!)? keys, Tensor(d!)? values, Tensor start, Tensor position, Tensor? cos, Tensor? sin"
_STEP = f"Tensor q, Tensor k, Tensor v, Tensor(a!) s, Tensor(b!) z, {_QUEUE}"
operator("linear_attention_step_deferred", f"{_STEP}, {SPEC}", 1, _step_deferred, _output_shape)
