# ruff: noqa: SIM102, SIM300 (a compile-time test and a run-time one stay apart; DOT and ACC are parameters)
"""Linear attention on the GPU: feature map, sums, denominator and division in one pass over q, k and v.

A sequence is cut into segments of L tokens, so that sequences x heads x segments fill the chip; a program walks one
segment in chunks of C, with the state S = Σ φ(k)vᵀ and z = Σ φ(k) in registers. With more than one segment, `states`
first sums each segment and `scan` turns the sums into the state before each segment: this costs a second read of k, v.

    forward        o, and the denominators if they will be needed      walks on from the state before the segment
    backward_q     dq, and each segment's Σ φ(q)(do/den)ᵀ              the same walk
    backward_kv    dk, dv, d log_gate                                  walks back, carrying R = dL/dS and r = dL/dz

Without the causal mask the same kernels run with the full sum in place of the running one.
Every dot product takes operands of the input's type and adds in float32. Gates enter as exponentials of sums of
log_gate between two positions of one chunk, so nothing overflows.

Legend: C chunk, L segment, N sequences; a slot is a (sequence, segment) pair, a row the slot's place in the buffers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """The interpreter's loop bounds are arrays of one element, which int() refuses since numpy 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor


@triton.jit
def _phi(x, MAP: tl.constexpr):
    if MAP == "elu+1":
        y = tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == "relu":
        y = tl.maximum(x, 0.0)
    elif MAP == "exp":
        y = tl.exp(x)
    else:
        y = x
    return y


@triton.jit
def _phi_grad(d, x, MAP: tl.constexpr):
    if MAP == "elu+1":
        y = tl.where(x > 0.0, d, d * tl.exp(tl.minimum(x, 0.0)))
    elif MAP == "relu":
        y = tl.where(x > 0.0, d, 0.0)
    elif MAP == "exp":
        y = d * tl.exp(x)
    else:
        y = d
    return y


@triton.jit
def _fit(x, DOT: tl.constexpr):
    """x as a dot operand, and what it was divided by: sums outgrow float16, so a tile is scaled to its largest."""
    if DOT == tl.float16:
        peak = tl.max(tl.max(tl.abs(x), 1), 0)
        scale = tl.where(peak > 0.0, peak * 0.000244140625, 1.0)
        y = (x * (1.0 / scale)).to(DOT)
    else:
        scale = 1.0
        y = x.to(DOT)
    return y, scale


