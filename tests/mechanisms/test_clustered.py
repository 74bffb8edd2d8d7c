from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from tests.mechanisms.laws import same_after


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    return subquad.build("clustered", **{"dim": 16, "heads": 2, "block": 6, "clusters": 4, **options}).double().eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full(mix: Any, x: Tensor, context: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in mix.heads.split(x, context))
    mask = None if lengths is None else (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mix.options.causal)
    return mix.heads.merge(o.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("topk", [33, 50])
def test_all_keys_on_top_is_full_attention(causal: bool, topk: int) -> None:
    mix = build(causal=causal, topk=topk)
    x = tokens(2, 33, 16)
    torch.testing.assert_close(mix(x), full(mix, x), rtol=1e-10, atol=1e-10)


def test_all_keys_on_top_is_full_attention_with_padding_and_across() -> None:
    mix = build(topk=40)
    x, context, lengths = tokens(2, 33, 16), tokens(2, 40, 16, seed=2), torch.tensor([40, 13])
    want = full(mix, x, context, lengths)
    torch.testing.assert_close(mix(x, context=context, context_lengths=lengths), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("topk", [3, 20])
def test_all_pairs_and_keys_fetched_for_clusters_are_the_same(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = build(topk=topk)
    x, lengths = tokens(4, 33, 16), torch.tensor([33, 13, 1, 0])
    monkeypatch.setattr("subquad.mechanisms.clustered.PAIRS_A_KEY", 100)
    same_after(lambda: monkeypatch.setattr("subquad.mechanisms.clustered.PAIRS_A_KEY", 0), mix, x, lengths)


@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("clusters", [33, 70])
def test_a_cluster_for_each_query_is_full_attention(improved: bool, clusters: int) -> None:
    mix = build(improved=improved, clusters=clusters, topk=5)
    x = tokens(2, 33, 16)
    torch.testing.assert_close(mix(x), full(mix, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("clusters", [1, 5])
def test_equal_queries_lose_nothing_by_being_grouped(causal: bool, improved: bool, clusters: int) -> None:
    mix = build(causal=causal, improved=improved, clusters=clusters, topk=3)
    with torch.no_grad():
        mix.heads.qkv.weight[:16] = 0
        mix.heads.qkv.bias[:16] = tokens(16)
    x = tokens(2, 33, 16)
    torch.testing.assert_close(mix(x), full(mix, x), rtol=1e-10, atol=1e-10)


def test_a_block_as_long_as_the_sequence_is_full_attention() -> None:
    mix = build(causal=True, block=33)
    x = tokens(2, 33, 16)
    torch.testing.assert_close(mix(x), full(mix, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_more_keys_on_top_come_nearer_to_full_attention(causal: bool) -> None:
    x = 3 * tokens(1, 96, 16)
    plain = subquad.approximation_error(build(causal=causal, improved=False), x).mean()
    errors = [subquad.approximation_error(build(causal=causal, topk=topk), x).mean() for topk in (4, 16, 48, 96)]
    assert plain > errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-10


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("improved", [False, True])
def test_weights_sum_to_one(causal: bool, improved: bool) -> None:
    weights = build(causal=causal, improved=improved, topk=3).pattern(tokens(2, 29, 16))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights >= 0).all()


def test_large_scores_stay_finite() -> None:
    mix = build(causal=True, topk=4).float()
    with torch.no_grad():
        mix.heads.qkv.weight *= 100
    x = tokens(1, 50, 16).float().requires_grad_()
    y = mix(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("option", ["clusters", "topk", "bits", "block"])
def test_impossible_sizes_raise(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0"):
        build(**{option: 0})
    with pytest.raises(ValueError, match="improved="):
        build(improved="no")
