import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import build
from subquad.mechanisms.error import approximation_error
from tests.mechanisms.laws import tokens
from tests.mechanisms.peers import fla_naive


def test_equals_the_recurrence_of_the_paper() -> None:
    """Equations 16 to 20: s and z are running sums, and each token reads them once."""
    mix = build("linear", dim=8, heads=1, causal=True).double()
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    q, k, v = (t[0, :, 0] for t in mix.heads.split(x))
    s, z, rows = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), []
    for t in range(12):
        s = s + torch.outer(F.elu(k[t]) + 1, v[t])
        z = z + F.elu(k[t]) + 1
        phi = F.elu(q[t]) + 1
        rows.append(phi @ s / (phi @ z + 1e-6))
    torch.testing.assert_close(mix(x)[0], mix.heads.out(torch.stack(rows)), rtol=1e-10, atol=1e-10)


def test_equal_keys_average_the_past() -> None:
    """With one key for all, token t gets the mean of v_1 .. v_t: 1, 1/2, 1/3 for a pulse at the start."""
    mix = build("linear", dim=4, heads=1, causal=True).double()
    with torch.no_grad():
        mix.heads.qkv.weight.zero_()
        mix.heads.qkv.bias.zero_()
        mix.heads.qkv.weight[8:] = torch.eye(4, dtype=torch.float64)
        mix.heads.out.weight.copy_(torch.eye(4))
        mix.heads.out.bias.zero_()
    x = torch.zeros(1, 5, 4, dtype=torch.float64)
    x[0, 0, 0] = 1
    torch.testing.assert_close(mix(x)[0, :, 0], 1 / torch.arange(1.0, 6, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["elu+1", "relu", "exp", "identity", "quadratic", "taylor", "hedgehog", F.softplus])
@pytest.mark.parametrize("causal", [False, True])
def test_any_feature_map(name: object, causal: bool) -> None:
    mix = build("linear", dim=12, heads=3, causal=causal, feature_map=name).double()
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    torch.testing.assert_close(mix(x), mix.reference(x), rtol=1e-6, atol=1e-6)
    if causal:
        _, state = mix.prefill(x[:, :11])
        y_t, _ = mix.step(x[:, 11], state)
        torch.testing.assert_close(y_t, mix(x)[:, 11], rtol=1e-6, atol=1e-6)


def test_the_state_does_not_grow() -> None:
    mix = build("linear", dim=12, heads=3, causal=True)
    _, short = mix.prefill(torch.randn(1, 3, 12))
    _, long = mix.prefill(torch.randn(1, 300, 12))
    assert [t.shape for t in short] == [t.shape for t in long]
    assert short.s.dtype == torch.float32
    assert mix.to(torch.bfloat16).init_state(1).s.dtype == torch.float32


def test_wrong_feature_map_is_named() -> None:
    with pytest.raises(ValueError, match=r"elu\+1"):
        build("linear", dim=8, feature_map="elu")


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e-60])
def test_a_denominator_of_zero_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=r"eps=.*above 0"):
        build("linear", dim=8, feature_map="relu", eps=eps)


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return build("linear", **options)


def heads_of(mix: Any, x: Tensor) -> list[Tensor]:
    """q, k, v as [B, H, T, ·]"""
    return [t.transpose(1, 2) for t in mix.heads.split(x)]


