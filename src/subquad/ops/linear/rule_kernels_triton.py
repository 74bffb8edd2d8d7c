# ruff: noqa: SIM102, SIM300 (a compile-time test and a run-time one stay apart; DOT and SUM are parameters)
"""Delta rules, and gates for each channel, on the GPU: chunks of C tokens, and a state that walks from chunk to chunk.

With G the running sum of log gates in a chunk, A the strictly lower part of diag(β)·(decayed k·k) and T = (I + A)⁻¹,
a chunk turns the state S before it into the one after it like this (without β, V' is v):

    W = T (β eᴳ k),  U = T (β v),  V' = U - W S        what the delta rule writes, all tokens of the chunk at once
    o = (eᴳ q) S + (decayed q·k) V'
    S ← e^{G_C} S + (e^{G_C - G} k)ᵀ V'

Only V' and S need the chunk before, so only `walk` goes through the chunks in order; the others take all at once.

    decay       e^{G_C - G} k, eᴳ q and e^{G_C}, where each channel has its gate     forward and backward
    invert      T, which is kept for the gradients                                   forward
    solve       W and U                                                              forward and backward
    walk        V' and the state before each chunk                                   forward and backward
    read        o                                                                    forward
    read_back   the part of dV' that comes from o in the same chunk                  backward
    walk_back   dV' and dS after each chunk, last chunk first                        backward
    gradients   dq, dk, d log_gate, d beta and dv from these                         backward

With X = Tᵀ dV', d(βv) = X, dA = -X V'ᵀ and d(β eᴳ k) = -X Sᵀ: no other inverse is needed.
Decays enter as exponentials of sums of log gates. Where each channel has its own, the decayed product of two tokens is
a product of q e^{G - R} and k e^{R - G} for a reference R in the middle of the chunk, if no channel decays by more than
e^-60 in it. Otherwise the chunk is halved again and again, with R at the border between the halves: then no exponent is
above zero, and any gate is exact.

Legend: C chunk, N sequences; a slot is a (sequence, chunk) pair. GATE: 0 none, 1 a number per head, 2 per channel.
"""

import triton
import triton.language as tl

from subquad.ops.linear.tiles_triton import head_of, load_column, load_gate, load_rows, locate, rest_of, store_rows

MILD = tl.constexpr(-60.0)  # a sum of log gates whose exponential, and its inverse, leave room in float32
BLOCK = tl.constexpr(64)  # `decay` writes the steepest gate of this many channels


