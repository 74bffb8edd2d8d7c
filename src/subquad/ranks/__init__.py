"""One sequence over many ranks: each holds a part of T, and `ops` exchange what their mechanisms need.

    with subquad.sequence_parallel(mesh) as group:   # a DeviceMesh of one dimension, or a process group
        loss = model.loss(tokens)                    # this rank's part of the tokens; the mean over all of them
        loss.backward()                              # this rank's share of the gradients
        group.sum_gradients(model)                   # the gradients, on every rank

Everything along T is a rank's own part, in the order of the ranks: parts may differ in size and hold at least one
token. `lengths` count the tokens of the part, `cu_seqlens` are the borders that fall into it (`shard` cuts all three).
Everything else, such as parameters and initial states, is the same on all ranks. Without the context nothing changes.

All ranks run the same exchanges in the same order, in backward too. So what an exchange returned must be used on every
rank: `tie` makes it part of the graph of an output that does not need it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from subquad.checks import shown
from subquad.ranks import collectives, exchanges
from subquad.ranks.collectives import Group as Group
from subquad.ranks.collectives import Layout as Layout
from subquad.ranks.collectives import RankLost as RankLost

_active: Group | None = None  # for the whole process, since backward runs in threads of its own


def active() -> Group | None:
    """The ranks that share the sequences of this process now; None if no sequence is split."""
    return _active


def sequence_parallel(mesh: Any) -> AbstractContextManager[Group]:
    """Split sequences over the ranks of a DeviceMesh of one dimension, or of a process group; see `subquad.ranks`."""
    group = Group(_group_of(mesh))
    if _active is not None:
        raise RuntimeError("sequence_parallel inside sequence_parallel: accepted is one context at a time")
    return _as_active(group)


@contextlib.contextmanager
def alone() -> Iterator[Group]:
    """The same as `sequence_parallel` for a rank that has whole sequences: it computes what any number of ranks do."""
    with _as_active(Group(None)) as made:
        yield made


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if dist.is_available() and isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        accepted = 'a DeviceMesh of one dimension, such as mesh["sequence"], or a process group'
        raise ValueError(f"mesh={shown(mesh)} cannot work: accepted is {accepted}")
    if mesh.ndim != 1:
        names = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        accepted = 'the dimension that splits sequences, such as mesh["sequence"]'
        raise ValueError(f"mesh has {mesh.ndim} dimensions{names}: accepted is {accepted}")
    return mesh.get_group()


@contextlib.contextmanager
def _as_active(group: Group | None, layout: Layout | None = None) -> Iterator[Any]:
    global _active
    before, _active = _active, group
    earlier = None if group is None else group.layout
    if group is not None:
        group.layout = layout
    try:
        yield group
    finally:
        _active = before
        if group is not None:
            group.layout = earlier


def suspended() -> AbstractContextManager[Any]:
    """A context in which every rank computes by itself."""
    return contextlib.nullcontext() if _active is None else _as_active(None)


def resumed(group: Group | None, layout: Layout | None) -> AbstractContextManager[Any]:
    """A context for what is computed again in backward, which may run when sequence_parallel has ended."""
    return contextlib.nullcontext() if group is None else _as_active(group, layout)


def recomputing() -> dict[str, Any]:
    """What torch's checkpoint needs to run exchanges again in backward."""
    group = _active
    if group is None:
        return {}
    layout = group.layout
    return {"context_fn": lambda: (contextlib.nullcontext(), resumed(group, layout))}


def laid_out(length: int) -> AbstractContextManager[Any]:
    """A context for one call on sequences of which this rank holds `length` tokens: the ranks tell their sizes once."""
    group = _active
    if group is None or group.layout is not None:
        return contextlib.nullcontext()
    return _as_active(group, _exchange_sizes(group, length))


def layout(length: int) -> Layout | None:
    """How a sequence is cut of which this rank holds `length` tokens; None if no sequence is split."""
    group = _active
    if group is None:
        return None
    if group.layout is None:
        return _exchange_sizes(group, length)
    if group.layout.size != length:
        raise ValueError(f"a part of {length} tokens in a call on parts of {group.layout.size}: accepted is one split")
    return group.layout


def _exchange_sizes(group: Group, length: int) -> Layout:
    sizes = collectives.all_gather(torch.tensor([length], dtype=torch.int64), group, "sizes")
    return Layout(tuple(int(n) for n in sizes.flatten().tolist()), group.rank)


def positions(length: int, device: torch.device) -> Tensor:
    """The positions of this rank's tokens in their sequence: 0 .. length - 1 if it is not split."""
    if _active is None:
        return torch.arange(length, device=device)
    found = layout(length)
    assert found is not None
    return torch.arange(found.offset, found.offset + length, device=device)


def whole_length(length: int) -> int:
    """The tokens of the whole sequence, of which this rank holds `length`."""
    found = layout(length)
    return length if found is None else found.total


