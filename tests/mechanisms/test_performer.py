"""Performer: unbiased, causal without look-ahead, and finite where exponentials are not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mechanisms.performer import Performer
from subquad.ops.random_features import exponents

KERNELS = ["softmax", "hyperbolic", "trig", "relu"]
EXACT = ["softmax", "hyperbolic", "trig"]


def build(**options: Any) -> Performer:
    mix = subquad.build("performer", **{"dim": 32, "heads": 2, **options})
    assert isinstance(mix, Performer)
    return mix.eval()


def plain(**options: Any) -> Performer:
    """q = k = v = x, so that a test chooses the inputs of the mechanism."""
    mix = build(**options)
    with torch.no_grad():
        mix.heads.qkv.weight.copy_(torch.eye(mix.options.dim).repeat(3, 1))
        mix.heads.out.weight.copy_(torch.eye(mix.options.dim))
        mix.heads.qkv.bias.zero_()
        mix.heads.out.bias.zero_()
    return mix


def tokens(*shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    """Tokens whose heads of 16 channels are at most `size` long."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64).unflatten(-1, (-1, 16))
    length = size * torch.rand(x.shape[:-1], generator=g, dtype=torch.float64)[..., None]
    return (x / x.norm(dim=-1, keepdim=True) * length).flatten(-2)


def softmax_weights(x: Tensor, causal: bool) -> Tensor:
    x = x.unflatten(-1, (-1, 16)).transpose(1, 2)
    scores = x @ x.mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


