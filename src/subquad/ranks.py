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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from subquad.checks import shown


class RankLost(RuntimeError):
    """Another rank of the sequence ended, or cannot be reached."""


class Layout(NamedTuple):
    """How the T tokens of a sequence are cut: rank r holds sizes[r] of them."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def offset(self) -> int:
        """The position of this rank's first token."""
        return self.starts[self.rank]

    @property
    def starts(self) -> list[int]:
        return list(itertools.accumulate(self.sizes[:-1], initial=0))

    @property
    def total(self) -> int:
        return sum(self.sizes)


class Group:
    """The ranks that share a sequence, and the bytes that this rank has sent to and received from the others.

    `sent` and `received` count by what was exchanged: "states", "halo", "gather", "transpose", "sum" and so on. A
    collective counts as if every rank sent what another needs straight to it, and a sum as a ring does.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        """None: this rank alone, which shares with nobody."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.layout: Layout | None = None  # of the call that runs now

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of a model over the ranks of the sequence, in place."""
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = _reduce(grad, self, "gradients", dist.ReduceOp.SUM)

    def count(self, what: str, sent: int, received: int, like: Tensor) -> None:
        """Count elements like those of a tensor."""
        self.sent[what] += sent * like.element_size()
        self.received[what] += received * like.element_size()


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
    sizes = _all_gather(torch.tensor([length], dtype=torch.int64), group, "sizes")
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
    return _reduce(lengths, _active, "lengths", dist.ReduceOp.SUM)


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
    got = _Exchange.apply(flat, group, [part.numel() for part in parts], receive, "transpose")
    return torch.cat([p.view(s) for p, s in zip(got.split(receive), shapes, strict=True)], 1 if out else 2)


def gather(x: Tensor, what: str = "gather") -> Tensor:
    """What every rank has, in the same shape: [...] -> [ranks, ...]."""
    return x[None] if _active is None else _Gather.apply(x, _active, what)


def total(x: Tensor, what: str = "sum") -> Tensor:
    """The sum over the ranks, on every rank, where each rank goes on to use it for its own tokens."""
    return x if _active is None else _Total.apply(x, _active, what)


def largest(x: Tensor) -> Tensor:
    """The largest over the ranks, on every rank, without gradients."""
    return x if _active is None else _reduce(x.detach(), _active, "largest", dist.ReduceOp.MAX)


def largest_before(x: Tensor, nothing: float) -> Tensor:
    """The largest over the ranks before this one, without gradients; `nothing` on the first."""
    if _active is None:
        return torch.full_like(x, nothing)
    every = _all_gather(x.detach(), _active, "largest")[: _active.rank]
    return torch.full_like(x, nothing) if _active.rank == 0 else every.amax(0)


def result(x: Tensor) -> Tensor:
    """The sum over the ranks as the result of all: each rank's backward gives its share of the gradients of that."""
    return x if _active is None else _Result.apply(x, _active)


def share(x: Tensor) -> Tensor:
    """A result that all ranks computed alike, with this rank's share of its gradients."""
    return x if _active is None else _Share.apply(x, _active.world)


def tie(x: Tensor, *received: Tensor) -> Tensor:
    """x, with what was received in its graph: its gradient is zero, but the exchange also runs in backward."""
    linked = [t for t in received if t.requires_grad]
    return x if not linked else _Tie.apply(x, *linked)


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
        added = added + _moved(start, by, matrix)  # type: ignore[arg-type]
    before, after = _Prefix.apply(added, by, matrix, ends, group)
    return (before + start if first else before), after


def _moved(state: Tensor, by: Tensor | None, matrix: bool) -> Tensor:
    if by is None:
        return state
    if not matrix:
        return by * state
    with torch.autocast(state.device.type, enabled=False):
        return by @ state


