from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops import dense
from subquad.ops.dense import dense_attention


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEYS = torch.arange(11) < torch.tensor([11, 4])[:, None]
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "keys": {"mask": KEYS[:, None, None]},
    "pairs": {"mask": (torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.5) | (KEYS[0] < 1)},
}


def inputs() -> list[Tensor]:
    return [tokens(2, 11, 3, 4, seed=seed).requires_grad_() for seed in range(3)]


@pytest.mark.parametrize("seen", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_pieces_are_the_whole(seen: str, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout so rare that it drops nothing, pieces of three queries equal torch's attention."""
    given, (q, k, v) = MASKS[seen], inputs()
    monkeypatch.setattr(dense, "PAIRS", 3 * 2 * 3 * 11)
    got = dense_attention(q, k, v, scale=scale, dropout=1e-12, **given)
    mask, causal = given.get("mask"), given.get("causal", False)
    first, second, third = (t.transpose(1, 2) for t in (q, k, v))
    want = F.scaled_dot_product_attention(first, second, third, mask, is_causal=causal, scale=scale)
    torch.testing.assert_close(got, want.transpose(1, 2))
    torch.testing.assert_close(dense_attention(q, k, v, scale=scale, **given), want.transpose(1, 2))
    direction = tokens(*got.shape, seed=9)
    grads = [torch.autograd.grad((y * direction).sum(), (q, k, v)) for y in (got, want.transpose(1, 2))]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_backward_drops_what_forward_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear in v with the weights of this draw: y·g = v·(gradient of v)."""
    monkeypatch.setattr(dense, "PAIRS", 3 * 2 * 3 * 11)
    q, k, v = inputs()
    y = dense_attention(q, k, v, dropout=0.5)
    torch.rand(5)  # the generator moves on before backward
    direction = tokens(*y.shape, seed=9)
    (grad,) = torch.autograd.grad((y * direction).sum(), v)
    torch.testing.assert_close((y * direction).sum(), (v * grad).sum())


def test_dropout_keeps_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PAIRS", 3 * 2 * 3 * 11)
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in inputs())
    want = dense_attention(q, k, v, causal=True)
    many = torch.stack([dense_attention(q, k, v, causal=True, dropout=0.5) for _ in range(400)])
    assert ((many.mean(0) - want).abs() <= 5 * many.std(0) / 20).all()
