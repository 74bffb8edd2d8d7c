"""The product with a lower triangular matrix over positions, without a copy of it and without its upper half."""

from typing import Any

import torch
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ops.impl import traced
from subquad.ops.lengths import symbolic
from subquad.ops.precision import autocasts

ROWS = 1024  # of one block; the copy of a block is all that the triangle costs


def triangular_product(weight: Tensor, x: Tensor) -> Tensor:
    """tril(weight) x over positions: weight [T, T], x [B, T, D] -> [B, T, D]."""
    elsewhere = traced() or autocasts(x.device)
    if elsewhere or symbolic(*x.shape) or len(weight) <= ROWS:
        return torch.einsum("ts,bsd->btd", weight.tril(), x)
    y: Tensor = _Triangular.apply(weight, x)
    return y


class _Triangular(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        columns = x.transpose(0, 1).flatten(1)  # [T, B·D]
        ctx.save_for_backward(weight, columns)
        y = torch.empty_like(columns)
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            torch.mm(weight[rows, : start + ROWS].tril(start), columns[: start + ROWS], out=y[rows])
        return y.view(len(weight), len(x), -1).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, columns = ctx.saved_tensors
        grad, batch = grad.transpose(0, 1).flatten(1), len(grad)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[0] else None
        of_x = torch.empty_like(columns) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), ROWS):
            block = slice(start, start + ROWS)
            if of_weight is not None:
                torch.mm(grad[block], columns[: start + ROWS].T, out=of_weight[block, : start + ROWS]).tril_(start)
            if of_x is not None:
                torch.mm(weight[start:, block].tril().T, grad[start:], out=of_x[block])
        return of_weight, None if of_x is None else of_x.view(len(weight), batch, -1).transpose(0, 1)
