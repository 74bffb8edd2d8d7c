"""Gated delta networks: the layer of Qwen3-Next with copied weights, fla's naive functions, and both limits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mechanisms.gated_deltanet import GatedDeltaNet
from tests.mechanisms.peers import convolved, copy_into, fla_naive, same_gradients


def build(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    mix = subquad.build("gated_deltanet", **{"dim": 12, "heads": 3, "causal": True, **options})
    assert isinstance(mix, GatedDeltaNet)
    with torch.no_grad():
        mix.norm.weight.uniform_(0.5, 1.5)
    return mix.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("size", [5, 100])
def test_qwen3_next_of_transformers(size: int) -> None:
    """Its plain path, in chunks of 64 tokens, computes in float32. It interleaves q, k, v and gate by heads."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    mix, x = build(), tokens(2, size, 12).requires_grad_()
    config = transformers.Qwen3NextConfig(
        hidden_size=12, num_hidden_layers=1, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=4,
        linear_value_head_dim=8, rms_norm_eps=1e-5, layer_types=["linear_attention"],
    )  # fmt: skip
    peer = modeling.Qwen3NextGatedDeltaNet(config, 0).double().eval()
    parts = mix.into.weight.split((12, 12, 24, 3, 3, 24))
    q, k, v, b, a, gate = (t.unflatten(0, (3, -1)) for t in parts)
    assert mix.conv is not None
    weights = {
        "in_proj_qkvz.weight": torch.cat((q, k, v, gate), 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat((b, a), 1).flatten(0, 1),
        "conv1d.weight": mix.conv.weight.flip(0).T[:, None],
        "dt_bias": mix.bias,
        "A_log": mix.rate,
        "norm.weight": mix.norm.weight,
        "out_proj.weight": mix.out.weight,
    }
    copy_into(peer, weights)
    same_gradients(mix(x), peer(x), x, 1e-5)


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_functions_of_transformers(function: str) -> None:
    """The last state too, from an empty one."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    mix, x = build(), tokens(2, 70, 12)
    assert mix.conv is not None
    raw, plain = mix.into(x).split((48, 30), -1)
    q, k, v, b, a, _ = mix._parts_of(convolved(raw, mix.conv.weight), plain)
    g = -mix.rate.exp() * torch.nn.functional.softplus(a + mix.bias)
    how = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, state = getattr(modeling, function)(q, k, v, g=g, beta=b.sigmoid(), **how)
    torch.testing.assert_close(mix._merge(o.to(x.dtype), raw, plain), mix(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), mix.prefill(x)[1].s, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_fla_naive_gated_delta_rule(function: str) -> None:
    """Between the projections, the convolutions, the norm and the gate of fla's layer."""
    naive = getattr(fla_naive("gated_delta_rule"), function)
    mix, x = build(negative=True).float(), tokens(2, 70, 12).float().requires_grad_()
    assert mix.conv is not None
    raw, plain = mix.into(x).split((48, 30), -1)
    q, k, v, b, a, gate = mix._parts_of(convolved(raw, mix.conv.weight), plain)
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g = -mix.rate.exp() * torch.nn.functional.softplus(a + mix.bias)
    o = naive(q, k, v, beta=2 * b.sigmoid(), g=g)[0]
    o = torch.nn.functional.rms_norm(o, (8,), mix.norm.weight, 1e-5) * torch.nn.functional.silu(gate)
    same_gradients(mix(x), mix.out(o.flatten(-2)), x, 5e-5)


def test_without_decay_it_is_the_delta_rule() -> None:
    mix = build(expand_v=1)
    plain = subquad.build("deltanet", dim=12, heads=3, causal=True).double()
    with torch.no_grad():
        mix.rate.fill_(-1e4)  # a = exp(-0)
        plain.into.weight.copy_(mix.into.weight[:39])
        plain.conv.weight.copy_(mix.conv.weight)
    x = tokens(2, 30, 12)
    torch.testing.assert_close(mix.pattern(x), plain.pattern(x))
    torch.testing.assert_close(mix.prefill(x)[1].s, plain.prefill(x)[1].s)


def test_with_full_decay_a_token_sees_itself() -> None:
    mix, x = build(), tokens(2, 30, 12)
    with torch.no_grad():
        mix.rate.fill_(30.0)
        mix.bias.fill_(1.0)
    weights = mix.pattern(x)
    torch.testing.assert_close(weights, weights.diagonal(dim1=2, dim2=3).diag_embed())
    assert mix.conv is not None
    with torch.no_grad():
        mix.conv.weight[1:] = 0
    torch.testing.assert_close(mix(x), torch.cat([mix(x[:, t : t + 1]) for t in range(30)], 1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False .*causal only"),
        ({"expand_v": 0}, "expand_v=0"),
        ({"rotary": True}, "rotary=True"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
