"""Exact softmax over a pattern, at the cost of the pattern.

A union of atoms is cut into disjoint parts, and each part is dense attention once its tokens are re-addressed:

    Local, Block          a tile of queries against the run of keys that it can reach
    Strided, Dilated      the tokens of one residue, r, r + l, r + 2l, ..., stand side by side: a stride becomes dense
    Summary               the columns, each head's own, are gathered once and stand side by side
    Global                the columns are a run of keys
    Global, not causal    the rows are gathered, and read every key
    Random                a block of queries against the blocks it drew

The parts are disjoint because a part keeps a pair only if no earlier atom of the union holds it; that predicate is
evaluated on the positions inside a tile, so it is exact for any union. Parts that share a tile of queries share one
softmax, the others are merged by their log-sum-exp. The backward recomputes each tile from the merged log-sum-exp.
Nothing of size [T, T] is made, and memory is linear in T.
"""
# ruff: noqa: ARG001 (the operators and their shape-only twins take the same arguments, whether they need them or not)

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import check_heads, checked
from subquad.ops.impl import choose
from subquad.ops.lengths import check_op_lengths
from subquad.ops.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary, from_json

__all__ = ["sparse_attention"]

Fn = TypeVar("Fn")
Position = TypeVar("Position", int, Tensor)

TILE = 128  # queries of a tile
STRAIGHT = (Global, Local, Block, Dense)  # atoms of which consecutive queries read a run of keys
BUDGET = 2**22  # elements of gathered keys, and of scores of one head, that are alive at once


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    causal: bool = ...,
    lengths: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    impl: str = ...,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    causal: bool = ...,
    lengths: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    impl: str = ...,
) -> tuple[Tensor, Tensor]: ...
@checked
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ) v over the pairs of `pattern`: q [B, T, H, D], k and v [B, S, Hkv, D] -> [B, T, H, D].

    `pattern` is one pattern, or one per query head. H is a multiple of Hkv, and neighbouring query heads share a key
    head. `causal` keeps j <= i and needs S = T; otherwise S may differ, with rows and columns counted from 0.
    `lengths` [B] is right padding: keys from `lengths` on (or from `key_lengths`, if they have their own) are
    invisible, and outputs from `lengths` on are zero. A query with no visible key gives zeros.
    `return_lse` adds log Σ exp(scale·q·k) [B, T, H], -inf where nothing is visible; it has a gradient too.
    """
    _check(q, k, v, causal, lengths, key_lengths)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    chosen = choose(impl, "sparse_attention", q, _unsupported(q))
    if key_lengths is None:
        key_lengths = lengths
    parts: list[tuple[Tensor, Tensor]] = []
    texts = (_text(pattern),) * q.shape[2] if isinstance(pattern, Pattern) else tuple(_text(one) for one in pattern)
    groups = _groups(texts, q.shape[2], k.shape[2], chosen == "triton")
    for text, draws, shifts, own, kv in groups:
        qs, ks, vs = _heads(q, own), _heads(k, kv), _heads(v, kv)
        parts.append(
            torch.ops.subquad.sparse(
                qs, ks, vs, lengths, key_lengths, text, draws, shifts, causal, scale, return_lse, chosen
            )
        )
    o, lse = parts[0]
    if len(parts) > 1:
        order = [h for *_, own, _ in groups for h in own]
        back = tuple(order.index(h) for h in range(len(order)))
        o, lse = (_heads(torch.cat(same, 2), back) for same in zip(*parts, strict=True))
    return (o, lse) if return_lse else o


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Tensor | None, key_lengths: Tensor | None) -> None:
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    if v.shape != k.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: q must be [B, T, H, D], and k and v [B, S, Hkv, D]")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: H must be a multiple of Hkv")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal=True needs as many keys as queries, got T={q.shape[1]}, S={k.shape[1]}")
    if causal and key_lengths is not None:
        raise ValueError("key_lengths is for cross-attention; with causal=True use lengths")
    if lengths is not None:
        most = q.shape[1] if key_lengths is not None else max(q.shape[1], k.shape[1])
        check_op_lengths("lengths", lengths, q.shape[0], most, q.device)
    if key_lengths is not None:
        check_op_lengths("key_lengths", key_lengths, q.shape[0], k.shape[1], q.device)


def _unsupported(q: Tensor) -> str | None:
    """What the Triton path cannot do with this call."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {q.dtype}"
    if q.shape[3] * q.dtype.itemsize > 512:
        return f"it holds heads of at most 256, or 128 in float32, got D={q.shape[3]} in {q.dtype}"
    return None


