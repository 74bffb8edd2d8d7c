"""The kernel of `turned` and `turned_qkv`: a program turns BM heads of tokens, of q or of k, or copies those of v.

Legend: B batch, T tokens, H heads, R = B·T·H heads of tokens, HALF half the width of a head, W its next power of two.
"""

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, blocks_of, launch

TILE = 2048  # pairs of channels of a program: 16 for each thread
WARPS = 4


@triton.jit
def _turn(
    x, y, cos, sin, r, there, b, t, h, xb, xt, xh, yb, yt, yh, T,
    HALF: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, W)
    there = there[:, None] & (d < HALF)[None, :]
    table = (b * T + t if ROWS else t)[:, None] * HALF + d[None, :]
    c = tl.load(cos + table, mask=there, other=0.0)
    s = tl.load(sin + table, mask=there, other=0.0) * WAY
    x += (b * xb + t * xt + h * xh)[:, None] + d[None, :]
    y += (b * yb + t * yt + h * yh)[:, None] + d[None, :]
    a = tl.load(x, mask=there, other=0.0).to(tl.float32)
    e = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    tl.store(y, (a * c - e * s).to(y.dtype.element_ty), mask=there)
    tl.store(y + HALF, (a * s + e * c).to(y.dtype.element_ty), mask=there)


@triton.jit
def turn(
    q, k, v, yq, yk, yv, cos, sin, R, T, qb, qt, qh, kb, kt, kh, vb, vt, vh, yb, yt, yh, yvh,
    H: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, V: tl.constexpr, VW: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """yq and yk are q and k turned, yv is v. The results of one token lie in one row, or are those of q alone."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    there = r < R
    h, token = (r % H).to(tl.int64), r // H
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        _turn(q, yq, cos, sin, r, there, b, t, h, qb, qt, qh, yb, yt, yh, T, HALF, W, ROWS, WAY)
    elif part == 1:
        _turn(k, yk, cos, sin, r, there, b, t, h, kb, kt, kh, yb, yt, yh, T, HALF, W, ROWS, WAY)
    else:
        d = tl.arange(0, VW)
        within = there[:, None] & (d < V)[None, :]
        x = tl.load(v + (b * vb + t * vt + h * vh)[:, None] + d[None, :], mask=within, other=0.0)
        tl.store(yv + (b * yb + t * yt + h * yvh)[:, None] + d[None, :], x, mask=within)


def turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """x [B, T, H, D], turned, contiguous"""
    y = x.new_empty(x.shape)
    _launch((x, x, x), (y, y, y), cos, sin, way, parts=1)
    return y


def turned_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor) -> None:
    """Fill dqkv [B, T, H·(2·K + V)] with the gradients of q and k [B, T, H, K], turned back, and of v [B, T, H, V]."""
    keys, heads = dq.shape[2] * dq.shape[3], dq.shape[2]
    yq, yk, yv = dqkv.split_with_sizes((keys, keys, dqkv.shape[2] - 2 * keys), -1)
    views = tuple(y.unflatten(-1, (heads, -1)) for y in (yq, yk, yv))
    _launch((dq, dk, dv), views, cos, sin, -1, parts=3)


def _launch(x: tuple[Tensor, ...], y: tuple[Tensor, ...], cos: Tensor, sin: Tensor, way: int, parts: int) -> None:
    x = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in x)
    batch, tokens, heads, width = x[0].shape
    half, values = width // 2, x[2].shape[3]
    wide, tall = triton.next_power_of_2(half), triton.next_power_of_2(values)
    rows = batch * tokens * heads
    block = max(1, TILE // max(wide, tall // 2 if parts == 3 else 1))
    strides = [s for t in x for s in t.stride()[:3]]
    numbers = (rows, tokens, *strides, *y[0].stride()[:3], y[2].stride(2))
    constants = {
        "H": heads, "HALF": half, "W": wide, "V": values, "VW": tall, "BM": block, "ROWS": cos.dim() == 4, "WAY": way,
    }  # fmt: skip
    launch(turn, (*x, *y, cos, sin), Plan((blocks_of(rows, block), parts), numbers, constants, WARPS, 1))
