"""Linear attention on random features that are never in memory: every kernel makes them from q, k and the directions.

A sequence is cut into chunks of C tokens. `walk` goes along a sequence for each block of F features, and writes the
sums before each chunk, which are the only thing of size features x values; all other kernels take many chunks at once
and loop over the blocks of features. Causal, only PER chunks are taken at a time, so that the sums of few chunks exist.

    peaks    the largest score of each token, its feature, and |x|²          positive features only
    walk     S = Σ φ(k)vᵀ and z = Σ φ(k) before each chunk, or in all; backwards R = Σ φ(q)doᵀ/d and r = Σ φ(q)p/d
    read     o and one over each denominator d
    back_q   dq and the pull p = -do·o of the denominators, from S and z
    back_k   dk and dv, from R and r

MODE says what φ is of a score s = ω·x:

    "exp"      exp(s·scale - top) + eps, with the token's largest scaled score `top`
    "relu"     max(s·scale, 0) + eps
    "fourier"  sin and cos of s·scale, over √M; with UNIT of the directions σ∘ω and x/|x|

GATED: a pair of tokens has one more factor exp(kappa[s] - reach[t]), where reach[t] is at least every kappa[s] so far.
This is how keys with large exponents, or padding, are weighed: no number grows, and nothing looks ahead.

Legend: C chunk, N chunks, FIRST the first of PER chunks, F features of a block, NB blocks, M directions, PARTS features
of a direction.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from subquad.ops.linear.tiles_triton import load_column, load_rows, store_rows

SHORT = tl.constexpr(1e-6)  # as in random_features.py
SIZES = ("T", "N", "FIRST", "PER", "SEGMENTS")  # of sequences: no code is made for some of them


@triton.jit
def _directions(w, h, f0, M: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BK: tl.constexpr):
    """Directions f0 .. f0 + F of a head, [F, BK]."""
    f = f0 + tl.arange(0, F)
    c = tl.arange(0, BK)
    p = w + (h * M + f)[:, None] * K + c[None, :]
    if M % F == 0 and K == BK:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=(f < M)[:, None] & (c < K)[None, :], other=0.0)
    return x


@triton.jit
def _project(x, w, sigma, UNIT: tl.constexpr, PLAIN: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr,
             PREC: tl.constexpr):  # fmt: skip
    """ω·x, [C, F]. PLAIN: the directions have the type of x, others are taken in two parts."""
    if UNIT:
        w = w.to(ACC) * sigma[None, :]
    high = w.to(DOT)
    s = tl.dot(x, tl.trans(high), input_precision=PREC, out_dtype=ACC)
    if not PLAIN:
        low = (w.to(ACC) - high.to(ACC)).to(DOT)
        s += tl.dot(x, tl.trans(low), input_precision=PREC, out_dtype=ACC)
    return s


@triton.jit
def _sine(s, shift: tl.constexpr, FAST: tl.constexpr):
    """sin(s), or cos(s) with shift; FAST: to some 2^-20."""
    if FAST:
        turns = s * 0.15915494309189535
        if shift:
            turns += 0.25
        turns -= libdevice.rint(turns)
        y = libdevice.fast_sinf(turns * 6.283185307179586)
    elif shift:
        y = tl.cos(s)
    else:
        y = tl.sin(s)
    return y


@triton.jit
def _phi(s, top, by, eps, root, f0, PART: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, F: tl.constexpr,
         FAST: tl.constexpr):  # fmt: skip
    """Features [C, F] of scores s, which `by` scales; zero beyond the last direction."""
    if MODE == "exp":
        f = tl.exp(s * by - top[:, None]) + eps
    elif MODE == "relu":
        f = tl.maximum(s * by, 0.0) + eps
    else:
        f = _sine(s * by, PART == 1, FAST) * root
    if M % F != 0:
        f = tl.where((f0 + tl.arange(0, F) < M)[None, :], f, 0.0)
    return f


@triton.jit
def _slope(s, f, by, eps, root, PART: tl.constexpr, MODE: tl.constexpr, FAST: tl.constexpr):
    """dφ/ds from s and f = φ(s)."""
    if MODE == "exp":
        d = (f - eps) * by
    elif MODE == "relu":
        d = tl.where(s * by > 0.0, by, 0.0)
    elif PART == 0:
        d = _sine(s * by, True, FAST) * root * by
    else:
        d = -_sine(s * by, False, FAST) * root * by
    return d


@triton.jit
def _scale(x, scale, UNIT: tl.constexpr, ACC: tl.constexpr):
    """What scores are multiplied by: one over |x|, or the same for all tokens."""
    if UNIT:
        x = x.to(ACC)
        norm = tl.sqrt(tl.sum(x * x, 1))
        by = (1.0 / tl.maximum(norm, SHORT))[:, None]
    else:
        by = scale
    return by


@triton.jit
def _sigma(sigma, h, K: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr):
    c = tl.arange(0, BK)
    y = tl.zeros([BK], ACC)
    if UNIT:
        y += tl.load(sigma + h * K + c, mask=c < K, other=0.0).to(ACC)
    return y


@triton.jit
def _reached(reach, start, b, h, H, t, ACC: tl.constexpr):
    """The unit of the sums before token t."""
    if t > 0:
        m = tl.load(reach + (tl.cast(t, tl.int64) - 1) * H).to(ACC)
    else:
        m = tl.load(start + b * H + h).to(ACC)
    return m


@triton.jit
def _pull_back(
    g, x, by, along, flat, arg, w, dsigma, sigma, scale, eps, h, part, left,
    MODE: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of x from g, that of its scores times the directions.

    along: Σ φ dφ, the gradient of the logarithm of a key's factor exp(-|x|²/2); that of a query cancels.
    flat: Σ dφ, by which eps times the largest feature moves. part: where in dσ the sum of this chunk goes.
    """
    c = tl.arange(0, BK)
    x = x.to(ACC)
    if MODE == "exp":
        i = tl.arange(0, C)
        best = tl.load(arg, mask=i < left, other=0)
        p = w + (h * M + best)[:, None] * K + c[None, :]
        top = tl.load(p, mask=(i < left)[:, None] & (c < K)[None, :], other=0.0)
        g += (flat * eps * scale)[:, None] * top.to(ACC)
        if KEYS:
            g -= x * (along * scale * scale)[:, None]
    if UNIT:
        tl.store(dsigma + part.to(tl.int64) * K + c, tl.sum(x * g, 0), mask=c < K)
        g = g * sigma[None, :]
        unit = x * by
        near = by < (0.999 / SHORT)  # a shorter vector was not divided by its length
        g -= tl.where(near, unit * tl.sum(unit * g, 1)[:, None], 0.0)
    return g