def tokens_read(length: int, lengths: Tensor | None) -> int | Tensor:
    """The tokens of whole rows: `whole_length` where there are no lengths, otherwise `whole_lengths`."""
    rows = whole_lengths(lengths)
    return whole_length(length) if rows is None else rows


def whole_lengths(lengths: Tensor | None) -> Tensor | None:
    """The lengths [B] of whole rows from those of this rank's parts."""
    if _active is None or lengths is None:
        return lengths
    return collectives.reduce(lengths, _active, "lengths", dist.ReduceOp.SUM)


def refuse(what: str, instead: str) -> None:
    """Raise ValueError if sequences are split, naming what cannot work then, and what can."""
    if _active is not None:
        raise ValueError(f"{what} cannot work inside sequence_parallel: {instead}")


def shard(
    tokens: Tensor,
    mesh: Any,
    *,
    sizes: Sequence[int] | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's part of whole sequences [B, T, ...], of their lengths [B] and of the borders of a pack [N + 1].

    `sizes` are the tokens of each rank; None: as equal as possible.
    """
    group = _group_of(mesh)
    rank, world, total = dist.get_rank(group), dist.get_world_size(group), tokens.shape[1]
    sizes = even_sizes(total, world) if sizes is None else tuple(sizes)
    if len(sizes) != world or min(sizes) < 1 or sum(sizes) != total:
        raise ValueError(f"sizes={shown(sizes)} cannot work: accepted are {world} integers >= 1 that add up to {total}")
    cut = Layout(sizes, rank)
    start, stop = cut.offset, cut.offset + cut.size
    part = tokens[:, start:stop]
    own = None if lengths is None else (lengths - start).clamp(0, cut.size)
    return part, own, None if cu_seqlens is None else (cu_seqlens - start).clamp(0, cut.size)


def even_sizes(total: int, world: int) -> tuple[int, ...]:
    """Parts of T tokens for each rank that differ by at most one."""
    if total < world:
        raise ValueError(f"{total} tokens over {world} ranks: accepted is at least one token for each")
    return tuple(total * (r + 1) // world - total * r // world for r in range(world))


# Exchanges with their gradients. All but `prefix` do nothing if no sequence is split


def halo(x: Tensor, before: int, after: int) -> Tensor:
    """x [B, T, ...] with the tokens around this rank's part: [B, before + T + after, ...], zeros outside the sequence.

    They may be those of several ranks.
    """
    group = _active
    if group is None:
        return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (before, after))
    cut = layout(x.shape[1])
    assert cut is not None
    starts = [*cut.starts, cut.total]

    def wanted(rank: int, other: int) -> range:
        """The tokens of `other` that `rank` needs."""
        first, end = starts[rank : rank + 2]
        low, high = (first - before, first) if other < rank else (end, end + after)
        own = starts[other : other + 2]
        low, high = max(low, own[0]), min(high, own[1])
        return range(low, high) if other != rank and low < high else range(own[0], own[0])

    rows = x.transpose(0, 1)  # [T, B, ...]
    sends = [wanted(r, cut.rank) for r in range(group.world)]
    receives = [len(wanted(cut.rank, r)) for r in range(group.world)]
    got = _exchange_rows(rows, [slice(s.start - cut.offset, s.stop - cut.offset) for s in sends], receives, "halo")
    left = sum(receives[: cut.rank])
    lacking = before - left, after - (len(got) - left)
    parts = [got[:left], rows, got[left:]]
    edges = [rows.new_zeros(n, *rows.shape[1:]) for n in lacking]
    return torch.cat([edges[0], *parts, edges[1]]).transpose(0, 1)


def tokens_of(x: Tensor, start: int, stop: int) -> Tensor:
    """The tokens start .. stop - 1 of the whole sequence, those that exist: x [B, T, ...] -> [B, n, ...]."""
    group = _active
    if group is None:
        return x[:, start:stop]
    cut = layout(x.shape[1])
    assert cut is not None
    held = [
        range(max(start, first), max(start, first, min(stop, first + n)))
        for first, n in zip(cut.starts, cut.sizes, strict=True)
    ]
    own = held[cut.rank]
    send = slice(own.start - cut.offset, own.stop - cut.offset) if len(own) else slice(0, 0)
    rows = x.transpose(0, 1)
    return _exchange_rows(rows, [send] * group.world, [len(h) for h in held], "gather").transpose(0, 1)


def last_tokens(x: Tensor, count: int, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last `count` tokens of each whole row, on every rank, and their positions [B, count].

    x [B, T, ...] -> [B, count, ...], zeros for negative positions.
    """
    size = torch.zeros(x.shape[:1], dtype=torch.int64, device=x.device) + tokens_read(x.shape[1], lengths)
    at = size[:, None] - count + torch.arange(count, device=x.device)
    own = layout(x.shape[1])
    index = at if own is None else at - own.offset
    held = ((index >= 0) & (index < x.shape[1])).view(*at.shape, *[1] * (x.dim() - 2))
    index = index.clamp(0, x.shape[1] - 1).view(held.shape).expand(-1, -1, *x.shape[2:])
    return total(x.gather(1, index) * held.to(x.dtype), "halo"), at


def to_heads(x: Tensor) -> Tensor:
    """All tokens of a share of the heads: [B, T of this rank, H, D] -> [B, T of all, H of this rank, D]."""
    return x if _active is None else _transpose(x, True)


def to_tokens(x: Tensor, heads: int) -> Tensor:
    """Undo `to_heads`: [B, T of all, H of this rank, D] -> [B, T of this rank, heads, D]."""
    return x if _active is None else _transpose(x, False, heads)


def heads_of(heads: int, group: Group) -> list[slice]:
    """The heads of each rank in `to_heads`."""
    ends = [heads * r // group.world for r in range(group.world + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _transpose(x: Tensor, out: bool, heads: int = 0) -> Tensor:
    group = _active
    assert group is not None
    shares = heads_of(x.shape[2] if out else heads, group)
    counts, own = [s.stop - s.start for s in shares], shares[group.rank]
    cut = layout(x.shape[1]) if out else group.layout
    assert cut is not None
    batch, mine, width = x.shape[0], own.stop - own.start, x.shape[3]
    if out:
        parts = [x[:, :, share] for share in shares]
        shapes = [(batch, size, mine, width) for size in cut.sizes]
    else:
        parts = list(x.split(cut.sizes, 1))
        shapes = [(batch, cut.size, count, width) for count in counts]
    flat = torch.cat([part.reshape(-1) for part in parts])
    receive = [batch * s[1] * s[2] * width for s in shapes]
    got = exchanges.Exchange.apply(flat, group, [part.numel() for part in parts], receive, "transpose")
    return torch.cat([p.view(s) for p, s in zip(got.split(receive), shapes, strict=True)], 1 if out else 2)


def gather(x: Tensor, what: str = "gather") -> Tensor:
    """What every rank has, in the same shape: [...] -> [ranks, ...]."""
    return x[None] if _active is None else exchanges.Gather.apply(x, _active, what)


def total(x: Tensor, what: str = "sum") -> Tensor:
    """The sum over the ranks, on every rank, where each rank goes on to use it for its own tokens."""
    return x if _active is None else exchanges.Total.apply(x, _active, what)


def largest(x: Tensor) -> Tensor:
    """The largest over the ranks, on every rank, without gradients."""
    return x if _active is None else collectives.reduce(x.detach(), _active, "largest", dist.ReduceOp.MAX)


def largest_before(x: Tensor, nothing: float) -> Tensor:
    """The largest over the ranks before this one, without gradients; `nothing` on the first."""
    if _active is None:
        return torch.full_like(x, nothing)
    every = collectives.all_gather(x.detach(), _active, "largest")[: _active.rank]
    return torch.full_like(x, nothing) if _active.rank == 0 else every.amax(0)


def result(x: Tensor) -> Tensor:
    """The sum over the ranks as the result of all: each rank's backward gives its share of the gradients of that."""
    return x if _active is None else exchanges.Result.apply(x, _active)


def share(x: Tensor) -> Tensor:
    """A result that all ranks computed alike, with this rank's share of its gradients."""
    return x if _active is None else exchanges.Share.apply(x, _active.world)


def tie(x: Tensor, *received: Tensor) -> Tensor:
    """x, with what was received in its graph: its gradient is zero, but the exchange also runs in backward."""
    linked = [t for t in received if t.requires_grad]
    return x if not linked else exchanges.Tie.apply(x, *linked)


class Change(NamedTuple):
    """What a part of a sequence does to the state before it: state -> by · state + added."""

    added: Tensor  # [R, H, K, V], the state after the part if there was none before
    by: Tensor | None = None  # [R, H, 1, 1] or [R, H, K, 1], factors; [R, H, K, K], a matrix; None: 1
    matrix: bool = False


def prefix(change: Change, start: Tensor | None, ends: bool) -> tuple[Tensor, Tensor]:
    """The state before this rank's part, and, if `ends`, after the whole sequence, on every rank.

    `start` is the state before the whole sequence. One all-gather of the changes, and one of gradients in backward.
    """
    group = _active
    assert group is not None
    added, by, matrix = change
    first = group.rank == 0 and start is not None
    if first:
        added = added + exchanges.moved(start, by, matrix)  # type: ignore[arg-type]
    before, after = exchanges.Prefix.apply(added, by, matrix, ends, group)
    return (before + start if first else before), after


def _exchange_rows(rows: Tensor, send: list[slice], receive: list[int], what: str) -> Tensor:
    """Send a slice of rows [T, ...] to each rank; what arrives, in the order of the ranks."""
    assert _active is not None
    width = rows[:1].numel()
    flat = torch.cat([rows[s].reshape(-1) for s in send])
    sizes = [max(0, s.stop - s.start) * width for s in send]
    got = exchanges.Exchange.apply(flat, _active, sizes, [n * width for n in receive], what)
    return got.view(sum(receive), *rows.shape[1:])
