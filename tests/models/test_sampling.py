import dataclasses
import inspect
import math
import random
import typing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.models.generation import generate, stream
from subquad.models.sampling import Rows, Sampling, SamplingOptions, adjust, draw, gumbel, make_seeds, score
from subquad.models.streams import Streams
from subquad.ops.uniform import uniform


def many(logits: torch.Tensor, sampling: Sampling, count: int = 20000) -> torch.Tensor:
    """Frequencies of the tokens of `count` streams that draw from the same logits."""
    seeds = torch.arange(count)
    tokens = draw(logits.expand(count, -1), sampling, seeds, torch.full((count,), 7))
    return tokens.bincount(minlength=logits.shape[-1]) / count


def test_noise_is_uniform_and_independent() -> None:
    u = uniform(torch.arange(400), torch.zeros(400, dtype=torch.int64), 256).double()
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.004
    assert abs(u.var() - 1 / 12) < 0.002
    counts = torch.histc(u, 64, 0, 1)
    chi = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum()
    assert chi < 120  # 63 degrees of freedom
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):  # neighbouring seeds, neighbouring candidates
        assert abs(((a - 0.5) * (b - 0.5)).mean() * 12) < 0.02
    later = uniform(torch.arange(400), torch.ones(400, dtype=torch.int64), 256).double()
    assert abs(((u - 0.5) * (later - 0.5)).mean() * 12) < 0.02


def test_noise_has_fixed_values() -> None:
    # saved streams must continue in the same way in every later version
    u = uniform(torch.tensor([0, 1, 1 << 40]), torch.tensor([0, 5, 5]), 2)
    expected = [[0.5 + int(x) for x in row] for row in REFERENCE]
    torch.testing.assert_close(u.double() * 2**32, torch.tensor(expected).double(), rtol=1e-7, atol=300)


def _hash(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15


REFERENCE = [
    [
        _hash((_hash(_hash(_hash(seed >> 32) ^ seed % 2**32) ^ position) + i * 0x1E3779B1) % 2**32)
        for i in (1, 2)
    ]
    for seed, position in ((0, 0), (1, 5), (1 << 40, 5))
]  # fmt: skip


def test_gumbel_has_its_mean_and_variance() -> None:
    g = gumbel(torch.arange(1000), torch.full((1000,), 3), 200).double()
    assert torch.isfinite(g).all()
    assert abs(g.mean() - 0.5772) < 0.01
    assert abs(g.var() - math.pi**2 / 6) < 0.03


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0, -5.0]])
    for temperature in (1.0, 0.5, 2.0):
        expected = (logits / temperature).softmax(-1)[0]
        error = 4 * (expected * (1 - expected) / 20000).sqrt() + 1e-4
        assert ((many(logits, Sampling(temperature=temperature)) - expected).abs() < error).all()


def test_filters_keep_the_right_tokens() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.08, 0.02]]).log()
    probabilities = logits.exp()[0]

    def kept(**settings: Any) -> list[int]:
        return torch.isfinite(adjust(logits, Sampling(**settings)))[0].nonzero()[:, 0].tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.39) == [0]
    assert kept(top_p=0.6) == [0, 1]
    assert kept(top_p=0.75) == [0, 1, 2]
    assert kept(min_p=0.4) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]
    assert kept(exclude=(0, 2)) == [1, 3, 4]
    frequencies = many(logits, Sampling(top_k=2))
    assert (frequencies[:2] - probabilities[:2] / 0.7).abs().max() < 0.015
    assert frequencies[2:].sum() == 0


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    assert torch.isfinite(adjust(torch.zeros(3, 10), Sampling(top_k=4))).sum(-1).tolist() == [4, 4, 4]


def test_greedy_takes_the_largest_and_a_penalty_can_change_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9], [-1.0, -2.0, -1.1]])
    seen = torch.tensor([[False, True, False], [True, False, False]])
    zero = torch.zeros(2, dtype=torch.int64)
    assert draw(logits, Sampling(temperature=0), zero, zero).tolist() == [1, 0]
    assert draw(logits, Sampling(temperature=0, repetition_penalty=1.2), zero, zero, seen).tolist() == [2, 2]
    with pytest.raises(ValueError, match="seen=None"):
        draw(logits, Sampling(repetition_penalty=1.2), zero, zero)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.integers(1, 9), st.integers(0, 2**62), st.integers(0, 10**6), st.integers(0, 8))
def test_a_row_draws_the_same_in_any_batch(batch: int, seed: int, position: int, row: int) -> None:
    row = row % batch
    logits = torch.randn(batch, 30, generator=torch.Generator().manual_seed(batch))
    seeds, at = torch.arange(batch) * 17, torch.arange(batch) * 5
    seeds[row], at[row] = seed, position
    chosen = Sampling(top_p=0.9, top_k=20)
    alone = draw(logits[row : row + 1], chosen, seeds[row : row + 1], at[row : row + 1])
    assert draw(logits, chosen, seeds, at)[row] == alone[0]


def test_seeds() -> None:
    device = torch.device("cpu")
    assert make_seeds(5, 3, device).tolist() == [5, 6, 7]
    assert make_seeds([9, 2], 2, device).tolist() == [9, 2]
    with pytest.raises(ValueError, match="seed is"):
        make_seeds([1, 2], 3, device)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_impossible_settings_raise(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})
    with pytest.raises(ValueError, match="exclude"):
        Sampling(exclude=(5,)).check(5)


def test_every_field_of_sampling_is_a_keyword() -> None:
    """One list for `generate`, `stream` and `Streams`."""
    assert typing.get_type_hints(SamplingOptions).keys() == {field.name for field in dataclasses.fields(Sampling)}
    for call in (generate, stream, Streams.__init__):
        assert typing.get_type_hints(inspect.unwrap(call))["options"] == typing.Unpack[SamplingOptions]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_row_draws_the_same_whatever_the_others_use(number: int) -> None:
    """Bit by bit: a setting that a row does not use changes none of its scores."""
    rng = random.Random(number)

    def any_sampling() -> Sampling:
        return Sampling(
            exclude=tuple(rng.sample(range(30), rng.choice([0, 0, 3]))),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            temperature=rng.choice([0.0, 1.0, 1.0, 0.7, 1.9]),
            top_k=rng.choice([None, None, 1, 5, 99]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        )

    generator = torch.Generator().manual_seed(number)
    batch = rng.randrange(2, 7)
    logits = torch.randn(batch, 30, generator=generator).mul(3).bfloat16()  # with ties
    seen = torch.rand(batch, 30, generator=generator) < 0.3
    seeds, at = torch.arange(batch) * 17, torch.arange(batch) * 5
    chosen = [any_sampling() for _ in range(batch)]
    rows = Rows.of(chosen, 30, torch.device("cpu"))
    together = score(logits, rows, seeds, at, seen)
    drawn = draw(logits, rows, seeds, at, seen)
    for b, sampling in enumerate(chosen):
        row = slice(b, b + 1)
        assert drawn[b] == draw(logits[row], sampling, seeds[row], at[row], seen[row])
        if sampling.temperature > 0:  # a greedy row alone is not filtered
            assert torch.equal(together[row], score(logits[row], sampling, seeds[row], at[row], seen[row]))