@triton.jit(do_not_specialize=SIZES)
def peaks(
    x, w, top, arg, half, scale, T, N, xb, xh,
    XT: tl.constexpr, K: tl.constexpr, M: tl.constexpr, H: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, PLAIN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Of each token the largest scaled score, the number of its direction, and |scale·x|²/2."""
    pid = tl.program_id(0)
    t = (pid % N) * C
    b = (pid // N // H).to(tl.int64)
    h = pid // N % H
    left = T - t
    xx = load_rows(x + b * xb + h.to(tl.int64) * xh, t, left, XT, 0, K, C, BK, EVEN)
    xa = xx.to(ACC)
    xx = xx.to(DOT)
    i = tl.arange(0, C)
    best = tl.full([C], float("-inf"), ACC)
    where = tl.zeros([C], tl.int32)
    for f0 in range(0, M, F):
        s = _project(xx, _directions(w, h, f0, M, K, F, BK), 0, False, PLAIN, DOT, ACC, PREC) * scale
        if M % F != 0:
            s = tl.where((f0 + tl.arange(0, F) < M)[None, :], s, float("-inf"))
        here, at = tl.max(s, 1, return_indices=True)
        where = tl.where(here > best, f0 + at, where)
        best = tl.maximum(here, best)
    at = (b * T + t) * H + h
    tl.store(top + at + i * H, best, mask=i < left)
    tl.store(arg + at + i * H, where, mask=i < left)
    tl.store(half + at + i * H, tl.sum(xa * xa, 1) * (scale * scale * 0.5), mask=i < left)


@triton.jit(do_not_specialize=SIZES)
def walk(
    x, y, w, sigma, top, kappa, reach, start, inv, pull, rows, zrows, init, zinit, carry, zcarry, fin, zfin,
    scale, eps, root, T, N, FIRST, PER, SEGMENTS, xb, xh, yb, yh,
    XT: tl.constexpr, YT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, F: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr, PLAIN: tl.constexpr, GATED: tl.constexpr,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr,
    FAST: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sums of features times values before each of PER chunks (causal), or over a segment of PER chunks.

    INIT: 0 from nothing, 1 from a state, 2 from `carry`, which has the sums after the chunks before.
    KEYS: of keys, forwards. Otherwise of queries, backwards: the values are do, and z adds up p, both over d.
    Sums are in units of exp(reach) of the token before the chunk, which a later unit rescales.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    ALL: tl.constexpr = PARTS * NB * F
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    block = pid // NV % (PARTS * NB)
    segment = pid // (NV * PARTS * NB) % SEGMENTS
    bh = pid // (NV * PARTS * NB) // SEGMENTS
    b = (bh // H).to(tl.int64)
    h = bh % H
    part = block // NB
    f0 = (block % NB) * F
    x += b * xb + h.to(tl.int64) * xh
    y += b * yb + h.to(tl.int64) * yh
    at = b * T * H + h
    top += at
    kappa += at
    reach += at
    inv += at
    pull += at
    tile = _directions(w, h, f0, M, K, F, BK)
    sig = _sigma(sigma, h, K, BK, UNIT, ACC)
    cf = block * F + tl.arange(0, F)
    cv = v0 + tl.arange(0, BV)
    s = tl.zeros([BV, F], ACC)
    z = tl.zeros([F], ACC)
    real = f0 + tl.arange(0, F) < M
    at_f = part * M + f0 + tl.arange(0, F)
    state = (bh.to(tl.int64) * PARTS * M + at_f)[None, :] * V + cv[:, None]
    inside = (cv < V)[:, None] & real[None, :]
    carried = (bh.to(tl.int64) * V + cv[:, None]) * ALL + cf[None, :]
    if INIT == 1:
        s += tl.load(init + state, mask=inside, other=0.0)
        z += tl.load(zinit + bh.to(tl.int64) * PARTS * M + at_f, mask=real, other=0.0)
    elif INIT == 2:
        s += tl.load(carry + carried, mask=(cv < V)[:, None], other=0.0)
        z += tl.load(zcarry + bh.to(tl.int64) * ALL + cf)
    i = tl.arange(0, C)
    begin = FIRST + segment * PER
    stop = tl.minimum(begin + PER, N)
    for c in range(begin, stop):
        n = c
        if not KEYS:
            n = stop - 1 - (c - begin)
        t = n * C
        left = T - t
        if CAUSAL:
            row = bh.to(tl.int64) * PER + n - begin
            p = rows + (row * V + cv[:, None]) * ALL + cf[None, :]
            tl.store(p, s.to(rows.dtype.element_ty), mask=(cv < V)[:, None])
            if v0 == 0:
                tl.store(zrows + row * ALL + cf, z)
        xx = load_rows(x, t, left, XT, 0, K, C, BK, EVEN)
        yx = load_rows(y, t, left, YT, v0, V, C, BV, EVEN).to(DOT)
        by = _scale(xx, scale, UNIT, ACC)
        most = tl.zeros([C], ACC)
        if MODE == "exp":
            most = load_column(top, t, left, H, C, ACC, 0.0)
        score = _project(xx.to(DOT), tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        if PARTS == 1:
            f = _phi(score, most, by, eps, root, f0, 0, MODE, M, F, FAST)
        else:
            if part == 0:
                f = _phi(score, most, by, eps, root, f0, 0, MODE, M, F, FAST)
            else:
                f = _phi(score, most, by, eps, root, f0, 1, MODE, M, F, FAST)
        weight = tl.where(i < left, 1.0, 0.0).to(ACC)
        if not KEYS:
            weight = load_column(inv, t, left, H, C, ACC, 0.0)
        if GATED:
            if CAUSAL:
                before = _reached(reach, start, b, h, H, t, ACC)
                after = tl.load(reach + (tl.cast(tl.minimum(t + C, T), tl.int64) - 1) * H).to(ACC)
                fade = tl.exp(tl.minimum(before - after, 0.0))
                s = s * fade
                z = z * fade
                if KEYS:
                    weight *= tl.exp(tl.minimum(load_column(kappa, t, left, H, C, ACC, 0.0) - after, 0.0))
                else:
                    weight *= tl.exp(tl.minimum(before - load_column(reach, t, left, H, C, ACC, 0.0), 0.0))
            elif KEYS:
                weight *= tl.exp(load_column(kappa, t, left, H, C, ACC, 0.0))
        f = f * weight[:, None]
        if KEYS:
            z += tl.sum(f, 0)
        else:
            z += tl.sum(f * load_column(pull, t, left, H, C, ACC, 0.0)[:, None], 0)
        s += tl.dot(tl.trans(yx), f.to(DOT), input_precision=PREC, out_dtype=ACC)

    if CAUSAL:
        tl.store(carry + carried, s, mask=(cv < V)[:, None])
        if v0 == 0:
            tl.store(zcarry + bh.to(tl.int64) * ALL + cf, z)
    else:
        row = bh.to(tl.int64) * SEGMENTS + segment
        tl.store(rows + (row * V + cv[:, None]) * ALL + cf[None, :], s, mask=(cv < V)[:, None])
        if v0 == 0:
            tl.store(zrows + row * ALL + cf, z)
    if FINAL:
        tl.store(fin + state, s, mask=inside)
        if v0 == 0:
            tl.store(zfin + bh.to(tl.int64) * PARTS * M + at_f, z, mask=real)


@triton.jit
def _sums(rows, zrows, row, f0, V: tl.constexpr, ALL: tl.constexpr, F: tl.constexpr, BV: tl.constexpr,
          DOT: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """A block of features of the sums in `row`: [BV, F] and [F]."""
    cf = f0 + tl.arange(0, F)
    cv = tl.arange(0, BV)
    p = rows + (row * V + cv[:, None]) * ALL + cf[None, :]
    if V == BV:
        s = tl.load(p)
    else:
        s = tl.load(p, mask=(cv < V)[:, None], other=0.0)
    return s.to(DOT), tl.load(zrows + row * ALL + cf).to(ACC)


@triton.jit(do_not_specialize=SIZES)
def read(
    q, k, v, w, sigma, top_q, top_k, kappa, reach, start, least, rows, zrows, o, inv,
    scale, eps, root, T, N, FIRST, PER, qb, qh, kb, kh, vb, vh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, F: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr, PLAIN: tl.constexpr,
    GATED: tl.constexpr, CAUSAL: tl.constexpr, SIGNED: tl.constexpr,
    FAST: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o and one over d of a chunk of queries."""
    ALL: tl.constexpr = PARTS * NB * F
    pid = tl.program_id(0)
    t = (FIRST + pid % PER) * C
    bh = pid // PER
    b = (bh // H).to(tl.int64)
    h = bh % H
    left = T - t
    at = (b * T + t) * H + h
    i = tl.arange(0, C)
    qx = load_rows(q + b * qb + h.to(tl.int64) * qh, t, left, QT, 0, K, C, BK, EVEN)
    by_q = _scale(qx, scale, UNIT, ACC)
    qx = qx.to(DOT)
    most_q = tl.zeros([C], ACC)
    most_k = tl.zeros([C], ACC)
    if MODE == "exp":
        most_q = load_column(top_q + at, 0, left, H, C, ACC, 0.0)
    row = bh.to(tl.int64)
    if CAUSAL:
        row = row * PER + pid % PER
        kx = load_rows(k + b * kb + h.to(tl.int64) * kh, t, left, KT, 0, K, C, BK, EVEN)
        by_k = _scale(kx, scale, UNIT, ACC)
        kx = kx.to(DOT)
        if MODE == "exp":
            most_k = load_column(top_k + at, 0, left, H, C, ACC, 0.0)
        a = tl.zeros([C, C], ACC)
    sig = _sigma(sigma, h, K, BK, UNIT, ACC)
    num = tl.zeros([C, BV], ACC)
    d = tl.zeros([C], ACC)
    for block in range(NB):
        f0 = block * F
        tile = _directions(w, h, f0, M, K, F, BK)
        sq = _project(qx, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        if CAUSAL:
            sk = _project(kx, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        for part in tl.static_range(PARTS):
            fq = _phi(sq, most_q, by_q, eps, root, f0, part, MODE, M, F, FAST)
            s, z = _sums(rows, zrows, row, part * NB * F + f0, V, ALL, F, BV, DOT, ACC)
            d += tl.sum(fq * z[None, :], 1)
            fx = fq.to(DOT)
            num += tl.dot(fx, tl.trans(s), input_precision=PREC, out_dtype=ACC)
            if CAUSAL:
                fk = _phi(sk, most_k, by_k, eps, root, f0, part, MODE, M, F, FAST)
                a += tl.dot(fx, tl.trans(fk.to(DOT)), input_precision=PREC, out_dtype=ACC)
    if CAUSAL:
        a = tl.where(i[:, None] >= i[None, :], a, 0.0)
        if GATED:
            unit = load_column(reach + at, 0, left, H, C, ACC, 0.0)
            own = load_column(kappa + at, 0, left, H, C, ACC, 0.0)
            fade = tl.exp(tl.minimum(_reached(reach + b * T * H + h, start, b, h, H, t, ACC) - unit, 0.0))
            num = num * fade[:, None]
            d = d * fade
            a = a * tl.exp(tl.minimum(own[None, :] - unit[:, None], 0.0))
        if not EVEN:
            a = tl.where((i < left)[None, :], a, 0.0)
        d += tl.sum(a, 1)
    low = load_column(least + at, 0, left, H, C, ACC, 1.0)
    if SIGNED:
        d = tl.where(d < 0.0, -tl.maximum(-d, low), tl.maximum(d, low))
    else:
        d = d + low
    if not EVEN:
        d = tl.where(i < left, d, 1.0)
    d = 1.0 / d
    tl.store(inv + at + i * H, d, mask=i < left)
    num = num * d[:, None]
    if CAUSAL:  # weights are divided before they are rounded: that of a key which has all of it is exactly 1
        vx = load_rows(v + b * vb + h.to(tl.int64) * vh, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
        num += tl.dot((a * d[:, None]).to(DOT), vx, input_precision=PREC, out_dtype=ACC)
    store_rows(o + (b * T * H + h) * V, num, t, left, H * V, 0, V, C, BV, EVEN)


@triton.jit(do_not_specialize=SIZES)
def back_q(
    q, k, v, do, o, w, sigma, top_q, arg_q, top_k, kappa, reach, start, least, inv, rows, zrows, pull, dq, dsigma,
    scale, eps, root, T, N, FIRST, PER, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, H: tl.constexpr, C: tl.constexpr, F: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr,
    PLAIN: tl.constexpr, GATED: tl.constexpr, CAUSAL: tl.constexpr, SIGNED: tl.constexpr,
    FAST: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and the pull of a chunk of queries; with UNIT also what they add to dσ."""
    ALL: tl.constexpr = PARTS * NB * F
    pid = tl.program_id(0)
    t = (FIRST + pid % PER) * C
    bh = pid // PER
    b = (bh // H).to(tl.int64)
    h = bh % H
    left = T - t
    at = (b * T + t) * H + h
    i = tl.arange(0, C)
    qx = load_rows(q + b * qb + h.to(tl.int64) * qh, t, left, QT, 0, K, C, BK, EVEN)
    dox = load_rows(do + b * ob + h.to(tl.int64) * oh, t, left, OT, 0, V, C, BV, EVEN)
    ox = load_rows(o + (b * T * H + h) * V, t, left, H * V, 0, V, C, BV, EVEN)
    by_q = _scale(qx, scale, UNIT, ACC)
    qd = qx.to(DOT)
    d = load_column(inv + at, 0, left, H, C, ACC, 0.0)
    p = -tl.sum(dox.to(ACC) * ox.to(ACC), 1)
    if SIGNED:
        p = tl.where(tl.abs(d) * load_column(least + at, 0, left, H, C, ACC, 1.0) < 0.999999, p, 0.0)
    tl.store(pull + at + i * H, p, mask=i < left)
    dox = dox.to(DOT)
    most_q = tl.zeros([C], ACC)
    most_k = tl.zeros([C], ACC)
    if MODE == "exp":
        most_q = load_column(top_q + at, 0, left, H, C, ACC, 0.0)
    row = bh.to(tl.int64)
    outer = d
    if CAUSAL:
        row = row * PER + pid % PER
        kx = load_rows(k + b * kb + h.to(tl.int64) * kh, t, left, KT, 0, K, C, BK, EVEN)
        by_k = _scale(kx, scale, UNIT, ACC)
        kx = kx.to(DOT)
        if MODE == "exp":
            most_k = load_column(top_k + at, 0, left, H, C, ACC, 0.0)
        vx = load_rows(v + b * vb + h.to(tl.int64) * vh, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
        da = tl.dot(dox, tl.trans(vx), input_precision=PREC, out_dtype=ACC)
        da = (da + p[:, None]) * d[:, None]
        if GATED:
            unit = load_column(reach + at, 0, left, H, C, ACC, 0.0)
            own = load_column(kappa + at, 0, left, H, C, ACC, 0.0)
            outer *= tl.exp(tl.minimum(_reached(reach + b * T * H + h, start, b, h, H, t, ACC) - unit, 0.0))
            da = da * tl.exp(tl.minimum(own[None, :] - unit[:, None], 0.0))
        da = tl.where(i[:, None] >= i[None, :], da, 0.0)
        if not EVEN:
            da = tl.where((i < left)[None, :], da, 0.0)
        dax = da.to(DOT)
    sig = _sigma(sigma, h, K, BK, UNIT, ACC)
    g = tl.zeros([C, BK], ACC)
    flat = tl.zeros([C], ACC)
    for block in range(NB):
        f0 = block * F
        tile = _directions(w, h, f0, M, K, F, BK)
        sq = _project(qd, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        ds = tl.zeros([C, F], ACC)
        if CAUSAL:
            sk = _project(kx, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        for part in tl.static_range(PARTS):
            fq = _phi(sq, most_q, by_q, eps, root, f0, part, MODE, M, F, FAST)
            s, z = _sums(rows, zrows, row, part * NB * F + f0, V, ALL, F, BV, DOT, ACC)
            df = tl.dot(dox, s, input_precision=PREC, out_dtype=ACC)
            df = (df + p[:, None] * z[None, :]) * outer[:, None]
            if CAUSAL:
                fk = _phi(sk, most_k, by_k, eps, root, f0, part, MODE, M, F, FAST).to(DOT)
                df += tl.dot(dax, fk, input_precision=PREC, out_dtype=ACC)
            if M % F != 0:
                df = tl.where((f0 + tl.arange(0, F) < M)[None, :], df, 0.0)
            flat += tl.sum(df, 1)
            ds += df * _slope(sq, fq, by_q, eps, root, part, MODE, FAST)
        g += tl.dot(ds.to(DOT), tile.to(DOT), input_precision=PREC, out_dtype=ACC)
    g = _pull_back(g, qx, by_q, flat, flat, arg_q + at + i * H, w, dsigma, sig, scale, eps, h, bh * N + t // C, left,
                   MODE, UNIT, False, K, M, C, BK, ACC)  # fmt: skip
    store_rows(dq + (b * T * H + h) * K, g, t, left, H * K, 0, K, C, BK, EVEN)


@triton.jit(do_not_specialize=SIZES)
def back_k(
    q, k, v, do, w, sigma, top_q, top_k, arg_k, kappa, reach, inv, pull, rows, zrows, dk, dv, dsigma,
    scale, eps, root, T, N, FIRST, PER, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, H: tl.constexpr, C: tl.constexpr, F: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr,
    PLAIN: tl.constexpr, GATED: tl.constexpr, CAUSAL: tl.constexpr,
    FAST: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and dv of a chunk of keys; with UNIT also what they add to dσ."""
    ALL: tl.constexpr = PARTS * NB * F
    pid = tl.program_id(0)
    t = (FIRST + pid % PER) * C
    bh = pid // PER
    b = (bh // H).to(tl.int64)
    h = bh % H
    left = T - t
    at = (b * T + t) * H + h
    i = tl.arange(0, C)
    kx = load_rows(k + b * kb + h.to(tl.int64) * kh, t, left, KT, 0, K, C, BK, EVEN)
    vx = load_rows(v + b * vb + h.to(tl.int64) * vh, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
    by_k = _scale(kx, scale, UNIT, ACC)
    kd = kx.to(DOT)
    most_q = tl.zeros([C], ACC)
    most_k = tl.zeros([C], ACC)
    if MODE == "exp":
        most_k = load_column(top_k + at, 0, left, H, C, ACC, 0.0)
    row = bh.to(tl.int64)
    outer = tl.where(i < left, 1.0, 0.0).to(ACC)
    if GATED:
        own = load_column(kappa + at, 0, left, H, C, ACC, 0.0)
    if CAUSAL:
        row = row * PER + pid % PER
        qx = load_rows(q + b * qb + h.to(tl.int64) * qh, t, left, QT, 0, K, C, BK, EVEN)
        dox = load_rows(do + b * ob + h.to(tl.int64) * oh, t, left, OT, 0, V, C, BV, EVEN).to(DOT)
        by_q = _scale(qx, scale, UNIT, ACC)
        qx = qx.to(DOT)
        if MODE == "exp":
            most_q = load_column(top_q + at, 0, left, H, C, ACC, 0.0)
        d = load_column(inv + at, 0, left, H, C, ACC, 0.0)
        p = load_column(pull + at, 0, left, H, C, ACC, 0.0)
        shares = (i[:, None] <= i[None, :]) & (i < left)[:, None]  # [C keys, C queries]
        fade = tl.where(shares, d[None, :], 0.0)
        if GATED:
            unit = load_column(reach + at, 0, left, H, C, ACC, 0.0)
            after = tl.load(reach + b * T * H + h + (tl.cast(tl.minimum(t + C, T), tl.int64) - 1) * H).to(ACC)
            outer *= tl.exp(tl.minimum(own - after, 0.0))
            fade = fade * tl.exp(tl.minimum(own[:, None] - unit[None, :], 0.0))
        da = tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
        dax = ((da + p[None, :]) * fade).to(DOT)
        a = tl.zeros([C, C], ACC)
    elif GATED:
        outer *= tl.exp(own)
    sig = _sigma(sigma, h, K, BK, UNIT, ACC)
    g = tl.zeros([C, BK], ACC)
    gv = tl.zeros([C, BV], ACC)
    flat = tl.zeros([C], ACC)
    along = tl.zeros([C], ACC)
    for block in range(NB):
        f0 = block * F
        tile = _directions(w, h, f0, M, K, F, BK)
        sk = _project(kd, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        ds = tl.zeros([C, F], ACC)
        if CAUSAL:
            sq = _project(qx, tile, sig, UNIT, PLAIN, DOT, ACC, PREC)
        for part in tl.static_range(PARTS):
            fk = _phi(sk, most_k, by_k, eps, root, f0, part, MODE, M, F, FAST)
            r, rz = _sums(rows, zrows, row, part * NB * F + f0, V, ALL, F, BV, DOT, ACC)
            fx = fk.to(DOT)
            gv += tl.dot(fx, tl.trans(r), input_precision=PREC, out_dtype=ACC)
            df = tl.dot(vx, r, input_precision=PREC, out_dtype=ACC)
            df = (df + rz[None, :]) * outer[:, None]
            if CAUSAL:
                fq = _phi(sq, most_q, by_q, eps, root, f0, part, MODE, M, F, FAST).to(DOT)
                df += tl.dot(dax, fq, input_precision=PREC, out_dtype=ACC)
                a += tl.dot(fx, tl.trans(fq), input_precision=PREC, out_dtype=ACC)
            if M % F != 0:
                df = tl.where((f0 + tl.arange(0, F) < M)[None, :], df, 0.0)
            flat += tl.sum(df, 1)
            along += tl.sum(df * fk, 1)
            ds += df * _slope(sk, fk, by_k, eps, root, part, MODE, FAST)
        g += tl.dot(ds.to(DOT), tile.to(DOT), input_precision=PREC, out_dtype=ACC)
    gv = gv * outer[:, None]
    if CAUSAL:
        gv += tl.dot((a * fade).to(DOT), dox, input_precision=PREC, out_dtype=ACC)
    g = _pull_back(g, kx, by_k, along, flat, arg_k + at + i * H, w, dsigma, sig, scale, eps, h, bh * N + t // C, left,
                   MODE, UNIT, True, K, M, C, BK, ACC)  # fmt: skip
    store_rows(dk + (b * T * H + h) * K, g, t, left, H * K, 0, K, C, BK, EVEN)
    store_rows(dv + (b * T * H + h) * V, gv, t, left, H * V, 0, V, C, BV, EVEN)


@triton.jit
def step(
    q, k, v, w, sigma, s, z, last, o,
    scale, eps, root, low, shift, qb, qh, kb, kh, vb, vh,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one head: o, and the sums s and z after it, in place.

    `last`: the logarithm of the sums' unit; with UNIT the number of tokens, with which the least denominator grows.
    """
    bh = tl.program_id(0)
    b = (bh // H).to(tl.int64)
    h = bh % H
    ck = tl.arange(0, BK)
    cv = tl.arange(0, BV)
    qx = tl.load(q + b * qb + h.to(tl.int64) * qh + ck, mask=ck < K, other=0.0).to(ACC)
    kx = tl.load(k + b * kb + h.to(tl.int64) * kh + ck, mask=ck < K, other=0.0).to(ACC)
    vx = tl.load(v + b * vb + h.to(tl.int64) * vh + cv, mask=cv < V, other=0.0).to(ACC)
    sig = tl.zeros([BK], ACC) + 1.0
    by_q = scale
    by_k = scale
    if UNIT:
        sig = _sigma(sigma, h, K, BK, UNIT, ACC)
        by_q = 1.0 / tl.maximum(tl.sqrt(tl.sum(qx * qx, 0)), SHORT)
        by_k = 1.0 / tl.maximum(tl.sqrt(tl.sum(kx * kx, 0)), SHORT)
    top_q = tl.full([1], float("-inf"), ACC)
    top_k = tl.full([1], float("-inf"), ACC)
    fade = 1.0
    weight = 1.0
    if MODE == "exp":
        for f0 in range(0, M, F):
            tile = _directions(w, h, f0, M, K, F, BK).to(ACC)
            real = f0 + tl.arange(0, F) < M
            top_q = tl.maximum(top_q, tl.max(tl.where(real, tl.sum(tile * qx[None, :], 1) * by_q, float("-inf")), 0))
            top_k = tl.maximum(top_k, tl.max(tl.where(real, tl.sum(tile * kx[None, :], 1) * by_k, float("-inf")), 0))
        own = tl.max(top_k, 0) - tl.sum(kx * kx, 0) * scale * scale * 0.5 - shift
        before = tl.load(last + bh).to(ACC)
        after = tl.maximum(before, own)
        fade = tl.exp(before - after)
        weight = tl.exp(own - after)
        tl.store(last + bh, after)
    num = tl.zeros([BV], ACC)
    d = tl.zeros([F], ACC)
    for f0 in range(0, M, F):
        tile = _directions(w, h, f0, M, K, F, BK).to(ACC) * sig[None, :]
        sq = tl.sum(tile * qx[None, :], 1)[None, :]
        sk = tl.sum(tile * kx[None, :], 1)[None, :]
        at = f0 + tl.arange(0, F)
        for part in tl.static_range(PARTS):
            fq = tl.sum(_phi(sq, top_q, by_q, eps, root, f0, part, MODE, M, F, False), 0)
            fk = tl.sum(_phi(sk, top_k, by_k, eps, root, f0, part, MODE, M, F, False), 0) * weight
            row = bh.to(tl.int64) * PARTS * M + part * M + at
            zx = tl.load(z + row, mask=at < M, other=0.0).to(ACC) * fade + fk
            tl.store(z + row, zx, mask=at < M)
            d += fq * zx
            tile_s = s + row[:, None] * V + cv[None, :]
            inside = (at < M)[:, None] & (cv < V)[None, :]
            x = tl.load(tile_s, mask=inside, other=0.0).to(ACC) * fade + fk[:, None] * vx[None, :]
            tl.store(tile_s, x, mask=inside)
            num += tl.sum(fq[:, None] * x, 0)
    den = tl.sum(d, 0)
    if UNIT:
        count = tl.load(last + bh).to(ACC) + 1.0
        tl.store(last + bh, count)
        low = low * tl.exp2(tl.floor(tl.log2(0.7 * count) * 0.5))
        den = tl.where(den < 0.0, -tl.maximum(-den, low), tl.maximum(den, low))
    else:
        den = den + low
    y = num / den
    if o.dtype.element_ty == tl.float16:
        y = tl.minimum(tl.maximum(y, -65504.0), 65504.0)
    tl.store(o + bh.to(tl.int64) * V + cv, y.to(o.dtype.element_ty), mask=cv < V)
