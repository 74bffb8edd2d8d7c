# ruff: noqa: SIM102, SIM300 (a compile-time test and a run-time one stay apart; DOT and ACC are parameters)
"""Linear attention on the GPU: feature map, sums, denominator and division in one pass over q, k and v.

A sequence is cut into segments of L tokens, so that sequences x heads x segments fill the chip; a program walks one
segment in chunks of C, with the state S = Σ φ(k)vᵀ and z = Σ φ(k) in registers. With more than one segment, `states`
first sums each segment and `scan` turns the sums into the state before each segment: this costs a second read of k, v.

    forward        o, and the denominators d if they will be needed    walks on from the state before the segment
    backward_q     dq, and what each segment adds to R and r           the same walk
    backward_kv    dk, dv                                              walks back, carrying R = dL/dS and r = dL/dz

R = Σ φ(q)doᵀ/d and r = Σ φ(q)p/d, with the pull p = -do·o of the denominator, are sums like S and z, and `scan` makes
those after each segment of them. Without the causal mask the same kernels run with the full sum in place of the running
one. A state that is too large for one program is cut into blocks of columns, and then dk and dv are two launches, since
dk needs all of V and dv all of K. States are transposed in registers: the operand that φ was applied to is then always
the second one of a dot, which is read from shared memory, and is not computed twice. Gates, which are causal, have a
backward pass of their own, in `gated_kernels_triton`.
Every dot product takes operands of the input's type and adds in float32. Gates enter as exponentials of sums of
log_gate between two positions of one chunk, so nothing overflows. The strides from token to token are compile-time
constants: addresses then take few registers, and twice as many programs share a multiprocessor.

Legend: C chunk, L segment, N sequences; a slot is a (sequence, segment) pair, a row the slot's place in the buffers;
QT, KT, VT, OT, GQ, GK, GV from a token to the next in q, k, v, do, dq, dk and dv.
"""

import triton
import triton.language as tl

from subquad.ops.linear.maps_triton import phi, phi_pull, phi_zero
from subquad.ops.linear.tiles_triton import head_of, load_column, load_gate, load_rows, locate, rest_of, store_rows


@triton.jit
def once(x, ONCE: tl.constexpr):
    """x of 16 bits, computed once: of small tiles Triton computes an operand again for each dot that reads it."""
    if ONCE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def fit(x, DOT: tl.constexpr):
    """x as a dot operand, and what it was divided by: sums outgrow float16, so a tile is scaled to its largest.

    By a power of two: features that fit keep all their digits.
    """
    if DOT == tl.float16:
        peak = tl.max(tl.max(tl.abs(x), 1), 0)
        power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^floor(log2(peak))
        scale = tl.where(peak > 1e-30, power * 0.000244140625, 1.0)
        y = (x * (1.0 / scale)).to(DOT)
    else:
        scale = 1.0
        y = x.to(DOT)
    return y, scale


@triton.jit
def _columns(x, ROWS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr):
    """A vector as 16 columns that sum up to it, for the matrix units, which take no fewer."""
    return fit((x * 0.0625)[:, None] + tl.zeros([ROWS, 16], ACC), DOT)


@triton.jit
def _rows(x, COLS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr):
    """A vector as 16 equal rows: columns of a times rows of b is their outer product."""
    return fit(x[None, :] + tl.zeros([16, COLS], ACC), DOT)