@triton.jit
def _mask(left, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    m = (tl.arange(0, ROWS) < left)[:, None]
    if D % COLS != 0:
        m = m & ((d0 + tl.arange(0, COLS)) < D)[None, :]
    return m


@triton.jit
def _offsets(stride, d0, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * stride + (d0 + tl.arange(0, COLS))[None, :]


@triton.jit
def _load(ptr, t, left, stride, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows t .. t + ROWS of a [T, D] array, zeros from `left` rows on."""
    ptr += tl.cast(t, tl.int64) * stride
    return tl.load(ptr + _offsets(stride, d0, ROWS, COLS), mask=_mask(left, d0, D, ROWS, COLS), other=0.0)


@triton.jit
def _store(ptr, x, t, left, stride, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    ptr += tl.cast(t, tl.int64) * stride
    mask = _mask(left, d0, D, ROWS, COLS)
    if ptr.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)  # large but finite: an infinity would turn gradients into NaN
    tl.store(ptr + _offsets(stride, d0, ROWS, COLS), x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _features(x, left, d0, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """φ of a loaded tile; φ(0) may be 1, so what was not there is put back to zero."""
    return tl.where(_mask(left, d0, D, ROWS, COLS), _phi(x, MAP), 0.0)


@triton.jit
def _column(ptr, t, left, stride, ROWS: tl.constexpr, ACC: tl.constexpr, other):
    r = tl.arange(0, ROWS)
    return tl.load(ptr + tl.cast(t, tl.int64) * stride + r * stride, mask=r < left, other=other).to(ACC)


@triton.jit
def _gate(ptr, t, left, stride, ROWS: tl.constexpr, ACC: tl.constexpr):
    """log_gate of a chunk. Below the floor its exponential is zero anyway; sums stay small enough to subtract."""
    g = _column(ptr, t, left, stride, ROWS, ACC, 0.0)
    if ACC == tl.float64:
        g = tl.maximum(g, -800.0)
    else:
        g = tl.maximum(g, -110.0)
    return g


@triton.jit
def _locate(slot, cu, owner, lengths, T, L, NS, PACKED: tl.constexpr, LENGTHS: tl.constexpr):
    """Slot -> sequence n, segment j, first token, tokens, tokens that are not padding, segments of n."""
    if PACKED:
        n = tl.load(owner + slot).to(tl.int32)
        first = tl.load(cu + n).to(tl.int64)
        size = (tl.load(cu + n + 1).to(tl.int64) - first).to(tl.int32)
        j = slot - (first // L).to(tl.int32) - n
        segments = tl.maximum((size + L - 1) // L, 1)
        real = size
    else:
        n = slot // NS
        j = slot % NS
        first = n.to(tl.int64) * T
        size = n * 0 + T
        segments = n * 0 + NS
        if LENGTHS:
            real = tl.minimum(tl.load(lengths + n).to(tl.int32), size)
        else:
            real = size
    return n, j, first, size, real, segments


@triton.jit
def _decay_add(f0, x0, f1, x1):
    return f0 * f1, x0 * f1 + x1


@triton.jit
def states(
    k, v, g, rows, zrows, grows, cu, owner, lengths,
    T, L, NS, H, kb, kt, kh, vb, vt, vh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Σ φ(k)vᵀ and Σ φ(k) of one segment, decayed to its end; causal: into the row of the segment after it."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    n, j, first, _, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if CAUSAL:
        if j >= segments - 1:
            return
        row = slot + 1
    else:
        if j >= segments:
            return
        row = slot
    if PACKED:
        k += first * kt
        v += first * vt
        g += first * gt
    else:
        k += n.to(tl.int64) * kb
        v += n.to(tl.int64) * vb
        g += n.to(tl.int64) * gb
    k += h.to(tl.int64) * kh
    v += h.to(tl.int64) * vh
    g += h.to(tl.int64) * gh

    s = tl.zeros([BK, BV], ACC)
    z = tl.zeros([BK], ACC)
    total = 0.0
    start = j * L
    stop = tl.minimum(start + L, real)
    for t in range(start, stop, C):
        left = real - t
        kf = _features(_load(k, t, left, kt, 0, K, C, BK).to(ACC), left, 0, MAP, K, C, BK)
        vx = _load(v, t, left, vt, v0, V, C, BV).to(DOT)
        if GATED:
            gate = _gate(g, t, left, gt, C, ACC)
            whole = tl.sum(gate, 0)
            kf = kf * tl.exp(tl.minimum(whole - tl.cumsum(gate, 0), 0.0))[:, None]
            fade = tl.exp(whole)
            s = s * fade
            z = z * fade
            total += whole
        kx = kf.to(DOT)
        s += tl.dot(tl.trans(kx), vx, input_precision=PREC, out_dtype=ACC)
        z += tl.sum(kx.to(ACC), 0)

    at = row.to(tl.int64) * H + h
    dk = tl.arange(0, BK)
    dv = v0 + tl.arange(0, BV)
    tl.store(rows + at * (K * V) + dk[:, None] * V + dv[None, :], s, mask=(dk < K)[:, None] & (dv < V)[None, :])
    if v0 == 0:
        tl.store(zrows + at * K + dk, z, mask=dk < K)
        if GATED:
            tl.store(grows + at, total)


@triton.jit
def scan(
    rows, grows, init, final, cu,
    L, NS, H, E, CAUSAL: tl.constexpr, REVERSE: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    INIT: tl.constexpr, FINAL: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Running sum, in place, over the rows of each sequence, from `init` on; the last sum goes to `final`."""
    pid = tl.program_id(0)
    blocks = (E + BE - 1) // BE
    n = pid // (blocks * H)
    h = (pid // blocks) % H
    e = (pid % blocks) * BE + tl.arange(0, BE)
    if PACKED:
        a = tl.load(cu + n).to(tl.int64)
        b = tl.load(cu + n + 1).to(tl.int64)
        low = (a // L).to(tl.int32) + n
        count = tl.maximum((b - a + L - 1) // L, 1).to(tl.int32)
    else:
        low = n * NS
        count = n * 0 + NS
    here = (n.to(tl.int64) * H + h) * E + e
    carry = tl.zeros([BE], ACC)
    if INIT:
        carry += tl.load(init + here, mask=e < E, other=0.0)
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
        tl.store(final + here, carry, mask=e < E)


@triton.jit
def forward(
    q, k, v, g, o, den, init, zinit, fin, zfin, cu, owner, lengths,
    eps, T, L, NS, H, qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, INIT: tl.constexpr, SPLIT: tl.constexpr, SAVE: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one segment. SPLIT: the state before it is in row `slot` of `init`, else in row n (if INIT)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NV * H)
    h = (pid // NV) % H
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if PACKED:
        q += first * qt
        k += first * kt
        v += first * vt
        g += first * gt
    else:
        q += n.to(tl.int64) * qb
        k += n.to(tl.int64) * kb
        v += n.to(tl.int64) * vb
        g += n.to(tl.int64) * gb
    q += h.to(tl.int64) * qh
    k += h.to(tl.int64) * kh
    v += h.to(tl.int64) * vh
    g += h.to(tl.int64) * gh
    o += (first * H + h) * V
    den += first * H + h

    dk = tl.arange(0, BK)
    dv = v0 + tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BK, BV], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        if SPLIT:
            at = slot.to(tl.int64) * H + h
        else:
            at = n.to(tl.int64) * H + h
        s += tl.load(init + at * (K * V) + tile, mask=inside, other=0.0)
        z += tl.load(zinit + at * K + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = _fit(s, DOT)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    for t in range(start, stop, C):
        left = real - t
        qx = _features(_load(q, t, left, qt, 0, K, C, BK).to(ACC), left, 0, MAP, K, C, BK).to(DOT)
        if CAUSAL:
            kf = _features(_load(k, t, left, kt, 0, K, C, BK).to(ACC), left, 0, MAP, K, C, BK)
            vx = _load(v, t, left, vt, v0, V, C, BV).to(DOT)
            kx = kf.to(DOT)
            a = tl.dot(qx, tl.trans(kx), input_precision=PREC, out_dtype=ACC)
            a = tl.where(i[:, None] >= i[None, :], a, 0.0)
            sx, sscale = _fit(s, DOT)
            num = tl.dot(qx, sx, input_precision=PREC, out_dtype=ACC) * sscale
            d = tl.sum(qx.to(ACC) * z[None, :], 1)
            if GATED:
                gate = _gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                a = a * tl.exp(tl.minimum(age[:, None] - age[None, :], 0.0))
                fade = tl.exp(age)
                num = num * fade[:, None]
                d = d * fade
                kx = (kf * tl.exp(tl.minimum(whole - age, 0.0))[:, None]).to(DOT)
                s = s * tl.exp(whole)
                z = z * tl.exp(whole)
            ax, ascale = _fit(a, DOT)
            num += tl.dot(ax, vx, input_precision=PREC, out_dtype=ACC) * ascale
            d += tl.sum(a, 1)
            s += tl.dot(tl.trans(kx), vx, input_precision=PREC, out_dtype=ACC)
            z += tl.sum(kx.to(ACC), 0)
        else:
            num = tl.dot(qx, sx, input_precision=PREC, out_dtype=ACC) * sscale
            d = tl.sum(qx.to(ACC) * z[None, :], 1)
        if NORM:
            if SIGNED:
                d = tl.where(d < 0.0, -tl.maximum(-d, eps), tl.maximum(d, eps))
            else:
                d = d + eps
            d = tl.where(i < left, d, 1.0)
            num = num * (1.0 / d)[:, None]
            if SAVE:
                if v0 == 0:
                    tl.store(den + (tl.cast(t, tl.int64) + i) * H, d, mask=i < size - t)
        _store(o, num, t, size - t, H * V, v0, V, C, BV)

    if CAUSAL:
        if j == segments - 1:
            at = n.to(tl.int64) * H + h
            tl.store(fin + at * (K * V) + tile, s, mask=inside)
            if v0 == 0:
                tl.store(zfin + at * K + dk, z, mask=dk < K)


@triton.jit
def backward_q(
    q, k, v, g, o, den, do, dq, delta, qdq, init, zinit, rows, zrows, grows, trail, ztrail, cu, owner, lengths,
    eps, T, L, NS, H, qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, ob, ot, oh, TOKENS,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, INIT: tl.constexpr, SPLIT: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq of one segment, delta = -do·o for `backward_kv`, and the segment's own part of R and r for the row before it.

    Gated: also the state before each chunk (trail) and q·dq through it (qdq), which d log_gate needs.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, size, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if PACKED:
        q += first * qt
        k += first * kt
        v += first * vt
        g += first * gt
        do += first * ot
        chunk = (first // C).to(tl.int32) + n
    else:
        q += n.to(tl.int64) * qb
        k += n.to(tl.int64) * kb
        v += n.to(tl.int64) * vb
        g += n.to(tl.int64) * gb
        do += n.to(tl.int64) * ob
        chunk = n * ((T + C - 1) // C)
    q += h.to(tl.int64) * qh
    k += h.to(tl.int64) * kh
    v += h.to(tl.int64) * vh
    g += h.to(tl.int64) * gh
    do += h.to(tl.int64) * oh
    o += (first * H + h) * V
    dq += (first * H + h) * K
    den += first * H + h
    delta += first * H + h
    qdq += (TOKENS * (k0 // BK).to(tl.int64) + first) * H + h

    dk = k0 + tl.arange(0, BK)
    dv = tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BK, BV], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        if SPLIT and CAUSAL:
            at = slot.to(tl.int64) * H + h
        else:
            at = n.to(tl.int64) * H + h
        s += tl.load(init + at * (K * V) + tile, mask=inside, other=0.0)
        z += tl.load(zinit + at * K + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = _fit(s, DOT)
    if SPLIT:
        rs = tl.zeros([BK, BV], ACC)
        rz = tl.zeros([BK], ACC)
        total = 0.0
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    for t in range(start, stop, C):
        left = real - t
        x = _load(q, t, left, qt, k0, K, C, BK).to(ACC)
        qf = _features(x, left, k0, MAP, K, C, BK)
        dox = _load(do, t, left, ot, 0, V, C, BV)
        if NORM:
            ox = _load(o, t, left, H * V, 0, V, C, BV)
            c = _column(den, t, left, H, C, ACC, 1.0)
            w = 1.0 / c
            e = -tl.sum(dox.to(ACC) * ox.to(ACC), 1)
            if SIGNED:
                e = tl.where(tl.abs(c) > eps, e, 0.0)
            if k0 == 0:
                tl.store(delta + (tl.cast(t, tl.int64) + i) * H, e, mask=i < size - t)
        dox = dox.to(DOT)
        if CAUSAL:
            sx, sscale = _fit(s, DOT)
        back = tl.dot(dox, tl.trans(sx), input_precision=PREC, out_dtype=ACC) * sscale
        if NORM:
            back += e[:, None] * z[None, :]
        wq = qf
        if GATED:
            gate = _gate(g, t, left, gt, C, ACC)
            age = tl.cumsum(gate, 0)
            whole = tl.sum(gate, 0)
            back = back * tl.exp(age)[:, None]
            here = (chunk + t // C).to(tl.int64) * H + h
            tl.store(trail + here * (K * V) + tile, s, mask=inside)
            tl.store(ztrail + here * K + dk, z, mask=dk < K)
            through = tl.sum(qf * back, 1)
            if NORM:
                through = through * w
            tl.store(qdq + (tl.cast(t, tl.int64) + i) * H, through, mask=i < size - t)
        if CAUSAL:
            kf = _features(_load(k, t, left, kt, k0, K, C, BK).to(ACC), left, k0, MAP, K, C, BK)
            vx = _load(v, t, left, vt, 0, V, C, BV).to(DOT)
            kx = kf.to(DOT)
            da = tl.dot(dox, tl.trans(vx), input_precision=PREC, out_dtype=ACC)
            if NORM:
                da += e[:, None]
            da = tl.where(i[:, None] >= i[None, :], da, 0.0)
            if GATED:
                da = da * tl.exp(tl.minimum(age[:, None] - age[None, :], 0.0))
            dax, dascale = _fit(da, DOT)
            back += tl.dot(dax, kx, input_precision=PREC, out_dtype=ACC) * dascale
            if GATED:
                kx = (kf * tl.exp(tl.minimum(whole - age, 0.0))[:, None]).to(DOT)
                s = s * tl.exp(whole)
                z = z * tl.exp(whole)
            s += tl.dot(tl.trans(kx), vx, input_precision=PREC, out_dtype=ACC)
            z += tl.sum(kx.to(ACC), 0)
        if NORM:
            back = back * w[:, None]
            wq = wq * w[:, None]
        _store(dq, _phi_grad(back, x, MAP), t, size - t, H * K, k0, K, C, BK)
        if SPLIT:
            if GATED:
                wq = wq * tl.exp(total + age)[:, None]
                total += whole
            wx, wscale = _fit(wq, DOT)
            rs += tl.dot(tl.trans(wx), dox, input_precision=PREC, out_dtype=ACC) * wscale
            if NORM:
                rz += tl.sum(wq * e[:, None], 0)

    if SPLIT:
        if CAUSAL:
            row = slot - 1
            keep = j > 0
        else:
            row = slot
            keep = j >= 0
        if keep:
            at = row.to(tl.int64) * H + h
            tl.store(rows + at * (K * V) + tile, rs, mask=inside)
            tl.store(zrows + at * K + dk, rz, mask=dk < K)
            if GATED:
                if k0 == 0:
                    tl.store(grows + at, total)


@triton.jit
def backward_kv(
    q, k, v, g, den, do, delta, qdq, dk, dv, dg, init, zinit, fin, zfin, trail, ztrail, cu, owner, lengths,
    T, L, NS, H, qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, ob, ot, oh, TOKENS,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, INIT: tl.constexpr, SPLIT: tl.constexpr, FINAL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and d log_gate of one segment, last chunk first. Wide heads: dk by key, dv by value blocks (DK, DV).

    d log_gateₜ = Σ_{i≥t>s} X_is + Σ_{i≥t} qᵢ·dqᵢ|S + Σ_{s<t} kₛ·dkₛ|R + e^G ⟨S, R⟩ within a chunk, with X the masked
    scores times their gradients, S the state before it, R the gradient of the state after it, G its whole log_gate;
    the sum over pairs is a suffix sum of row sums minus column sums.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NK * NV * H)
    h = (pid // (NK * NV)) % H
    k0 = (pid % (NK * NV)) // NV * BK
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if PACKED:
        q += first * qt
        k += first * kt
        v += first * vt
        g += first * gt
        do += first * ot
        chunk = (first // C).to(tl.int32) + n
    else:
        q += n.to(tl.int64) * qb
        k += n.to(tl.int64) * kb
        v += n.to(tl.int64) * vb
        g += n.to(tl.int64) * gb
        do += n.to(tl.int64) * ob
        chunk = n * ((T + C - 1) // C)
    q += h.to(tl.int64) * qh
    k += h.to(tl.int64) * kh
    v += h.to(tl.int64) * vh
    g += h.to(tl.int64) * gh
    do += h.to(tl.int64) * oh
    dk += (first * H + h) * K
    dv += (first * H + h) * V
    den += first * H + h
    delta += first * H + h
    part = (TOKENS * (k0 // BK).to(tl.int64) + first) * H + h
    qdq += part
    dg += part

    ck = k0 + tl.arange(0, BK)
    cv = v0 + tl.arange(0, BV)
    tile = ck[:, None] * V + cv[None, :]
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    rs = tl.zeros([BK, BV], ACC)
    rz = tl.zeros([BK], ACC)
    if INIT:
        if SPLIT and CAUSAL:
            at = slot.to(tl.int64) * H + h
        else:
            at = n.to(tl.int64) * H + h
        rs += tl.load(init + at * (K * V) + tile, mask=inside, other=0.0)
        rz += tl.load(zinit + at * K + ck, mask=ck < K, other=0.0)
    if not CAUSAL:
        rx, rscale = _fit(rs, DOT)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    chunks = (stop - start + C - 1) // C
    for c in range(chunks):
        t = start + (chunks - 1 - c) * C
        left = real - t
        x = _load(k, t, left, kt, k0, K, C, BK).to(ACC)
        kf = _features(x, left, k0, MAP, K, C, BK)
        kx = kf.to(DOT)
        vx = _load(v, t, left, vt, v0, V, C, BV).to(DOT)
        if CAUSAL:
            rx, rscale = _fit(rs, DOT)
            qf = _features(_load(q, t, left, qt, k0, K, C, BK).to(ACC), left, k0, MAP, K, C, BK)
            qx = qf.to(DOT)
            dox = _load(do, t, left, ot, v0, V, C, BV).to(DOT)
            if NORM:
                w = 1.0 / _column(den, t, left, H, C, ACC, 1.0)
                e = _column(delta, t, left, H, C, ACC, 0.0)
            pair = i[:, None] <= i[None, :]  # [C keys, C queries]
            if GATED:
                gate = _gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                ebb = tl.exp(tl.minimum(whole - age, 0.0))
                fade = tl.where(pair, tl.exp(tl.minimum(age[None, :] - age[:, None], 0.0)), 0.0)
            if DV or GATED:
                a = tl.dot(kx, tl.trans(qx), input_precision=PREC, out_dtype=ACC)
        if DV:
            gv = tl.dot(kx, rx, input_precision=PREC, out_dtype=ACC) * rscale
            if CAUSAL:
                if GATED:
                    gv = gv * ebb[:, None]
                    b = a * fade
                else:
                    b = tl.where(pair, a, 0.0)
                if NORM:
                    b = b * w[None, :]
                bx, bscale = _fit(b, DOT)
                gv += tl.dot(bx, dox, input_precision=PREC, out_dtype=ACC) * bscale
            gv = tl.where((i < left)[:, None], gv, 0.0)
            _store(dv, gv, t, size - t, H * V, v0, V, C, BV)
        if DK:
            gk = tl.dot(vx, tl.trans(rx), input_precision=PREC, out_dtype=ACC) * rscale + rz[None, :]
            if CAUSAL:
                da = tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
                if NORM:
                    da = (da + e[None, :]) * w[None, :]
                if GATED:
                    da = da * fade
                    gk = gk * ebb[:, None]
                    pull = tl.sum(kf * gk, 1)
                    held = a * da
                    push = _column(qdq, t, left, H, C, ACC, 0.0) + tl.sum(held, 0) - tl.sum(held, 1)
                    here = (chunk + t // C).to(tl.int64) * H + h
                    before = tl.load(trail + here * (K * V) + tile, mask=inside, other=0.0)
                    zbefore = tl.load(ztrail + here * K + ck, mask=ck < K, other=0.0)
                    carried = tl.sum(tl.sum(before * rs, 1) + zbefore * rz, 0) * tl.exp(whole)
                    gg = tl.cumsum(push, 0, reverse=True) + tl.cumsum(pull, 0) - pull + carried
                    gg = tl.where(i < left, gg, 0.0)
                    tl.store(dg + (tl.cast(t, tl.int64) + i) * H, gg, mask=i < size - t)
                else:
                    da = tl.where(pair, da, 0.0)
                dax, dascale = _fit(da, DOT)
                gk += tl.dot(dax, qx, input_precision=PREC, out_dtype=ACC) * dascale
            gk = tl.where((i < left)[:, None], _phi_grad(gk, x, MAP), 0.0)
            _store(dk, gk, t, size - t, H * K, k0, K, C, BK)
        if CAUSAL:
            if GATED:
                qf = qf * tl.exp(age)[:, None]
                rs = rs * tl.exp(whole)
                rz = rz * tl.exp(whole)
            if NORM:
                qf = qf * w[:, None]
                rz += tl.sum(qf * e[:, None], 0)
            wx, wscale = _fit(qf, DOT)
            rs += tl.dot(tl.trans(wx), dox, input_precision=PREC, out_dtype=ACC) * wscale

    if FINAL:
        if j == 0:
            at = n.to(tl.int64) * H + h
            tl.store(fin + at * (K * V) + tile, rs, mask=inside)
            if v0 == 0:
                tl.store(zfin + at * K + ck, rz, mask=ck < K)


@triton.jit
def step(
    q, k, v, g, s, z, o, snew, znew,
    eps, H, qb, qh, kb, kh, vb, vh, gb, gh, sb, sh, zb, zh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, INPLACE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One token of one head: S ← e^g S + φ(k)vᵀ, z ← e^g z + φ(k), o = φ(q)S / φ(q)z."""
    pid = tl.program_id(0)
    b = (pid // H).to(tl.int64)
    h = (pid % H).to(tl.int64)
    dk = tl.arange(0, BK)
    some = dk < K
    qf = tl.where(some, _phi(tl.load(q + b * qb + h * qh + dk, mask=some, other=0.0).to(ACC), MAP), 0.0)
    kf = tl.where(some, _phi(tl.load(k + b * kb + h * kh + dk, mask=some, other=0.0).to(ACC), MAP), 0.0)
    zx = tl.load(z + b * zb + h * zh + dk, mask=some, other=0.0).to(ACC)
    if GATED:
        fade = tl.exp(tl.load(g + b * gb + h * gh).to(ACC))
        zx = zx * fade
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
        if GATED:
            x = x * fade
        x += kf[:, None] * vx[None, :]
        if K % BK == 0 and V % BV == 0:
            tl.store(snew + tile, x)
        else:
            tl.store(snew + tile, x, mask=some[:, None] & (dv < V)[None, :])
        y = tl.sum(qf[:, None] * x, 0)
        if NORM:
            y = y / d
        tl.store(o + (b * H + h) * V + dv, y.to(o.dtype.element_ty), mask=dv < V)


class Config(NamedTuple):
    chunk: int
    block: (
        int  # state columns in one program: of V (states, forward), of K (backward_q), of either (backward_kv; 0: all)
    )
    warps: int
    stages: int
    registers: int | None = None  # a cap, so that more programs share a multiprocessor


# (kernel, K, V, bytes per element) -> what measured best; other shapes follow `config`
TUNED: dict[tuple[str, int, int, int], Config] = {
    ("forward", 64, 64, 2): Config(64, 64, 4, 2, 168),
}


def config(kernel: str, width_k: int, width_v: int, itemsize: int) -> Config:
    """Launch parameters, from shapes alone: nothing is tuned at run time, so first calls and captures are cheap."""
    k, v = _power(width_k), _power(width_v)
    tuned = TUNED.get((kernel, k, v, itemsize))
    if tuned:
        return tuned
    # state elements a program can hold; exact float32 products run on scalar units and want small tiles
    chunk, room = (64, 8192) if itemsize == 2 else (16, 2048)
    if itemsize == 2 and k * v > 4096:
        chunk = 32
    if kernel == "backward_kv":
        block = 0 if k * v <= room // 2 else max(16, min(k, v, room // max(k, v)))
        area = k * v if block == 0 else max(k, v) * block
    elif kernel == "backward_q":
        block = min(k, max(16, (room if k * v <= 4096 else room // 2) // v))
        area = 2 * block * v
    else:
        block = min(v, max(16, room // k))
        area = k * block
    warps = 4 if area <= room // 2 else 8
    return Config(chunk, block, warps, 2 if itemsize == 2 else 1, 255)  # uncapped, ptxas gives up on the largest ones


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


class Call(NamedTuple):
    """What forward and backward have in common: the inputs, the cut into segments, the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gate: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None
    causal: bool
    feature_map: str
    signed: bool
    normalize: bool
    eps: float
    segment: int


def _owner(call: Call, tokens: int) -> Tensor | None:
    """Packed: the sequence of each slot. Sequence n has slots from cu[n] // L + n on, enough for any length."""
    if call.cu_seqlens is None:
        return None
    sequences = call.cu_seqlens.numel() - 1
    first = call.cu_seqlens[:-1] // call.segment + torch.arange(sequences, device=call.cu_seqlens.device)
    slots = torch.arange(tokens // call.segment + sequences, device=call.cu_seqlens.device)
    return (torch.searchsorted(first, slots, right=True) - 1).to(torch.int32)


def _grid(call: Call, x: Tensor) -> tuple[int, int]:
    """Slots, and segments per sequence (1 when packed, where only the device knows)."""
    b, t = x.shape[:2]
    if call.cu_seqlens is not None:
        return t // call.segment + call.cu_seqlens.numel() - 1, 1
    segments = triton.cdiv(t, call.segment)
    return b * segments, segments


def _launch(cfg: Config) -> dict[str, int]:
    options = {"num_warps": cfg.warps, "num_stages": cfg.stages}
    if cfg.registers is not None and not INTERPRETED:
        options["maxnreg"] = cfg.registers
    return options


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _types(dtype: torch.dtype) -> dict[str, object]:
    dot = _DOT[dtype]
    if dtype is torch.bfloat16 and INTERPRETED:
        dot = tl.float32  # the interpreter has no bfloat16 dot
    return {
        "DOT": dot,
        "ACC": tl.float64 if dtype is torch.float64 else tl.float32,
        "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


def _options(call: Call, x: Tensor) -> dict[str, object]:
    return {
        "MAP": call.feature_map,
        "CAUSAL": call.causal,
        "GATED": call.log_gate is not None,
        "PACKED": call.cu_seqlens is not None,
        # queries of another length than the keys are never padded
        "LENGTHS": call.lengths is not None and x.shape[1] == call.k.shape[1],
        **_types(call.q.dtype),
    }


def _launch_states(call: Call, rows: Tensor, zrows: Tensor, grows: Tensor | None, owner: Tensor | None) -> None:
    k, v, g = call.k, call.v, call.log_gate
    h, width_k, width_v = k.shape[2], k.shape[3], v.shape[3]
    cfg = config("states", width_k, width_v, k.element_size())
    slots, segments = _grid(call, k)
    states[(slots * h * triton.cdiv(width_v, cfg.block),)](
        k, v, k if g is None else g, rows, zrows, zrows if grows is None else grows,
        k if call.cu_seqlens is None else call.cu_seqlens, k if owner is None else owner,
        k if call.lengths is None else call.lengths,
        k.shape[1], call.segment, segments, h, *_strides(k), *_strides(v), *_strides(g),
        K=width_k, V=width_v, C=cfg.chunk, BK=_power(width_k), BV=cfg.block, **_options(call, k),
        **_launch(cfg),
    )  # fmt: skip


def _launch_scan(
    call: Call, x: Tensor, rows: Tensor, grows: Tensor | None, init: Tensor | None, final: Tensor | None, reverse: bool
) -> None:
    """Scan rows [slots, H, ...] of every sequence of x, in place (causal), and put the last sum into `final`."""
    sequences = x.shape[0] if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
    h, elements = rows.shape[1], rows[0, 0].numel()
    block = min(128, _power(elements))
    scan[(sequences * h * triton.cdiv(elements, block),)](
        rows, rows if grows is None else grows, rows if init is None else init, rows if final is None else final,
        x if call.cu_seqlens is None else call.cu_seqlens,
        call.segment, _grid(call, x)[1], h, elements,
        CAUSAL=call.causal, REVERSE=reverse, GATED=grows is not None, PACKED=call.cu_seqlens is not None,
        INIT=init is not None, FINAL=final is not None, U=16, BE=block,
        ACC=tl.float64 if rows.dtype is torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip


def launch_forward(
    call: Call, s0: Tensor | None, z0: Tensor | None, o: Tensor, s: Tensor, z: Tensor,
    den: Tensor | None, rows: Tensor | None, zrows: Tensor | None,
) -> None:  # fmt: skip
    """Fill o, s, z and, where given, the denominators; rows and zrows end up with the state before each segment."""
    q, k, v, g = call.q, call.k, call.v, call.log_gate
    h, width_k, width_v = k.shape[2], k.shape[3], v.shape[3]
    owner = _owner(call, k.shape[1])
    if rows is not None and zrows is not None:
        grows = None if g is None else zrows.new_empty(rows.shape[:2])
        _launch_states(call, rows, zrows, grows, owner)
        _launch_scan(call, k, rows, grows, s0, None if call.causal else s, False)
        _launch_scan(call, k, zrows, grows, z0, None if call.causal else z, False)
    init, zinit = (rows, zrows) if call.causal and rows is not None else (s0, z0) if call.causal else (s, z)
    cfg = config("forward", width_k, width_v, k.element_size())
    slots, segments = _grid(call, q)
    forward[(slots * h * triton.cdiv(width_v, cfg.block),)](
        q, k, v, q if g is None else g, o, s if den is None else den, s if init is None else init,
        z if zinit is None else zinit, s, z, q if call.cu_seqlens is None else call.cu_seqlens,
        q if owner is None else owner, q if call.lengths is None else call.lengths,
        call.eps, q.shape[1], call.segment, segments, h, *_strides(q), *_strides(k), *_strides(v), *_strides(g),
        K=width_k, V=width_v, C=cfg.chunk, BK=_power(width_k), BV=cfg.block,
        SIGNED=call.signed, NORM=call.normalize, INIT=init is not None,
        SPLIT=call.causal and rows is not None, SAVE=den is not None, **_options(call, q),
        **_launch(cfg),
    )  # fmt: skip


def launch_backward(
    call: Call, do: Tensor, ds: Tensor | None, dz: Tensor | None, o: Tensor, den: Tensor,
    init: Tensor | None, zinit: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    ds0: Tensor | None, dz0: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Fill dq, dk, dv and, where given, the gradients of the initial state; returns that of log_gate.

    init and zinit: the states before each segment, before each sequence (one segment), or the full sums (not causal).
    """
    q, k, v, g = call.q, call.k, call.v, call.log_gate
    h, width_k, width_v = k.shape[2], k.shape[3], v.shape[3]
    acc = den.dtype
    owner = _owner(call, q.shape[1])
    slots, segments = _grid(call, q)
    split = not call.causal or call.cu_seqlens is not None or segments > 1
    cfg = config("backward_q", width_k, width_v, k.element_size())
    wide = config("backward_kv", width_k, width_v, k.element_size())
    if g is not None:
        wide = wide._replace(chunk=cfg.chunk)  # they share the states before each chunk
    parts = triton.cdiv(width_k, cfg.block)
    delta = torch.empty_like(den)
    rows = zrows = grows = trail = ztrail = qdq = dg = None
    if split:
        rows = q.new_empty((slots, h, width_k, width_v), dtype=acc)
        zrows = q.new_empty((slots, h, width_k), dtype=acc)
    if g is not None:
        if call.cu_seqlens is None:
            chunks = q.shape[0] * triton.cdiv(q.shape[1], cfg.chunk)
        else:
            chunks = q.shape[1] // cfg.chunk + call.cu_seqlens.numel() - 1
        grows = q.new_empty((slots, h), dtype=acc)
        trail = q.new_empty((chunks, h, width_k, width_v), dtype=acc)
        ztrail = q.new_empty((chunks, h, width_k), dtype=acc)
        qdq = q.new_empty((parts, *g.shape), dtype=acc)
    tokens = q.shape[0] * q.shape[1]
    shared = (*_strides(q), *_strides(k), *_strides(v), *_strides(g), *_strides(do), tokens)
    where = (
        q if call.cu_seqlens is None else call.cu_seqlens,
        q if owner is None else owner,
        q if call.lengths is None else call.lengths,
    )
    backward_q[(slots * h * parts,)](
        q, k, v, q if g is None else g, o, den, do, dq, delta, den if qdq is None else qdq,
        den if init is None else init, den if zinit is None else zinit,
        den if rows is None else rows, den if zrows is None else zrows, den if grows is None else grows,
        den if trail is None else trail, den if ztrail is None else ztrail, *where,
        call.eps, q.shape[1], call.segment, segments, h, *shared,
        K=width_k, V=width_v, C=cfg.chunk, BK=cfg.block, BV=_power(width_v),
        SIGNED=call.signed, NORM=call.normalize, INIT=init is not None, SPLIT=split, **_options(call, q),
        **_launch(cfg),
    )  # fmt: skip
    if qdq is not None:
        qdq = qdq.sum(0) if parts > 1 else qdq[0]
    after, zafter = ds, dz
    if rows is not None and zrows is not None:
        if call.causal:
            _launch_scan(call, q, rows, grows, ds, None, True)
            _launch_scan(call, q, zrows, grows, dz, None, True)
            after, zafter = rows, zrows
        else:
            sequences = q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
            after = q.new_empty((sequences, h, width_k, width_v), dtype=acc) if ds0 is None else ds0
            zafter = q.new_empty((sequences, h, width_k), dtype=acc) if dz0 is None else dz0
            _launch_scan(call, q, rows, None, ds, after, True)
            _launch_scan(call, q, zrows, None, dz, zafter, True)
    slots, segments = _grid(call, k)
    both: tuple[tuple[bool, bool, int, int], ...] = ((True, True, _power(width_k), _power(width_v)),)
    if wide.block:
        both = ((True, False, wide.block, _power(width_v)), (False, True, _power(width_k), wide.block))
    for want_k, want_v, block_k, block_v in both:
        blocks = triton.cdiv(width_k, block_k) * triton.cdiv(width_v, block_v)
        if g is not None and qdq is not None and want_k:
            dg = q.new_empty((triton.cdiv(width_k, block_k), *g.shape), dtype=acc)
            first = torch.zeros_like(dg)  # q·dq belongs to the sum over key blocks once
            first[0] = qdq
        backward_kv[(slots * h * blocks,)](
            q, k, v, q if g is None else g, den, do, delta, den if g is None else first, dk, dv,
            den if dg is None else dg, den if after is None else after, den if zafter is None else zafter,
            den if ds0 is None else ds0, den if dz0 is None else dz0,
            den if trail is None else trail, den if ztrail is None else ztrail, *where,
            k.shape[1], call.segment, segments, h, *shared,
            K=width_k, V=width_v, C=wide.chunk, BK=block_k, BV=block_v, NORM=call.normalize,
            INIT=after is not None, SPLIT=split, FINAL=call.causal and ds0 is not None and want_k,
            DK=want_k, DV=want_v, **_options(call, k), **_launch(wide),
        )  # fmt: skip
    return None if dg is None else dg.sum(0) if len(dg) > 1 else dg[0]


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, s: Tensor, z: Tensor, o: Tensor,
    snew: Tensor, znew: Tensor, feature_map: str, signed: bool, normalize: bool, eps: float,
) -> None:  # fmt: skip
    """One token for every row and head; snew and znew may be s and z themselves."""
    b, h, width_k = q.shape
    width_v = v.shape[2]
    block_k = _power(width_k)
    block_v = min(_power(width_v), max(16, 4096 // block_k))
    g = q if log_gate is None else log_gate
    step[(b * h,)](
        q, k, v, g, s, z, o, snew, znew, eps, h,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), g.stride(1),
        s.stride(0), s.stride(1), z.stride(0), z.stride(1),
        K=width_k, V=width_v, BK=block_k, BV=block_v, MAP=feature_map, SIGNED=signed, NORM=normalize,
        GATED=log_gate is not None, INPLACE=snew is s,
        ACC=tl.float64 if s.dtype is torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip
