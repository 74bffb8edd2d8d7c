"""Cross-entropy of an output layer over a large vocabulary, without all its logits at once.

The tokens are cut into pieces. Each piece has its logits, its loss and its gradients before the next one begins, so
only the gradients of the layer's input and weights are kept for backward, and nothing is computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.precision import autocasts, uncast, wide_type

Gradients = tuple[Tensor, Tensor, Tensor | None]  # of x, weight and bias


def summed_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, counted: Tensor, pieces: int
) -> Tensor:
    """The sum of -log softmax(x W^T + b)[id] over the tokens that are counted; x [N, D], W [V, D], ids and counted [N].

    Like F.linear it computes in autocast's type; like cross_entropy its losses and their sum are at least float32.
    """
    kind = torch.get_autocast_dtype(x.device.type) if autocasts(x.device) else x.dtype
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        total: Tensor = _Summed.apply(x, weight, bias, ids, counted, pieces, kind)
        return total
    return _sum(x, weight, bias, ids, counted, pieces, kind, grads=False)[0]


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
    ) -> Tensor:
        total, grads = _sum(x, weight, bias, ids, counted, pieces, kind, grads=True)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if t is None else (t * grad).to(t.dtype) for t in ctx.saved_tensors)
        return *grads, None, None, None, None


def _sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    counted: Tensor,
    pieces: int,
    kind: torch.dtype,
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
            rows, own, real = x[here].to(kind), ids[here, None], counted[here, None]
            logs = F.log_softmax(F.linear(rows, w, b), dim=-1, dtype=exact)  # [N', V]
            total = total - logs.gather(-1, own).masked_fill(~real, 0).sum()
            if grads:
                g = logs.exp_().scatter_add_(-1, own, own.new_full(own.shape, -1, dtype=exact))
                g = g.mul_(real).to(kind)
                dx.append((g @ w).to(x.dtype))
                dw += g.mT @ rows
                if db is not None:
                    db += g.sum(0, dtype=exact)
        if not grads:
            return total, ()
        return total, (torch.cat(dx), dw.to(weight.dtype), None if db is None else db.to(weight.dtype))
