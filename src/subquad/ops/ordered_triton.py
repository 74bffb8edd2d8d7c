"""The Triton path of `ordered.ordered_attention`: flash attention whose rows are read through an index.

A program holds a tile of the ordered queries (forward, dq) or keys (dkv), and loops over the range of the other side
that its tile table names. Results are written where the index says, so nothing is written twice and no sum is atomic.
Rounds are softmaxes over disjoint sets of keys: forward merges them by their log-sum-exp, backward adds them up one
after the other. All exponentials are in base 2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, fitting, launch, shared_memory, tile_of
from subquad.ops.sparse.kernels import LN2, LOG2E, _rows, _store

EPS = tl.constexpr(1e-6)  # of the length of a key, as in torch.nn.functional.normalize

# Arguments that change with the length. Triton must not compile another kernel if they are 1 or a multiple of 16.
CHANGING = ["T", "S", "P", "places", "tiles", "round0", "row", "k_row", "k_add"]


@triton.jit
def _masked(
    s, i, j, ok, shift, query_code, key_code, r, R: tl.constexpr, CODES: tl.constexpr, AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The scores of the tokens i and j that are visible in round r and in no earlier one. Query i is key i + shift."""
    if CAUSAL and APART:
        ok = ok & (j < i + shift)
    elif CAUSAL:
        ok = ok & (j <= i + shift)
    elif APART:
        ok = ok & (j != i + shift)
    s = tl.where(ok, s, float("-inf"))
    if CODES:
        gap = tl.load(query_code + i * R + r) - tl.load(key_code + j * R + r)
        s = tl.where((gap >= -AHEAD) & (gap <= 1), s, float("-inf"))
        for e in tl.static_range(R - 1):
            if e < r:
                gap = tl.load(query_code + i * R + e) - tl.load(key_code + j * R + e)
                s = tl.where((gap < -AHEAD) | (gap > 1), s, float("-inf"))
    return s


