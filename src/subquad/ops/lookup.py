"""Rows of a small table, many times each, whose gradient is a product: torch's sorts the ids, which takes longer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.impl import Impl, choose, traced

LARGEST = 512  # rows of a table: the work of the product grows with them


def lookup(ids: Tensor, table: Tensor, *, impl: Impl = "auto") -> Tensor:
    """ids [...] int64, table [V, D] -> [..., D]"""
    plain = traced() or (impl == "auto" and not (torch.is_grad_enabled() and table.requires_grad))
    if plain or choose(impl, "lookup", table, _unsupported(ids, table)) == "torch":
        return F.embedding(ids, table)
    y: Tensor = _Lookup.apply(ids, table)
    return y


def _unsupported(ids: Tensor, table: Tensor) -> str | None:
    if table.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it sums float32, bfloat16 and float16, not {table.dtype}"
    if len(table) > LARGEST:
        return f"it takes tables of at most {LARGEST} rows, not {len(table)}"
    return "no elements" if table.numel() == 0 or ids.numel() == 0 else None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        from subquad.ops import lookup_triton

        (ids,) = ctx.saved_tensors
        return None, lookup_triton.row_sums(ids.flatten(), grad.reshape(-1, grad.shape[-1]), ctx.rows)
