"""A linear layer for training, whose gradient is written as it is used.

autograd writes the gradients of weight and bias in the 16 bits of the products, and casts them; here they are summed
into the type of the parameters. The sum over tokens, which is the gradient of the bias, is a kernel of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.gradients import once_differentiable
from subquad.ops.column_sums import column_sums
from subquad.ops.impl import Impl, choose, traced
from subquad.ops.precision import autocasts, uncast
from subquad.ops.row_linear import plain


def projection(x: Tensor, weight: Tensor, bias: Tensor, *, impl: Impl = "auto") -> Tensor:
    """x [..., D], weight [O, D], bias [O] -> [..., O]"""
    kind = product_type(x)
    if traced() or choose(impl, "projection", x, unsupported(x, weight, kind)) == "torch":
        return F.linear(x, weight, bias)
    y: Tensor = _Projection.apply(x, weight, bias, kind)
    return y


def project(x: Tensor, layer: nn.Module) -> Tensor:
    """layer(x), by `projection` where that replaces it."""
    if isinstance(layer, nn.Linear) and replaces(x, layer):
        return projection(x, layer.weight, layer.bias)
    y: Tensor = layer(x)
    return y


def replaces(x: Tensor, *layers: nn.Module) -> bool:
    """Whether an op for training with the weights of these layers replaces them: it has kernels, and nobody watches."""
    if x.device.type != "cuda" or not torch.is_grad_enabled() or traced():
        return False
    for layer in layers:
        if not plain(layer) or layer.bias is None:
            return False
    weight = layers[0].weight
    if not isinstance(weight, Tensor):
        return False
    return choose("auto", "projection", x, unsupported(x, weight, product_type(x))) == "triton"


def product_type(x: Tensor) -> torch.dtype:
    """The type of products of x with weights; autocast leaves float64 alone."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x.device) and x.dtype != torch.float64 else x.dtype


def unsupported(x: Tensor, weight: Tensor, kind: torch.dtype) -> str | None:
    """Why an op for training cannot take x and its first weight, with products of this type."""
    if kind not in (torch.bfloat16, torch.float16):
        return f"it computes 16-bit types, not {kind}"
    if weight.dtype != kind and (not autocasts(x.device) or weight.dtype == torch.float64):
        return f"x is {x.dtype}, the weights are {weight.dtype}"
    return "no elements" if x.numel() == 0 else None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in the type given, rounded once where the device can."""
    if dtype == a.dtype:
        return a @ b
    if a.device.type == "cuda" and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kind: torch.dtype) -> Tensor:
        with uncast(x):
            short, matrix = x.to(kind), weight.to(kind)
            y = F.linear(short, matrix, bias.to(kind))
        ctx.save_for_backward(short, matrix)
        ctx.like = x.dtype, weight.dtype, bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.like
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dy = grad.reshape(-1, grad.shape[-1])
        dx = (dy @ matrix).view(x.shape).to(of_x) if for_x else None
        dw = product(dy.mT, x.reshape(-1, x.shape[-1]), of_weight) if for_weight else None
        return dx, dw, column_sums(dy, of_bias) if for_bias else None, None
