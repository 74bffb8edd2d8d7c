"""Exact softmax over a pattern, in Triton: one family of flash kernels over tiles of re-addressed tokens.

A program holds a tile of queries (forward, dq) or of keys (dkv) and walks the tiles of the other side that an atom of
the pattern can reach, between bounds that it computes itself. Inside a tile the atom's own rule and the exclusion of
earlier atoms are evaluated on positions, unless a test on the corners of the tile shows that every pair is visible.

Tiles hold consecutive positions, or points of a lattice: residue by residue, r, r + l, r + 2l, ..., each residue padded
to `pad` points. In that order a stride is block-diagonal. If a residue has fewer points than a tile has rows, a tile
holds several residues.

Passes over the same queries continue one softmax: a later pass starts from the output and the log-sum-exp of the
earlier one. The backward of each pass only needs the final log-sum-exp, so passes add up.

No compile-time constant depends on the length of the sequence.
"""
# ruff: noqa: RET505 (a compile-time test keeps all its branches)

from functools import lru_cache
from math import gcd, inf, log2
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from subquad.ops.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.sparse import plan

# atoms as four integers: the kind and its parameters
GLOBAL = tl.constexpr(0)  # tokens
LOCAL = tl.constexpr(1)  # before, after
BLOCK = tl.constexpr(2)  # l, before, after
DILATED = tl.constexpr(3)  # gap, window
STRIDED = tl.constexpr(4)  # l
SUMMARY = tl.constexpr(5)  # l, c, first column of a block; -1: each head has its own, which a kernel looks up
RANDOM = tl.constexpr(6)  # block size, blocks of a row
DENSE = tl.constexpr(7)
ROWS = tl.constexpr(8)  # tokens: the queries that read everything, seen from the keys
STRIP = tl.constexpr(9)  # as SUMMARY: what the far part of a summary leaves, see `far_backward`
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Config(NamedTuple):
    queries: int  # rows of a tile of queries
    keys: int  # rows of a tile of keys
    warps: int
    stages: int


# by pass and by the bytes of a row (a head in its type, at least 128); a pass without its own takes the one before "_"
CONFIGS: dict[tuple[str, int], Config] = {
    ("forward", 128): Config(64, 64, 4, 3),
    ("forward", 256): Config(128, 64, 8, 2),
    ("forward", 512): Config(64, 32, 4, 2),
    ("forward_lattice", 128): Config(64, 32, 4, 3),
    ("forward_summary", 128): Config(128, 64, 8, 2),
    ("dq", 128): Config(64, 32, 4, 3),
    ("dq", 256): Config(64, 64, 4, 2),
    ("dq", 512): Config(64, 32, 4, 1),
    ("dkv", 128): Config(64, 64, 4, 3),
    ("dkv", 256): Config(32, 128, 8, 2),
    ("dkv", 512): Config(32, 32, 4, 1),
    ("dkv_lattice", 128): Config(64, 64, 4, 2),
}
# arguments that change with the length: a value that is 1, or a multiple of 16, must not make another kernel
CHANGING = [
    "T", "S", "tiles", "row0", "rows", "col0", "cols", "pad", "shift", "low", "split", "table_rows",
    "lse_piece", "lse_head", "table_batch", "table_head", "far_batch",
    "starts_batch", "starts_head", "readers_batch", "readers_head",
]  # fmt: skip
SPLIT = 2048  # keys (or queries) of one program where few rows read, or are read by, the whole sequence


