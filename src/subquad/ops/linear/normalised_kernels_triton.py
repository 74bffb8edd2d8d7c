"""Efficient attention on the GPU: o = ρ(q)·Σ e^k vᵀ / Σ e^k, where each channel has its own sums over positions.

A sequence is cut into chunks of C tokens. `walk_keys` and `walk_queries` go along it and write the sums before, or
after, each chunk; the others take all chunks at once.

    walk_keys       S = Σ e^{k-m} vᵀ and z = Σ e^{k-m} before each chunk, for the largest key m so far, or in all
    read            o
    back_q          dq, and h = ρ dρ, by which the normaliser of each channel pulls
    walk_queries    R = Σ (ρ/z) doᵀ and P = Σ h/z after each chunk, or in all
    back_k          dk and dv

Causal, the normaliser z_t of a channel grows within a chunk, by as much as its keys do. Queries are computed in units
of the largest key up to the last of them; where that grows by more than e^MOST within a chunk, they are taken in
several turns (`_turn`), so that no normaliser vanishes: any keys are exact, and keys as they usually are take one turn.
"""

import triton
import triton.language as tl

from subquad.ops.linear.tiles_triton import load_rows, store_rows

MOST = tl.constexpr(60.0)  # a sum of numbers below e^-MOST leaves room in float32
NOTHING = tl.constexpr(-1e30)  # the largest key before the first
PADDED = tl.constexpr(-1e38)  # below NOTHING: weight 0 even for a padded key that is the only one


@triton.jit
def _softmax(q, K: tl.constexpr, BK: tl.constexpr):
    if K != BK:
        q = tl.where((tl.arange(0, BK) < K)[None, :], q, float("-inf"))
    q = tl.exp(q - tl.max(q, 1)[:, None])
    return q / tl.sum(q, 1)[:, None]


@triton.jit
def _keys(k, t, left, stride: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
          ACC: tl.constexpr):  # fmt: skip
    """Keys of a chunk, [C, BK]."""
    x = load_rows(k, t, left, stride, 0, K, C, BK, EVEN).to(ACC)
    if not EVEN:
        x = tl.where((tl.arange(0, C) < left)[:, None], x, PADDED)
    return x


@triton.jit
def _turn(k, rho, a, m, z, C: tl.constexpr):
    """The queries from row a on that one unit suits: the row after them, their unit, keys, normalisers and queries."""
    i = tl.arange(0, C)
    base = tl.maximum(m, tl.sum(tl.where((i == a)[:, None], k, 0.0), 0))
    late = tl.max(k - base[None, :], 1) > MOST
    e = tl.min(tl.where((i > a) & late, i, C), 0)
    seen = tl.where((i < e)[:, None], k, PADDED)
    top = tl.maximum(m, tl.max(seen, 0))
    f = tl.exp(seen - top[None, :])
    total = tl.maximum((z * tl.exp(m - top))[None, :] + tl.cumsum(f, 0), 1e-30)  # below, there is no key
    y = tl.where(((i >= a) & (i < e))[:, None], rho / total, 0.0)
    return e, top, f, total, y


