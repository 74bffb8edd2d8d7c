# ruff: noqa: SIM102 (a compile-time test and a run-time one stay apart)
"""The backward pass of linear attention with a gate for each head: states walk, gradients do not.

    walk         S and z before each chunk, from k and v; and once more, back, R and r after each chunk, from q and do
    gradients    dq, dk, dv and d log_gate of one chunk, from one read of q, k, v, do and the states around it

`walk` starts each segment of R from nothing, since it runs before `scan` adds up what the segments gave: `gradients`
adds the R after the segment, decayed to its chunk. d log_gate needs S and R at the same place, so that a walk which
makes the gradients on its way would keep one of them for each chunk anyway.

Symbols and arguments are those of `kernels_triton`. The denominator 1/w and its pull p act like one more column of
v, for values of one: o = num·w, so num has the gradient do·w and the denominator p·w.
"""

import triton
import triton.language as tl

from subquad.ops.linear.kernels_triton import features, fit, pull_of, state_of
from subquad.ops.linear.maps_triton import phi_pull
from subquad.ops.linear.tiles_triton import head_of, load_column, load_gate, load_rows, locate, rest_of, store_rows


@triton.jit
def _chunk_of(n, h, first, T, H, C: tl.constexpr, PACKED: tl.constexpr):
    """The place of the first chunk of sequence n and head h in what is kept for each chunk, [chunks, H, ...]."""
    if PACKED:
        at = (first // C + n) * H + h
    else:
        at = n.to(tl.int64) * ((T + C - 1) // C) * H + h
    return at


@triton.jit
def walk(
    x, y, g, o, inv, pull, kept, zkept, reach, init, zinit, sums, zsums, gsums, cu, owner, lengths,
    eps, T, L, NS, SLOTS, gb, gt, gh, xb, xh, yb, yh,
    XT: tl.constexpr, YT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, SIGNED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr,
    BACK: tl.constexpr, WITH_Z: tl.constexpr, FINAL: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """S and z before each chunk of a segment, where x and y are k and v. BACK: R and r after it, x and y are q and do.

    S begins with the state before the segment (SPLIT: in row `slot` of `init`). R begins with zeros where SPLIT, and
    then what it adds up goes to the row of the segment before this one, that of the first segment (FINAL) to SLOTS + n;
    the log gates that act on R after each chunk go to `reach`. Otherwise R begins with `init`, and what is before the
    first token goes to row n (FINAL). The pull of each token is written on the way.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    slot = pid // (NK * H)
    h = (pid // NK) % H
    k0 = (pid % NK) * BK
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    x += head_of(n, h, first, xb, XT, xh, PACKED)
    y += head_of(n, h, first, yb, YT, yh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    o += (first * H + h) * V
    inv += first * H + h
    pull += first * H + h
    chunk = _chunk_of(n, h, first, T, H, C, PACKED)
    kept += chunk * (K * V)
    zkept += chunk * K
    reach += chunk

    dk = k0 + tl.arange(0, BK)
    dv = tl.arange(0, BV)
    tile = dk[:, None] * V + dv[None, :]
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    turned = dv[:, None] * K + dk[None, :]
    fits = (dv < V)[:, None] & (dk < K)[None, :]
    s = tl.zeros([BV, BK], ACC)
    z = tl.zeros([BK], ACC)
    if INIT:
        row = n
        if SPLIT:
            row = slot
        before, zbefore = state_of(init, zinit, row, h, H, K, V, SPLIT)
        s += tl.trans(tl.load(before + tile, mask=inside, other=0.0))
        if WITH_Z:
            z += tl.load(zbefore + dk, mask=dk < K, other=0.0)
    i = tl.arange(0, C)
    start = j * L
    stop = tl.minimum(start + L, size)
    chunks = (stop - start + C - 1) // C
    total = 0.0
    if BACK and NORM:  # Triton loads ahead what a dot takes, and that is not o
        t = tl.maximum(start + (chunks - 1) * C, start)
        ox = load_rows(o, t, real - t, H * V, 0, V, C, BV, EVEN)
    for c in range(chunks):
        if BACK:
            t = start + (chunks - 1 - c) * C
        else:
            t = start + c * C
        left = real - t
        at = tl.cast(t // C, tl.int64) * H
        tl.store(kept + at * (K * V) + turned, s.to(kept.dtype.element_ty), mask=fits)
        if WITH_Z:
            tl.store(zkept + at * K + dk, z, mask=dk < K)
        f = features(x, t, left, XT, k0, MAP, K, C, BK, EVEN, ACC)
        yx = load_rows(y, t, left, YT, 0, V, C, BV, EVEN)
        gate = load_gate(g, t, left, gt, C, ACC)
        whole = tl.sum(gate, 0)
        s = s * tl.exp(whole)
        if BACK:
            if SPLIT:
                if k0 == 0:
                    tl.store(reach + at, total)
                total += whole
            f = f * tl.exp(tl.cumsum(gate, 0))[:, None]
            if NORM:
                w = load_column(inv, t, left, H, C, ACC, 0.0)
                p = pull_of(yx, ox, w, eps, SIGNED)
                ahead = tl.maximum(t - C, start)
                ox = load_rows(o, ahead, real - ahead, H * V, 0, V, C, BV, EVEN)
                if k0 == 0:
                    tl.store(pull + (tl.cast(t, tl.int64) + i) * H, p, mask=i < left)
                f = f * w[:, None]
            if WITH_Z:
                z = z * tl.exp(whole)
                if NORM:
                    z += tl.sum(f * p[:, None], 0)
        else:
            f = f * tl.exp(rest_of(gate))[:, None]
            if WITH_Z:
                z = z * tl.exp(whole) + tl.sum(f, 0)
        fx, scale = fit(f, DOT)
        s += tl.dot(tl.trans(yx.to(DOT)), fx, input_precision=PREC, out_dtype=ACC) * scale

    if BACK and (SPLIT or FINAL):
        row = n
        if SPLIT:
            row = tl.where(j == 0, SLOTS + n, slot - 1)
        if FINAL or j != 0:
            after, zafter = state_of(sums, zsums, row, h, H, K, V, SPLIT)
            tl.store(after + tile, tl.trans(s), mask=inside)
            if WITH_Z:
                tl.store(zafter + dk, z, mask=dk < K)
            if SPLIT:
                if k0 == 0:
                    tl.store(gsums + row.to(tl.int64) * H + h, total)


@triton.jit
def _operand(
    ptr, t, left, stride: tl.constexpr, d0, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """φ of rows. DIRECT: the identity is the loaded tile itself, since no loop loads the next one over it."""
    if DIRECT and MAP == "identity":
        x = load_rows(ptr, t, left, stride, d0, D, ROWS, COLS, EVEN)
    else:
        x = features(ptr, t, left, stride, d0, MAP, D, ROWS, COLS, EVEN, ACC)
    return x.to(DOT)


@triton.jit
def _wide(
    x, ptr, t, left, stride: tl.constexpr, d0, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The operand x in ACC; where it was computed it is computed again, which takes fewer registers than keeping it."""
    if MAP == "identity":
        f = x.to(ACC)
    else:
        f = features(ptr, t, left, stride, d0, MAP, D, ROWS, COLS, EVEN, ACC)
    return f


@triton.jit
def _block(ptr, v0, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """A block [BV, BK] of a kept state."""
    cv = v0 + tl.arange(0, BV)
    ck = k0 + tl.arange(0, BK)
    return tl.load(ptr + cv[:, None] * K + ck[None, :], mask=(cv < V)[:, None] & (ck < K)[None, :], other=0.0)


@triton.jit
def _block_after(
    after, rows, far, v0, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SPLIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A block [BV, BK] of R after a chunk: what the segment gave, and what comes after the segment."""
    r = _block(after, v0, k0, K, V, BK, BV).to(ACC)
    if SPLIT:
        if far > -104.0:
            cv = v0 + tl.arange(0, BV)
            ck = k0 + tl.arange(0, BK)
            tile = ck[:, None] * V + cv[None, :]
            r += tl.trans(tl.load(rows + tile, mask=(ck < K)[:, None] & (cv < V)[None, :], other=0.0)) * tl.exp(far)
    return r


@triton.jit
def gradients(
    q, k, v, g, inv, do, pull, before, zbefore, after, zafter, reach, rows, dq, dk, dv, dg, cu, owner, lengths,
    T, L, NS, gb, gt, gh, qb, qh, kb, kh, vb, vh, ob, oh,
    QT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, OT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr, WITH_Z: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv and d log_gate of one chunk, by blocks of BK and BV columns; what fits one block is read once.

    d log_gateₜ is the sum of all that passes through that gate: from the state before the chunk to R after it, from
    that state to queries from t on, from keys before t to R, and from keys before t to queries from t on. R after the
    segment is in row `slot` of `rows` (SPLIT), and too far away to matter where exp(reach) is zero.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    ONE: tl.constexpr = NK * NV == 1
    pid = tl.program_id(0)
    h = pid % H
    chunks = (L + C - 1) // C
    slot = pid // H // chunks
    n, j, first, size, real, segments = locate(slot, cu, owner, lengths, T, L, NS, PACKED, LENGTHS)
    if j >= segments:
        return
    t = j * L + (pid // H % chunks) * C
    if t >= size:
        return
    q += head_of(n, h, first, qb, QT, qh, PACKED)
    k += head_of(n, h, first, kb, KT, kh, PACKED)
    v += head_of(n, h, first, vb, VT, vh, PACKED)
    g += head_of(n, h, first, gb, gt, gh, PACKED)
    do += head_of(n, h, first, ob, OT, oh, PACKED)
    dq += (first * H + h) * K
    dk += (first * H + h) * K
    dv += (first * H + h) * V
    dg += first * H + h
    inv += first * H + h
    pull += first * H + h
    chunk = _chunk_of(n, h, first, T, H, C, PACKED) + tl.cast(t // C, tl.int64) * H
    before += chunk * (K * V)
    after += chunk * (K * V)
    left = real - t
    i = tl.arange(0, C)
    far = 0.0
    zrows = rows
    if SPLIT:
        far = tl.load(reach + chunk)
        rows, zrows = state_of(rows, rows, slot, h, H, K, V, True)
    through = 0.0
    if ONE:
        r = _block_after(after, rows, far, 0, 0, K, V, BK, BV, SPLIT, ACC)
        s = _block(before, 0, 0, K, V, BK, BV)
        through += tl.sum(tl.sum(r * s.to(ACC), 1), 0)
        rx, rscale = fit(r, DOT)
        sx, sscale = fit(s.to(ACC), DOT)
        kx = _operand(k, t, left, KT, 0, MAP, K, C, BK, EVEN, True, DOT, ACC)
        qx = _operand(q, t, left, QT, 0, MAP, K, C, BK, EVEN, True, DOT, ACC)
        vx = load_rows(v, t, left, VT, 0, V, C, BV, EVEN).to(DOT)
        dox = load_rows(do, t, left, OT, 0, V, C, BV, EVEN).to(DOT)

    gate = load_gate(g, t, left, gt, C, ACC)
    age = tl.cumsum(gate, 0)
    rest = tl.exp(rest_of(gate))
    seen = tl.exp(age)
    fade = tl.exp(tl.minimum(age[None, :] - age[:, None], 0.0))  # [C keys, C queries]
    fade = tl.where(i[:, None] <= i[None, :], fade, 0.0)
    if NORM:
        w = load_column(inv, t, left, H, C, ACC, 0.0)
        p = load_column(pull, t, left, H, C, ACC, 0.0)
        seen = seen * w
        fade = fade * w[None, :]
    a = tl.zeros([C, C], ACC)
    for c in tl.range(0, NK, num_stages=1):
        if not ONE:
            kx = _operand(k, t, left, KT, c * BK, MAP, K, C, BK, EVEN, False, DOT, ACC)
            qx = _operand(q, t, left, QT, c * BK, MAP, K, C, BK, EVEN, False, DOT, ACC)
        a += tl.dot(kx, tl.trans(qx), input_precision=PREC, out_dtype=ACC)
    a = a * fade
    da = tl.zeros([C, C], ACC)
    for b in tl.range(0, NV, num_stages=1):
        if not ONE:
            vx = load_rows(v, t, left, VT, b * BV, V, C, BV, EVEN).to(DOT)
            dox = load_rows(do, t, left, OT, b * BV, V, C, BV, EVEN).to(DOT)
        da += tl.dot(vx, tl.trans(dox), input_precision=PREC, out_dtype=ACC)
    if NORM:
        da += p[None, :]
    flow = tl.where(i[:, None] < i[None, :], a * da, 0.0)
    push = tl.sum(flow, 0) - tl.sum(flow, 1)
    ax, ascale = fit(a, DOT)
    dax, dascale = fit(da * fade, DOT)

    for b in tl.range(0, NV, num_stages=1):
        gv = tl.zeros([C, BV], ACC)
        for c in tl.range(0, NK, num_stages=1):
            if not ONE:
                kx = _operand(k, t, left, KT, c * BK, MAP, K, C, BK, EVEN, False, DOT, ACC)
                r = _block_after(after, rows, far, b * BV, c * BK, K, V, BK, BV, SPLIT, ACC)
                rx, rscale = fit(r, DOT)
            gv += tl.dot(kx, tl.trans(rx), input_precision=PREC, out_dtype=ACC) * rscale
        if not ONE:
            dox = load_rows(do, t, left, OT, b * BV, V, C, BV, EVEN).to(DOT)
        gv = gv * rest[:, None]
        gv += tl.dot(ax, dox, input_precision=PREC, out_dtype=ACC) * ascale
        store_rows(dv, gv, t, size - t, H * V, b * BV, V, C, BV, EVEN)

    passed = tl.zeros([C], ACC)
    for c in tl.range(0, NK, num_stages=1):
        k0 = c * BK
        gk = tl.zeros([C, BK], ACC)
        for b in tl.range(0, NV, num_stages=1):
            if not ONE:
                vx = load_rows(v, t, left, VT, b * BV, V, C, BV, EVEN).to(DOT)
                r = _block_after(after, rows, far, b * BV, k0, K, V, BK, BV, SPLIT, ACC)
                through += tl.sum(tl.sum(r * _block(before, b * BV, k0, K, V, BK, BV).to(ACC), 1), 0)
                rx, rscale = fit(r, DOT)
            gk += tl.dot(vx, rx, input_precision=PREC, out_dtype=ACC) * rscale
        if WITH_Z:
            ck = k0 + tl.arange(0, BK)
            z = tl.load(zbefore + chunk * K + ck, mask=ck < K, other=0.0)
            rz = tl.load(zafter + chunk * K + ck, mask=ck < K, other=0.0)
            if SPLIT:
                rz += tl.load(zrows + ck, mask=ck < K, other=0.0) * tl.exp(far)
            through += tl.sum(rz * z, 0)
            gk += rz[None, :]
        if not ONE:
            kx = _operand(k, t, left, KT, k0, MAP, K, C, BK, EVEN, False, DOT, ACC)
            qx = _operand(q, t, left, QT, k0, MAP, K, C, BK, EVEN, False, DOT, ACC)
        gk = gk * rest[:, None]
        f = _wide(kx, k, t, left, KT, k0, MAP, K, C, BK, EVEN, ACC)
        passed += tl.sum(f * gk, 1)
        gk += tl.dot(dax, qx, input_precision=PREC, out_dtype=ACC) * dascale
        gk = phi_pull(gk, f, MAP)
        if not EVEN:
            gk = tl.where((i < left)[:, None], gk, 0.0)
        store_rows(dk, gk, t, size - t, H * K, k0, K, C, BK, EVEN)

        gq = tl.zeros([C, BK], ACC)
        for b in tl.range(0, NV, num_stages=1):
            if not ONE:
                dox = load_rows(do, t, left, OT, b * BV, V, C, BV, EVEN).to(DOT)
                sx, sscale = fit(_block(before, b * BV, k0, K, V, BK, BV).to(ACC), DOT)
            gq += tl.dot(dox, sx, input_precision=PREC, out_dtype=ACC) * sscale
        if NORM:
            gq += p[:, None] * z[None, :]
        gq = gq * seen[:, None]
        f = _wide(qx, q, t, left, QT, k0, MAP, K, C, BK, EVEN, ACC)
        push += tl.sum(f * gq, 1)
        gq += tl.dot(tl.trans(dax), kx, input_precision=PREC, out_dtype=ACC) * dascale
        store_rows(dq, phi_pull(gq, f, MAP), t, size - t, H * K, k0, K, C, BK, EVEN)

    through = through * tl.exp(tl.sum(gate, 0))
    here = through + tl.cumsum(push, 0, reverse=True) + (tl.cumsum(passed, 0) - passed)
    tl.store(dg + (tl.cast(t, tl.int64) + i) * H, tl.where(i < left, here, 0.0), mask=i < size - t)
