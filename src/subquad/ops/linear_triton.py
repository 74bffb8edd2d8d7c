# ruff: noqa: SIM102, SIM300 (a compile-time test and a run-time one stay apart; DOT and ACC are parameters)
"""Linear attention on the GPU: feature map, sums, denominator and division in one pass over q, k and v.

A sequence is cut into segments of L tokens, so that sequences x heads x segments fill the chip; a program walks one
segment in chunks of C, with the state S = Σ φ(k)vᵀ and z = Σ φ(k) in registers. With more than one segment, `states`
first sums each segment and `scan` turns the sums into the state before each segment: this costs a second read of k, v.

    forward        o, and the denominators d if they will be needed    walks on from the state before the segment
    backward_q     dq, and what each segment adds to R and r           the same walk
    backward_kv    dk, dv, d log_gate                                  walks back, carrying R = dL/dS and r = dL/dz

R = Σ φ(q)doᵀ/d and r = Σ φ(q)p/d, with the pull p = -do·o of the denominator, are sums like S and z, and `scan` makes
those after each segment of them. Without the causal mask the same kernels run with the full sum in place of the running
one. A state that is too large for one program is cut into blocks of columns, and then dk and dv are two launches, since
dk needs all of V and dv all of K. States are transposed in registers: the operand that φ was applied to is then always
the second one of a dot, which is read from shared memory, and is not computed twice.
Every dot product takes operands of the input's type and adds in float32. Gates enter as exponentials of sums of
log_gate between two positions of one chunk, so nothing overflows. The strides from token to token are compile-time
constants: addresses then take few registers, and twice as many programs share a multiprocessor.

Legend: C chunk, L segment, N sequences; a slot is a (sequence, segment) pair, a row the slot's place in the buffers.
"""

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, launch_by_key, tile_of


@triton.jit
def _phi(x, MAP: tl.constexpr):
    if MAP == "elu+1":
        y = tl.maximum(x, 0.0) + tl.exp2(tl.minimum(x, 0.0) * 1.4426950408889634)
    elif MAP == "relu":
        y = tl.maximum(x, 0.0)
    elif MAP == "exp":
        y = tl.exp(x)
    else:
        # a sum, so that the operand passes through registers: Triton 3.6 refills a loaded tile that a dot still reads
        y = x + 0.0
    return y


@triton.jit
def _phi_grad(d, f, MAP: tl.constexpr):
    """d·φ'(x), from f = φ(x)."""
    if MAP == "elu+1":
        y = d * tl.minimum(f, 1.0)
    elif MAP == "relu":
        y = tl.where(f > 0.0, d, 0.0)
    elif MAP == "exp":
        y = d * f
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
def _columns(x, ROWS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr):
    """A vector as 16 columns that sum up to it, for the matrix units, which take no fewer."""
    return _fit((x * 0.0625)[:, None] + tl.zeros([ROWS, 16], ACC), DOT)


@triton.jit
def _rows(x, COLS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr):
    """A vector as 16 equal rows: columns of a times rows of b is their outer product."""
    return _fit(x[None, :] + tl.zeros([16, COLS], ACC), DOT)


@triton.jit
def _mask(left, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    m = (tl.arange(0, ROWS) < left)[:, None]
    if D % COLS != 0:
        m = m & ((d0 + tl.arange(0, COLS)) < D)[None, :]
    return m


@triton.jit
def _load(
    ptr, t, left, stride: tl.constexpr, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, other=0.0,
):  # fmt: skip
    """Rows t .. t + ROWS of a [T, D] array, `other` from `left` rows on. EVEN: there is nothing to mask."""
    ptr += tl.cast(t, tl.int64) * stride
    p = ptr + tl.arange(0, ROWS)[:, None] * stride + (d0 + tl.arange(0, COLS))[None, :]
    if EVEN:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=_mask(left, d0, D, ROWS, COLS), other=other)
    return x


