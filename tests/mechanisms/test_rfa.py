"""Random feature attention: the Gaussian kernel in expectation, and what the gate forgets."""

from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mechanisms.rfa import RFA


def build(**options: Any) -> RFA:
    torch.manual_seed(0)
    mix = subquad.build("rfa", **{"dim": 32, "heads": 2, **options})
    assert isinstance(mix, RFA)
    with torch.no_grad():
        mix.sigma.uniform_(0.7, 1.3)
    return mix.double().eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def constant_gate(mix: RFA, g: float) -> None:
    assert mix.gate is not None
    mix.gate.weight.zero_()
    mix.gate.bias.fill_(torch.logit(torch.tensor(g, dtype=torch.float64)))


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_many_features_reach_the_gaussian_kernel(tau: float) -> None:
    """exp(-|σ∘(q̂ - k̂)|²/2τ²), with an error that falls as 1/√features."""
    x = tokens(1, 25, 32)
    errors = []
    for features in (64, 16_384):
        mix = build(tau=tau, features=features)
        q, k, _ = mix.heads.split(x)
        q, k = (mix.sigma * t / t.norm(dim=-1, keepdim=True) / tau for t in (q, k))
        kernel = (-torch.cdist(q.transpose(1, 2), k.transpose(1, 2)).square() / 2).exp()
        want = (kernel / kernel.sum(-1, keepdim=True)).detach()
        torch.testing.assert_close(mix(x), mix.reference(x))
        errors.append(float((mix.pattern(x) - want).detach().norm() / want.norm()))
    assert errors[1] < (0.02 if tau == 1 else 0.05)  # a sharper kernel is smaller for most pairs, but its noise is not
    assert 8 < errors[0] / errors[1] < 32


def test_unit_sigma_is_softmax_of_the_cosines() -> None:
    mix = build(features=16_384, orthogonal=True, tau=1.25)
    with torch.no_grad():
        mix.sigma.fill_(1)
        x = tokens(1, 25, 32)
        q, k, _ = (t.transpose(1, 2) for t in mix.heads.split(x))
        cosines = torch.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
        torch.testing.assert_close(mix.pattern(x), (cosines / 1.25**2).softmax(-1), rtol=0.03, atol=0)


@pytest.mark.parametrize("g", [0.5, 0.9, 0.999])
def test_constant_gate_is_an_exponential_window(g: float) -> None:
    gated, plain = build(gate=True, causal=True), build(causal=True)
    constant_gate(gated, g)
    plain.load_state_dict({n: t for n, t in gated.state_dict().items() if not n.startswith("gate")})
    x = tokens(2, 60, 32)
    age = torch.arange(60)[:, None] - torch.arange(60)
    weights = plain.pattern(x) * (g ** age.double()).tril()  # the plain weights' own sum cancels in the quotient
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(gated.pattern(x), weights)
    v = gated.heads.split(x)[2]
    torch.testing.assert_close(gated(x), gated.heads.merge(torch.einsum("bhts,bshv->bthv", weights, v)))


def test_the_recurrence_of_the_paper() -> None:
    """S = g S + (1 - g) φ(k) vᵀ and z likewise, token by token, in the paper's own terms."""
    mix = build(gate=True, causal=True, features=20)
    assert mix.gate is not None
    x = tokens(1, 15, 32)
    want = torch.zeros(15, 32, dtype=torch.float64)
    q, k, v = mix.heads.split(x)
    for h in range(2):
        w = mix.directions[h] * mix.sigma[h]
        s, z = torch.zeros(40, 16, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
        for t in range(15):
            phi_q, phi_k = (
                torch.cat(((w @ u).sin(), (w @ u).cos())) / 20**0.5
                for u in (r[0, t, h] / r[0, t, h].norm() for r in (q, k))
            )
            g = torch.sigmoid(mix.gate.weight[h] @ x[0, t] + mix.gate.bias[h])
            s = g * s + (1 - g) * torch.outer(phi_k, v[0, t, h])
            z = g * z + (1 - g) * phi_k
            want[t, 16 * h : 16 * h + 16] = (phi_q @ s / (phi_q @ z)).detach()
    torch.testing.assert_close(mix(x)[0], mix.heads.out(want))
    state = mix.prefill(x)[1]
    torch.testing.assert_close(state.s[0, 1], s)
    torch.testing.assert_close(state.z[0, 1], z)


def test_a_closed_gate_keeps_and_an_open_one_forgets() -> None:
    mix = build(gate=True, causal=True)
    x = tokens(1, 20, 32)
    constant_gate(mix, 1e-9)  # everything before the token is forgotten
    torch.testing.assert_close(mix(x), mix.heads.merge(mix.heads.split(x)[2]), rtol=1e-5, atol=1e-5)
    plain = build(causal=True)
    plain.load_state_dict({n: t for n, t in mix.state_dict().items() if not n.startswith("gate")})
    constant_gate(mix, 1 - 1e-4)  # a window of ten thousand tokens
    torch.testing.assert_close(mix(x), plain(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("logit", [-1e4, -300.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturated_gates_are_finite(logit: float, dtype: torch.dtype) -> None:
    mix = build(gate=True, causal=True)
    assert mix.gate is not None
    with torch.no_grad():
        mix.gate.bias.fill_(logit)
    mix = mix.to(dtype)
    x = (100 * tokens(2, 80, 32)).to(dtype).clone().requires_grad_()
    y = mix(x)
    y.float().sum().backward()
    assert torch.isfinite(y).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_zero_tokens_are_finite() -> None:
    """A zero vector has no direction, but its gradient is finite."""
    mix = build(causal=True)
    with torch.no_grad():
        mix.heads.qkv.bias.zero_()
    x = torch.zeros(1, 5, 32, dtype=torch.float64, requires_grad=True)
    y = mix(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "gate": True}, {"rotary": True}])
def test_error_against_the_softmax_it_approximates(options: dict[str, Any]) -> None:
    """q and k of `_qkv` carry σ, the norms and the gates, so the error vanishes with many features."""
    x = tokens(1, 30, 32)
    few, many = (subquad.approximation_error(build(features=n, **options), x) for n in (64, 16_384))
    assert (many < 0.05).all()
    assert (many < few / 4).all()


def test_pool_of_draws_is_a_loop_over_redraw() -> None:
    mix, g = build(), torch.Generator().manual_seed(3)
    x = tokens(1, 10, 32)
    fixed = mix(x)
    seen = []
    for _ in range(3):
        mix.redraw(g)
        seen.append(mix(x))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    mix.redraw()
    torch.testing.assert_close(mix(x), fixed)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gate": True}, "gate=True .*order"),
        ({"features": 0}, "features=0"),
        ({"tau": 0.0}, "tau=0.0"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": 0.0}, "eps=0.0 .*above 0"),
        ({"eps": 1e-60}, "eps=1e-60 .*above 0"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
