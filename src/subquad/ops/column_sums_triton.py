"""The kernel of `column_sums`. Of many rows it runs twice: programs sum their rows, and then their sums are summed.

Legend: R rows, D columns, BM rows and BN columns of a tile, P programs for the same columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, blocks_of, launch, multiprocessors

TILE, WARPS = 4096, 4  # elements of a tile: 32 per thread, all of which are read at once
COLUMNS = 128  # of a tile
FEW, NARROW = 2048, 8  # so many rows are summed in one pass, by programs with at least so many columns
PROGRAMS = 2  # per multiprocessor


@triton.jit
def add_rows(x, y, R, D, STRIDE, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr):
    """y [P, D]: each program's tiles of rows of x, summed."""
    d = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for r0 in range(tl.program_id(1) * BM, R, P * BM):
        r = r0 + tl.arange(0, BM)
        there = (r < R)[:, None] & (d < D)[None, :]
        total += tl.load(x + r.to(tl.int64)[:, None] * STRIDE + d[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(1) * D + d, tl.sum(total, 0).to(y.dtype.element_ty), mask=d < D)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [R, D] -> [D]"""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows > FEW:
        columns = min(COLUMNS, triton.next_power_of_2(width))
        most = max(1, PROGRAMS * multiprocessors(x.device) // blocks_of(width, columns))
        x = _sums(x, columns, min(blocks_of(rows, TILE // columns), most), torch.float32)
    columns = max(NARROW, min(COLUMNS, TILE // triton.next_power_of_2(x.shape[0])))
    return _sums(x, min(columns, triton.next_power_of_2(width)), 1, dtype)[0]


def _sums(x: Tensor, columns: int, programs: int, dtype: torch.dtype) -> Tensor:
    """[programs, D]"""
    rows, width = x.shape
    tile = min(TILE // columns, triton.next_power_of_2(rows))
    sums = x.new_empty((programs, width), dtype=dtype)
    constants = {"BM": tile, "BN": columns, "P": programs}
    launch(
        add_rows, (x, sums), Plan((blocks_of(width, columns), programs), (rows, width, x.stride(0)), constants, WARPS)
    )
    return sums
