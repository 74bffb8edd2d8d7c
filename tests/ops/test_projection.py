"""A linear layer for training against torch's. Nothing of it is interpreted but the sums, which have their own test."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.ops import projection as module
from subquad.ops.projection import project, projection
from tests.ops.own_process import interpreted, outside

pytest.importorskip("triton")


def results(parts: list[Tensor], grad: Tensor, **how: Any) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in parts]
    y = projection(*given, **how)
    return [y.detach(), *torch.autograd.grad(y, given, grad.to(y.dtype))]


@interpreted
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("shape", [(2, 21, 12), (1, 12), (12,)])
def test_it_has_no_more_error_than_torch(shape: tuple[int, ...], autocast: bool) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size) for size in (shape, (40, 12), (40,))]
    parts = parts if autocast else [part.half() for part in parts]
    grad = torch.randn(40, *shape[:-1]).half().movedim(0, -1)  # as kernels of attention give it
    exact = results([part.double() for part in parts], grad.double(), impl="torch")
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        ours, theirs = (results(parts, grad, impl=impl) for impl in ("triton", "torch"))
    assert torch.equal(ours[0], theirs[0])
    for a, b, want in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - want).norm() <= 1.05 * (b - want).norm() + 1e-6


@interpreted
def test_only_what_is_asked_for_has_a_gradient() -> None:
    parts = [torch.randn(shape).half() for shape in ((5, 4), (3, 4), (3,))]
    for one in range(3):
        given = [part.clone().requires_grad_(n == one) for n, part in enumerate(parts)]
        projection(*given, impl="triton").sum().backward()
        assert [part.grad is not None for part in given] == [n == one for n in range(3)]


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    with pytest.raises(ValueError, match="16-bit"):
        projection(x, weight, bias, impl="triton")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="float64"):
        projection(x.double(), weight.double(), bias.double(), impl="triton")
    with pytest.raises(ValueError, match="the weights are"):
        projection(x.half(), weight, bias, impl="triton")


@outside
def test_it_replaces_layers_that_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    class OnGPU:
        """What is asked of an input on a GPU."""

        device, dtype = torch.device("cuda"), torch.bfloat16

        def numel(self) -> int:
            return 1

    monkeypatch.setattr(module, "autocasts", lambda _: False)
    x: Any = OnGPU()
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    assert module.replaces(x, layer, layer)
    assert not module.replaces(x, nn.Linear(4, 3))
    assert not module.replaces(x, layer, nn.Linear(4, 3, bias=False, dtype=torch.bfloat16))
    assert not module.replaces(x, Other(4, 3, dtype=torch.bfloat16))
    with torch.no_grad():
        assert not module.replaces(x, layer)
    for watch in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(layer, watch)(lambda *_: None)
        assert not module.replaces(x, layer)
        handle.remove()
    layer.forward = nn.Identity().forward  # type: ignore[method-assign]
    assert not module.replaces(x, layer)
    del layer.forward
    assert module.replaces(x, layer)
    assert not module.replaces(torch.ones(2, 4).bfloat16(), layer)


@outside
def test_a_layer_that_it_does_not_replace_is_called() -> None:
    layer, seen = nn.Linear(4, 3), []
    layer.register_forward_hook(lambda *given: seen.append(given))
    x = torch.randn(2, 4)
    assert torch.equal(project(x, layer), F.linear(x, layer.weight, layer.bias))
    assert seen
