"""The kernels of `convolve` against its torch path, through Triton's interpreter."""

import pytest
import torch

from subquad.ops.convolve import convolve
from tests.ops.own_process import interpreted

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize(("length", "values", "width"), [(40, 16, 5), (33, 20, 33), (7, 8, 1), (50, 40, 7)])
def test_values_and_gradients_are_those_of_torch(
    length: int, values: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import convolve_triton

    monkeypatch.setattr(convolve_triton, "CHUNK", 16)
    monkeypatch.setattr(convolve_triton, "PROGRAMS", 6)
    torch.manual_seed(0)
    v, kernel = torch.randn(2, length, 2, 3, values)[:, :, 0].requires_grad_(), torch.randn(3, width).requires_grad_()
    ours, theirs = (convolve(v, kernel, impl=impl) for impl in ("triton", "torch"))
    weight = torch.randn_like(ours)
    got, want = (torch.autograd.grad(o, (v, kernel), weight) for o in (ours, theirs))
    for a, b in zip((ours, *got), (theirs, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@interpreted
def test_the_operator_is_well_formed() -> None:
    v, kernel = torch.randn(1, 9, 2, 16, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.subquad.convolve.default, (v, kernel))


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    v, kernel = torch.randn(1, 9, 2, 16), torch.randn(2, 3)
    for values, message in ((v.double(), "float64"), (v[:, :0], "no elements")):
        with pytest.raises(ValueError, match=message):
            convolve(values, kernel, impl="triton")
