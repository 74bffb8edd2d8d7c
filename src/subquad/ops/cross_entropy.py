"""Cross-entropy of an output layer over a large vocabulary, without all its logits at once.

The tokens are cut into pieces. Each piece has its logits, its loss and its gradients before the next one begins, so
only the gradients of the layer's input and weights are kept for backward, and nothing is computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ops.impl import Impl, choose
from subquad.ops.precision import autocasts, uncast, wide_type

Gradients = tuple[Tensor, Tensor, Tensor | None]  # of x, weight and bias


def summed_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, counted: Tensor, pieces: int, *, impl: Impl = "auto"
) -> Tensor:
    """The sum of -log softmax(x W^T + b)[id] over the tokens that are counted; x [N, D], W [V, D], ids and counted [N].

    Like F.linear it computes in autocast's type; like cross_entropy its losses and their sum are at least float32.
    """
    kind = torch.get_autocast_dtype(x.device.type) if autocasts(x.device) else x.dtype
    how = choose(impl, "summed_cross_entropy", x, "float64" if kind == torch.float64 else None)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        total: Tensor = _Summed.apply(x, weight, bias, ids, counted, pieces, kind, how)
        return total
    return _sum(x, weight, bias, ids, counted, pieces, kind, how, grads=False)[0]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        counted: Tensor,
        pieces: int,
        kind: torch.dtype,
        how: str,
    ) -> Tensor:
        total, grads = _sum(x, weight, bias, ids, counted, pieces, kind, how, grads=True)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if t is None else (t * grad).to(t.dtype) for t in ctx.saved_tensors)
        return *grads, None, None, None, None, None


def _sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    counted: Tensor,
    pieces: int,
    kind: torch.dtype,
    how: str,
    grads: bool,
) -> tuple[Tensor, Gradients | tuple[()]]:
    with uncast(x):
        exact, size = wide_type(x), x.shape[0]
        w, b = weight.to(kind), None if bias is None else bias.to(kind)
        total = x.new_zeros((), dtype=exact)
        dx, dw = [], torch.zeros_like(weight, dtype=exact)
        db = None if bias is None else torch.zeros_like(bias, dtype=exact)
        for piece in range(pieces):
            here = slice(size * piece // pieces, size * (piece + 1) // pieces)
            rows = x[here].to(kind)
            losses, g = _losses(F.linear(rows, w, b), ids[here], counted[here], exact, how, grads)  # g [N', V]
            total = total + losses.sum()
            if g is not None:
                dx.append((g @ w).to(x.dtype))
                dw += g.mT @ rows
                if db is not None:
                    db += g.sum(0, dtype=exact)
        if not grads:
            return total, ()
        return total, (torch.cat(dx), dw.to(weight.dtype), None if db is None else db.to(weight.dtype))


def _losses(
    logits: Tensor, ids: Tensor, counted: Tensor, exact: torch.dtype, how: str, grads: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of logits [N, V], which nobody else needs, and the gradient of their sum."""
    if how == "triton" and torch.compiler.is_compiling():
        losses, g = torch.ops.subquad.cross_entropy(logits, ids, counted)
        return losses, g if grads else None
    if how == "triton":
        from subquad.ops import cross_entropy_triton

        g = logits if grads else None  # over the logits
        return cross_entropy_triton.losses_and_gradients(logits, ids, counted, g), g
    own, real = ids[:, None], counted[:, None]
    logs = F.log_softmax(logits, dim=-1, dtype=exact)
    losses = -logs.gather(-1, own).masked_fill(~real, 0)
    if not grads:
        return losses, None
    g = logs.exp_().scatter_add_(-1, own, own.new_full(own.shape, -1, dtype=exact))
    return losses, g.mul_(real).to(logits.dtype)


@torch.library.custom_op("subquad::cross_entropy", mutates_args=())
def _operator(logits: Tensor, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    from subquad.ops import cross_entropy_triton

    g = torch.empty_like(logits)
    return cross_entropy_triton.losses_and_gradients(logits, ids, counted, g), g


@_operator.register_fake
def _(logits: Tensor, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return logits.new_empty(logits.shape[0], dtype=torch.float32), torch.empty_like(logits)
