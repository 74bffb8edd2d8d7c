"""The kernel of the gradient of `lookup`: a program adds the rows of its tokens to a table that it holds.

The additions are products with one-hot rows. A float32 number is three of bfloat16, whose products with 1 are exact.

Legend: N tokens, V rows of the table, D width, P programs for the same columns, BT tokens and BD columns of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, tile_of

HELD = 8192  # numbers of the table that a program holds: 32 per thread
TOKENS, WARPS = 32, 8
PROGRAMS = 2  # per multiprocessor


@triton.jit
def gradients(
    ids, dx, parts, N, D, V: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, P: tl.constexpr,
    SPLIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The sums over this program's tokens: parts [P, V, D]."""
    v = tl.arange(0, BV)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BV, BD), tl.float32)
    for n0 in range(tl.program_id(0) * BT, N, P * BT):
        n = n0 + tl.arange(0, BT)
        id = tl.load(ids + n, mask=n < N, other=-1)
        one = (v[:, None] == id[None, :]).to(DOT)  # [BV, BT]
        there = (n < N)[:, None] & (d < D)[None, :]
        x = tl.load(dx + n.to(tl.int64)[:, None] * D + d[None, :], mask=there, other=0.0)
        high = x.to(DOT)
        total = tl.dot(one, high, total)
        if SPLIT:
            rest = x - high.to(tl.float32)
            middle = rest.to(DOT)
            total = tl.dot(one, middle, total)
            total = tl.dot(one, (rest - middle.to(tl.float32)).to(DOT), total)
    at = parts + (tl.program_id(0) * V + v).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, total, mask=(v < V)[:, None] & (d < D)[None, :])


def table_gradient(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    """ids [N], grad [N, D] -> [rows, D]: the sum of the gradients of each row's tokens"""
    size, width = grad.shape
    table = tile_of(rows)
    columns = min(tile_of(width), max(16, HELD // table))
    blocks = blocks_of(width, columns)
    most = 3 if INTERPRETED else PROGRAMS * torch.cuda.get_device_properties(grad.device).multi_processor_count
    programs = min(blocks_of(size, TOKENS), max(1, most // blocks))
    parts = grad.new_empty((programs, rows, width), dtype=torch.float32)
    constants = {
        "V": rows, "BV": table, "BD": columns, "BT": TOKENS, "P": programs,
        "SPLIT": grad.dtype is torch.float32 and not INTERPRETED, "DOT": tl.float32 if INTERPRETED else tl.bfloat16,
    }  # fmt: skip
    plan = Plan((programs, blocks), (size, width), constants, WARPS)
    launch(gradients, (ids.contiguous(), grad.contiguous(), parts), plan)
    return parts.sum(0).to(grad.dtype)
