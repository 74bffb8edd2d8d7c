"""Sparse attention in Triton: which passes a pattern needs, and how each is launched.

The tokens of a tile are consecutive, or in the order of a lattice: residue by residue, r, r + l, r + 2l, ..., each
padded to `pad` points. In that order a stride is block-diagonal. If residues are shorter than a tile, a tile holds
several of them.

Several passes over the same queries compute one softmax: each continues from the output and the log-sum-exp of the
pass before. The backward of a pass only needs the final log-sum-exp, so the gradients of all passes add up. Where a
summary is dense attention to its columns, one of these passes is torch's fused attention, which is fastest at that.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import lru_cache
from math import gcd, inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from subquad.ops.launch import Plan, blocks_of, fitting, launch_by_key, number_of, shared_memory, tile_of
from subquad.ops.sparse import kernels
from subquad.ops.sparse.kernels import DENSE, LOG2E, RANDOM, ROWS, STRIP, _dkv, _dq, _far, _forward
from subquad.ops.sparse.patterns import Atom, Block, Dense, Dilated, Global, Local, Random, Strided, Summary
from subquad.ops.sparse.spec import Inputs, Spec, ordered_atoms

STRIDES = ("batch", "stride", "head")  # how kernels call the first three strides of a tensor
SPLIT = 2048  # keys (or queries) of one program in a pass of few rows over the whole sequence
MANY = 1024  # columns of a summary from which dense attention to them pays


class Config(NamedTuple):
    queries: int  # rows of a tile of queries
    keys: int  # rows of a tile of keys
    warps: int
    stages: int
    shared: int = 0  # bytes of shared memory that a program takes in float32, whose products split their operands


# By the kind of pass and the bytes of a row (one head, at least 128). A kind without an entry uses the part before "_".
CONFIGS: dict[tuple[str, int], Config] = {
    ("forward", 128): Config(64, 64, 4, 3),
    ("forward", 256): Config(128, 64, 8, 2),
    ("forward", 512): Config(64, 32, 4, 2, 114688),
    ("forward_lattice", 128): Config(64, 32, 4, 3),
    ("forward_summary", 128): Config(128, 64, 8, 2),
    ("dq", 128): Config(64, 32, 4, 3),
    ("dq", 256): Config(64, 64, 4, 2),
    ("dq", 512): Config(64, 32, 4, 1, 147456),
    ("dkv", 128): Config(64, 64, 4, 3),
    ("dkv", 256): Config(32, 128, 8, 2, 143616),
    ("dkv", 512): Config(32, 32, 4, 1),
    ("dkv_lattice", 128): Config(64, 64, 4, 2),
}
# The same for float32 on a GPU without room for those.
SMALLER: dict[tuple[str, int], Config] = {
    ("forward", 512): Config(64, 32, 4, 1, 81920),
    ("dq", 512): Config(32, 32, 4, 2, 98304),
    ("dkv", 256): Config(32, 64, 4, 2, 76032),
}


class Passes(NamedTuple):
    """How a pattern is computed: its atoms as integers, and which of them each kind of pass handles."""

    atoms: tuple[int, ...]
    far: int  # the summary of which a part, or without causality all, is dense and computed separately; or -1
    random: tuple[Random, ...]
    rows: int  # the first queries, which read everything
    columns: int  # the first keys, which everything reads
    queries: tuple[int, ...]  # atoms for tiles of consecutive queries
    keys: tuple[int, ...]  # atoms for tiles of consecutive keys
    summaries: tuple[int, ...]
    lattices: tuple[tuple[int, int], ...]  # atom, step

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens of a block of the summary `far`, and how many of them are its columns."""
        size, count = self.atoms[4 * self.far + 1 : 4 * self.far + 3]
        return size, count


