"""The kernels of clusters and of a step in buckets against their torch twins.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.ops import clusters, ordered
from subquad.ops.clusters import (
    balanced,
    cluster_means,
    cluster_sums,
    half_bits,
    hamming_clusters,
    hamming_codes,
    nearest,
    spread,
)
from tests.ops.own_process import interpreted

B, T, H, K = 2, 70, 2, 12


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "TILE", 16)


@interpreted
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("number", [3, 70])
def test_interpreted_nearest(signed: bool, number: int) -> None:
    x, c = torch.randn(B, T, H, K), torch.randn(H, 2, number, K)
    assert torch.equal(nearest(x, c, signed=signed, impl="triton"), nearest(x, c, signed=signed))
    per_row = torch.randn(B, H, 1, number, K)
    assert torch.equal(nearest(x, per_row, impl="triton"), nearest(x, per_row))
    x, c = x.round(), c.round()  # of equal ones the first
    assert torch.equal(nearest(x, c, signed=signed, impl="triton"), nearest(x, c, signed=signed))


@interpreted
def test_interpreted_sums_and_their_gradients() -> None:
    x, label = torch.randn(B, T, H, K, requires_grad=True), torch.randint(-1, 5, (B, H, T))
    total, count = cluster_sums(x, label, 5)
    means, want = cluster_means(x.transpose(1, 2), label, 5)
    assert torch.equal(count, want)
    torch.testing.assert_close(total, means * want[..., None])
    weights = torch.randn_like(total)
    (got,) = torch.autograd.grad((total * weights).sum(), x)
    member = torch.nn.functional.one_hot(label + 1, 6)[..., 1:].to(x.dtype)  # [B, H, T, N]
    torch.testing.assert_close(got, torch.einsum("bhnk,bhtn->bthk", weights, member))
    values = torch.randn(B, H, 5, 3, requires_grad=True)
    rows = spread(values, label, x)
    torch.testing.assert_close(rows, torch.einsum("bhnv,bhtn->bthv", values, member))
    weights = torch.randn_like(rows)
    (got,) = torch.autograd.grad((rows * weights).sum(), values)
    torch.testing.assert_close(got, torch.einsum("bthv,bhtn->bhnv", weights, member))


@interpreted
def test_interpreted_choice_of_the_nearest_tokens() -> None:
    x, c, lengths = (
        torch.randn(B, T, H, K).round(),
        torch.randn(H, 3, K).round(),
        torch.tensor([T, 6]),
    )  # many are equal
    near = torch.einsum("bthk,hnk->bhnt", x, c).masked_fill(torch.arange(T) >= lengths[:, None, None, None], -torch.inf)
    best, want = (t[..., :9] for t in near.sort(dim=-1, descending=True, stable=True))
    want = want.masked_fill(best == -torch.inf, -1).sort(-1).values
    assert torch.equal(balanced(x, c, 9, 0.5, lengths).long().sort(-1).values, want)


@interpreted
def test_interpreted_labels_of_signs() -> None:
    x, planes, lengths = torch.randn(B, T, H, K), torch.randn(9, K + 1), torch.tensor([T, 21])
    _, want = hamming_clusters(clusters.sign_bits(x.transpose(1, 2), planes), 5, 4, lengths[:, None].expand(-1, H))
    want = want.masked_fill(torch.arange(T) >= lengths[:, None, None], -1)
    assert torch.equal(hamming_codes(half_bits(x, planes), 5, 4, lengths)[1].long(), want)


def both(name: str, **options: Any) -> list[Any]:
    mixes = [subquad.build(name, dim=2 * K, heads=2, impl=impl, **options) for impl in ("triton", "torch")]
    mixes[1].load_state_dict(mixes[0].state_dict())
    return mixes


@interpreted
@pytest.mark.parametrize(
    ("name", "options", "ragged"),
    [
        ("reformer", {"causal": True, "rounds": 2, "chunk": 5, "buckets": (2, 2)}, True),
        ("reformer", {"rounds": 2, "chunk": 5, "buckets": 4}, True),
        ("reformer", {"causal": True, "chunk": 7, "buckets": 2, "strict_causal": False}, False),
        ("routing", {"causal": True, "clusters": 3, "window": 4}, True),
        ("routing", {"causal": True, "clusters": 3, "window": 4, "share_qk": False}, True),
        ("routing", {"clusters": 3, "window": 12}, True),
        ("routing", {"causal": True, "clusters": 3, "window": 12, "strict_causal": False}, False),
        ("sinkhorn", {"causal": True, "block": 8}, False),
        ("sinkhorn", {"block": 20, "rotary": True}, False),
        ("clustered", {"clusters": 4, "topk": 6, "bits": 16, "iterations": 3}, True),
        ("clustered", {"clusters": 4, "topk": 6, "bits": 16, "iterations": 3, "block": 6, "causal": True}, False),
        ("clustered", {"clusters": 3, "improved": False, "bits": 7, "block": 4, "causal": True}, False),
        ("clustered", {"clusters": 4, "improved": False, "bits": 16, "iterations": 3}, False),
    ],
)
def test_interpreted_mechanisms(name: str, options: dict[str, Any], ragged: bool) -> None:
    agree(name, options, ragged)


@interpreted
@pytest.mark.parametrize("improved", [True, False])
def test_a_gpu_with_less_shared_memory_takes_groups_in_parts(improved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops import groups_triton

    monkeypatch.setattr(groups_triton, "_part", lambda *_: 16)
    options = {"clusters": 32, "topk": 3, "bits": 16, "iterations": 2, "block": 6, "causal": True}
    agree("clustered", {**options, "improved": improved}, ragged=False)


def agree(name: str, options: dict[str, Any], ragged: bool) -> None:
    torch.manual_seed(0)
    results, x = [], torch.randn(B, 40, 2 * K)
    for mix in both(name, **options):
        mix.train(name == "routing")  # whose centroids move
        inputs = x.clone().requires_grad_()
        y = mix(inputs, lengths=torch.tensor([40, 9]) if ragged else None)
        (y * x.flip(1)).sum().backward()
        results.append([y.detach(), inputs.grad, *(p.grad for p in mix.parameters()), *mix.buffers()])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reformer", {"rounds": 3, "chunk": 3, "buckets": 4}),
        ("reformer", {"rounds": 2, "chunk": 20, "buckets": 1, "rotary": True}),
        ("routing", {"clusters": 3, "window": 4}),
        ("routing", {"clusters": 3, "window": 4, "share_qk": False}),
    ],
)
def test_interpreted_steps(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, lengths = torch.randn(B, 30, 2 * K), torch.tensor([12, 7])
    mixes = both(name, causal=True, **options)
    with torch.no_grad():
        states = [mix.eval().prefill(x[:, :12], lengths)[1] for mix in mixes]
        for t in range(12, 30):
            before = [part.clone() for part in states[0]]
            old, (y, states[0]) = states[0], mixes[0].step(x[:, t], states[0], inplace=t % 2 == 0)
            if t % 2:
                assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
            want, states[1] = mixes[1].step(x[:, t], states[1])
            close([y, *states[0]], [want, *states[1]])


def close(ours: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