@triton.jit
def features(
    ptr, t, left, stride: tl.constexpr, d0, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """φ of rows t .. t + ROWS, and zeros where there is no token: what is loaded there is where φ vanishes."""
    x = load_rows(ptr, t, left, stride, d0, D, ROWS, COLS, EVEN, phi_zero(MAP))
    return phi(x.to(ACC), MAP)


@triton.jit
def pull_of(do, o, w, eps, SIGNED: tl.constexpr):
    """-do·o, by which the denominator d = 1/w pulls at the gradient; zero where d was held at ±eps."""
    p = -tl.sum(do.to(w.dtype) * o.to(w.dtype), 1)
    if SIGNED:
        p = tl.where(tl.abs(w) * eps < 0.999999, p, 0.0)
    return p


@triton.jit
def state_of(s, z, row, h, H, K: tl.constexpr, V: tl.constexpr, JOINED: tl.constexpr):
    """Where the state of a row and head is. JOINED: z follows s in one buffer [rows, H, K·V + K]."""
    at = row.to(tl.int64) * H + h
    if JOINED:
        s += at * (K * V + K)
        z = s + K * V
    else:
        s += at * (K * V)
        z += at * K
    return s, z


@triton.jit
def _decay_add(f0, x0, f1, x1):
    return f0 * f1, x0 * f1 + x1


@triton.jit
def states(
    k, v, g, rows, zrows, init, zinit, grows, cu, owner, lengths,
    T, L, NS, gb, gt, gh, kb, kh, vb, vh,
    KT: tl.constexpr, VT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Σ φ(k)vᵀ and Σ φ(k) of one segment, decayed to its end; causal: into the row of the segment after it."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, _, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if CAUSAL:
        if j == segments - 1:
            return
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    dk = k0 + tl.arange(0, BK)
    dv = tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        before, zbefore = state_of(init, zinit, n, h, H, K, V, False)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    total = 0.0
    start = j * L
    stop = tl.minimum(start + L, real)
    for t in range(start, stop, C):
        left = real - t
        f = features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
        vx = load_rows(v, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
        if GATED:
            gate = load_gate(g, t, left, gt, C, ACC)
            whole = tl.sum(gate, 0)
            f = f * tl.exp(rest_of(gate))[:, None]
            s = s * tl.exp(whole)
            z = z * tl.exp(whole)
            total += whole
        z += tl.sum(f, 0)
        s += tl.dot(tl.trans(vx), f.to(DOT), input_precision=PREC, out_dtype=ACC)

    row = n
    if SPLIT:
        row = slot
    if CAUSAL:
        row = slot + 1
    after, zafter = state_of(rows, zrows, row, h, H, K, V, SPLIT)
    tl.store(after + tile, tl.trans(s), mask=inside)
    tl.store(zafter + dk, z, mask=dk < K)
    if GATED:
        if k0 == 0:
            tl.store(grows + row.to(tl.int64) * H + h, total)


@triton.jit
def scan(
    rows, grows, init, zinit, final, zfinal, cu,
    L, NS, SLOTS, H, K: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    INIT: tl.constexpr, FINAL: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Running sum, in place, over the rows of each sequence, from `init` on; the last sum goes to `final`.

    Causal, a row holds what the segments before it (REVERSE: after it) add up to. The last sum has one segment more:
    what that one adds is in row SLOTS + n.
    """
    E: tl.constexpr = K * V + K
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    pid = tl.program_id(0)
    n = pid // (BLOCKS * H)
    h = (pid // BLOCKS) % H
    e = (pid % BLOCKS) * BE + tl.arange(0, BE)
    if PACKED:
        a = tl.load(cu + n).to(tl.int64)
        b = tl.load(cu + n + 1).to(tl.int64)
        low = (a // L).to(tl.int32) + n
        count = tl.maximum((b - a + L - 1) // L, 1).to(tl.int32)
    else:
        low = n * NS
        count = n * 0 + NS
    here = n.to(tl.int64) * H + h
    in_s = e < K * V
    in_z = (e >= K * V) & (e < E)
    carry = tl.zeros([BE], ACC)
    if INIT:
        carry += tl.load(init + here * (K * V) + e, mask=in_s, other=0.0)
        carry += tl.load(zinit + here * K + (e - K * V), mask=in_z, other=0.0)
    u = tl.arange(0, U)
    for i in range(0, count, U):
        if REVERSE:
            row = low + count - 1 - (i + u)
        else:
            row = low + i + u
        live = i + u < count
        if CAUSAL:
            fed = live & (i + u > 0)  # the first row has no segment before it
        else:
            fed = live
        at = row.to(tl.int64) * H + h
        p = rows + at[:, None] * E + e[None, :]
        x = tl.load(p, mask=fed[:, None] & (e < E)[None, :], other=0.0)
        if GATED:
            f = tl.exp(tl.load(grows + at, mask=fed, other=0.0))[:, None] + tl.zeros([U, BE], ACC)
            f, y = tl.associative_scan((f, x), 0, _decay_add)
            y += f * carry[None, :]
        else:
            y = tl.cumsum(x, 0) + carry[None, :]
        if CAUSAL:
            tl.store(p, y, mask=live[:, None] & (e < E)[None, :])
        carry = tl.sum(tl.where((u == U - 1)[:, None], y, 0.0), 0)
    if FINAL:
        if CAUSAL:
            at = here + tl.cast(SLOTS, tl.int64) * H
            if GATED:
                carry = carry * tl.exp(tl.load(grows + at))
            carry += tl.load(rows + at * E + e, mask=e < E, other=0.0)
        tl.store(final + here * (K * V) + e, carry, mask=in_s)
        tl.store(zfinal + here * K + (e - K * V), carry, mask=in_z)


@triton.jit
def forward(
    q, k, v, g, o, inv, init, zinit, fin, zfin, cu, owner, lengths,
    eps, T, L, NS, gb, gt, gh, qb, qh, kb, kh, vb, vh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    SIGNED: tl.constexpr, SAVE: tl.constexpr,
    ONCE: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one segment. SPLIT: the state before it is in row `slot` of `init`, else in row n (if INIT)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    o += (first * H + h) * V
    inv += first * H + h

    dk = tl.arange(0, BK)
    dv = v0 + tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        row = n
        if SPLIT:
            row = slot
        before, zbefore = state_of(init, zinit, row, h, H, K, V, SPLIT)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = fit(s, DOT)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    for t in range(start, stop, C):
        left = real - t
        qx = once(features(q, t, left, QT, 0, MAP, K, C, BK, EVEN, ACC).to(DOT), ONCE)
        if SIGNED:
            d = tl.sum(qx.to(ACC) * z[None, :], 1)  # terms cancel, so rounding z is not an option
        else:
            zx, zscale = _columns(z, BK, DOT, ACC)
            d = tl.sum(tl.dot(qx, zx, input_precision=PREC, out_dtype=ACC), 1) * zscale
        if CAUSAL:
            f = features(k, t, left, KT, 0, MAP, K, C, BK, EVEN, ACC)
            vx = load_rows(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
            kx = once(f.to(DOT), ONCE)
            if not GATED:
                z += tl.sum(f, 0)
            a = tl.dot(qx, tl.trans(kx), input_precision=PREC, out_dtype=ACC)
            a = tl.where(i[:, None] >= i[None, :], a, 0.0)
            sx, sscale = fit(s, DOT)
            num = tl.dot(qx, tl.trans(sx), input_precision=PREC, out_dtype=ACC) * sscale
            if GATED:
                gate = load_gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                a = a * tl.exp(tl.minimum(age[:, None] - age[None, :], 0.0))
                num = num * tl.exp(age)[:, None]
                d = d * tl.exp(age)
                f = f * tl.exp(rest_of(gate))[:, None]
                kx = f.to(DOT)
                s = s * tl.exp(whole)
                z = z * tl.exp(whole) + tl.sum(f, 0)
            ax, ascale = fit(a, DOT)
            num += tl.dot(ax, vx, input_precision=PREC, out_dtype=ACC) * ascale
            d += tl.sum(a, 1)
            s += tl.dot(tl.trans(vx), kx, input_precision=PREC, out_dtype=ACC)
        else:
            num = tl.dot(qx, tl.trans(sx), input_precision=PREC, out_dtype=ACC) * sscale
        if NORM:
            if SIGNED:
                d = tl.where(d < 0.0, -tl.maximum(-d, eps), tl.maximum(d, eps))
            else:
                d = d + eps
            if not EVEN:
                d = tl.where(i < left, d, 1.0)
            w = 1.0 / d
            num = num * w[:, None]
            if SAVE:
                if v0 == 0:
                    tl.store(inv + (tl.cast(t, tl.int64) + i) * H, w, mask=i < size - t)
        store_rows(o, num, t, size - t, H * V, v0, V, C, BV, EVEN)

    if CAUSAL:
        if j == segments - 1:
            after, zafter = state_of(fin, zfin, n, h, H, K, V, False)
            tl.store(after + tile, tl.trans(s), mask=inside)
            if v0 == 0:
                tl.store(zafter + dk, z, mask=dk < K)


@triton.jit
def backward_q(
    q, k, v, o, inv, do, pull, dq, init, zinit, start, zstart, sums, zsums, cu, owner, lengths,
    eps, T, L, NS, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, GQ: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    SIGNED: tl.constexpr, START: tl.constexpr,
    ONCE: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and the pull of one segment, and what it adds to R and r.

    Causal, those go to the row of the segment before it, and are needed only where sequences are cut.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    SUMS: tl.constexpr = SPLIT or not CAUSAL
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    do += head_of(n, h, first, ob, OT, oh, PACKED)
    o += (first * H + h) * V
    dq += first * GQ + h * K
    inv += first * H + h
    pull += first * H + h

    dk = k0 + tl.arange(0, BK)
    dv = tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        row = n
        if SPLIT and CAUSAL:
            row = slot
        before, zbefore = state_of(init, zinit, row, h, H, K, V, SPLIT and CAUSAL)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = fit(s, DOT)
    if SUMS:
        rs = tl.zeros([BV, BK], ACC)
        rz = tl.zeros([BK], ACC)
        if START:
            before, zbefore = state_of(start, zstart, n, h, H, K, V, False)
            rs += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
            rz += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    i = tl.arange(0, C)
    begin = j * L
    stop = tl.minimum(begin + L, size)
    if NORM:  # Triton loads ahead what a dot takes, and that is not o
        ox = load_rows(o, begin, real - begin, H * V, 0, V, C, BV, EVEN)
    for t in range(begin, stop, C):
        left = real - t
        dox = load_rows(do, t, left, OT, 0, V, C, BV, EVEN)
        if NORM:
            w = load_column(inv, t, left, H, C, ACC, 0.0)
            p = pull_of(dox, ox, w, eps, SIGNED)
            ahead = tl.minimum(t + C, stop - C) if EVEN else t + C
            ox = load_rows(o, ahead, real - ahead, H * V, 0, V, C, BV, EVEN)
            if k0 == 0:
                tl.store(pull + (tl.cast(t, tl.int64) + i) * H, p, mask=i < left)
        dox = dox.to(DOT)
        if CAUSAL:
            sx, sscale = fit(s, DOT)
        back = tl.dot(dox, sx, input_precision=PREC, out_dtype=ACC) * sscale
        if NORM and SIGNED:
            back += p[:, None] * z[None, :]
        elif NORM:
            zx, zscale = _rows(z, BK, DOT, ACC)
            px, pscale = _columns(p, C, DOT, ACC)
            back += tl.dot(px, zx, input_precision=PREC, out_dtype=ACC) * (pscale * zscale)
        if CAUSAL:
            f = features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
            vx = load_rows(v, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
            kx = once(f.to(DOT), ONCE)
            z += tl.sum(f, 0)
            da = tl.dot(dox, tl.trans(vx), input_precision=PREC, out_dtype=ACC)
            if NORM:
                da += p[:, None]
            da = tl.where(i[:, None] >= i[None, :], da, 0.0)
            dax, dascale = fit(da, DOT)
            back += tl.dot(dax, kx, input_precision=PREC, out_dtype=ACC) * dascale
            s += tl.dot(tl.trans(vx), kx, input_precision=PREC, out_dtype=ACC)
        f = features(q, t, left, QT, k0, MAP, K, C, BK, EVEN, ACC)
        if NORM:
            back = back * w[:, None]
        store_rows(dq, phi_pull(back, f, MAP), t, size - t, GQ, k0, K, C, BK, EVEN)
        if SUMS:
            if NORM:
                f = f * w[:, None]
                rz += tl.sum(f * p[:, None], 0)
            fx, scale = fit(f, DOT)
            rs += tl.dot(tl.trans(dox), fx, input_precision=PREC, out_dtype=ACC) * scale

    if SUMS:
        row = n
        wanted = 1
        if SPLIT:
            row = slot
        if CAUSAL:
            row = slot - 1
            wanted = j
        if wanted != 0:
            after, zafter = state_of(sums, zsums, row, h, H, K, V, SPLIT)
            tl.store(after + tile, tl.trans(rs), mask=inside)
            tl.store(zafter + dk, rz, mask=dk < K)


@triton.jit
def backward_kv(
    q, k, v, inv, do, pull, dk, dv, init, zinit, fin, zfin, cu, owner, lengths,
    T, L, NS, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, FINAL: tl.constexpr,
    ONCE: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk (DK) and dv (DV) of one segment, last chunk first, from R and r after it; those before to `fin`."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NK * NV * H)
    h = (pid // (NK * NV)) % H
    k0 = (pid // NV % NK) * BK
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    do += head_of(n, h, first, ob, OT, oh, PACKED)
    dk += first * GK + h * K
    dv += first * GV + h * V
    inv += first * H + h
    pull += first * H + h

    ck = k0 + tl.arange(0, BK)
    cv = v0 + tl.arange(0, BV)
    tile = ck[:, None] * V + cv[None, :]
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    rs = tl.zeros([BV, BK], ACC)
    rz = tl.zeros([BK], ACC)
    if INIT:
        row = n
        if SPLIT and CAUSAL:
            row = slot
        after, zafter = state_of(init, zinit, row, h, H, K, V, SPLIT and CAUSAL)
        rs += tl.trans(tl.load(after + tile, mask=inside, other=0.0))
        if DK:
            rz += tl.load(zafter + ck, mask=ck < K, other=0.0)
    if not CAUSAL:
        rx, rscale = fit(rs, DOT)
    start = j * L
    stop = tl.minimum(start + L, size)
    ones = tl.full([C, 16], 0.0625, DOT)
    i = tl.arange(0, C)
    chunks = (stop - start + C - 1) // C
    for c in range(chunks):
        t = start + (chunks - 1 - c) * C
        left = real - t
        zx, zscale = _rows(rz, BK, DOT, ACC)
        if CAUSAL:
            rx, rscale = fit(rs, DOT)
            dox = load_rows(do, t, left, OT, v0, V, C, BV, EVEN).to(DOT)
            f = features(q, t, left, QT, k0, MAP, K, C, BK, EVEN, ACC)
            if NORM:
                f = f * load_column(inv, t, left, H, C, ACC, 0.0)[:, None]
            fx, fscale = fit(f, DOT)
            fx = once(fx, ONCE)
            if NORM and DK:
                p = load_column(pull, t, left, H, C, ACC, 0.0)
                px, pscale = _rows(p, C, DOT, ACC)
                rz += tl.sum(f * p[:, None], 0)
            rs += tl.dot(tl.trans(dox), fx, input_precision=PREC, out_dtype=ACC) * fscale
        kx = once(features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC).to(DOT), ONCE)
        if DV:
            gv = tl.dot(kx, tl.trans(rx), input_precision=PREC, out_dtype=ACC) * rscale
            if CAUSAL:
                a = tl.dot(kx, tl.trans(fx), input_precision=PREC, out_dtype=ACC) * fscale
                a = tl.where(i[:, None] <= i[None, :], a, 0.0)  # [C keys, C queries]
                ax, ascale = fit(a, DOT)
                gv += tl.dot(ax, dox, input_precision=PREC, out_dtype=ACC) * ascale
            store_rows(dv, gv, t, size - t, GV, v0, V, C, BV, EVEN)
        if DK:
            vx = load_rows(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
            gk = tl.dot(vx, rx, input_precision=PREC, out_dtype=ACC) * rscale
            gk += tl.dot(ones, zx, input_precision=PREC, out_dtype=ACC) * zscale
            if CAUSAL:
                da = tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
                if NORM:
                    da += tl.dot(ones, px, input_precision=PREC, out_dtype=ACC) * pscale
                da = tl.where(i[:, None] <= i[None, :], da, 0.0)
                dax, dascale = fit(da, DOT)
                gk += tl.dot(dax, fx, input_precision=PREC, out_dtype=ACC) * (dascale * fscale)
            gk = phi_pull(gk, kx.to(ACC), MAP)
            if not EVEN:
                gk = tl.where((i < left)[:, None], gk, 0.0)
            store_rows(dk, gk, t, size - t, GK, k0, K, C, BK, EVEN)

    if FINAL and DK:
        if j == 0:
            earlier, zearlier = state_of(fin, zfin, n, h, H, K, V, False)
            tl.store(earlier + tile, tl.trans(rs), mask=inside)
            tl.store(zearlier + ck, rz, mask=ck < K)


@triton.jit
def step(
    q, k, v, g, beta, s, z, o, snew, znew,
    eps, H, qb, qh, kb, kh, vb, vh, gb, gh, bb, bh, sb, sh, zb, zh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    INPLACE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one head by any rule: S ← e^g S + φ(k)vᵀ or, with β, + βφ(k)(v - Sᵀφ(k))ᵀ; z likewise with v = 1.

    GATE: 0 none, 1 a number, 2 one for each channel. For what it is not needed, z stays as it is where DELTA or GATE 2.
    """
    pid = tl.program_id(0)
    b = (pid // H).to(tl.int64)
    h = (pid % H).to(tl.int64)
    dk = tl.arange(0, BK)
    some = dk < K
    qf = tl.where(some, phi(tl.load(q + b * qb + h * qh + dk, mask=some, other=0.0).to(ACC), MAP), 0.0)
    kf = tl.where(some, phi(tl.load(k + b * kb + h * kh + dk, mask=some, other=0.0).to(ACC), MAP), 0.0)
    zx = tl.load(z + b * zb + h * zh + dk, mask=some, other=0.0).to(ACC)
    if GATE == 1:
        fade = tl.exp(tl.load(g + b * gb + h * gh).to(ACC)) + tl.zeros([BK], ACC)
    elif GATE == 2:
        fade = tl.exp(tl.load(g + b * gb + h * gh + dk, mask=some, other=0.0).to(ACC))
    if DELTA:
        rate = tl.load(beta + b * bb + h * bh).to(ACC)
    if NORM or (GATE != 2 and not DELTA):
        if GATE != 0:
            zx = zx * fade
        if DELTA:
            zx += kf * rate * (1.0 - tl.sum(kf * zx, 0))
        else:
            zx += kf
    d = tl.sum(qf * zx, 0)
    if NORM:
        if SIGNED:
            d = tl.where(d < 0.0, -tl.maximum(-d, eps), tl.maximum(d, eps))
        else:
            d = d + eps
    s += b * sb + h * sh
    if INPLACE:
        snew += b * sb + h * sh
        znew += b * zb + h * zh
    else:
        snew += (b * H + h) * (K * V)
        znew += (b * H + h) * K
    tl.store(znew + dk, zx, mask=some)
    for v0 in range(0, V, BV):
        dv = v0 + tl.arange(0, BV)
        tile = dk[:, None] * V + dv[None, :]
        if K % BK == 0 and V % BV == 0:
            x = tl.load(s + tile).to(ACC)
        else:
            x = tl.load(s + tile, mask=some[:, None] & (dv < V)[None, :], other=0.0).to(ACC)
        vx = tl.load(v + b * vb + h * vh + dv, mask=dv < V, other=0.0).to(ACC)
        if GATE != 0:
            x = x * fade[:, None]
        if DELTA:
            vx = rate * (vx - tl.sum(kf[:, None] * x, 0))
        x += kf[:, None] * vx[None, :]
        if K % BK == 0 and V % BV == 0:
            tl.store(snew + tile, x)
        else:
            tl.store(snew + tile, x, mask=some[:, None] & (dv < V)[None, :])
        y = tl.sum(qf[:, None] * x, 0)
        if NORM:
            y = y / d
        if o.dtype.element_ty == tl.float16:
            y = tl.minimum(tl.maximum(y, -65504.0), 65504.0)
        tl.store(o + (b * H + h) * V + dv, y.to(o.dtype.element_ty), mask=dv < V)
