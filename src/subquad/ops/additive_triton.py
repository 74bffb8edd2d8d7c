"""The kernels of `additive.additive_attention`: flash attention whose scores are Σₕ scoreₕ·tanh(qₕ + kₕ).

Almost all time goes into the units, one tanh for each pair and hidden unit, so they are written for few instructions:
with E = exp(2(a + b)) = exp(2a)·exp(2b), which is a product of two numbers computed once, tanh(a + b) = 1 - 2y for
y = 1 / (1 + E). Four units share one reciprocal: 1/x₁ = x₂x₃x₄/(x₁x₂x₃x₄). The 1 moves all scores alike, so softmax
ignores it. Where the product might overflow, x is computed from a + b. Four at a time are also read from memory, some
rounds before they are needed.

The backward goes through some queries at a time. It keeps the gradients of their scores, and sums over units from
them, once for the queries and once for the keys: a program holds a tile of [units, positions] and adds up what each of
the other positions gives, so no sum crosses threads.

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
GROUP = tl.constexpr(4)  # units or positions that share one reciprocal
ROOM = tl.constexpr(31.0)  # (1 + 2**31)⁴ is finite in float32
LARGEST = tl.constexpr(126.0)  # exponent that is not cut off
STAGES = tl.constexpr(3)  # rounds of a loop that are read ahead, and the one that is computed
FAST = not INTERPRETED  # the interpreter has no assembly
QUERIES = KEYS = 64  # of a tile of scores
UNITS, POSITIONS = 64, 64  # of a tile of units
OTHERS = 32  # positions whose largest exponent is known
ROWS = 256  # queries of one piece of the backward, and keys that a program adds up for the gradient of queries
HELD = 2**25  # gradients of scores in memory at once
# warps, stages, registers: with fewer registers than the compiler would take, more programs hide each other's waits
LAUNCHES = {"forward": (4, 1, 168), "pairs": (8, 1, 128), "keys": (4, 1, 168), "queries": (4, 1, 168)}
NARROW = 64  # wider values leave no registers to save
SHARED = 98304  # bytes of shared memory that tiles of wide values take

# Arguments that change with the length. Triton must not compile another kernel if one is 1 or a multiple of 16; the
# others, such as wide_q, are always multiples.
CHANGING = ["T", "S", "size", "others", "U", "tiles", "slice0", "turn", "pieces", "apart"]


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1/x with a relative error of 2^-23."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return 1.0 / x


@triton.jit(do_not_specialize=CHANGING)
def _powers(
    x, by_position, by_unit, largest, batch, stride, head, size, wide, U, BOTH: tl.constexpr, H: tl.constexpr,
    BU: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """exp(2x) of a tile of positions, [positions, units] and with BOTH also [units, positions]; and the largest
    |exponent| among them, in base 2."""
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
        tl.store(by_position + (n.to(tl.int64) * wide + p)[:, None] * room + u[None, :], e)
        if BOTH:
            tl.store(by_unit + (n.to(tl.int64) * room + u)[None, :] * wide + p[:, None], e)
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
            w = score + u
            four = u + tl.arange(0, GROUP)
            a0, a1, a2, a3 = _four(tl.load(eq + i[:, None] * room + four[None, :]), BM)
            b0, b1, b2, b3 = _four(tl.load(ek + j[:, None] * room + four[None, :]), BN)
            x0 = a0[:, None] * b0[None, :] + 1.0
            x1 = a1[:, None] * b1[None, :] + 1.0
            x2 = a2[:, None] * b2[None, :] + 1.0
            x3 = a3[:, None] * b3[None, :] + 1.0
            x = x0 * x1
            y = x2 * x3
            a = tl.load(w) * x1 + tl.load(w + 1) * x0
            b = tl.load(w + 2) * x3 + tl.load(w + 3) * x2
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


@triton.jit(do_not_specialize=CHANGING)
def _pairs(
    q, k, v, do, counts, score, eq, ek, large_q, large_k, lse, delta, dv, by_query, by_key,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, do_batch, do_stride, do_head,
    T, S, U, tiles, wide_q, wide_k, turn, pieces, apart, slice0, zero,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, BP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of the queries row0 .. row0 + ROWS - 1 and a tile of keys, written in both orders.

    by_query [slices, ROWS, wide_k], by_key [slices, wide_k, ROWS]. Adds to dv [N, S, V] what these queries give.
    """
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
    by_query += own.to(tl.int64) * ROWS * wide_k
    by_key += own.to(tl.int64) * ROWS * wide_k
    row0 = _first_row(n, turn, pieces, apart, ROWS)
    j = j0 + tl.arange(0, BN)
    top_k = _largest(large_k, n, wide_k, j0, BN, BP)
    vt = _rows(v + b * v_batch + h * v_head, j, j < S, v_stride, V, BV)
    grad = tl.zeros([BN, BV], tl.float32)
    for i0 in tl.range(row0, row0 + ROWS, BM):
        i = i0 + tl.arange(0, BM)
        count = tl.load(counts + b * T + i, mask=i < T, other=0).to(tl.int32)
        by_query_tile = by_query + (i - row0).to(tl.int64)[:, None] * wide_k + j[None, :]
        by_key_tile = by_key + j.to(tl.int64)[:, None] * ROWS + (i - row0)[None, :]
        if tl.max(count, 0) <= j0:  # `_units` reads larger tiles, of which others may be seen
            tl.store(by_query_tile, tl.zeros([BM, BN], by_query.dtype.element_ty))
            tl.store(by_key_tile, tl.zeros([BN, BM], by_key.dtype.element_ty))
        else:
            big = top_k + _largest(large_q, n, wide_q, i0, BM, BP) > ROOM
            s = _scores(eq, ek, q, k, score, i, j, T, S, U, room, q_stride, k_stride, zero, big, BM, BN, FAST)
            norm = tl.load(lse + n.to(tl.int64) * T + i, mask=i < T, other=float("inf"))
            p = tl.where(j[None, :] < count[:, None], tl.exp2(s - norm[:, None]), 0.0)
            dot = _rows(do, i, i < T, do_stride, V, BV)
            grad = tl.dot(tl.trans(p.to(dot.dtype)), dot, grad, input_precision=PRECISION)
            dp = tl.dot(dot, vt.T, input_precision=PRECISION)
            ds = p * (dp - tl.load(delta + n.to(tl.int64) * T + i, mask=i < T, other=0.0)[:, None])
            ds = ds.to(by_query.dtype.element_ty)
            tl.store(by_query_tile, ds)
            tl.store(by_key_tile, tl.trans(ds))
    d = tl.arange(0, BV)
    place = dv + (n.to(tl.int64) * S + j)[:, None] * V + d[None, :]
    ok = (j < S)[:, None] & (d < V)[None, :]
    tl.store(place, tl.load(place, mask=ok, other=0.0) + grad, mask=ok)