@triton.jit
def _gates(ptr, t, left, stride: tl.constexpr, d0, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """log gates of a chunk for each channel, [C, BD]; below the floor the exponential is zero anyway."""
    return tl.maximum(load_rows(ptr, t, left, stride, d0, D, C, BD, False).to(tl.float32), -110.0)


@triton.jit
def _row(x, r, C: tl.constexpr):
    """Row r of a tile [C, D]."""
    return tl.sum(tl.where((tl.arange(0, C) == r)[:, None], x, 0.0), 0)


@triton.jit
def _dot(a, b, DOT: tl.constexpr, PREC: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PREC, out_dtype=tl.float32)


@triton.jit
def _split(x, DOT: tl.constexpr):
    """A tile in float32 as what DOT keeps of it, and the rest."""
    high = x.to(DOT)
    return high, (x - high.to(tl.float32)).to(DOT)


@triton.jit
def _dot_split(high, low, b, DOT: tl.constexpr, PREC: tl.constexpr):
    """The product of such a tile, with all its digits, and b."""
    b = b.to(DOT)
    y = tl.dot(high, b, input_precision=PREC, out_dtype=tl.float32)
    if DOT != tl.float32:
        y = tl.dot(low, b, y, input_precision=PREC, out_dtype=tl.float32)
    return y


@triton.jit
def _fade(rows, cols):
    """The decay from one token to a later one, by the sums of log gates up to both."""
    high_rows = rows.to(tl.float32)
    high_cols = cols.to(tl.float32)
    between = high_rows[:, None] - high_cols[None, :]
    if rows.dtype == tl.float64:  # a tile of float64 would take too many registers
        between += (rows - high_rows).to(tl.float32)[:, None] - (cols - high_cols).to(tl.float32)[None, :]
    return tl.exp(tl.minimum(between, 0.0))


@triton.jit
def _push(x):
    """The gradients of the sums of log gates, from x[t, s], that of the decay from token s to token t, times itself.

    A gate's gradient is a sum of these, in which all pairs cancel that are not on both sides of it: in float64 they do.
    """
    x = x.to(tl.float64)
    return tl.sum(x, 1) - tl.sum(x, 0)


@triton.jit
def _halves(gate, b, C: tl.constexpr):
    """Blocks of b tokens in pairs: the decay of each token to its pair's border [C, D], and who sees whom [C, C]."""
    i = tl.arange(0, C)
    right = (i // b) % 2 == 1
    same = (i[:, None] // b) == (i[None, :] // b)
    between = tl.where(right[:, None], i[None, :] <= i[:, None], i[None, :] > i[:, None]) & same
    decay = tl.exp(tl.dot(between.to(tl.float32), gate, input_precision="ieee", out_dtype=tl.float32))
    sees = ((i[:, None] // (2 * b)) == (i[None, :] // (2 * b))) & right[:, None] & ((i[None, :] // b) % 2 == 0)
    return decay, sees


@triton.jit
def _is_steep(worst, slot, h, H: tl.constexpr, K: tl.constexpr):
    """Whether a channel of the chunk decays too much for one reference, by what `decay` wrote."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    lowest = tl.load(worst + (slot.to(tl.int64) * H + h) * BLOCKS)
    for i in tl.static_range(1, BLOCKS):
        lowest = tl.minimum(lowest, tl.load(worst + (slot.to(tl.int64) * H + h) * BLOCKS + i))
    return lowest <= MILD


@triton.jit
def _scores(q, k, gate, STEEP: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """Σ q·k e^{Gₜ - Gₛ} over the channels for s <= t, [C, C], with a gate for each channel."""
    i = tl.arange(0, C)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    if STEEP:
        a = tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0.0)
        b = 1
        while b < C:
            decay, sees = _halves(gate, b, C)
            a += tl.where(sees, _dot(q * decay, tl.trans(k * decay), DOT, PREC), 0.0)
            b *= 2
    else:
        age = tl.cumsum(gate, 0)
        middle = _row(age, C // 2, C)
        a = _dot(q * tl.exp(age - middle[None, :]), tl.trans(k * tl.exp(middle[None, :] - age)), DOT, PREC)
        a = tl.where(i[:, None] >= i[None, :], a, 0.0)
    return a


@triton.jit
def _scores_back(da, q, k, gate, STEEP: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """Gradients of q, k and the summed gates from da, that of `_scores`.

    The gate's is q·dq - k·dk, two sums over the same pairs of tokens. Both take the operands that the products took, as
    they were rounded for them, so that what should cancel does.
    """
    i = tl.arange(0, C)
    if STEEP:
        own = tl.sum(tl.where(i[:, None] == i[None, :], da, 0.0), 1)[:, None]
        dq = own * k
        dk = own * q
        dage = tl.zeros_like(dq)
        b = 1
        while b < C:
            decay, sees = _halves(gate, b, C)
            part = tl.where(sees, da, 0.0).to(DOT)
            qx = (q * decay).to(DOT)
            kx = (k * decay).to(DOT)
            gq = _dot(part, kx, DOT, PREC)
            gk = _dot(tl.trans(part), qx, DOT, PREC)
            dage += qx.to(tl.float32) * gq - kx.to(tl.float32) * gk
            dq += gq * decay
            dk += gk * decay
            b *= 2
    else:
        age = tl.cumsum(gate, 0)
        middle = _row(age, C // 2, C)
        up = tl.exp(age - middle[None, :])
        down = tl.exp(middle[None, :] - age)
        part = tl.where(i[:, None] >= i[None, :], da, 0.0).to(DOT)
        qx = (q * up).to(DOT)
        kx = (k * down).to(DOT)
        dq = _dot(part, kx, DOT, PREC)
        dk = _dot(tl.trans(part), qx, DOT, PREC)
        dage = qx.to(tl.float32) * dq - kx.to(tl.float32) * dk
        dq = dq * up
        dk = dk * down
    return dq, dk, dage


@triton.jit
def decay(
    q, k, g, qd, kd, fade, worst, cu, owner, lengths,
    T, L, NS, qb, qh, kb, kh, gb, gh,
    QT: tl.constexpr, KT: tl.constexpr, GT: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Keys decayed to the chunk's end, the decay of the whole chunk and, for gradients, queries from its start.

    `worst` gets the steepest sum of log gates among these channels.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    g += head_of(n, h, first, gb, GT, gh, PACKED)
    at = (first * H + h) * K
    t = j * C
    left = real - t
    gate = _gates(g, t, left, GT, k0, K, C, BK)
    age = tl.cumsum(gate, 0)
    total = tl.sum(gate, 0)
    x = load_rows(k, t, left, KT, k0, K, C, BK, False).to(tl.float32)
    store_rows(kd + at, x * tl.exp(rest_of(gate)), t, size - t, H * K, k0, K, C, BK, False)
    c = k0 + tl.arange(0, BK)
    tl.store(fade + (slot.to(tl.int64) * H + h) * K + c, tl.exp(total), mask=c < K)
    tl.store(worst + pid, tl.min(total, 0))
    if QUERIES:
        q += head_of(n, h, first, qb, QT, qh, PACKED)
        x = load_rows(q, t, left, QT, k0, K, C, BK, False).to(tl.float32)
        store_rows(qd + at, x * tl.exp(age), t, size - t, H * K, k0, K, C, BK, False)


@triton.jit
def _small(a, b, EXACT: tl.constexpr):
    """The product of two 16 x 16 tiles in float32."""
    return tl.dot(a, b, input_precision="ieee" if EXACT else "tf32x3", out_dtype=tl.float32)


@triton.jit
def _tile(ki, kj, beta, gi, gj, DOT: tl.constexpr, PREC: tl.constexpr):
    """A tile of A: β k·k, decayed from key to query."""
    a = _dot(ki, tl.trans(kj), DOT, PREC)
    return a * beta[:, None] * _fade(gi, gj)


@triton.jit
def _unit_inverse(a, EXACT: tl.constexpr):
    """(I + A)⁻¹ of a tile whose strictly lower part is A: of its blocks of 2, then of 4, 8 and 16."""
    i = tl.arange(0, 16)
    row = i[:, None]
    col = i[None, :]
    x = tl.where(row == col, 1.0, 0.0) - tl.where((row // 2 == col // 2) & (row > col), a, 0.0)
    for b in tl.static_range(1, 4):
        below = (row >> (b + 1) == col >> (b + 1)) & (row >> b > col >> b)
        x -= _small(_small(x, tl.where(below, a, 0.0), EXACT), x, EXACT)
    return x


@triton.jit
def _store_tile(ptr, x, t, size, ROW: tl.constexpr, COL: tl.constexpr, H: tl.constexpr, C: tl.constexpr):
    """Tile (ROW, COL) of T, on or below the diagonal, for `_load_inverse`."""
    row = tl.arange(0, 16)[:, None]
    col = tl.arange(0, 16)[None, :]
    high = x.to(ptr.dtype.element_ty)
    low = tl.trans(x - high.to(tl.float32)).to(ptr.dtype.element_ty)
    ptr += tl.cast(t, tl.int64) * (H * C)
    if ROW == COL:
        high = tl.where(row >= col, high, low)
    else:
        tl.store(ptr + (16 * COL + row) * (H * C) + 16 * ROW + col, low, mask=t + 16 * COL + row < size)
    tl.store(ptr + (16 * ROW + row) * (H * C) + 16 * COL + col, high, mask=t + 16 * ROW + row < size)


@triton.jit
def _load_inverse(ptr, t, left, H: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr):
    """T, or Tᵀ, in float32. In bfloat16, what rounding takes from T is kept too, transposed, in the triangle above it.

    Where keys repeat, T subtracts values that are nearly equal, and its rounding would be most of what is left.
    """
    row = tl.arange(0, C)[:, None]
    col = tl.arange(0, C)[None, :]
    x = load_rows(ptr, t, left, H * C, 0, C, C, C, EVEN)
    low = tl.trans(x)
    if TURNED:
        x, low = low, x
        row, col = col, row
    y = tl.where(row >= col, x, 0.0).to(tl.float32)
    if ptr.dtype.element_ty != tl.float32:
        y += tl.where(row > col, low, 0.0).to(tl.float32)
    return y


@triton.jit
def invert(
    k, g, beta, inverse, cu, owner, lengths,
    T, L, NS, kb, kh, gb, gt, gh, bb, bt, bh,
    KT: tl.constexpr, K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr,
    SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """T of a chunk of 64 tokens, in tiles of 16."""
    pid = tl.program_id(0)
    slot = pid // H
    h = pid % H
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    beta += head_of(n, h, first, bb, bt, bh, PACKED)
    inverse += (first * H + h) * C
    t = j * C
    left = real - t

    b0 = load_column(beta, t, left, bt, 16, tl.float32, 0.0)
    b1 = load_column(beta, t + 16, left - 16, bt, 16, tl.float32, 0.0)
    b2 = load_column(beta, t + 32, left - 32, bt, 16, tl.float32, 0.0)
    b3 = load_column(beta, t + 48, left - 48, bt, 16, tl.float32, 0.0)
    g0 = tl.zeros([16], SUM)
    g1, g2, g3 = g0, g0, g0
    if GATE == 1:
        r0 = load_gate(g, t, left, gt, 16, SUM)
        r1 = load_gate(g, t + 16, left - 16, gt, 16, SUM)
        r2 = load_gate(g, t + 32, left - 32, gt, 16, SUM)
        r3 = load_gate(g, t + 48, left - 48, gt, 16, SUM)
        g0 = tl.cumsum(r0, 0)
        g1 = tl.cumsum(r1, 0) + tl.sum(r0, 0)
        g2 = tl.cumsum(r2, 0) + tl.sum(r0, 0) + tl.sum(r1, 0)
        g3 = tl.cumsum(r3, 0) + tl.sum(r0, 0) + tl.sum(r1, 0) + tl.sum(r2, 0)
    k0 = load_rows(k, t, left, KT, 0, K, 16, BK, False)
    k1 = load_rows(k, t + 16, left - 16, KT, 0, K, 16, BK, False)
    k2 = load_rows(k, t + 32, left - 32, KT, 0, K, 16, BK, False)
    k3 = load_rows(k, t + 48, left - 48, KT, 0, K, 16, BK, False)

    t00 = _unit_inverse(_tile(k0, k0, b0, g0, g0, DOT, PREC), EXACT)
    _store_tile(inverse, t00, t, size, 0, 0, H, C)

    t11 = _unit_inverse(_tile(k1, k1, b1, g1, g1, DOT, PREC), EXACT)
    t10 = -_small(t11, _small(_tile(k1, k0, b1, g1, g0, DOT, PREC), t00, EXACT), EXACT)
    _store_tile(inverse, t10, t, size, 1, 0, H, C)
    _store_tile(inverse, t11, t, size, 1, 1, H, C)

    t22 = _unit_inverse(_tile(k2, k2, b2, g2, g2, DOT, PREC), EXACT)
    a20 = _tile(k2, k0, b2, g2, g0, DOT, PREC)
    a21 = _tile(k2, k1, b2, g2, g1, DOT, PREC)
    t20 = -_small(t22, _small(a20, t00, EXACT) + _small(a21, t10, EXACT), EXACT)
    t21 = -_small(t22, _small(a21, t11, EXACT), EXACT)
    _store_tile(inverse, t20, t, size, 2, 0, H, C)
    _store_tile(inverse, t21, t, size, 2, 1, H, C)
    _store_tile(inverse, t22, t, size, 2, 2, H, C)

    t33 = _unit_inverse(_tile(k3, k3, b3, g3, g3, DOT, PREC), EXACT)
    a30 = _tile(k3, k0, b3, g3, g0, DOT, PREC)
    a31 = _tile(k3, k1, b3, g3, g1, DOT, PREC)
    a32 = _tile(k3, k2, b3, g3, g2, DOT, PREC)
    t30 = _small(a30, t00, EXACT) + _small(a31, t10, EXACT) + _small(a32, t20, EXACT)
    t31 = _small(a31, t11, EXACT) + _small(a32, t21, EXACT)
    _store_tile(inverse, -_small(t33, t30, EXACT), t, size, 3, 0, H, C)
    _store_tile(inverse, -_small(t33, t31, EXACT), t, size, 3, 1, H, C)
    _store_tile(inverse, -_small(t33, _small(a32, t22, EXACT), EXACT), t, size, 3, 2, H, C)
    _store_tile(inverse, t33, t, size, 3, 3, H, C)


@triton.jit
def solve(
    k, v, g, beta, inverse, w, u, cu, owner, lengths,
    T, L, NS, kb, kh, vb, vh, gb, gt, gh, bb, bt, bh,
    KT: tl.constexpr, VT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr,
    SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """W and U of a chunk, from T."""
    pid = tl.program_id(0)
    slot = pid // H
    h = pid % H
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    w += (first * H + h) * K
    u += (first * H + h) * V
    t = j * C
    left = real - t
    rate = load_column(beta + head_of(n, h, first, bb, bt, bh, PACKED), t, left, bt, C, tl.float32, 0.0)
    x = _load_inverse(inverse + (first * H + h) * C, t, left, H, C, EVEN, False) * rate[None, :]
    high, low = _split(x, DOT)
    for v0 in range(0, V, BV):
        v0 = tl.multiple_of(v0, BV)
        y = _dot_split(high, low, load_rows(v, t, left, VT, v0, V, C, BV, EVEN), DOT, PREC)
        store_rows(u, y, t, size - t, H * V, v0, V, C, BV, EVEN)
    if GATE == 1:
        age = tl.cumsum(load_gate(g + head_of(n, h, first, gb, gt, gh, PACKED), t, left, gt, C, SUM), 0)
        high, low = _split(x * tl.exp(age.to(tl.float32))[None, :], DOT)
    for k0 in range(0, K, BK):
        k0 = tl.multiple_of(k0, BK)
        y = _dot_split(high, low, load_rows(k, t, left, KT, k0, K, C, BK, EVEN), DOT, PREC)
        store_rows(w, y, t, size - t, H * K, k0, K, C, BK, EVEN)


@triton.jit
def walk(
    k, u, w, g, fade, rows, new, init, final, cu, owner, lengths,
    T, L, NS, kb, kh, ub, uh, gb, gt, gh,
    KT: tl.constexpr, UT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    INIT: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """V' of a sequence to `new` (DELTA), the state before each chunk to `rows`, and the last one to `final`.

    u is U (DELTA) or v; k is already decayed where each channel has its gate.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    if PACKED:
        slot = (tl.load(cu + n).to(tl.int64) // C).to(tl.int32) + n
    else:
        slot = n * NS
    n, _, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    u += head_of(n, h, first, ub, UT, uh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    w += (first * H + h) * K
    new += (first * H + h) * V
    dk = tl.arange(0, BK)
    dv = v0 + tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BK, BV], tl.float32)
    here = (n.to(tl.int64) * H + h) * (K * V)
    if INIT:
        s += tl.load(init + here + tile, mask=inside, other=0.0)
    at = slot.to(tl.int64) * H + h
    for t in range(0, segments * C, C):
        left = real - t
        held = s.to(rows.dtype.element_ty)
        tl.store(rows + at * (K * V) + tile, held, mask=inside)
        x = load_rows(u, t, left, UT, v0, V, C, BV, EVEN)
        if DELTA:
            x = x.to(tl.float32) - _dot(load_rows(w, t, left, H * K, 0, K, C, BK, EVEN), held, DOT, PREC)
            store_rows(new, x, t, size - t, H * V, v0, V, C, BV, EVEN)
        if GATE == 1:
            gate = load_gate(g, t, left, gt, C, SUM)
            whole = tl.sum(gate, 0).to(tl.float32)
            x = x.to(tl.float32) * tl.exp(rest_of(gate).to(tl.float32))[:, None]
            s = s * tl.exp(whole)
        if GATE == 2:
            s = s * tl.load(fade + at * K + dk, mask=dk < K, other=0.0)[:, None]
        s += _dot(tl.trans(load_rows(k, t, left, KT, 0, K, C, BK, EVEN)), x, DOT, PREC)
        at += H
    tl.store(final + here + tile, s, mask=inside)


@triton.jit
def read(
    q, k, new, g, worst, rows, o, cu, owner, lengths,
    T, L, NS, qb, qh, kb, kh, ub, uh, gb, gt, gh,
    QT: tl.constexpr, KT: tl.constexpr, UT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr, STEEP: tl.constexpr,
    BACK: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of a chunk from V'. BACK: from do, what its o contributes to dV'; then `new` is do, and `rows` is not used.

    Where each channel has a gate, STEEP chunks and the others are done by two launches.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if GATE == 2:
        if _is_steep(worst, slot, h, H, K) != STEEP:
            return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    new += head_of(n, h, first, ub, UT, uh, PACKED)
    o += (first * H + h) * V
    t = j * C
    left = real - t
    i = tl.arange(0, C)
    qx = load_rows(q, t, left, QT, 0, K, C, BK, EVEN)
    kx = load_rows(k, t, left, KT, 0, K, C, BK, EVEN)
    if GATE == 2:
        g += head_of(n, h, first, gb, gt, gh, PACKED)
        dk = tl.arange(0, BK)
        p = g + tl.cast(t + i, tl.int64)[:, None] * gt + dk[None, :]
        gate = tl.load(p, mask=(i < left)[:, None] & (dk < K)[None, :], other=0.0).to(tl.float32)
        gate = tl.maximum(gate, -110.0)
        a = _scores(qx, kx, gate, STEEP, C, DOT, PREC)
        if not BACK:
            qx = qx.to(tl.float32) * tl.exp(tl.cumsum(gate, 0))
    else:
        a = tl.where(i[:, None] >= i[None, :], _dot(qx, tl.trans(kx), DOT, PREC), 0.0)
        if GATE == 1:
            age = tl.cumsum(load_gate(g + head_of(n, h, first, gb, gt, gh, PACKED), t, left, gt, C, SUM), 0)
            a = a * _fade(age, age)
    x = load_rows(new, t, left, UT, v0, V, C, BV, EVEN)
    if BACK:
        y = _dot(tl.trans(a), x, DOT, PREC)
    else:
        dk = tl.arange(0, BK)
        dv = v0 + tl.arange(0, BV)
        tile = dk[:, None] * V + dv[None, :]
        inside = (dk < K)[:, None] & (dv < V)[None, :]
        held = tl.load(rows + (slot.to(tl.int64) * H + h) * (K * V) + tile, mask=inside, other=0.0)
        y = _dot(qx, held, DOT, PREC)
        if GATE == 1:
            y = y * tl.exp(age.to(tl.float32))[:, None]
        y += _dot(a, x, DOT, PREC)
    store_rows(o, y, t, size - t, H * V, v0, V, C, BV, EVEN)


@triton.jit
def walk_back(
    q, k, w, g, fade, do, dnew, drows, end, dinit, cu, owner, lengths,
    T, L, NS, qb, qh, kb, kh, ob, oh, gb, gt, gh,
    QT: tl.constexpr, KT: tl.constexpr, OT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    END: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The last chunk first: dS after each chunk to `drows`, its part of dV' added to `dnew`, and dS of the start.

    q and k are already decayed where each channel has its gate. END: dS after the last token is in `end`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    if PACKED:
        slot = (tl.load(cu + n).to(tl.int64) // C).to(tl.int32) + n
    else:
        slot = n * NS
    n, _, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    do += head_of(n, h, first, ob, OT, oh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    w += (first * H + h) * K
    dnew += (first * H + h) * V
    dk = tl.arange(0, BK)
    dv = v0 + tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    ds = tl.zeros([BK, BV], tl.float32)
    here = (n.to(tl.int64) * H + h) * (K * V)
    if END:
        ds += tl.load(end + here + tile, mask=inside, other=0.0)
    for c in range(segments):
        j = segments - 1 - c
        t = j * C
        left = real - t
        at = (slot + j).to(tl.int64) * H + h
        held = ds.to(drows.dtype.element_ty)
        tl.store(drows + at * (K * V) + tile, held, mask=inside)
        x = _dot(load_rows(k, t, left, KT, 0, K, C, BK, EVEN), held, DOT, PREC)
        dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN)
        if GATE == 1:
            gate = load_gate(g, t, left, gt, C, SUM)
            whole = tl.sum(gate, 0).to(tl.float32)
            age = tl.cumsum(gate, 0).to(tl.float32)
            x = x * tl.exp(rest_of(gate).to(tl.float32))[:, None]
            dox = dox.to(tl.float32) * tl.exp(age)[:, None]
            ds = ds * tl.exp(whole)
        if GATE == 2:
            ds = ds * tl.load(fade + at * K + dk, mask=dk < K, other=0.0)[:, None]
        x += load_rows(dnew, t, left, H * V, v0, V, C, BV, EVEN).to(tl.float32)
        store_rows(dnew, x, t, size - t, H * V, v0, V, C, BV, EVEN)
        ds += _dot(tl.trans(load_rows(q, t, left, QT, 0, K, C, BK, EVEN)), dox, DOT, PREC)
        if DELTA:
            ds -= _dot(tl.trans(load_rows(w, t, left, H * K, 0, K, C, BK, EVEN)), x, DOT, PREC)
    tl.store(dinit + here + tile, ds, mask=inside)


@triton.jit
def gradients(
    q, k, v, g, worst, beta, do, inverse, rows, new, drows, dnew, dq, dk, dv, dg, dbeta, cu, owner, lengths,
    T, L, NS, TOKENS, qb, qh, kb, kh, vb, vh, ob, oh, gb, gt, gh, bb, bt, bh, nb, nh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, NT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    STEEP: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What is left of the gradients of a chunk, for BK columns of K. A gate or β per head gets a part from each block.

    `new` is V' (DELTA) or v; NT is its stride from token to token.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    block = pid % NK
    k0 = block * BK
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if GATE == 2:
        if _is_steep(worst, slot, h, H, K) != STEEP:
            return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    do += head_of(n, h, first, ob, OT, oh, PACKED)
    inverse += (first * H + h) * C
    new += head_of(n, h, first, nb, NT, nh, PACKED)
    dnew += (first * H + h) * V
    dq += (first * H + h) * K
    dk += (first * H + h) * K
    dv += (first * H + h) * V
    t = j * C
    left = real - t
    i = tl.arange(0, C)
    ck = k0 + tl.arange(0, BK)
    at = (slot.to(tl.int64) * H + h) * (K * V)

    from_s = tl.zeros([C, BK], tl.float32)  # do Sᵀ
    to_s = tl.zeros([C, BK], tl.float32)  # V' dSᵀ
    da = tl.zeros([C, C], tl.float32)  # do V'ᵀ
    ends = tl.zeros([BK], tl.float32)  # dS·S
    if DELTA:
        beta += head_of(n, h, first, bb, bt, bh, PACKED)
        bx = load_column(beta, t, left, bt, C, tl.float32, 0.0)
        high, low = _split(_load_inverse(inverse, t, left, H, C, EVEN, True), DOT)  # Tᵀ
        da_keys = tl.zeros([C, C], tl.float32)  # X V'ᵀ
        from_w = tl.zeros([C, BK], tl.float32)  # X Sᵀ
        db = tl.zeros([C], tl.float32)
    for v0 in range(0, V, BV):
        v0 = tl.multiple_of(v0, BV)
        cv = v0 + tl.arange(0, BV)
        tile = ck[:, None] * V + cv[None, :]
        inside = (ck < K)[:, None] & (cv < V)[None, :]
        held = tl.load(rows + at + tile, mask=inside, other=0.0)
        dheld = tl.load(drows + at + tile, mask=inside, other=0.0)
        dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN)
        x = load_rows(new, t, left, NT, v0, V, C, BV, EVEN)
        from_s += _dot(dox, tl.trans(held), DOT, PREC)
        to_s += _dot(x, tl.trans(dheld), DOT, PREC)
        da += _dot(dox, tl.trans(x), DOT, PREC)
        ends += tl.sum(held.to(tl.float32) * dheld.to(tl.float32), 1)
        if DELTA:
            y = _dot_split(high, low, load_rows(dnew, t, left, H * V, v0, V, C, BV, EVEN), DOT, PREC)  # X
            if k0 == 0:
                vx = load_rows(v, t, left, VT, v0, V, C, BV, EVEN)
                store_rows(dv, y * bx[:, None], t, size - t, H * V, v0, V, C, BV, EVEN)
                db += tl.sum(y * vx.to(tl.float32), 1)
            da_keys += _dot(y, tl.trans(x), DOT, PREC)
            from_w += _dot(y, tl.trans(held), DOT, PREC)

    qx = load_rows(q, t, left, QT, k0, K, C, BK, EVEN)
    kx = load_rows(k, t, left, KT, k0, K, C, BK, EVEN)
    qf = qx.to(tl.float32)
    kf = kx.to(tl.float32)
    if GATE == 2:
        p = tl.cast(t + i, tl.int64)[:, None] * gt + ck[None, :]
        gate = tl.load(g + p, mask=(i < left)[:, None] & (ck < K)[None, :], other=0.0).to(tl.float32)
        closed = gate < -110.0
        gate = tl.maximum(gate, -110.0)
        age = tl.cumsum(gate, 0)
        whole = tl.sum(gate, 0)
        gq, gk, push = _scores_back(da, qf, kf, gate, STEEP, C, DOT, PREC)
        from_s = from_s * tl.exp(age)
        to_s = to_s * tl.exp(rest_of(gate))
        gq += from_s
        gk += to_s
        push += qf * from_s - kf * to_s
        last = ends * tl.exp(whole) + tl.sum(kf * to_s, 0)
        here = tl.where(closed, 0.0, tl.cumsum(push, 0, reverse=True) + last[None, :])
        p = dg + (first * H + h) * K + tl.cast(t + i, tl.int64)[:, None] * (H * K) + ck[None, :]
        here = tl.where((i < left)[:, None], here, 0.0)
        tl.store(p, here, mask=(i < size - t)[:, None] & (ck < K)[None, :])
    else:
        da = tl.where(i[:, None] >= i[None, :], da, 0.0)
        if GATE == 1:
            raw = load_column(g, t, left, gt, C, tl.float32, 0.0)
            gate = tl.maximum(raw, -110.0).to(SUM)
            age = tl.cumsum(gate, 0)
            whole = tl.sum(gate, 0).to(tl.float32)
            fade = _fade(age, age)
            reach = tl.exp(age.to(tl.float32))[:, None]
            da = da * fade
            from_s = from_s * reach
            to_s = to_s * tl.exp(rest_of(gate).to(tl.float32))[:, None]
        gq = from_s + _dot(da, kx, DOT, PREC)
        gk = to_s + _dot(tl.trans(da), qx, DOT, PREC)
        if GATE == 1:
            if SUM == tl.float64:  # where types are exact
                push = _push(da * _dot(qx, tl.trans(kx), DOT, PREC)) + tl.sum(qf * from_s - kf * to_s, 1)
            else:
                push = tl.sum(qf * gq - kf * gk, 1)
            last = tl.sum(ends, 0) * tl.exp(whole) + tl.sum(tl.sum(kf * to_s, 1), 0)
        if DELTA:
            da_keys = tl.where(i[:, None] > i[None, :], da_keys, 0.0)
            if GATE == 1:
                da_keys = da_keys * fade
                from_w = from_w * reach
            writes = from_w + _dot(da_keys, kx, DOT, PREC)
            db -= tl.sum(writes * kf, 1)
            written = (da_keys * bx[:, None]).to(DOT)
            reads = _dot(tl.trans(written), kx, DOT, PREC)  # of the tokens before it
            if GATE == 1:  # d log_gate is a sum of differences, so both are made of the same rounded products
                writes = from_w * bx[:, None] + _dot(written, kx, DOT, PREC)
            else:
                writes = writes * bx[:, None]  # of the token that writes
            gk -= writes + reads
            if GATE == 1:
                if SUM == tl.float64:
                    push -= _push(written * _dot(kx, tl.trans(kx), DOT, PREC)) + tl.sum(kf * from_w, 1) * bx
                else:
                    push += tl.sum(kf * (reads - writes), 1)
            part = (TOKENS * block.to(tl.int64) + first) * H + h
            tl.store(dbeta + part + tl.cast(t + i, tl.int64) * H, tl.where(i < left, db, 0.0), mask=i < size - t)
        if GATE == 1:
            here = tl.where((i < left) & (raw >= -110.0), tl.cumsum(push, 0, reverse=True) + last, 0.0)
            part = (TOKENS * block.to(tl.int64) + first) * H + h
            tl.store(dg + part + tl.cast(t + i, tl.int64) * H, here, mask=i < size - t)
    if not EVEN:
        gq = tl.where((i < left)[:, None], gq, 0.0)
        gk = tl.where((i < left)[:, None], gk, 0.0)
    store_rows(dq, gq, t, size - t, H * K, k0, K, C, BK, EVEN)
    store_rows(dk, gk, t, size - t, H * K, k0, K, C, BK, EVEN)
