"""The kernels of `additive.additive_attention`: flash attention whose scores are Σₕ scoreₕ·tanh(qₕ + kₕ).

Almost all time goes into the units, one tanh for each pair and hidden unit, so they are written for few instructions:
with E = exp(2(a + b)) = exp(2a)·exp(2b), which is a product of two numbers computed once, tanh(a + b) = 1 - 2y for
y = 1 / (1 + E). Four units share one reciprocal: 1/x₁ = x₂x₃x₄/(x₁x₂x₃x₄). The 1 moves all scores alike, so softmax
ignores it. Where the product might overflow, x is computed from a + b. Four at a time are also read from memory, some
rounds before they are needed.

The backward goes through some queries at a time, and keeps the gradients of their scores. A program of one warp then
computes the units for a few keys and each of these queries: it sums over queries itself, and writes its sums over keys,
which are added up afterwards. No sum crosses threads, and two queries share one reciprocal.

Legend: T queries, S keys, U hidden units, V value width, N = B·H sequences, E [N, T, U] or [N, S, U] powers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, shared_memory, tile_of

TWICE = tl.constexpr(2.8853900817779268)  # 2·log₂e: exp(2x) = exp2(TWICE·x)
GROUP = tl.constexpr(4)  # units that share one reciprocal, and queries of a round of `_units`
ROOM = tl.constexpr(31.0)  # (1 + 2**31)⁴ is finite in float32
LARGEST = tl.constexpr(126.0)  # exponent that is not cut off
STAGES = tl.constexpr(3)  # rounds of a loop that are read ahead, and the one that is computed
FAST = not INTERPRETED  # the interpreter has no assembly
QUERIES = KEYS = 64  # of a tile of scores
UNITS, POSITIONS = 64, 32  # of a tile of units
ADDED, TILES = 8, 16  # queries whose sums one program adds up, and of how many tiles of keys at a time
OTHERS = 16  # positions whose largest exponent is known, no more than POSITIONS
ROWS = 256  # queries of one piece of the backward
HELD = 2**26  # sums over keys in memory at once
# warps, stages, registers: with fewer registers than the compiler would take, more programs hide each other's waits
LAUNCHES = {"forward": (4, 1, 168), "pairs": (8, 1, 128), "units": (1, 1, 232), "queries": (2, 1, 255)}
NARROW = 64  # wider values leave no registers to save
SHARED = 98304  # bytes of shared memory that tiles of wide values take

# Arguments that change with the length. Triton must not compile another kernel if one is 1 or a multiple of 16; the
# others, such as wide_q, are always multiples.
CHANGING = ["T", "S", "size", "U", "tiles", "slice0", "turn", "pieces", "apart"]


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1/x with a relative error of 2^-23."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return 1.0 / x


@triton.jit(do_not_specialize=CHANGING)
def _powers(
    x, powers, largest, batch, stride, head, size, wide, U, H: tl.constexpr, BU: tl.constexpr, BP: tl.constexpr
):
    """exp(2x) of a tile of positions, and the largest |exponent| among them, in base 2."""
    tile = tl.program_id(0)
    n = tl.program_id(1)
    x += (n // H).to(tl.int64) * batch + n % H * head
    p = tile * BP + tl.arange(0, BP)
    top = tl.full([BP], 0.0, tl.float32)
    room = tl.cdiv(U, BU) * BU
    for u0 in tl.range(0, room, BU):
        u = u0 + tl.arange(0, BU)
        ok = (p < size)[:, None] & (u < U)[None, :]
        e = tl.load(x + p.to(tl.int64)[:, None] * stride + u[None, :], mask=ok, other=0.0).to(tl.float32) * TWICE
        top = tl.maximum(top, tl.max(tl.abs(e), 1))
        e = tl.exp2(tl.minimum(tl.maximum(e, -LARGEST), LARGEST))
        tl.store(powers + (n.to(tl.int64) * wide + p)[:, None] * room + u[None, :], e)
    tl.store(largest + n * (wide // BP) + tile, tl.max(top, 0))


@triton.jit
def _largest(largest, n, wide, p0, POSITIONS: tl.constexpr, BP: tl.constexpr):
    """The largest exponent of POSITIONS positions from p0 on."""
    return tl.max(tl.load(largest + n * (wide // BP) + p0 // BP + tl.arange(0, POSITIONS // BP)), 0)


@triton.jit
def _four(x, B: tl.constexpr):
    """The columns of x [B, 4]."""
    even, odd = tl.split(tl.reshape(x, [B, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _scores(
    eq, ek, q, k, score, i, j, T, S, U, room, q_stride, k_stride, zero, big, BM: tl.constexpr,
    BN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The scores of a tile in base 2, up to a constant of the head: `score` holds -2·log₂e·score."""
    # a product of zeros has the layout that tensor cores want, in which few threads share a row
    s = tl.dot(tl.full([BM, 16], zero, tl.bfloat16), tl.full([16, BN], zero, tl.bfloat16))
    if big:
        for u in tl.range(0, U):
            a = tl.load(q + i.to(tl.int64) * q_stride + u, mask=i < T, other=0.0).to(tl.float32)
            b = tl.load(k + j.to(tl.int64) * k_stride + u, mask=j < S, other=0.0).to(tl.float32)
            x = (a[:, None] + b[None, :]) * TWICE
            s += tl.load(score + u) / (1.0 + tl.exp2(tl.minimum(x, LARGEST)))
    else:
        for u in tl.range(0, U, GROUP, num_stages=STAGES):
            four = u + tl.arange(0, GROUP)
            w0, w1, w2, w3 = _four(tl.load(score + four)[None, :], 1)
            a0, a1, a2, a3 = _four(tl.load(eq + i[:, None] * room + four[None, :]), BM)
            b0, b1, b2, b3 = _four(tl.load(ek + j[:, None] * room + four[None, :]), BN)
            x0 = a0[:, None] * b0[None, :] + 1.0
            x1 = a1[:, None] * b1[None, :] + 1.0
            x2 = a2[:, None] * b2[None, :] + 1.0
            x3 = a3[:, None] * b3[None, :] + 1.0
            x = x0 * x1
            y = x2 * x3
            a = w0[:, None] * x1 + w1[:, None] * x0
            b = w2[:, None] * x3 + w3[:, None] * x2
            s += (a * y + b * x) * _inverse(x * y, FAST)
    return s


