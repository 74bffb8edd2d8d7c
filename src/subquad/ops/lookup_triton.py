"""The kernels of `lookup`. The gradient is a matrix of ones where a token has an id, times the gradients of the tokens.

Tensor cores take 16 bits: a float32 is the sum of three numbers in bfloat16, exactly, and so is its product with one.

Legend: R tokens, T of them in a sequence, V rows of the table, D width, W that of the result, BM, BV and BD of a tile,
P programs for the same part of the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.column_sums_triton import column_sums
from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, multiprocessors, tile_of

TOKENS, ROWS, COLUMNS = 32, 128, 64  # the largest tile: two programs fit on a multiprocessor
PROGRAMS = 2  # per multiprocessor
WARPS, STAGES = 8, 3
TILE, TILE_WARPS = 2048, 4  # elements of a program of `gather`


@triton.jit(debug=True)  # so that it asserts, as torch's lookup does; of products in 64 bits overflow is not asserted
def gather(ids, table, places, y, R, T, V, D, W, AT, BM: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr):
    """y [R, W] = table[ids], and places of its T tokens added to each sequence, to the columns from AT on."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1).to(tl.int64) * BD + tl.arange(0, BD)
    there = (r < R)[:, None] & (d < W)[None, :]
    i = tl.load(ids + r, mask=r < R, other=0)
    tl.device_assert((i >= 0) & (i < V), "a token is not in the table")
    u = tl.load(table + i[:, None] * D + d[None, :], mask=there & (d < D)[None, :], other=0.0)
    if ADD:
        of_place = places + (r.to(tl.int32) % T).to(tl.int64)[:, None] * (W - AT) + (d - AT)[None, :]
        place = tl.load(of_place, mask=there & (d >= AT)[None, :], other=0.0)
        u = (u.to(tl.float32) + place.to(tl.float32)).to(u.dtype)
    tl.store(y + r[:, None] * W + d[None, :], u, mask=there)


@triton.jit
def sum_by_id(
    ids, g, parts, R, V, D, STRIDE,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """parts [P, V, D]: of each row of the table, the sum of the gradients of its tokens among this program's."""
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BV, BD), tl.float32)
    for r0 in range(tl.program_id(2) * BM, R, P * BM):
        r = r0 + tl.arange(0, BM)
        there = (r < R)[:, None] & (d < D)[None, :]
        u = tl.load(g + r.to(tl.int64)[:, None] * STRIDE + d[None, :], mask=there, other=0.0)
        ids_of = tl.load(ids + r, mask=r < R, other=-1).to(tl.int32)
        ones = (ids_of[None, :] == v[:, None]).to(DOT)
        high = u.to(DOT)
        total = tl.dot(ones, high, total)
        if SPLIT:
            u -= high.to(tl.float32)
            middle = u.to(DOT)
            total = tl.dot(ones, middle, total)
            total = tl.dot(ones, (u - middle.to(tl.float32)).to(DOT), total)
    at = parts + (tl.program_id(2).to(tl.int64) * V + v[:, None]) * D + d[None, :]
    tl.store(at, total, mask=(v < V)[:, None] & (d < D)[None, :])


def lookup(ids: Tensor, table: Tensor, places: Tensor | None, column: int) -> Tensor:
    """ids [..., T], table [V, D], places [T, W - column] -> [..., T, W], where W = D if they begin at column 0"""
    ids, table = ids.contiguous(), table.contiguous()
    rows, width = table.shape
    whole = width if places is None else column + places.shape[1]
    y = table.new_empty((*ids.shape, whole))
    wide = min(256, triton.next_power_of_2(whole))
    tile = TILE // wide
    constants = {"BM": tile, "BD": wide, "ADD": places is not None}
    grid = blocks_of(ids.numel(), tile), blocks_of(whole, wide)
    numbers = ids.numel(), ids.shape[-1], rows, width, whole, column
    tensors = ids, table, table if places is None else places.contiguous(), y
    launch(gather, tensors, Plan(grid, numbers, constants, TILE_WARPS))
    return y


def row_sums(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    """ids [R], grad [R, D] -> [rows, D]: the sum of the gradients with each id, in an order that depends on shapes."""
    tokens, width = grad.shape
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    tall, wide = min(ROWS, tile_of(rows)), min(COLUMNS, tile_of(width))
    blocks = blocks_of(rows, tall), blocks_of(width, wide)
    most = max(1, PROGRAMS * multiprocessors(grad.device) // (blocks[0] * blocks[1]))
    programs = min(blocks_of(tokens, TOKENS), most)
    parts = grad.new_empty((programs, rows, width), dtype=torch.float32)
    short = {torch.float32: tl.bfloat16, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[grad.dtype]
    constants = {
        "BM": TOKENS, "BV": tall, "BD": wide, "P": programs,
        "DOT": tl.float32 if INTERPRETED else short, "SPLIT": grad.dtype == torch.float32,
    }  # fmt: skip
    numbers = tokens, rows, width, grad.stride(0)
    launch(sum_by_id, (ids, grad, parts), Plan((*blocks, programs), numbers, constants, WARPS, STAGES))
    return column_sums(parts.flatten(1), grad.dtype).view(rows, width)
