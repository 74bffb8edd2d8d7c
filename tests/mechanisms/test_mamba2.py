"""Mamba-2: the model of transformers with copied weights, and limits of its decay."""

from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mechanisms.mamba2 import Mamba2
from tests.mechanisms.peers import copy_into, same_gradients


def build(**options: Any) -> Mamba2:
    torch.manual_seed(0)
    mix = subquad.build("mamba2", **{"dim": 12, "heads": 4, "causal": True, "state": 5, **options})
    assert isinstance(mix, Mamba2)
    with torch.no_grad():
        mix.skip.uniform_(0.5, 1.5)
        mix.norm.uniform_(0.5, 1.5)
    return mix.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("size", [3, 40])
def test_mamba2_of_transformers(groups: int, size: int) -> None:
    """Its plain path, in chunks of 16 tokens, computes decays and norms in float32."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    mix, x = build(groups=groups), tokens(2, size, 12).requires_grad_()
    config = transformers.Mamba2Config(
        hidden_size=12, num_heads=4, head_dim=6, expand=2, state_size=5, n_groups=groups, chunk_size=16,
        use_bias=False, num_hidden_layers=1,
    )  # fmt: skip
    peer = modeling.Mamba2Mixer(config, 0).double().eval()
    mixed, dt, z = mix.into.weight.split((24 + 10 * groups, 4, 24))
    assert mix.conv is not None
    assert mix.conv.bias is not None
    weights = {
        "in_proj.weight": torch.cat((z, mixed, dt)),
        "conv1d.weight": mix.conv.weight.flip(0).T[:, None],
        "conv1d.bias": mix.conv.bias,
        "dt_bias": mix.bias,
        "A_log": mix.rate,
        "D": mix.skip,
        "norm.weight": mix.norm,
        "out_proj.weight": mix.out.weight,
    }
    copy_into(peer, weights)
    same_gradients(mix(x), peer(x), x, 2e-6)


def test_one_channel_by_hand() -> None:
    """One head with one channel and B = C = 1: h = a h + Δ x, and the gated norm of one number is its sign."""
    mix = build(dim=1, heads=1, expansion=1, state=1)
    assert mix.conv is not None
    assert mix.conv.bias is not None
    with torch.no_grad():
        mix.into.weight.copy_(torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0]]))  # x, B, C, Δ, z
        mix.conv.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]))  # the token itself
        one = 1.2784645427610738  # silu of which is 1
        mix.conv.bias.copy_(torch.tensor([0.0, one, one]))
        mix.rate.copy_(torch.tensor([0.5]).log())
        mix.bias.copy_(torch.tensor([2.0]).expm1().log())  # a step of 2, so that a = exp(-1)
    x = torch.tensor([[[3.0], [-1.0], [2.0]]], dtype=torch.float64)
    silu = x[0, :, 0] * torch.sigmoid(x[0, :, 0])
    a, h, states = torch.exp(torch.tensor(-1.0, dtype=torch.float64)), torch.zeros((), dtype=torch.float64), []
    for value in silu:
        h = a * h + 2 * value
        states.append(h)
    found = [mix.prefill(x[:, : t + 1])[1].s[0, 0, 0, 0] for t in range(3)]
    torch.testing.assert_close(torch.stack(found), torch.stack(states), rtol=1e-6, atol=1e-6)
    age = (torch.arange(3)[:, None] - torch.arange(3)).double()
    torch.testing.assert_close(mix.pattern(x)[0, 0], (a**age).tril(), rtol=1e-6, atol=1e-6)
    want = (torch.stack(states) + mix.skip * silu) * silu
    want = want / (want.square() + 1e-5).sqrt() * mix.norm * mix.out.weight[0]
    torch.testing.assert_close(mix(x)[0, :, 0], want, rtol=1e-6, atol=1e-6)


def test_steps_start_between_a_thousandth_and_a_tenth() -> None:
    mix = build(heads=4, dim=400)
    step = torch.nn.functional.softplus(mix.bias)
    assert (step > 0.00099).all()
    assert (step < 0.101).all()
    assert (mix.rate.exp() >= 1).all()
    assert (mix.rate.exp() <= 16).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False .*causal only"),
        ({"groups": 3}, "groups=3 .*heads=4"),
        ({"state": 0}, "state=0"),
        ({"expansion": 0}, "expansion=0"),
        ({"rotary": True}, "rotary=True"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