@triton.jit
def _features(
    ptr, t, left, stride: tl.constexpr, d0, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """φ of rows t .. t + ROWS, and zeros where there is no token: what is loaded there is where φ vanishes."""
    if MAP == "elu+1" or MAP == "exp":
        x = _load(ptr, t, left, stride, d0, D, ROWS, COLS, EVEN, float("-inf"))
    else:
        x = _load(ptr, t, left, stride, d0, D, ROWS, COLS, EVEN)
    return _phi(x.to(ACC), MAP)


@triton.jit
def _store(
    ptr, x, t, left, stride: tl.constexpr, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    ptr += tl.cast(t, tl.int64) * stride
    if ptr.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)  # large but finite: an infinity would turn gradients into NaN
    p = ptr + tl.arange(0, ROWS)[:, None] * stride + (d0 + tl.arange(0, COLS))[None, :]
    if EVEN:
        tl.store(p, x.to(ptr.dtype.element_ty))
    else:
        tl.store(p, x.to(ptr.dtype.element_ty), mask=_mask(left, d0, D, ROWS, COLS))


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
def _pull(do, o, w, eps, SIGNED: tl.constexpr):
    """-do·o, by which the denominator d = 1/w pulls at the gradient; zero where d was held at ±eps."""
    p = -tl.sum(do.to(w.dtype) * o.to(w.dtype), 1)
    if SIGNED:
        p = tl.where(tl.abs(w) * eps < 0.999999, p, 0.0)
    return p


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
def _head(n, h, first, sb, st, sh, PACKED: tl.constexpr):
    """Where head h of sequence n begins in an input with these strides."""
    if PACKED:
        at = first * st
    else:
        at = n.to(tl.int64) * sb
    return at + h.to(tl.int64) * sh


@triton.jit
def _state(s, z, row, h, H, K: tl.constexpr, V: tl.constexpr, JOINED: tl.constexpr):
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
    eps, T, L, NS, TOKENS, gb, gt, gh, kb, kh, vb, vh,
    KT: tl.constexpr, VT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Σ φ(k)vᵀ and Σ φ(k) of one segment, decayed to its end; causal: into the row of the segment after it."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, _, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    if CAUSAL:
        if j == segments - 1:
            return
    k += _head(n, h, first, kb, KT, kh, PACKED)
    v += _head(n, h, first, vb, VT, vh, PACKED)
    g += _head(n, h, first, gb, gt, gh, PACKED)
    dk = k0 + tl.arange(0, BK)
    dv = tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        before, zbefore = _state(init, zinit, n, h, H, K, V, False)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    total = 0.0
    start = j * L
    stop = tl.minimum(start + L, real)
    for t in range(start, stop, C):
        left = real - t
        f = _features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
        vx = _load(v, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
        if GATED:
            gate = _gate(g, t, left, gt, C, ACC)
            whole = tl.sum(gate, 0)
            f = f * tl.exp(tl.minimum(whole - tl.cumsum(gate, 0), 0.0))[:, None]
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
    after, zafter = _state(rows, zrows, row, h, H, K, V, SPLIT)
    tl.store(after + tile, tl.trans(s), mask=inside)
    tl.store(zafter + dk, z, mask=dk < K)
    if GATED:
        if k0 == 0:
            tl.store(grows + row.to(tl.int64) * H + h, total)


@triton.jit
def scan(
    rows, grows, init, zinit, final, zfinal, cu,
    L, NS, H, K: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    INIT: tl.constexpr, FINAL: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Running sum, in place, over the rows of each sequence, from `init` on; the last sum goes to `final`."""
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
        tl.store(final + here * (K * V) + e, carry, mask=in_s)
        tl.store(zfinal + here * K + (e - K * V), carry, mask=in_z)


@triton.jit
def forward(
    q, k, v, g, o, inv, init, zinit, fin, zfin, cu, owner, lengths,
    eps, T, L, NS, TOKENS, gb, gt, gh, qb, qh, kb, kh, vb, vh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    SIGNED: tl.constexpr, SAVE: tl.constexpr,
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
    q += _head(n, h, first, qb, QT, qh, PACKED)
    k += _head(n, h, first, kb, KT, kh, PACKED)
    v += _head(n, h, first, vb, VT, vh, PACKED)
    g += _head(n, h, first, gb, gt, gh, PACKED)
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
        before, zbefore = _state(init, zinit, row, h, H, K, V, SPLIT)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = _fit(s, DOT)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    for t in range(start, stop, C):
        left = real - t
        qx = _features(q, t, left, QT, 0, MAP, K, C, BK, EVEN, ACC).to(DOT)
        if SIGNED:
            d = tl.sum(qx.to(ACC) * z[None, :], 1)  # terms cancel, so rounding z is not an option
        else:
            zx, zscale = _columns(z, BK, DOT, ACC)
            d = tl.sum(tl.dot(qx, zx, input_precision=PREC, out_dtype=ACC), 1) * zscale
        if CAUSAL:
            f = _features(k, t, left, KT, 0, MAP, K, C, BK, EVEN, ACC)
            vx = _load(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
            kx = f.to(DOT)
            if not GATED:
                z += tl.sum(f, 0)
            a = tl.dot(qx, tl.trans(kx), input_precision=PREC, out_dtype=ACC)
            a = tl.where(i[:, None] >= i[None, :], a, 0.0)
            sx, sscale = _fit(s, DOT)
            num = tl.dot(qx, tl.trans(sx), input_precision=PREC, out_dtype=ACC) * sscale
            if GATED:
                gate = _gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                a = a * tl.exp(tl.minimum(age[:, None] - age[None, :], 0.0))
                num = num * tl.exp(age)[:, None]
                d = d * tl.exp(age)
                f = f * tl.exp(tl.minimum(whole - age, 0.0))[:, None]
                kx = f.to(DOT)
                s = s * tl.exp(whole)
                z = z * tl.exp(whole) + tl.sum(f, 0)
            ax, ascale = _fit(a, DOT)
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
        _store(o, num, t, size - t, H * V, v0, V, C, BV, EVEN)

    if CAUSAL:
        if j == segments - 1:
            after, zafter = _state(fin, zfin, n, h, H, K, V, False)
            tl.store(after + tile, tl.trans(s), mask=inside)
            if v0 == 0:
                tl.store(zafter + dk, z, mask=dk < K)


@triton.jit
def backward_q(
    q, k, v, g, o, inv, do, pull, dq, qdq, init, zinit, start, zstart, sums, zsums, gsums, cu, owner, lengths,
    eps, T, L, NS, TOKENS, gb, gt, gh, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    SIGNED: tl.constexpr, START: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and the pull of one segment, and what it adds to R and r, decayed to its start.

    Causal, those go to the row of the segment before it, and are needed only where sequences are cut.
    Gated: also q·dq, which d log_gate needs, for each block of K.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    SUMS: tl.constexpr = SPLIT or not CAUSAL
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, size, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    q += _head(n, h, first, qb, QT, qh, PACKED)
    k += _head(n, h, first, kb, KT, kh, PACKED)
    v += _head(n, h, first, vb, VT, vh, PACKED)
    g += _head(n, h, first, gb, gt, gh, PACKED)
    do += _head(n, h, first, ob, OT, oh, PACKED)
    o += (first * H + h) * V
    dq += (first * H + h) * K
    inv += first * H + h
    pull += first * H + h
    qdq += (TOKENS * (k0 // BK).to(tl.int64) + first) * H + h

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
        before, zbefore = _state(init, zinit, row, h, H, K, V, SPLIT and CAUSAL)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    if not CAUSAL:
        sx, sscale = _fit(s, DOT)
    if SUMS:
        rs = tl.zeros([BV, BK], ACC)
        rz = tl.zeros([BK], ACC)
        total = 0.0
        if START:
            before, zbefore = _state(start, zstart, n, h, H, K, V, False)
            rs += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
            rz += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    i = tl.arange(0, C)
    begin = j * L
    stop = tl.minimum(begin + L, size)
    if NORM:  # Triton loads ahead what a dot takes, and that is not o
        ox = _load(o, begin, real - begin, H * V, 0, V, C, BV, EVEN)
    for t in range(begin, stop, C):
        left = real - t
        dox = _load(do, t, left, OT, 0, V, C, BV, EVEN)
        if NORM:
            w = _column(inv, t, left, H, C, ACC, 0.0)
            p = _pull(dox, ox, w, eps, SIGNED)
            ahead = tl.minimum(t + C, stop - C) if EVEN else t + C
            ox = _load(o, ahead, real - ahead, H * V, 0, V, C, BV, EVEN)
            if k0 == 0:
                tl.store(pull + (tl.cast(t, tl.int64) + i) * H, p, mask=i < left)
        dox = dox.to(DOT)
        if CAUSAL:
            sx, sscale = _fit(s, DOT)
        back = tl.dot(dox, sx, input_precision=PREC, out_dtype=ACC) * sscale
        if NORM and (SIGNED or GATED):  # d log_gate is a sum of differences, which rounding would spoil
            back += p[:, None] * z[None, :]
        elif NORM:
            zx, zscale = _rows(z, BK, DOT, ACC)
            px, pscale = _columns(p, C, DOT, ACC)
            back += tl.dot(px, zx, input_precision=PREC, out_dtype=ACC) * (pscale * zscale)
        if CAUSAL:
            f = _features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
            vx = _load(v, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
            kx = f.to(DOT)
            if not GATED:
                z += tl.sum(f, 0)
            da = tl.dot(dox, tl.trans(vx), input_precision=PREC, out_dtype=ACC)
            if NORM:
                da += p[:, None]
            da = tl.where(i[:, None] >= i[None, :], da, 0.0)
            if GATED:
                gate = _gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                back = back * tl.exp(age)[:, None]
                da = da * tl.exp(tl.minimum(age[:, None] - age[None, :], 0.0))
            dax, dascale = _fit(da, DOT)
            back += tl.dot(dax, kx, input_precision=PREC, out_dtype=ACC) * dascale
            if GATED:
                f = f * tl.exp(tl.minimum(whole - age, 0.0))[:, None]
                kx = f.to(DOT)
                s = s * tl.exp(whole)
                z = z * tl.exp(whole) + tl.sum(f, 0)
            s += tl.dot(tl.trans(vx), kx, input_precision=PREC, out_dtype=ACC)
        f = _features(q, t, left, QT, k0, MAP, K, C, BK, EVEN, ACC)
        if NORM:
            back = back * w[:, None]
        if GATED:
            tl.store(qdq + (tl.cast(t, tl.int64) + i) * H, tl.sum(f * back, 1), mask=i < size - t)
        _store(dq, _phi_grad(back, f, MAP), t, size - t, H * K, k0, K, C, BK, EVEN)
        if SUMS:
            if NORM:
                f = f * w[:, None]
            if GATED:
                f = f * tl.exp(total + age)[:, None]
                total += whole
            if NORM:
                rz += tl.sum(f * p[:, None], 0)
            fx, scale = _fit(f, DOT)
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
            after, zafter = _state(sums, zsums, row, h, H, K, V, SPLIT)
            tl.store(after + tile, tl.trans(rs), mask=inside)
            tl.store(zafter + dk, rz, mask=dk < K)
            if GATED:
                if k0 == 0:
                    tl.store(gsums + row.to(tl.int64) * H + h, total)


@triton.jit
def backward_kv(
    q, k, v, g, inv, do, pull, qdq, dk, dv, dg, init, zinit, ahead, end, zend, fin, zfin, cu, owner, lengths,
    eps, T, L, NS, TOKENS, gb, gt, gh, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, FINAL: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and d log_gate (DK), dv (DV) of one segment, last chunk first, from R and r after it; those before to `fin`.

    Each score and each state at the end holds exp of a sum of log_gates, so d log_gateₜ = ⟨R, S⟩ + ⟨r, z⟩ at the
    segment's end + Σ q·dq - k·dk over the tokens from t to there. S is in the row `ahead`, or after the last in `end`.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    slot = pid // (NK * NV * H)
    h = (pid // (NK * NV)) % H
    k0 = (pid // NV % NK) * BK
    v0 = (pid % NV) * BV
    n, j, first, size, real, segments = _locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    q += _head(n, h, first, qb, QT, qh, PACKED)
    k += _head(n, h, first, kb, KT, kh, PACKED)
    v += _head(n, h, first, vb, VT, vh, PACKED)
    g += _head(n, h, first, gb, gt, gh, PACKED)
    do += _head(n, h, first, ob, OT, oh, PACKED)
    dk += (first * H + h) * K
    dv += (first * H + h) * V
    inv += first * H + h
    pull += first * H + h
    at = (TOKENS * (k0 // BK).to(tl.int64) + first) * H + h
    qdq += at
    dg += at

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
        after, zafter = _state(init, zinit, row, h, H, K, V, SPLIT and CAUSAL)
        rs += tl.trans(tl.load(after + tile, mask=inside, other=0.0))
        if DK:
            rz += tl.load(zafter + ck, mask=ck < K, other=0.0)
    if not CAUSAL:
        rx, rscale = _fit(rs, DOT)
    if GATED and DK:
        if j == segments - 1:
            last, zlast = _state(end, zend, n, h, H, K, V, False)
        else:
            last, zlast = _state(ahead, ahead, slot + 1, h, H, K, V, True)
        held = tl.load(last + tile, mask=inside, other=0.0) * tl.trans(rs)
        carried = tl.sum(tl.sum(held, 1) + tl.load(zlast + ck, mask=ck < K, other=0.0) * rz, 0)
    ones = tl.full([C, 16], 0.0625, DOT)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    chunks = (stop - start + C - 1) // C
    for c in range(chunks):
        t = start + (chunks - 1 - c) * C
        left = real - t
        if GATED:  # d log_gate is a sum of differences, which rounding would spoil
            after_z = rz
        else:
            zx, zscale = _rows(rz, BK, DOT, ACC)
        if CAUSAL:
            rx, rscale = _fit(rs, DOT)
            dox = _load(do, t, left, OT, v0, V, C, BV, EVEN).to(DOT)
            f = _features(q, t, left, QT, k0, MAP, K, C, BK, EVEN, ACC)
            if NORM:
                f = f * _column(inv, t, left, H, C, ACC, 0.0)[:, None]
            fx, fscale = _fit(f, DOT)
            if NORM and DK:
                p = _column(pull, t, left, H, C, ACC, 0.0)
                if not GATED:
                    px, pscale = _rows(p, C, DOT, ACC)
            if GATED:
                gate = _gate(g, t, left, gt, C, ACC)
                age = tl.cumsum(gate, 0)
                whole = tl.sum(gate, 0)
                rest = tl.exp(tl.minimum(whole - age, 0.0))
                fade = tl.exp(tl.minimum(age[None, :] - age[:, None], 0.0))  # [C keys, C queries]
                f = f * tl.exp(age)[:, None]
                rs = rs * tl.exp(whole)
                rz = rz * tl.exp(whole)
            if NORM and DK:
                rz += tl.sum(f * p[:, None], 0)
            gx, gscale = fx, fscale
            if GATED:
                gx, gscale = _fit(f, DOT)
            rs += tl.dot(tl.trans(dox), gx, input_precision=PREC, out_dtype=ACC) * gscale
        kx = _features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC).to(DOT)
        if DV:
            gv = tl.dot(kx, tl.trans(rx), input_precision=PREC, out_dtype=ACC) * rscale
            if CAUSAL:
                a = tl.dot(kx, tl.trans(fx), input_precision=PREC, out_dtype=ACC) * fscale
                a = tl.where(i[:, None] <= i[None, :], a, 0.0)  # [C keys, C queries]
                if GATED:
                    a = a * fade
                    gv = gv * rest[:, None]
                ax, ascale = _fit(a, DOT)
                gv += tl.dot(ax, dox, input_precision=PREC, out_dtype=ACC) * ascale
            _store(dv, gv, t, size - t, H * V, v0, V, C, BV, EVEN)
        if DK:
            vx = _load(v, t, left, VT, v0, V, C, BV, EVEN).to(DOT)
            gk = tl.dot(vx, rx, input_precision=PREC, out_dtype=ACC) * rscale
            if GATED:
                gk += after_z[None, :]
                f_k = _features(k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
            else:
                gk += tl.dot(ones, zx, input_precision=PREC, out_dtype=ACC) * zscale
                f_k = kx.to(ACC)
            if CAUSAL:
                da = tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
                if NORM and GATED:
                    da += p[None, :]
                elif NORM:
                    da += tl.dot(ones, px, input_precision=PREC, out_dtype=ACC) * pscale
                da = tl.where(i[:, None] <= i[None, :], da, 0.0)
                if GATED:
                    da = da * fade
                    gk = gk * rest[:, None]
                dax, dascale = _fit(da, DOT)
                gk += tl.dot(dax, fx, input_precision=PREC, out_dtype=ACC) * (dascale * fscale)
            if GATED:
                push = _column(qdq, t, left, H, C, ACC, 0.0) - tl.sum(f_k * gk, 1)
                here = tl.where(i < left, tl.cumsum(push, 0, reverse=True) + carried, 0.0)
                tl.store(dg + (tl.cast(t, tl.int64) + i) * H, here, mask=i < size - t)
                carried += tl.sum(push, 0)
            gk = _phi_grad(gk, f_k, MAP)
            if not EVEN:
                gk = tl.where((i < left)[:, None], gk, 0.0)
            _store(dk, gk, t, size - t, H * K, k0, K, C, BK, EVEN)

    if FINAL and DK:
        if j == 0:
            earlier, zearlier = _state(fin, zfin, n, h, H, K, V, False)
            tl.store(earlier + tile, tl.trans(rs), mask=inside)
            tl.store(zearlier + ck, rz, mask=ck < K)


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
    block: int  # columns of the state in one program: of V in forward and backward_v, of K in the others
    warps: int
    stages: int
    registers: int = (
        255  # a cap, so that more programs share a multiprocessor; without one ptxas gives up on large tiles
    )


# (kernel, causal, K, V, bytes per element) -> what measured best on an H200; other shapes follow `config`. "many":
# whole sequences, more than two for each multiprocessor
TUNED: dict[tuple[str, bool, int, int, int], Config] = {
    ("states", True, 64, 64, 2): Config(64, 64, 4, 3, 128),
    ("states", False, 64, 64, 2): Config(128, 64, 4, 2, 168),
    ("forward many", True, 64, 64, 2): Config(64, 64, 4, 3, 168),
    ("backward_q many", True, 64, 64, 2): Config(64, 64, 4, 3, 168),
    ("backward_kv many", True, 64, 64, 2): Config(64, 64, 4, 2, 255),
    ("backward_kv", False, 64, 64, 2): Config(64, 64, 4, 2, 168),
    ("forward", True, 256, 64, 2): Config(64, 64, 8, 2, 255),
    ("backward_v", True, 256, 64, 2): Config(64, 64, 8, 2, 255),
}


def config(kernel: str, causal: bool, width_k: int, width_v: int, itemsize: int, many: bool = False) -> Config:
    """Launch parameters, from shapes alone: nothing is tuned at run time, so first calls and captures are cheap.

    backward_kv is launched as backward_k and backward_v, one after the other, where no program can hold a whole state.
    """
    k, v = tile_of(width_k), tile_of(width_v)
    tuned = TUNED.get((kernel, causal, k, v, itemsize))
    if many:
        tuned = TUNED.get((f"{kernel} many", causal, k, v, itemsize), tuned)
    if tuned:
        return tuned
    across, along = (v, k) if kernel in ("forward", "backward_v") else (k, v)
    if itemsize > 2:  # exact products run on scalar units and want small tiles
        block = min(across, max(16, 2048 // along))
        return Config(16, block, 8 if block * along > 1024 else 4, 1)
    block = min(across, 64, max(16, 8192 // along))
    small = block * along <= 4096
    return Config(64, block, 4, 3 if small else 2, 128 if small and not causal else 255)


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

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def cut(self, tokens: int) -> tuple[int, int, bool]:
        """Slots, segments per sequence (1 when packed, where only the device knows), whether there may be several."""
        if self.cu_seqlens is not None:
            return tokens // self.segment + self.sequences, 1, True
        segments = blocks_of(tokens, self.segment)
        return self.q.shape[0] * segments, segments, segments > 1

    def kind(self, do: Tensor | None) -> tuple[Any, ...]:
        """Everything but the numbers in the tensors: calls of one kind launch the same kernels in the same way."""
        q, k, v, g, lengths, cu = self[:6]
        return (
            q.device.index, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), self[6:],
            None if g is None else (g.dtype, g.stride()),
            None if lengths is None else lengths.dtype,
            None if cu is None else (cu.dtype, cu.shape),
            None if do is None else do.stride(),
            torch.backends.cuda.matmul.allow_tf32,
        )  # fmt: skip


def _owner(call: Call) -> Tensor:
    """Packed: the sequence of each slot. Sequence n has slots from cu[n] // L + n on, enough for any length."""
    if call.cu_seqlens is None:
        return call.q
    first = call.cu_seqlens[:-1] // call.segment + torch.arange(call.sequences, device=call.q.device)
    slots = torch.arange(call.q.shape[1] // call.segment + call.sequences, device=call.q.device)
    return (torch.searchsorted(first, slots, right=True) - 1).to(torch.int32)


_KINDS: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count()


def _number_of(kind: tuple[Any, ...]) -> int:
    """A number that stands for a kind of call: looking it up once is cheaper than hashing the kind for each kernel."""
    if len(_KINDS) > 1024:
        _KINDS.clear()
    number = _KINDS.get(kind)
    if number is None:
        number = _KINDS[kind] = next(_numbers)
    return number


_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class _Launcher:
    """Starts the kernels of one call; a tensor that is not there is replaced by one that is, and never read."""

    def __init__(self, call: Call, do: Tensor | None = None) -> None:
        self.call = call
        self.do = call.q if do is None else do
        q, g = call.q, call.log_gate
        self.kind = _number_of(call.kind(do))
        self.gate = q if g is None else g
        self.where = (
            q if call.cu_seqlens is None else call.cu_seqlens,
            _owner(call),
            q if call.lengths is None else call.lengths,
        )
        self.heads, self.width_k, self.width_v = q.shape[2], q.shape[3], call.v.shape[3]

    def config(self, kernel: str) -> Config:
        call = self.call
        slots, _, split = call.cut(call.q.shape[1])
        many = not split and slots * self.heads > 264
        return config(kernel, call.causal, self.width_k, self.width_v, call.q.element_size(), many)

    def merged(self) -> bool:
        """Whether one program of backward_kv holds a whole state."""
        k, v = tile_of(self.width_k), tile_of(self.width_v)
        return k * v <= 4096 and self.config("backward_k").block == k and self.config("backward_v").block == v

    def plan(
        self, cfg: Config, tokens: int, block_k: int, block_v: int, inputs: dict[str, Tensor], **more: bool
    ) -> Plan:  # fmt: skip
        """How to start a kernel that walks over this many tokens, by blocks of K and of V; `inputs` by their letter."""
        call = self.call
        slots, segments, _ = call.cut(tokens)
        programs = slots * self.heads * blocks_of(self.width_k, block_k) * blocks_of(self.width_v, block_v)
        lengths = call.lengths is not None and tokens == call.k.shape[1]  # else queries, which are never padded
        whole = self.width_k % block_k == 0 and self.width_v % block_v == 0 and tokens % cfg.chunk == 0
        dot = _DOT[call.q.dtype]
        if call.q.dtype is torch.bfloat16 and INTERPRETED:
            dot = tl.float32  # the interpreter has no bfloat16 dot
        gate = (0, 0, 0) if call.log_gate is None else call.log_gate.stride()
        apart = (d for x in inputs.values() for d in (x.stride(0), x.stride(2)))
        constants = {
            **{f"{letter}T": x.stride(1) for letter, x in inputs.items()},
            "K": self.width_k,
            "V": self.width_v,
            "H": self.heads,
            "C": cfg.chunk,
            "BK": block_k,
            "BV": block_v,
            "EVEN": whole and not lengths and call.cu_seqlens is None,
            "MAP": call.feature_map,
            "CAUSAL": call.causal,
            "NORM": call.normalize,
            "GATED": call.log_gate is not None,
            "PACKED": call.cu_seqlens is not None,
            "LENGTHS": lengths,
            **more,
            "DOT": dot,
            "ACC": tl.float64 if call.q.dtype is torch.float64 else tl.float32,
            "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        }
        numbers = (call.eps, tokens, call.segment, segments, call.q.shape[0] * tokens, *gate, *apart)
        return Plan((programs,), numbers, constants, cfg.warps, cfg.stages, cfg.registers)

    def states(
        self, rows: Tensor, zrows: Tensor | None, init: tuple[Tensor, Tensor] | None, grows: Tensor | None
    ) -> None:  # fmt: skip
        """Sums of k and v by segment; zrows: there is one segment, and its sums are the result."""
        k, v = self.call.k, self.call.v
        split, some = zrows is None, init is not None

        def plan() -> Plan:
            cfg = self.config("states")
            inputs = {"K": k, "V": v}
            return self.plan(cfg, k.shape[1], cfg.block, tile_of(self.width_v), inputs, SPLIT=split, INIT=some)

        launch_by_key(
            (self.kind, split, some), states,
            (k, v, self.gate, rows, rows if zrows is None else zrows, *(init or (rows, rows)),
             rows if grows is None else grows, *self.where),
            plan,
        )  # fmt: skip

    def scan(
        self, x: Tensor, rows: Tensor, grows: Tensor | None, init: tuple[Tensor, Tensor] | None,
        final: tuple[Tensor, Tensor] | None, reverse: bool,
    ) -> None:  # fmt: skip
        """Scan the rows of every sequence of x, in place (causal), and put the last sums into `final`."""
        call = self.call
        packed = call.cu_seqlens is not None

        def plan() -> Plan:
            elements = rows.shape[2]
            segments = call.cut(x.shape[1])[1]
            unroll = 16 if packed else min(16, 1 << (segments - 1).bit_length())
            block = min(2048 // unroll, 512, tile_of(elements))
            constants = {
                "K": self.width_k, "V": self.width_v, "CAUSAL": call.causal, "REVERSE": reverse,
                "GATED": grows is not None, "PACKED": packed, "INIT": init is not None, "FINAL": final is not None,
                "U": unroll, "BE": block, "ACC": tl.float64 if rows.dtype is torch.float64 else tl.float32,
            }  # fmt: skip
            programs = call.sequences * self.heads * blocks_of(elements, block)
            return Plan((programs,), (call.segment, segments, self.heads), constants)

        launch_by_key(
            (self.kind, reverse, init is not None, final is not None), scan,
            (rows, rows if grows is None else grows, *(init or (rows, rows)), *(final or (rows, rows)), self.where[0]),
            plan,
        )  # fmt: skip

    def forward(
        self, o: Tensor, inv: Tensor | None, init: tuple[Tensor, Tensor] | None, final: tuple[Tensor, Tensor],
        split: bool,
    ) -> None:  # fmt: skip
        call = self.call
        some, save = init is not None, inv is not None

        def plan() -> Plan:
            cfg = self.config("forward")
            return self.plan(
                cfg, call.q.shape[1], tile_of(self.width_k), cfg.block, {"Q": call.q, "K": call.k, "V": call.v},
                SPLIT=split, INIT=some, SIGNED=call.signed, SAVE=save,
            )  # fmt: skip

        launch_by_key(
            (self.kind, split, some, save), forward,
            (call.q, call.k, call.v, self.gate, o, o if inv is None else inv, *(init or final), *final, *self.where),
            plan,
        )  # fmt: skip

    def backward_q(
        self, o: Tensor, inv: Tensor, pull: Tensor, dq: Tensor, qdq: Tensor | None,
        init: tuple[Tensor, Tensor] | None, start: tuple[Tensor, Tensor] | None, sums: tuple[Tensor, Tensor] | None,
        gsums: Tensor | None, split: bool,
    ) -> None:  # fmt: skip
        call, do = self.call, self.do
        some, started = init is not None, start is not None

        def plan() -> Plan:
            cfg = self.config("backward_q")
            if call.log_gate is not None:
                cfg = cfg._replace(block=self.config("backward_k").block)  # they meet in q·dq - k·dk
            inputs = {"Q": call.q, "K": call.k, "V": call.v, "O": do}
            return self.plan(
                cfg, call.q.shape[1], cfg.block, tile_of(self.width_v), inputs,
                SPLIT=split, INIT=some, SIGNED=call.signed, START=started,
            )  # fmt: skip

        none = inv, inv
        launch_by_key(
            (self.kind, split, some, started), backward_q,
            (call.q, call.k, call.v, self.gate, o, inv, do, pull, dq, inv if qdq is None else qdq,
             *(init or none), *(start or none), *(sums or none), inv if gsums is None else gsums, *self.where),
            plan,
        )  # fmt: skip

    def backward_kv(
        self, inv: Tensor, pull: Tensor, dk: Tensor, dv: Tensor, gates: tuple[Tensor, Tensor] | None,
        init: tuple[Tensor, Tensor] | None, ahead: Tensor | None, end: tuple[Tensor, Tensor],
        final: tuple[Tensor, Tensor] | None, split: bool,
    ) -> None:  # fmt: skip
        """gates: q·dq and d log_gate, by block of K."""
        call, do = self.call, self.do
        some, last = init is not None, final is not None
        none = inv, inv
        tensors = (
            call.q, call.k, call.v, self.gate, inv, do, pull, (gates or none)[0], dk, dv, (gates or none)[1],
            *(init or none), inv if ahead is None else ahead, *end, *(final or none), *self.where,
        )  # fmt: skip
        for name in ("backward_kv",) if self.merged() else ("backward_v", "backward_k"):

            def plan(name: str = name) -> Plan:
                cfg = self.config(name)
                block_k, block_v = tile_of(self.width_k), tile_of(self.width_v)
                if name == "backward_v":
                    block_v = cfg.block
                elif name == "backward_k":
                    block_k = cfg.block
                inputs = {"Q": call.q, "K": call.k, "V": call.v, "O": do}
                return self.plan(
                    cfg, call.k.shape[1], block_k, block_v, inputs,
                    SPLIT=split, INIT=some, DK=name != "backward_v", DV=name != "backward_k", FINAL=last,
                )  # fmt: skip

            launch_by_key((self.kind, name, split, some, last), backward_kv, tensors, plan)


def launch_forward(
    call: Call, init: tuple[Tensor, Tensor] | None, o: Tensor, s: Tensor, z: Tensor, inv: Tensor | None,
    rows: Tensor | None,
) -> None:  # fmt: skip
    """Fill o, s, z and, where given, one over each denominator.

    rows [slots, H, K·V + K], given where sequences are cut, end up (causal) with the state before each segment.
    """
    run = _Launcher(call)
    if rows is not None:
        grows = None if call.log_gate is None else rows.new_empty(rows.shape[:2])
        run.states(rows, None, None, grows)
        run.scan(call.k, rows, grows, init, None if call.causal else (s, z), False)
    elif not call.causal:
        run.states(s, z, init, None)
    if not call.causal:
        init = s, z
    elif rows is not None:
        init = rows, rows
    run.forward(o, inv, init, (s, z), call.causal and rows is not None)


def launch_backward(
    call: Call, do: Tensor, dend: tuple[Tensor, Tensor] | None, o: Tensor, end: tuple[Tensor, Tensor], inv: Tensor,
    init: tuple[Tensor, Tensor] | None, dq: Tensor, dk: Tensor, dv: Tensor, dinit: tuple[Tensor, Tensor] | None,
) -> Tensor | None:  # fmt: skip
    """Fill dq, dk, dv and, where given, the gradients of the initial state; returns that of log_gate.

    init: the states before each segment, before each sequence (one segment), or the full sums (not causal).
    end: the states after each sequence; dend: the gradients of those.
    """
    run = _Launcher(call, do)
    slots, _, split = call.cut(call.q.shape[1])
    pull = torch.empty_like(inv)
    grows = gates = sums = None
    after, first = dend, dinit
    if split:
        rows = inv.new_empty((slots, run.heads, run.width_k * (run.width_v + 1)))
        sums = rows, rows
    if call.log_gate is not None:
        parts = blocks_of(run.width_k, run.config("backward_k").block)
        gates = inv.new_empty((parts, *call.log_gate.shape)), inv.new_empty((parts, *call.log_gate.shape))
        grows = inv.new_empty((slots, run.heads))
    if not call.causal:  # R and r are the same after every token, and before
        after = dinit or (torch.empty_like(end[0]), torch.empty_like(end[1]))
        sums = sums or after
        first = None
    run.backward_q(
        o, inv, pull, dq, None if gates is None else gates[0], init, None if split or call.causal else dend, sums,
        grows, split,
    )  # fmt: skip
    if split:
        run.scan(call.q, rows, grows, dend, None if call.causal else after, True)
    if split and call.causal:
        after = sums
    run.backward_kv(inv, pull, dk, dv, gates, after, None if init is None else init[0], end, first, split)
    return None if gates is None else gates[1].sum(0)


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, s: Tensor, z: Tensor, o: Tensor,
    snew: Tensor, znew: Tensor, feature_map: str, signed: bool, normalize: bool, eps: float,
) -> None:  # fmt: skip
    """One token for every row and head; snew and znew may be s and z themselves."""
    b, h, width_k = q.shape
    width_v = v.shape[2]
    block_k = tile_of(width_k)
    block_v = min(tile_of(width_v), max(16, 4096 // block_k))
    g = q if log_gate is None else log_gate
    constants = {
        "K": width_k, "V": width_v, "BK": block_k, "BV": block_v, "MAP": feature_map, "SIGNED": signed,
        "NORM": normalize, "GATED": log_gate is not None, "INPLACE": snew is s,
        "ACC": tl.float64 if s.dtype is torch.float64 else tl.float32,
    }  # fmt: skip
    strides = tuple(d for x in (q, k, v, g, s, z) for d in x.stride()[:2])
    warps = min(4, max(1, block_k * block_v // 512))
    launch(step, (q, k, v, g, s, z, o, snew, znew), Plan((b * h,), (eps, h, *strides), constants, warps))