def averaged(mix: Any, weights: Tensor, v: Tensor) -> Tensor:
    """What a mechanism gives whose weights, before they are normalised, are these: [B, H, T, S]"""
    weights = weights.tril() if mix.options.causal else weights
    total = weights.sum(-1, keepdim=True).clamp(min=1e-20)  # relu may leave nothing
    return mix.heads.out((weights / total @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
def test_cosformer_is_relu_attention_with_a_cosine_of_the_distance(causal: bool) -> None:
    mix = make(dim=24, heads=3, causal=causal, feature_map="cosformer", length=40, eps=1e-20).double()
    x = tokens(2, 40, 24)
    q, k, v = heads_of(mix, x)
    cosine = torch.tensor(
        [[math.cos(math.pi * (i - j) / 80) for j in range(40)] for i in range(40)], dtype=torch.float64
    )
    torch.testing.assert_close(mix(x), averaged(mix, q.relu() @ k.relu().mT * cosine, v), rtol=1e-10, atol=1e-10)
    assert (mix.pattern(x)[..., -1, 0] < 0.1).all()  # a distance of 39 of 40


def test_cosformer_sees_distances_alone() -> None:
    """From any position on, by prompts and steps; and a row of a ragged batch counts its own tokens."""
    mix = make(dim=12, heads=2, causal=True, feature_map="cosformer", length=90).double()
    x = tokens(2, 20, 12)
    state = mix.init_state(2)
    first, state = mix.prefill(x[:, :9], state=state._replace(position=torch.tensor([70, 3])))
    second, state = mix.prefill(x[:, 9:16], torch.tensor([7, 5]), state)
    torch.testing.assert_close(first, mix(x)[:, :9], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second[0], mix(x)[0, 9:16], rtol=1e-10, atol=1e-10)
    assert state.position.tolist() == [86, 17]
    y, state = mix.step(torch.stack((x[0, 16], x[1, 14])), state, inplace=True)
    torch.testing.assert_close(y, torch.stack((mix(x)[0, 16], mix(x)[1, 14])), rtol=1e-10, atol=1e-10)
    assert state.position.tolist() == [87, 18]


def test_cosformer_refuses_positions_beyond_its_length() -> None:
    mix = make(dim=8, heads=2, causal=True, feature_map="cosformer", length=10)
    x = torch.randn(2, 10, 8)
    _, end = mix.prefill(x)  # to the last position
    _, state = mix.prefill(x[:, :9], torch.tensor([9, 4]))
    mix.prefill(x[:, :6], torch.tensor([1, 6]), state)  # each row to its own last position
    for call, reached in (
        (lambda: mix(torch.randn(2, 11, 8)), 11),
        (lambda: mix.prefill(torch.randn(2, 11, 8)), 11),
        (lambda: mix.prefill(x[:, :2], state=state), 11),
        (lambda: mix.prefill(x[:, :7], torch.tensor([1, 7]), state), 11),
        (lambda: mix.step(x[:, 0], end), 11),
        (lambda: make(dim=8, feature_map="cosformer", length=10)(torch.randn(1, 12, 8)), 12),
    ):
        with pytest.raises(ValueError, match=rf"x ends at position {reached}: .*length=10"):
            call()


def test_cosformer_has_no_cross_attention() -> None:
    mix = make(dim=8, heads=2, feature_map="cosformer", length=10)
    assert not mix.traits.cross
    assert make(dim=8, heads=2).traits.cross
    with pytest.raises(ValueError, match="Linear has no cross-attention"):
        mix(torch.randn(1, 4, 8), context=torch.randn(1, 4, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_hedgehog_is_exponentials_over_their_sums(causal: bool) -> None:
    mix = make(dim=12, heads=3, causal=causal, feature_map="hedgehog", eps=1e-20).double()
    torch.testing.assert_close(mix.prepare.query, torch.eye(4, dtype=torch.float64).expand(3, -1, -1))
    with torch.no_grad():
        for seed, w in enumerate(mix.prepare.parameters()):
            w.copy_(tokens(3, 4, 4, seed=seed))
    x = 2 * tokens(2, 19, 12)
    q, k, v = heads_of(mix, x)
    weights = torch.zeros(2, 3, 19, 19, dtype=torch.float64)
    for h in range(3):
        for sign in (1, -1):
            left, right = (sign * t[:, h] @ w[h].mT for t, w in ((q, mix.prepare.query), (k, mix.prepare.key)))
            left, right = (t.exp() / t.exp().sum(-1, keepdim=True) for t in (left, right))
            weights[:, h] += left @ right.mT
    torch.testing.assert_close(mix(x), averaged(mix, weights, v), rtol=1e-10, atol=1e-10)


def test_hedgehog_without_its_matrices_averages_the_past() -> None:
    mix = make(dim=12, heads=3, causal=True, feature_map="hedgehog", eps=1e-20).double()
    x = tokens(2, 19, 12)
    v = heads_of(mix, x)[2]
    mean = (v.cumsum(2) / torch.arange(1, 20)[:, None]).transpose(1, 2).flatten(2)
    for w in mix.prepare.parameters():  # one of them is enough
        with torch.no_grad():
            kept = w.clone()
            w.zero_()
            torch.testing.assert_close(mix(x), mix.heads.out(mean), rtol=1e-10, atol=1e-10)
            w.copy_(kept)
            assert not torch.allclose(mix(x), mix.heads.out(mean), atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_taylor_is_polynomial_attention(causal: bool) -> None:
    mix = make(dim=24, heads=3, causal=causal, feature_map="taylor", features=5, eps=1e-20).double()
    x = 2 * tokens(2, 19, 24)
    q, k, v = heads_of(mix, x)
    assert q.shape == k.shape == (2, 3, 19, 5)
    assert v.shape == (2, 3, 19, 8)
    s = q @ k.mT / 5**0.5
    torch.testing.assert_close(mix(x), averaged(mix, 1 + s + s**2 / 2, v), rtol=1e-10, atol=1e-10)


def test_taylor_is_softmax_attention_of_short_queries() -> None:
    """Up to the third order: a tenth of the tokens has a thousandth of a hundredth of the error."""
    mix = make(dim=24, heads=3, feature_map="taylor", eps=1e-20).double()
    with torch.no_grad():
        mix.heads.qkv.bias.zero_()
    errors = [approximation_error(mix, size * tokens(2, 50, 24)) for size in (0.4, 0.2)]
    assert (errors[0] < 1e-2).all()
    assert (errors[1] < errors[0] / 40).all()  # 64 in the limit: the exponent has tokens squared


def test_taylor_has_sixteen_features_at_first() -> None:
    mix = make(dim=64, heads=1, causal=True, feature_map="taylor")
    assert mix.init_state(1).s.shape == (1, 1, 153, 64)
    assert [p.shape[0] for p in (mix.heads.qkv.weight, mix.heads.out.weight)] == [16 + 16 + 64, 64]


@pytest.mark.parametrize("name", ["elu+1", "taylor", "hedgehog", "cosformer"])
def test_only_fused_maps_defer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.ops.linear.deferred.choose", lambda *_: "triton")  # as on a GPU
    mix = make(dim=8, heads=2, causal=True, feature_map=name, length=9 if name == "cosformer" else None)
    state = mix.init_state(1)
    assert (mix.defer(state) is state) == (name != "elu+1")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("features=8 .*unless feature_map=.taylor", {"features": 8}),
        ("features=8 .*unless feature_map=.taylor", {"features": 8, "feature_map": "hedgehog"}),
        ("features=0", {"features": 0, "feature_map": "taylor"}),
        ("features=3 .*even", {"features": 3, "feature_map": "taylor", "rotary": True}),
        ("length=None .*the longest sequence", {"feature_map": "cosformer"}),
        ("length=9 .*unless feature_map=.cosformer", {"length": 9}),
        ("length=0", {"feature_map": "cosformer", "length": 0}),
        ("rotary=True .*False with feature_map=.cosformer", {"feature_map": "cosformer", "length": 9, "rotary": True}),
        ("accepted are .*cosformer, hedgehog.*did you mean 'hedgehog'", {"feature_map": "hedgehogs"}),
    ],
)
def test_options_that_do_not_go_together_are_named(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make(dim=8, heads=2, **options)


def test_taylor_equals_the_naive_attention_of_fla() -> None:
    based = fla_naive("based")  # agreed with fla-core 0.6.0
    mix = make(dim=24, heads=3, causal=True, feature_map="taylor", features=6).double()
    x = 2 * tokens(2, 31, 24)
    o = based.naive_parallel_based(*heads_of(mix, x))
    torch.testing.assert_close(mix(x), mix.heads.out(o.transpose(1, 2).flatten(2)), rtol=1e-12, atol=1e-12)
