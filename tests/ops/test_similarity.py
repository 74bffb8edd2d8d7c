from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops import linear_attention, similarity_attention


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5)


def kernel(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthk,bshk->bhts", F.elu(q) + 1, F.elu(k) + 1)


Q, K, V = (draw(2, 6, 3, 4, seed=i) for i in range(3))


@pytest.mark.parametrize("causal", [True, False])
def test_exponential_similarity_is_softmax_attention(causal: bool) -> None:
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(similarity_attention(Q, K, V, softmax, causal=causal, eps=0.0), want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 2])])
def test_a_kernel_is_linear_attention(causal: bool, lengths: Tensor | None) -> None:
    got = similarity_attention(Q, K, V, kernel, causal=causal, lengths=lengths)
    torch.testing.assert_close(got, linear_attention(Q, K, V, causal=causal, lengths=lengths))


def test_padding_is_invisible() -> None:
    k, v = K.clone(), V.clone()
    k[1, 2:], v[1, 2:] = 1e3, torch.nan
    o = similarity_attention(Q, k, v, softmax, key_lengths=torch.tensor([6, 2]))
    torch.testing.assert_close(o[1:], similarity_attention(Q[1:], K[1:, :2], V[1:, :2], softmax))
    o = similarity_attention(Q, k, v, softmax, lengths=torch.tensor([6, 0]))
    assert not o[1].any()
    crossed = similarity_attention(Q[:, :5], k, v, softmax, lengths=torch.tensor([6, 2]))
    torch.testing.assert_close(crossed[1:], similarity_attention(Q[1:, :5], K[1:, :2], V[1:, :2], softmax))


def test_types_and_gradients() -> None:
    o = similarity_attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), softmax)
    assert o.dtype == torch.bfloat16
    leaves = [x[:1, :3, :1].clone().requires_grad_() for x in (Q, K, V)]
    assert torch.autograd.gradcheck(lambda q, k, v: similarity_attention(q, k, v, softmax, causal=True), leaves)


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("q has shape", (Q[0], K, V, softmax), {}),
        ("v has shape", (Q, K, V[:, :0], softmax), {}),
        ("same batch and heads", (Q, K[:, :, :1], V[:, :, :1], softmax), {}),
        ("same length", (Q, K, V[:, :3], softmax), {}),
        ("one floating point type", (Q, K, V.float(), softmax), {}),
        ("causal=True with 6 queries and 3 keys", (Q, K[:, :3], V[:, :3], softmax), {"causal": True}),
        ("sim gave shape", (Q, K, V, lambda q, k: softmax(q, k)[0]), {}),
        ("sim gave negative", (Q, K, V, lambda q, k: -softmax(q, k)), {}),
        ("lengths ranges from 1 to 7", (Q, K, V, softmax), {"lengths": torch.tensor([7, 1])}),
        ("lengths has shape", (Q, K, V, softmax), {"lengths": torch.tensor([1])}),
        ("key_lengths with", (Q, K, V, softmax), {"causal": True, "key_lengths": torch.tensor([1, 1])}),
        ("eps", (Q, K, V, softmax), {"eps": -1.0}),
    ],
)
def test_wrong_arguments_are_named(message: str, arguments: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        similarity_attention(*arguments, **options)


def test_a_query_that_nothing_resembles_gets_zeros() -> None:
    q = Q.clone().requires_grad_()
    o = similarity_attention(
        q,
        K,
        V,
        lambda q, k: torch.relu(torch.einsum("bthk,bshk->bhts", q, k)) * 0,
        lengths=torch.tensor([0, 3]),
        eps=0.0,
    )
    o.sum().backward()
    assert (o == 0).all()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
