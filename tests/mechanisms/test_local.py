import math

import pytest
import torch

from subquad import build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.local import Local

DIM, HEADS = 12, 3


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full(mix: Mixer) -> Mixer:
    """Softmax attention with the same projections."""
    exact = build("softmax", dim=mix.options.dim, heads=mix.options.heads, causal=mix.options.causal).double()
    exact.load_state_dict({name: p for name, p in mix.state_dict().items() if name.startswith("heads.")})
    return exact


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_loop_over_the_definition(causal: bool) -> None:
    mix = build("local", dim=DIM, heads=HEADS, window=4, causal=causal).double()
    assert isinstance(mix, Local)
    x, T = tokens(1, 15, DIM), 15
    q, k, v = mix.heads.split(x)
    want = torch.zeros_like(v)
    for h in range(HEADS):
        for t in range(T):
            keys = [s for s in range(T) if abs(t - s) <= 4 and not (causal and s > t)]
            weights = [math.exp(float(q[0, t, h] @ k[0, s, h]) / math.sqrt(DIM / HEADS)) for s in keys]
            for w, s in zip(weights, keys, strict=True):
                want[0, t, h] += w / sum(weights) * v[0, s, h]
    torch.testing.assert_close(mix(x), mix.heads.merge(want), rtol=1e-12, atol=1e-12)


def test_window_of_17_is_8_on_each_side() -> None:
    """Fast-transformers' local attention with 17 keys is |i - j| < 9."""
    mix = build("local", dim=DIM, heads=HEADS, window=8).double()
    read = mix.pattern(tokens(1, 40, DIM)) > 0
    i = torch.arange(40)
    assert torch.equal(read, ((i[:, None] - i).abs() < 9).expand_as(read))
    assert int(read[0, 0, 20].sum()) == 17


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_wide_as_the_sequence_is_full_attention(causal: bool) -> None:
    mix = build("local", dim=DIM, heads=HEADS, window=29, causal=causal).double()
    x = tokens(2, 30, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)
    narrow = build("local", dim=DIM, heads=HEADS, window=28, causal=causal).double()
    narrow.load_state_dict(mix.state_dict())
    assert not torch.allclose(narrow(x), full(mix)(x))


def test_the_state_is_a_ring_of_window_plus_one() -> None:
    mix = build("local", dim=DIM, heads=HEADS, window=6, causal=True).double()
    assert mix.traits.state == "window"
    x = tokens(2, 50, DIM)
    _, state = mix.prefill(x[:, :31], lengths=torch.tensor([31, 2]))
    assert state.k.shape == (2, 7, HEADS, DIM // HEADS)
    assert mix.init_state(2, capacity=1000).k.shape == state.k.shape
    y, state = mix.prefill(torch.stack((x[0, 31:], x[1, 2:21])), state=state)
    assert state.k.shape == (2, 7, HEADS, DIM // HEADS)
    want = mix(x)
    torch.testing.assert_close(y, torch.stack((want[0, 31:], want[1, 2:21])), rtol=1e-10, atol=1e-10)


def test_what_leaves_the_window_is_forgotten() -> None:
    mix = build("local", dim=DIM, heads=HEADS, window=3, causal=True).double()
    x, other = tokens(1, 10, DIM), tokens(1, 10, DIM, seed=1)
    states = [mix.prefill(torch.cat((start[:, :6], x[:, 6:]), 1))[1] for start in (x, other)]
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


def test_options() -> None:
    with pytest.raises(ValueError, match="window=-1"):
        build("local", dim=DIM, window=-1)
    with pytest.raises(ValueError, match=r"window=2\.5"):
        build("local", dim=DIM, window=2.5)
    with pytest.raises(ValueError, match="dropout"):
        build("local", dim=DIM, dropout=0.1)
    with pytest.raises(ValueError, match="triton"):
        build("local", dim=DIM, impl="triton").double()(tokens(1, 4, DIM))
