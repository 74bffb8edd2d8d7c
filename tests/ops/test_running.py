"""Running sums and maxima against the scans of torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops.prefix import running_max, running_sum


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(length=st.one_of(st.integers(1, 200), st.sampled_from([64 * 64, 64 * 64 + 1])))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_running_sum_and_its_gradients(length: int) -> None:
    results = []
    for plain in (False, True):
        x, start = tokens(2, length, 3).requires_grad_(), tokens(2, 3, seed=1).requires_grad_()
        y = x.cumsum(1) + start[:, None] if plain else running_sum(x, start)
        results.append((y, *torch.autograd.grad(y, (x, start), tokens(2, length, 3, seed=2))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_running_sum_of_many_small_numbers_does_not_stall() -> None:
    x = torch.full((1, 100_000, 1), 1e-3)
    got = running_sum(x, torch.full((1, 1), 1e4))
    want = 1e4 + 1e-3 * torch.arange(1, 100_001, dtype=torch.float64)
    assert float((got[0, :, 0] - want).abs().max()) < 0.002


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_running_max(length: int) -> None:
    x = tokens(2, 3, length)
    assert torch.equal(running_max(x), x.cummax(-1).values)
