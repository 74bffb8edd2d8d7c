import math

import pytest
import torch

from subquad import build


@pytest.mark.parametrize("causal", [False, True])
def test_random_with_the_products_of_queries_and_keys_is_dot_product_attention(causal: bool) -> None:
    mix = build("synthesizer", dim=12, heads=3, max_length=10, kind="random", causal=causal).double()
    peer = build("softmax", dim=12, heads=3, causal=causal).double()
    peer.heads.load_state_dict(mix.heads.state_dict())
    x = torch.randn(1, 10, 12, dtype=torch.float64)
    q, k, _ = mix.heads.split(x)
    with torch.no_grad():
        mix.random.copy_(torch.einsum("bthk,bshk->bhts", q, k)[0] / math.sqrt(4))
    torch.testing.assert_close(mix(x), peer(x), rtol=1e-12, atol=1e-12)


def test_dot_is_softmax_attention() -> None:
    mix = build("synthesizer", dim=12, heads=3, max_length=10, kind="dot").double()
    peer = build("softmax", dim=12, heads=3).double()
    peer.heads.load_state_dict(mix.heads.state_dict())
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(mix(x), peer(x), rtol=1e-12, atol=1e-12)


def test_fixed_is_drawn_from_the_seed_and_not_learned() -> None:
    first, again, other = (build("synthesizer", dim=4, heads=1, max_length=6, kind="fixed", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.fixed, again.fixed)
    assert not torch.equal(first.fixed, other.fixed)
    assert "fixed" not in dict(first.named_parameters())
    assert "fixed" in first.state_dict()


def test_a_mixture_starts_with_equal_shares_and_learns_them() -> None:
    mix = build("synthesizer", dim=4, heads=2, max_length=6, kind="dense+random+dot")
    assert torch.allclose(mix.mixture.softmax(-1), torch.full((2, 3), 1 / 3))
    mix(torch.randn(1, 6, 4)).square().sum().backward()
    assert mix.mixture.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["dence", "dense+dense", "", "random+"])
def test_wrong_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        build("synthesizer", dim=4, max_length=6, kind=kind)
