"""Retention: numbers by hand, the decays of the paper, and fla's naive function."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from subquad.mechanisms.retnet import RetNet
from tests.mechanisms.peers import fla_naive, same_gradients


def build(**options: Any) -> RetNet:
    torch.manual_seed(0)
    mix = subquad.build("retnet", **{"dim": 12, "heads": 3, "causal": True, **options})
    assert isinstance(mix, RetNet)
    return mix.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_numbers_by_hand() -> None:
    """One head whose q, k and v are x: o = 31/32 of what was, and a norm over the two channels of a head gives ±1."""
    mix = build(dim=2, heads=1, expand_v=1)
    with torch.no_grad():
        mix.into.weight.copy_(torch.cat((torch.eye(2),) * 4))
        mix.out.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]], dtype=torch.float64)
    g = 31 / 32
    weights = torch.tensor([[1, 0, 0], [0, 4, 0], [g**2, 2 * g, 2]], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(mix.pattern(x)[0, 0], weights)
    # outputs (1, 0), (0, 8), (g² + 2, 4g + 2) over √2: each has one channel above and one below its mean
    side = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(mix(x)[0], side * F.silu(x[0]), rtol=1e-4, atol=1e-4)
    state = mix.prefill(x)[1]
    torch.testing.assert_close(state.s[0, 0], torch.tensor([[g**2 + 1, 1], [1, 4 * g + 1]], dtype=torch.float64))


def test_heads_fade_at_the_rates_of_the_paper() -> None:
    """1 - 2⁻⁵, 1 - 2⁻⁶, 1 - 2⁻⁷: equal tokens have equal scores, so ratios of weights are powers of these."""
    x = tokens(1, 1, 12).expand(-1, 40, -1)
    weights = build().pattern(x)[0]
    age = torch.arange(39, -1, -1, dtype=torch.float64)
    rates = torch.tensor([31 / 32, 63 / 64, 127 / 128], dtype=torch.float64)
    torch.testing.assert_close(weights[:, 39] / weights[:, 39, 39:], rates[:, None] ** age)


@pytest.mark.parametrize("rotary", [False, True])
def test_the_parallel_and_the_recurrent_form_of_the_paper(rotary: bool) -> None:
    """Equations 5 and 6, with the rotation as a complex number, and a norm by hand."""
    mix, x = build(rotary=rotary), tokens(1, 17, 12)
    q, k, v = mix.into(x)[0].split((12, 12, 24, 24), -1)[:3]
    gate = mix.into(x)[0, :, 48:]
    angle = torch.tensor([1.0, 0.01], dtype=torch.float64) * torch.arange(17)[:, None] * rotary
    turn, outputs = torch.exp(1j * angle), torch.zeros(17, 24, dtype=torch.float64)
    recurrent = torch.zeros_like(outputs)
    for h in range(3):
        qh, kh = (torch.complex(t[:, 4 * h : 4 * h + 2], t[:, 4 * h + 2 : 4 * h + 4]) * turn for t in (q, k))
        vh, gamma = v[:, 8 * h : 8 * h + 8], 1 - 2.0 ** (-5 - h)
        age = (torch.arange(17)[:, None] - torch.arange(17)).double()
        o = ((qh @ kh.mH).real / 2 * (gamma**age).tril()) @ vh
        s, steps = torch.zeros(2, 8, dtype=torch.complex128), []
        for t in range(17):
            s = gamma * s + kh[t].conj()[:, None] * vh[t]
            steps.append((qh[t] @ s).real / 2)
        for found, made in ((outputs, o), (recurrent, torch.stack(steps))):
            centred = made - made.mean(-1, keepdim=True)
            found[:, 8 * h : 8 * h + 8] = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for found in (outputs, recurrent):
        torch.testing.assert_close(mix(x)[0], mix.out(found * F.silu(gate)))


def test_fla_naive_retention() -> None:
    """Between the projections, the norm and the gate of fla's layer, which has RMS in place of a group norm."""
    naive = fla_naive("retention").naive_retention
    mix, x = build().float(), tokens(2, 50, 12).float().requires_grad_()
    q, k, v, gate = mix.into(x).split((12, 12, 24, 24), -1)
    q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in (q, k, v))
    o = F.layer_norm(naive(q, k, v).transpose(1, 2), (8,))  # group norm is that of each head
    same_gradients(mix(x), mix.out(o.flatten(-2) * F.silu(gate)), x, 2e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False .*causal only"),
        ({"expand_v": 0}, "expand_v=0"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"dim": 9, "rotary": True}, "rotary=True .*even"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
