"""What gated and delta rules have in common: padding that no state sees, steps in place, states that stay small."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.recurrent import Recurrent
from tests.mechanisms import laws

NAMES = [name for name, cls in MECHANISMS.items() if issubclass(cls, Recurrent)]
every = pytest.mark.parametrize("name", NAMES)


def small(name: str, **options: Any) -> Mixer:
    return laws.Case(MECHANISMS[name], {"dim": 16, "heads": 2, "causal": True, **options}).build()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_there_are_five() -> None:
    assert NAMES == ["retnet", "gla", "mamba2", "deltanet", "gated_deltanet"]


@every
@pytest.mark.parametrize("padding", ["random", "nan", "inf", "large"])
def test_padding_reaches_no_output_no_state_and_no_gradient(name: str, padding: str) -> None:
    """Masks that empty the values and leave the keys, or the decays, or what a convolution carries over."""
    mix, x = small(name), tokens(3, 30, 16)
    lengths = torch.tensor([30, 11, 2])
    for row, n in enumerate(lengths):
        fill: Any = {"random": tokens(30 - int(n), 16), "nan": math.nan, "inf": math.inf, "large": 1e30}[padding]
        x[row, n:] = fill
    given = x.clone().requires_grad_()
    y, state = mix.prefill(given, lengths)
    total = torch.stack([t.square().sum() for t in (y, *state[:-1])]).sum()
    (grad,) = torch.autograd.grad(total, given)
    for row, n in enumerate(lengths.tolist()):
        alone, own = mix.prefill(x[row : row + 1, :n])
        torch.testing.assert_close(y[row, :n], alone[0])
        torch.testing.assert_close(mix(x, lengths)[row, :n], alone[0])
        for found, want in zip(state, own, strict=True):
            torch.testing.assert_close(found[row], want[0])
        assert (grad[row, n:] == 0).all()
        assert torch.isfinite(grad[row, :n]).all()


@every
def test_a_prompt_of_nothing_leaves_the_state(name: str) -> None:
    mix, x = small(name), tokens(2, 9, 16)
    _, before = mix.prefill(x)
    _, after = mix.prefill(torch.full_like(x, math.nan), torch.tensor([0, 0]), before)
    for found, want in zip(after, before, strict=True):
        assert torch.equal(found, want)


@every
def test_steps_in_place_write_over_the_state(name: str) -> None:
    mix, x = small(name), tokens(2, 12, 16)
    with torch.no_grad():
        _, pure = mix.prefill(x[:, :5])
        state = type(pure)(*(t.clone() for t in pure))
        places = [t.data_ptr() for t in state]
        for t in range(5, 12):
            want, pure = mix.step(x[:, t], pure)
            y, state = mix.step(x[:, t], state, inplace=True)
            torch.testing.assert_close(y, want)
        assert [t.data_ptr() for t in state] == places
        for found, kept in zip(state, pure, strict=True):
            torch.testing.assert_close(found, kept)


@every
def test_a_state_has_one_size_and_exact_sums(name: str) -> None:
    mix = build(name, dim=16, heads=2, causal=True).to(torch.bfloat16)
    sizes = [[t.shape for t in mix.prefill(torch.randn(1, n, 16).bfloat16())[1]] for n in (3, 200)]
    assert sizes[0] == sizes[1]
    assert mix.init_state(1).s.dtype == torch.float32


@every
def test_a_state_of_another_mechanism_is_refused(name: str) -> None:
    other = NAMES[NAMES.index(name) - 1]
    with pytest.raises(ValueError, match=r"state is a .*accepted"):
        small(name).step(tokens(1, 16), small(other).init_state(1))


@every
@pytest.mark.parametrize("width", [1, 3, 5, 7])
def test_any_width_of_a_head(name: str, width: int) -> None:
    mix = small(name, dim=2 * width)
    x = tokens(2, 9, 2 * width)
    torch.testing.assert_close(mix(x), mix.reference(x))


@every
def test_training_starts_with_outputs_of_size_one_or_less(name: str) -> None:
    torch.manual_seed(0)
    mix = build(name, dim=64, heads=4, causal=True)
    y = mix(torch.randn(2, 50, 64))
    assert 0.01 < float(y.detach().square().mean().sqrt()) < 1.5
