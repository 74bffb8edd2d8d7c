# ruff: noqa: SIM300 (ACC is a parameter)
"""Rows of tokens in and out of tiles, and where a sequence's segments and heads are: for all kernels of this folder."""

import triton
import triton.language as tl


@triton.jit
def _mask(left, d0, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    m = (tl.arange(0, ROWS) < left)[:, None]
    if D % COLS != 0:
        m = m & ((d0 + tl.arange(0, COLS)) < D)[None, :]
    return m


@triton.jit
def load_rows(
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
def store_rows(
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
def load_column(ptr, t, left, stride, ROWS: tl.constexpr, ACC: tl.constexpr, other):
    r = tl.arange(0, ROWS)
    return tl.load(ptr + tl.cast(t, tl.int64) * stride + r * stride, mask=r < left, other=other).to(ACC)


@triton.jit
def load_gate(ptr, t, left, stride, ROWS: tl.constexpr, ACC: tl.constexpr):
    """log_gate of a chunk. Below the floor its exponential is zero anyway; sums stay small enough to subtract."""
    g = load_column(ptr, t, left, stride, ROWS, ACC, 0.0)
    if ACC == tl.float64:
        g = tl.maximum(g, -800.0)
    else:
        g = tl.maximum(g, -110.0)
    return g


@triton.jit
def rest_of(gate):
    """The sum of the log gates after each token: a sum from the end keeps the digits of the last ones."""
    return tl.minimum(tl.cumsum(gate, 0, reverse=True) - gate, 0.0)


@triton.jit
def locate(slot, cu, owner, lengths, T, L, NS, PACKED: tl.constexpr, LENGTHS: tl.constexpr):
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
def head_of(n, h, first, sb, st, sh, PACKED: tl.constexpr):
    """Where head h of sequence n begins in an input with these strides."""
    if PACKED:
        at = first * st
    else:
        at = n.to(tl.int64) * sb
    return at + h.to(tl.int64) * sh
