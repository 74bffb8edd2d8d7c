"""The order in which examples are seen, as a pure function of the step: nothing to save, nothing to restore.

Epochs follow each other without a gap: a batch that reaches the end of one takes the rest from the next, so that every
example is seen exactly once an epoch whatever the batch, and a batch may be larger than the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from subquad.checks import at_least

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    length: int  # examples
    batch: int  # examples of one update, over all ranks and micro-batches
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        at_least(self, length=1, batch=1, seed=0)

    def indices(self, step: int) -> tuple[np.ndarray, int]:
        """(example indices [batch] of the update that begins after `step` updates, the epoch of the first of them)"""
        if step < 0:
            raise ValueError(f"step={step} cannot work: accepted is the number of updates done, 0 or more")
        at, end, parts = step * self.batch, (step + 1) * self.batch, []
        while at < end:
            epoch, start = divmod(at, self.length)
            stop = min(self.length, start + end - at)
            parts.append(self._epoch(epoch, start, stop))
            at += stop - start
        return np.concatenate(parts), step * self.batch // self.length

    def _epoch(self, epoch: int, start: int, stop: int) -> np.ndarray:
        return permutation(self.length, self.seed, epoch)[start:stop] if self.shuffle else np.arange(start, stop)

    @staticmethod
    def shard(indices: np.ndarray, rank: int, world: int) -> np.ndarray:
        """What `rank` of `world` takes: neighbouring examples, sizes that differ by one at most, all ranks together
        `indices` in its own order. Empty where there are fewer examples than ranks."""
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} cannot work with world={world}: accepted is 0 to {world - 1}")
        return indices[len(indices) * rank // world : len(indices) * (rank + 1) // world]


def tenths(items: Sequence[T]) -> tuple[list[T], Sequence[T], Sequence[T]]:
    """(training, validation, test): every tenth is for validation and every tenth for testing."""
    return [item for n, item in enumerate(items) if n % 10 < 8], items[8::10], items[9::10]


@lru_cache(maxsize=4)  # a step needs one, or two where an epoch ends; training and validation take turns
def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch. Sorted raw bits, because NumPy promises those for all versions and `permutation` not."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    order = np.argsort(raw, kind="stable")
    order.setflags(write=False)
    return order
