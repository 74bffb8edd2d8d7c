"""The Triton kernels of sparse attention: flash attention over tiles whose tokens need not be consecutive.

A program holds a tile of queries (forward, dq) or of keys (dkv) and loops over the tiles of the other side that an atom
of the pattern can reach. Inside a tile it evaluates the rule of the atom, and leaves out pairs of earlier atoms. Both
are skipped if the corners of the tile show that every pair is visible.

No compile-time constant depends on the length of the sequence.
"""
# ruff: noqa: RET505 (Triton needs every branch of a compile-time test)

import triton
import triton.language as tl

# atoms as four integers: the kind and its parameters
GLOBAL = tl.constexpr(0)  # tokens
LOCAL = tl.constexpr(1)  # before, after
BLOCK = tl.constexpr(2)  # l, before, after
DILATED = tl.constexpr(3)  # window, gap
STRIDED = tl.constexpr(4)  # l
SUMMARY = tl.constexpr(5)  # l, c, first column of a block; -1: each head has its own, in `firsts`
RANDOM = tl.constexpr(6)  # block size, blocks of a row
DENSE = tl.constexpr(7)
ROWS = tl.constexpr(8)  # tokens: the queries that read everything, for passes over keys
STRIP = tl.constexpr(9)  # as SUMMARY: a summary without its far part, see `far_backward`
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

# Arguments that change with the length. Triton must not compile another kernel if they are 1 or a multiple of 16.
CHANGING = [
    "T", "S", "tiles", "row0", "rows", "col0", "cols", "pad", "shift", "low", "split", "table_rows",
    "lse_piece", "lse_head", "table_batch", "table_head", "far_batch",
    "starts_batch", "starts_head", "readers_batch", "readers_head",
]  # fmt: skip