@triton.jit(do_not_specialize=CHANGING)
def _units(
    x, y, counts, ex, ey, large_x, large_y, ds, dx, dscore,
    x_batch, x_stride, x_head, y_batch, y_stride, y_head,
    T, S, size, others, U, tiles, wide_q, wide_k, turn, pieces, apart, slice0,
    KEYS: tl.constexpr, H: tl.constexpr, BU: tl.constexpr, BX: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Σ ds·(1 - tanh²) over positions y, for a tile of units and positions x.

    With KEYS, x are keys and y the queries row0 .. row0 + ROWS - 1: adds to dx [N, units, wide_k]. Otherwise x are
    these queries and y as many keys: writes dx [pieces, slices, units, ROWS], and Σ ds·tanh to `dscore`
    [pieces, slices, tiles, units]. ex [N, units, wide], ey [N, wide, units].
    """
    groups = tl.cdiv(U, BU)
    u0 = tl.program_id(0) % groups * BU
    tile = tl.program_id(0) // groups % tiles
    own = tl.program_id(0) // groups // tiles
    n = slice0 + own
    b = (n // H).to(tl.int64)
    h = n % H
    x += b * x_batch + h * x_head
    y += b * y_batch + h * y_head
    counts += b * T
    line = tl.arange(0, BU)
    u = u0 + line
    p0 = tile * BX
    wide_x = wide_k
    wide_y = wide_q
    step = wide_k
    row0 = _first_row(n, turn, pieces, apart, ROWS)
    begin = row0
    i = row0 + tl.arange(0, ROWS)
    if KEYS:  # from the first query that sees a key of this tile
        seen = tl.load(counts + i, mask=i < T, other=0) > p0
        end = tl.minimum(row0 + ROWS, T)
        lo = tl.min(tl.where(seen, i, end), 0) // GROUP * GROUP
        ds -= row0 * wide_k
    else:  # to the last key that a query of this tile sees
        p0 += row0
        wide_x = wide_q
        wide_y = wide_k
        step = ROWS
        begin = tl.program_id(1) * ROWS
        lo = begin
        q = p0 + tl.arange(0, BX)
        end = tl.minimum(begin + ROWS, tl.max(tl.load(counts + q, mask=q < T, other=0), 0).to(tl.int32))
        ds -= row0
    p = p0 + tl.arange(0, BX)
    ex += (n.to(tl.int64) * groups * BU + u0) * wide_x
    ey += (n.to(tl.int64) * groups * BU + u0) * wide_y
    ds += own.to(tl.int64) * ROWS * wide_k + p
    a = tl.load(ex + line[:, None] * wide_x + p[None, :])
    acc = tl.zeros([BU, BX], tl.float32)
    first = tl.zeros([BU, BX // 4], tl.float32)  # summed over neighbours, whom a thread holds, to save registers
    total = tl.zeros([BX], tl.float32)
    big = _largest(large_x, n, wide_x, p0, BX, BP) + _largest(large_y, n, wide_y, begin, ROWS, BP) > ROOM
    if big:
        # row by row: a load of the whole tile would have another layout, and change that of the faster branch
        raw = tl.zeros([BU, BX], tl.float32)
        for unit in tl.range(u0, tl.minimum(u0 + BU, U)):
            row = tl.load(x + p.to(tl.int64) * x_stride + unit, mask=p < size, other=0.0).to(tl.float32)
            raw = tl.where((u == unit)[:, None], row[None, :], raw)
        for at in tl.range(lo, end):
            d0 = tl.load(ds + at * step).to(tl.float32)
            other = tl.load(y + at * y_stride + u, mask=(u < U) & (at < others), other=0.0).to(tl.float32)
            t0 = 1.0 / (1.0 + tl.exp2(tl.minimum((raw + other[:, None]) * TWICE, LARGEST))) - 0.5
            w0 = d0[None, :] * t0
            acc += w0 * t0
            total += d0
            if not KEYS:
                first += tl.sum(tl.reshape(w0, [BU, BX // 4, 4]), 2)
    else:
        for at in tl.range(lo, end, GROUP, num_stages=STAGES):
            four = at + tl.arange(0, GROUP)
            d0, d1, d2, d3 = _four(tl.load(ds[:, None] + four[None, :] * step).to(tl.float32), BX)
            b0, b1, b2, b3 = _four(tl.load(ey + (line * wide_y)[:, None] + four[None, :]), BU)
            x0 = a * b0[:, None] + 1.0
            x1 = a * b1[:, None] + 1.0
            x2 = a * b2[:, None] + 1.0
            x3 = a * b3[:, None] + 1.0
            low = x0 * x1
            high = x2 * x3
            r = _inverse(low * high, FAST)
            high *= r  # 1/(x0·x1)
            low *= r
            t0 = x1 * high - 0.5  # -tanh/2
            t1 = x0 * high - 0.5
            t2 = x3 * low - 0.5
            t3 = x2 * low - 0.5
            w0 = d0[None, :] * t0
            w1 = d1[None, :] * t1
            w2 = d2[None, :] * t2
            w3 = d3[None, :] * t3
            acc += w0 * t0
            acc += w1 * t1
            acc += w2 * t2
            acc += w3 * t3
            total += (d0 + d1) + (d2 + d3)
            if not KEYS:
                first += tl.sum(tl.reshape((w0 + w1) + (w2 + w3), [BU, BX // 4, 4]), 2)
    grad = total[None, :] - 4.0 * acc
    if KEYS:
        place = dx + (n.to(tl.int64) * groups * BU + u)[:, None] * wide_k + p[None, :]
        tl.store(place, tl.load(place) + grad)
    else:
        slices = tl.num_programs(0) // groups // tiles
        which = tl.program_id(1).to(tl.int64) * slices + own
        tl.store(dx + (which * groups * BU + u)[:, None] * ROWS + (p - row0)[None, :], grad)
        tl.store(dscore + (which * tiles + tile) * groups * BU + u, -2.0 * tl.sum(first, 1))


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
    by_position: Tensor  # [N, wide, units], exp(2x)
    by_unit: Tensor  # [N, units, wide], the same, for the backward
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

    def powers(self, both: bool) -> tuple[Powers, Powers]:
        return _power(self.q, both), _power(self.k, both)

    def weights(self) -> Tensor:
        """What the kernels multiply 1/(1 + E) by, [H, units]: in base 2, and 0 for units that do not exist."""
        score = self.score.float() * -TWICE.value
        return F.pad(score, (0, blocks_of(score.shape[1], UNITS) * UNITS - score.shape[1])).contiguous()


def _power(x: Tensor, both: bool) -> Powers:
    B, size, H, U = x.shape
    wide, units = blocks_of(size, ROWS) * ROWS, blocks_of(U, UNITS) * UNITS
    by_position = torch.empty(B * H, wide, units, device=x.device)
    by_unit = torch.empty(B * H, units, wide, device=x.device) if both else by_position
    largest = torch.empty(B * H, wide // OTHERS, device=x.device)
    constants = {"BOTH": both, "H": H, "BU": UNITS, "BP": OTHERS}
    plan = Plan((wide // OTHERS, B * H), (*x.stride()[:3], size, wide, U), constants)
    launch(_powers, (x, by_position, by_unit, largest), plan)
    return Powers(x, by_position, by_unit, largest, wide)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def forward(x: Call) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V], and its log-sum-exp in base 2 [N, T], without the constant that all scores share."""
    q, k, v, counts, _ = x
    (B, T, H, U), S = q.shape, k.shape[1]
    o = torch.empty(B, T, H, v.shape[3], device=q.device, dtype=v.dtype)
    lse = torch.empty(B * H, T, device=q.device)
    (_, eq, _, large_q, wide_q), (_, ek, _, large_k, wide_k) = x.powers(False)
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
    queries, keys = x.powers(True)
    piece = Piece(x, queries, keys, do, lse, delta, x.weights())
    dq, dk = torch.empty_like(queries.by_unit), torch.zeros_like(keys.by_unit)
    dv = torch.zeros(N, S, V, device=device)
    pieces, dscore = piece.pieces, torch.zeros(dq.shape[:2], device=device)
    dq_in_pieces = dq.unflatten(2, (pieces, ROWS))
    slices = max(1, min(N, HELD // (ROWS * keys.wide)))
    held = [torch.empty(slices * ROWS * keys.wide, device=device, dtype=x.v.dtype) for _ in range(2)]
    for slice0 in range(0, N, slices):
        own = slice(slice0, min(slice0 + slices, N))
        some = torch.arange(own.start, own.stop, device=device)
        for turn in range(pieces):
            by_query, by_key = piece.pairs(own, turn, held, dv)
            piece.of_keys(own, turn, by_query, dk)
            dq_in_pieces[some, :, (turn + some * piece.apart) % pieces], share = piece.of_queries(own, turn, by_key)
            dscore[own] += share
    score = x.score.float()[:, :, None]

    def of_tokens(grad: Tensor, size: int) -> Tensor:
        """[N, units, wide] -> [B, size, H, U]"""
        grad = grad.unflatten(0, (B, H))[:, :, :U, :size] * score
        return grad.permute(0, 3, 1, 2).to(x.q.dtype, memory_format=torch.contiguous_format)

    dv = dv.unflatten(0, (B, H)).transpose(1, 2).to(x.v.dtype, memory_format=torch.contiguous_format)
    return of_tokens(dq, T), of_tokens(dk, S), dv, dscore.unflatten(0, (B, H)).sum(0)[:, :U].to(x.score.dtype)


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

    def pairs(self, own: slice, turn: int, held: list[Tensor], dv: Tensor) -> list[Tensor]:
        """The gradients of the scores, by queries and by keys; adds to dv."""
        (q, k, v, counts, _), count = self.x, own.stop - own.start
        T, S, U = q.shape[1], k.shape[1], q.shape[3]
        tiles = blocks_of(S, POSITIONS) * POSITIONS // self.x.tile["BN"]  # what `_units` reads must have been written
        (_, eq, _, large_q, wide_q), (_, ek, _, large_k, wide_k) = self.queries, self.keys
        sizes = (T, S, U, tiles, wide_q, wide_k, turn, self.pieces, self.apart, own.start)
        numbers = (*_strides(q, k, v, self.do), *sizes, 0.0)
        read = (q, k, v, self.do, counts, self.weights, eq, ek, large_q, large_k, self.lse, self.delta)
        plan = Plan((tiles * count,), numbers, {**self.x.constants, "ROWS": ROWS}, *self.x.launches("pairs"))
        launch(_pairs, (*read, dv, *held), plan)
        return held

    def of_keys(self, own: slice, turn: int, by_query: Tensor, dk: Tensor) -> None:
        """Adds the gradients of the keys, not yet times the score, to dk [N, units, wide]."""
        tiles = blocks_of(self.x.k.shape[1], POSITIONS)
        self._units(own, turn, (self.keys, self.queries), tiles, 1, (by_query, dk, dk))

    def of_queries(self, own: slice, turn: int, by_key: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the queries [slices, units, ROWS], not yet times the score, and what they give to the
        gradient of the score, [slices, units]."""
        pieces, tiles, count = blocks_of(self.x.k.shape[1], ROWS), ROWS // POSITIONS, own.stop - own.start
        units = self.queries.by_unit.shape[1]
        parts = self.weights.new_empty(pieces, count, units, ROWS)
        shares = self.weights.new_empty(pieces, count, tiles, units)
        self._units(own, turn, (self.queries, self.keys), tiles, pieces, (by_key, parts, shares))
        return parts.sum(0), shares.sum((0, 2))

    def _units(
        self, own: slice, turn: int, sides: tuple[Powers, Powers], tiles: int, pieces: int, rest: tuple[Tensor, ...]
    ) -> None:
        (x, _, ex, large_x, _), (y, _, ey, large_y, _) = sides
        _, T, H, U = self.x.q.shape
        wides = self.queries.wide, self.keys.wide
        sizes = (T, self.x.k.shape[1], x.shape[1], y.shape[1], U, tiles)
        numbers = (*_strides(x, y), *sizes, *wides, turn, self.pieces, self.apart, own.start)
        tile = {"BU": UNITS, "BX": POSITIONS, "ROWS": ROWS, "BP": OTHERS}
        constants = {"KEYS": sides[0] is self.keys, "H": H, **tile, "FAST": FAST}
        grid = (blocks_of(U, UNITS) * tiles * (own.stop - own.start), pieces)
        plan = Plan(grid, numbers, constants, *LAUNCHES["keys" if constants["KEYS"] else "queries"])
        launch(_units, (x, y, self.x.counts, ex, ey, large_x, large_y, *rest), plan)
