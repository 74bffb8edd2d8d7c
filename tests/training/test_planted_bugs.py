"""Shows that the tests of ranks and data order can fail: each bug planted here is caught by the test next to it."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subquad.data import order
from subquad.data.order import Order
from subquad.ops.clusters import kmeans_step
from subquad.training import feed
from subquad.training.feed import Feed
from subquad.training.loop import Run
from tests.data import test_order
from tests.ops import test_clusters
from tests.planting import Slip, caught, plant
from tests.training import test_feed, test_train
from tests.training.tiny import Tiny, assert_close_run, run, start

LINES: dict[str, tuple[Slip, Callable[..., None]]] = {
    # the second rank
    "the second rank takes the rows of the first": (
        Slip(Order.shard, "len(indices) * rank // world :", "0 :"),
        lambda: test_feed.test_ranks_and_pieces_together_are_the_update(2, 2),
    ),
    "the second rank measures what the first does": (
        Slip(feed.in_order, "range(ranks.data_rank,", "range(0,"),
        lambda: test_feed.test_a_split_is_measured_once_whatever_the_ranks(10, 3, 7, 2),
    ),
    "centroids of one rank": (
        Slip(kmeans_step, "torch.distributed.all_reduce(stats)", "stats.clone()"),
        lambda: _with_patches(test_clusters.test_all_ranks_move_to_the_mean_of_all_tokens),
    ),
    "means of 16-bit tokens": (
        Slip(kmeans_step, "wide(x)", "x"),
        test_clusters.test_means_of_many_tokens_in_16_bits_are_exact,
    ),
    # the order of data, where a run is resumed
    "every epoch in the order of the first": (
        Slip(Order._epoch, "self.seed, epoch)", "self.seed, 0)"),
        test_order.test_epochs_differ_in_the_stream,
    ),
    "a batch made ahead serves any step": (
        Slip(Feed.update, "self.ahead is None or self.ahead[0] != step", "self.ahead is None"),
        lambda: test_feed.test_ranks_and_pieces_together_are_the_update(1, 1),
    ),
    "an example is skipped where an epoch ends": (
        Slip(Order.indices, "at += stop - start", "at += stop - start + (stop == self.length)"),
        test_order.test_epochs_differ_in_the_stream,
    ),
    "the order of another seed": (
        Slip(order.permutation, "[seed, epoch]", "[seed + epoch]"),
        test_order.test_epochs_and_seeds_differ,
    ),
}


def _with_patches(test: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test(monkeypatch)


@pytest.mark.parametrize("name", LINES)
def test_wrong_line_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slip, check = LINES[name]

    def fresh() -> None:
        order.permutation.cache_clear()
        check()

    caught(monkeypatch, (slip,), fresh)
    order.permutation.cache_clear()


def test_a_resumed_run_that_repeats_a_batch_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()

    def check() -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        test_train.test_every_optimiser_learns_and_resumes_exactly(folder, "adam", None)

    slip = Slip(Run._update, "feed.update(self.step)", "feed.update(self.step - (self.earlier_seconds > 0))")
    caught(monkeypatch, (slip,), check)


TWO = {
    "right": None,
    "gradients that are averaged twice": Slip(Run._take, "ranks.world / (", "1.0 / ("),
    "losses of one rank": Slip(Run._take, "ranks.sum(sums)", "sums.clone()"),
}


def _work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, slip in TWO.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            if slip is not None:
                plant(monkeypatch, slip)
            run(folder / name, {"dropout": 0.0}, task=Tiny(ragged=True), **SHORT, parallel="ddp")
    dist.destroy_process_group()


SHORT: dict[str, Any] = {"steps": 3, "batch": 9, "log_every": 1, "evaluate_every": 3, "eps": 1e-3, "clip": None}


def test_wrong_lines_on_two_ranks_are_caught(tmp_path: Path) -> None:
    ranks = [start(_work, rank, tmp_path) for rank in range(2)]
    run(tmp_path / "alone", {"dropout": 0.0}, task=Tiny(ragged=True), **SHORT)
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert_close_run(tmp_path / "right", tmp_path / "alone")
    for name in list(TWO)[1:]:
        with pytest.raises(AssertionError):
            assert_close_run(tmp_path / name, tmp_path / "alone")
