from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.order import Order, permutation

lengths, batches, seeds = st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**40)
few = settings(max_examples=50, deadline=None, derandomize=True)


def stream(order: Order, steps: int) -> np.ndarray:
    return np.concatenate([order.indices(step)[0] for step in range(steps)])


@few
@given(lengths, batches, seeds, st.booleans())
def test_every_example_is_seen_once_an_epoch(length: int, batch: int, seed: int, shuffle: bool) -> None:
    order = Order(length, batch, seed, shuffle)
    seen = stream(order, -(-3 * length // batch))
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(seen[epoch * length : (epoch + 1) * length]), np.arange(length))


@few
@given(lengths, batches, seeds, st.integers(0, 500))
def test_a_step_does_not_depend_on_earlier_calls(length: int, batch: int, seed: int, step: int) -> None:
    order = Order(length, batch, seed)
    permutation.cache_clear()
    cold, epoch = order.indices(step)
    for earlier in range(max(0, step - 5), step):
        order.indices(earlier)
    warm, again = order.indices(step)
    np.testing.assert_array_equal(cold, warm)
    assert epoch == again == step * batch // length
    assert cold.shape == (batch,)


@few
@given(lengths, batches, seeds, st.integers(0, 500), st.sampled_from((1, 2, 4)))
def test_shards_partition_the_batch(length: int, batch: int, seed: int, step: int, world: int) -> None:
    order = Order(length, batch, seed)
    whole, _ = order.indices(step)
    shards = [order.shard(whole, rank, world) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(shards), whole)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@few
@given(lengths, seeds, st.integers(1, 30), st.integers(1, 30))
def test_the_batch_cuts_the_same_stream(length: int, seed: int, one: int, other: int) -> None:
    first, second = (stream(Order(length, b, seed), -(-2 * length // b)) for b in (one, other))
    np.testing.assert_array_equal(first[: 2 * length], second[: 2 * length])


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert np.array_equal(stream(Order(5, 2, shuffle=False), 5), [0, 1, 2, 3, 4] * 2)


def test_epochs_differ_in_the_stream() -> None:
    seen = stream(Order(50, 7, 1), 40).tolist()
    epochs = [seen[start : start + 50] for start in (0, 50, 100, 150)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)


def test_the_order_is_that_of_every_machine() -> None:
    assert permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_a_cached_order_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(9, 1, 2)[0] = 3
    indices, _ = Order(9, 9, 1).indices(2)
    indices[0] = 3  # the caller may change a batch
    assert sorted(permutation(9, 1, 2)) == list(range(9))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Order(0, 1), "length=0"),
        (lambda: Order(1, 0), "batch=0"),
        (lambda: Order(1, 1, -1), "seed=-1"),
        (lambda: Order(1, 1).indices(-1), "step=-1"),
        (lambda: Order.shard(np.arange(4), 2, 2), "rank=2"),
    ],
)
def test_impossible_values_are_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
