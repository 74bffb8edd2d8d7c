"""Gated linear attention: the recurrence of the paper, its limits, and fla's naive function."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from subquad.mechanisms.gla import GLA
from tests.mechanisms.peers import fla_naive, same_gradients


def build(**options: Any) -> GLA:
    torch.manual_seed(0)
    mix = subquad.build("gla", **{"dim": 12, "heads": 3, "causal": True, **options})
    assert isinstance(mix, GLA)
    return mix.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_recurrence_of_the_paper() -> None:
    """S = Diag(α) S + k vᵀ with α = sigmoid^(1/16), head by head; keys are half as wide as values."""
    mix, x = build(), tokens(1, 15, 12)
    q, k, v, gate, low = mix.into(x)[0].split((6, 6, 12, 12, 16), -1)
    alpha = (1 / (1 + (-(low @ mix.decay.weight.T + mix.decay.bias)).exp())) ** (1 / 16)
    want = torch.zeros(15, 12, dtype=torch.float64)
    for h in range(3):
        own, s = slice(2 * h, 2 * h + 2), torch.zeros(2, 4, dtype=torch.float64)
        for t in range(15):
            s = torch.diag(alpha[t, own]) @ s + torch.outer(k[t, own], v[t, 4 * h : 4 * h + 4])
            o = s.T @ q[t, own] / 2**0.5
            want[t, 4 * h : 4 * h + 4] = o / (o.square().mean() + 1e-5).sqrt()
    torch.testing.assert_close(mix(x)[0], mix.out(want * gate * torch.sigmoid(gate)))
    torch.testing.assert_close(mix.prefill(x)[1].s[0, 2], s)


def test_without_decay_it_is_linear_attention_without_a_divisor() -> None:
    mix, x = build(), tokens(2, 30, 12)
    with torch.no_grad():
        mix.decay.weight.zero_()
        mix.decay.bias.fill_(700)  # a sigmoid of 1
    q, k = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in mix.into(x)[..., :12].chunk(2, -1))
    torch.testing.assert_close(mix.pattern(x), (q @ k.mT / 2**0.5).tril())


def test_a_channel_that_forgets_sees_only_its_own_token() -> None:
    mix, x = build(temperature=1), tokens(2, 30, 12)
    with torch.no_grad():
        mix.decay.weight.zero_()
        mix.decay.bias.fill_(-700)
    weights = mix.pattern(x)
    torch.testing.assert_close(weights, weights.diagonal(dim1=2, dim2=3).diag_embed())
    torch.testing.assert_close(mix(x), torch.cat([mix(x[:, t : t + 1]) for t in range(30)], 1))


def test_fla_naive_gla() -> None:
    """Between the projections, the norm and the gate of fla's layer."""
    naive = fla_naive("gla").naive_recurrent_gla
    mix, x = build().float(), tokens(2, 50, 12).float().requires_grad_()
    q, k, v, g, low = mix.into(x).split((6, 6, 12, 12, 16), -1)
    gk = F.logsigmoid(F.linear(low, mix.decay.weight, mix.decay.bias)) / 16
    q, k, v, gk = (t.unflatten(-1, (3, -1)) for t in (q, k, v, gk))
    o = F.rms_norm(naive(q, k, v, gk)[0], (4,), eps=1e-5).flatten(-2) * F.silu(g)
    same_gradients(mix(x), mix.out(o), x, 2e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False .*causal only"),
        ({"key_width": 0}, "key_width=0"),
        ({"rank": 0}, "rank=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"rotary": True}, "rotary=True"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