class _Prefix(torch.autograd.Function):
    """The states P_0 = 0, P_{r+1} = A_r P_r + S_r: before this rank's part, and after the last one.

    Gradients go the other way: G_r = g_r + A_rᵀ G_{r+1} from those of the states before each rank's part, where G after
    the last is the sum of all ranks' gradients of the end; then dS_r = G_{r+1} and dA_r = G_{r+1} P_rᵀ.
    """

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, by: Tensor | None, matrix: bool, ends: bool, group: Group
    ) -> tuple[Tensor, Tensor]:
        parts = [added] if by is None else [added, by]
        flat = _all_gather(torch.cat([p.reshape(-1) for p in parts]), group, "states")
        every = flat[:, : added.numel()].view(-1, *added.shape)
        steps = None if by is None else flat[:, added.numel() :].view(-1, *by.shape)
        state = torch.zeros_like(added)
        before = state
        for r in range(group.world if ends else group.rank):
            before = state if r == group.rank else before
            state = _moved(state, None if steps is None else steps[r], matrix) + every[r]
        if not ends:
            before = state
        ctx.group, ctx.matrix, ctx.ends = group, matrix, ends
        ctx.save_for_backward(before, *(() if steps is None else (steps,)))
        return before.clone(), state if ends else state.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor | None, ...]:
        before, *rest = ctx.saved_tensors
        steps, group = rest[0] if rest else None, ctx.group
        sent = torch.stack([dbefore, dafter]) if ctx.ends else dbefore[None]
        every = _all_gather(sent, group, "states")  # [ranks, 1 or 2, R, H, K, V]
        later = every[:, 1].sum(0) if ctx.ends else torch.zeros_like(before)
        for r in range(group.world - 1, group.rank, -1):
            step = None if steps is None else steps[r]
            later = every[r, 0] + _moved(later, step.mT if step is not None and ctx.matrix else step, ctx.matrix)
        if steps is None:
            dby = None
        elif ctx.matrix:
            with torch.autocast(later.device.type, enabled=False):
                dby = later @ before.mT
        else:
            dby = (later * before).sum_to_size(steps.shape[1:])
        return later, dby, None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all of a flat tensor: send[r] elements to rank r, receive[r] from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: list[int], receive: list[int], what: str) -> Tensor:
        ctx.given = group, receive, send, what
        return _all_to_all(x, group, send, receive, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad.contiguous(), *ctx.given), None, None, None, None


def _exchange_rows(rows: Tensor, send: list[slice], receive: list[int], what: str) -> Tensor:
    """Send a slice of rows [T, ...] to each rank; what arrives, in the order of the ranks."""
    assert _active is not None
    width = rows[:1].numel()
    flat = torch.cat([rows[s].reshape(-1) for s in send])
    sizes = [max(0, s.stop - s.start) * width for s in send]
    got = _Exchange.apply(flat, _active, sizes, [n * width for n in receive], what)
    return got.view(sum(receive), *rows.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return _all_gather(x, group, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of what the ranks send back."""
        size = grad[0].numel()
        got = _all_to_all(grad.reshape(-1), ctx.group, [size] * len(grad), [size] * len(grad), ctx.what)
        wide = torch.promote_types(grad.dtype, torch.float32)
        return got.view_as(grad).sum(0, dtype=wide).to(grad.dtype), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return _reduce(x, group, what, dist.ReduceOp.SUM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce(grad, ctx.group, ctx.what, dist.ReduceOp.SUM), None, None


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ARG004
        return _reduce(x, group, "result", dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad / ctx.world, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *received: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in received]
        ctx.save_for_backward(x.new_empty(0))  # so that under checkpointing every rank runs the exchange again
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


# The collectives of torch.distributed, counted

# its name up to torch 2.12 is deprecated since
_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def _all_gather(x: Tensor, group: Group, what: str) -> Tensor:
    if group.world == 1:
        return x.detach().clone()[None]
    group.count(what, (group.world - 1) * x.numel(), (group.world - 1) * x.numel(), x)
    wire = _to_wire(x, group)
    out = wire.new_empty(group.world, *x.shape)
    with _reporting(group):
        _gather_single(out.view(-1), wire.reshape(-1), group=group.group)
    return out.to(x.device)


def _all_to_all(x: Tensor, group: Group, send: list[int], receive: list[int], what: str) -> Tensor:
    if group.world == 1:
        return x.detach().clone()
    group.count(what, sum(send) - send[group.rank], sum(receive) - receive[group.rank], x)
    wire = _to_wire(x, group)
    out = wire.new_empty(sum(receive))
    with _reporting(group):
        dist.all_to_all_single(out, wire, receive, send, group=group.group)
    return out.to(x.device)


def _reduce(x: Tensor, group: Group, what: str, op: Any) -> Tensor:
    if group.world == 1:
        return x.detach().clone()
    around = 2 * x.numel() * (group.world - 1) // group.world  # each way round a ring
    group.count(what, around, around, x)
    wire = _to_wire(x, group)
    wire = wire.clone() if wire.data_ptr() == x.data_ptr() else wire
    with _reporting(group):
        dist.all_reduce(wire, op, group=group.group)
    return wire.to(x.device)


def _to_wire(x: Tensor, group: Group) -> Tensor:
    """Contiguous, and where the backend can send it from: gloo sends from the CPU, NCCL from a GPU."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group.group).split(",") if ":" in pair)
    if x.device.type == "cuda" and backends.get("cuda", "gloo") == "gloo":
        return x.detach().to("cpu").contiguous()
    if x.device.type == "cpu" and "gloo" not in backends.get("cpu", ""):
        return x.detach().to("cuda").contiguous()
    return x.detach().contiguous()


@contextlib.contextmanager
def _reporting(group: Group) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        _lost(group, error)
    except RuntimeError as error:
        if "gloo" in str(error).lower() or "connection" in str(error).lower():
            _lost(group, error)
        raise


def _lost(group: Group, error: Exception) -> NoReturn:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise RankLost(f"rank {group.rank} of {group.world} lost another rank of its sequence: {line}") from error
