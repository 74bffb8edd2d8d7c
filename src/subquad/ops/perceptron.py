"""The two products of a feed-forward, for training: y = W₂ act(W₁x + b₁) + b₂, which keeps little for its gradient.

Of the wide inner vectors only those before the activation are kept, or for relu those after it. The gradient computes
the others again where it reads the first anyway, and in the same pass the sum that is the gradient of b₁. Gradients of
weights are written in the weights' own type: autograd would write them in 16 bits, and then cast them.

In pieces, for long sequences, only x is kept: the inner vectors of one piece exist at a time, also in the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.gradients import once_differentiable
from subquad.ops.column_sums import column_sums
from subquad.ops.feed_forward import Activation
from subquad.ops.impl import Impl, choose, traced
from subquad.ops.precision import uncast
from subquad.ops.projection import product, product_type, unsupported


def perceptron(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    *,
    activation: Activation = "gelu",
    pieces: int = 1,
    impl: Impl = "auto",
) -> Tensor:
    """x [..., D], w_in [F, D], w_out [D, F] -> [..., D]; `pieces` of the rows are computed one after the other."""
    kind, relu = product_type(x), activation == "relu"
    given = w_in, b_in, w_out, b_out
    if traced() or choose(impl, "perceptron", x, unsupported(x, w_in, kind)) == "torch":
        if pieces == 1:
            return _plain(x, *given, relu)
        parts = x.reshape(-1, x.shape[-1]).chunk(pieces)
        return torch.cat([checkpoint(_plain, part, *given, relu, use_reentrant=False) for part in parts]).view(x.shape)
    if pieces == 1:
        y: Tensor = _Perceptron.apply(x, *given, relu, kind)
        return y
    weights = [t.detach().to(kind) for t in given]
    rows = _Gradients.apply(x, *given, weights, relu, pieces)
    y = _Products.apply(rows, weights, relu, pieces)
    return y.view(x.shape)


def _plain(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, relu: bool) -> Tensor:
    h = F.linear(x, w_in, b_in)
    return F.linear(F.relu(h) if relu else F.gelu(h), w_out, b_out)


class _Perceptron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, relu: bool, kind: torch.dtype
    ) -> Tensor:
        with uncast(x):
            rows, first, second = x.reshape(-1, x.shape[-1]).to(kind), w_in.to(kind), w_out.to(kind)
            h = _inner(rows, first, b_in.to(kind), relu)
            y = F.linear(_activated(h, relu), second, b_out.to(kind))
        ctx.save_for_backward(rows, h, first, second)
        ctx.relu, ctx.like = relu, [t.dtype for t in (x, w_in, b_in, w_out, b_out)]
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import perceptron_triton

        rows, h, first, second = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1]).to(h.dtype)
        of_x, of_w_in, of_b_in, of_w_out, of_b_out = ctx.like
        for_x, for_w_in, _, for_w_out, for_b_out, *_ = ctx.needs_input_grad
        dh, a, db = perceptron_triton.backward(h, dy @ second, ctx.relu, of_b_in)
        dx = (dh @ first).view(*grad.shape[:-1], -1).to(of_x) if for_x else None
        dw_in = product(dh.mT, rows, of_w_in) if for_w_in else None
        dw_out = product(dy.mT, a, of_w_out) if for_w_out else None
        return dx, dw_in, db, dw_out, column_sums(dy, of_b_out) if for_b_out else None, None, None


class _Gradients(torch.autograd.Function):
    """The first of two nodes in pieces: it gives the rows of x to `_Products`, and from it gets the gradient of y.

    So all that is kept is there before y is computed, and a checkpoint around both, which runs them again until it has
    what was kept, does not compute y again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, weights: list[Tensor],
        relu: bool, pieces: int,
    ) -> Tensor:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1]).to(weights[0].dtype)
        ctx.save_for_backward(rows, *weights[:3])
        ctx.relu, ctx.pieces, ctx.shape = relu, pieces, x.shape
        ctx.like = [t.dtype for t in (x, w_in, b_in, w_out, b_out)]
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import perceptron_triton

        rows, first, bias, second = ctx.saved_tensors
        of_x, of_w_in, of_b_in, of_w_out, of_b_out = ctx.like
        for_x, for_w_in, for_b_in, for_w_out, for_b_out, *_ = ctx.needs_input_grad
        dx, exact = torch.empty_like(rows), torch.float32
        dw_in, db_in, dw_out = (t.new_zeros(t.shape, dtype=exact) for t in (first, bias, second))
        for part, grad, to in _parts(ctx.pieces, rows, dy, dx):
            h = _inner(part, first, bias, ctx.relu)
            dh, a, db = perceptron_triton.backward(h, grad @ second, ctx.relu, exact)
            db_in += db
            if for_x:
                torch.mm(dh, first, out=to)
            if for_w_in:
                dw_in += product(dh.mT, part, exact)
            if for_w_out:
                dw_out += product(grad.mT, a, exact)
        found = (
            (for_x, dx.view(ctx.shape), of_x), (for_w_in, dw_in, of_w_in), (for_b_in, db_in, of_b_in),
            (for_w_out, dw_out, of_w_out),
        )  # fmt: skip
        grads = [grad.to(kind) if wanted else None for wanted, grad, kind in found]
        return *grads, column_sums(dy, of_b_out) if for_b_out else None, None, None, None


class _Products(torch.autograd.Function):
    """y, in pieces; all gradients are those of `_Gradients`."""

    @staticmethod
    def forward(_: Any, rows: Tensor, weights: list[Tensor], relu: bool, pieces: int) -> Tensor:
        first, b_in, second, b_out = weights
        y = torch.empty_like(rows)
        with uncast(rows):
            for part, to in _parts(pieces, rows, y):
                torch.addmm(b_out, _activated(_inner(part, first, b_in, relu), relu), second.mT, out=to)
        return y

    @staticmethod
    def backward(_: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, None, None


def _parts(pieces: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.chunk(pieces) for t in tensors), strict=True)


def _inner(rows: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """What is kept of the inner vectors."""
    if relu:
        return torch._addmm_activation(bias, rows, weight.mT)  # relu is the product's last step
    return F.linear(rows, weight, bias)


def _activated(h: Tensor, relu: bool) -> Tensor:
    from subquad.ops import perceptron_triton

    return h if relu else perceptron_triton.gelu(h)
