"""q, k and v side by side, and their gradients."""

import pytest
import torch

from subquad.ops.packed import Apart, beside, joined


def views(whole: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    return [part.view(*part.shape[:2], 2, -1) for part in whole.split_with_sizes(widths, -1)]


def test_gradients_are_made_side_by_side_where_the_inputs_are() -> None:
    parts = views(torch.randn(3, 5, 40), 8, 8, 24)
    grads = beside(*parts)
    assert grads is not None
    assert [g.shape for g in grads] == [p.shape for p in parts]
    for n, grad in enumerate(grads):
        grad.fill_(n)
    whole = joined([g.flatten(2) for g in grads])
    assert whole.data_ptr() == grads[0].data_ptr()
    assert whole.is_contiguous()
    assert whole[2, 3].tolist() == [0.0] * 8 + [1.0] * 8 + [2.0] * 24


def test_others_are_joined_by_a_copy() -> None:
    q, k, v = views(torch.randn(3, 5, 48), 16, 16, 16)
    turned = v.mT.contiguous().mT
    for parts in ((q, k, v.contiguous()), (k, q, v), (q, k), (q[:, 1:], k[:, 1:], v[:, 1:]), (q, k, turned)):
        assert beside(*parts) is None
        flat = [p.flatten(2) for p in parts]
        assert torch.equal(joined(flat), torch.cat(flat, -1))


@pytest.mark.parametrize("copy", [False, True])
def test_the_gradient_of_the_whole_is_that_of_a_split(copy: bool) -> None:
    whole, weights = torch.randn(2, 3, 30, requires_grad=True), torch.randn(2, 3, 30)
    parts = Apart.apply(whole, (10, 10, 10))
    pulls = [w.contiguous() if copy else w for w in weights.split(10, -1)]
    (grad,) = torch.autograd.grad(parts, whole, pulls)
    assert torch.equal(grad, weights)
    (some,) = torch.autograd.grad(Apart.apply(whole, (10, 20))[1].sum(), whole)  # a part that nothing uses
    assert some.sum() == 2 * 3 * 20
