"""One process or many: the ranks that torchrun started, DDP and FSDP, and collectives between ranks."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from subquad import ranks
from subquad.models.blocks import Block

T = TypeVar("T")


@dataclass
class Ranks:
    """This process and its rank among all. With one process the methods do nothing."""

    device: torch.device
    kind: str = "none"  # "none", "ddp", "fsdp"
    rank: int = 0
    world: int = 1
    started: bool = False  # whether we created the process group and must destroy it
    store: Any = None  # torchrun's key-value store, which survives its restarts
    sequence: int | None = None  # how many ranks share each sequence; None: none does, as if it were 1
    mesh: Any = None  # of data x sequence, where several do

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the examples. Ranks of one sequence have the same one."""
        return self.rank // (self.sequence or 1)

    @property
    def data_world(self) -> int:
        """The number of shares of the examples."""
        return self.world // (self.sequence or 1)

    def sharing(self) -> AbstractContextManager[Any]:
        """A context for a forward, whose sequences are split over ranks if they share them."""
        if self.sequence is None:
            return nullcontext()
        return ranks.alone() if self.mesh is None else ranks.sequence_parallel(self.mesh["sequence"])

    @property
    def sharded(self) -> bool:
        return self.kind == "fsdp"

    def shard(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """FSDP2: each block is a group that is gathered when needed; the rest is the module's own group."""
        if self.sharded:
            for block in blocks:
                fully_shard(block)
            fully_shard(module)

    def wrap(self, module: nn.Module) -> nn.Module:
        """DDP, which sums gradients over ranks while backward still runs."""
        if self.kind != "ddp":
            return module
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Context for a forward and backward; only the last one of an update sends gradients over the network."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def reshard(self, module: nn.Module) -> None:
        """Free gathered parameters: from here on this rank reads and writes only its own shard."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_reshard_after_forward(part is not module, recurse=False)
                part.reshard()

    def gather(self, module: nn.Module) -> None:
        """Gather all parameters on every rank until `reshard`, for methods other than forward, such as step."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
                part.set_reshard_after_forward(False, recurse=False)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks. It runs on the CPU, so it does not wait for a GPU."""
        if self.world == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def decide(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 and return its result on all ranks; if it fails, all ranks fail."""
        if self.world == 1:
            return function()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = function()
            except (ValueError, OSError) as error:
                dist.broadcast_object_list([None, str(error)], src=0, device=torch.device("cpu"))
                raise
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise ValueError(box[1])
        return box[0]

    def mark_begun(self) -> None:
        """Tell processes that torchrun may restart later that the run has begun."""
        if self.store is not None:
            self.store.set("begun", "")

    def restarted(self) -> bool:
        """Whether torchrun restarted this process after the run had begun; if so, it resumes without --resume."""
        return attempt() > 0 and self.store is not None and self.store.check(["begun"])

    def barrier(self) -> None:
        if self.world > 1:
            self.largest(0.0)

    def close(self) -> None:
        if self.started and dist.is_initialized():
            # gloo's thread needs Python's lock to free its last tensors. Destroying the group at the same time would
            # deadlock, as it holds that lock while it waits for the thread
            time.sleep(0.2)
            dist.destroy_process_group()


def join(parallel: str, device: str, sequence: int | None = None) -> Ranks:
    """The ranks that torchrun started, or this process alone; `sequence` of them share each sequence."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none" and world > 1:
        raise ValueError(f'parallel="none" cannot work in {world} processes: accepted is "ddp" or "fsdp"')
    if world % (sequence or 1):
        processes = f"{world} process" + "es" * (world > 1)
        accepted = "a number that divides that of the processes, which torchrun starts"
        raise ValueError(f"training.sequence={sequence} cannot work in {processes}: accepted is {accepted}")
    if world == 1:
        return Ranks(place_of(device), sequence=sequence)
    place = torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if place.type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(f"{local + 1} processes cannot share {torch.cuda.device_count()} GPUs: start one for each")
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    started, base = not dist.is_initialized(), None
    if started:
        # torchrun keeps its store over restarts: without a prefix, ranks would find the addresses of dead processes
        base, rank, world = next(rendezvous("env://"))
        store = PrefixStore(f"attempt_{attempt()}", base)
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    mesh = None
    if sequence is not None and sequence > 1:
        shape = (world // sequence, sequence)
        mesh = init_device_mesh(place.type, shape, mesh_dim_names=("data", "sequence"))
    kind = "ddp" if parallel == "auto" else parallel
    return Ranks(place, kind, dist.get_rank(), world, started, base, sequence, mesh)


def place_of(device: str) -> torch.device:
    """The device; "cuda" is this thread's GPU by its number, since another thread may have another one."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def attempt() -> int:
    """How often torchrun has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, to be sharded one by one; none if they share parameters or are reversible, because
    reversible layers are not called as modules."""
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    reversible = any(getattr(getattr(module, "config", None), "reversible", False) for module in model.modules())
    parameters = [p for block in blocks for p in block.parameters()]
    return [] if reversible or len(set(parameters)) < len(parameters) else blocks