@torch.no_grad()
def mean_square_error(x: Tensor, draws: int = 15, **options: Any) -> float:
    mix = plain(dim=x.shape[-1], heads=x.shape[-1] // 16, **options).double()
    want = softmax_weights(x, mix.options.causal)
    g, total = torch.Generator().manual_seed(1), 0.0
    for _ in range(draws):
        mix.redraw(g)
        total += float((mix.pattern(x) - want).square().mean())
    return total / draws


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("causal", [False, True])
def test_many_features_reach_softmax_attention(kernel: str, causal: bool) -> None:
    x = tokens(2, 30, 32, size=2.0)
    few, many = (mean_square_error(x, 8, kernel=kernel, causal=causal, features=n) for n in (256, 4096))
    assert many < 1e-3 * float(softmax_weights(x, causal).square().mean())
    assert few / many == pytest.approx(16, rel=0.4)  # as 1/features


def test_average_over_redraws_is_the_exponential() -> None:
    """E φ(q)·φ(k) = exp(q·k/√K): numerator and denominator by themselves, as the quotient alone is biased."""
    mix = plain(dim=16, heads=1, features=64, eps=0.0).double()
    x = tokens(1, 5, 16, size=2.0)
    total, g = torch.zeros(5, 5, dtype=torch.float64), torch.Generator().manual_seed(5)
    for _ in range(400):
        mix.redraw(g)
        found = exponents(x[:, :, None], mix.directions.double(), 0.5)  # over K^¼
        factor = found.factor[0].exp()
        phi = mix._exponentials(x[:, :, None], found, torch.float64)[0, :, 0] * factor
        total += phi @ phi.mT / 400
    want = (x[0] @ x[0].mT / 4).exp()
    torch.testing.assert_close(total, want, rtol=0.04, atol=0.0)


def test_orthogonal_beats_independent_and_positive_beats_trigonometric() -> None:
    """The ordering of the paper's error figure: width 16, 15 draws. Signed features fail where attention is peaked."""
    x = tokens(1, 256, 16, size=3.0)
    for kernel in EXACT:
        independent = mean_square_error(x, kernel=kernel, features=64, orthogonal=False)
        assert mean_square_error(x, kernel=kernel, features=64) < independent
    x = tokens(1, 256, 16, size=6.0)
    assert mean_square_error(x, features=64) < 0.01 * mean_square_error(
        x, features=64, kernel="trig", eps=1e-6
    )  # the paper's, whose denominator has no lower bound


def test_equal_tokens_are_averaged() -> None:
    """The authors' check: q = k = 1, the value 1 at the first token only, causal: 1, 1/2, 1/3, ..."""
    mix = plain(dim=16, heads=1, causal=True, features=10_000)
    with torch.no_grad():
        mix.heads.qkv.weight[:32] = 0
        mix.heads.qkv.bias[:32] = 1
    x = torch.zeros(1, 6, 16)
    x[0, 0, 0] = 1
    torch.testing.assert_close(mix(x)[0, :, 0], 1 / torch.arange(1, 7).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", EXACT)
def test_maxima_cancel(kernel: str) -> None:
    """The last token sees every key in both forms, so the running maximum must equal the maximum over all keys."""
    x = tokens(2, 90, 32, size=60.0)
    causal, both = (plain(kernel=kernel, causal=c, features=40).double() for c in (True, False))
    torch.testing.assert_close(causal(x)[:, -1], both(x)[:, -1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_size_100(kernel: str, causal: bool) -> None:
    """Exponents of thousands: exact in float64, and close to that in the narrower types."""
    x = tokens(2, 70, 32, size=100.0).bfloat16()
    exact = plain(kernel=kernel, causal=causal, features=48).bfloat16().double()
    want = exact.reference(x.double()).detach()
    torch.testing.assert_close(exact(x.double()), want, rtol=1e-9, atol=1e-9)
    size = float(want.abs().max())
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)):
        mix = plain(kernel=kernel, causal=causal, features=48).bfloat16().to(dtype)
        row = x.to(dtype).clone().requires_grad_()
        y = mix(row)
        assert y.dtype == dtype
        assert float((y.double() - want).abs().max().detach()) < tolerance * size
        y.float().sum().backward()
        assert row.grad is not None
        assert torch.isfinite(row.grad).all()
        if causal:
            part, state = mix.prefill(x.to(dtype)[:, :41], lengths=torch.tensor([41, 30]))
            torch.testing.assert_close(part[0], y[0, :41], rtol=0, atol=tolerance * size)
            for t in range(41, 70):
                y_t, state = mix.step(torch.stack((x[0, t], x[1, t - 11])).to(dtype), state)
                torch.testing.assert_close(y_t[0], y[0, t], rtol=0, atol=tolerance * size)
                torch.testing.assert_close(y_t[1], y[1, t - 11], rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "relu"])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_sum_to_one_however_far_apart_queries_and_keys_are(kernel: str, causal: bool) -> None:
    mix = plain(kernel=kernel, causal=causal, features=20).bfloat16()
    with torch.no_grad():
        mix.heads.qkv.weight[64:] = 0
        mix.heads.qkv.bias[64:] = 1  # every value is 1, so every average is
    for size in (1.0, 100.0, 1e4):
        y = mix(tokens(2, 50, 32, size=size).bfloat16())
        torch.testing.assert_close(y, torch.ones_like(y), rtol=0.02, atol=0)


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_does_not_set_the_maximum(kernel: str, causal: bool) -> None:
    """Zeros have the largest exponent of all: in units of theirs, every feature of a long token would underflow."""
    x = tokens(1, 40, 32, size=20.0) + 20
    mix = plain(kernel=kernel, causal=causal, features=30, eps=1e-6 if kernel == "trig" else None)
    want = mix(x[:, :20].float())
    assert (want > 1).all()
    torch.testing.assert_close(mix(x.float(), lengths=torch.tensor([20]))[:, :20], want, rtol=1e-4, atol=0)
    if causal:
        _, state = mix.prefill(x.float(), lengths=torch.tensor([20]))
        torch.testing.assert_close(state.max, mix.prefill(x[:, :20].float())[1].max)


def test_relu_without_projection() -> None:
    mix = plain(kernel="relu", features=0, causal=True).double()
    x = tokens(1, 9, 32)
    phi = torch.relu(x.unflatten(-1, (2, 16)).transpose(1, 2) / 2) + 1e-3
    weights = (phi @ phi.mT).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(mix.pattern(x), weights)
    torch.testing.assert_close(mix(x), mix.reference(x))
    _, state = mix.prefill(x[:, :8])
    torch.testing.assert_close(mix.step(x[:, 8], state)[0], mix(x)[:, 8])


def test_autocast_keeps_exponents_exact() -> None:
    x = tokens(1, 20, 32, size=30.0).float()
    mix = plain(causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(x)
    torch.testing.assert_close(y.float(), plain(causal=True).bfloat16()(x.bfloat16()).float(), rtol=0.05, atol=0.05)


def test_draws_differ_by_layer_and_seed_and_redraw_repeats() -> None:
    first = build().directions.clone()
    assert not torch.equal(build(layer=1).directions, first)
    assert not torch.equal(build(seed=1).directions, first)
    mix = build()
    mix.redraw(torch.Generator().manual_seed(7))
    assert not torch.equal(mix.directions, first)
    mix.redraw()
    assert torch.equal(mix.directions, first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_state_is_constant(kernel: str) -> None:
    mix = build(kernel=kernel, features=10, causal=True)
    start, (_, later) = mix.init_state(3), mix.prefill(tokens(3, 50, 32).float())
    width = 20 if kernel in ("trig", "hyperbolic") else 10
    assert start.s.shape == later.s.shape == (3, 2, width, 16)
    assert start.max.shape == later.max.shape == (3, 2)


def test_approximation_error_has_a_meaning_for_exponentials_only() -> None:
    x = tokens(1, 20, 32).float()
    assert (subquad.approximation_error(build(features=1024), x) < 0.1).all()
    with pytest.raises(ValueError, match="Performer"):
        subquad.approximation_error(build(kernel="relu"), x)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kernel": "cosine"}, 'kernel=.cosine.* "softmax"'),
        ({"norms": "unit"}, "norms=.unit"),
        ({"features": 0}, "features=0"),
        ({"features": -1, "kernel": "relu"}, "features=-1"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": math.nan}, "eps=nan"),
        ({"eps": 0.0, "kernel": "trig"}, "eps=0.0 .*above 0"),
        ({"eps": 1e-60, "kernel": "trig"}, "eps=1e-60 .*above 0"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
