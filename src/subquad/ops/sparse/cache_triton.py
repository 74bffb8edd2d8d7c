"""The Triton path of a decoding step: one kernel writes the new key and value and reads the keys of the pattern.

One program has one head of one row, or one of several splits of its keys if those are many. It finds the keys from
the row's position (reads.py), so nothing waits for the device, and the step can be captured in a CUDA graph.

Legend: B batch, C slots, H heads, K key width, V value width.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.cache_triton import joined
from subquad.ops.launch import EARLY, Plan, launch, tile_of
from subquad.ops.rotary import Turns
from subquad.ops.sparse.reads import Head, Reads
from subquad.ops.turned_triton import row_stride, turned

BLOCK = 8192  # elements of the keys, and of the values, at a time
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors
FEW = 640  # keys that are not worth splitting
LOG2E = 1.4426950408889634
FIELDS = len(Head._fields)
HIGH = tl.constexpr(1 << 32)  # see arrive
EMPTY = tl.constexpr(-1e30)  # the maximum of no scores: finite, so that differences are numbers


@triton.jit
def seen(position, b):
    """The position of a row, without the count of `arrive`."""
    return (tl.load(position + b) & (HIGH - 1)).to(tl.int32)


@triton.jit
def arrive(position, b, programs):
    """Add 1 to the row's position when the last of its programs comes here.

    Until then the others read it. The upper half of the position counts the programs that came.
    """
    tl.debug_barrier()
    before = tl.atomic_add(position + b, HIGH)
    if (before >> 32) == programs - 1:
        tl.store(position + b, (before & (HIGH - 1)) + 1)


@triton.jit
def mix(h, counter):
    """One counter into the hash of patterns._hash, in 32 bits."""
    h = (h ^ counter.to(tl.uint32)) + 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def drawn_blocks(reads, p, DRAWS: tl.constexpr, ROUND: tl.constexpr):
    """The blocks that Random draws for position p, [ROUND], filled up with -1; as patterns.Random.table draws them."""
    row = p // tl.load(reads + 10)
    wanted = tl.load(reads + 11)
    first = tl.load(reads + 16)
    choices = tl.maximum(row - tl.maximum(tl.load(reads + 15), 1) + 1 - first, 0)
    wanted = tl.minimum(wanted, choices)
    seed = mix(mix(tl.zeros((), tl.uint32), tl.load(reads + 12)), tl.load(reads + 13))
    at = tl.arange(0, ROUND)
    drawn = tl.full((ROUND,), -1, tl.int32)
    for n in tl.static_range(DRAWS):
        top = choices - wanted + n
        h = mix(mix(mix(seed, tl.full((), n, tl.int32)), tl.load(reads + 14)), row)
        rank = ((h.to(tl.int64) * (top + 1)) >> 32).to(tl.int32)
        rank = tl.where(tl.max((drawn == rank).to(tl.int32), 0) > 0, top, rank)
        drawn = tl.where((at == n) & (n < wanted), rank, drawn)
    return tl.where(drawn >= 0, drawn + first, -1)


@triton.jit
def slot_of(
    j, kept, pinned, ring, block, columns,
    EVERYTHING: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The slots of the keys at positions j; -1 if a key is not kept."""
    slot = j
    if not EVERYTHING:
        slot = tl.where(ring > 0, pinned + j % tl.maximum(ring, 1), -1)
        if LOG:
            column = j % block - kept
            in_log = (kept >= 0) & (column >= 0) & (column < columns)
            slot = tl.where(in_log, pinned + ring + j // block * columns + column, slot)
        slot = tl.where(j < pinned, j, slot)
    return slot


@triton.jit(do_not_specialize=["C", "pinned", "ring", "block", "columns", "per_head", "back"])
def step(
    q, k, v, keys, values, position, reads, cos, sin, u, w, far, o, high, mass,
    scale, H, C, pinned, ring, block, columns, per_head, back,
    qb, qh, nb, nh, vb, vh, kb, kc, kh, ob, oc, oh, tb,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    EVERYTHING: tl.constexpr, LOG: tl.constexpr, COMBS: tl.constexpr, DRAWS: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, TURN: tl.constexpr, MOVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row over one split of its keys: the running softmax of flash attention, in base 2.

    MOVES: the last program of a row adds 1 to its position. BIAS adds (q + w)·far[back - distance] to each score, and u
    to q for the keys themselves.
    """
    program = tl.program_id(0)
    split = tl.program_id(1)
    b = (program // H).to(tl.int64)
    h = (program % H).to(tl.int64)
    reads += h * per_head
    front, before, size, blocks, kept = (
        tl.load(reads), tl.load(reads + 1), tl.load(reads + 2), tl.load(reads + 3), tl.load(reads + 4)
    )  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    p = seen(position, b)
    dk, dv, dc = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    in_k, in_v = dk < K, dv < V
    query = turned(q + b * qb + h * qh, cos + b * tb, sin + b * tb, dk, K, TURN).to(tl.float32)
    new_k = turned(k + b * nb + h * nh, cos + b * tb, sin + b * tb, dk, K, TURN)
    new_v = tl.load(v + b * vb + h * vh + dv, mask=in_v, other=0.0)
    keys += b * kb + h * kh
    values += b * ob + h * oh
    if BIAS:
        second = (query + tl.load(w + h * K + dk, mask=in_k, other=0.0).to(tl.float32)) * scale
        query += tl.load(u + h * K + dk, mask=in_k, other=0.0).to(tl.float32)
        far += h * K
    query *= scale

    # the keys before p: [0, front), [start, p), then a comb or draws between the two
    start = tl.where(before >= 0, tl.maximum(p - before, 0), p)
    start = tl.where(blocks >= 0, tl.maximum(tl.minimum(start, (p // size - blocks) * size), 0), start)
    own = (before >= 0) | (blocks >= 0) | (p < front)  # whether p reads itself
    front = tl.minimum(front, start)
    near = front + p - start
    total = near
    if COMBS:
        m, count, first = tl.load(reads + 5), tl.load(reads + 6), tl.load(reads + 7)
        reach = tl.load(reads + 9)
        first = tl.where(tl.load(reads + 8) > 0, p % m, first)
        column = p % m - first
        own = own | ((reach >= 0) & (column >= 0) & (column < count))
        lowest = tl.where(reach >= 0, tl.maximum(p - reach, front), start)
        tooth = lowest // m
        total += tl.where(lowest < start, ((start - 1) // m - tooth + 1) * count, 0)
    if DRAWS > 0:
        drawn = drawn_blocks(reads, p, DRAWS, ROUND)
        places = tl.arange(0, ROUND)
        m = tl.load(reads + 10)
        total += DRAWS * m

    best = tl.full((), EMPTY, tl.float32)
    norm = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BV,), tl.float32)
    if split == 0:
        score = tl.sum(query * new_k.to(tl.float32), 0)
        if BIAS:
            score += tl.sum(second * tl.load(far + back.to(tl.int64) * H * K + dk, mask=in_k, other=0.0), 0)
        best = tl.where(own, score, best)
        norm = tl.where(own, 1.0, norm)
        acc = tl.where(own, new_v.to(tl.float32), acc)
    share = tl.cdiv(tl.cdiv(total, SPLITS), BC) * BC
    end = tl.minimum(split * share + share, total)
    for at in tl.range(split * share, end, BC):
        n = at + dc
        j = tl.where(n < front, n, start - front + n)
        there = n < near
        if COMBS:
            x = n - near
            tine = (tooth + x // count) * m + first + x % count
            there = there | ((x >= 0) & (tine >= lowest) & (tine < start) & (n < end))
            j = tl.where(x >= 0, tine, j)
        if DRAWS > 0:
            x = n - near
            which = tl.where(places[None, :] == (x // m)[:, None], drawn[None, :], -1)
            which = tl.max(which, 1)
            tine = which * m + x % m
            there = there | ((x >= 0) & (which >= 0) & (tine >= front) & (tine < start) & (n < end))
            j = tl.where(x >= 0, tine, j)
        slot = slot_of(j, kept, pinned, ring, block, columns, EVERYTHING, LOG)
        there = there & (slot >= 0) & (slot < C)
        slot = slot.to(tl.int64)
        mask_k, mask_v = there[:, None] & in_k[None, :], there[:, None] & in_v[None, :]
        cached_k = tl.load(keys + slot[:, None] * kc + dk[None, :], mask=mask_k, other=0.0)
        cached_v = tl.load(values + slot[:, None] * oc + dv[None, :], mask=mask_v, other=0.0)
        scores = tl.sum(cached_k.to(tl.float32) * query[None, :], 1)
        if BIAS:
            row = (back - p + j).to(tl.int64)
            bias = tl.load(far + row[:, None] * H * K + dk[None, :], mask=mask_k, other=0.0)
            scores += tl.sum(bias.to(tl.float32) * second[None, :], 1)
        scores = tl.where(there, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        weights = tl.exp2(scores - higher)
        fade = tl.exp2(best - higher)
        norm = norm * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * cached_v.to(tl.float32), 0)
        best = higher

    out = (program.to(tl.int64) * SPLITS + split) * V
    if SPLITS == 1:
        tl.store(o + out + dv, (acc / tl.where(norm > 0, norm, 1.0)).to(o.dtype.element_ty), mask=in_v)
    else:
        tl.store(o + out + dv, acc, mask=in_v)
        tl.store(high + program * SPLITS + split, best)
        tl.store(mass + program * SPLITS + split, norm)
    # last, because a ring of only `before` slots has the oldest key, which the first split reads, in the new one's slot
    tl.debug_barrier()
    if split == 0:
        slot = slot_of(p, kept, pinned, ring, block, columns, EVERYTHING, LOG)
        there = (slot >= 0) & (slot < C)
        slot = slot.to(tl.int64)
        tl.store(keys + slot * kc + dk, new_k.to(keys.dtype.element_ty), mask=in_k & there)
        tl.store(values + slot * oc + dv, new_v.to(values.dtype.element_ty), mask=in_v & there)
    if MOVES:
        arrive(position, b, H)


@triton.jit
def merge(
    parts, high, mass, position, o, H,
    V: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, MOVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits of one head of one row as one; the first head counts the token."""
    program = tl.program_id(0)
    dv = tl.arange(0, BV)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = program.to(tl.int64)
    y = joined(parts, high, mass, row, V, BV, SPLITS)
    tl.store(o + row * V + dv, y.to(o.dtype.element_ty), mask=dv < V)
    if MOVES and program % H == 0:
        b = program // H
        tl.store(position + b, tl.load(position + b) + 1)


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    reads: Reads,
    scale: float,
    moves: bool = True,
    by: Turns | None = None,
    bias: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """One token of each row: q, k [B, H, K], v [B, H, V] -> o [B, H, V]. Writes to keys, values and, if it `moves`,
    position. `by` turns q and k first.

    `bias`: u and w [H, K], and the keys of distances back .. 0, [back + 1, H, K]; see `step`.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (b, h, width_k), width_v, size = q.shape, v.shape[-1], keys.shape[1]
    wide_k, wide_v = tile_of(width_k), tile_of(width_v)
    most = reads.most(size)
    rows = max(16, min(BLOCK // max(wide_k, wide_v) // (1 if bias is None else 2), tile_of(most)))
    splits = 1
    while splits * b * h < PROGRAMS and splits * FEW < most:
        splits *= 2
    o = torch.empty(b, h, width_v, device=q.device, dtype=q.dtype)
    parts, high, mass = o, o, o
    if splits > 1:
        parts = torch.empty(b, h, splits, width_v, device=q.device)
        high, mass = torch.empty(2, b, h, splits, device=q.device)
    table = _table(reads.heads, q.device)
    u, w, far = bias or (q, q, q)
    cos, sin = by or (q, q)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    layout = (size, reads.pinned, reads.ring, reads.block, reads.columns)
    one = len(reads.heads) == 1
    numbers = (
        scale * LOG2E,
        h,
        *layout,
        0 if one else FIELDS,
        len(far) - 1,
        *strides,
        row_stride(None if by is None else cos),
    )
    constants = {
        "K": width_k,
        "V": width_v,
        "BK": wide_k,
        "BV": wide_v,
        "BC": rows,
        "SPLITS": splits,
        "EVERYTHING": reads.everything,
        "LOG": reads.columns > 0 and not reads.everything,
        "COMBS": reads.combs,
        "DRAWS": reads.draws,
        "ROUND": max(2, 1 << (reads.draws - 1).bit_length()) if reads.draws else 1,
        "BIAS": bias is not None,
        "TURN": by is not None,
        "MOVES": moves and splits == 1,
        "EARLY": EARLY,
    }
    tensors = (q, k, v, keys, values, position, table, cos, sin, u, w, far, parts, high, mass)
    launch(step, tensors, Plan((b * h, splits), numbers, constants, stages=2, early=EARLY))
    if splits > 1:
        constants = {"V": width_v, "BV": wide_v, "SPLITS": splits, "MOVES": moves, "EARLY": EARLY}
        launch(merge, (parts, high, mass, position, o), Plan((b * h,), (h,), constants, early=EARLY))
    return o


@lru_cache(maxsize=256)
def _table(heads: tuple[Head, ...], device: torch.device) -> Tensor:
    """Copied there only once: a copy during a call waits, and cannot be captured in a CUDA graph."""
    return torch.tensor(heads, dtype=torch.int32, device=device)
