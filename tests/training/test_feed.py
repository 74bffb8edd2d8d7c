from typing import Any

import numpy as np
import pytest
import torch

from subquad.data.order import Order
from subquad.training.distributed import Ranks
from subquad.training.feed import Feed, in_order
from subquad.training.task import Batch


class Numbers:
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        if 99 in indices:
            raise FileNotFoundError("example 99")
        return {"index": torch.from_numpy(indices.copy()), "epoch": torch.tensor(epoch)}


def _ranks(rank: int, world: int) -> Ranks:
    return Ranks(torch.device("cpu"), "none", rank, world)


def _seen(batches: list[Batch]) -> list[int]:
    return torch.cat([batch["index"] for batch in batches]).tolist()


@pytest.mark.parametrize(("world", "pieces"), [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_ranks_and_pieces_together_are_the_update(world: int, pieces: int) -> None:
    order = Order(20, 9, seed=3)
    feeds = [Feed(Numbers(20), order, pieces, _ranks(rank, world)) for rank in range(world)]
    for step in (0, 1, 2, 7, 3):  # also if it does not follow the last one
        parts = [feed.update(step) for feed in feeds]
        assert all(len(part) == pieces for part in parts)
        assert [number for part in parts for number in _seen(part)] == order.indices(step)[0].tolist()
    for feed in feeds:
        feed.close()


def test_an_error_of_the_data_is_not_swallowed() -> None:
    feed = Feed(Numbers(100), Order(100, 100, shuffle=False), 1, _ranks(0, 1))
    with pytest.raises(FileNotFoundError, match="example 99"):
        feed.update(0)
    feed.close()


@pytest.mark.parametrize(
    ("count", "batch", "most", "world"),
    [(10, 3, None, 1), (10, 3, 7, 1), (10, 3, 7, 2), (10, 3, None, 4), (1, 5, None, 2)],
)
def test_a_split_is_measured_once_whatever_the_ranks(count: int, batch: int, most: Any, world: int) -> None:
    made = [list(in_order(Numbers(count), batch, most, _ranks(rank, world))) for rank in range(world)]
    assert len({len(batches) for batches in made}) == 1  # all ranks compute equally often
    counted = sorted(n for batches in made for part, counts in batches if counts for n in part["index"].tolist())
    assert counted == list(range(count if most is None else min(count, most)))
