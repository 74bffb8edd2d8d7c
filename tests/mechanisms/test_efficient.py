"""Efficient attention: both normalisations, and a running normaliser that is exact for any logits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mechanisms.efficient import LIMIT, Efficient, _moderate


def build(**options: Any) -> Efficient:
    """q = k = v = x, so that a test says what the mechanism sees; two heads of 8."""
    mix = subquad.build("efficient", dim=16, heads=2, **options)
    assert isinstance(mix, Efficient)
    with torch.no_grad():
        mix.heads.qkv.weight.copy_(torch.eye(16).repeat(3, 1))
        mix.heads.out.weight.copy_(torch.eye(16))
        mix.heads.qkv.bias.zero_()
        mix.heads.out.bias.zero_()
    return mix.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def far_apart(length: int, how: str) -> Tensor:
    """Logits whose features, positions, or both lie hundreds apart."""
    x, time, feature = tokens(1, length, 16), torch.arange(length)[:, None] / length, torch.arange(16) - 8
    return {
        "features": x + 60.0 * feature,
        "rising": x + 900.0 * time,
        "falling": x - 900.0 * time,
        "crossing": x + 400.0 * feature.sign() * (time - 0.5),  # half of the features rise while the others fall
        "one record": x + 500.0 * (torch.arange(length) == length // 2)[:, None] * (feature == 3),
        "wild": 300.0 * x,
    }[how]


HOW = ["features", "rising", "falling", "crossing", "one record", "wild"]


def test_softmax_is_the_product_of_two_softmaxes() -> None:
    x = tokens(3, 11, 16)
    want = []
    for h in (x[..., :8], x[..., 8:]):
        context = h.softmax(dim=1).mT @ h  # [B, K, V]
        want.append(h.softmax(dim=2) @ context)
    torch.testing.assert_close(build().double()(x), torch.cat(want, dim=-1))


def test_scaling_is_the_scaled_product_in_any_order() -> None:
    x = tokens(3, 11, 16)
    want = torch.cat([h @ h.mT @ h / 11 for h in (x[..., :8], x[..., 8:])], dim=-1)
    torch.testing.assert_close(build(normalize="scaling").double()(x), want)


@pytest.mark.parametrize("normalize", ["softmax", "scaling"])
def test_causal_is_bidirectional_over_each_prefix(normalize: str) -> None:
    x = tokens(2, 20, 16)
    causal, both = (build(normalize=normalize, causal=c).double() for c in (True, False))
    y = causal(x)
    for t in range(1, 21):
        torch.testing.assert_close(y[:, t - 1], both(x[:, :t])[:, -1])


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_weights_sum_to_one(causal: bool) -> None:
    weights = build(causal=causal).double().pattern(tokens(2, 17, 16))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17, dtype=torch.float64))
    assert (weights >= 0).all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("length", [150, 31])
def test_logits_far_apart(how: str, length: int) -> None:
    """Each feature has its own normaliser: none may underflow because another feature, or another time, is larger."""
    x = far_apart(length, how)
    mix = build(causal=True)
    with torch.no_grad():  # values of moderate size, so that errors show
        mix.heads.qkv.weight[32:] *= 1e-2
    want = mix.double().reference(x).detach()
    torch.testing.assert_close(mix.double()(x).detach(), want, rtol=1e-9, atol=1e-9)
    scale = float(want.abs().max())
    single = mix.float()
    row = x.float().clone().requires_grad_()
    y = single(row)
    torch.testing.assert_close(y.double().detach(), want, rtol=0, atol=1e-4 * scale)
    y.sum().backward()
    assert row.grad is not None
    assert torch.isfinite(row.grad).all()
    part, state = single.prefill(x[:, :20].float())
    torch.testing.assert_close(part, y[:, :20], rtol=0, atol=1e-4 * scale)
    part, state = single.prefill(x[:, 20:27].float(), state=state)
    torch.testing.assert_close(part, y[:, 20:27], rtol=0, atol=1e-4 * scale)
    for t in range(27, length):
        y_t, state = single.step(x[:, t].float(), state)
        torch.testing.assert_close(y_t, y[:, t], rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("how", HOW)
def test_gradients_with_logits_far_apart(how: str) -> None:
    mix = build(causal=True).double()
    grads = []
    for compute in (mix, mix.reference):
        x = far_apart(70, how).requires_grad_()
        (compute(x) * tokens(1, 70, 16, seed=1)).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-8 * float(grads[1].abs().max()))


def test_sums_of_plain_exponentials_up_to_the_limit() -> None:
    """Features that cross the whole range, where the two ways to sum must agree."""
    time = torch.linspace(-1, 1, 200)[:, None]
    x = (LIMIT - 1) * time * (torch.arange(16) - 7.5).sign() + 0.3 * tokens(1, 200, 16)
    mix = build(causal=True).bfloat16()
    heads = mix.heads.split(x.clamp(-LIMIT, LIMIT).bfloat16())
    assert _moderate(heads[1], mix.init_state(1).max)

    def sums(way: str, dtype: torch.dtype) -> list[Tensor]:
        """o, s, z, max and the gradients of q, k, v."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in heads]
        made = getattr(mix.to(dtype), way)(*leaves, mix.init_state(1))
        loss = (made[0] * tokens(1, 200, 2, 8, seed=1)).sum() + made[1].sum() + made[2].sum()
        return [t.detach().double() for t in (*made, *torch.autograd.grad(loss, leaves))]

    exact = sums("_running_softmax", torch.float64)
    torch.testing.assert_close(sums("_plain_sums", torch.float64), exact, rtol=1e-9, atol=1e-9)
    for got, other, want in zip(
        sums("_plain_sums", torch.float32), sums("_running_softmax", torch.float32), exact, strict=True
    ):
        assert (got - want).norm() <= 2 * (other - want).norm() + 1e-6 * want.norm()
    half = sums("_plain_sums", torch.bfloat16)
    assert all(torch.isfinite(t).all() for t in half)
    for got, want in zip(half[:4], exact[:4], strict=True):
        assert (got - want).norm() <= 0.005 * want.norm()


