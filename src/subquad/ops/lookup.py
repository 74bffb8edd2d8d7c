"""Rows of a table by their numbers, with a fast gradient for small vocabularies, such as bytes and pixel values.

torch sorts the numbers for the gradient, which takes a dozen kernels, or adds with atomics, which queue where many
tokens are equal. A small table is instead a product: the gradient is the sum of one-hot rows times those of the tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.impl import Impl, choose, exporting, traced

MOST = 512  # rows of a table whose gradient a program holds
FEW = 4096  # tokens up to which torch has a gradient without sorting


def lookup(ids: Tensor, table: Tensor, *, impl: Impl = "auto") -> Tensor:
    """ids [...] from 0 to V - 1, table [V, D] -> [..., D]"""
    plain = traced() and (exporting() or not torch.compiler.is_compiling())
    plain = plain or not (torch.is_grad_enabled() and table.requires_grad) or (impl == "auto" and not table.is_cuda)
    if plain or choose(impl, "lookup", table, _unsupported(ids, table, impl)) == "torch":
        return F.embedding(ids, table)
    x: Tensor = _Lookup.apply(ids, table)
    return x


def _unsupported(ids: Tensor, table: Tensor, impl: Impl) -> str | None:
    if table.shape[0] > MOST:
        return f"it takes tables of at most {MOST} rows, not {table.shape[0]}"
    if table.dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, not {table.dtype}"
    return "few tokens" if impl == "auto" and not torch.compiler.is_compiling() and ids.numel() <= FEW else None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return F.embedding(ids, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.subquad.table_gradient(ids, grad, ctx.rows)


@torch.library.custom_op("subquad::table_gradient", mutates_args=())
def _operator(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    from subquad.ops import lookup_triton

    return lookup_triton.table_gradient(ids.reshape(-1), grad.reshape(-1, grad.shape[-1]), rows)


@_operator.register_fake
def _(ids: Tensor, grad: Tensor, rows: int) -> Tensor:  # noqa: ARG001
    return grad.new_empty(rows, grad.shape[-1])