@triton.jit
def _block(rows, row, v0, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Where columns v0 .. v0 + BV of the sums in `row` are, [BV, BK], and which there are."""
    cv = v0 + tl.arange(0, BV)
    return rows + (row * V + cv[:, None]) * BK + tl.arange(0, BK)[None, :], (cv < V)[:, None]


@triton.jit
def _row(rows, row, BK: tl.constexpr, ACC: tl.constexpr):
    return tl.load(rows + row * BK + tl.arange(0, BK)).to(ACC)


@triton.jit
def walk_keys(
    k, v, rows, zrows, mrows, init, zinit, minit, fin, zfin, mfin, lengths,
    T, N, PER, SEGMENTS, kb, kh, vb, vh,
    KT: tl.constexpr, VT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr,
    INIT: tl.constexpr, FINAL: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Causal: the sums before each chunk. Otherwise those of PER chunks, in units of the largest keys in mrows."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    segment = pid // NV % SEGMENTS
    bh = (pid // NV // SEGMENTS).to(tl.int64)
    b = bh // H
    h = bh % H
    k += b * kb + h * kh
    v += b * vb + h * vh
    real = T
    if LENGTHS:
        real = tl.minimum(tl.load(lengths + b).to(tl.int32), T)
    ck = tl.arange(0, BK)
    cv = v0 + tl.arange(0, BV)
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    m = tl.full([BK], NOTHING, ACC)
    state = (bh * K + ck)[None, :] * V + cv[:, None]
    inside = (cv < V)[:, None] & (ck < K)[None, :]
    if not CAUSAL:
        m = _row(mrows, bh, BK, ACC)
    elif INIT:
        s += tl.load(init + state, mask=inside, other=0.0)
        z += tl.load(zinit + bh * K + ck, mask=ck < K, other=0.0)
        m = tl.load(minit + bh * K + ck, mask=ck < K, other=NOTHING).to(ACC)
    begin = segment * PER
    stop = tl.minimum(begin + PER, N)
    for n in range(begin, stop):
        t = n * C
        if CAUSAL:
            row = bh * N + n
            p, some = _block(rows, row, v0, V, BK, BV)
            tl.store(p, s.to(rows.dtype.element_ty), mask=some)
            if v0 == 0:
                tl.store(zrows + row * BK + ck, z)
                tl.store(mrows + row * BK + ck, m)
        kx = _keys(k, t, real - t, KT, K, C, BK, EVEN and not LENGTHS, ACC)
        vx = load_rows(v, t, real - t, VT, v0, V, C, BV, EVEN and not LENGTHS).to(DOT)
        if CAUSAL:
            top = tl.maximum(m, tl.max(kx, 0))
            fade = tl.exp(m - top)
            s = s * fade[None, :]
            z = z * fade
            m = top
        f = tl.exp(kx - m[None, :])
        z += tl.sum(f, 0)
        s += tl.dot(tl.trans(vx), f.to(DOT), input_precision=PREC, out_dtype=ACC)
    if not CAUSAL:
        row = bh * SEGMENTS + segment
        p, some = _block(rows, row, v0, V, BK, BV)
        tl.store(p, s, mask=some)
        if v0 == 0:
            tl.store(zrows + row * BK + ck, z)
    if FINAL:
        tl.store(fin + state, s, mask=inside)
        if v0 == 0:
            tl.store(zfin + bh * K + ck, z, mask=ck < K)
            tl.store(mfin + bh * K + ck, m, mask=ck < K)


@triton.jit
def read(
    q, k, v, rows, zrows, mrows, o, T, N, qb, qh, kb, kh, vb, vh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    t = (pid % N) * C
    bh = (pid // N).to(tl.int64)
    b = bh // H
    h = bh % H
    left = T - t
    i = tl.arange(0, C)
    rho = _softmax(load_rows(q + b * qb + h * qh, t, left, QT, 0, K, C, BK, EVEN).to(ACC), K, BK)
    o += (b * T * H + h) * V
    if CAUSAL:
        row = bh * N + t // C
        m = _row(mrows, row, BK, ACC)
        z = _row(zrows, row, BK, ACC)
        kx = _keys(k + b * kb + h * kh, t, left, KT, K, C, BK, EVEN, ACC)
        first = 0
        while first < C:
            last, top, f, _, y = _turn(kx, rho, first, m, z, C)
            y = y.to(DOT)
            fade = tl.exp(m - top)
            a = tl.dot(y, tl.trans(f.to(DOT)), input_precision=PREC, out_dtype=ACC)
            a = tl.where(i[:, None] >= i[None, :], a, 0.0).to(DOT)
            for v0 in range(0, V, BV):
                p, some = _block(rows, row, v0, V, BK, BV)
                s = (tl.load(p, mask=some, other=0.0).to(ACC) * fade[None, :]).to(DOT)
                vx = load_rows(v + b * vb + h * vh, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
                num = tl.dot(y, tl.trans(s), input_precision=PREC, out_dtype=ACC)
                num += tl.dot(a, vx, input_precision=PREC, out_dtype=ACC)
                cv = v0 + tl.arange(0, BV)
                to = o + (t + i).to(tl.int64)[:, None] * (H * V) + cv[None, :]
                mine = (i >= first) & (i < last) & (i < left)
                tl.store(to, num.to(o.dtype.element_ty), mask=mine[:, None] & (cv < V)[None, :])
            first = last
    else:
        y = (rho / tl.maximum(_row(zrows, bh, BK, ACC), 1e-30)[None, :]).to(DOT)
        for v0 in range(0, V, BV):
            p, some = _block(rows, bh, v0, V, BK, BV)
            s = tl.load(p, mask=some, other=0.0).to(DOT)
            num = tl.dot(y, tl.trans(s), input_precision=PREC, out_dtype=ACC)
            store_rows(o, num, t, left, H * V, v0, V, C, BV, EVEN)


@triton.jit
def back_q(
    q, k, v, do, rows, zrows, mrows, dq, pulls, T, N, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq; causal also h, to `pulls`."""
    pid = tl.program_id(0)
    t = (pid % N) * C
    bh = (pid // N).to(tl.int64)
    b = bh // H
    h = bh % H
    left = T - t
    i = tl.arange(0, C)
    ck = tl.arange(0, BK)
    rho = _softmax(load_rows(q + b * qb + h * qh, t, left, QT, 0, K, C, BK, EVEN).to(ACC), K, BK)
    do += b * ob + h * oh
    v += b * vb + h * vh
    at = (b * T * H + h) * K + (t + i).to(tl.int64)[:, None] * (H * K) + ck[None, :]
    row = bh
    if CAUSAL:
        row = bh * N + t // C
        m = _row(mrows, row, BK, ACC)
        kx = _keys(k + b * kb + h * kh, t, left, KT, K, C, BK, EVEN, ACC)
    z = _row(zrows, row, BK, ACC)
    g = tl.zeros([C, BK], ACC)
    if CAUSAL:
        da = tl.zeros([C, C], ACC)
    for v0 in range(0, V, BV):
        p, some = _block(rows, row, v0, V, BK, BV)
        dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN).to(DOT)
        s = tl.load(p, mask=some, other=0.0).to(DOT)
        g += tl.dot(dox, s, input_precision=PREC, out_dtype=ACC)
        if CAUSAL:
            vx = load_rows(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
            da += tl.dot(dox, tl.trans(vx), input_precision=PREC, out_dtype=ACC)
    if CAUSAL:
        da = tl.where(i[:, None] >= i[None, :], da, 0.0).to(DOT)
        first = 0
        while first < C:
            last, top, f, _, y = _turn(kx, rho, first, m, z, C)
            each = g * tl.exp(m - top)[None, :]
            each += tl.dot(da, f.to(DOT), input_precision=PREC, out_dtype=ACC)
            each = y * each
            mine = ((i >= first) & (i < last) & (i < left))[:, None] & (ck < K)[None, :]
            tl.store(pulls + at, each.to(pulls.dtype.element_ty), mask=mine)
            each -= rho * tl.sum(each, 1)[:, None]
            tl.store(dq + at, each.to(dq.dtype.element_ty), mask=mine)
            first = last
    else:
        g = rho * (g / tl.maximum(z, 1e-30)[None, :])
        g -= rho * tl.sum(g, 1)[:, None]
        tl.store(dq + at, g.to(dq.dtype.element_ty), mask=(i < left)[:, None] & (ck < K)[None, :])


@triton.jit
def walk_queries(
    q, k, do, pulls, rows, zrows, mrows, back, zback,
    T, N, PER, SEGMENTS, qb, qh, kb, kh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """R and P after each chunk, last chunk first, to `back` and `zback`; not causal: R of PER chunks."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    segment = pid // NV % SEGMENTS
    bh = (pid // NV // SEGMENTS).to(tl.int64)
    b = bh // H
    h = bh % H
    q += b * qb + h * qh
    k += b * kb + h * kh
    do += b * ob + h * oh
    i = tl.arange(0, C)
    ck = tl.arange(0, BK)
    r = tl.zeros([BV, BK], ACC)
    rz = tl.zeros([BK], ACC)
    if not CAUSAL:
        z = _row(zrows, bh, BK, ACC)
    begin = segment * PER
    stop = tl.minimum(begin + PER, N)
    for c in range(begin, stop):
        n = stop - 1 - (c - begin)
        t = n * C
        left = T - t
        rho = _softmax(load_rows(q, t, left, QT, 0, K, C, BK, EVEN).to(ACC), K, BK)
        dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN).to(DOT)
        if CAUSAL:
            row = bh * N + n
            p, some = _block(back, row, v0, V, BK, BV)
            tl.store(p, r.to(back.dtype.element_ty), mask=some)
            if v0 == 0:
                tl.store(zback + row * BK + ck, rz)
            m = _row(mrows, row, BK, ACC)
            z = _row(zrows, row, BK, ACC)
            kx = _keys(k, t, left, KT, K, C, BK, EVEN, ACC)
            at = (b * T * H + h) * K + (t + i).to(tl.int64)[:, None] * (H * K) + ck[None, :]
            pull = tl.load(pulls + at, mask=(i < left)[:, None] & (ck < K)[None, :], other=0.0).to(ACC)
            fade = tl.exp(m - tl.maximum(m, tl.max(kx, 0)))
            r = r * fade[None, :]
            rz = rz * fade
            first = 0
            while first < C:
                last, top, _, total, y = _turn(kx, rho, first, m, z, C)
                fade = tl.exp(m - top)
                r += tl.dot(tl.trans(dox), (y * fade[None, :]).to(DOT), input_precision=PREC, out_dtype=ACC)
                mine = ((i >= first) & (i < last))[:, None]
                rz += tl.sum(tl.where(mine, pull / total, 0.0) * fade[None, :], 0)
                first = last
        else:
            y = rho / tl.maximum(z, 1e-30)[None, :]
            r += tl.dot(tl.trans(dox), y.to(DOT), input_precision=PREC, out_dtype=ACC)
    if not CAUSAL:
        p, some = _block(back, bh * SEGMENTS + segment, v0, V, BK, BV)
        tl.store(p, r, mask=some)


@triton.jit
def back_k(
    q, k, v, do, pulls, zrows, mrows, back, zback, dk, dv, lengths, T, N, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and dv. Causal, dk is where `pulls` is: a program reads its rows of it before it writes them."""
    pid = tl.program_id(0)
    t = (pid % N) * C
    bh = (pid // N).to(tl.int64)
    b = bh // H
    h = bh % H
    left = T - t
    real = left
    if LENGTHS:
        real = tl.minimum(tl.load(lengths + b).to(tl.int32), T) - t
    i = tl.arange(0, C)
    ck = tl.arange(0, BK)
    v += b * vb + h * vh
    do += b * ob + h * oh
    kx = _keys(k + b * kb + h * kh, t, real, KT, K, C, BK, EVEN and not LENGTHS, ACC)
    at = (b * T * H + h) * K + (t + i).to(tl.int64)[:, None] * (H * K) + ck[None, :]
    inside = (i < left)[:, None] & (ck < K)[None, :]
    row = bh
    if CAUSAL:
        row = bh * N + t // C
    m = _row(mrows, row, BK, ACC)
    if CAUSAL:
        z = _row(zrows, row, BK, ACC)
        rho = _softmax(load_rows(q + b * qb + h * qh, t, left, QT, 0, K, C, BK, EVEN).to(ACC), K, BK)
        pull = tl.load(pulls + at, mask=inside, other=0.0).to(ACC)
        end = tl.maximum(m, tl.max(kx, 0))
    else:
        end = m
    own = tl.exp(kx - end[None, :])
    outer = own.to(DOT)
    g = tl.zeros([C, BK], ACC) - _row(zback, row, BK, ACC)[None, :]
    inner = tl.zeros([C, BK], ACC)
    for v0 in range(0, V, BV):
        p, some = _block(back, row, v0, V, BK, BV)
        r = tl.load(p, mask=some, other=0.0).to(DOT)
        vx = load_rows(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
        g += tl.dot(vx, r, input_precision=PREC, out_dtype=ACC)
        gv = tl.dot(outer, tl.trans(r), input_precision=PREC, out_dtype=ACC)
        if CAUSAL:
            dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN).to(DOT)
            da = tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
            da = tl.where(i[:, None] <= i[None, :], da, 0.0).to(DOT)  # [C keys, C queries]
            first = 0
            while first < C:
                last, _, f, total, y = _turn(kx, rho, first, m, z, C)
                y = y.to(DOT)
                a = tl.dot(f.to(DOT), tl.trans(y), input_precision=PREC, out_dtype=ACC)
                a = tl.where(i[:, None] <= i[None, :], a, 0.0).to(DOT)
                gv += tl.dot(a, dox, input_precision=PREC, out_dtype=ACC)
                part = tl.dot(da, y, input_precision=PREC, out_dtype=ACC)
                if v0 == 0:
                    mine = ((i >= first) & (i < last))[:, None]
                    part -= tl.cumsum(tl.where(mine, pull / total, 0.0), 0, reverse=True)
                inner += f * part
                first = last
        store_rows(dv + (b * T * H + h) * V, gv, t, left, H * V, v0, V, C, BV, EVEN)
    tl.store(dk + at, (own * g + inner).to(dk.dtype.element_ty), mask=inside)


@triton.jit
def step(
    q, k, v, s, z, most, o, qb, qh, kb, kh, vb, vh,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one head: o, and the sums s and z and the largest keys after it, in place."""
    bh = tl.program_id(0)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    bh = bh.to(tl.int64)
    ck = tl.arange(0, BK)
    real = ck < K
    qx = tl.load(q + b * qb + h * qh + ck, mask=real, other=float("-inf")).to(ACC)
    kx = tl.load(k + b * kb + h * kh + ck, mask=real, other=0.0).to(ACC)
    rho = tl.exp(qx - tl.max(qx, 0))
    rho = rho / tl.sum(rho, 0)
    before = tl.load(most + bh * K + ck, mask=real, other=0.0).to(ACC)
    after = tl.maximum(before, kx)
    fade = tl.exp(before - after)
    gain = tl.exp(kx - after)
    zx = tl.load(z + bh * K + ck, mask=real, other=0.0).to(ACC) * fade + gain
    tl.store(most + bh * K + ck, after, mask=real)
    tl.store(z + bh * K + ck, zx, mask=real)
    rho = rho / zx
    for v0 in range(0, V, BV):
        cv = v0 + tl.arange(0, BV)
        vx = tl.load(v + b * vb + h * vh + cv, mask=cv < V, other=0.0).to(ACC)
        p = s + (bh * K + ck)[:, None] * V + cv[None, :]
        inside = real[:, None] & (cv < V)[None, :]
        x = tl.load(p, mask=inside, other=0.0).to(ACC) * fade[:, None] + gain[:, None] * vx[None, :]
        tl.store(p, x, mask=inside)
        tl.store(o + bh * V + cv, tl.sum(rho[:, None] * x, 0).to(o.dtype.element_ty), mask=cv < V)
