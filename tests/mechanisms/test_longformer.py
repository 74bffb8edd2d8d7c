import math
from typing import Any

import pytest
import torch
from torch import nn

from subquad import build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.longformer import Longformer
from tests.mechanisms.test_local import DIM, HEADS, full, tokens

T = 23


def longformer(**options: Any) -> Longformer:
    mix = build("longformer", dim=DIM, heads=HEADS, **options).double()
    assert isinstance(mix, Longformer)
    return mix


def apart(mix: Mixer) -> Mixer:
    """Global projections that differ from the local ones, as after training."""
    torch.manual_seed(2)
    for name, module in mix.named_modules():
        if name.startswith("global") and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.normal_(module.bias, std=0.5)
    return mix


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_loop_over_the_definition(causal: bool) -> None:
    gaps, window, count = (1, 2, 3), 3, 2
    mix = longformer(window=window, dilation=gaps, global_tokens=count, causal=causal)
    apart(mix)
    x = tokens(1, T, DIM)
    local, width = mix.heads.split(x), DIM // HEADS
    own = local
    if not causal:
        q = mix.global_q(x).unflatten(-1, (HEADS, width))
        k, v = (t.unflatten(-1, (HEADS, width)) for t in mix.global_kv(x).chunk(2, -1))
        own = q, k, v
    want = torch.zeros(1, T, HEADS, width, dtype=torch.float64)
    for h in range(HEADS):
        for t in range(T):
            is_global = t < count and not causal
            q, k, v = own if is_global else local
            keys = {t + gaps[h] * m for m in range(-window, window + 1)} | set(range(count))
            keys = set(range(T)) if is_global else keys & set(range(T))
            keys = {s for s in keys if s <= t} if causal else keys
            weights = {s: math.exp(float(q[0, t, h] @ k[0, s, h]) / math.sqrt(width)) for s in keys}
            for s, w in weights.items():
                want[0, t, h] += w / sum(weights.values()) * v[0, s, h]
    torch.testing.assert_close(mix(x), mix.heads.merge(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_wide_as_the_sequence_is_full_attention(causal: bool) -> None:
    mix, x = longformer(window=T, causal=causal), tokens(2, T, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)


def test_all_tokens_global_with_copied_projections_is_full_attention() -> None:
    mix, x = longformer(window=1, global_tokens=T), tokens(2, T, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(apart(mix)(x), mix.reference(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mix(x), full(mix)(x))


def test_global_rows_alone_use_the_global_projections() -> None:
    mix, x = longformer(window=2, global_tokens=3), tokens(1, T, DIM)
    before = mix(x)
    after = apart(mix)(x)
    assert torch.equal(before[:, 3:], after[:, 3:])
    assert not torch.isclose(before[:, :3], after[:, :3]).any()


def test_weights_count_global_keys_once() -> None:
    mix = longformer(window=2, global_tokens=3)
    weights = mix.pattern(tokens(1, T, DIM))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, T, dtype=torch.float64))
    assert [int(n) for n in (weights[0, 0] > 0).sum(-1)[:8]] == [T, T, T, 6, 7, 8, 8, 8]


def test_global_projections_start_as_copies_and_exist_only_where_used() -> None:
    mix = longformer(global_tokens=2)
    assert torch.equal(mix.heads.qkv.weight, torch.cat((mix.global_q.weight, mix.global_kv.weight)))
    assert torch.equal(mix.heads.qkv.bias, torch.cat((mix.global_q.bias, mix.global_kv.bias)))
    for options in ({"global_tokens": 0}, {"causal": True}):
        assert not any("global" in name for name, _ in longformer(**options).named_parameters())


def test_the_state_is_a_ring_and_pinned_globals() -> None:
    mix = longformer(window=4, global_tokens=3, causal=True)
    assert mix.traits.state == "window"
    assert mix.init_state(2, capacity=10_000).k.shape[1] == 5 + 3
    dilated = longformer(window=4, dilation=(1, 1, 3), global_tokens=3, causal=True)
    assert dilated.init_state(2).k.shape[1] == 13 + 3
    x = tokens(2, 60, DIM)
    want = dilated(x)
    y, state = dilated.prefill(x[:, :40], lengths=torch.tensor([40, 1]))
    for t in range(20):
        y, state = dilated.step(torch.stack((x[0, 40 + t], x[1, 1 + t])), state)
        torch.testing.assert_close(y, torch.stack((want[0, 40 + t], want[1, 1 + t])), rtol=1e-10, atol=1e-10)


def test_a_row_shorter_than_the_global_tokens() -> None:
    mix, x = longformer(window=1, global_tokens=8), tokens(2, T, DIM)
    apart(mix)
    y = mix(x, lengths=torch.tensor([T, 5]))
    torch.testing.assert_close(y[1:, :5], mix(x[1:, :5]), rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("window", "count"), [(8, 3), (16, 1)])
def test_equals_the_transformers_library(window: int, count: int) -> None:
    """Its softmax is in float32 whatever the input, hence the tolerance."""
    pytest.importorskip("transformers")
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    size = 16 * window
    config = LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[2 * window], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, 0).double().eval()
    mix = longformer(window=window, global_tokens=count)
    apart(mix)
    for part, (ours, at) in {
        "query": (mix.heads.qkv, 0),
        "key": (mix.heads.qkv, 1),
        "value": (mix.heads.qkv, 2),
        "query_global": (mix.global_q, 0),
        "key_global": (mix.global_kv, 0),
        "value_global": (mix.global_kv, 1),
    }.items():
        rows = slice(at * DIM, (at + 1) * DIM)
        getattr(theirs, part).load_state_dict({name: p[rows] for name, p in ours.state_dict().items()})
    nn.init.eye_(mix.heads.out.weight)
    nn.init.zeros_(mix.heads.out.bias)
    x, lengths = tokens(2, size, DIM), torch.tensor([size, size - 2 * window - 3])
    mask = torch.where(torch.arange(size) < lengths[:, None], 0.0, -10000.0).double()
    mask[:, :count] = 10000.0
    want = theirs(x, mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=True)[0]
    got = mix(x, lengths=lengths)
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[row, :n], want[row, :n], rtol=1e-5, atol=1e-5)


def test_options() -> None:
    assert longformer(dilation=[1, 2, 4]).options.gaps == (1, 2, 4)
    for options, match in (
        ({"window": -1}, "window=-1"),
        ({"global_tokens": -1}, "global_tokens=-1"),
        ({"dilation": 0}, "dilation=0"),
        ({"dilation": (1, 2)}, r"dilation=\(1, 2\).*3"),
        ({"dilation": "twice"}, "dilation"),
    ):
        with pytest.raises(ValueError, match=match):
            longformer(**options)