def _constant(function: Fn) -> Fn:
    """torch.compiler.assume_constant_result without its import of the whole compiler, Triton included."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _text(pattern: Pattern) -> str:
    """A compiler takes one pattern for a constant, but not a tuple of them; of strings it takes both."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern: one Pattern, or one for each query head; got {pattern!r}")
    return _json(pattern)


@_constant
def _groups(heads: tuple[str, ...], H: int, Hkv: int, triton: bool) -> "tuple[Group, ...]":
    """The heads that are computed together, from the pattern of each as JSON."""
    if len(heads) != H:
        raise ValueError(f"pattern: one Pattern, or one for each of the {H} query heads; got {len(heads)}")
    return _grouped(heads, H // Hkv, triton)


class Group(NamedTuple):
    """Heads that are computed together: their patterns are equal but for the draws and the shifts."""

    pattern: str  # as JSON
    draws: tuple[int, ...]  # the head that each draws its random blocks for; empty: as the pattern says
    shifts: tuple[int, ...]  # of the summary of each; empty: as the pattern says
    heads: tuple[int, ...]
    kv: tuple[int, ...]  # the key heads that they read


_json = lru_cache(maxsize=1024)(Pattern.to_json)  # what follows from patterns alone is not worked out in every call


@lru_cache(maxsize=256)
def _grouped(heads: tuple[str, ...], share: int, triton: bool) -> tuple[Group, ...]:
    named = [_family(text, triton) for text in heads]
    groups = []
    for one in dict.fromkeys(text for text, _, _ in named):
        own = tuple(h for h, (text, _, _) in enumerate(named) if text == one)
        draws = tuple(draw for h in own if (draw := named[h][1]) is not None)
        shifts = tuple(shift for h in own if (shift := named[h][2]) is not None)
        kv = tuple(h // share for h in own)
        # whole groups of query heads keep sharing their key head; a group that patterns split is written out
        shared = kv[::share]
        whole = own == tuple(h for g in shared for h in range(g * share, (g + 1) * share))
        whole = whole and all(len(set(shifts[n : n + share])) <= 1 for n in range(0, len(shifts), share))
        if len(set(shifts)) == 1:
            one, shifts = _with(one, "Summary", shift=shifts[0]), ()
        groups.append(Group(one, draws, shifts, own, shared if whole else kv))
    return tuple(groups)


def _family(pattern: str, triton: bool) -> tuple[str, int | None, int | None]:
    """A pattern without what heads of one group may differ in, and that, or None where it stays in the pattern: the
    head that all its random blocks are drawn for, and the shift of its only summary."""
    atoms = json.loads(pattern)
    heads = [atom["head"] for atom in atoms if atom["atom"] == "Random"]
    shifts = [atom["shift"] for atom in atoms if atom["atom"] == "Summary"]
    # in torch a tile of random blocks is the same for all heads, with the columns that it leaves to a summary
    draw = heads[0] if triton and len(set(heads)) == 1 else None
    shift = shifts[0] if len(shifts) == 1 and (triton or not heads) else None
    if draw is not None:
        pattern = _with(pattern, "Random", head=0)
    if shift is not None:
        pattern = _with(pattern, "Summary", shift=0)
    return pattern, draw, shift


def _with(pattern: str, name: str, **values: int) -> str:
    return json.dumps([atom | values if atom["atom"] == name else atom for atom in json.loads(pattern)])


def _heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """These heads of x, by slices: an index would have to be copied to a GPU, which waits and cannot be captured."""
    ends = [n for n in range(1, len(heads)) if heads[n] != heads[n - 1] + 1]
    runs = [heads[a:b] for a, b in zip([0, *ends], [*ends, len(heads)], strict=True)]
    if len(runs) == 1 and len(heads) == x.shape[2]:
        return x
    parts = [x[:, :, run[0] : run[-1] + 1] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@lru_cache(maxsize=256)
def plan(pattern: str, causal: bool) -> tuple[Pattern, ...]:
    """The atoms of a pattern (as JSON) in the order in which an earlier one excludes a later one, none of them idle."""
    windows: list[Local] = []
    others: list[Pattern] = []
    for atom in from_json(pattern).atoms:
        if isinstance(atom, Dense) or (isinstance(atom, Strided) and atom.l == 1):
            return (Dense(),)
        if isinstance(atom, Local):
            windows.append(atom)
        elif isinstance(atom, Dilated) and (atom.gap == 1 or atom.window == 0):
            windows.append(Local(atom.window))
        elif isinstance(atom, Block) and atom.l == 1:
            windows.append(Local(atom.before, atom.after))
        elif isinstance(atom, Summary) and atom.c == atom.l:
            return (Dense(),)
        else:
            others.append(atom)
    if windows:  # every window holds j = i, so a union of them is a window
        others.append(Local(max(w.before for w in windows), 0 if causal else max(w.after for w in windows)))
    columns = [a for a in others if isinstance(a, Global)]
    if columns:
        others = [a for a in others if not isinstance(a, Global)] + [Global(max(a.tokens for a in columns))]
    # the cheapest to evaluate first, since later parts evaluate it too; a random table, the dearest, last
    rank = (Global, Local, Block, Dilated, Strided, Summary, Random)
    return tuple(sorted(set(others), key=lambda a: (rank.index(type(a)), repr(a))))


class Tiles(NamedTuple):
    """Dense pieces of the attention: N tiles of m queries with n keys each. Positions outside 0 .. T - 1 are idle."""

    queries: Tensor  # [N, m]
    keys: Tensor  # [N, n], or [B, N, n] where rows of the batch drew different random blocks
    mask: Tensor | None  # bool [1 or B, 1 or N, 1 or H, 1 or m, n]; None where all is visible
    start: int | None = None  # where all these queries are consecutive, the first of them
    key_start: int | None = None  # and of the keys


class Job(NamedTuple):
    """What the tiles of one call are cut from. The columns of summaries stand behind the keys, from S on."""

    atoms: tuple[Pattern, ...]
    shifts: tuple[int, ...]  # of the summary for each head, or empty
    T: int
    S: int
    causal: bool
    lengths: Tensor | None  # [B], of the keys; None where the causal limit hides the padding anyway
    per_key: int  # elements that one gathered key takes of the budget
    device: torch.device

    @property
    def rows(self) -> int:
        """Leading queries that read everything: they have tiles of their own, and no part in any other."""
        first = self.atoms[0]
        return min(first.tokens, self.T) if isinstance(first, Global) and not self.causal else 0

    def arange(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device, dtype=torch.int32)

    def alive(self, queries: Tensor) -> Tensor:
        """The positions of `queries` that other tiles than those of the leading rows compute; T for the rest."""
        return torch.where((queries >= self.rows) & (queries < self.T), queries, self.T)

    def seen(self, atom: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
        """Which pairs of a tile are this atom's and no earlier atom's: bool [1 or B, N, 1, m, n]."""
        i, j = queries[..., None, :, None], (keys if keys.ndim == 3 else keys[None])[..., None, None, :]
        return atom._allowed(i, j, self.causal, self.length) & self.left(atom, i, j)

    def left(self, atom: Pattern, i: Tensor, j: Tensor) -> Tensor:
        """Which pairs exist and are no earlier atom's."""
        left = (j >= 0) & (j < self.length)
        for earlier in self.atoms[: self.atoms.index(atom)]:
            left = left & ~earlier._allowed(i, j, self.causal, self.length)
        return left

    @property
    def length(self) -> int | Tensor:
        return self.S if self.lengths is None else self.lengths[:, None, None, None, None]

    def columns(self, atom: Summary) -> Tensor:
        """Where the columns of a summary are, whole blocks of them: [1 or H, n], from S on those that do not exist."""
        first = [atom.l - atom.c * (shift + 1) for shift in self.shifts or (atom.shift,)]
        block = self.arange(0, -(-self.S // atom.l) * atom.l, atom.l)[:, None]
        return torch.stack([(block + self.arange(at, at + atom.c)).flatten() for at in first])


def _tiles(job: Job) -> Iterator[Tiles]:
    """Every visible pair of the pattern in exactly one tile."""
    if job.rows:
        yield from _straight(job._replace(atoms=(Dense(),), T=job.rows), job.T)
    if any(isinstance(a, STRAIGHT) for a in job.atoms):
        yield from _straight(job, job.T)
    for atom in job.atoms:
        if isinstance(atom, Strided | Dilated):
            yield from _lattice(job, atom)
        elif isinstance(atom, Random):
            yield from _random(job, atom)
    at = job.S
    for atom in job.atoms:
        if isinstance(atom, Summary):
            columns = job.columns(atom)
            yield from _summary(job, atom, columns, at)
            at += columns.shape[1]


def _straight(job: Job, idle: int) -> Iterator[Tiles]:
    """Tiles of consecutive queries: each atom gives a run of columns, and the runs stand side by side."""
    atoms = [a for a in job.atoms if isinstance(a, STRAIGHT)]
    sizes = [a.l for a in atoms if isinstance(a, Block) and _fits(a.l)]
    m = min(sizes[0] if sizes else TILE, max(job.T - job.rows, 1))
    first = job.rows // m * m  # a tile that is a block of the pattern reaches one block less
    tiles = -(-(job.T - first) // m)
    # a causal prefix grows from tile to tile: a chunk holds at most an eighth of the tiles, all as wide as its last
    most = max(1, tiles // 8) if job.causal and any(isinstance(a, Dense) for a in atoms) else tiles
    inner = _interior(job, atoms, first, m)
    for tile_range in (range(inner.start), inner, range(inner.stop, tiles)):
        at = tile_range.start
        while at < tile_range.stop:
            count = min(tile_range.stop - at, most)
            while True:
                a = job.arange(first + at * m, first + (at + count) * m, m)
                runs = [_run(job, atom, a, m) for atom in atoms]
                width = sum(run.shape[1] for run in runs)
                fits = max(1, BUDGET // max(1, width * max(job.per_key, m)))
                if count <= fits:
                    break
                count = fits
            queries = job.alive(a[:, None] + job.arange(m))
            if width:
                # between the edges one tile is like another
                alike = 1 if tile_range is inner else count
                seen = [job.seen(atom, queries[:alike], run[:alike]) for atom, run in zip(atoms, runs, strict=True)]
                start = first + at * m
                consecutive = start >= job.rows and start + count * m <= job.T
                queries = torch.where(queries < job.T, queries, idle)
                yield Tiles(queries, torch.cat(runs, 1), torch.cat(seen, 4), start if consecutive else None)
            at += count


def _interior(job: Job, atoms: Sequence[Pattern], first: int, m: int) -> range:
    """Which tiles see the same mask: far enough from both ends, if no atom's rule changes from tile to tile."""
    none = range(0)
    before = after = tokens = 0
    if job.lengths is not None:
        return none
    for atom in atoms:
        if isinstance(atom, Local):
            before, after = max(before, atom.before), max(after, atom.after)
        elif isinstance(atom, Block) and m % atom.l == 0 and first % atom.l == 0:
            before, after = max(before, atom.before * atom.l), max(after, atom.after * atom.l)
        elif isinstance(atom, Global):
            tokens = atom.tokens
        else:
            return none
    low = max(-(-(max(before + tokens, job.rows) - first) // m), 0)
    high = (min(job.T, job.S - (0 if job.causal else after)) - first) // m
    return range(low, high) if low < high else none


def _run(job: Job, atom: Pattern, a: Tensor, m: int) -> Tensor:
    """The columns that queries a .. a + m - 1 may reach through `atom`: [N, n], S where a tile has fewer."""
    end = a + m
    if isinstance(atom, Local | Block):
        lo, hi = _reach(atom, a, end)
    elif isinstance(atom, Global):
        lo, hi = torch.zeros_like(a), torch.full_like(a, atom.tokens)
    else:
        lo, hi = torch.zeros_like(a), torch.full_like(a, job.S)
    if job.causal:
        hi = torch.minimum(hi, end)
    lo, hi = lo.clamp(min=0), hi.clamp(max=job.S)
    if isinstance(job.atoms[0], Global) and atom is not job.atoms[0]:
        lo = lo.clamp(min=job.atoms[0].tokens)
    j = lo[:, None] + job.arange(max(int((hi - lo).max()), 0))
    return torch.where(j < hi[:, None], j, job.S)


def _fits(size: int) -> bool:
    """Whether a block makes a tile."""
    return 32 <= size <= 2 * TILE


def _reach(atom: Local | Block, a: Position, end: Position) -> tuple[Position, Position]:
    """The first key that queries a .. end - 1 read, and the one after the last."""
    if isinstance(atom, Local):
        return a - atom.before, end + atom.after
    return (a // atom.l - atom.before) * atom.l, ((end - 1) // atom.l + atom.after + 1) * atom.l


def _holds(atom: Block, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether every one of the keys is in the blocks that every one of the queries reads; ends are not included."""
    rows, columns = ((x // atom.l, (end - 1) // atom.l) for x, end in (queries, keys))
    return rows[1] - columns[0] <= atom.before and columns[1] - rows[0] <= atom.after


def _summary(job: Job, atom: Summary, columns: Tensor, at: int) -> Iterator[Tiles]:
    """Tiles of consecutive queries against the columns [1 or H, n] of a summary, which stand from index `at` on.

    Far blocks, that no earlier atom reaches from the tile, are visible as a whole: their columns need no mask.
    """
    m = atom.l if _fits(atom.l) else TILE
    blocks = -(-job.S // atom.l)
    every = job.arange(blocks * atom.c)
    missing = job.lengths is not None or (not job.causal and job.S % atom.l > 0)
    earlier = job.atoms[: job.atoms.index(atom)]
    for tile in range(job.rows // m * m, job.T, m):
        a, end = max(tile, job.rows), min(tile + m, job.T)
        stop = end if job.causal else job.S
        reached = [_reach(e, a, end) if isinstance(e, Local | Block) else (0, job.S) for e in earlier]
        if job.causal:
            reached.append((a, end))
        lo = min((min(max(lo, 0) // atom.l, blocks) for lo, _ in reached), default=blocks)
        hi = max([lo, *(-(-min(hi, stop) // atom.l) for _, hi in reached)])
        queries = job.arange(a, end)[None]
        before, near, after = every.tensor_split([lo * atom.c, hi * atom.c])
        far = before if job.causal else torch.cat([before, after])
        if len(far):
            first = hi * atom.c if lo == 0 else 0 if len(far) == len(before) else None
            mask = columns[None, None, :, None].index_select(4, far) < job.length if missing else None
            yield Tiles(queries, at + far[None], mask, a, None if first is None else at + first)
        keys = lo * atom.l, min(hi * atom.l, stop)
        if len(near) and not any(isinstance(e, Block) and _holds(e, (a, end), keys) for e in earlier):
            i, j = queries[:, None, :, None], columns[None, None, :, None, lo * atom.c : hi * atom.c]
            mask = job.left(atom, i, j) & (j <= i) if job.causal else job.left(atom, i, j)
            yield Tiles(queries, at + near[None], mask, a, at + lo * atom.c)


def _lattice(job: Job, atom: Strided | Dilated) -> Iterator[Tiles]:
    """Tiles of queries r, r + l, r + 2l, ...: in these coordinates a stride is dense and a dilation a band."""
    step = atom.l if isinstance(atom, Strided) else atom.gap
    points, key_points = -(-job.T // step), -(-job.S // step)
    m = min(TILE, points)
    residues = job.arange(min(step, job.T))[:, None]
    for a in range(0, points, m):
        lo, hi = 0, key_points
        if isinstance(atom, Dilated):
            lo, hi = max(a - atom.window, 0), min(a + m + atom.window, key_points)
        if job.causal:
            hi = min(hi, a + m)
        if hi <= lo:
            continue
        queries, keys = job.alive(residues + step * job.arange(a, a + m)), residues + step * job.arange(lo, hi)
        chunk = max(1, BUDGET // ((hi - lo) * max(job.per_key, m)))
        # where only distances count, and no key is missing, one residue is like another; causal, idle queries miss them
        earlier = job.atoms[: job.atoms.index(atom)]
        alike = all(isinstance(a, Local | Dilated | Strided) for a in earlier) and job.lengths is None
        alike = alike and (job.causal or job.S % step == 0)
        for i, j in zip(queries.split(chunk), keys.split(chunk), strict=True):
            yield Tiles(i, j, job.seen(atom, i[:1], j[:1]) if alike else job.seen(atom, i, j))


def _random(job: Job, atom: Random) -> Iterator[Tiles]:
    """Tiles of one block of queries against the blocks that it drew."""
    m = atom.block_size
    chunk = max(1, BUDGET // (atom.blocks * m * max(job.per_key, m)))
    for row in job.arange(job.rows // m, -(-job.T // m)).split(chunk):
        length = job.S if job.lengths is None else job.lengths[:, None]
        table = atom.table(row if job.lengths is None else row[None], causal=job.causal, length=length)[..., None]
        keys = torch.where(table >= 0, table * m + job.arange(m), -1).flatten(-2).to(torch.int32)
        queries = job.alive(row[:, None] * m + job.arange(m))
        yield Tiles(queries, keys, job.seen(atom, queries, keys))


def _gather(x: Tensor, at: Tensor, heads: int, start: int | None = None) -> Tensor:
    """Rows of x [B, S, Hkv, D] at positions [N, n] or [B, N, n] -> [B·N, heads, n, D]; idle positions read any row."""
    B, S, H, D = x.shape
    if start is not None:
        rows = x[:, start : start + at.numel()].reshape(-1, at.shape[-1], H, D)
    else:
        flat = (at.clamp(0, S - 1) + torch.arange(B, device=x.device)[:, None, None] * S).flatten()
        rows = x.reshape(B * S, H * D).index_select(0, flat).view(-1, at.shape[-1], H, D)  # [B·N, n, Hkv, D]
    if heads != H:
        rows = rows.repeat_interleave(heads // H, 2)
    return rows.transpose(1, 2)


def _scatter(into: Tensor, at: Tensor, rows: Tensor, start: int | None = None) -> None:
    """Adds rows [B·N, H, n, D] to `into` [B, S, Hkv, D] at positions `at`; rows at idle positions are zero."""
    B, S, H, D = into.shape
    rows = rows.transpose(1, 2)  # [B·N, n, H, D]
    if rows.shape[2] != H:
        rows = rows.unflatten(2, (H, -1)).sum(3)
    if start is not None:
        into[:, start : start + at.numel()] += rows.reshape(B, -1, H, D)
        return
    flat = (at.clamp(0, S - 1) + torch.arange(B, device=into.device)[:, None, None] * S).flatten()
    into.view(B * S, H * D).index_add_(0, flat, rows.reshape(-1, H * D).to(into.dtype))


def _summary_index(job: Job, atom: Summary, x: Tensor) -> Tensor:
    """The columns of a summary, for each head of x [B, S, Hkv, D], as an index for its tokens: [B, n, Hkv, D]."""
    columns = job.columns(atom)
    columns = columns[:: max(1, len(columns) // x.shape[2])]  # query heads that share a key head share the columns
    return columns.clamp(max=job.S - 1).long().mT[:, :, None].expand(len(x), -1, x.shape[2], x.shape[3])


def _with_columns(job: Job, x: Tensor) -> Tensor:
    """x [B, S, Hkv, D], and behind it the columns of every summary."""
    columns = [x.gather(1, _summary_index(job, atom, x)) for atom in job.atoms if isinstance(atom, Summary)]
    return torch.cat([x, *columns], 1) if columns else x


def _from_columns(job: Job, x: Tensor) -> Tensor:
    """The gradient of what `_with_columns` got, from that of what it gave."""
    keys, columns = x.tensor_split([job.S], 1)
    for atom in job.atoms:
        if isinstance(atom, Summary):
            index = _summary_index(job, atom, keys)
            own, columns = columns.tensor_split([index.shape[1]], 1)
            keys.scatter_add_(1, index, own)
    return keys


def _clear(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Zeros in the padding, whose content may be anything: 0·inf is not 0."""
    if lengths is None:
        return x
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]  # [B, T]
    return x.masked_fill(padding[..., None, None], 0)


def _bias(mask: Tensor | None, B: int, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape[1] > 1 or mask.shape[0] > 1:
        mask = mask.expand(B, -1, -1, -1, -1)
    mask = mask.flatten(0, 1)  # [1 or B·N, 1 or H, 1 or m, n]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention of tiles [B·N, H, m, D], and its log-sum-exp; a row that sees nothing gives 0 and any lse."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    s = torch.matmul(q.to(_wide(q)) * scale, k.to(_wide(q)).mT)
    s = s if bias is None else s + bias
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.clamp(min=torch.finfo(s.dtype).min)[..., None])
    return torch.matmul(p, v.to(p.dtype)).to(q.dtype), lse


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through tiles whose softmax, o and lse are those of the whole union."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, False, attn_mask=bias, scale=scale
        )
    do, q, k, v, o = (x.to(_wide(x)) for x in (do, q, k, v, o))
    s = torch.matmul(q * scale, k.mT)
    p = torch.exp((s if bias is None else s + bias) - lse[..., None])
    ds = p * (torch.matmul(do, v.mT) - (do * o).sum(-1, keepdim=True)) * scale
    return torch.matmul(ds, k), torch.matmul(ds.mT, q), torch.matmul(p.mT, do)


def _torch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    shifts: tuple[int, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    (B, T, H, D), S = q.shape, k.shape[1]
    q, k, v = _clear(q, lengths), _clear(k, key_lengths), _clear(v, key_lengths)
    # one row more than there are queries takes what the idle rows of tiles compute
    o = q.new_zeros(B, T + 1, H, D, dtype=_wide(q))
    lse = q.new_full((B, T + 1, H), -inf, dtype=_wide(q))
    visible = None if causal else key_lengths  # causal, a query within its length sees only keys within it
    job = Job(plan(pattern, causal), shifts, T, S, causal, visible, B * H * D, q.device)
    k, v = _with_columns(job, k), _with_columns(job, v)
    for at, keys, mask, start, key_start in _tiles(job):
        qt, kt, vt = _gather(q, at, H, start), _gather(k, keys, H, key_start), _gather(v, keys, H, key_start)
        part, part_lse = _attend(qt, kt, vt, _bias(mask, B, q.dtype), scale)
        part_lse = part_lse.transpose(1, 2).unflatten(0, (B, -1))  # [B, N, m, H]
        if mask is not None:
            part_lse = part_lse.masked_fill(~mask.any(-1).mT, -inf)
        part_lse = part_lse.flatten(1, 2)
        part = part.transpose(1, 2).reshape(B, -1, H, D).to(o.dtype)
        rows = at.flatten().long() if start is None else slice(start, start + at.numel())
        old = lse[:, rows]
        both = torch.logaddexp(old, part_lse)
        safe = both.masked_fill(both == -inf, 0)
        part = part * torch.exp(part_lse - safe)[..., None]
        part += o[:, rows] * torch.exp(old - safe)[..., None]
        o[:, rows] = part
        lse[:, rows] = both
    o, lse = o[:, :T], lse[:, :T]
    if lengths is not None:
        o = _clear(o, lengths)
        lse = lse.masked_fill((torch.arange(T, device=q.device) >= lengths[:, None])[..., None], -inf)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def _torch_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    shifts: tuple[int, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, H, D), S = q.shape, k.shape[1]
    do, q, k, v = _clear(do, lengths), _clear(q, lengths), _clear(k, key_lengths), _clear(v, key_lengths)
    visible = None if causal else key_lengths
    # a row that sees nothing, padding included, must not exponentiate -inf - -inf
    lse = lse.masked_fill(lse == -inf, inf)
    if dlse is not None:
        # d lse/d s = p, as if v had one more column, of ones, whose output has gradient dlse and value 0
        q, k, o = (F.pad(x, (0, 1)) for x in (q, k, o))
        v = F.pad(v, (0, 1), value=1.0)
        do = torch.cat([do, dlse.masked_fill(lse == inf, 0).to(do.dtype)[..., None]], -1)
    job = Job(plan(pattern, causal), shifts, T, S, causal, visible, B * H * D, q.device)
    k, v = _with_columns(job, k), _with_columns(job, v)
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(x), device=x.device) for x in (q, k, v))
    for at, keys, mask, start, key_start in _tiles(job):
        qt, kt, vt = _gather(q, at, H, start), _gather(k, keys, H, key_start), _gather(v, keys, H, key_start)
        idle = (at >= T).expand(B, -1, -1).flatten(0, 1)[:, None]  # [B·N, 1, m]
        lt = _gather(lse[..., None], at, H, start)[..., 0].masked_fill(idle, inf)
        dot, ot = _gather(do, at, H, start), _gather(o, at, H, start)
        dqt, dkt, dvt = _attend_backward(dot, qt, kt, vt, ot, lt.contiguous(), _bias(mask, B, q.dtype), scale)
        _scatter(dq, at, dqt, start)
        _scatter(dk, keys, dkt, key_start)
        _scatter(dv, keys, dvt, key_start)
    dk, dv = _from_columns(job, dk), _from_columns(job, dv)
    dq, dk, dv = (g[..., :D].to(q.dtype).contiguous() for g in (dq, dk, dv))
    return dq, dk, dv


@torch.library.custom_op("subquad::sparse", mutates_args=())
def _sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: Sequence[int],
    shifts: Sequence[int],
    causal: bool,
    scale: float,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    if impl == "triton":
        from subquad.ops import sparse_triton

        return sparse_triton.forward(q, k, v, lengths, key_lengths, pattern, tuple(draws), tuple(shifts), causal, scale)
    return _torch_forward(q, k, v, lengths, key_lengths, pattern, tuple(shifts), causal, scale)


@_sparse.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: Sequence[int],
    shifts: Sequence[int],
    causal: bool,
    scale: float,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    if impl == "triton":  # a head's log-sum-exp stands together
        return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=_wide(q)).transpose(1, 2)
    return q.new_empty(q.shape), q.new_empty((B, T, H), dtype=_wide(q))


@torch.library.custom_op("subquad::sparse_backward", mutates_args=())
def _sparse_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: Sequence[int],
    shifts: Sequence[int],
    causal: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if impl == "triton":
        from subquad.ops import sparse_triton

        return sparse_triton.backward(
            do, dlse, q, k, v, o, lse, lengths, key_lengths, pattern, tuple(draws), tuple(shifts), causal, scale
        )
    return _torch_backward(do, dlse, q, k, v, o, lse, lengths, key_lengths, pattern, tuple(shifts), causal, scale)


@_sparse_backward.register_fake
def _(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    pattern: str,
    draws: Sequence[int],
    shifts: Sequence[int],
    causal: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, lengths, key_lengths, pattern, draws, shifts, causal, scale, return_lse, impl = inputs
    ctx.save_for_backward(q, k, v, *output, lengths, key_lengths)
    ctx.options = pattern, draws, shifts, causal, scale, impl
    ctx.return_lse = return_lse


def _backward(ctx, do: Tensor, dlse: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, o, lse, lengths, key_lengths = ctx.saved_tensors
    grads = torch.ops.subquad.sparse_backward(
        do, dlse if ctx.return_lse else None, q, k, v, o, lse, lengths, key_lengths, *ctx.options
    )
    return *grads, *(None for _ in range(9))


_sparse.register_autograd(_backward, setup_context=_setup)