@lru_cache(maxsize=256)
def passes(pattern: str, causal: bool, split_off: bool, shifted: bool = False) -> Passes:
    """`split_off`: compute the dense part of a summary separately; `shifted`: each head has its own shift."""
    atoms = ordered_atoms(pattern, causal)
    random = tuple(a for a in atoms if isinstance(a, Random))
    fixed = [a for a in atoms if not isinstance(a, Random)]
    coded = [_code(a, shifted) for a in fixed]
    far = -1
    match atoms:
        case (Block(size, 0), Summary(l, c)) if split_off and causal and size == l and l % c == 0 and 2 <= l // c <= 8:
            far = 1
            coded[1] = (STRIP.value, *coded[1][1:])
        case (Block() | Local(), Summary()) if split_off and not causal:
            far = 0  # the first atom: the other leaves out its columns
            fixed.reverse()
            coded.reverse()
    whole = -1 if causal else far  # no pass has it
    columns = fixed[0].tokens if fixed and isinstance(fixed[0], Global) else 0
    rows = 0 if causal else columns
    lattices = tuple(
        (n, a.l if isinstance(a, Strided) else a.gap) for n, a in enumerate(fixed) if isinstance(a, Strided | Dilated)
    )
    in_rows = (Global, Local, Block, Summary, Dense)
    queries = [n for n, a in enumerate(fixed) if isinstance(a, in_rows) and n != whole]
    keys = [n for n, a in enumerate(fixed) if isinstance(a, Local | Block | Dense) or (n == far and n != whole)]
    summaries = tuple(n for n, a in enumerate(fixed) if isinstance(a, Summary) and n != far)
    if random:  # several draws become one, with blocks whose size divides all of theirs
        size = gcd(*(a.block_size for a in random))
        queries.append(len(coded))
        keys.append(len(coded))
        coded.append((RANDOM.value, size, sum(a.blocks * (a.block_size // size) for a in random), 0))
    if rows:
        keys.append(len(coded))
        coded.append((ROWS.value, rows, 0, 0))
    flat = tuple(x for code in coded for x in code)
    return Passes(flat, far, random, rows, columns, tuple(queries), tuple(keys), summaries, lattices)


def _code(atom: Atom, shifted: bool) -> tuple[int, ...]:
    """An atom as the four integers that the kernels read."""
    values = astuple(atom)  # type: ignore[call-overload]
    if isinstance(atom, Summary):
        values = (atom.l, atom.c, -1 if shifted else atom.l - atom.c * (atom.shift + 1))
    kind = getattr(kernels, type(atom).__name__.upper())  # the constants of the kernels have the names of the atoms
    return (kind.value, *values, 0, 0, 0)[:4]


class RandomTables(NamedTuple):
    """The key blocks that each block of queries drew, and the readers of each key block: [1 or B, 1 or H, ...]."""

    table: Tensor  # [.., rows, blocks]: each block once, filled up with -1
    starts: Tensor  # [.., key blocks + 1]: where the readers of each block of keys start
    readers: Tensor  # [.., rows·blocks]: blocks of queries


def _tables(
    random: tuple[Random, ...],
    draws: tuple[int, ...],
    T: int,
    S: int,
    causal: bool,
    lengths: Tensor | None,
    device: torch.device,
) -> RandomTables:
    size = gcd(*(a.block_size for a in random))
    rows = torch.arange(blocks_of(T, size), device=device)[None, None]
    heads = _on_device(draws, torch.int64, device)[:, None] if draws else None
    drawn = []
    for atom in random:
        ratio = atom.block_size // size
        length = S if lengths is None else lengths[:, None, None]
        table = atom.table(rows // ratio, causal=causal, length=length, head=heads)[..., None]
        drawn.append(torch.where(table >= 0, table * ratio + torch.arange(ratio, device=device), -1).flatten(3))
    blocks = blocks_of(S, size)
    table = torch.cat(drawn, 3).sort(3).values
    table.masked_fill_(table >= blocks, -1)  # the last block drawn may reach beyond the last key
    if len(random) > 1:
        table[..., 1:].masked_fill_(table[..., 1:] == table[..., :-1], -1)
    ordered, order = torch.where(table < 0, blocks, table).flatten(2).sort(dim=2, stable=True)
    edges = torch.arange(blocks + 1, device=device).expand(*ordered.shape[:2], -1).contiguous()
    starts = torch.searchsorted(ordered, edges)
    return RandomTables(table.int(), starts.int(), (order // table.shape[3]).int())


_cached_tables = lru_cache(maxsize=32)(_tables)


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copied there only once: a copy during a call waits, and cannot be captured in a CUDA graph."""
    return torch.tensor(values, dtype=dtype, device=device)


class Pass(NamedTuple):
    """One launch: some atoms, for tiles of consecutive (or of every step-th) queries or keys."""

    kind: str  # of CONFIGS
    parts: tuple[int, ...]  # the atoms
    start: int  # the first index of the queries or keys
    stop: int
    step: int = 1
    go_on: bool = False  # continue from the result of an earlier pass
    pieces: int = 0  # split a few rows over a whole sequence into this many, and add up their float32 results


class Kind(NamedTuple):
    """Everything in a call except its tensors: calls of one kind have the same launches, with the same numbers."""

    sizes: tuple[int, int, int, int, int, int]  # B, T, S, H, Hkv, D
    strides: tuple[tuple[int, ...], ...]  # of q, k, v
    dtype: torch.dtype
    spec: Spec
    work: Passes
    lengths: bool
    firsts: bool
    table: tuple[int, int, int]  # strides of batch and head, blocks drawn; of the tables of random blocks

    @property
    def width(self) -> int:
        return tile_of(self.sizes[5])

    def config(self, kind: str, room: int) -> Config:
        """The tiles of a pass on a device with so much shared memory."""
        size, part = max(128, self.width * self.dtype.itemsize), kind.split("_")[0]
        best = CONFIGS.get((kind, size)) or CONFIGS[part, size]
        if self.dtype != torch.float32:
            return best
        return fitting((best, SMALLER.get((part, size), best)), lambda config: config.shared, room)

    def lattice(self, step: int, config: Config) -> tuple[int, int, int]:
        """pad, shift, low: how the kernels find the residues of a tile."""
        tile = max(config.queries, config.keys)
        points = blocks_of(max(self.sizes[1:3]), step)
        if step == 1 or points > tile:
            return blocks_of(points, tile) * tile, 31, -1
        shift = (points - 1).bit_length()
        return 1 << shift, shift, (1 << shift) - 1

    def over_queries(self, kind: str) -> Iterator[Pass]:
        """The passes of tiles of queries, "forward" or "dq"."""
        work, (_, T, S, *_) = self.work, self.sizes
        go_on = kind == "forward" and work.far >= 0 and not self.spec.causal  # after the dense part
        if work.queries and work.rows < T:
            yield Pass(f"{kind}_summary" if work.summaries else kind, work.queries, work.rows, T, go_on=go_on)
            go_on = True
        for n, step in work.lattices:
            yield Pass(f"{kind}_lattice", (n,), 0, T, step, go_on)
            go_on = True
        if work.rows:
            yield Pass(f"{kind}_rows", (0,), 0, min(work.rows, T), pieces=blocks_of(S, SPLIT))

    def over_keys(self) -> Iterator[Pass]:
        """The passes of tiles of keys."""
        work, (_, T, S, *_), go_on = self.work, self.sizes, False
        if work.keys and work.columns < S:
            yield Pass("dkv", work.keys, work.columns, S)
            go_on = True
        for n, step in work.lattices:
            yield Pass("dkv_lattice", (n,), 0, 0, step, go_on)
            go_on = True
        for n in work.summaries:
            size, count = work.atoms[4 * n + 1 : 4 * n + 3]
            # the columns that the last block lacks are beyond S
            yield Pass("dkv_summary", (n,), 0, blocks_of(S, size) * count, go_on=True)
        if work.columns:
            yield Pass("dkv_columns", (0,), 0, min(work.columns, S), pieces=blocks_of(T, SPLIT))


def _numbers(kind: Kind, run: Pass, config: Config) -> dict[str, Any]:
    """The arguments of the kernels of all passes, except tensors."""
    _, T, S, H, Hkv, D = kind.sizes
    pad, shift, low = kind.lattice(run.step, config)
    names = (f"{tensor}_{name}" for tensor in "qkv" for name in STRIDES)
    return {
        **dict(zip(names, (n for strides in kind.strides for n in strides), strict=True)),
        "scale_log2": kind.spec.scale * LOG2E.value, "T": T, "S": S, "pad": pad, "shift": shift, "low": low,
        "split": SPLIT, "A": (DENSE.value, 0, 0, 0) if run.kind.endswith("_rows") else kind.work.atoms,
        "PARTS": run.parts, "CAUSAL": kind.spec.causal, "STEP": run.step, "CONTINUE": run.go_on,
        "SPLITS": run.pieces > 0, "LENGTHS": kind.lengths, "FIRSTS": kind.firsts, "H": H, "SHARE": H // Hkv,
        "D": D, "BD": kind.width, "BM": config.queries, "BN": config.keys,
        # three tensor core products make a full float32 product
        "PRECISION": "tf32x3" if kind.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _query_numbers(kind: Kind, run: Pass, config: Config) -> tuple[dict[str, Any], int]:
    """The same for kernels over tiles of queries, and the number of programs."""
    common, (B, _, _, H, *_) = _numbers(kind, run, config), kind.sizes
    tiles = blocks_of(run.stop - run.start if run.step == 1 else run.step * common["pad"], config.queries)
    table = dict(zip(("table_batch", "table_head", "table_rows"), kind.table, strict=True))
    return {**common, **table, "tiles": tiles, "row0": run.start, "rows": run.stop}, tiles * B * H


def _key_numbers(kind: Kind, run: Pass, config: Config) -> tuple[dict[str, Any], int]:
    """The same for kernels over tiles of keys."""
    common, (B, *_, Hkv, _) = _numbers(kind, run, config), kind.sizes
    stop = run.stop if run.step == 1 else run.step * common["pad"]
    tiles = blocks_of(stop - run.start, config.keys)
    own = {"tiles": tiles, "row0": kind.work.rows, "col0": run.start, "cols": stop, "KEYS": run.parts[0]}
    return common | own, tiles * B * Hkv


class Call(NamedTuple):
    """One call of the operator: what all its launches need."""

    x: Inputs
    kind: Kind
    lengths: tuple[Tensor, Tensor] | None  # of queries, of keys
    random: RandomTables | None
    firsts: Tensor | None  # [H], if heads have their own shifts: the first column of a block

    def start(
        self, kernel: Any, run: Pass, tensors: tuple[Tensor | None, ...], own: dict[str, Any], pieces: int,
        numbers: Callable[[Kind, Pass, Config], tuple[dict[str, Any], int]],
    ) -> None:  # fmt: skip
        """Start a kernel on its tensors, of which q stands for a missing one, which is never read.

        `numbers` gives its arguments for this kind of call and the number of programs, and is asked once for each kind;
        `own` are those that are not of the kind.
        """
        config = self.kind.config(run.kind, shared_memory(self.x.q.device))
        there = tuple(self.x.q if t is None else t for t in tensors)

        def plan() -> Plan:
            common, programs = numbers(self.kind, run, config)
            arguments = common | own
            names = [name for name in kernel.arg_names if name in arguments]  # without the tensors, which come first
            last = names.index("A")  # what follows are constants
            constants = {name: arguments[name] for name in names[last:]}
            first = tuple(arguments[name] for name in names[:last])
            return Plan((programs, pieces), first, constants, config.warps, config.stages)

        key = (number_of(self.kind), run, config, pieces, *own.values(), *[t.dtype for t in there])
        launch_by_key(key, kernel, there, plan)


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {f"{key}_{name}": x.stride(n) for key, x in tensors.items() for n, name in enumerate(STRIDES)}


def _shared_strides(table: Tensor) -> tuple[int, int]:
    """The strides of batch and head, 0 if all share one."""
    batch, head = (0 if table.shape[n] == 1 else table.stride(n) for n in range(2))
    return batch, head


def _call(x: Inputs, spec: Spec, split_off: bool = False) -> Call:
    (B, T, H, _), (S, Hkv), device = x.q.shape, x.k.shape[1:3], x.q.device
    lengths, key_lengths = x.lengths, x.key_lengths
    # padding may hold infinities, which the fused attention of torch would multiply by 0
    split_off = split_off and lengths is None and key_lengths is None and Hkv == H
    split_off = split_off and (spec.causal or _many_columns(spec, S)) and _fused(x.q, spec.causal) is not None
    work = passes(spec.pattern, spec.causal, split_off, bool(spec.shifts))
    random = firsts = both = None
    if work.random:
        limits = None if spec.causal else key_lengths
        make = _cached_tables if limits is None else _tables
        random = make(work.random, spec.draws, T, S, spec.causal, limits, device)
    if spec.shifts:
        summary = next(a for a in spec.atoms if isinstance(a, Summary))
        firsts = _on_device(tuple(spec.first_columns(summary)), torch.int32, device)
    if lengths is not None or key_lengths is not None:
        lengths = torch.full((B,), T, device=device) if lengths is None else lengths
        key_lengths = torch.full((B,), S, device=device) if key_lengths is None else key_lengths
        both = lengths.clamp(max=T), key_lengths.clamp(max=S)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in x[:3])
    drawn = (0, 0, 0) if random is None else (*_shared_strides(random.table), random.table.shape[2])
    sizes, strides = (B, T, S, H, Hkv, x.q.shape[3]), tuple(t.stride()[:3] for t in (q, k, v))
    kind = Kind(sizes, strides, q.dtype, spec, work, both is not None, firsts is not None, drawn)
    return Call(x._replace(q=q, k=k, v=v), kind, both, random, firsts)


def _many_columns(spec: Spec, keys: int) -> bool:
    """Whether a summary has many columns, none of which is missing in the last block."""
    return any(isinstance(a, Summary) and keys % a.l == 0 and keys // a.l * a.c >= MANY for a in spec.atoms)


def forward(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    call = _call(x, spec, split_off=not spec.causal)
    B, T, _, H, _, D = call.kind.sizes
    if call.kind.work.far >= 0:
        far_k, far_v = _columns(call, call.kind.sizes[2])
        o, lse = _fused_forward(call.x.q, far_k, far_v, spec.scale)
    else:
        o = torch.empty(B, T, H, D, device=x.q.device, dtype=x.q.dtype)
        lse = torch.empty(B, H, T, device=x.q.device, dtype=torch.float32)
    for run in call.kind.over_queries("forward"):
        if not run.pieces:
            _run_forward(call, run, o[None], lse[None])
            continue
        (part,), part_lse = _room(run, o), lse.new_empty(run.pieces, B, H, run.stop)
        _run_forward(call, run, part, part_lse)
        total = torch.logsumexp(part_lse, 0)
        weight = torch.exp(part_lse - total.masked_fill(total == -inf, 0))
        o[:, : run.stop] = (part * weight.transpose(2, 3)[..., None]).sum(0)
        lse[:, :, : run.stop] = total
    return o, lse.transpose(1, 2)


def _run_forward(call: Call, run: Pass, o: Tensor, lse: Tensor) -> None:
    """o [pieces, B, rows, H, D], lse [pieces, B, H, rows]"""
    table = call.random.table if call.random else None
    tensors = (*call.x[:3], o, lse, *(call.lengths or (None, None)), table, call.firsts)
    own = {"o_piece": o.stride(0), "o_batch": o.stride(1), "lse_piece": lse.stride(0), "lse_head": lse.stride(2)}
    call.start(_forward, run, tensors, own, len(o), _query_numbers)


def backward(
    x: Inputs, spec: Spec, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    # the backward of torch's attention takes no gradient of the log-sum-exp
    call = _call(x, spec, split_off=dlse is None)
    q, (B, T, S, H, Hkv, D) = call.x.q, call.kind.sizes
    do = do if do.stride(-1) == 1 else do.contiguous()
    lse = lse.transpose(1, 2).contiguous()  # [B, H, T]
    dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
    given = Given(o, lse, do, dlse, torch.empty(*lse.shape, 2, device=q.device, dtype=lse.dtype))
    dq = torch.empty(B, T, H, D, device=q.device, dtype=q.dtype)
    far = far_backward(call, given)
    for run in call.kind.over_queries("dq"):
        (into,) = _room(run, dq)
        _run_dq(call, run, given, into, far if run.step == 1 and not run.pieces else None)
        _add_up(run, (dq, into))
    runs = tuple(call.kind.over_keys())
    # a pass that does not continue from another writes every key
    make = torch.zeros if all(run.go_on or run.pieces for run in runs) else torch.empty
    dk, dv = (make(B, S, Hkv, D, device=q.device, dtype=q.dtype) for _ in range(2))
    for run in runs:
        into_k, into_v = _room(run, dk, dv)
        _run_dkv(call, run, given, into_k, into_v)
        _add_up(run, (dk, into_k), (dv, into_v))
    if far is not None:
        _run_far(call, dk, dv, *far.columns, back=True)
    return dq, dk, dv


def _room(run: Pass, *results: Tensor) -> list[Tensor]:
    """Where a pass writes to: the results [B, T, H, D] themselves, or float32 room for its pieces: [pieces, B, ...]."""
    if not run.pieces:
        return [x[None] for x in results]
    return [x.new_empty(run.pieces, x.shape[0], run.stop, *x.shape[2:], dtype=torch.float32) for x in results]


def _add_up(run: Pass, *results: tuple[Tensor, Tensor]) -> None:
    """Writes the sums of the pieces of a pass into the results."""
    for x, pieces in results if run.pieces else ():
        x[:, : run.stop] = pieces.sum(0)


class Given(NamedTuple):
    """What the passes of a backward read."""

    o: Tensor
    lse: Tensor  # [B, H, T]
    do: Tensor
    dlse: Tensor | None  # [B, H, T]
    stats: Tensor  # [B, H, T, 2], which the first pass over queries writes


class Far(NamedTuple):
    """Gradients of the dense part of a summary."""

    first: int  # query of dq
    dq: Tensor
    columns: tuple[Tensor, Tensor]  # of keys and values


def _run_dq(call: Call, run: Pass, given: Given, dq: Tensor, far: Far | None = None) -> None:
    """dq [pieces, B, rows, H, D]"""
    o, lse, do, dlse, stats = given
    table, apart = call.random.table if call.random else None, None if far is None else far.dq
    tensors = (*call.x[:3], o, do, lse, dlse, stats, dq, apart, *(call.lengths or (None, None)), table, call.firsts)
    own = {
        **_strides(do=do), "dq_piece": dq.stride(0), "dq_batch": dq.stride(1),
        "far_batch": 0 if apart is None else apart.stride(0), "scale": call.kind.spec.scale,
        "FAR": -1 if far is None else far.first, "DLSE": dlse is not None,
    }  # fmt: skip
    call.start(_dq, run, tensors, own, len(dq), _query_numbers)


def _run_dkv(call: Call, run: Pass, given: Given, dk: Tensor, dv: Tensor) -> None:
    """dk and dv [pieces, B, columns, Hkv, D]"""
    starts = readers = None
    apart = (0, 0, 0, 0)
    if call.random is not None:
        _, starts, readers = call.random
        apart = (*_shared_strides(starts), *_shared_strides(readers))
    tensors = (
        *call.x[:3], given.do, given.stats, dk, dv, *(call.lengths or (None, None)), starts, readers, call.firsts
    )  # fmt: skip
    own = {
        **_strides(do=given.do), "dk_piece": dk.stride(0), "dk_batch": dk.stride(1), "scale": call.kind.spec.scale,
        **dict(zip(("starts_batch", "starts_head", "readers_batch", "readers_head"), apart, strict=True)),
    }  # fmt: skip
    call.start(_dkv, run, tensors, own, len(dk), _key_numbers)


def far_backward(call: Call, given: Given) -> Far | None:
    """Gradients of the dense part of a summary, given the output and log-sum-exp of the whole softmax.

    Without causality every query reads every column. With it, the far part is plain causal attention: put g = l/c
    neighbouring queries into one group u = i // g, and number the columns s. A query of group u reads the columns of
    all earlier blocks, s < c·(u // c). All s <= u - c are among them, and they form a causal square without its first c
    rows. The rest, u - c < s < c·(u // c), is in the block before the query's: the kernels compute it as STRIP. The g
    queries of a group are adjacent in memory, so they act as heads: dq is for the n·g queries from l on,
    [B, n, g·H, D], and dk and dv are for n columns, g times.
    """
    work, (_, T, S, *_), scale = call.kind.work, call.kind.sizes, call.kind.spec.scale
    if work.far < 0:
        return None
    do, q, o, lse = given.do, call.x.q, given.o, given.lse
    if not call.kind.spec.causal:
        dq, dk, dv = _fused_backward(do, q, *_columns(call, S), o, lse, scale, causal=False)
        return Far(0, dq.contiguous(), (dk.contiguous(), dv.contiguous()))
    size, c = work.blocks
    n = blocks_of(T, size // c) - c
    if n <= 0:
        return None
    do, q, o = (_far_queries(t, n, size, c) for t in (do, q, o))
    lse = F.pad(lse[:, :, size:], (0, n * (size // c) - (T - size)))
    lse = lse.unflatten(2, (n, -1)).permute(0, 3, 1, 2).flatten(1, 2)  # [B, g·H, n]
    far_k, far_v = (torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in range(2))
    _run_far(call, call.x.k, call.x.v, far_k, far_v, back=False)
    dq, dk, dv = _fused_backward(do, q, far_k, far_v, o, lse, scale, causal=True)
    return Far(size, dq.contiguous(), (dk.contiguous(), dv.contiguous()))


def _columns(call: Call, keys: int) -> tuple[Tensor, Tensor]:
    """The keys and values of all columns of a summary, [B, columns, H, D]."""
    (B, *_, H, _, D), work, q = call.kind.sizes, call.kind.work, call.x.q
    size, c = work.blocks
    far_k, far_v = (torch.empty(B, keys // size * c, H, D, device=q.device, dtype=q.dtype) for _ in range(2))
    _run_far(call, call.x.k, call.x.v, far_k, far_v, back=False)
    return far_k, far_v


def _run_far(call: Call, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, back: bool) -> None:
    (B, _, _, H, _, D), tile, rows, work = call.kind.sizes, 32, far_k.shape[1], call.kind.work
    size, c = work.blocks
    tiles, copies = blocks_of(rows, tile), size // c if call.kind.spec.causal else 1
    _far[(tiles * B * H,)](
        k, v, far_k, far_v, k if call.firsts is None else call.firsts, **_strides(k=k, v=v), tiles=tiles, rows=rows,
        A=work.atoms, n=work.far, COPIES=copies, BACK=back, FIRSTS=call.firsts is not None,
        H=H, D=D, BD=call.kind.width, BN=tile,
    )  # fmt: skip


def _far_queries(x: Tensor, n: int, size: int, c: int) -> Tensor:
    """[B, T, H, D] -> [B, n, g·H, D]; copies only if g does not divide T."""
    x = x[:, size:]
    missing = n * (size // c) - x.shape[1]
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).reshape(len(x), n, -1, x.shape[3])


def _fused(q: Tensor, causal: bool) -> str | None:
    """Which of torch's attentions to use: one whose backward accepts a log-sum-exp from outside."""
    if q.device.type == "cpu":
        return "cpu"
    if q.dtype == torch.float32:
        return None
    x = q.transpose(1, 2)
    choice = torch._fused_sdp_choice(x, x, x, None, 0.0, causal)
    return {SDPBackend.CUDNN_ATTENTION.value: "cudnn", SDPBackend.FLASH_ATTENTION.value: "flash"}.get(choice)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query reads every key: o [B, T, H, D], and its log-sum-exp [B, H, T]."""
    fused = _fused(q, causal=False)
    x = [t.transpose(1, 2) for t in (q, k, v)]
    if fused == "cudnn":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.0, False, False, scale=scale)
    elif fused == "flash":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*x, 0.0, False, False, scale=scale)
    else:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*x, 0.0, False, scale=scale)
    return o.transpose(1, 2).contiguous(), lse.reshape(x[0].shape[:3]).contiguous()


def _fused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> list[Tensor]:
    fused = _fused(q, causal)
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    n, m, seed = q.shape[2], k.shape[2], torch.empty((), dtype=torch.int64, device=q.device)
    if fused == "cudnn":
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse[..., None], seed, seed, None, None, None, n, m, 0.0, causal, scale=scale
        )
    elif fused == "flash":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, n, m, 0.0, causal, seed, seed, scale=scale
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )
    return [grad.transpose(1, 2) for grad in grads]
