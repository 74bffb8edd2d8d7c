"""The order of examples, as a pure function of the step: there is nothing to save or restore.

A batch that reaches the end of an epoch takes the rest of its examples from the next one. So every example is seen
exactly once per epoch, for any batch size, and a batch may be larger than the data.
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
        """The consecutive examples of one rank out of `world`. Sizes differ by at most one, and the parts of all ranks
        together are `indices` in order. Some are empty if there are fewer examples than ranks."""
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} cannot work with world={world}: accepted is 0 to {world - 1}")
        return indices[len(indices) * rank // world : len(indices) * (rank + 1) // world]


def tenths(items: Sequence[T]) -> tuple[list[T], Sequence[T], Sequence[T]]:
    """(training, validation, test): every tenth item for validation and every tenth for testing."""
    return [item for n, item in enumerate(items) if n % 10 < 8], items[8::10], items[9::10]


@lru_cache(maxsize=4)  # a step needs one, or two at the end of an epoch; training and validation alternate
def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch. It sorts raw bits, which NumPy keeps the same in all versions, unlike `permutation`."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    order = np.argsort(raw, kind="stable")
    order.setflags(write=False)
    return order
