"""Rows of a small table, many times each, with vectors of their places added or put beside them.

The gradient of the table is a product: torch's sorts the ids, which takes longer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ops.column_sums import column_sums
from subquad.ops.impl import Impl, choose, traced

LARGEST = 512  # rows of a table: the work of the product grows with them


def lookup(
    ids: Tensor, table: Tensor, places: Tensor | None = None, *, beside: bool = False, impl: Impl = "auto"
) -> Tensor:
    """ids [..., T] int64, table [V, D], places [T, D], which are added -> [..., T, D]

    beside: places [T, E] come after the rows of the table instead -> [..., T, D + E]
    """
    plain = traced() or (impl == "auto" and not (torch.is_grad_enabled() and table.requires_grad))
    if plain or choose(impl, "lookup", table, _unsupported(ids, table, places)) == "torch":
        x = F.embedding(ids, table)
        if places is None:
            return x
        return torch.cat((x, places.expand(*x.shape[:-1], -1)), -1) if beside else x + places
    y: Tensor = _Lookup.apply(ids, table, places, table.shape[1] if beside else 0)
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
    def forward(ctx: Any, ids: Tensor, table: Tensor, places: Tensor | None, column: int) -> Tensor:
        """`column`: the first to which places are added."""
        from subquad.ops import lookup_triton

        ctx.save_for_backward(ids)
        ctx.shape, ctx.column = table.shape, column
        return lookup_triton.lookup(ids, table, places, column)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import lookup_triton

        (ids,) = ctx.saved_tensors
        _, for_table, for_places, _ = ctx.needs_input_grad
        grad, (rows, width) = grad.contiguous(), ctx.shape
        of_table = lookup_triton.row_sums(ids.flatten(), grad.flatten(0, -2)[:, :width], rows) if for_table else None
        of_places = None
        if for_places:
            each = grad.shape[-2:]
            of_places = column_sums(grad.view(-1, each.numel()), grad.dtype).view(each)[:, ctx.column :]
        return None, of_table, of_places, None
