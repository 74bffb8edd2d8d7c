"""The ranks that share a sequence, and the collectives of torch.distributed between them, which count their bytes."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
                    parameter.grad = reduce(grad, self, "gradients", dist.ReduceOp.SUM)

    def count(self, what: str, sent: int, received: int, like: Tensor) -> None:
        """Count elements like those of a tensor."""
        self.sent[what] += sent * like.element_size()
        self.received[what] += received * like.element_size()


# its name up to torch 2.12 is deprecated since
_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def all_gather(x: Tensor, group: Group, what: str) -> Tensor:
    if group.world == 1:
        return x.detach().clone()[None]
    group.count(what, (group.world - 1) * x.numel(), (group.world - 1) * x.numel(), x)
    wire = _to_wire(x, group)
    out = wire.new_empty(group.world, *x.shape)
    with _reporting(group):
        _gather_single(out.view(-1), wire.reshape(-1), group=group.group)
    return out.to(x.device)


def all_to_all(x: Tensor, group: Group, send: list[int], receive: list[int], what: str) -> Tensor:
    if group.world == 1:
        return x.detach().clone()
    group.count(what, sum(send) - send[group.rank], sum(receive) - receive[group.rank], x)
    wire = _to_wire(x, group)
    out = wire.new_empty(sum(receive))
    with _reporting(group):
        dist.all_to_all_single(out, wire, receive, send, group=group.group)
    return out.to(x.device)


def reduce(x: Tensor, group: Group, what: str, op: Any) -> Tensor:
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
