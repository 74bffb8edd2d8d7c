from typing import Any

import pytest
import torch

from subquad import build
from subquad.mechanisms.base import Mixer
from tests.mechanisms.test_local import DIM, full, tokens

HEADS, T = 4, 30


def strided(**options: Any) -> Mixer:
    return build("strided", dim=DIM, heads=HEADS, **options).double()


def read(mix: Mixer) -> torch.Tensor:
    return mix.pattern(tokens(1, T, DIM))[0] > 0  # [H, T, T]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_the_sets_of_the_paper(causal: bool) -> None:
    first, second, merged = (
        read(strided(stride=5, causal=causal, **how))[0]
        for how in ({"combine": "interleave", "layer": 0}, {"combine": "interleave", "layer": 1}, {"combine": "merge"})
    )
    last = T if not causal else 0
    for i in range(T):
        a1 = set(range(max(0, i - 5), min(T, max(i + 1, min(i + 6, last)))))
        a2 = {j for j in range(max(i + 1, last)) if (i - j) % 5 == 0}
        assert set(first[i].nonzero()[:, 0].tolist()) == a1
        assert set(second[i].nonzero()[:, 0].tolist()) == a2
        assert set(merged[i].nonzero()[:, 0].tolist()) == a1 | a2
    if causal:
        assert int(first[20].sum()) == 5 + 1, "A1 has l + 1 keys"


def test_three_ways_to_combine() -> None:
    ways = {layer: read(strided(stride=5, combine="interleave", layer=layer)) for layer in range(4)}
    assert torch.equal(ways[0], ways[2])
    assert torch.equal(ways[1], ways[3])
    assert torch.equal(read(strided(stride=5)), ways[0] | ways[1])
    heads = read(strided(stride=5, combine="heads"))
    assert torch.equal(heads[:2], ways[0][:2])
    assert torch.equal(heads[2:], ways[1][2:])


@pytest.mark.parametrize("causal", [False, True])
def test_stride_one_is_full_attention(causal: bool) -> None:
    mix, x = strided(stride=1, causal=causal), tokens(2, T, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_two_layers_connect_every_pair(causal: bool) -> None:
    """Interleaved and with residual connections, as in the paper: the gradient of each token reaches all it should."""
    first, second = (strided(stride=6, combine="interleave", layer=layer, causal=causal) for layer in (0, 1))
    x = tokens(1, T, DIM).requires_grad_()
    hidden = x + first(x)
    y = hidden + second(hidden)
    for i in range(0, T, 7):
        (grad,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        reached = grad[0].abs().sum(-1) > 0
        assert torch.equal(reached, torch.arange(T) <= i if causal else torch.ones(T, dtype=torch.bool))


def test_the_state_says_what_it_keeps() -> None:
    merged, local, far = (
        strided(stride=5, causal=True, **how)
        for how in ({}, {"combine": "interleave", "layer": 0}, {"combine": "interleave", "layer": 1})
    )
    assert [mix.traits.state for mix in (merged, local, far)] == ["growing", "window", "growing"]
    assert local.init_state(1, capacity=500).k.shape[1] == 6
    assert merged.init_state(1, capacity=500).k.shape[1] == 500
    assert far.init_state(1, capacity=500).k.shape[1] == 500


def test_decoding_reads_only_the_keys_of_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """l + 1 keys of A1 and T/l of A2, not the T keys of the cache."""
    mix = strided(stride=16, causal=True)
    _, state = mix.prefill(tokens(1, 256, DIM))
    sizes = []
    gather = torch.Tensor.gather

    def watched(t: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        sizes.append(index.shape[1])
        return gather(t, dim, index)

    monkeypatch.setattr(torch.Tensor, "gather", watched)
    mix.step(tokens(1, DIM), state)
    assert len(sizes) == 2
    assert max(sizes) <= 17 + 512 // 16


def test_options() -> None:
    with pytest.raises(ValueError, match="stride=0"):
        strided(stride=0)
    with pytest.raises(ValueError, match=r"combine='mixed'.*merge"):
        strided(combine="mixed")
    with pytest.raises(ValueError, match=r"combine='heads'.*heads=1"):
        build("strided", dim=DIM, heads=1, combine="heads")
