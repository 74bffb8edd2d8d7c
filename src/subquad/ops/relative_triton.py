"""The kernels of `relative.relative_attention`: flash attention over a band whose scores depend on the distance.

The score of a pair needs (q + w)·r at its distance. For a tile of queries and a run of distances that is a matrix
product, but its rows are shifted against those of the scores: query a reads distance o at key o + a. The shift goes
through memory: each program writes the products to its own scratch with rows of W + 1, and reads them with rows of W.
There are only as many programs as the GPU holds at once, each with many tiles, so the scratch stays in the cache and
does not grow with the length. The gradients of scores go the same way back.

Tiles of keys meet each query with other distances, so there each product would be written for one use. What a tile of B
queries and B keys needs lies in two products with runs of B distances, at key (x + a) mod B of one or the other: each
entry is taken from the one that has it, and the row of query a is then turned by a, among the threads of a warp. In the
other kernels one run of a tile is that of the tile before; keeping it gave wrong numbers in 16 bits on an H200 with
Triton 3.6, though not in its interpreter.

Legend: T queries, S keys, o = j - offset - i + before the entry of r for the pair (i, j), span the last entry, B rows
of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, blocks_of, launch, multiprocessors, shared_memory, tile_of

LOG2E = tl.constexpr(1.4426950408889634)
SCRATCH = 2**27  # most bytes of scratch, of all programs together

# arguments that change with lengths and windows: Triton must not compile another kernel if one is 1
CHANGING = ["T", "S", "offset", "before", "span", "tiles", "work", "programs"]


class Config(NamedTuple):
    tile: int  # rows of a tile, of queries and of keys
    warps: int
    stages: int
    resident: int  # programs that a multiprocessor holds at once
    registers: int  # the most per thread, so that this many programs fit
    shared: int  # bytes of shared memory that a program takes


# by kernel and the bytes of a row of one head, at least 128
CONFIGS: dict[tuple[str, int], Config] = {
    ("forward", 128): Config(64, 4, 2, 3, 168, 49152),
    ("forward", 256): Config(64, 4, 2, 2, 255, 114688),
    ("forward", 512): Config(32, 4, 1, 2, 255, 49152),
    ("queries", 128): Config(64, 4, 2, 2, 255, 65536),
    ("queries", 256): Config(64, 8, 1, 1, 255, 98304),
    ("queries", 512): Config(32, 4, 1, 2, 255, 81920),
    ("keys", 128): Config(64, 4, 2, 2, 255, 123392),
    ("keys", 256): Config(64, 8, 1, 1, 255, 131072),
    ("keys", 512): Config(32, 4, 1, 2, 255, 98304),
}
SMALL = 32, 16  # tiles for GPUs with less shared memory, of which a program then takes about a half and a quarter


@triton.jit
def _rows(x, at, ok, stride, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a head at positions `at`, zeros where not ok."""
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    return tl.load(x + at.to(tl.int64)[:, None] * stride + d[None, :], mask=ok, other=0.0)


