"""The two products of a feed-forward, for training: y = W₂ act(W₁x + b₁) + b₂, which keeps little for its gradient.

Of the wide inner vectors only those before the activation are kept, or for relu those after it. The gradient computes
the others again where it reads the first anyway, and in the same pass the sum that is the gradient of b₁. Gradients of
weights are written in the weights' own type: autograd would write them in 16 bits, and then cast them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    impl: Impl = "auto",
) -> Tensor:
    """x [..., D], w_in [F, D], w_out [D, F] -> [..., D]"""
    kind = product_type(x)
    if traced() or choose(impl, "perceptron", x, unsupported(x, w_in, kind)) == "torch":
        h = F.linear(x, w_in, b_in)
        return F.linear(F.relu(h) if activation == "relu" else F.gelu(h), w_out, b_out)
    y: Tensor = _Perceptron.apply(x, w_in, b_in, w_out, b_out, activation == "relu", kind)
    return y


class _Perceptron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, relu: bool, kind: torch.dtype
    ) -> Tensor:
        from subquad.ops import perceptron_triton

        with uncast(x):
            rows, first, second = x.flatten(0, -2).to(kind), w_in.to(kind), w_out.to(kind)
            if relu:
                a = h = torch._addmm_activation(b_in.to(kind), rows, first.mT)  # relu is the product's last step
            else:
                h = F.linear(rows, first, b_in.to(kind))
                a = perceptron_triton.gelu(h)
            y = F.linear(a, second, b_out.to(kind))
        ctx.save_for_backward(rows, h, first, second)
        ctx.relu, ctx.like = relu, [t.dtype for t in (x, w_in, b_in, w_out, b_out)]
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import perceptron_triton

        rows, h, first, second = ctx.saved_tensors
        dy = grad.flatten(0, -2).to(h.dtype)
        of_x, of_w_in, of_b_in, of_w_out, of_b_out = ctx.like
        for_x, for_w_in, _, for_w_out, for_b_out, *_ = ctx.needs_input_grad
        dh, a, db = perceptron_triton.backward(h, dy @ second, ctx.relu, of_b_in)
        dx = (dh @ first).view(*grad.shape[:-1], -1).to(of_x) if for_x else None
        dw_in = product(dh.mT, rows, of_w_in) if for_w_in else None
        dw_out = product(dy.mT, a, of_w_out) if for_w_out else None
        return dx, dw_in, db, dw_out, column_sums(dy, of_b_out) if for_b_out else None, None, None