@triton.jit
def _held(i, j, first, A: tl.constexpr, n: tl.constexpr):
    """Whether atom n holds the pairs (i, j), elementwise; `first`: the first column of a block, if heads differ."""
    d = i - j
    if A[4 * n] == GLOBAL:
        return (i < A[4 * n + 1]) | (j < A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        return (d <= A[4 * n + 1]) & (d >= -A[4 * n + 2])
    elif A[4 * n] == BLOCK:
        apart = i // A[4 * n + 1] - j // A[4 * n + 1]
        return (apart <= A[4 * n + 2]) & (apart >= -A[4 * n + 3])
    elif A[4 * n] == DILATED:
        span: tl.constexpr = A[4 * n + 1] * A[4 * n + 2]
        return (d <= span) & (d >= -span) & (d % A[4 * n + 1] == 0)
    elif A[4 * n] == STRIDED:
        return d % A[4 * n + 1] == 0
    elif A[4 * n] == SUMMARY:
        start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
        place = j % A[4 * n + 1] + 0 * i
        return (place >= start) & (place < start + A[4 * n + 2])
    elif A[4 * n] == STRIP:
        start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
        s = j // A[4 * n + 1] * A[4 * n + 2] + j % A[4 * n + 1] - start
        late = s > i // (A[4 * n + 1] // A[4 * n + 2]) - A[4 * n + 2]
        place = j % A[4 * n + 1]
        column = (place >= start) & (place < start + A[4 * n + 2])
        return column & late & (j // A[4 * n + 1] < i // A[4 * n + 1])
    else:
        return d == d


@triton.jit
def _whole(i0, i1, j0, j1, A: tl.constexpr, n: tl.constexpr):
    """Whether atom n surely holds all pairs between the corners."""
    if A[4 * n] == LOCAL:
        return (i1 - j0 <= A[4 * n + 1]) & (j1 - i0 <= A[4 * n + 2])
    elif A[4 * n] == BLOCK:
        row0, row1, column0, column1 = (
            i0 // A[4 * n + 1],
            i1 // A[4 * n + 1],
            j0 // A[4 * n + 1],
            j1 // A[4 * n + 1],
        )
        return (row1 - column0 <= A[4 * n + 2]) & (column1 - row0 <= A[4 * n + 3])
    elif A[4 * n] == DILATED:
        span: tl.constexpr = A[4 * n + 1] * A[4 * n + 2]
        return (i1 - j0 <= span) & (j1 - i0 <= span)
    elif A[4 * n] == STRIP:
        return i0 != i0
    else:
        return i0 == i0


@triton.jit
def _apart(i0, i1, j0, j1, A: tl.constexpr, n: tl.constexpr):
    """Whether atom n surely holds no pair between the corners."""
    if A[4 * n] == GLOBAL:
        return (i0 >= A[4 * n + 1]) & (j0 >= A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        return (i0 - j1 > A[4 * n + 1]) | (j0 - i1 > A[4 * n + 2])
    elif A[4 * n] == BLOCK:
        row0, row1, column0, column1 = (
            i0 // A[4 * n + 1],
            i1 // A[4 * n + 1],
            j0 // A[4 * n + 1],
            j1 // A[4 * n + 1],
        )
        return (row0 - column1 > A[4 * n + 2]) | (column0 - row1 > A[4 * n + 3])
    elif A[4 * n] == DILATED:
        span: tl.constexpr = A[4 * n + 1] * A[4 * n + 2]
        return (i0 - j1 > span) | (j0 - i1 > span)
    else:
        return i0 != i0


@triton.jit
def _free(i0, i1, j0, j1, low, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether every pair between the corners is visible through atom n and belongs to no earlier one."""
    free = _whole(i0, i1, j0, j1, A, n)
    if A[4 * n] == STRIDED or A[4 * n] == DILATED:
        free = free & (low < 0)  # one residue
    if A[4 * n] != ROWS:
        for e in tl.static_range(0, n):
            free = free & _apart(i0, i1, j0, j1, A, e)
    if CAUSAL:
        free = free & (j1 <= i0)
    return free


@triton.jit
def _seen(i, j, x, own, first, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr):
    """Which pairs are visible through atom n and belong to no earlier one; `x`: the side whose random block is own."""
    if A[4 * n] == RANDOM:
        seen = (x // A[4 * n + 1] == own) & (i == i) & (j == j)
    elif A[4 * n] == SUMMARY:
        seen = (i == i) & (j == j)  # the walk only meets its columns
    else:
        seen = _held(i, j, first, A, n)
    if A[4 * n] != ROWS:
        for e in tl.static_range(0, n):
            seen = seen & (_held(i, j, first, A, e) == 0)
    if CAUSAL:
        seen = seen & (j <= i)
    return seen


@triton.jit
def _place(f, a, pad, shift, low, STEP: tl.constexpr):
    """The positions of the entries a after index f: consecutive, or residue by residue of a lattice."""
    if STEP == 1:
        return f + a
    else:
        return f // pad + (a >> shift) + STEP * (f % pad + (a & low))


@triton.jit
def _corner(f, pad, STEP: tl.constexpr):
    """The position of index f."""
    if STEP == 1:
        return f
    else:
        return f // pad + STEP * (f % pad)


@triton.jit
def _column(s, first, A: tl.constexpr, n: tl.constexpr):
    """The position of the s-th column of a summary."""
    start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
    return s // A[4 * n + 2] * A[4 * n + 1] + start + s % A[4 * n + 2]


@triton.jit
def _columns_below(x, first, A: tl.constexpr, n: tl.constexpr):
    """How many keys of a summary lie before position x."""
    start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
    return x // A[4 * n + 1] * A[4 * n + 2] + tl.minimum(tl.maximum(x % A[4 * n + 1] - start, 0), A[4 * n + 2])


@triton.jit
def _key_range(
    f,
    i0,
    i1,
    end,
    pad,
    first,
    A: tl.constexpr,
    n: tl.constexpr,
    CAUSAL: tl.constexpr,
    STEP: tl.constexpr,
    BM: tl.constexpr,
):
    """Which of atom n's keys the queries i0 .. i1 (from index f on) can reach; `end`: how many keys there are."""
    lo = 0
    hi = end
    if A[4 * n] == GLOBAL:
        hi = tl.minimum(hi, A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        lo = i0 - A[4 * n + 1]
        hi = tl.minimum(hi, i1 + A[4 * n + 2] + 1)
    elif A[4 * n] == BLOCK:
        lo = (i0 // A[4 * n + 1] - A[4 * n + 2]) * A[4 * n + 1]
        hi = tl.minimum(hi, (i1 // A[4 * n + 1] + A[4 * n + 3] + 1) * A[4 * n + 1])
    elif A[4 * n] == STRIP:
        lo = i0 // (A[4 * n + 1] // A[4 * n + 2]) - A[4 * n + 2] + 1
        hi = i1 // A[4 * n + 1] * A[4 * n + 2]
    if STEP != 1:
        lo = f // pad * pad
        hi = ((f + BM - 1) // pad + 1) * pad
        if A[4 * n] == DILATED:
            lo = tl.maximum(lo, f - A[4 * n + 2])
            hi = tl.minimum(hi, f + BM + A[4 * n + 2])
        if CAUSAL:
            hi = tl.minimum(hi, f + BM)
        hi = tl.minimum(hi, STEP * pad)
    else:
        if CAUSAL and A[4 * n] != STRIP:
            hi = tl.minimum(hi, i1 + 1)
        if A[4 * n] == SUMMARY:
            hi = _columns_below(hi, first, A, n)
        elif A[0] == GLOBAL and A[4 * n] != GLOBAL:
            lo = tl.maximum(lo, A[1])
        lo = tl.maximum(lo, 0)
    return lo, hi


@triton.jit
def _query_range(
    f,
    j0,
    j1,
    T,
    row0,
    pad,
    first,
    A: tl.constexpr,
    n: tl.constexpr,
    CAUSAL: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
):
    """Which queries can reach the keys j0 .. j1 (from index f on) through atom n."""
    lo = row0
    hi = T
    if A[4 * n] == GLOBAL:
        lo = 0
    elif A[4 * n] == ROWS:
        lo = 0
        hi = tl.minimum(hi, A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        lo = tl.maximum(lo, j0 - A[4 * n + 2])
        hi = tl.minimum(hi, j1 + A[4 * n + 1] + 1)
    elif A[4 * n] == BLOCK:
        lo = tl.maximum(lo, (j0 // A[4 * n + 1] - A[4 * n + 3]) * A[4 * n + 1])
        hi = tl.minimum(hi, (j1 // A[4 * n + 1] + A[4 * n + 2] + 1) * A[4 * n + 1])
    elif A[4 * n] == STRIP:
        lo = (j0 // A[4 * n + 1] + 1) * A[4 * n + 1]
        hi = tl.minimum(hi, (j1 // A[4 * n + 1] + 2) * A[4 * n + 1])
        if _columns_below(j0, first, A, n) == _columns_below(j1 + 1, first, A, n):
            hi = lo
    if STEP != 1:
        lo = f // pad * pad
        hi = ((f + BN - 1) // pad + 1) * pad
        if A[4 * n] == DILATED:
            lo = tl.maximum(lo, f - A[4 * n + 2])
            hi = tl.minimum(hi, f + BN + A[4 * n + 2])
        if CAUSAL:
            lo = tl.maximum(lo, f)
        hi = tl.minimum(hi, STEP * pad)
    elif CAUSAL:
        lo = tl.maximum(lo, j0)
    return lo, hi


@triton.jit
def _rows(x, at, ok, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a head at positions `at`, zeros where not ok."""
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    return tl.load(x + at.to(tl.int64)[:, None] * stride + d[None, :], mask=ok, other=0.0)


@triton.jit
def _keys(
    s0, hi, klen, pad, shift, low, first, A: tl.constexpr, n: tl.constexpr, STEP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Positions of the keys from index s0 on, which of them exist, the corners, and whether all exist."""
    a = tl.arange(0, BN)
    if A[4 * n] == SUMMARY or A[4 * n] == STRIP:
        j = _column(s0 + a, first, A, n)
        j0 = _column(s0, first, A, n)
        j1 = _column(s0 + BN - 1, first, A, n)
    else:
        j = _place(s0, a, pad, shift, low, STEP)
        j0 = _corner(s0, pad, STEP)
        j1 = j0 + STEP * (BN - 1)
    return j, (s0 + a < hi) & (j < klen), j0, j1, (s0 + BN <= hi) & (j1 < klen)


@triton.jit
def _forward_tile(
    acc, m, z, q, i, i0, i1, s0, hi, klen, own, k, v,
    k_stride: tl.constexpr, v_stride: tl.constexpr, scale, pad, shift, low, first,
    A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continues the softmax of a tile of queries over one tile of keys."""
    j, ok, j0, j1, free = _keys(s0, hi, klen, pad, shift, low, first, A, n, STEP, BN)
    kt = _rows(k, j, ok, k_stride, D, BD)
    s = tl.dot(q, kt.T, input_precision=PRECISION)
    free = free & _free(i0, i1, j0, j1, low, A, n, CAUSAL)
    if A[4 * n] == RANDOM:
        free = free & (i0 // A[4 * n + 1] == own) & (i1 // A[4 * n + 1] == own)
    if not free:
        seen = _seen(i[:, None], j[None, :], i[:, None], own, first, A, n, CAUSAL)
        s = tl.where(seen & ok[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s * scale - base[:, None])
    fade = tl.exp2(m - base)
    z = z * fade + tl.sum(p, 1)
    vt = _rows(v, j, ok, v_stride, D, BD)
    acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
    return acc, top, z


@triton.jit(do_not_specialize=CHANGING)
def _forward(
    q, k, v, o, lse, lengths, key_lengths, table, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    o_piece, o_batch, lse_piece, lse_head, table_batch, table_head,
    scale, T, S, tiles, row0, rows, pad, shift, low, split, table_rows,
    A: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr, CONTINUE: tl.constexpr,
    SPLITS: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the queries row0 .. rows - 1: starts or continues their softmax over the atoms PARTS."""
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    piece = tl.program_id(1)
    first = tl.load(firsts + h) if FIRSTS else 0
    q += b * q_batch + h * q_head
    k += b * k_batch + h // SHARE * k_head
    v += b * v_batch + h // SHARE * v_head
    o += piece * o_piece + b * o_batch + h * D
    lse += piece * lse_piece + (b * H + h) * lse_head
    klen = S
    end = T
    if LENGTHS:
        klen = tl.load(key_lengths + b).to(tl.int32)
        end = tl.load(lengths + b).to(tl.int32)
    f = row0 + tile * BM
    a = tl.arange(0, BM)
    i = _place(f, a, pad, shift, low, STEP)
    i0 = _corner(f, pad, STEP)
    i1 = i0 + STEP * (BM - 1)
    here = i < rows
    if STEP != 1:
        here = here & (f + a < STEP * pad)
    qt = _rows(q, i, here & (i < end), q_stride, D, BD)
    if CONTINUE:
        before = tl.load(lse + i, mask=here, other=float("-inf"))
        m = before * LOG2E
        z = tl.where(before == float("-inf"), 0.0, 1.0)
        acc = _rows(o, i, here, H * D, D, BD).to(tl.float32)
    else:
        m = tl.full([BM], float("-inf"), tl.float32)
        z = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
    for part in tl.static_range(len(PARTS)):
        if A[4 * PARTS[part]] == RANDOM:
            begin = i0 // A[4 * PARTS[part] + 1]
            last = tl.minimum(i1 // A[4 * PARTS[part] + 1], table_rows - 1)
            per = (A[4 * PARTS[part] + 1] + BN - 1) // BN
            for t in tl.range(0, (last - begin + 1) * A[4 * PARTS[part] + 2] * per):
                entry = begin * A[4 * PARTS[part] + 2] + t // per
                block = tl.load(table + b * table_batch + h * table_head + entry)
                s0 = tl.maximum(block, 0) * A[4 * PARTS[part] + 1] + t % per * BN
                hi = tl.where(block < 0, 0, tl.minimum((block + 1) * A[4 * PARTS[part] + 1], klen))
                acc, m, z = _forward_tile(
                    acc, m, z, qt, i, i0, i1, s0, hi, klen, entry // A[4 * PARTS[part] + 2], k, v, k_stride, v_stride,
                    scale, pad, shift, low, first, A, PARTS[part], CAUSAL, STEP, BN, D, BD, PRECISION,
                )  # fmt: skip
        else:
            lo, hi = _key_range(f, i0, tl.minimum(i1, rows - 1), klen, pad, first, A, PARTS[part], CAUSAL, STEP, BM)
            if SPLITS:
                lo = piece * split
                hi = tl.minimum(hi, lo + split)
            for s0 in tl.range(lo, hi, BN):
                acc, m, z = _forward_tile(
                    acc, m, z, qt, i, i0, i1, s0, hi, klen, 0, k, v, k_stride, v_stride,
                    scale, pad, shift, low, first, A, PARTS[part], CAUSAL, STEP, BN, D, BD, PRECISION,
                )  # fmt: skip
    alive = (z > 0) & (i < end)
    z = tl.where(z > 0, z, 1.0)
    _store(o, i, here, tl.where(alive[:, None], acc / z[:, None], 0.0), H * D, D, BD)
    tl.store(lse + i, tl.where(alive, (m + tl.log2(z)) * LN2, float("-inf")), mask=here)


@triton.jit
def _store(x, at, ok, rows, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    tl.store(x + at.to(tl.int64)[:, None] * stride + d[None, :], rows.to(x.dtype.element_ty), mask=ok)


@triton.jit
def _dq_tile(
    dq, q, do, norm, delta, i, i0, i1, s0, hi, klen, own, k, v,
    k_stride: tl.constexpr, v_stride: tl.constexpr, scale, pad, shift, low, first,
    A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j, ok, j0, j1, free = _keys(s0, hi, klen, pad, shift, low, first, A, n, STEP, BN)
    kt = _rows(k, j, ok, k_stride, D, BD)
    vt = _rows(v, j, ok, v_stride, D, BD)
    p = tl.exp2(tl.dot(q, kt.T, input_precision=PRECISION) * scale - norm[:, None])
    free = free & _free(i0, i1, j0, j1, low, A, n, CAUSAL)
    if A[4 * n] == RANDOM:
        free = free & (i0 // A[4 * n + 1] == own) & (i1 // A[4 * n + 1] == own)
    if not free:
        seen = _seen(i[:, None], j[None, :], i[:, None], own, first, A, n, CAUSAL)
        p = tl.where(seen & ok[None, :], p, 0.0)
    dp = tl.dot(do, vt.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(kt.dtype), kt, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=CHANGING)
def _dq(
    q, k, v, o, do, lse, dlse, stats, dq, far, lengths, key_lengths, table, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    do_batch, do_stride: tl.constexpr, do_head, dq_piece, dq_batch, far_batch, table_batch, table_head,
    scale, scale_log2, T, S, tiles, row0, rows, pad, shift, low, split, table_rows,
    A: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr, CONTINUE: tl.constexpr,
    SPLITS: tl.constexpr, FAR: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, DLSE: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries. The first pass leaves, for all others, what a score is compared with:
    norm, the log-sum-exp in base 2, and delta = Σ do·o, less the gradient of the log-sum-exp, side by side.
    FAR: the atom whose far part has been computed apart, its gradients in `far`."""
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    piece = tl.program_id(1)
    first = tl.load(firsts + h) if FIRSTS else 0
    q += b * q_batch + h * q_head
    k += b * k_batch + h // SHARE * k_head
    v += b * v_batch + h // SHARE * v_head
    o += b * T * (H * D) + h * D
    do += b * do_batch + h * do_head
    dq += piece * dq_piece + b * dq_batch + h * D
    stats += (b * H + h) * T * 2
    klen = S
    end = T
    if LENGTHS:
        klen = tl.load(key_lengths + b).to(tl.int32)
        end = tl.load(lengths + b).to(tl.int32)
    f = row0 + tile * BM
    a = tl.arange(0, BM)
    i = _place(f, a, pad, shift, low, STEP)
    i0 = _corner(f, pad, STEP)
    i1 = i0 + STEP * (BM - 1)
    here = i < rows
    if STEP != 1:
        here = here & (f + a < STEP * pad)
    alive = here & (i < end)
    qt = _rows(q, i, alive, q_stride, D, BD)
    dot = _rows(do, i, alive, do_stride, D, BD)
    if CONTINUE:
        e = tl.load(stats + 2 * i, mask=alive, other=float("inf"))
        d = tl.load(stats + 2 * i + 1, mask=alive, other=0.0)
    else:
        e = tl.load(lse + (b * H + h) * T + i, mask=alive, other=float("inf"))
        # a row that sees nothing has -inf: its probabilities must be 0, not exp(-inf + inf)
        e = tl.where(e == float("-inf"), float("inf"), e) * LOG2E
        d = tl.sum(_rows(o, i, alive, H * D, D, BD).to(tl.float32) * dot.to(tl.float32), 1)
        if DLSE:
            d -= tl.load(dlse + (b * H + h) * T + i, mask=alive, other=0.0)
        tl.store(stats + 2 * i, e, mask=here)
        tl.store(stats + 2 * i + 1, d, mask=here)
    grad = tl.zeros([BM, BD], tl.float32)
    for part in tl.static_range(len(PARTS)):
        if A[4 * PARTS[part]] == RANDOM:
            begin = i0 // A[4 * PARTS[part] + 1]
            last = tl.minimum(i1 // A[4 * PARTS[part] + 1], table_rows - 1)
            per = (A[4 * PARTS[part] + 1] + BN - 1) // BN
            for t in tl.range(0, (last - begin + 1) * A[4 * PARTS[part] + 2] * per):
                entry = begin * A[4 * PARTS[part] + 2] + t // per
                block = tl.load(table + b * table_batch + h * table_head + entry)
                s0 = tl.maximum(block, 0) * A[4 * PARTS[part] + 1] + t % per * BN
                hi = tl.where(block < 0, 0, tl.minimum((block + 1) * A[4 * PARTS[part] + 1], klen))
                grad = _dq_tile(
                    grad, qt, dot, e, d, i, i0, i1, s0, hi, klen, entry // A[4 * PARTS[part] + 2], k, v,
                    k_stride, v_stride, scale_log2, pad, shift, low, first,
                    A, PARTS[part], CAUSAL, STEP, BN, D, BD, PRECISION,
                )  # fmt: skip
        else:
            lo, hi = _key_range(f, i0, tl.minimum(i1, rows - 1), klen, pad, first, A, PARTS[part], CAUSAL, STEP, BM)
            if SPLITS:
                lo = piece * split
                hi = tl.minimum(hi, lo + split)
            for s0 in tl.range(lo, hi, BN):
                grad = _dq_tile(
                    grad, qt, dot, e, d, i, i0, i1, s0, hi, klen, 0, k, v,
                    k_stride, v_stride, scale_log2, pad, shift, low, first,
                    A, PARTS[part], CAUSAL, STEP, BN, D, BD, PRECISION,
                )  # fmt: skip
    grad *= scale
    if CONTINUE:
        grad += _rows(dq, i, here, H * D, D, BD).to(tl.float32)
    if FAR >= 0:  # rows after the first block
        far += b * far_batch + h * D
        grad += _rows(far, i - A[4 * FAR + 1], here & (i >= A[4 * FAR + 1]), H * D, D, BD).to(tl.float32)
    _store(dq, i, here, grad, H * D, D, BD)


@triton.jit
def _dkv_tile(
    dk, dv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, own, q, do, stats,
    q_stride: tl.constexpr, do_stride: tl.constexpr, scale,
    pad, shift, low, first, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    a = tl.arange(0, BM)
    i = _place(s0, a, pad, shift, low, STEP)
    i0 = _corner(s0, pad, STEP)
    i1 = i0 + STEP * (BM - 1)
    alive = (s0 + a < hi) & (i < end)
    qt = _rows(q, i, alive, q_stride, D, BD)
    dot = _rows(do, i, alive, do_stride, D, BD)
    pair = tl.load(stats + 2 * i[:, None] + tl.arange(0, 2)[None, :], mask=alive[:, None], other=1e30)
    e, d = tl.split(pair)
    p = tl.exp2(tl.dot(kt, qt.T, input_precision=PRECISION) * scale - e[None, :])  # [BN, BM]
    free = whole & _free(i0, i1, j0, j1, low, A, n, CAUSAL)
    if A[4 * n] == RANDOM:
        free = free & (j0 // A[4 * n + 1] == own) & (j1 // A[4 * n + 1] == own)
    if not free:
        seen = _seen(i[None, :], j[:, None], j[:, None], own, first, A, n, CAUSAL)
        p = tl.where(seen & ok[:, None], p, 0.0)
    dv = tl.dot(p.to(dot.dtype), dot, dv, input_precision=PRECISION)
    dp = tl.dot(vt, dot.T, input_precision=PRECISION)
    ds = p * (dp - d[None, :])
    dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=CHANGING)
def _dkv(
    q, k, v, do, stats, dk, dv, lengths, key_lengths, starts, readers, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    do_batch, do_stride: tl.constexpr, do_head, dk_piece, dk_batch,
    starts_batch, starts_head, readers_batch, readers_head,
    scale, scale_log2, T, S, tiles, row0, col0, cols, pad, shift, low, split,
    A: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    CONTINUE: tl.constexpr, SPLITS: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, HKV: tl.constexpr,
    SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of the keys col0 .. cols - 1, in index; KEYS is the atom whose columns they are."""
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % HKV
    b = (tl.program_id(0) // tiles // HKV).to(tl.int64)
    piece = tl.program_id(1)
    first = tl.load(firsts + h * SHARE) if FIRSTS else 0
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dk += piece * dk_piece + b * dk_batch + h * D
    dv += piece * dk_piece + b * dk_batch + h * D
    klen = S
    end = T
    if LENGTHS:
        klen = tl.load(key_lengths + b).to(tl.int32)
        end = tl.load(lengths + b).to(tl.int32)
    f = col0 + tile * BN
    j, here, j0, j1, whole = _keys(f, cols, S, pad, shift, low, first, A, KEYS, STEP, BN)
    ok = here & (j < klen)
    whole = whole & (j1 < klen)
    kt = _rows(k, j, ok, k_stride, D, BD)
    vt = _rows(v, j, ok, v_stride, D, BD)
    gk = tl.zeros([BN, BD], tl.float32)
    gv = tl.zeros([BN, BD], tl.float32)
    for g in tl.range(0, SHARE):
        head = h * SHARE + g
        qh = q + b * q_batch + head * q_head
        doh = do + b * do_batch + head * do_head
        statsh = stats + (b * (HKV * SHARE) + head) * T * 2
        for part in tl.static_range(len(PARTS)):
            if A[4 * PARTS[part]] == RANDOM:
                per = (A[4 * PARTS[part] + 1] + BM - 1) // BM
                last = (tl.minimum(j1, S - 1) // A[4 * PARTS[part] + 1]).to(tl.int32)
                for own in tl.range((j0 // A[4 * PARTS[part] + 1]).to(tl.int32), last + 1):
                    at = tl.load(starts + b * starts_batch + head * starts_head + own)
                    stop = tl.load(starts + b * starts_batch + head * starts_head + own + 1)
                    for t in tl.range(0, (stop - at) * per):
                        row = tl.load(readers + b * readers_batch + head * readers_head + at + t // per)
                        s0 = row * A[4 * PARTS[part] + 1] + t % per * BM
                        hi = tl.minimum((row + 1) * A[4 * PARTS[part] + 1], T)
                        gk, gv = _dkv_tile(
                            gk, gv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, own, qh, doh, statsh,
                            q_stride, do_stride, scale_log2, pad, shift, low, first,
                            A, PARTS[part], CAUSAL, STEP, BM, D, BD, PRECISION,
                        )  # fmt: skip
            else:
                lo, hi = _query_range(f, j0, j1, T, row0, pad, first, A, PARTS[part], CAUSAL, STEP, BN)
                if SPLITS:
                    lo = tl.maximum(lo, piece * split)
                    hi = tl.minimum(hi, piece * split + split)
                for s0 in tl.range(lo, hi, BM):
                    gk, gv = _dkv_tile(
                        gk, gv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, 0, qh, doh, statsh,
                        q_stride, do_stride, scale_log2, pad, shift, low, first,
                        A, PARTS[part], CAUSAL, STEP, BM, D, BD, PRECISION,
                    )  # fmt: skip
    gk *= scale
    if CONTINUE:
        gk += _rows(dk, j, here, HKV * D, D, BD).to(tl.float32)
        gv += _rows(dv, j, here, HKV * D, D, BD).to(tl.float32)
    _store(dk, j, here, gk, HKV * D, D, BD)
    _store(dv, j, here, gv, HKV * D, D, BD)


@triton.jit(do_not_specialize=CHANGING)
def _far(
    k, v, far_k, far_v, firsts, k_batch, k_stride: tl.constexpr, k_head, v_batch, v_stride: tl.constexpr, v_head,
    tiles, rows, A: tl.constexpr, n: tl.constexpr, BACK: tl.constexpr, FIRSTS: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of the first `rows` columns of a summary, spread over the queries that stand for heads.

    BACK: the gradients of those, added to the gradients of k and v.
    """
    # heads lie side by side in memory, so neighbouring programs take them
    h = tl.program_id(0) % H
    tile = tl.program_id(0) // H % tiles
    b = (tl.program_id(0) // H // tiles).to(tl.int64)
    s = tile * BN + tl.arange(0, BN)
    first = tl.load(firsts + h) if FIRSTS else 0
    j = _column(s, first, A, n)
    here = s < rows
    COPIES: tl.constexpr = A[4 * n + 1] // A[4 * n + 2]
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    kt = _rows(k, j, here, k_stride, D, BD)
    vt = _rows(v, j, here, v_stride, D, BD)
    if BACK:
        kt = kt.to(tl.float32)
        vt = vt.to(tl.float32)
    for copy in tl.static_range(COPIES):
        at = b * rows * (COPIES * H * D) + (copy * H + h) * D
        if BACK:
            kt += _rows(far_k + at, s, here, COPIES * H * D, D, BD).to(tl.float32)
            vt += _rows(far_v + at, s, here, COPIES * H * D, D, BD).to(tl.float32)
        else:
            _store(far_k + at, s, here, kt, COPIES * H * D, D, BD)
            _store(far_v + at, s, here, vt, COPIES * H * D, D, BD)
    if BACK:
        _store(k, j, here, kt, k_stride, D, BD)
        _store(v, j, here, vt, v_stride, D, BD)


class Passes(NamedTuple):
    """How a pattern is computed: its atoms as integers, and which of them each kind of pass walks."""

    atoms: tuple[int, ...]
    far: int  # the summary whose far part is computed apart, or -1
    random: tuple[Random, ...]
    rows: int  # leading queries that read everything
    columns: int  # leading keys that are read by everything
    queries: tuple[int, ...]  # atoms that a tile of consecutive queries walks
    keys: tuple[int, ...]  # atoms that a tile of consecutive keys walks
    summaries: tuple[int, ...]
    lattices: tuple[tuple[int, int], ...]  # atom, step


@lru_cache(maxsize=256)
def passes(pattern: str, causal: bool, split_off: bool, shifted: bool = False) -> Passes:
    """`split_off`: whether the far part of a summary may be computed apart; `shifted`: whether heads shift it."""
    atoms = plan(pattern, causal)
    random = tuple(a for a in atoms if isinstance(a, Random))
    fixed = [a for a in atoms if not isinstance(a, Random)]
    coded = [_code(a, shifted) for a in fixed]
    far = -1
    match atoms:
        case (Block(size, 0), Summary(l, c)) if split_off and causal and size == l and l % c == 0 and 2 <= l // c <= 8:
            far = 1
            coded[1] = (STRIP.value, *coded[1][1:])
    columns = fixed[0].tokens if fixed and isinstance(fixed[0], Global) else 0
    rows = 0 if causal else columns
    lattices = tuple(
        (n, a.l if isinstance(a, Strided) else a.gap) for n, a in enumerate(fixed) if isinstance(a, Strided | Dilated)
    )
    queries = [n for n, a in enumerate(fixed) if isinstance(a, Global | Local | Block | Summary | Dense)]
    keys = [n for n, a in enumerate(fixed) if isinstance(a, Local | Block | Dense) or n == far]
    summaries = tuple(n for n, a in enumerate(fixed) if isinstance(a, Summary) and n != far)
    if random:  # several draws become one, over blocks that divide all of theirs
        size = gcd(*(a.block_size for a in random))
        coded.append((RANDOM.value, size, sum(a.blocks * (a.block_size // size) for a in random), 0))
        queries.append(len(coded) - 1)
        keys.append(len(coded) - 1)
    if rows:
        coded.append((ROWS.value, rows, 0, 0))
        keys.append(len(coded) - 1)
    flat = tuple(x for code in coded for x in code)
    return Passes(flat, far, random, rows, columns, tuple(queries), tuple(keys), summaries, lattices)


def _code(atom: Pattern, shifted: bool) -> tuple[int, int, int, int]:
    match atom:
        case Global(tokens):
            return GLOBAL.value, tokens, 0, 0
        case Local(before, after):
            return LOCAL.value, before, after, 0
        case Block(l, before, after):
            return BLOCK.value, l, before, after
        case Dilated(window, gap):
            return DILATED.value, gap, window, 0
        case Strided(l):
            return STRIDED.value, l, 0, 0
        case Summary(l, c, shift):
            return SUMMARY.value, l, c, -1 if shifted else l - c * (shift + 1)
        case Dense():
            return DENSE.value, 0, 0, 0
    raise NotImplementedError(f"{atom!r} in Triton")


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copied there once: a copy in the middle of a call waits, and cannot be captured."""
    return torch.tensor(values, dtype=dtype, device=device)


def _table(
    random: tuple[Random, ...],
    draws: tuple[int, ...],
    T: int,
    S: int,
    causal: bool,
    lengths: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each block of queries the blocks of keys, and of each block of keys where its readers start, and the readers.

    [1 or B, 1 or H, ...]: [rows, blocks] with -1 for none and each block once, [key blocks + 1], [rows·blocks].
    """
    size = gcd(*(a.block_size for a in random))
    rows = torch.arange(-(-T // size), device=device)[None, None]
    heads = _on_device(draws, torch.int64, device)[:, None] if draws else None
    drawn = []
    for atom in random:
        ratio = atom.block_size // size
        length = S if lengths is None else lengths[:, None, None]
        table = atom.table(rows // ratio, causal=causal, length=length, head=heads)[..., None]
        drawn.append(torch.where(table >= 0, table * ratio + torch.arange(ratio, device=device), -1).flatten(3))
    blocks = -(-S // size)
    table = torch.cat(drawn, 3).sort(3).values
    table.masked_fill_(table >= blocks, -1)  # the last block drawn may reach beyond the last key
    if len(random) > 1:
        table[..., 1:].masked_fill_(table[..., 1:] == table[..., :-1], -1)
    ordered, order = torch.where(table < 0, blocks, table).flatten(2).sort(dim=2, stable=True)
    edges = torch.arange(blocks + 1, device=device).expand(*ordered.shape[:2], -1).contiguous()
    starts = torch.searchsorted(ordered, edges)
    return table.int(), starts.int(), (order // table.shape[3]).int()


@lru_cache(maxsize=32)
def _full_table(
    random: tuple[Random, ...], draws: tuple[int, ...], T: int, S: int, causal: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    return _table(random, draws, T, S, causal, None, device)


def _strides(table: Tensor) -> tuple[int, int]:
    """Of batch and head, 0 where all share one."""
    return tuple(0 if table.shape[n] == 1 else table.stride(n) for n in range(2))  # type: ignore[return-value]


class Pass(NamedTuple):
    """One launch: which atoms a tile of consecutive (or of every step-th) queries or keys walks."""

    kind: str  # of CONFIGS
    atoms: tuple[int, ...]
    parts: tuple[int, ...]
    start: int  # first query or key, in index
    stop: int
    step: int = 1
    go_on: bool = False  # from what an earlier pass left
    pieces: bool = False  # few rows against the whole sequence: cut it, and leave float32 parts to be added up


class Call(NamedTuple):
    """One call of the operator: what every launch needs."""

    work: Passes
    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    causal: bool
    scale: float
    lengths: tuple[Tensor, Tensor] | None  # of queries, of keys
    random: tuple[Tensor, Tensor, Tensor] | None
    firsts: Tensor | None  # [H], where heads shift the summary: its first column in a block
    dtype: torch.dtype

    def config(self, kind: str) -> Config:
        size = max(128, self.width * self.dtype.itemsize)
        return CONFIGS.get((kind, size)) or CONFIGS[kind.split("_")[0], size]

    @property
    def width(self) -> int:
        return max(16, triton.next_power_of_2(self.D))

    def lattice(self, step: int, config: Config) -> tuple[int, int, int]:
        """pad, shift, low: how tiles are cut from the residues."""
        tile = max(config.queries, config.keys)
        points = -(-max(self.T, self.S) // step)
        if step == 1 or points > tile:
            return -(-points // tile) * tile, 31, -1
        pad = triton.next_power_of_2(points)
        return pad, int(log2(pad)), pad - 1

    def constants(self, config: Config) -> dict[str, Any]:
        return {
            "CAUSAL": self.causal,
            "LENGTHS": self.lengths is not None,
            "FIRSTS": self.firsts is not None,
            "SHARE": self.H // self.Hkv,
            "D": self.D,
            "BD": self.width,
            "BM": config.queries,
            "BN": config.keys,
            # full float32 products from three of the tensor cores' short ones
            "PRECISION": "tf32x3" if self.dtype == torch.float32 else "tf32",
            "num_warps": config.warps,
            "num_stages": config.stages,
        }


def _call(
    q: Tensor,
    k: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: tuple[int, ...],
    shifts: tuple[int, ...],
    causal: bool,
    scale: float,
    split_off: bool = False,
) -> Call:
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    # padding may hold anything, and the fused attention of torch would multiply it by 0
    split_off = split_off and lengths is None and key_lengths is None and Hkv == H and _fused(q) is not None
    work = passes(pattern, causal, split_off, bool(shifts))
    random = None
    if work.random:
        limits = None if causal else key_lengths
        if limits is None:
            random = _full_table(work.random, draws, T, S, causal, q.device)
        else:
            random = _table(work.random, draws, T, S, causal, limits, q.device)
    firsts = None
    if shifts:
        l, c = next((a.l, a.c) for a in plan(pattern, causal) if isinstance(a, Summary))  # noqa: E741
        firsts = _on_device(tuple(l - c * (shift + 1) for shift in shifts), torch.int32, q.device)
    both = None
    if lengths is not None or key_lengths is not None:
        lengths = torch.full((B,), T, device=q.device) if lengths is None else lengths
        key_lengths = torch.full((B,), S, device=q.device) if key_lengths is None else key_lengths
        both = lengths.clamp(max=T), key_lengths.clamp(max=S)
    return Call(work, B, T, S, H, Hkv, D, causal, scale, both, random, firsts, q.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: tuple[int, ...],
    shifts: tuple[int, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    call = _call(q, k, lengths, key_lengths, pattern, draws, shifts, causal, scale)
    work = call.work
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    o = torch.empty(call.B, call.T, call.H, call.D, device=q.device, dtype=q.dtype)
    lse = torch.empty(call.B, call.H, call.T, device=q.device, dtype=torch.float32)
    started = False
    if work.queries and work.rows < call.T:
        run = Pass(
            "forward_summary" if work.summaries else "forward",
            work.atoms,
            work.queries,
            work.rows,
            call.T,
            go_on=started,
        )
        _run_forward(call, run, q, k, v, o[None], lse[None])
        started = True
    for n, step in work.lattices:
        run = Pass("forward_lattice", work.atoms, (n,), 0, call.T, step, go_on=started)
        _run_forward(call, run, q, k, v, o[None], lse[None])
        started = True
    if work.rows:
        rows, pieces = min(work.rows, call.T), -(-call.S // SPLIT)
        part = torch.empty(pieces, call.B, rows, call.H, call.D, device=q.device, dtype=torch.float32)
        part_lse = torch.empty(pieces, call.B, call.H, rows, device=q.device, dtype=torch.float32)
        run = Pass("forward_rows", (DENSE.value, 0, 0, 0), (0,), 0, rows, pieces=True)
        _run_forward(call, run, q, k, v, part, part_lse)
        total = torch.logsumexp(part_lse, 0)
        weight = torch.exp(part_lse - total.masked_fill(total == -inf, 0))
        o[:, :rows] = (part * weight.transpose(2, 3)[..., None]).sum(0)
        lse[:, :, :rows] = total
    return o, lse.transpose(1, 2)


def _run_forward(
    call: Call,
    run: Pass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,  # [pieces, B, rows, H, D]
    lse: Tensor,  # [pieces, B, H, rows]
) -> None:
    config = call.config(run.kind)
    pad, shift, low = call.lattice(run.step, config)
    tiles = triton.cdiv(run.stop - run.start if run.step == 1 else run.step * pad, config.queries)
    lengths, key_lengths = call.lengths or (q, q)
    table = call.random[0] if call.random else q[:1, :1]
    firsts = q if call.firsts is None else call.firsts
    _forward[(tiles * call.B * call.H, len(o))](
        q, k, v, o, lse, lengths, key_lengths, table, firsts,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        o.stride(0), o.stride(1), lse.stride(0), lse.stride(2),
        *_strides(table), call.scale * LOG2E.value, call.T, call.S, tiles, run.start, run.stop, pad, shift, low, SPLIT,
        table.shape[2] if call.random else 0,
        A=run.atoms, PARTS=run.parts, STEP=run.step, CONTINUE=run.go_on, SPLITS=run.pieces, H=call.H,
        **call.constants(config),
    )  # fmt: skip


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: tuple[int, ...],
    shifts: tuple[int, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # the backward of torch's attention knows no gradient of the log-sum-exp
    call = _call(q, k, lengths, key_lengths, pattern, draws, shifts, causal, scale, split_off=dlse is None)
    work = call.work
    do, q, k, v = (_dense_rows(x) for x in (do, q, k, v))
    lse = lse.transpose(1, 2).contiguous()  # [B, H, T]
    if dlse is not None:
        dlse = dlse.transpose(1, 2).contiguous()
    stats = torch.empty(*lse.shape, 2, device=q.device, dtype=lse.dtype)
    dq = torch.empty(call.B, call.T, call.H, call.D, device=q.device, dtype=q.dtype)
    far = far_backward(call, do, q, k, v, o, lse)
    given = (q, k, v, o, do, lse, dlse, stats)
    started = False
    if work.queries and work.rows < call.T:
        _run_dq(call, Pass("dq", work.atoms, work.queries, work.rows, call.T), *given, dq[None], far)
        started = True
    for n, step in work.lattices:
        _run_dq(call, Pass("dq_lattice", work.atoms, (n,), 0, call.T, step, go_on=started), *given, dq[None])
        started = True
    if work.rows:
        rows, pieces = min(work.rows, call.T), -(-call.S // SPLIT)
        part = torch.empty(pieces, call.B, rows, call.H, call.D, device=q.device, dtype=torch.float32)
        _run_dq(call, Pass("dq_rows", (DENSE.value, 0, 0, 0), (0,), 0, rows, pieces=True), *given, part)
        dq[:, :rows] = part.sum(0)

    dk, dv = (torch.empty(call.B, call.S, call.Hkv, call.D, device=q.device, dtype=q.dtype) for _ in range(2))
    sources = (q, k, v, do, stats)
    started = False
    if work.keys and work.columns < call.S:
        _run_dkv(call, Pass("dkv", work.atoms, work.keys, work.columns, call.S), *sources, dk[None], dv[None])
        started = True
    for n, step in work.lattices:
        run = Pass("dkv_lattice", work.atoms, (n,), 0, 0, step, go_on=started)
        _run_dkv(call, run, *sources, dk[None], dv[None])
        started = True
    if not started:
        dk.zero_(), dv.zero_()
    for n in work.summaries:
        size, count = work.atoms[4 * n + 1 : 4 * n + 3]
        stop = -(-call.S // size) * count  # the columns that the last block lacks are beyond S
        run = Pass("dkv_summary", work.atoms, (n,), 0, stop, go_on=True)
        _run_dkv(call, run, *sources, dk[None], dv[None])
    if work.columns:
        columns, pieces = min(work.columns, call.S), -(-call.T // SPLIT)
        shape = (pieces, call.B, columns, call.Hkv, call.D)
        parts = [torch.empty(shape, device=q.device, dtype=torch.float32) for _ in range(2)]
        _run_dkv(call, Pass("dkv_columns", work.atoms, (0,), 0, columns, pieces=True), *sources, *parts)
        dk[:, :columns], dv[:, :columns] = (part.sum(0) for part in parts)
    if far is not None:
        _run_far(call, dk, dv, *far[1:], back=True)
    return dq, dk, dv


def far_backward(
    call: Call, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Gradients of the far part of a causal summary, given the output and log-sum-exp of the whole softmax.

    It is plain causal attention, whose backward the fused kernels of torch do best. Of g = l/c neighbouring queries
    take one, number u = i // g, and number the columns s. Query u may read the columns of all earlier blocks,
    s < c·(u // c), so s <= u - c always holds: that is a causal square without its first c queries. What is left,
    u - c < s < c·(u // c), lies in the block before the query's (STRIP). The g queries of one u stand side by side in
    memory, so they pass for heads: dq comes for n·g queries from number l on, [B, n, g·H, D], dk and dv for n columns,
    g times.
    """
    if call.work.far < 0:
        return None
    size, c = call.work.atoms[4 * call.work.far + 1 : 4 * call.work.far + 3]
    n = -(-call.T // (size // c)) - c
    if n <= 0:
        return None
    do, q, o = (_far_queries(x, n, size, c) for x in (do, q, o))
    lse = F.pad(lse[:, :, size:], (0, n * (size // c) - (call.T - size)))
    lse = lse.unflatten(2, (n, -1)).permute(0, 3, 1, 2).flatten(1, 2)  # [B, g·H, n]
    far_k, far_v = (torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in range(2))
    _run_far(call, k, v, far_k, far_v, back=False)
    dq, dk, dv = _causal_backward(do, q, far_k, far_v, o, lse, call.scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _run_far(call: Call, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, back: bool) -> None:
    tile, rows = 32, far_k.shape[1]
    tiles = triton.cdiv(rows, tile)
    _far[(tiles * call.B * call.H,)](
        k, v, far_k, far_v, k if call.firsts is None else call.firsts, *k.stride()[:3], *v.stride()[:3], tiles, rows,
        A=call.work.atoms, n=call.work.far, BACK=back, FIRSTS=call.firsts is not None,
        H=call.H, D=call.D, BD=call.width, BN=tile,
    )  # fmt: skip


def _far_queries(x: Tensor, n: int, size: int, c: int) -> Tensor:
    """[B, T, H, D] -> [B, n, g·H, D], without a copy if g divides T."""
    x = x[:, size:]
    missing = n * (size // c) - x.shape[1]
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).reshape(len(x), n, -1, x.shape[3])


def _fused(q: Tensor) -> str | None:
    """Which causal attention of torch has a backward that takes the log-sum-exp from outside."""
    if q.device.type == "cpu":
        return "cpu"
    if q.dtype == torch.float32:
        return None
    x = q.transpose(1, 2)
    choice = torch._fused_sdp_choice(x, x, x, None, 0.0, True)
    return {SDPBackend.CUDNN_ATTENTION.value: "cudnn", SDPBackend.FLASH_ATTENTION.value: "flash"}.get(choice)


def _causal_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> list[Tensor]:
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    n, seed = q.shape[2], torch.empty((), dtype=torch.int64, device=q.device)
    fused = _fused(q)
    if fused == "cudnn":
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse[..., None], seed, seed, None, None, None, n, n, 0.0, True, scale=scale
        )
    elif fused == "flash":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, n, n, 0.0, True, seed, seed, scale=scale
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, True, scale=scale
        )
    return [grad.transpose(1, 2) for grad in grads]


def _run_dq(
    call: Call,
    run: Pass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    stats: Tensor,  # [B, H, T, 2]
    dq: Tensor,  # [pieces, B, rows, H, D]
    far: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    config = call.config(run.kind)
    pad, shift, low = call.lattice(run.step, config)
    tiles = triton.cdiv(run.stop - run.start if run.step == 1 else run.step * pad, config.queries)
    lengths, key_lengths = call.lengths or (q, q)
    table = call.random[0] if call.random else q[:1, :1]
    firsts = q if call.firsts is None else call.firsts
    _dq[(tiles * call.B * call.H, len(dq))](
        q, k, v, o, do, lse, lse if dlse is None else dlse, stats, dq, dq if far is None else far[0],
        lengths, key_lengths, table, firsts,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
        dq.stride(0), dq.stride(1), 0 if far is None else far[0].stride(0), *_strides(table),
        call.scale, call.scale * LOG2E.value, call.T, call.S, tiles, run.start, run.stop, pad, shift, low, SPLIT,
        table.shape[2] if call.random else 0,
        A=run.atoms, PARTS=run.parts, STEP=run.step, CONTINUE=run.go_on, SPLITS=run.pieces,
        FAR=-1 if far is None else call.work.far, DLSE=dlse is not None, H=call.H, **call.constants(config),
    )  # fmt: skip


def _run_dkv(
    call: Call,
    run: Pass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    stats: Tensor,  # [B, H, T, 2]
    dk: Tensor,  # [pieces, B, columns, Hkv, D]
    dv: Tensor,
) -> None:
    config = call.config(run.kind)
    pad, shift, low = call.lattice(run.step, config)
    stop = run.stop if run.step == 1 else run.step * pad
    tiles = triton.cdiv(stop - run.start, config.keys)
    lengths, key_lengths = call.lengths or (q, q)
    starts, readers = call.random[1:] if call.random else (q[:1, :1], q[:1, :1])
    firsts = q if call.firsts is None else call.firsts
    _dkv[(tiles * call.B * call.Hkv, len(dk))](
        q, k, v, do, stats, dk, dv, lengths, key_lengths, starts, readers, firsts,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
        dk.stride(0), dk.stride(1), *_strides(starts), *_strides(readers),
        call.scale, call.scale * LOG2E.value, call.T, call.S, tiles, call.work.rows, run.start, stop,
        pad, shift, low, SPLIT,
        A=run.atoms, PARTS=run.parts, KEYS=run.parts[0], STEP=run.step, CONTINUE=run.go_on, SPLITS=run.pieces,
        HKV=call.Hkv, **call.constants(config),
    )  # fmt: skip