def test_one_logit_beyond_the_limit_is_summed_with_a_running_maximum() -> None:
    mix = build(causal=True).double()
    x = tokens(2, 90, 16)
    x[1, 50, 3] = LIMIT + 1
    k = mix.heads.split(x)[1]
    start = mix.init_state(2).max
    assert _moderate(k[:1], start[:1])
    assert not _moderate(k, start)
    assert not _moderate(-k, start)
    torch.testing.assert_close(mix(x), mix.reference(x))
    # what a state holds can be beyond it, too
    _, state = mix.prefill(x[:, :60])
    assert not _moderate(k[:, 60:], state.max)
    torch.testing.assert_close(mix.prefill(x[:, 60:], state=state)[0], mix(x)[:, 60:])


@pytest.mark.parametrize("offset", [-300.0, -31.0, 31.0, 300.0])
def test_half_precision_of_large_logits(offset: float) -> None:
    """Bidirectional sums in units of exp(shift): the difference of a large logit and a large shift is exact."""
    x = tokens(1, 400, 16).bfloat16()
    mix = build().bfloat16()
    with torch.no_grad():
        mix.heads.qkv.bias[16:32] = offset
    y, grad = run(mix, x)
    want, best = run(copy.deepcopy(mix).double(), x.double(), mix.heads.split(x)[1])
    for got, right in ((y, want), (grad, best)):
        assert float((got - right).norm() / right.norm()) < 0.02


def run(mix: Efficient, x: Tensor, rounded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the gradient of x; `rounded` replaces the keys, because 16 bits round their sum with a large bias."""
    x = x.clone().requires_grad_()
    if rounded is not None:
        split = mix.heads.split

        def keys_of_the_other(x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = split(x, context)
            return q, k + (rounded.detach() - k).detach(), v

        mix.heads.split = keys_of_the_other  # type: ignore[method-assign]
    y = mix(x)
    (y * tokens(*y.shape, seed=4)).sum().backward()
    assert x.grad is not None
    return y.detach().double(), x.grad.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(dtype: torch.dtype, causal: bool) -> None:
    x = (5 * tokens(2, 300, 16)).to(dtype)
    want = build(causal=causal).double()(x.double())
    y = build(causal=causal).to(dtype)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("normalize", ["softmax", "scaling"])
def test_autocast(normalize: str) -> None:
    mix, x = build(causal=True, normalize=normalize), tokens(2, 80, 16)
    want = build(causal=True, normalize=normalize).double()(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(x.float())
        part, state = mix.prefill(x[:, :79].float())
        last, after = mix.step(x[:, 79].float(), state)
        y.float().sum().backward()
    assert state.s.dtype == after.s.dtype == torch.float32
    for got, best in ((y, want), (part, want[:, :79]), (last, want[:, 79])):
        torch.testing.assert_close(got.double(), best, rtol=0.02, atol=0.02)


def test_the_normaliser_stays_exact_over_many_tokens() -> None:
    """Equal logits: the average of the values so far. A logarithm added up in float32 would have stalled by here."""
    mix = build(causal=True)
    with torch.no_grad():
        mix.heads.qkv.weight[16:32] = 0
        mix.heads.qkv.bias[16:32] = 9.0
    length = 40_000
    x = torch.ones(1, length, 16)
    x[:, : length // 2] = 0
    y = mix(x)[0, :, 0]
    count = torch.arange(1, length + 1)
    torch.testing.assert_close(y, (count - length // 2).clamp(min=0) / count, rtol=1e-4, atol=1e-6)
    _, state = mix.prefill(x)
    for t in range(1, 4):
        y_t, state = mix.step(x[:, -1], state)
        assert float(y_t[0, 0].detach()) == pytest.approx((length // 2 + t) / (length + t), rel=1e-4)


@pytest.mark.parametrize("normalize", ["softmax", "scaling"])
def test_state_is_constant(normalize: str) -> None:
    mix = build(causal=True, normalize=normalize)
    start, (_, later) = mix.init_state(3), mix.prefill(tokens(3, 130, 16).float())
    assert start.s.shape == later.s.shape == (3, 2, 8, 8)
    assert start.z.shape == later.z.shape == start.max.shape == later.max.shape == (3, 2, 8)


def test_an_empty_prompt_leaves_the_first_state() -> None:
    mix = build(causal=True).double()
    x = tokens(2, 9, 16)
    _, state = mix.prefill(x, lengths=torch.tensor([0, 9]))
    start = mix.init_state(1)
    for got, want in zip(state, start, strict=True):
        torch.testing.assert_close(got[:1], want)
    y, _ = mix.step(x[:, 3], state)
    torch.testing.assert_close(y[0], mix(x[:1, 3:4])[0, 0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"normalize": "l2"}, 'normalize=.l2.* "softmax" or "scaling"'),
        ({"rotary": True}, "rotary=True"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