@triton.jit
def _store(x, at, ok, rows, stride, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    tl.store(x + at.to(tl.int64)[:, None] * stride + d[None, :], rows.to(x.dtype.element_ty), mask=ok)


@triton.jit
def _vector(x, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    return tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _limits(first, last, b, S, RANGES: tl.constexpr):
    """The keys of this row that exist: from the first number to before the second."""
    lo = 0
    hi = S
    if RANGES:
        lo = tl.load(first + b).to(tl.int32)
        hi = tl.load(last + b).to(tl.int32)
    return lo, hi


@triton.jit
def _far(qw, r, o0, span, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """(q + w)·r of a tile of queries and the distances from entry o0 on."""
    o = o0 + tl.arange(0, B)
    rt = _rows(r, o, (o >= 0) & (o <= span), R, D, BD)
    return tl.dot(qw, rt.T, input_precision=PRECISION)


@triton.jit
def _turned(now, past, B: tl.constexpr):
    """Products of B queries with two runs of B distances, `now` with the later one -> those of B queries and B keys."""
    a = tl.arange(0, B)[:, None]
    x = tl.arange(0, B)[None, :]
    return tl.gather(tl.where(x + a < B, now, past), (x - a) & (B - 1), 1)


@triton.jit
def _products(room, qw, r, span, c_lo, c_hi, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
              B: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Writes (q + w)·r of a tile of queries to the scratch, for all keys c_lo .. c_hi - 1 counted from the first that
    the tile's first query sees."""
    a = tl.arange(0, B)
    lo = tl.maximum(c_lo - B + 1, 0) // B * B
    hi = tl.minimum(c_hi, span + 1)
    for o0 in tl.range(lo, hi, B):
        far = _far(qw, r, o0, span, R, D, BD, B, PRECISION)
        tl.store(room + a[:, None] * (W + 1) + o0 + a[None, :], far.to(room.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def _inside(c0, j0, span, klo, khi, B: tl.constexpr):
    """Whether every pair of a tile is seen; its keys are j0 .., its columns c0 .. are counted from the first that its
    first row sees."""
    return (c0 >= B - 1) & (c0 + B - 1 <= span) & (j0 >= klo) & (j0 + B <= khi)


@triton.jit
def _scores(qu, kt, room, start, c0, span, klo, khi, scale, W: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """The scores of a tile of queries and keys start + c0 .., in base 2; -inf for pairs that are not seen."""
    a = tl.arange(0, B)[:, None]
    c = c0 + tl.arange(0, B)
    far = tl.load(room + a * W + c[None, :])  # first: it takes the longest
    s = (tl.dot(qu, kt.T, input_precision=PRECISION) + far.to(tl.float32)) * scale
    if not _inside(c0, start + c0, span, klo, khi, B):
        o = c[None, :] - a
        j = start + c
        seen = (o >= 0) & (o <= span) & (j >= klo)[None, :] & (j < khi)[None, :]
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit(do_not_specialize=CHANGING)
def _forward(
    q, k, v, r, u, w, o, lse, scratch, first, last,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head,
    T, S, offset, before, span, tiles, work, programs, scale_log2,
    RANGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    a = tl.arange(0, B)
    room = scratch + tl.program_id(0).to(tl.int64) * B * W
    h = tl.program_id(0) % H
    kh = k + h * k_head
    vh = v + h * v_head
    for at in tl.range(tl.program_id(0) // H, work, programs // H):
        b = (at // tiles).to(tl.int64)
        i0 = at % tiles * B
        i = i0 + a
        klo, khi = _limits(first, last, b, S, RANGES)
        start = i0 + offset - before  # the first key that query i0 sees
        c_lo = tl.maximum(klo - start, 0) // B * B
        c_hi = tl.minimum(khi - start, span + B)
        qt = _rows(q + b * q_batch + h * q_head, i, i < T, q_stride, D, BD).to(tl.float32)
        qu = (qt + _vector(u + h * D, D, BD)).to(q.dtype.element_ty)
        qw = (qt + _vector(w + h * D, D, BD)).to(q.dtype.element_ty)
        _products(room, qw, r + h * D, span, c_lo, c_hi, H * D, W, D, BD, B, PRECISION)
        m = tl.full([B], float("-inf"), tl.float32)
        z = tl.zeros([B], tl.float32)
        acc = tl.zeros([B, BD], tl.float32)
        for c0 in tl.range(c_lo, c_hi, B):
            j = start + c0 + a
            there = (j >= klo) & (j < khi)
            kt = _rows(kh + b * k_batch, j, there, k_stride, D, BD)
            s = _scores(qu, kt, room, start, c0, span, klo, khi, scale_log2, W, B, PRECISION)
            top = tl.maximum(m, tl.max(s, 1))
            base = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s - base[:, None])
            fade = tl.exp2(m - base)
            z = z * fade + tl.sum(p, 1)
            vt = _rows(vh + b * v_batch, j, there, v_stride, D, BD)
            acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
            m = top
        alive = z > 0
        z = tl.where(alive, z, 1.0)
        _store(o + (b * T * H + h) * D, i, i < T, acc / z[:, None], H * D, D, BD)
        tl.store(lse + (b * H + h) * T + i, tl.where(alive, m + tl.log2(z), float("-inf")), mask=i < T)
        tl.debug_barrier()  # before the next tile writes to the scratch


@triton.jit(do_not_specialize=CHANGING)
def _queries(
    q, k, v, r, u, w, o, do, lse, delta, qus, qws, dq, sums, dr, scratch, first, last,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, do_batch, do_stride, do_head,
    T, S, offset, before, span, tiles, work, programs, scale, scale_log2,
    RANGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """dq, and of each program its part of du and dw, in `sums` [programs, 2, D], and of dr, in `dr` [programs, O, BD].

    `dr` starts with zeros. For `_keys` it also writes q + u, q + w and delta = Σ do·o of each query.
    """
    a = tl.arange(0, B)
    d = tl.arange(0, BD)
    program = tl.program_id(0).to(tl.int64)
    room = scratch + program * B * W
    dr += program * tl.cdiv(span + 1, B) * B * BD
    h = tl.program_id(0) % H
    kh = k + h * k_head
    vh = v + h * v_head
    rh = r + h * D
    du = tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    for at in tl.range(tl.program_id(0) // H, work, programs // H):
        b = (at // tiles).to(tl.int64)
        i0 = at % tiles * B
        i = i0 + a
        klo, khi = _limits(first, last, b, S, RANGES)
        start = i0 + offset - before
        c_lo = tl.maximum(klo - start, 0) // B * B
        c_hi = tl.minimum(khi - start, span + B)
        qt = _rows(q + b * q_batch + h * q_head, i, i < T, q_stride, D, BD).to(tl.float32)
        qu = (qt + _vector(u + h * D, D, BD)).to(q.dtype.element_ty)
        qw = (qt + _vector(w + h * D, D, BD)).to(q.dtype.element_ty)
        dot = _rows(do + b * do_batch + h * do_head, i, i < T, do_stride, D, BD)
        ot = _rows(o + (b * T * H + h) * D, i, i < T, H * D, D, BD)
        norm = tl.load(lse + (b * H + h) * T + i, mask=i < T, other=float("inf"))
        # a row that sees nothing has -inf: its probabilities must be 0, not exp(-inf + inf)
        norm = tl.where(norm == float("-inf"), float("inf"), norm)
        _store(qus + (b * T * H + h) * D, i, i < T, qu, H * D, D, BD)
        _store(qws + (b * T * H + h) * D, i, i < T, qw, H * D, D, BD)
        own = tl.sum(dot.to(tl.float32) * ot.to(tl.float32), 1)
        tl.store(delta + (b * H + h) * T + i, own, mask=i < T)
        _products(room, qw, rh, span, c_lo, c_hi, H * D, W, D, BD, B, PRECISION)
        near = tl.zeros([B, BD], tl.float32)
        for c0 in tl.range(c_lo, c_hi, B):
            j = start + c0 + a
            there = (j >= klo) & (j < khi)
            kt = _rows(kh + b * k_batch, j, there, k_stride, D, BD)
            s = _scores(qu, kt, room, start, c0, span, klo, khi, scale_log2, W, B, PRECISION)
            p = tl.exp2(s - norm[:, None])
            vt = _rows(vh + b * v_batch, j, there, v_stride, D, BD)
            dp = tl.dot(dot, vt.T, input_precision=PRECISION)
            ds = (p * (dp - own[:, None])).to(kt.dtype)
            near = tl.dot(ds, kt, near, input_precision=PRECISION)
            tl.store(room + a[:, None] * W + c0 + a[None, :], ds)
        tl.debug_barrier()
        far = tl.zeros([B, BD], tl.float32)
        lo = tl.maximum(c_lo - B + 1, 0) // B * B
        hi = tl.minimum(c_hi, span + 1)
        end = c_lo + tl.cdiv(c_hi - c_lo, B) * B  # before it, from c_lo on, `ds` was written
        for o0 in tl.range(lo, hi, B):
            e = o0 + a
            place = dr + e[:, None] * BD + d[None, :]
            so_far = tl.load(place)
            c = e[None, :] + a[:, None]
            written = (c >= c_lo) & (c < end)
            ds = tl.load(room + a[:, None] * (W + 1) + e[None, :], mask=written, other=0.0)
            rt = _rows(rh, e, e <= span, H * D, D, BD)
            far = tl.dot(ds, rt, far, input_precision=PRECISION)
            tl.store(place, so_far + tl.dot(tl.trans(ds), qw, input_precision=PRECISION))
        _store(dq + (b * T * H + h) * D, i, i < T, (near + far) * scale, H * D, D, BD)
        du += tl.sum(near, 0) * scale
        dw += tl.sum(far, 0) * scale
        tl.debug_barrier()
    tl.store(sums + program * 2 * BD + d, du)
    tl.store(sums + program * 2 * BD + BD + d, dw)


@triton.jit(do_not_specialize=CHANGING)
def _keys(
    qus, qws, k, v, r, do, lse, delta, dk, dv, first, last,
    k_batch, k_stride, k_head, v_batch, v_stride, v_head, do_batch, do_stride, do_head,
    T, S, offset, before, span, tiles, work, programs, scale, scale_log2,
    RANGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of tiles of keys. A tile's queries are counted from the first that sees its first key."""
    a = tl.arange(0, B)
    h = tl.program_id(0) % H
    rh = r + h * D
    doh = do + h * do_head
    for at in tl.range(tl.program_id(0) // H, work, programs // H):
        b = (at // tiles).to(tl.int64)
        j0 = at % tiles * B
        j = j0 + a
        klo, khi = _limits(first, last, b, S, RANGES)
        there = (j >= klo) & (j < khi)
        start = j0 - offset + before - span  # the first query that sees key j0
        c_lo = tl.maximum(-start, 0) // B * B
        c_hi = tl.minimum(T - start, span + B)
        if (j0 >= khi) | (j0 + B <= klo):
            c_hi = c_lo
        qu = qus + (b * T * H + h) * D
        qw = qws + (b * T * H + h) * D
        kt = _rows(k + b * k_batch + h * k_head, j, there, k_stride, D, BD)
        vt = _rows(v + b * v_batch + h * v_head, j, there, v_stride, D, BD)
        gk = tl.zeros([B, BD], tl.float32)
        gv = tl.zeros([B, BD], tl.float32)
        for c0 in tl.range(c_lo, c_hi, B):
            i = start + c0 + a
            alive = (i >= 0) & (i < T)
            wt = _rows(qw, i, alive, H * D, D, BD)
            now = _far(wt, rh, span - c0, span, H * D, D, BD, B, PRECISION)
            past = _far(wt, rh, span - c0 - B, span, H * D, D, BD, B, PRECISION)
            qt = _rows(qu, i, alive, H * D, D, BD)
            s = tl.dot(qt, kt.T, input_precision=PRECISION) + _turned(now, past, B)  # [queries, keys]
            norm = tl.load(lse + (b * H + h) * T + i, mask=alive, other=float("inf"))
            norm = tl.where(norm == float("-inf"), float("inf"), norm)
            p = tl.exp2(s * scale_log2 - norm[:, None])
            if not (_inside(c0, j0, span, klo, khi, B) & (start + c0 + B <= T)):
                o = span - c0 + a[None, :] - a[:, None]
                seen = (o >= 0) & (o <= span) & there[None, :] & alive[:, None]
                p = tl.where(seen, p, 0.0)
            dot = _rows(doh + b * do_batch, i, alive, do_stride, D, BD)
            gv = tl.dot(tl.trans(p.to(dot.dtype)), dot, gv, input_precision=PRECISION)
            dp = tl.dot(dot, vt.T, input_precision=PRECISION)
            ds = p * (dp - tl.load(delta + (b * H + h) * T + i, mask=alive, other=0.0)[:, None])
            gk = tl.dot(tl.trans(ds.to(qt.dtype)), qt, gk, input_precision=PRECISION)
        _store(dk + (b * S * H + h) * D, j, j < S, gk * scale, H * D, D, BD)
        _store(dv + (b * S * H + h) * D, j, j < S, gv, H * D, D, BD)


class Call(NamedTuple):
    """One call of the operator."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [B, S, H, D]
    v: Tensor  # [B, S, H, D]
    r: Tensor  # [span + 1, H, D], contiguous
    u: Tensor  # [H, D]
    w: Tensor  # [H, D]
    first: Tensor | None  # [B]
    last: Tensor | None  # [B]
    before: int
    offset: int
    scale: float

    @property
    def span(self) -> int:
        return len(self.r) - 1

    def config(self, kernel: str) -> Config:
        best = CONFIGS[kernel, max(128, tile_of(self.q.shape[3]) * self.q.element_size())]
        return fitting(best, shared_memory(self.q.device))

    def width(self, kernel: str) -> int:
        """W: columns for the last entry of r, shifted by a tile's rows. Few values: kernels are compiled for each."""
        tile = self.config(kernel).tile
        tiles = blocks_of(self.span + 1, tile) + 1
        power = 1 << (tiles - 1).bit_length()
        return tile * (power * 3 // 4 if tiles <= power * 3 // 4 else power)

    def tiles(self, kernel: str) -> int:
        return blocks_of(self.k.shape[1] if kernel == "keys" else self.q.shape[1], self.config(kernel).tile)

    def programs(self, kernel: str) -> int:
        """As many as the GPU holds at once. They take heads in turn, and tiles in turn."""
        config, (rows, _, H, _) = self.config(kernel), self.q.shape
        most = config.resident * multiprocessors(self.q.device)
        if kernel != "keys":
            most = min(most, SCRATCH // (config.tile * self.width(kernel) * self.q.element_size()))
        return min(max(1, most // H), rows * self.tiles(kernel)) * H

    def scratch(self, kernel: str) -> Tensor:
        return self.q.new_empty(self.programs(kernel), self.config(kernel).tile * self.width(kernel))

    def plan(self, kernel: str, strides: tuple[int, ...], scales: tuple[float, ...]) -> Plan:
        config, (rows, T, H, D), S = self.config(kernel), self.q.shape, self.k.shape[1]
        tiles, programs = self.tiles(kernel), self.programs(kernel)
        numbers = (*strides, T, S, self.offset, self.before, self.span, tiles, rows * tiles, programs, *scales)
        constants = {
            "RANGES": self.first is not None, "H": H, "D": D, "BD": tile_of(D), "B": config.tile,
            # three tensor core products make a full float32 product
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        if kernel != "keys":
            constants["W"] = self.width(kernel)
        return Plan((programs,), numbers, constants, config.warps, config.stages, config.registers)


def fitting(best: Config, shared: int) -> Config:
    """The configuration, or the largest one after it that takes at most this many bytes of shared memory."""
    for tile in SMALL:
        if best.shared <= shared:
            break
        if tile < best.tile:
            best = Config(tile, 4, 1, 1, 255, best.shared // 2)
    return best


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def forward(x: Call) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D], and its log-sum-exp in base 2 [B, H, T]."""
    rows, T, H, D = x.q.shape
    o = torch.empty(rows, T, H, D, device=x.q.device, dtype=x.q.dtype)
    lse = torch.empty(rows, H, T, device=x.q.device, dtype=torch.float32)
    scratch = x.scratch("forward")
    plan = x.plan("forward", _strides(x.q, x.k, x.v), (x.scale * LOG2E.value,))
    none = x.q  # stands for a missing tensor, which is never read
    ends = (none if x.first is None else x.first, none if x.last is None else x.last)
    launch(_forward, (x.q, x.k, x.v, x.r, x.u, x.w, o, lse, scratch, *ends), plan)
    return o, lse


def backward(x: Call, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, r, u and w."""
    (rows, T, H, D), S, device = x.q.shape, x.k.shape[1], x.q.device
    dq, qu, qw = (torch.empty(rows, T, H, D, device=device, dtype=x.q.dtype) for _ in range(3))
    dk, dv = (torch.empty(rows, S, H, D, device=device, dtype=x.q.dtype) for _ in range(2))
    delta = torch.empty_like(lse)
    none = x.q
    ends = (none if x.first is None else x.first, none if x.last is None else x.last)
    scales = x.scale, x.scale * LOG2E.value
    scratch, width, tile = x.scratch("queries"), tile_of(D), x.config("queries").tile
    plan = x.plan("queries", _strides(x.q, x.k, x.v, do), scales)
    sums = torch.empty(len(scratch), 2, width, device=device)
    dr = torch.zeros(len(scratch), blocks_of(len(x.r), tile) * tile, width, device=device)
    parts = delta, qu, qw, dq, sums, dr
    launch(_queries, (x.q, x.k, x.v, x.r, x.u, x.w, o, do, lse, *parts, scratch, *ends), plan)
    tensors = qu, qw, x.k, x.v, x.r, do, lse, delta, dk, dv, *ends
    launch(_keys, tensors, x.plan("keys", _strides(x.k, x.v, do), scales))
    # programs take heads in turn
    dr = dr.unflatten(0, (-1, H)).sum(0).movedim(0, 1)[: len(x.r), :, :D] * x.scale
    du, dw = (part.unflatten(0, (-1, H)).sum(0)[:, :D] for part in sums.unbind(1))
    return dq, dk, dv, dr.to(x.r.dtype), du.to(x.u.dtype), dw.to(x.w.dtype)
