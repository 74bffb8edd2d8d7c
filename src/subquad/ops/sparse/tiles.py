"""Cuts a pattern into dense tiles for the torch path: every visible pair is in exactly one tile."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from subquad.ops.sparse.patterns import Atom, Block, Dense, Dilated, Global, Local, Random, Strided, Summary
from subquad.ops.sparse.spec import Inputs, Spec

Position = TypeVar("Position", int, Tensor)

TILE = 128  # queries of a tile
STRAIGHT = (Global, Local, Block, Dense)  # atoms in which consecutive queries read a range of keys
BUDGET = 2**22  # elements of gathered keys, and of scores of one head, in memory at once


class Tiles(NamedTuple):
    """N tiles of m queries with n keys each. Positions outside 0 .. T - 1 are unused."""

    queries: Tensor  # [N, m]
    keys: Tensor  # [N, n], or [B, N, n] where rows of the batch drew different random blocks
    mask: Tensor | None  # bool [1 or B, 1 or N, 1 or H, 1 or m, n]; None if all is visible
    start: int | None = None  # the first query, if all queries are consecutive
    key_start: int | None = None  # the first key, if all keys are consecutive


class Job(NamedTuple):
    """What to cut into tiles. The columns of summaries have positions after the keys, from S on."""

    atoms: tuple[Atom, ...]
    first_columns: dict[Summary, list[int]]  # where a summary's columns start in a block: for all heads, or for each
    T: int
    S: int
    causal: bool
    lengths: Tensor | None  # [B], of the keys; None if causal, which hides the padding too
    per_key: int  # elements of one gathered key
    device: torch.device

    @classmethod
    def of(cls, x: Inputs, spec: Spec) -> "Job":
        (B, T, H, D), atoms = x.q.shape, spec.atoms
        first_columns = {atom: spec.first_columns(atom) for atom in atoms if isinstance(atom, Summary)}
        lengths = None if spec.causal else x.key_lengths
        return cls(atoms, first_columns, T, x.k.shape[1], spec.causal, lengths, B * H * D, x.q.device)

    @property
    def rows(self) -> int:
        """The number of leading queries that read everything: they have their own tiles and are in no other."""
        first = self.atoms[0]
        return min(first.tokens, self.T) if isinstance(first, Global) and not self.causal else 0

    def arange(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device, dtype=torch.int32)

    def used(self, queries: Tensor) -> Tensor:
        """The positions of `queries`, with T for leading rows and for positions beyond the end."""
        return torch.where((queries >= self.rows) & (queries < self.T), queries, self.T)

    def earlier(self, atom: Atom) -> tuple[Atom, ...]:
        return self.atoms[: self.atoms.index(atom)]

    def seen(self, atom: Atom, queries: Tensor, keys: Tensor) -> Tensor:
        """Which pairs of a tile belong to this atom and to no earlier one: bool [1 or B, N, 1, m, n]."""
        i, j = queries[..., None, :, None], (keys if keys.ndim == 3 else keys[None])[..., None, None, :]
        return atom._allowed(i, j, self.causal, self.length) & self.left(atom, i, j)

    def left(self, atom: Atom, i: Tensor, j: Tensor) -> Tensor:
        """Which pairs exist and belong to no earlier atom."""
        left = (j >= 0) & (j < self.length)
        for earlier in self.earlier(atom):
            left = left & ~earlier._allowed(i, j, self.causal, self.length)
        return left

    @property
    def length(self) -> int | Tensor:
        return self.S if self.lengths is None else self.lengths[:, None, None, None, None]

    def columns(self, atom: Summary) -> Tensor:
        """The positions of a summary's columns, of whole blocks: [1 or H, n]; those from S on do not exist."""
        block = self.arange(0, -(-self.S // atom.l) * atom.l, atom.l)[:, None]
        return torch.stack([(block + self.arange(at, at + atom.c)).flatten() for at in self.first_columns[atom]])


def cut(job: Job) -> Iterator[Tiles]:
    """Tiles that contain every visible pair of the pattern exactly once."""
    if job.rows:
        yield from _straight(job._replace(atoms=(Dense(),), T=job.rows), job.T)
    if job.rows == job.T:
        return
    if any(isinstance(a, STRAIGHT) for a in job.atoms):
        yield from _straight(job, job.T)
    for atom in job.atoms:
        if isinstance(atom, Strided | Dilated):
            yield from _lattice(job, atom)
        elif isinstance(atom, Random):
            yield from _random(job, atom)
    at = job.S
    for atom in job.first_columns:
        columns = job.columns(atom)
        yield from _summary(job, atom, columns, at)
        at += columns.shape[1]


def _straight(job: Job, unused: int) -> Iterator[Tiles]:
    """Tiles of consecutive queries: each atom gives a range of keys, and the ranges are concatenated."""
    atoms = [a for a in job.atoms if isinstance(a, STRAIGHT)]
    size = next((a.l for a in atoms if isinstance(a, Block) and _makes_a_tile(a.l)), TILE)
    m = min(size, max(job.T - job.rows, 1))
    first = job.rows // m * m  # a tile that is one block of the pattern reaches fewer blocks
    tiles = -(-(job.T - first) // m)
    # a causal prefix grows from tile to tile, and all tiles of a chunk are as wide as the last: use at least 8 chunks
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
            queries = job.used(a[:, None] + job.arange(m))
            if width:
                # all tiles of the interior have the same mask
                masks = 1 if tile_range is inner else count
                seen = [job.seen(atom, queries[:masks], run[:masks]) for atom, run in zip(atoms, runs, strict=True)]
                start = first + at * m
                consecutive = start >= job.rows and start + count * m <= job.T
                queries = torch.where(queries < job.T, queries, unused)
                yield Tiles(queries, torch.cat(runs, 1), torch.cat(seen, 4), start if consecutive else None)
            at += count


def _interior(job: Job, atoms: Sequence[Atom], first: int, m: int) -> range:
    """The tiles that have the same mask: those far from both ends, if no atom's rule changes from tile to tile."""
    before = after = tokens = 0
    if job.lengths is not None:
        return range(0)
    for atom in atoms:
        if isinstance(atom, Local):
            before, after = max(before, atom.before), max(after, atom.after)
        elif isinstance(atom, Block) and m % atom.l == 0 and first % atom.l == 0:
            before, after = max(before, atom.before * atom.l), max(after, atom.after * atom.l)
        elif isinstance(atom, Global):
            tokens = atom.tokens
        else:
            return range(0)
    low = max(-(-(max(before + tokens, job.rows) - first) // m), 0)
    high = (min(job.T, job.S - (0 if job.causal else after)) - first) // m
    return range(low, high) if low < high else range(0)


def _run(job: Job, atom: Atom, a: Tensor, m: int) -> Tensor:
    """The keys that queries a .. a + m - 1 can reach through `atom`: [N, n], filled up with S."""
    end = a + m
    if isinstance(atom, Local | Block):
        lo, hi = _reach(atom, a, end)
    else:
        lo, hi = torch.zeros_like(a), torch.full_like(a, atom.tokens if isinstance(atom, Global) else job.S)
    if job.causal:
        hi = torch.minimum(hi, end)
    lo, hi = lo.clamp(min=0), hi.clamp(max=job.S)
    if isinstance(job.atoms[0], Global) and atom is not job.atoms[0]:
        lo = lo.clamp(min=job.atoms[0].tokens)
    j = lo[:, None] + job.arange(max(int((hi - lo).max()), 0))
    return torch.where(j < hi[:, None], j, job.S)


def _makes_a_tile(size: int) -> bool:
    return 32 <= size <= 2 * TILE


def _reach(atom: Local | Block, a: Position, end: Position) -> tuple[Position, Position]:
    """The first key that queries a .. end - 1 read, and the one after the last."""
    if isinstance(atom, Local):
        return a - atom.before, end + atom.after
    return (a // atom.l - atom.before) * atom.l, ((end - 1) // atom.l + atom.after + 1) * atom.l


def _holds(atom: Block, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether all of the queries read all of the keys; both ranges exclude their end."""
    rows, columns = ((x // atom.l, (end - 1) // atom.l) for x, end in (queries, keys))
    return rows[1] - columns[0] <= atom.before and columns[1] - rows[0] <= atom.after


def _summary(job: Job, atom: Summary, columns: Tensor, at: int) -> Iterator[Tiles]:
    """Tiles of consecutive queries and the columns [1 or H, n] of a summary, which have the indices from `at` on.

    The columns of far blocks, which no earlier atom reaches from the tile, are all visible and need no mask.
    """
    m = atom.l if _makes_a_tile(atom.l) else TILE
    blocks = -(-job.S // atom.l)
    every = job.arange(blocks * atom.c)
    missing = job.lengths is not None or (not job.causal and job.S % atom.l > 0)
    earlier = job.earlier(atom)
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
    """Tiles of queries r, r + l, r + 2l, ...: among these a stride is dense and a dilation is a band."""
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
        queries, keys = job.used(residues + step * job.arange(a, a + m)), residues + step * job.arange(lo, hi)
        chunk = max(1, BUDGET // ((hi - lo) * max(job.per_key, m)))
        # If the rules only depend on distances and no key is missing, all residues have the same mask.
        # If causal, only unused queries read keys beyond the end.
        alike = all(isinstance(e, Local | Dilated | Strided) for e in job.earlier(atom)) and job.lengths is None
        alike = alike and (job.causal or job.S % step == 0)
        for i, j in zip(queries.split(chunk), keys.split(chunk), strict=True):
            yield Tiles(i, j, job.seen(atom, i[:1], j[:1]) if alike else job.seen(atom, i, j))


def _random(job: Job, atom: Random) -> Iterator[Tiles]:
    """Tiles of one block of queries and the key blocks that it drew."""
    m = atom.block_size
    chunk = max(1, BUDGET // (atom.blocks * m * max(job.per_key, m)))
    for row in job.arange(job.rows // m, -(-job.T // m)).split(chunk):
        length = job.S if job.lengths is None else job.lengths[:, None]
        table = atom.table(row if job.lengths is None else row[None], causal=job.causal, length=length)[..., None]
        keys = torch.where(table >= 0, table * m + job.arange(m), -1).flatten(-2).to(torch.int32)
        queries = job.used(row[:, None] * m + job.arange(m))
        yield Tiles(queries, keys, job.seen(atom, queries, keys))
