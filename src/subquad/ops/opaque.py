"""Wraps an attention function that loops over the sequence as one operator.

A program exported for any length cannot contain a loop over the length. An operator can: Python runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[Sequence[Tensor], str], Tensor]


def attention_operator(name: str, compute: Compute) -> Callable[[list[Tensor], str, bool], Tensor]:
    """`compute(inputs, settings)` as the operator subquad::<name>; the third argument says whether it uses randomness.

    The inputs are q [B, T, H, K], k, v [B, S, H, V] and any other tensors; the result is [B, T, H, V] of v's type.
    The backward computes it again, with the same random numbers.
    """

    def forward(inputs: Sequence[Tensor], settings: str, seed: Tensor | None) -> Tensor:
        return _repeatable(compute, inputs, settings, seed).contiguous()

    def shape_only(inputs: Sequence[Tensor], settings: str, seed: Tensor | None) -> Tensor:  # noqa: ARG001
        q, _, v = inputs[:3]
        return v.new_empty(*q.shape[:3], v.shape[3])

    def remember(ctx: Any, inputs: tuple[Sequence[Tensor], str, Tensor | None], output: Tensor) -> None:  # noqa: ARG001
        tensors, ctx.settings, seed = inputs
        ctx.save_for_backward(seed, *tensors)

    def backward(grad: Tensor, inputs: Sequence[Tensor], settings: str, seed: Tensor | None) -> list[Tensor]:
        # turn autograd on again, which torch turns off inside an operator
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            exclude = exclude.remove(key)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
            o = _repeatable(compute, leaves, settings, seed)
            floating = [t for t in leaves if t.requires_grad]
            grads = iter(torch.autograd.grad(o, floating, grad, allow_unused=True, materialize_grads=True))
        return [next(grads).contiguous() if t.requires_grad else torch.zeros_like(t) for t in leaves]

    def backward_shapes(grad: Tensor, inputs: Sequence[Tensor], settings: str, seed: Tensor | None) -> list[Tensor]:  # noqa: ARG001
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], None, None]:
        seed, *inputs = ctx.saved_tensors
        grads = gradients(grad, inputs, ctx.settings, seed)
        return [g if t.is_floating_point() else None for g, t in zip(grads, inputs, strict=True)], None, None

    operator = torch.library.custom_op(f"subquad::{name}", forward, mutates_args=())
    operator.register_fake(shape_only)
    gradients = torch.library.custom_op(f"subquad::{name}_backward", backward, mutates_args=())
    gradients.register_fake(backward_shapes)
    operator.register_autograd(differentiate, setup_context=remember)

    def run(inputs: list[Tensor], settings: str, random: bool) -> Tensor:
        return operator(inputs, settings, torch.randint(2**62, ()) if random else None)

    return run


def _repeatable(compute: Compute, inputs: Sequence[Tensor], settings: str, seed: Tensor | None) -> Tensor:
    if seed is None:
        return compute(inputs, settings)
    device = inputs[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        return compute(inputs, settings)