@triton.jit(do_not_specialize=["T"])
def one_over_lengths(
    x, into, x_batch, x_head, T, x_stride: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """1/|x| of every row: x [B, T, H, D] -> [B, H, T]."""
    h = tl.program_id(1) % H
    b = (tl.program_id(1) // H).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = _rows(x + b * x_batch + h * x_head, i, i < T, x_stride, D, BD).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), EPS)
    tl.store(into + (b * H + h) * T + i, 1 / length, mask=i < T)


@triton.jit
def _program(tiles, H: tl.constexpr, R: tl.constexpr, round0):
    """Batch row, head and round of this program, and the number of its row of the index."""
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    r = round0 + tl.program_id(1)
    return b, h, r, (b * H + h) * R + r


@triton.jit
def _tile(table, g, tiles):
    """The first and the end of the tile, and of the range of the other side."""
    entry = table + (g * tiles + tl.program_id(0) % tiles) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit(do_not_specialize=CHANGING)
def forward(
    q, k, v, query, key, query_code, key_code, lengths, table, o, low, lse,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, scale, T, S, P, places, tiles, round0, row,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, CODES: tl.constexpr, AHEAD: tl.constexpr, CAUSAL: tl.constexpr,
    APART: tl.constexpr, UNIT: tl.constexpr, LISTS: tl.constexpr, LOW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile of queries in one round: o [R, B, row, H, D] and lse [R, B, H, row], by token or by place.
    LOW: also what the type of o cannot hold of it."""
    b, h, r, g = _program(tiles, H, R, round0)
    start, stop, lo, hi = _tile(table, g, tiles)
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    query_code += (b * H + h) * T * R
    key_code += (b * H + h) * S * R
    lengths += (b * H + h) * S
    a = start + tl.arange(0, BM)
    here = a < stop
    i = tl.load(query + g * P + a, mask=here, other=0)
    alive = here & (i >= 0)
    i = tl.maximum(i, 0)
    qt = _rows(q, i, alive, q_stride, D, BD)
    m = tl.full([BM], float("-inf"), tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for at in tl.range(lo, hi, BN):
        p = at + tl.arange(0, BN)
        j = tl.load(key + g * places + p, mask=p < hi, other=-1)
        ok = j >= 0
        j = tl.maximum(j, 0)
        kt = _rows(k, j, ok, k_stride, D, BD)
        s = tl.dot(qt, kt.T, input_precision=PRECISION) * scale
        if UNIT:
            s = s * tl.load(lengths + j)[None, :]
        s = _masked(
            s, i[:, None], j[None, :], ok[None, :], S - T, query_code, key_code, r, R, CODES, AHEAD, CAUSAL, APART
        )  # fmt: skip
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        z = z * fade + tl.sum(w, 1)
        vt = _rows(v, j, ok, v_stride, D, BD)
        acc = tl.dot(w.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
        m = top
    some = (z > 0) & alive
    z = tl.where(some, z, 1.0)
    at = a if LISTS else i
    batches = tl.num_programs(0) // tiles // H
    o += ((r * batches + b) * row * H + h) * D
    lse += ((r * batches + b) * H + h) * row
    acc = tl.where(some[:, None], acc / z[:, None], 0.0)
    _store(o, at, here, acc, H * D, D, BD)
    if LOW:
        low += (b * row * H + h) * D
        _store(low, at, here, acc - acc.to(o.dtype.element_ty).to(tl.float32), H * D, D, BD)
    tl.store(lse + at, tl.where(some, m + tl.log2(z), float("-inf")), mask=here)


@triton.jit(do_not_specialize=CHANGING)
def merge(
    part, part_lse, v, o, lse, v_batch, v_head, T, v_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One softmax from those of the rounds. APART: a token that sees nothing gets its own value."""
    h = tl.program_id(1) % H
    b = (tl.program_id(1) // H).to(tl.int64)
    batches = (tl.num_programs(1) // H).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    here = i < T
    top = tl.full([BM], float("-inf"), tl.float32)
    for r in tl.static_range(R):
        top = tl.maximum(top, tl.load(part_lse + ((r * batches + b) * H + h) * T + i, mask=here, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for r in tl.static_range(R):
        one = tl.load(part_lse + ((r * batches + b) * H + h) * T + i, mask=here, other=float("-inf"))
        w = tl.exp2(one - base)
        z += w
        acc += w[:, None] * _rows(part + ((r * batches + b) * T * H + h) * D, i, here, H * D, D, BD).to(tl.float32)
    some = z > 0
    z = tl.where(some, z, 1.0)
    acc = acc / z[:, None]
    if APART:
        alone = here & (some == 0)
        acc += _rows(v + b * v_batch + h * v_head, i, alone, v_stride, D, BD).to(tl.float32)
    _store(o + (b * T * H + h) * D, i, here, acc, H * D, D, BD)
    tl.store(lse + (b * H + h) * T + i, tl.where(some, base + tl.log2(z), float("-inf")), mask=here)


@triton.jit(do_not_specialize=CHANGING)
def dq_of(
    q, k, v, query, key, query_code, key_code, lengths, table, o, low, do, lse, delta, share, before, into,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, do_batch, do_head, scale, T, S, P, places, tiles, round0, row,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, do_stride: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, CODES: tl.constexpr, AHEAD: tl.constexpr, CAUSAL: tl.constexpr,
    APART: tl.constexpr, UNIT: tl.constexpr, LISTS: tl.constexpr, LOW: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries from one round. The first also writes delta = Σ do·o, which the other passes read; the
    others add to `before`. LISTS: a place has `share` of its token's do."""
    b, h, r, g = _program(tiles, H, R, round0)
    start, stop, lo, hi = _tile(table, g, tiles)
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    query_code += (b * H + h) * T * R
    key_code += (b * H + h) * S * R
    lengths += (b * H + h) * S
    a = start + tl.arange(0, BM)
    here = a < stop
    i = tl.load(query + g * P + a, mask=here, other=0)
    alive = here & (i >= 0)
    i = tl.maximum(i, 0)
    at = a if LISTS else i
    qt = _rows(q, i, alive, q_stride, D, BD)
    dot = _rows(do + b * do_batch + h * do_head, i, alive, do_stride, D, BD)
    if LISTS:
        part = tl.load(share + (b * H + h) * T + i, mask=alive, other=0.0)
    norm = tl.load(lse + (b * H + h) * row + at, mask=alive, other=float("-inf"))
    norm = tl.where(norm == float("-inf"), float("inf"), norm)
    if round0 == 0:
        ot = _rows(o + (b * row * H + h) * D, at, alive, H * D, D, BD).to(tl.float32)
        if LOW:  # of one key with most of the weight, dp - delta is the difference of almost equal numbers
            ot += _rows(low + (b * row * H + h) * D, at, alive, H * D, D, BD).to(tl.float32)
        d = tl.sum(ot * dot.to(tl.float32), 1)
        if LISTS:
            d = d * part
        tl.store(delta + (b * H + h) * row + at, d, mask=here)
    else:
        d = tl.load(delta + (b * H + h) * row + at, mask=alive, other=0.0)
    grad = tl.zeros([BM, BD], tl.float32)
    for f in tl.range(lo, hi, BN):
        p = f + tl.arange(0, BN)
        j = tl.load(key + g * places + p, mask=p < hi, other=-1)
        ok = j >= 0
        j = tl.maximum(j, 0)
        kt = _rows(k, j, ok, k_stride, D, BD)
        vt = _rows(v, j, ok, v_stride, D, BD)
        s = tl.dot(qt, kt.T, input_precision=PRECISION) * scale
        if UNIT:
            length = tl.load(lengths + j)
            s = s * length[None, :]
        s = _masked(
            s, i[:, None], j[None, :], ok[None, :], S - T, query_code, key_code, r, R, CODES, AHEAD, CAUSAL, APART
        )  # fmt: skip
        dp = tl.dot(dot, vt.T, input_precision=PRECISION)
        if LISTS:
            dp = dp * part[:, None]
        ds = tl.exp2(s - norm[:, None]) * (dp - d[:, None])
        if UNIT:
            ds = ds * length[None, :]
        grad = tl.dot(ds.to(kt.dtype), kt, grad, input_precision=PRECISION)
    grad = grad * (scale * LN2)
    place = (b * row * H + h) * D
    grad += _rows(before + place, at, here & (round0 > 0), H * D, D, BD).to(tl.float32)
    _store(into + place, at, here, grad, H * D, D, BD)


@triton.jit(do_not_specialize=CHANGING)
def dkv_of(
    q, k, v, query, key, query_code, key_code, lengths, table, do, lse, delta, share, k_before, k_into, v_before,
    v_into,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, do_batch, do_head, scale, T, S, P, places, tiles, round0, row,
    k_row, k_add,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, do_stride: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, CODES: tl.constexpr, AHEAD: tl.constexpr, CAUSAL: tl.constexpr,
    APART: tl.constexpr, UNIT: tl.constexpr, LISTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys from one round, added to those before; dk of the first round only with `k_add`.
    APART: a token that sees nothing gave its own value, which the first round counts."""
    b, h, r, g = _program(tiles, H, R, round0)
    start, stop, lo, hi = _tile(table, g, tiles)
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    do += b * do_batch + h * do_head
    query_code += (b * H + h) * T * R
    key_code += (b * H + h) * S * R
    lengths += (b * H + h) * S
    lse += (b * H + h) * row
    delta += (b * H + h) * row
    c = start + tl.arange(0, BN)
    here = c < stop
    j = tl.load(key + g * places + c, mask=here, other=-1)
    ok = j >= 0
    j = tl.maximum(j, 0)
    kt = _rows(k, j, ok, k_stride, D, BD)
    vt = _rows(v, j, ok, v_stride, D, BD)
    gk = tl.zeros([BN, BD], tl.float32)
    gv = tl.zeros([BN, BD], tl.float32)
    factor = scale
    if UNIT:
        length = tl.load(lengths + j)
    for f in tl.range(lo, hi, BM):
        a = f + tl.arange(0, BM)
        i = tl.load(query + g * P + a, mask=a < hi, other=-1)
        alive = i >= 0
        i = tl.maximum(i, 0)
        at = a if LISTS else i
        qt = _rows(q, i, alive, q_stride, D, BD)
        dot = _rows(do, i, alive, do_stride, D, BD)
        if LISTS:
            part = tl.load(share + (b * H + h) * T + i, mask=alive, other=0.0)
        norm = tl.load(lse + at, mask=alive, other=float("-inf"))
        norm = tl.where(norm == float("-inf"), float("inf"), norm)
        d = tl.load(delta + at, mask=alive, other=0.0)
        s = tl.dot(kt, qt.T, input_precision=PRECISION) * factor  # [BN, BM]
        if UNIT:
            s = s * length[:, None]
        s = _masked(
            s, i[None, :], j[:, None], ok[:, None], S - T, query_code, key_code, r, R, CODES, AHEAD, CAUSAL, APART
        )  # fmt: skip
        w = tl.exp2(s - norm[None, :])
        dp = tl.dot(vt, dot.T, input_precision=PRECISION)
        if LISTS:
            dp = dp * part[None, :]
        ds = w * (dp - d[None, :])
        if LISTS:
            w = w * part[None, :]
        gv = tl.dot(w.to(dot.dtype), dot, gv, input_precision=PRECISION)
        gk = tl.dot(ds.to(qt.dtype), qt, gk, input_precision=PRECISION)
    gk = gk * (scale * LN2)
    if UNIT:  # the gradient of k/|k|
        unit = kt.to(tl.float32) * length[:, None]
        along = tl.where(length < 1 / EPS, tl.sum(gk * unit, 1), 0.0)
        gk = (gk - along[:, None] * unit) * length[:, None]
    if APART:
        alone = ok & (round0 == 0) & (tl.load(lse + j, mask=ok, other=0.0) == float("-inf"))
        gv += _rows(do, j, alone, do_stride, D, BD).to(tl.float32)
    at = c if LISTS else j
    to = here if LISTS else ok
    place = (b * k_row * H + h) * D
    gk += _rows(k_before + place, at, to & (k_add > 0), H * D, D, BD).to(tl.float32)
    gv += _rows(v_before + place, at, to & (round0 > 0), H * D, D, BD).to(tl.float32)
    _store(k_into + place, at, to, gk, H * D, D, BD)
    _store(v_into + place, at, to, gv, H * D, D, BD)


@triton.jit(do_not_specialize=CHANGING)
def collect(
    x, place, start, share, into, T, P, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Adds up the rows x [B, P, H, D] of all places of each token, in their order; SHARE: times share [B, H, T]."""
    h = tl.program_id(1) % H
    b = (tl.program_id(1) // H).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    here = i < T
    start += (b * H + h) * (T + 1)
    at = tl.load(start + i, mask=here, other=0)
    count = tl.load(start + i + 1, mask=here, other=0) - at
    acc = tl.zeros([BM, BD], tl.float32)
    for n in tl.range(0, tl.max(count, 0)):
        p = tl.load(place + (b * H + h) * P + at + n, mask=n < count, other=0)
        acc += _rows(x + (b * P * H + h) * D, p, n < count, H * D, D, BD).to(tl.float32)
    if SHARE:
        acc = acc * tl.load(share + (b * H + h) * T + i, mask=here, other=0.0)[:, None]
    _store(into + (b * T * H + h) * D, i, here, acc, H * D, D, BD)


class Config(NamedTuple):
    tile: int  # places of a program
    inner: int  # places of the other side at a time
    warps: int
    stages: int
    registers: int = 255


def config(row: int, tile: int, device: torch.device) -> Config:
    """For rows of so many bytes, on this device. Rows of float32 count half as much again: products split them."""
    if INTERPRETED:
        return Config(tile, tile, 4, 1)
    return fits(row, tile, shared_memory(device))


def fits(row: int, tile: int, room: int) -> Config:
    """What fits into so many bytes of shared memory."""
    inner, warps = tile if row <= 256 else tile // 2, 4 if row <= 128 else 8
    choices = [Config(tile, inner, warps, 2)]
    while inner >= 16:
        choices.append(Config(tile, inner, warps, 1))
        inner //= 2
    choices.append(Config(tile // 2, 16, 4, 1))

    def needed(how: Config) -> int:
        # a tile of both kinds, the rows of the other side, once for each stage and once for a product, and the scores
        return row * (2 * how.tile + (2 * how.stages + 1) * how.inner) + 8 * how.tile * how.inner

    return fitting(choices, needed, room)


class Call(NamedTuple):
    """What all launches of one call have in common."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor  # [B, H, S], 1/|k|, if keys count as vectors of length 1
    order: Any
    rule: Any
    how: Config

    @property
    def codes(self) -> bool:
        return self.order.query_code is not None

    @property
    def lists(self) -> bool:
        """Whether results are by place, because a token may stand at several."""
        return not self.codes and not self.rule.once

    @property
    def low(self) -> bool:
        """Whether results are kept with more digits than their type has, for backward."""
        return self.rounds == 1 and not self.rule.apart and self.v.dtype != torch.float32

    @property
    def rounds(self) -> int:
        return self.order.query_code.shape[-1] if self.codes else 1

    @property
    def row(self) -> int:
        """Rows of results: one for each token, or for each place in lists."""
        return self.order.query.shape[1] if self.lists else self.q.shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        query, key, query_code, key_code, *_ = self.order
        spare = query  # never read
        return (
            self.q, self.k, self.v, query, key, spare if query_code is None else query_code,
            spare if key_code is None else key_code, self.lengths,
        )  # fmt: skip

    def plan(self, tiles: int, strides: tuple[Tensor, ...], rounds: tuple[int, int], *more: int) -> Plan:
        """`rounds`: the first, and how many; `strides`: the tensors whose strides the kernel takes; `more`: numbers of
        the kernel over tiles of keys."""
        batch, size, heads, width = self.q.shape
        wide, dtype = tile_of(width), self.q.dtype
        how = self.how
        names = ("q_stride", "k_stride", "v_stride", "do_stride")
        by_keys = bool(more)
        numbers = (
            *(n for t in strides for n in (t.stride(0), t.stride(2))), self.rule.scale * LOG2E.value, size,
            self.k.shape[1], self.order.query.shape[1], self.order.key.shape[1], tiles, rounds[0], self.row, *more,
        )  # fmt: skip
        return Plan(
            (tiles * batch * heads, rounds[1]), numbers,
            {
                **{name: t.stride(1) for name, t in zip(names, strides, strict=False)},
                "H": heads, "R": self.rounds, "CODES": self.codes, "AHEAD": int(self.rule.ahead),
                "CAUSAL": self.rule.causal, "APART": self.rule.apart, "UNIT": self.rule.unit, "LISTS": self.lists,
                "D": width, "BD": wide, "BM": how.inner if by_keys else how.tile,
                "BN": how.tile if by_keys else how.inner, **({} if by_keys else {"LOW": self.low}),
                # three tensor core products make a full float32 product
                "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
            },
            how.warps, how.stages, how.registers,
        )  # fmt: skip


def _call(q: Tensor, k: Tensor | None, v: Tensor, order: Any, rule: Any) -> Call:
    from subquad.ops.ordered import TILE

    q, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, v))
    k = q if k is None else k if k.stride(-1) == 1 else k.contiguous()
    lengths = order.key  # never read
    if rule.unit:
        batch, size, heads, width = k.shape
        lengths = torch.empty(batch, heads, size, device=k.device)
        wide = tile_of(width)
        constants = {"x_stride": k.stride(1), "H": heads, "D": width, "BD": wide, "BM": max(16, 4096 // wide)}
        plan = Plan((blocks_of(size, constants["BM"]), batch * heads), (k.stride(0), k.stride(2), size), constants)
        launch(one_over_lengths, (k, lengths), plan)
    how = config(max(tile_of(q.shape[3]), 64) * (6 if q.dtype == torch.float32 else 2), TILE, q.device)
    if how.tile < TILE:
        order = order._replace(queries=_halves(order.queries, how.tile), keys=_halves(order.keys, how.tile))
    return Call(q, k, v, lengths, order, rule, how)


def _halves(table: Tensor, tile: int) -> Tensor:
    """Each tile of the table as two with so many places, [rows, 2N, 4]."""
    first, stop, *others = table.unbind(-1)
    middle = torch.minimum(first + tile, stop)
    halves = [torch.stack((*ends, *others), -1) for ends in ((first, middle), (middle, stop))]
    return torch.stack(halves, 2).flatten(1, 2)


def attend(q: Tensor, k: Tensor | None, v: Tensor, order: Any, rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, D] and the log-sum-exp in base 2. For backward the results of places, if tokens stand at several, and
    the low digits of results: [0 to 2, B, T, H, D]."""
    call = _call(q, k, v, order, rule)
    order, (batch, size, heads, width) = call.order, call.q.shape
    rounds, row, tiles = call.rounds, call.row, order.queries.shape[1]
    own = v.new_empty(call.lists + call.low, batch, row, heads, width)
    part = own[:1] if call.lists else v.new_empty(rounds, batch, row, heads, width)
    part_lse = torch.empty(rounds, batch, heads, row, device=q.device)
    plan = call.plan(tiles, (call.q, call.k, call.v), (0, rounds))
    launch(forward, (*call.tensors(), order.queries, part, own[-1] if call.low else part, part_lse), plan)
    if call.lists:
        o = v.new_empty(batch, size, heads, width)
        back = _places(order.query.view(batch, heads, -1), size)
        _collect(part[0], back, _share(part_lse[0], back), o)
        return o, part_lse[0], own
    if rounds == 1 and not rule.apart:
        return part[0], part_lse[0], own
    o, lse = v.new_empty(batch, size, heads, width), part_lse.new_empty(batch, heads, size)
    wide = tile_of(width)
    constants = {"v_stride": call.v.stride(1), "H": heads, "R": rounds, "APART": rule.apart, "D": width, "BD": wide}
    tile = max(16, 4096 // wide)
    plan = Plan(
        (blocks_of(size, tile), batch * heads), (call.v.stride(0), call.v.stride(2), size), {**constants, "BM": tile}
    )
    launch(merge, (part, part_lse, call.v, o, lse), plan)
    return o, lse, own


def gradients(
    do: Tensor, o: Tensor, lse: Tensor, own: Tensor, q: Tensor, k: Tensor | None, v: Tensor, order: Any, rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, shared = _call(q, k, v, order, rule), k is None
    order = call.order
    do = do if do.stride(-1) == 1 else do.contiguous()
    (batch, size, heads, width), row, rounds = call.q.shape, call.row, call.rounds
    delta, share, back = torch.empty_like(lse), lse, (lse, lse)
    if call.lists:
        o, back = own[0], _places(order.query.view(batch, heads, -1), size)
        share = _share(lse, back)
    k_row = order.key.shape[1] if call.lists else call.k.shape[1]

    def room(like: Tensor, rows: int, passes: int) -> tuple[Tensor, Tensor | None]:
        """Where the last pass writes, and where those before it add up, in float32."""
        last = like.new_empty(batch, rows, heads, width)
        return last, last.new_empty(last.shape, dtype=torch.float32) if passes > 1 else None

    together = shared and not call.lists
    dq, q_sum = room(q, row, 2 * rounds if together else rounds)
    dk, k_sum = (dq, q_sum) if together else room(call.k, k_row, rounds)
    dv, v_sum = room(v, k_row, rounds)
    if rule.once:  # some keys stand nowhere
        dk.zero_(), dv.zero_()
    both = (call.q, call.k, call.v, do)
    for r in range(rounds):
        last = r == rounds - 1
        q_into = dq if q_sum is None or (last and not together) else q_sum
        plan = call.plan(order.queries.shape[1], both, (r, 1))
        launch(
            dq_of,
            (
                *call.tensors(),
                order.queries,
                o,
                own[-1] if call.low else o,
                do,
                lse,
                delta,
                share,
                dq if q_sum is None else q_sum,
                q_into,
            ),
            plan,
        )
        k_before, v_before = (x if y is None else y for x, y in ((dk, k_sum), (dv, v_sum)))
        k_into, v_into = (x if y is None or last else y for x, y in ((dk, k_sum), (dv, v_sum)))
        plan = call.plan(order.keys.shape[1], both, (r, 1), k_row, int(r > 0 or together))
        launch(dkv_of, (*call.tensors(), order.keys, do, lse, delta, share, k_before, k_into, v_before, v_into), plan)
    if call.lists:
        dq = _collect(dq, back, None, dq.new_empty(call.q.shape))
        back = _places(order.key.view(batch, heads, -1), call.k.shape[1])
        dk, dv = (_collect(x, back, None, x.new_empty(*call.k.shape[:3], width)) for x in (dk, dv))
        if shared:
            dq = dq + dk
    return dq, q.new_empty(0) if shared else dk, dv


def _places(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The places of each token of tokens [B, H, P]: all places by token, and where those of each token start."""
    *shape, places = tokens.shape
    row = torch.arange(tokens[..., 0].numel(), device=tokens.device)[:, None]
    token = tokens.reshape(-1, places) + 1  # 0: none
    packed = (row * (size + 1) + token) * places + torch.arange(places, device=tokens.device)
    ordered = packed.flatten().sort().values
    edges = (row * (size + 1) + torch.arange(1, size + 2, device=tokens.device)) * places
    start = torch.searchsorted(ordered, edges) - row * places
    return (ordered % places).to(torch.int32).view(*shape, places), start.to(torch.int32).view(*shape, size + 1)


def _share(lse: Tensor, back: tuple[Tensor, Tensor]) -> Tensor:
    """What part of a token's mean each of its places is, [B, H, T]: those that see nothing do not count."""
    place, start = back
    some = (lse > -torch.inf).gather(-1, place.long()).cumsum(-1, dtype=torch.int32)
    total = torch.nn.functional.pad(some, (1, 0)).gather(-1, start.long()).diff(dim=-1)
    return 1 / total.clamp(min=1).to(torch.float32)


def _collect(x: Tensor, back: tuple[Tensor, Tensor], share: Tensor | None, into: Tensor) -> Tensor:
    (place, start), (batch, places, heads, width), size = back, x.shape, into.shape[1]
    wide = tile_of(width)
    tile = max(16, 4096 // wide)
    constants = {"H": heads, "SHARE": share is not None, "D": width, "BD": wide, "BM": tile}
    plan = Plan((blocks_of(size, tile), batch * heads), (size, places), constants)
    launch(collect, (x, place, start, start if share is None else share, into), plan)
    return into