@triton.jit
def _rows(x, at, ok, stride, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a head at positions `at`, zeros where not ok."""
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    return tl.load(x + at.to(tl.int64)[:, None] * stride + d[None, :], mask=ok, other=0.0)


@triton.jit(do_not_specialize=CHANGING)
def _forward(
    q, k, v, counts, score, eq, ek, large_q, large_k, o, lse,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head,
    T, S, U, tiles, wide_q, wide_k, zero,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i0 = (tiles - 1 - tl.program_id(0) % tiles) * BM  # long rows first
    n = tl.program_id(0) // tiles
    b = (n // H).to(tl.int64)
    h = n % H
    room = tl.cdiv(U, BU) * BU
    score += h * room
    eq += n.to(tl.int64) * room * wide_q
    ek += n.to(tl.int64) * room * wide_k
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    i = i0 + tl.arange(0, BM)
    count = tl.load(counts + b * T + i, mask=i < T, other=0).to(tl.int32)
    least = tl.min(tl.where(i < T, count, S), 0)
    top_q = _largest(large_q, n, wide_q, i0, BM, BP)
    m = tl.full([BM], float("-inf"), tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    for j0 in tl.range(0, tl.max(count, 0), BN):
        j = j0 + tl.arange(0, BN)
        big = top_q + _largest(large_k, n, wide_k, j0, BN, BP) > ROOM
        s = _scores(eq, ek, q, k, score, i, j, T, S, U, room, q_stride, k_stride, zero, big, BM, BN, FAST)
        if j0 + BN > least:
            s = tl.where(j[None, :] < count[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        z = z * fade + tl.sum(p, 1)
        vt = _rows(v, j, j < S, v_stride, V, BV)
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
        m = top
    alive = z > 0
    z = tl.where(alive, z, 1.0)
    d = tl.arange(0, BV)
    place = o + ((b * T + i) * H + h)[:, None] * V + d[None, :]
    tl.store(place, (acc / z[:, None]).to(o.dtype.element_ty), mask=(i < T)[:, None] & (d < V)[None, :])
    tl.store(lse + n.to(tl.int64) * T + i, tl.where(alive, m + tl.log2(z), float("inf")), mask=i < T)


@triton.jit
def _first_row(n, turn, pieces, apart, ROWS: tl.constexpr):
    """The first query of the piece that sequence n has in this turn."""
    return (turn + n * apart) % pieces * ROWS


@triton.jit
def _first_seeing(counts, key, row0, T, ROWS: tl.constexpr):
    """How many of the queries row0 .. row0 + ROWS - 1 come before the first that sees this key."""
    row = tl.arange(0, ROWS)
    count = tl.load(counts + row0 + row, mask=row0 + row < T, other=0)
    return tl.min(tl.where(count > key, row, ROWS), 0)


@triton.jit(do_not_specialize=CHANGING)
def _pairs(
    q, k, v, do, counts, score, eq, ek, large_q, large_k, lse, delta, dv, ds,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, do_batch, do_stride, do_head,
    T, S, U, tiles, wide_q, wide_k, turn, pieces, apart, slice0, zero,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BX: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of the queries row0 .. row0 + ROWS - 1 and a tile of keys, ds [slices, ROWS, wide_k],
    from the first query on that sees one of the keys. Adds to dv [N, S, V] what these queries give."""
    j0 = tl.program_id(0) % tiles * BN
    own = tl.program_id(0) // tiles
    n = slice0 + own
    b = (n // H).to(tl.int64)
    h = n % H
    room = tl.cdiv(U, BU) * BU
    score += h * room
    eq += n.to(tl.int64) * room * wide_q
    ek += n.to(tl.int64) * room * wide_k
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    do += b * do_batch + h * do_head
    counts += b * T
    row0 = _first_row(n, turn, pieces, apart, ROWS)
    ds += own.to(tl.int64) * ROWS * wide_k
    j = j0 + tl.arange(0, BN)
    top_k = _largest(large_k, n, wide_k, j0, BN, BP)
    vt = _rows(v + b * v_batch + h * v_head, j, j < S, v_stride, V, BV)
    grad = tl.zeros([BN, BV], tl.float32)
    begin = _first_seeing(counts, j0 // BX * BX, row0, T, ROWS) // BM * BM  # `_units` reads from here on
    for row in tl.range(begin, ROWS, BM):
        i0 = row0 + row
        i = i0 + tl.arange(0, BM)
        count = tl.load(counts + i, mask=i < T, other=0).to(tl.int32)
        place = ds + (row + tl.arange(0, BM))[:, None] * wide_k + j[None, :]
        if tl.max(count, 0) <= j0:
            tl.store(place, tl.zeros([BM, BN], tl.float32))
        else:
            big = top_k + _largest(large_q, n, wide_q, i0, BM, BP) > ROOM
            s = _scores(eq, ek, q, k, score, i, j, T, S, U, room, q_stride, k_stride, zero, big, BM, BN, FAST)
            norm = tl.load(lse + n.to(tl.int64) * T + i, mask=i < T, other=float("inf"))
            p = tl.where(j[None, :] < count[:, None], tl.exp2(s - norm[:, None]), 0.0)
            dot = _rows(do, i, i < T, do_stride, V, BV)
            grad = tl.dot(tl.trans(p.to(dot.dtype)), dot, grad, input_precision=PRECISION)
            dp = tl.dot(dot, vt.T, input_precision=PRECISION)
            tl.store(place, p * (dp - tl.load(delta + n.to(tl.int64) * T + i, mask=i < T, other=0.0)[:, None]))
    d = tl.arange(0, BV)
    place = dv + (n.to(tl.int64) * S + j)[:, None] * V + d[None, :]
    ok = (j < S)[:, None] & (d < V)[None, :]
    tl.store(place, tl.load(place, mask=ok, other=0.0) + grad, mask=ok)


@triton.jit
def _two_queries(a, b0, b1, d0, d1, acc, first, FAST: tl.constexpr):
    """Adds to acc [keys, units] and first [units]; returns also the sums over keys. Two queries share a reciprocal."""
    x0 = a * b0[None, :] + 1.0
    x1 = a * b1[None, :] + 1.0
    r = _inverse(x0 * x1, FAST)
    t0 = x1 * r - 0.5  # -tanh/2
    t1 = x0 * r - 0.5
    g0 = d0[:, None] * (0.25 - t0 * t0)
    g1 = d1[:, None] * (0.25 - t1 * t1)
    first += tl.sum(d0[:, None] * t0, 0)
    first += tl.sum(d1[:, None] * t1, 0)
    return acc + g0 + g1, first, tl.sum(g0, 0), tl.sum(g1, 0)


@triton.jit(do_not_specialize=CHANGING)
def _units(
    q, k, counts, eq, ek, large_q, large_k, ds, dk, parts, shares,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head,
    T, S, U, tiles, wide_q, wide_k, turn, pieces, apart, slice0,
    H: tl.constexpr, BU: tl.constexpr, BX: tl.constexpr, BQ: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Σ ds·(1 - tanh²)/4 for a tile of keys and units and the queries row0 .. row0 + ROWS - 1.

    Adds the sums over queries to dk [N, wide_k, units]. Writes the sums over keys to parts [slices, groups of units,
    tiles, ROWS, BU], from the first BQ queries on of which one sees one of the keys, and Σ ds·tanh to shares [slices,
    groups, tiles, BU].
    """
    groups = tl.cdiv(U, BU)
    room = groups * BU
    tile = tl.program_id(0) % tiles
    u0 = tl.program_id(0) // tiles % groups * BU
    own = tl.program_id(0) // tiles // groups
    n = slice0 + own
    b = (n // H).to(tl.int64)
    h = n % H
    p0 = tile * BX
    row0 = _first_row(n, turn, pieces, apart, ROWS)
    begin = _first_seeing(counts + b * T, p0, row0, T, ROWS) // BQ * BQ
    end = tl.minimum(ROWS, tl.cdiv(T - row0, BQ) * BQ)
    line = tl.arange(0, BU)
    keys = tl.arange(0, BX)
    u = u0 + line
    q += b * q_batch + h * q_head + row0.to(tl.int64) * q_stride + u
    k += b * k_batch + h * k_head + p0.to(tl.int64) * k_stride + u
    eq += (n.to(tl.int64) * wide_q + row0) * room + u0
    ds += own.to(tl.int64) * ROWS * wide_k + p0
    parts += tl.program_id(0).to(tl.int64) * ROWS * BU + line
    # Triton gives a thread as many units as it takes for neighbours: NEAR spreads them over all threads, so that each
    # has all keys of its units and sums over keys alone
    NEAR: tl.constexpr = (BU + 31) // 32
    near = tl.max_contiguous(tl.multiple_of(u, NEAR), NEAR)
    at_keys = (n.to(tl.int64) * wide_k + p0 + keys)[:, None] * room + near[None, :]
    a = tl.load(ek + at_keys)
    acc = tl.zeros([BX, BU], tl.float32)
    first = tl.zeros([BU], tl.float32)
    big = _largest(large_k, n, wide_k, p0, BX, BP) + _largest(large_q, n, wide_q, row0, ROWS, BP) > ROOM
    if big:
        # row by row: a load of the whole tile would have another layout, and change that of the faster branch
        for key in tl.range(0, tl.minimum(BX, S - p0)):
            raw = tl.load(k + key * k_stride, mask=u < U, other=0.0).to(tl.float32)
            a = tl.where((keys == key)[:, None], raw[None, :], a)
        for at in tl.range(begin, end):
            d = tl.load(ds + at * wide_k + keys)
            raw = tl.load(q + at * q_stride, mask=(u < U) & (row0 + at < T), other=0.0).to(tl.float32)
            t = 1.0 / (1.0 + tl.exp2(tl.minimum((a + raw[None, :]) * TWICE, LARGEST))) - 0.5
            g = d[:, None] * (0.25 - t * t)
            acc += g
            first += tl.sum(d[:, None] * t, 0)
            tl.store(parts + at * BU, tl.sum(g, 0).to(parts.dtype.element_ty))
    else:
        for at in tl.range(begin, end, GROUP, num_stages=STAGES):
            four = (at + tl.arange(0, GROUP))[:, None]
            d0, d1, d2, d3 = _four(tl.trans(tl.load(ds + four * wide_k + keys[None, :])), BX)
            b0, b1, b2, b3 = _four(tl.trans(tl.load(eq + four * room + line[None, :])), BU)
            acc, first, g0, g1 = _two_queries(a, b0, b1, d0, d1, acc, first, FAST)
            tl.store(parts + at * BU, g0.to(parts.dtype.element_ty))
            tl.store(parts + (at + 1) * BU, g1.to(parts.dtype.element_ty))
            acc, first, g2, g3 = _two_queries(a, b2, b3, d2, d3, acc, first, FAST)
            tl.store(parts + (at + 2) * BU, g2.to(parts.dtype.element_ty))
            tl.store(parts + (at + 3) * BU, g3.to(parts.dtype.element_ty))
    tl.store(dk + at_keys, tl.load(dk + at_keys) + acc)
    tl.store(shares + tl.program_id(0).to(tl.int64) * BU + line, -2.0 * first)


@triton.jit(do_not_specialize=CHANGING)
def _queries(
    parts, counts, dq, T, tiles, wide_q, turn, pieces, apart, slice0,
    H: tl.constexpr, BU: tl.constexpr, BX: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds up the sums over the tiles of keys that some queries see: dq [N, wide_q, units]."""
    own = tl.program_id(1)
    group = tl.program_id(2)
    groups = tl.num_programs(2)
    n = slice0 + own
    row = tl.program_id(0) * BQ
    i0 = _first_row(n, turn, pieces, apart, ROWS) + row
    i = i0 + tl.arange(0, BQ)
    count = tl.max(tl.load(counts + (n // H).to(tl.int64) * T + i, mask=i < T, other=0), 0)
    at = tl.arange(0, BQ * BU)
    parts += ((own * groups + group).to(tl.int64) * tiles * ROWS + row) * BU + at
    acc = tl.zeros([BQ * BU], tl.float32)
    for tile0 in tl.range(0, tl.cdiv(count, BX), BT):
        tile = (tile0 + tl.arange(0, BT)).to(tl.int64)[:, None]
        part = tl.load(parts[None, :] + tile * ROWS * BU, mask=tile * BX < count, other=0.0)
        acc += tl.sum(part.to(tl.float32), 0)
    tl.store(dq + ((n.to(tl.int64) * wide_q + i0 + at // BU) * groups + group) * BU + at % BU, acc)


@triton.jit(do_not_specialize=CHANGING)
def _delta(
    o, do, delta, do_batch, do_stride, do_head, T, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr
):
    """Σ do·o of each query, [N, T]."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1)
    b = (n // H).to(tl.int64)
    h = n % H
    x = _rows(o + b * T * H * V + h * V, i, i < T, H * V, V, BV).to(tl.float32)
    y = _rows(do + b * do_batch + h * do_head, i, i < T, do_stride, V, BV).to(tl.float32)
    tl.store(delta + n.to(tl.int64) * T + i, tl.sum(x * y, 1), mask=i < T)


class Powers(NamedTuple):
    """What the units read of q or k."""

    x: Tensor  # [B, T, H, U], q or k itself, for exponents that are too large
    powers: Tensor  # [N, wide, units], exp(2x)
    largest: Tensor  # [N, wide / OTHERS], the largest exponent of some positions
    wide: int  # a multiple of the rows of every tile


class Call(NamedTuple):
    """One call of the operator."""

    q: Tensor  # [B, T, H, U]
    k: Tensor  # [B, S, H, U]
    v: Tensor  # [B, S, H, V]
    counts: Tensor  # [B, T] int32: each query sees the first keys
    score: Tensor  # [H, U]

    @property
    def constants(self) -> dict[str, object]:
        V = self.v.shape[3]
        precision = "tf32x3" if self.q.dtype == torch.float32 else "tf32"
        tiles = {"BU": UNITS, **self.tile, "BP": OTHERS}
        return {"H": self.q.shape[2], "V": V, "BV": tile_of(V), **tiles, "FAST": FAST, "PRECISION": precision}

    @property
    def tile(self) -> dict[str, int]:
        """Rows of a tile of scores; fewer on a GPU with little shared memory."""
        wide = tile_of(self.v.shape[3]) * self.v.element_size() > 4 * NARROW
        half = 2 if wide and shared_memory(self.v.device) < SHARED else 1
        return {"BM": QUERIES // half, "BN": KEYS // half}

    def launches(self, kernel: str) -> tuple[int, int, int]:
        """Warps, stages, registers."""
        warps, stages, registers = LAUNCHES[kernel]
        return warps, stages, registers if self.v.shape[3] <= NARROW else 255

    def powers(self) -> tuple[Powers, Powers]:
        return _power(self.q), _power(self.k)

    def weights(self) -> Tensor:
        """What the kernels multiply 1/(1 + E) by, [H, units]: in base 2, and 0 for units that do not exist."""
        score = self.score.float() * -TWICE.value
        return F.pad(score, (0, blocks_of(score.shape[1], UNITS) * UNITS - score.shape[1])).contiguous()


def _power(x: Tensor) -> Powers:
    B, size, H, U = x.shape
    wide = blocks_of(size, ROWS) * ROWS
    powers = torch.empty(B * H, wide, blocks_of(U, UNITS) * UNITS, device=x.device)
    largest = torch.empty(B * H, wide // OTHERS, device=x.device)
    numbers = (*x.stride()[:3], size, wide, U)
    launch(_powers, (x, powers, largest), Plan((wide // OTHERS, B * H), numbers, {"H": H, "BU": UNITS, "BP": OTHERS}))
    return Powers(x, powers, largest, wide)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def forward(x: Call) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V], and its log-sum-exp in base 2 [N, T], without the constant that all scores share."""
    q, k, v, counts, _ = x
    (B, T, H, U), S = q.shape, k.shape[1]
    o = torch.empty(B, T, H, v.shape[3], device=q.device, dtype=v.dtype)
    lse = torch.empty(B * H, T, device=q.device)
    (_, eq, large_q, wide_q), (_, ek, large_k, wide_k) = x.powers()
    tiles = blocks_of(T, x.tile["BM"])
    numbers = (*_strides(q, k, v), T, S, U, tiles, wide_q, wide_k, 0.0)
    plan = Plan((tiles * B * H,), numbers, x.constants, *x.launches("forward"))
    launch(_forward, (q, k, v, counts, x.weights(), eq, ek, large_q, large_k, o, lse), plan)
    return o, lse


def backward(x: Call, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the score."""
    (B, T, H, U), (S, V), device = x.q.shape, (x.k.shape[1], x.v.shape[3]), x.q.device
    N, constants = B * H, x.constants
    delta = torch.empty_like(lse)
    few = {name: constants[name] for name in ("H", "V", "BV", "BM")}
    launch(_delta, (o, do, delta), Plan((blocks_of(T, x.tile["BM"]), N), (*_strides(do), T), few))
    queries, keys = x.powers()
    piece = Piece(x, queries, keys, do, lse, delta, x.weights())
    dq, dk = torch.empty_like(queries.powers), torch.zeros_like(keys.powers)
    dv = torch.zeros(N, S, V, device=device)
    groups, tiles = blocks_of(U, UNITS), blocks_of(S, POSITIONS)
    dscore = torch.zeros(N, groups, UNITS, device=device)
    slices = max(1, min(N, HELD // (groups * tiles * ROWS * UNITS)))
    ds = torch.empty(slices, ROWS, keys.wide, device=device)
    parts = torch.empty(slices, groups, tiles, ROWS, UNITS, device=device, dtype=x.v.dtype)
    shares = torch.empty(slices, groups, tiles, UNITS, device=device)
    for slice0 in range(0, N, slices):
        own = range(slice0, min(slice0 + slices, N))
        for turn in range(piece.pieces):
            piece.pairs(own, turn, ds, dv)
            piece.units(own, turn, ds, dk, parts, shares)
            piece.add_up(own, turn, parts, dq)
            dscore[own.start : own.stop] += shares[: len(own)].sum(2)
    score = x.score.float()[:, None] * 4

    def of_tokens(grad: Tensor, size: int) -> Tensor:
        """[N, wide, units] -> [B, size, H, U]"""
        grad = grad.unflatten(0, (B, H))[:, :, :size, :U] * score
        return grad.transpose(1, 2).to(x.q.dtype, memory_format=torch.contiguous_format)

    dv = dv.unflatten(0, (B, H)).transpose(1, 2).to(x.v.dtype, memory_format=torch.contiguous_format)
    return of_tokens(dq, T), of_tokens(dk, S), dv, dscore.view(B, H, -1).sum(0)[:, :U].to(x.score.dtype)


class Piece(NamedTuple):
    """The backward of ROWS queries of some sequences: what its kernels read.

    In a turn sequences have different pieces, spread over the length: causal, the first see few keys and the last all.
    """

    x: Call
    queries: Powers
    keys: Powers
    do: Tensor
    lse: Tensor
    delta: Tensor
    weights: Tensor

    @property
    def pieces(self) -> int:
        """Of each sequence."""
        return blocks_of(self.x.q.shape[1], ROWS)

    @property
    def apart(self) -> int:
        """By how many the pieces of two neighbours differ."""
        return max(1, self.pieces // (self.x.q.shape[0] * self.x.q.shape[2]))

    def pairs(self, own: range, turn: int, ds: Tensor, dv: Tensor) -> None:
        """The gradients of the scores; adds to dv."""
        q, k, v, counts, _ = self.x
        constants = {**self.x.constants, "BX": POSITIONS, "ROWS": ROWS}
        tiles = blocks_of(blocks_of(k.shape[1], POSITIONS) * POSITIONS, self.x.tile["BN"])  # all that `_units` reads
        (_, eq, large_q, wide_q), (_, ek, large_k, wide_k) = self.queries, self.keys
        sizes = (q.shape[1], k.shape[1], q.shape[3], tiles, wide_q, wide_k, *self._turn(own, turn))
        read = (q, k, v, self.do, counts, self.weights, eq, ek, large_q, large_k, self.lse, self.delta)
        numbers = (*_strides(q, k, v, self.do), *sizes, 0.0)
        launch(_pairs, (*read, dv, ds), Plan((tiles * len(own),), numbers, constants, *self.x.launches("pairs")))

    def units(self, own: range, turn: int, ds: Tensor, dk: Tensor, parts: Tensor, shares: Tensor) -> None:
        """Adds to dk, and writes what each tile of keys gives to the gradients of q and of the score."""
        q, k, _, counts, _ = self.x
        (_, eq, large_q, wide_q), (_, ek, large_k, wide_k) = self.queries, self.keys
        T, S, U, tiles = q.shape[1], k.shape[1], q.shape[3], parts.shape[2]
        numbers = (*_strides(q, k), T, S, U, tiles, wide_q, wide_k, *self._turn(own, turn))
        tile = {"BU": UNITS, "BX": POSITIONS, "BQ": ADDED, "ROWS": ROWS, "BP": OTHERS}
        constants = {"H": q.shape[2], **tile, "FAST": FAST}
        plan = Plan((blocks_of(U, UNITS) * tiles * len(own),), numbers, constants, *LAUNCHES["units"])
        launch(_units, (q, k, counts, eq, ek, large_q, large_k, ds, dk, parts, shares), plan)

    def add_up(self, own: range, turn: int, parts: Tensor, dq: Tensor) -> None:
        """Writes to dq."""
        _, groups, tiles, _, _ = parts.shape
        T, H = self.x.q.shape[1:3]
        constants = {"H": H, "BU": UNITS, "BX": POSITIONS, "BQ": ADDED, "BT": TILES, "ROWS": ROWS}
        numbers = (T, tiles, self.queries.wide, *self._turn(own, turn))
        plan = Plan((ROWS // ADDED, len(own), groups), numbers, constants, *LAUNCHES["queries"])
        launch(_queries, (parts, self.x.counts, dq), plan)

    def _turn(self, own: range, turn: int) -> tuple[int, ...]:
        return turn, self.pieces, self.apart, own.start
