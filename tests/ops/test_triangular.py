import pytest
import torch

from subquad.ops import triangular
from subquad.ops.triangular import triangular_product


@pytest.mark.parametrize("size", [1, 7, 8, 30])
def test_blocks_are_the_product_with_the_triangle(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular, "ROWS", 8)
    weight, x = torch.randn(size, size, dtype=torch.float64), torch.randn(2, size, 3, dtype=torch.float64)
    given = weight.requires_grad_(), x.requires_grad_()
    y, want = triangular_product(*given), torch.einsum("ts,bsd->btd", weight.tril(), x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, given, grad), torch.autograd.grad(want, given, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_only_what_needs_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular, "ROWS", 8)
    weight, x = torch.randn(20, 20), torch.randn(1, 20, 3, requires_grad=True)
    triangular_product(weight, x).sum().backward()
    assert x.grad is not None


def test_the_upper_half_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular, "ROWS", 8)
    weight = torch.randn(20, 20).tril() + torch.full((20, 20), torch.nan).triu(1)
    assert bool(triangular_product(weight, torch.randn(1, 20, 3)).isfinite().all())
