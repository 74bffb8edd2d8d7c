"""The Triton path of `groups.read_groups`.

A scan goes over the blocks of keys and keeps for every group the running softmax of flash attention and a list of its
best keys; it writes both after each block. Then every query reads what its group has after the block before its own.
The scan backward goes from the last block to the first: what all later queries ask of a block is one running sum.
All exponentials are in base 2. N groups, M blocks, P places of a list.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, fitting, launch, shared_memory, tile_of
from subquad.ops.sparse.kernels import LN2, LOG2E, _rows, _store

CHANGING = ["T", "M", "first", "stop"]


@triton.jit(do_not_specialize=CHANGING)
def scan(
    c, k, v, o, lse, lists, k_batch, k_head, v_batch, v_head, scale, M, k_stride: tl.constexpr, v_stride: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One level: its groups read all blocks, and write for the queries of blocks 2^level .. 2^(level + 1) - 1."""
    level = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    h = row % H
    b = row // H
    first = 1 << level
    stop = tl.minimum(2 * first, M)
    c += (level * tl.num_programs(1) + row) * N * D
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    n = tl.arange(0, BN)
    a = tl.arange(0, BB)
    p = tl.arange(0, BP)
    ct = _rows(c, n, n < N, D, D, BD)
    m = tl.full([BN], float("-inf"), tl.float32)
    z = tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, BD], tl.float32)
    best = tl.where(p < TOP, float("-inf"), float("inf"))[None, :] + tl.zeros([BN, BP], tl.float32)
    ids = tl.full([BN, BP], -1, tl.int32)
    for block in tl.range(0, stop - 1):
        kt = _rows(k, block * BLOCK + a, a < BLOCK, k_stride, D, BD)
        vt = _rows(v, block * BLOCK + a, a < BLOCK, v_stride, D, BD)
        s = tl.dot(ct, kt.T, input_precision=PRECISION) * scale
        s = tl.where((a < BLOCK)[None, :], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        w = tl.exp2(s - top[:, None])
        fade = tl.exp2(m - top)
        z = z * fade + tl.sum(w, 1)
        acc = tl.dot(w.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
        m = top
        if TOP > 0:
            high = tl.max(s, 1)
            low = tl.min(best, 1)
            while tl.max((high > low).to(tl.int32), 0) > 0:  # each group replaces its worst key
                go = (high > low)[:, None]
                column = tl.argmax(s, 1)
                place = tl.argmin(best, 1)
                here = go & (p[None, :] == place[:, None])
                best = tl.where(here, high[:, None], best)
                ids = tl.where(here, (block * BLOCK + column)[:, None], ids)
                s = tl.where(go & (a[None, :] == column[:, None]), float("-inf"), s)
                high = tl.max(s, 1)
                low = tl.min(best, 1)
        if block + 1 >= first:
            at = (row * M + block + 1) * N
            _store(o + at * D, n, n < N, acc / z[:, None], D, D, BD)
            tl.store(lse + at + n, m + tl.log2(z), mask=n < N)
            if TOP > 0:
                there = (n < N)[:, None] & (p < TOP)[None, :]
                tl.store(lists + (at + n[:, None]) * TOP + p[None, :], ids, mask=there)


@triton.jit
def _query(q, label, levels, row, block, T, q_stride: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
           D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    """The queries of a block: positions, which exist, their groups, the row of centroids of their level, and q."""
    a = tl.arange(0, BB)
    i = block * BLOCK + a
    alive = (a < BLOCK) & (i < T)
    group = tl.load(label + row * T + i, mask=alive, other=0)
    centroids = (tl.load(levels + block) * tl.num_programs(1) + row) * N
    return i, alive, group, centroids, _rows(q, i, alive, q_stride, D, BD).to(tl.float32)


@triton.jit
def _member(
    p, at, group, alive, query, centroid, mass, lists, k, v, scale, k_stride: tl.constexpr, v_stride: tl.constexpr,
    TOP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Place p of each query's list: the key, its rows, the query's score, and its weight in the group."""
    j = tl.load(lists + (at + group) * TOP + p, mask=alive, other=-1)
    ok = j >= 0
    j = tl.maximum(j, 0)
    kt = _rows(k, j, ok, k_stride, D, BD).to(tl.float32)
    vt = _rows(v, j, ok, v_stride, D, BD).to(tl.float32)
    s = tl.where(ok, tl.sum(query * kt, 1) * scale, float("-inf"))
    known = tl.where(ok, tl.exp2(tl.sum(centroid * kt, 1) * scale - mass), 0.0)
    return j, ok, kt, vt, s, known


@triton.jit(do_not_specialize=CHANGING)
def pick(
    q, c, k, v, o, lse, lists, label, levels, before, total, norm,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, scale, T, M,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """The output of a block of queries from the blocks before, and the log of its exp-mass."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    h = row % H
    b = row // H
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    i, alive, group, centroids, query = _query(
        q + b * q_batch + h * q_head, label, levels, row, block, T, q_stride, N, BLOCK, D, BD, BB
    )
    some = alive & (block > 0)
    at = (row * M + block) * N
    mass = tl.load(lse + at + group, mask=some, other=0.0)
    result = _rows(o + at * D, group, some, D, D, BD).to(tl.float32)
    log = mass
    if TOP > 0:
        centroid = _rows(c + centroids * D, group, some, D, D, BD).to(tl.float32)
        m = tl.full([BB], float("-inf"), tl.float32)
        z = tl.zeros([BB], tl.float32)
        part = tl.zeros([BB], tl.float32)
        acc = tl.zeros([BB, BD], tl.float32)
        for p in tl.range(0, TOP):
            _, _, _, vt, s, known = _member(
                p, at, group, some, query, centroid, mass, lists, k, v, scale, k_stride, v_stride, TOP, D, BD
            )
            high = tl.maximum(m, s)
            base = tl.where(high == float("-inf"), 0.0, high)
            w = tl.exp2(s - base)
            fade = tl.exp2(m - base)
            z = z * fade + w
            acc = acc * fade[:, None] + w[:, None] * vt
            m = high
            part += known
            result -= known[:, None] * vt
        z = tl.where(some, z, 1.0)
        m = tl.where(some, m, 0.0)
        part = tl.where(some, part, 1.0)
        result += (part / z)[:, None] * acc
        own = m + tl.log2(z)
        tl.store(norm + row * T + i, own, mask=alive)
        log = own - tl.log2(part)
    _store(before + (b * T * H + h) * D, i, alive, tl.where(some[:, None], result, 0.0), H * D, D, BD)
    tl.store(total + (b * T + i) * H + h, tl.where(some, log * LN2, float("-inf")), mask=alive)


@triton.jit(do_not_specialize=CHANGING)
def pick_back(
    q, c, k, v, lists, lse, label, levels, norm, do, dtotal, dq, dk, dv, dc, dgroup, dmass,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, scale, T, M,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of `pick`: of queries; of the keys in lists, added to dk and dv; for the scan, of what it wrote."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    h = row % H
    b = row // H
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    i, alive, group, centroids, query = _query(
        q + b * q_batch + h * q_head, label, levels, row, block, T, q_stride, N, BLOCK, D, BD, BB
    )
    some = alive & (block > 0)
    at = (row * M + block) * N
    place = (b * T * H + h) * D
    dot = _rows(do + place, i, some, H * D, D, BD)
    grad = dot.to(tl.float32)
    dlog = tl.load(dtotal + (b * T + i) * H + h, mask=some, other=0.0)
    gq = tl.zeros([BB, BD], tl.float32)
    gc = tl.zeros([BB, BD], tl.float32)
    dlse = dlog
    if TOP > 0:
        mass = tl.load(lse + at + group, mask=some, other=0.0)
        centroid = _rows(c + centroids * D, group, some, D, D, BD).to(tl.float32)
        own = tl.load(norm + row * T + i, mask=some, other=0.0)
        part = tl.zeros([BB], tl.float32)
        mean = tl.zeros([BB], tl.float32)  # do · the exact result
        for p in tl.range(0, TOP):
            _, _, _, vt, s, known = _member(
                p, at, group, some, query, centroid, mass, lists, k, v, scale, k_stride, v_stride, TOP, D, BD
            )
            part += known
            mean += tl.exp2(s - own) * tl.sum(grad * vt, 1)
        part = tl.where(some, part, 1.0)
        d = tl.arange(0, BD)
        for p in tl.range(0, TOP):
            j, ok, kt, vt, s, known = _member(
                p, at, group, some, query, centroid, mass, lists, k, v, scale, k_stride, v_stride, TOP, D, BD
            )
            w = tl.exp2(s - own)
            along = tl.sum(grad * vt, 1)
            ds = w * (part * (along - mean) + dlog)
            dknown = known * (mean - along)
            dsc = dknown - dlog * known / part
            dlse -= dknown
            gq += ds[:, None] * kt
            gc += dsc[:, None] * kt
            to = place + j.to(tl.int64)[:, None] * (H * D) + d[None, :]
            there = ok[:, None] & (d < D)[None, :]
            tl.atomic_add(dk + to, (ds[:, None] * query + dsc[:, None] * centroid) * (scale * LN2), mask=there)
            tl.atomic_add(dv + to, (w * part - known)[:, None] * grad, mask=there)
    _store(dq + place, i, alive, gq * (scale * LN2), H * D, D, BD)
    n = tl.arange(0, BN)
    member = (group[None, :] == n[:, None]) & some[None, :]
    _store(dgroup + at * D, n, n < N, tl.dot(member.to(dot.dtype), dot, input_precision=PRECISION), D, D, BD)
    tl.store(dmass + at + n, tl.sum(tl.where(member, dlse[None, :], 0.0), 1), mask=n < N)
    if TOP > 0:
        sums = tl.dot(member.to(dot.dtype), gc.to(dot.dtype), input_precision=PRECISION)
        _store(dc + at * D, n, n < N, sums * (scale * LN2), D, D, BD)


@triton.jit(do_not_specialize=CHANGING)
def scan_back(
    c, k, v, o, lse, dgroup, dmass, dlists, dk, dv, dc, k_batch, k_head, v_batch, v_head, scale, T, M, first, stop,
    k_stride: tl.constexpr, v_stride: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of `scan` of one level. `asked` and `less` are sums over all later blocks, in units of this one."""
    row = tl.program_id(0).to(tl.int64)
    h = row % H
    b = row // H
    c += row * N * D
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    place = (b * T * H + h) * D
    n = tl.arange(0, BN)
    a = tl.arange(0, BB)
    ct = _rows(c, n, n < N, D, D, BD)
    gc = tl.zeros([BN, BD], tl.float32)
    asked = tl.zeros([BN, BD], tl.float32)
    less = tl.zeros([BN], tl.float32)
    unit = tl.full([BN], float("inf"), tl.float32)
    for back in tl.range(0, stop - 1):
        block = stop - 1 - back
        if block >= first:
            at = (row * M + block) * N
            own = tl.load(lse + at + n, mask=n < N, other=0.0)
            more = _rows(dgroup + at * D, n, n < N, D, D, BD).to(tl.float32)
            delta = tl.sum(more * _rows(o + at * D, n, n < N, D, D, BD).to(tl.float32), 1)
            fade = tl.exp2(own - unit)
            asked = asked * fade[:, None] + more
            less = less * fade + delta - tl.load(dmass + at + n, mask=n < N, other=0.0)
            unit = own
            if TOP > 0:
                gc += _rows(dlists + at * D, n, n < N, D, D, BD).to(tl.float32)
        j = (block - 1) * BLOCK + a
        kt = _rows(k, j, a < BLOCK, k_stride, D, BD)
        vt = _rows(v, j, a < BLOCK, v_stride, D, BD)
        w = tl.exp2(tl.dot(ct, kt.T, input_precision=PRECISION) * scale - unit[:, None])  # [N, C]
        w = tl.where((n < N)[:, None] & (a < BLOCK)[None, :], w, 0.0)
        low = asked.to(vt.dtype)
        gv = tl.dot(w.to(vt.dtype).T, low, input_precision=PRECISION)
        ds = w * (tl.dot(low, vt.T, input_precision=PRECISION) - less[:, None])
        ds = ds.to(kt.dtype)
        gc += tl.dot(ds, kt, input_precision=PRECISION) * (scale * LN2)
        gk = tl.dot(ds.T, ct, input_precision=PRECISION) * (scale * LN2)
        gk += _rows(dk + place, j, a < BLOCK, H * D, D, BD)
        gv += _rows(dv + place, j, a < BLOCK, H * D, D, BD)
        _store(dk + place, j, a < BLOCK, gk, H * D, D, BD)
        _store(dv + place, j, a < BLOCK, gv, H * D, D, BD)
    _store(dc + row * N * D, n, n < N, gc, D, D, BD)


def _constants(q: Tensor, k: Tensor, v: Tensor, groups: int, block: int, topk: int) -> dict[str, Any]:
    heads, width = q.shape[2:]
    return {
        "q_stride": q.stride(1), "k_stride": k.stride(1), "v_stride": v.stride(1), "H": heads, "N": groups,
        "BLOCK": block, "TOP": topk, "D": width, "BD": tile_of(width), "BB": tile_of(block), "BN": tile_of(groups),
        "BP": max(2, 1 << (topk - 1).bit_length()) if topk else 2,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _plan(kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any]) -> Plan:
    names = kernel.arg_names
    warps = 4 if kernel is scan and max(constants["BD"], constants["BN"], constants["BB"]) <= 64 else 8
    return Plan(grid, numbers, {name: value for name, value in constants.items() if name in names}, warps)


def _part(constants: dict[str, Any], q: Tensor) -> int:
    """How many groups `scan_back` takes at a time: all, or a part of which all are made."""
    groups, wide, block, whole = (constants[name] for name in ("N", "BD", "BB", "BN"))
    split = 2 if q.dtype == torch.float32 else 1  # a product of float32 splits its operands
    parts = [whole, *(n for n in (64, 32, 16) if n < whole and groups % n == 0)]

    def needed(n: int) -> int:
        return max(split * 4 * n * wide + n * block, split * block * wide) * q.element_size()

    return fitting(parts, needed, shared_memory(q.device))


def read(
    q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, label: Tensor, levels: Tensor, block: int, topk: int,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What queries [B, T, H, V] read, the log of its exp-mass [B, T, H], and what backward needs."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (batch, size, heads, width), blocks = q.shape, len(levels)
    count, groups = centroids.shape[0], centroids.shape[3]
    constants = _constants(q, k, v, groups, block, topk)
    shape, device = (batch, heads, blocks, groups), q.device
    o = v.new_empty(*shape, width)
    lse = torch.empty(shape, device=device)
    lists = torch.empty(*shape, max(topk, 1), dtype=torch.int32, device=device)
    strides = (k.stride(0), k.stride(2), v.stride(0), v.stride(2))
    if blocks > 1:
        plan = _plan(scan, (count, batch * heads), (*strides, scale * LOG2E.value, blocks), constants)
        launch(scan, (centroids, k, v, o, lse, lists), plan)
    before, total = v.new_empty(batch, size, heads, width), torch.empty(batch, size, heads, device=device)
    norm = torch.empty(batch, heads, size, device=device)
    numbers = (q.stride(0), q.stride(2), *strides, scale * LOG2E.value, size, blocks)
    launch(
        pick,
        (q, centroids, k, v, o, lse, lists, label, levels, before, total, norm),
        _plan(pick, (blocks, batch * heads), numbers, constants),
    )
    return before, total, o, lse, lists, norm


def read_back(
    do: Tensor, dtotal: Tensor, o: Tensor, lse: Tensor, lists: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor,
    centroids: Tensor, label: Tensor, levels: Tensor, block: int, topk: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (batch, size, heads, width), blocks = q.shape, len(levels)
    count, groups = centroids.shape[0], centroids.shape[3]
    constants = _constants(q, k, v, groups, block, topk)
    dq, dgroup = q.new_empty(batch, size, heads, width), torch.empty_like(o)
    dk, dv = (torch.zeros(batch, size, heads, width, device=q.device) for _ in range(2))
    dlists, dmass = torch.empty_like(o) if topk else o, torch.empty_like(lse)
    dc = torch.zeros(centroids.shape, device=q.device)
    strides = (k.stride(0), k.stride(2), v.stride(0), v.stride(2))
    numbers = (q.stride(0), q.stride(2), *strides, scale * LOG2E.value, size, blocks)
    launch(
        pick_back,
        (
            q, centroids, k, v, lists, lse, label, levels, norm, do.contiguous(), dtotal.contiguous(), dq, dk, dv,
            dlists, dgroup, dmass,
        ),
        _plan(pick_back, (blocks, batch * heads), numbers, constants),
    )  # fmt: skip
    part = _part(constants, q)
    for level in range(count if blocks > 1 else 0):
        first, stop = 1 << level, min(2 << level, blocks)
        numbers = (*strides, scale * LOG2E.value, size, blocks, first, stop)
        plan = _plan(scan_back, (batch * heads,), numbers, constants | {"BN": part})
        for n in range(0, groups, part):  # one part of the groups after the other, which add to dk and dv
            rows = (x.flatten(0, -2)[n:] for x in (centroids[level], o, dgroup, dlists, dc[level]))
            ct, ot, group, lists, into = rows
            mass, dm = (x.flatten()[n:] for x in (lse, dmass))
            launch(scan_back, (ct, k, v, ot, mass, group, dm, lists, dk, dv, into), plan)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dc.to(centroids.dtype)
