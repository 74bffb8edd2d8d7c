"""The kernel of `linear_deferred`: one head of one row a program.

Legend: B batch, H heads, K key width, V value width, GROUP tokens between two writes of S.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.linear_deferred import GROUP
from subquad.ops.linear_triton import Config, _phi, _power, _start

TILE = 1024  # numbers of S a warp holds: with fewer, what concerns the whole head is computed by more warps than needed


@triton.jit
def step(
    q, k, v, s, z, keys, values, start, position, o,
    eps, H, qb, qh, kb, kh, vb, vh, sb, sh, zb, zh, wb, wn, wh, xb, xn, xh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """S is loaded before anything is waited for, and stored by the last token of a group."""
    pid = tl.program_id(0)
    b = (pid // H).to(tl.int64)
    h = (pid % H).to(tl.int64)
    dk = tl.arange(0, BK)
    dn = tl.arange(0, GROUP)
    some = dk < K
    s += b * sb + h * sh
    cols = tl.arange(0, BV)
    x = tl.load(s + dk[:, None] * V + cols[None, :], mask=some[:, None] & (cols < V)[None, :], other=0.0)
    n = ((tl.load(position + b) - tl.load(start + b)) & (GROUP - 1)).to(tl.int32)
    raw = tl.load(k + b * kb + h * kh + dk, mask=some, other=0.0)
    qf = tl.where(some, _phi(tl.load(q + b * qb + h * qh + dk, mask=some, other=0.0).to(tl.float32), MAP), 0.0)
    kf = tl.where(some, _phi(raw.to(tl.float32), MAP), 0.0)
    z += b * zb + h * zh
    zx = tl.load(z + dk, mask=some, other=0.0) + kf
    keys += b * wb + h * wh
    values += b * xb + h * xh
    queued = (dn < n)[:, None] & some[None, :]
    waiting = tl.load(keys + dn[:, None] * wn + dk[None, :], mask=queued, other=0.0).to(tl.float32)
    waiting = tl.where(queued, _phi(waiting, MAP), 0.0)
    scores = tl.sum(waiting * qf[None, :], 1)  # [GROUP]
    own = tl.sum(qf * kf, 0)
    d = tl.sum(qf * zx, 0)
    if NORM:
        if SIGNED:
            d = tl.where(d < 0.0, -tl.maximum(-d, eps), tl.maximum(d, eps))
        else:
            d = d + eps
    tl.store(z + dk, zx, mask=some)
    if n < GROUP - 1:
        tl.store(keys + n * wn + dk, raw, mask=some)
    for v0 in tl.static_range(0, V, BV):
        dv = v0 + cols
        inside = some[:, None] & (dv < V)[None, :]
        mine = tl.load(v + b * vb + h * vh + dv, mask=dv < V, other=0.0)
        vx = mine.to(tl.float32)
        row = (dn < n)[:, None] & (dv < V)[None, :]
        theirs = tl.load(values + dn[:, None] * xn + dv[None, :], mask=row, other=0.0).to(tl.float32)
        y = tl.sum(qf[:, None] * x, 0) + tl.sum(scores[:, None] * theirs, 0) + own * vx
        if NORM:
            y = y / d
        tl.store(o + (b * H + h) * V + dv, y.to(o.dtype.element_ty), mask=dv < V)
        if n < GROUP - 1:
            tl.store(values + n * xn + dv, mine, mask=dv < V)
        else:
            for j in tl.static_range(GROUP - 1):
                kj = tl.load(keys + j * wn + dk, mask=some, other=0.0).to(tl.float32)
                vj = tl.load(values + j * xn + dv, mask=dv < V, other=0.0).to(tl.float32)
                x += tl.where(some, _phi(kj, MAP), 0.0)[:, None] * vj[None, :]
            x += kf[:, None] * vx[None, :]
            tl.store(s + dk[:, None] * V + dv[None, :], x, mask=inside)
        if v0 + BV < V:
            ahead = dv + BV
            more = some[:, None] & (ahead < V)[None, :]
            x = tl.load(s + dk[:, None] * V + ahead[None, :], mask=more, other=0.0)


def warps(block_k: int, block_v: int) -> int:
    return max(1, block_k * block_v // TILE)


def launch(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, keys: Tensor, values: Tensor, start: Tensor,
    position: Tensor, o: Tensor, feature_map: str, signed: bool, normalize: bool, eps: float,
) -> None:  # fmt: skip
    """One token for every row and head."""
    if not (s[0, 0].is_contiguous() and z.stride(-1) == 1 and s.dtype == torch.float32):
        raise ValueError(f"s is {s.dtype} with strides {s.stride()}: accepted is float32, K and V contiguous")
    b, h, width_k = q.shape
    width_v = v.shape[2]
    block_k = _power(width_k)
    block_v = min(_power(width_v), max(16, 4096 // block_k))
    constants = {
        "K": width_k, "V": width_v, "BK": block_k, "BV": block_v, "GROUP": GROUP, "MAP": feature_map,
        "SIGNED": signed, "NORM": normalize,
    }  # fmt: skip
    strides = [d for x in (q, k, v, s, z) for d in x.stride()[:2]]
    strides += [d for x in (keys, values) for d in x.stride()[:3]]
    _start(
        step, b * h, (q, k, v, s, z, keys, values, start, position, o), (eps, h, *strides), constants,
        Config(0, 0, warps(block_k, block_v), 1),
    )  # fmt: skip
