import math

import pytest
import torch
from torch import nn

from subquad import build


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_multihead_attention_with_copied_weights(causal: bool) -> None:
    mix, peer = (
        build("softmax", dim=24, heads=3, causal=causal).double(),
        nn.MultiheadAttention(24, 3, batch_first=True).double(),
    )
    with torch.no_grad():
        peer.in_proj_weight.copy_(mix.heads.qkv.weight)
        peer.in_proj_bias.copy_(mix.heads.qkv.bias)
        peer.out_proj.weight.copy_(mix.heads.out.weight)
        peer.out_proj.bias.copy_(mix.heads.out.bias)
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    mask = torch.ones(17, 17, dtype=torch.bool).triu(1) if causal else None
    want, weights = peer(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(mix(x), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mix.pattern(x), weights, rtol=1e-10, atol=1e-10)
    if not causal:
        context = torch.randn(2, 5, 24, dtype=torch.float64)
        torch.testing.assert_close(mix(x, context=context), peer(x, context, context)[0], rtol=1e-10, atol=1e-10)


def test_without_projections_it_is_the_formula_of_the_lecture_notes() -> None:
    mix = build("softmax", dim=4, heads=1, projections=False)
    assert not list(mix.parameters())
    x = torch.randn(1, 6, 4)
    w = torch.exp(x @ x.mT)
    torch.testing.assert_close(mix(x), (w / w.sum(-1, keepdim=True)) @ x)


def test_scale_is_an_option() -> None:
    x = torch.randn(1, 6, 4)
    plain = build("softmax", dim=4, heads=1, projections=False, scale=1 / math.sqrt(4))
    torch.testing.assert_close(plain(x), torch.softmax(x @ x.mT / 2, -1) @ x)


def test_the_cache_grows_beyond_its_capacity() -> None:
    mix = build("softmax", dim=8, heads=2, causal=True)
    x = torch.randn(2, 9, 8)
    state = mix.init_state(2, capacity=2)
    for t in range(9):
        y, state = mix.step(x[:, t], state)
        torch.testing.assert_close(y, mix(x)[:, t])
    assert state.k.shape[1] >= 9
    assert state.k.dtype == x.dtype


def test_a_long_continued_prompt_goes_in_pieces() -> None:
    mix = build("softmax", dim=8, heads=2, causal=True)
    x = torch.randn(1, 1100, 8)
    _, state = mix.prefill(x[:, :7])
    y, _ = mix.prefill(x[:, 7:], state=state)
    torch.testing.assert_close(y, mix(x)[:, 7:])
