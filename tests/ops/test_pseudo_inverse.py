"""The kernels of `pseudo_inverse` against its torch path, through Triton's interpreter."""

import pytest
import torch

from subquad.ops.pseudo_inverse import pseudo_inverse
from tests.ops.own_process import interpreted

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize("size", [16, 21])
def test_values_and_gradients_are_those_of_torch(size: int) -> None:
    torch.manual_seed(0)
    scores = (3 * torch.randn(2, 3, size, size)).requires_grad_()
    weight = torch.randn(2, 3, size, size)
    found = []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float32), ("torch", torch.float64)):
        z = pseudo_inverse(scores.to(dtype).softmax(-1), 6, impl=impl)
        found.append((z, *torch.autograd.grad((z * weight).sum(), scores)))
    for ours, theirs, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-6 * exact.norm()


@interpreted
def test_the_operator_is_well_formed() -> None:
    a = torch.rand(2, 5, 5).softmax(-1).requires_grad_()
    torch.library.opcheck(torch.ops.subquad.pseudo_inverse.default, (a, a.detach().mT.contiguous(), 2))


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    for a in (torch.rand(2, 65, 65), torch.rand(2, 4, 5), torch.rand(2, 4, 4).double()):
        with pytest.raises(ValueError, match="at most 64 rows"):
            pseudo_inverse(a, 6, impl="triton")
