import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.copy import Copy


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(9, 200), st.integers(1, 30), st.integers(0, 1 << 40), st.integers(0, 5))
def test_an_example_is_a_word_a_separator_and_the_word(length: int, symbols: int, index: int, seed: int) -> None:
    found = Copy(length, symbols, seed=seed).batch(np.array([index]))
    tokens, targets, mask = (found[name][0].tolist() for name in ("tokens", "targets", "mask"))
    n = tokens.index(0)
    assert length // 4 <= n < (length - 1) // 2
    assert all(1 <= symbol <= symbols for symbol in tokens[:n])
    assert tokens == [*tokens[:n], 0, *tokens[:n], *[0] * (length - 2 * n - 1)]
    assert targets == [*tokens[1:], 0]
    assert [p for p in range(length) if mask[p]] == list(range(n - 1, 2 * n))
    assert [t for t, counts in zip(targets, mask, strict=True) if counts] == [0, *tokens[:n]]


def test_an_example_does_not_depend_on_its_batch_or_epoch() -> None:
    data = Copy()
    together = data.batch(np.array([5, 0, 99]), epoch=3)
    alone = data.batch(np.array([99]), epoch=0)
    for name in together:
        assert torch.equal(together[name][2:], alone[name])


def test_lengths_and_symbols_are_those_of_the_paper() -> None:
    data = Copy()
    tokens = data.batch(np.arange(20000))["tokens"]
    n = (tokens == 0).int().argmax(1)
    assert set(n.tolist()) == set(range(32, 63))
    counts = torch.bincount(tokens[:, :32].flatten(), minlength=11)[1:]
    assert (counts - 64000).abs().max() < 5 * 64000**0.5
    lengths = torch.bincount(n, minlength=63)[32:].float()
    assert (lengths - 20000 / 31).abs().max() < 5 * (20000 / 31) ** 0.5
    assert len({tuple(row) for row in tokens.tolist()}) == 20000
    assert not torch.equal(tokens[:10], Copy(seed=1).batch(np.arange(10))["tokens"])


def test_the_words_are_those_of_every_machine() -> None:
    assert Copy(length=12, symbols=9).batch(np.array([7]))["tokens"].tolist() == [[1, 2, 4, 0, 1, 2, 4, 0, 0, 0, 0, 0]]


def test_impossible_values_are_named() -> None:
    for options, said in (({"length": 8}, "length=8"), ({"symbols": 0}, "symbols=0"), ({"count": 0}, "count=0")):
        with pytest.raises(ValueError, match=said):
            Copy(**options)
