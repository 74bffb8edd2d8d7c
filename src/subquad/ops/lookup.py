"""Rows of a small table, many times each, with vectors of their places added.

The gradient of the table is a product: torch's sorts the ids, which takes longer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.column_sums import column_sums
from subquad.ops.impl import Impl, choose, traced

LARGEST = 512  # rows of a table: the work of the product grows with them


def lookup(ids: Tensor, table: Tensor, places: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """ids [..., T] int64, table [V, D], places [T, D], which are added -> [..., T, D]"""
    plain = traced() or (impl == "auto" and not (torch.is_grad_enabled() and table.requires_grad))
    if plain or choose(impl, "lookup", table, _unsupported(ids, table, places)) == "torch":
        x = F.embedding(ids, table)
        return x if places is None else x + places
    y: Tensor = _Lookup.apply(ids, table, places)
    return y


def _unsupported(ids: Tensor, table: Tensor, places: Tensor | None) -> str | None:
    if table.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it sums float32, bfloat16 and float16, not {table.dtype}"
    if places is not None and places.dtype != table.dtype:
        return f"the table is {table.dtype}, places are {places.dtype}"
    if len(table) > LARGEST:
        return f"it takes tables of at most {LARGEST} rows, not {len(table)}"
    return "no elements" if table.numel() == 0 or ids.numel() == 0 else None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, places: Tensor | None) -> Tensor:
        from subquad.ops import lookup_triton

        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return lookup_triton.lookup(ids, table, places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import lookup_triton

        (ids,) = ctx.saved_tensors
        _, for_table, for_places = ctx.needs_input_grad
        grad = grad.contiguous()
        of_table = lookup_triton.row_sums(ids.flatten(), grad.flatten(0, -2), ctx.rows) if for_table else None
        length, width = grad.shape[-2:]
        of_places = column_sums(grad.view(-1, length * width), grad.dtype) if for_places else None
        return None, of_table, None if of_places is None else of_places.view(length, width)
