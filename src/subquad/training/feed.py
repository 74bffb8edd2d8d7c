"""Batches: a thread makes those of the next update and copies them to the device during the current update."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from subquad.data.order import Order
from subquad.training.distributed import Ranks
from subquad.training.task import Batch, Source, Task


class Feed:
    """The micro-batches of each update for this rank. Their examples depend only on the step."""

    def __init__(self, source: Source, order: Order, pieces: int, ranks: Ranks):
        self.source, self.order, self.pieces, self.ranks = source, order, pieces, ranks
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead: tuple[int, Future[list[Batch]]] | None = None

    def update(self, step: int) -> list[Batch]:
        """The batches of the update after `step` updates, on the device."""
        if self.ahead is None or self.ahead[0] != step:
            self.ahead = (step, self.pool.submit(self._make, step))
        batches = self.ahead[1].result()
        self.ahead = (step + 1, self.pool.submit(self._make, step + 1))
        return batches

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> list[Batch]:
        indices, epoch = self.order.indices(step)
        mine = Order.shard(indices, self.ranks.data_rank, self.ranks.data_world)
        parts = np.array_split(mine, self.pieces)
        return [to_device(self.source.batch(part, epoch), self.ranks.device) for part in parts]


class Part:
    """The parts of a source's sequences that this rank holds, as its task cuts them."""

    def __init__(self, source: Source, task: Task, ranks: Ranks):
        self.source, self.task, self.ranks = source, task, ranks
        if len(source):
            self.batch(np.zeros(1, dtype=np.int64), 0)  # a task that cannot be cut raises now

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        shares = self.ranks.sequence or 1
        return self.task.part(self.source.batch(indices, epoch), self.ranks.rank % shares, shares)


def pieces_of(batch: int, micro_batch: int | None, world: int) -> int:
    """How many micro-batches an update has on every rank; each has at least one example."""
    if batch < world:
        raise ValueError(f"batch={batch} cannot work on {world} ranks: accepted is at least one example for each")
    most = -(-batch // world)
    pieces = -(-most // (micro_batch or most))
    if batch // world < pieces:
        raise ValueError(
            f"batch={batch} on {world} ranks is not enough for {pieces} micro-batches of {micro_batch} on each: "
            f"accepted is a batch that {world} x {micro_batch} divides"
        )
    return pieces


def in_order(source: Source, batch: int, most: int | None, ranks: Ranks) -> Iterator[tuple[Batch, bool]]:
    """(batch, whether it counts): the whole split, or its first `most` examples, spread over the ranks.

    Each rank gets the same number of batches, because sharded models compute together; surplus batches do not count.
    """
    size = len(source) if most is None else min(len(source), most)
    count = -(-size // batch)
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:

        def make(number: int) -> Batch:
            rows = np.arange(number * batch, min(size, (number + 1) * batch))
            return to_device(source.batch(rows, 0), ranks.device)

        numbers = range(ranks.data_rank, -(-count // ranks.data_world) * ranks.data_world, ranks.data_world)
        futures = ((pool.submit(make, number if number < count else 0), number < count) for number in numbers)
        ahead = next(futures, None)
        while ahead is not None:
            future, counts = ahead
            ahead = next(futures, None)
            yield future.result(), counts


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    torch.cuda.set_device(device)  # for this thread
    return {
        name: tensor.pin_memory().to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor
        for name, tensor in batch.items()
    }