@triton.jit
def _held(i, j, first, A: tl.constexpr, n: tl.constexpr):
    """Whether atom n holds the pairs (i, j), elementwise; `first`: the first column of a block if heads differ."""
    d = i - j
    if A[4 * n] == GLOBAL:
        return (i < A[4 * n + 1]) | (j < A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        return (d <= A[4 * n + 1]) & (d >= -A[4 * n + 2])
    elif A[4 * n] == BLOCK:
        apart = i // A[4 * n + 1] - j // A[4 * n + 1]
        return (apart <= A[4 * n + 2]) & (apart >= -A[4 * n + 3])
    elif A[4 * n] == DILATED:
        span: tl.constexpr = A[4 * n + 1] * A[4 * n + 2]
        return (d <= span) & (d >= -span) & (d % A[4 * n + 2] == 0)
    elif A[4 * n] == STRIDED:
        return d % A[4 * n + 1] == 0
    elif A[4 * n] == SUMMARY:
        start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
        place = j % A[4 * n + 1] + 0 * i
        return (place >= start) & (place < start + A[4 * n + 2])
    elif A[4 * n] == STRIP:
        start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
        s = j // A[4 * n + 1] * A[4 * n + 2] + j % A[4 * n + 1] - start
        late = s > i // (A[4 * n + 1] // A[4 * n + 2]) - A[4 * n + 2]
        place = j % A[4 * n + 1]
        column = (place >= start) & (place < start + A[4 * n + 2])
        return column & late & (j // A[4 * n + 1] < i // A[4 * n + 1])
    else:
        return d == d


@triton.jit
def _whole(i0, i1, j0, j1, A: tl.constexpr, n: tl.constexpr):
    """Whether atom n surely holds all pairs between the corners.

    With the corners swapped (i1, i0, j1, j0): whether it may hold any of them.
    """
    if A[4 * n] == GLOBAL:
        return (i1 < A[4 * n + 1]) | (j1 < A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        return (i1 - j0 <= A[4 * n + 1]) & (j1 - i0 <= A[4 * n + 2])
    elif A[4 * n] == BLOCK:
        l: tl.constexpr = A[4 * n + 1]  # noqa: E741
        return (i1 // l - j0 // l <= A[4 * n + 2]) & (j1 // l - i0 // l <= A[4 * n + 3])
    elif A[4 * n] == DILATED:
        span: tl.constexpr = A[4 * n + 1] * A[4 * n + 2]
        return (i1 - j0 <= span) & (j1 - i0 <= span)
    elif A[4 * n] == STRIP:
        return i0 != i0
    else:
        return i0 == i0


@triton.jit
def _free(i0, i1, j0, j1, lattice, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether every pair between the corners is visible through atom n and belongs to no earlier one."""
    free = _whole(i0, i1, j0, j1, A, n)
    if A[4 * n] == STRIDED or A[4 * n] == DILATED:
        free = free & (lattice[2] < 0)  # one residue
    if A[4 * n] != ROWS:
        for e in tl.static_range(0, n):
            free = free & (_whole(i1, i0, j1, j0, A, e) == 0)
    if CAUSAL:
        free = free & (j1 <= i0)
    return free


@triton.jit
def _seen(i, j, x, own, first, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr):
    """Which pairs are visible through atom n and in no earlier one. RANDOM: `x` must be in the block `own`."""
    if A[4 * n] == RANDOM:
        seen = (x // A[4 * n + 1] == own) & (i == i) & (j == j)
    elif A[4 * n] == SUMMARY:
        seen = (i == i) & (j == j)  # all keys of the loop are its columns
    else:
        seen = _held(i, j, first, A, n)
    if A[4 * n] != ROWS:
        for e in tl.static_range(0, n):
            seen = seen & (_held(i, j, first, A, e) == 0)
    if CAUSAL:
        seen = seen & (j <= i)
    return seen


@triton.jit
def _place(f, a, lattice, STEP: tl.constexpr):
    """The positions of the entries a after index f: consecutive, or in the order of a lattice, residue by residue."""
    if STEP == 1:
        return f + a
    else:
        pad, shift, low = lattice
        return f // pad + (a >> shift) + STEP * (f % pad + (a & low))


@triton.jit
def _corners(f, lattice, STEP: tl.constexpr, N: tl.constexpr):
    """The positions of index f and of the last of N entries."""
    first = f if STEP == 1 else f // lattice[0] + STEP * (f % lattice[0])
    return first, first + STEP * (N - 1)


@triton.jit
def _column(s, first, A: tl.constexpr, n: tl.constexpr):
    """The position of the s-th column of a summary."""
    start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
    return s // A[4 * n + 2] * A[4 * n + 1] + start + s % A[4 * n + 2]


@triton.jit
def _columns_below(x, first, A: tl.constexpr, n: tl.constexpr):
    """How many columns of a summary lie before position x."""
    start = first if A[4 * n + 3] < 0 else A[4 * n + 3]
    return x // A[4 * n + 1] * A[4 * n + 2] + tl.minimum(tl.maximum(x % A[4 * n + 1] - start, 0), A[4 * n + 2])


@triton.jit
def _lattice_range(f, lattice, A: tl.constexpr, n: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr):
    """The indices that the B entries from index f on can reach, or be reached from, in a lattice."""
    pad = lattice[0]
    lo = f // pad * pad
    hi = ((f + B - 1) // pad + 1) * pad
    if A[4 * n] == DILATED:
        lo = tl.maximum(lo, f - A[4 * n + 1])
        hi = tl.minimum(hi, f + B + A[4 * n + 1])
    return lo, tl.minimum(hi, STEP * pad)


@triton.jit
def _key_range(
    f, i0, i1, end, lattice, first, table_rows, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Which of atom n's keys the queries i0 .. i1 (from index f on) can reach; `end` is the number of keys.

    RANDOM: which of the tiles that they drew, see `_drawn`.
    """
    lo = 0
    hi = end
    if A[4 * n] == GLOBAL:
        hi = tl.minimum(hi, A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        lo = i0 - A[4 * n + 1]
        hi = tl.minimum(hi, i1 + A[4 * n + 2] + 1)
    elif A[4 * n] == BLOCK:
        lo = (i0 // A[4 * n + 1] - A[4 * n + 2]) * A[4 * n + 1]
        hi = tl.minimum(hi, (i1 // A[4 * n + 1] + A[4 * n + 3] + 1) * A[4 * n + 1])
    elif A[4 * n] == STRIP:
        lo = i0 // (A[4 * n + 1] // A[4 * n + 2]) - A[4 * n + 2] + 1
        hi = i1 // A[4 * n + 1] * A[4 * n + 2]
    elif A[4 * n] == RANDOM:
        draws = tl.minimum(i1 // A[4 * n + 1], table_rows - 1) - i0 // A[4 * n + 1] + 1
        return 0, draws * A[4 * n + 2] * ((A[4 * n + 1] + BN - 1) // BN)
    if STEP != 1:
        lo, hi = _lattice_range(f, lattice, A, n, STEP, BM)
        if CAUSAL:
            hi = tl.minimum(hi, f + BM)
    else:
        if CAUSAL and A[4 * n] != STRIP:
            hi = tl.minimum(hi, i1 + 1)
        if A[4 * n] == SUMMARY:
            hi = _columns_below(hi, first, A, n)
        elif A[0] == GLOBAL and A[4 * n] != GLOBAL:
            lo = tl.maximum(lo, A[1])
        lo = tl.maximum(lo, 0)
    return lo, hi


@triton.jit
def _query_range(
    f, j0, j1, T, row0, lattice, first, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Which queries can reach the keys j0 .. j1 (from index f on) through atom n."""
    lo = row0
    hi = T
    if A[4 * n] == GLOBAL:
        lo = 0
    elif A[4 * n] == ROWS:
        lo = 0
        hi = tl.minimum(hi, A[4 * n + 1])
    elif A[4 * n] == LOCAL:
        lo = tl.maximum(lo, j0 - A[4 * n + 2])
        hi = tl.minimum(hi, j1 + A[4 * n + 1] + 1)
    elif A[4 * n] == BLOCK:
        lo = tl.maximum(lo, (j0 // A[4 * n + 1] - A[4 * n + 3]) * A[4 * n + 1])
        hi = tl.minimum(hi, (j1 // A[4 * n + 1] + A[4 * n + 2] + 1) * A[4 * n + 1])
    elif A[4 * n] == STRIP:
        lo = (j0 // A[4 * n + 1] + 1) * A[4 * n + 1]
        hi = tl.minimum(hi, (j1 // A[4 * n + 1] + 2) * A[4 * n + 1])
        if _columns_below(j0, first, A, n) == _columns_below(j1 + 1, first, A, n):
            hi = lo
    if STEP != 1:
        lo, hi = _lattice_range(f, lattice, A, n, STEP, BN)
        if CAUSAL:
            lo = tl.maximum(lo, f)
    elif CAUSAL:
        lo = tl.maximum(lo, j0)
    return lo, hi


@triton.jit
def _places(at, ok, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Offsets of the elements of rows, and which of them exist."""
    d = tl.arange(0, BD)
    ok = ok[:, None]
    if D != BD:
        ok = ok & (d[None, :] < D)
    return at.to(tl.int64)[:, None] * stride + d[None, :], ok


@triton.jit
def _rows(x, at, ok, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a head at positions `at`, zeros where not ok."""
    place, ok = _places(at, ok, stride, D, BD)
    return tl.load(x + place, mask=ok, other=0.0)


@triton.jit
def _store(x, at, ok, rows, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    place, ok = _places(at, ok, stride, D, BD)
    tl.store(x + place, rows.to(x.dtype.element_ty), mask=ok)


@triton.jit
def _keys(s0, hi, klen, lattice, first, A: tl.constexpr, n: tl.constexpr, STEP: tl.constexpr, BN: tl.constexpr):
    """The keys from index s0 on: their positions, which of them exist, the corners, and whether all exist."""
    a = tl.arange(0, BN)
    if A[4 * n] == SUMMARY or A[4 * n] == STRIP:
        j = _column(s0 + a, first, A, n)
        j0 = _column(s0, first, A, n)
        j1 = _column(s0 + BN - 1, first, A, n)
    else:
        j = _place(s0, a, lattice, STEP)
        j0, j1 = _corners(s0, lattice, STEP, BN)
    return j, (s0 + a < hi) & (j < klen), j0, j1, (s0 + BN <= hi) & (j1 < klen)


@triton.jit
def _drawn(t, i0, klen, table, A: tl.constexpr, n: tl.constexpr, BN: tl.constexpr):
    """Tile t of the blocks that the queries from i0 on drew: its first key, the end of its keys, and who drew it."""
    per = (A[4 * n + 1] + BN - 1) // BN
    entry = i0 // A[4 * n + 1] * A[4 * n + 2] + t // per
    block = tl.load(table + entry)
    s0 = tl.maximum(block, 0) * A[4 * n + 1] + t % per * BN
    hi = tl.where(block < 0, 0, tl.minimum((block + 1) * A[4 * n + 1], klen))
    return s0, hi, entry // A[4 * n + 2]


@triton.jit
def _query_tile(
    lengths, key_lengths, T, S, tiles, row0, rows, lattice, LENGTHS: tl.constexpr, STEP: tl.constexpr, H: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """The tile of queries of this program: sequence and head; first index, positions, corners and which queries exist;
    the lengths of the queries and keys of the sequence."""
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    klen = S
    end = T
    if LENGTHS:
        klen = tl.load(key_lengths + b).to(tl.int32)
        end = tl.load(lengths + b).to(tl.int32)
    f = row0 + tile * BM
    a = tl.arange(0, BM)
    i = _place(f, a, lattice, STEP)
    i0, i1 = _corners(f, lattice, STEP, BM)
    here = i < rows
    if STEP != 1:
        here = here & (f + a < STEP * lattice[0])
    return b, h, f, i, i0, i1, here, end, klen


@triton.jit
def _forward_part(
    acc, m, z, q, f, i, i0, i1, rows, klen, k, v, k_stride: tl.constexpr, v_stride: tl.constexpr, scale, lattice, first,
    table, table_rows, piece, split, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Continues the softmax of a tile of queries with the keys of atom n."""
    lo, end = _key_range(f, i0, tl.minimum(i1, rows - 1), klen, lattice, first, table_rows, A, n, CAUSAL, STEP, BM, BN)
    if SPLITS:
        lo = piece * split
        end = tl.minimum(end, lo + split)
    for at in tl.range(lo, end, 1 if A[4 * n] == RANDOM else BN):
        s0 = at
        hi = end
        own = 0
        if A[4 * n] == RANDOM:
            s0, hi, own = _drawn(at, i0, klen, table, A, n, BN)
        j, ok, j0, j1, free = _keys(s0, hi, klen, lattice, first, A, n, STEP, BN)
        kt = _rows(k, j, ok, k_stride, D, BD)
        s = tl.dot(q, kt.T, input_precision=PRECISION)
        free = free & _free(i0, i1, j0, j1, lattice, A, n, CAUSAL)
        if A[4 * n] == RANDOM:
            free = free & (i0 // A[4 * n + 1] == own) & (i1 // A[4 * n + 1] == own)
        if not free:
            seen = _seen(i[:, None], j[None, :], i[:, None], own, first, A, n, CAUSAL)
            s = tl.where(seen & ok[None, :], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * scale)
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s * scale - base[:, None])
        fade = tl.exp2(m - base)
        z = z * fade + tl.sum(p, 1)
        vt = _rows(v, j, ok, v_stride, D, BD)
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
        m = top
    return acc, m, z


@triton.jit(do_not_specialize=CHANGING)
def _forward(
    q, k, v, o, lse, lengths, key_lengths, table, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    o_piece, o_batch, lse_piece, lse_head, table_batch, table_head,
    scale_log2, T, S, tiles, row0, rows, pad, shift, low, split, table_rows,
    A: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr, CONTINUE: tl.constexpr,
    SPLITS: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the queries row0 .. rows - 1: starts or continues their softmax with the keys of the atoms PARTS."""
    lattice = (pad, shift, low)
    b, h, f, i, i0, i1, here, end, klen = _query_tile(
        lengths, key_lengths, T, S, tiles, row0, rows, lattice, LENGTHS, STEP, H, BM
    )
    piece = tl.program_id(1)
    first = tl.load(firsts + h) if FIRSTS else 0
    q += b * q_batch + h * q_head
    k += b * k_batch + h // SHARE * k_head
    v += b * v_batch + h // SHARE * v_head
    o += piece * o_piece + b * o_batch + h * D
    lse += piece * lse_piece + (b * H + h) * lse_head
    table += b * table_batch + h * table_head
    qt = _rows(q, i, here & (i < end), q_stride, D, BD)
    if CONTINUE:
        before = tl.load(lse + i, mask=here, other=float("-inf"))
        m = before * LOG2E
        z = tl.where(before == float("-inf"), 0.0, 1.0)
        acc = _rows(o, i, here, H * D, D, BD).to(tl.float32)
    else:
        m = tl.full([BM], float("-inf"), tl.float32)
        z = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
    for part in tl.static_range(len(PARTS)):
        acc, m, z = _forward_part(
            acc, m, z, qt, f, i, i0, i1, rows, klen, k, v, k_stride, v_stride, scale_log2, lattice, first, table,
            table_rows, piece, split, A, PARTS[part], CAUSAL, STEP, SPLITS, BM, BN, D, BD, PRECISION,
        )  # fmt: skip
    alive = (z > 0) & (i < end)
    z = tl.where(z > 0, z, 1.0)
    _store(o, i, here, tl.where(alive[:, None], acc / z[:, None], 0.0), H * D, D, BD)
    tl.store(lse + i, tl.where(alive, (m + tl.log2(z)) * LN2, float("-inf")), mask=here)


@triton.jit
def _dq_part(
    dq, q, do, norm, delta, f, i, i0, i1, rows, klen, k, v, k_stride: tl.constexpr, v_stride: tl.constexpr, scale,
    lattice, first, table, table_rows, piece, split, A: tl.constexpr, n: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dq the part of the keys of atom n."""
    lo, end = _key_range(f, i0, tl.minimum(i1, rows - 1), klen, lattice, first, table_rows, A, n, CAUSAL, STEP, BM, BN)
    if SPLITS:
        lo = piece * split
        end = tl.minimum(end, lo + split)
    for at in tl.range(lo, end, 1 if A[4 * n] == RANDOM else BN):
        s0 = at
        hi = end
        own = 0
        if A[4 * n] == RANDOM:
            s0, hi, own = _drawn(at, i0, klen, table, A, n, BN)
        j, ok, j0, j1, free = _keys(s0, hi, klen, lattice, first, A, n, STEP, BN)
        kt = _rows(k, j, ok, k_stride, D, BD)
        vt = _rows(v, j, ok, v_stride, D, BD)
        p = tl.exp2(tl.dot(q, kt.T, input_precision=PRECISION) * scale - norm[:, None])
        free = free & _free(i0, i1, j0, j1, lattice, A, n, CAUSAL)
        if A[4 * n] == RANDOM:
            free = free & (i0 // A[4 * n + 1] == own) & (i1 // A[4 * n + 1] == own)
        if not free:
            seen = _seen(i[:, None], j[None, :], i[:, None], own, first, A, n, CAUSAL)
            p = tl.where(seen & ok[None, :], p, 0.0)
        dp = tl.dot(do, vt.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(kt.dtype), kt, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=CHANGING)
def _dq(
    q, k, v, o, do, lse, dlse, stats, dq, far, lengths, key_lengths, table, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    do_batch, do_stride: tl.constexpr, do_head, dq_piece, dq_batch, far_batch, table_batch, table_head,
    scale, scale_log2, T, S, tiles, row0, rows, pad, shift, low, split, table_rows,
    A: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr, CONTINUE: tl.constexpr,
    SPLITS: tl.constexpr, FAR: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, DLSE: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries. The first pass writes to `stats` what all other passes need: for each query its norm,
    the log-sum-exp in base 2, and delta = Σ do·o, minus the gradient of the log-sum-exp.
    FAR: the first query with gradients in `far`, which were computed separately; -1 without any."""
    lattice = (pad, shift, low)
    b, h, f, i, i0, i1, here, end, klen = _query_tile(
        lengths, key_lengths, T, S, tiles, row0, rows, lattice, LENGTHS, STEP, H, BM
    )
    piece = tl.program_id(1)
    first = tl.load(firsts + h) if FIRSTS else 0
    q += b * q_batch + h * q_head
    k += b * k_batch + h // SHARE * k_head
    v += b * v_batch + h // SHARE * v_head
    o += b * T * (H * D) + h * D
    do += b * do_batch + h * do_head
    dq += piece * dq_piece + b * dq_batch + h * D
    stats += (b * H + h) * T * 2
    table += b * table_batch + h * table_head
    alive = here & (i < end)
    qt = _rows(q, i, alive, q_stride, D, BD)
    dot = _rows(do, i, alive, do_stride, D, BD)
    if CONTINUE:
        norm = tl.load(stats + 2 * i, mask=alive, other=float("inf"))
        delta = tl.load(stats + 2 * i + 1, mask=alive, other=0.0)
    else:
        norm = tl.load(lse + (b * H + h) * T + i, mask=alive, other=float("inf"))
        # a row that sees nothing has -inf: its probabilities must be 0, not exp(-inf + inf)
        norm = tl.where(norm == float("-inf"), float("inf"), norm) * LOG2E
        delta = tl.sum(_rows(o, i, alive, H * D, D, BD).to(tl.float32) * dot.to(tl.float32), 1)
        if DLSE:
            delta -= tl.load(dlse + (b * H + h) * T + i, mask=alive, other=0.0)
        tl.store(stats + 2 * i, norm, mask=here)
        tl.store(stats + 2 * i + 1, delta, mask=here)
    grad = tl.zeros([BM, BD], tl.float32)
    for part in tl.static_range(len(PARTS)):
        grad = _dq_part(
            grad, qt, dot, norm, delta, f, i, i0, i1, rows, klen, k, v, k_stride, v_stride, scale_log2, lattice, first,
            table, table_rows, piece, split, A, PARTS[part], CAUSAL, STEP, SPLITS, BM, BN, D, BD, PRECISION,
        )  # fmt: skip
    grad *= scale
    if CONTINUE:
        grad += _rows(dq, i, here, H * D, D, BD).to(tl.float32)
    if FAR >= 0:
        far += b * far_batch + h * D
        grad += _rows(far, i - FAR, here & (i >= FAR), H * D, D, BD).to(tl.float32)
    _store(dq, i, here, grad, H * D, D, BD)


@triton.jit
def _dkv_tile(
    dk, dv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, own, q, do, stats,
    q_stride: tl.constexpr, do_stride: tl.constexpr, scale, lattice, first, A: tl.constexpr, n: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv of a tile of keys the part of one tile of queries."""
    a = tl.arange(0, BM)
    i = _place(s0, a, lattice, STEP)
    i0, i1 = _corners(s0, lattice, STEP, BM)
    alive = (s0 + a < hi) & (i < end)
    qt = _rows(q, i, alive, q_stride, D, BD)
    dot = _rows(do, i, alive, do_stride, D, BD)
    pair = tl.load(stats + 2 * i[:, None] + tl.arange(0, 2)[None, :], mask=alive[:, None], other=1e30)
    e, d = tl.split(pair)
    p = tl.exp2(tl.dot(kt, qt.T, input_precision=PRECISION) * scale - e[None, :])  # [BN, BM]
    free = whole & _free(i0, i1, j0, j1, lattice, A, n, CAUSAL)
    if A[4 * n] == RANDOM:
        free = free & (j0 // A[4 * n + 1] == own) & (j1 // A[4 * n + 1] == own)
    if not free:
        seen = _seen(i[None, :], j[:, None], j[:, None], own, first, A, n, CAUSAL)
        p = tl.where(seen & ok[:, None], p, 0.0)
    dv = tl.dot(p.to(dot.dtype), dot, dv, input_precision=PRECISION)
    dp = tl.dot(vt, dot.T, input_precision=PRECISION)
    ds = p * (dp - d[None, :])
    dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=CHANGING)
def _dkv(
    q, k, v, do, stats, dk, dv, lengths, key_lengths, starts, readers, firsts,
    q_batch, q_stride: tl.constexpr, q_head, k_batch, k_stride: tl.constexpr, k_head,
    v_batch, v_stride: tl.constexpr, v_head,
    do_batch, do_stride: tl.constexpr, do_head, dk_piece, dk_batch,
    starts_batch, starts_head, readers_batch, readers_head,
    scale, scale_log2, T, S, tiles, row0, col0, cols, pad, shift, low, split,
    A: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    CONTINUE: tl.constexpr, SPLITS: tl.constexpr, LENGTHS: tl.constexpr, FIRSTS: tl.constexpr, H: tl.constexpr,
    SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, with indices col0 .. cols - 1 among the columns of the atom KEYS."""
    HKV: tl.constexpr = H // SHARE
    lattice = (pad, shift, low)
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % HKV
    b = (tl.program_id(0) // tiles // HKV).to(tl.int64)
    piece = tl.program_id(1)
    first = tl.load(firsts + h * SHARE) if FIRSTS else 0
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dk += piece * dk_piece + b * dk_batch + h * D
    dv += piece * dk_piece + b * dk_batch + h * D
    klen = S
    end = T
    if LENGTHS:
        klen = tl.load(key_lengths + b).to(tl.int32)
        end = tl.load(lengths + b).to(tl.int32)
    f = col0 + tile * BN
    j, here, j0, j1, whole = _keys(f, cols, S, lattice, first, A, KEYS, STEP, BN)
    ok = here & (j < klen)
    whole = whole & (j1 < klen)
    kt = _rows(k, j, ok, k_stride, D, BD)
    vt = _rows(v, j, ok, v_stride, D, BD)
    gk = tl.zeros([BN, BD], tl.float32)
    gv = tl.zeros([BN, BD], tl.float32)
    for g in tl.range(0, SHARE):
        head = h * SHARE + g
        qh = q + b * q_batch + head * q_head
        doh = do + b * do_batch + head * do_head
        statsh = stats + (b * H + head) * T * 2
        for part in tl.static_range(len(PARTS)):
            if A[4 * PARTS[part]] == RANDOM:
                per = (A[4 * PARTS[part] + 1] + BM - 1) // BM
                last = (tl.minimum(j1, S - 1) // A[4 * PARTS[part] + 1]).to(tl.int32)
                for own in tl.range((j0 // A[4 * PARTS[part] + 1]).to(tl.int32), last + 1):
                    at = tl.load(starts + b * starts_batch + head * starts_head + own)
                    stop = tl.load(starts + b * starts_batch + head * starts_head + own + 1)
                    for t in tl.range(0, (stop - at) * per):
                        row = tl.load(readers + b * readers_batch + head * readers_head + at + t // per)
                        s0 = row * A[4 * PARTS[part] + 1] + t % per * BM
                        hi = tl.minimum((row + 1) * A[4 * PARTS[part] + 1], T)
                        gk, gv = _dkv_tile(
                            gk, gv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, own, qh, doh, statsh,
                            q_stride, do_stride, scale_log2, lattice, first,
                            A, PARTS[part], CAUSAL, STEP, BM, D, BD, PRECISION,
                        )  # fmt: skip
            else:
                lo, hi = _query_range(f, j0, j1, T, row0, lattice, first, A, PARTS[part], CAUSAL, STEP, BN)
                if SPLITS:
                    lo = tl.maximum(lo, piece * split)
                    hi = tl.minimum(hi, piece * split + split)
                for s0 in tl.range(lo, hi, BM):
                    gk, gv = _dkv_tile(
                        gk, gv, kt, vt, j, j0, j1, ok, whole, s0, hi, end, 0, qh, doh, statsh,
                        q_stride, do_stride, scale_log2, lattice, first,
                        A, PARTS[part], CAUSAL, STEP, BM, D, BD, PRECISION,
                    )  # fmt: skip
    gk *= scale
    if CONTINUE:
        gk += _rows(dk, j, here, HKV * D, D, BD).to(tl.float32)
        gv += _rows(dv, j, here, HKV * D, D, BD).to(tl.float32)
    _store(dk, j, here, gk, HKV * D, D, BD)
    _store(dv, j, here, gv, HKV * D, D, BD)


@triton.jit(do_not_specialize=CHANGING)
def _far(
    k, v, far_k, far_v, firsts, k_batch, k_stride: tl.constexpr, k_head, v_batch, v_stride: tl.constexpr, v_head,
    tiles, rows, A: tl.constexpr, n: tl.constexpr, COPIES: tl.constexpr, BACK: tl.constexpr, FIRSTS: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Copies one tile of the first `rows` columns of a summary, once for each query that acts as a head.

    BACK: adds the gradients of the copies to the gradients of k and v.
    """
    # neighbouring programs take neighbouring heads, which are adjacent in memory
    h = tl.program_id(0) % H
    tile = tl.program_id(0) // H % tiles
    b = (tl.program_id(0) // H // tiles).to(tl.int64)
    s = tile * BN + tl.arange(0, BN)
    first = tl.load(firsts + h) if FIRSTS else 0
    j = _column(s, first, A, n)
    here = s < rows
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    kt = _rows(k, j, here, k_stride, D, BD)
    vt = _rows(v, j, here, v_stride, D, BD)
    if BACK:
        kt = kt.to(tl.float32)
        vt = vt.to(tl.float32)
    for copy in tl.static_range(COPIES):
        at = b * rows * (COPIES * H * D) + (copy * H + h) * D
        if BACK:
            kt += _rows(far_k + at, s, here, COPIES * H * D, D, BD).to(tl.float32)
            vt += _rows(far_v + at, s, here, COPIES * H * D, D, BD).to(tl.float32)
        else:
            _store(far_k + at, s, here, kt, COPIES * H * D, D, BD)
            _store(far_v + at, s, here, vt, COPIES * H * D, D, BD)
    if BACK:
        _store(k, j, here, kt, k_stride, D, BD)
        _store(v, j, here, vt, v_stride, D, BD)
