"""Attention whose loop runs as often as the sequence is long, as one node of a program that is exported for any length.

Such a program has no loop whose length is a size of its input. Inside an operator Python runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[Sequence[Tensor], str], Tensor]


def attention_operator(name: str, compute: Compute) -> Callable[[list[Tensor], str], Tensor]:
    """`compute` as the operator subquad::<name>, for q [B, T, H, K], k, v [B, S, H, V] and other tensors, and settings.

    The result is [B, T, H, V] of v's type. It is computed again for the gradients, so it must not draw random numbers.
    """

    def forward(inputs: Sequence[Tensor], settings: str) -> Tensor:
        return compute(inputs, settings).contiguous()

    def shape_only(inputs: Sequence[Tensor], settings: str) -> Tensor:  # noqa: ARG001 (the operator's arguments)
        q, _, v = inputs[:3]
        return v.new_empty(*q.shape[:3], v.shape[3])

    def remember(ctx: Any, inputs: tuple[Sequence[Tensor], str], output: Tensor) -> None:  # noqa: ARG001
        ctx.save_for_backward(*inputs[0])
        ctx.settings = inputs[1]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], None]:
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with torch.enable_grad():
            o = compute(inputs, ctx.settings)
        floating = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(o, floating, grad, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in inputs], None

    operator = torch.library.custom_op(f"subquad::{name}", forward, mutates_args=())
    operator.register_fake(shape_only)
    operator.register_autograd(differentiate, setup_context=remember)
    return operator
