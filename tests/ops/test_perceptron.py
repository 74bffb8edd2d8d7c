"""The feed-forward's two products and their kernels, through Triton's interpreter, and compiled for sm_90."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.ops.feed_forward import Activation
from subquad.ops.perceptron import perceptron
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")


def results(parts: list[Tensor], grad: Tensor, **how: Any) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in parts]
    y = perceptron(*given, **how)
    return [y.detach(), *torch.autograd.grad(y, given, grad.to(y.dtype))]


@interpreted
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("activation", "pieces"), [("relu", 1), ("gelu", 1), ("relu", 2), ("gelu", 5)])
def test_it_has_no_more_error_than_torch(
    activation: Activation, pieces: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import perceptron_triton as kernels

    for name, size in (("TILE", 64), ("COLUMNS", 16), ("FLAT", 256)):  # several programs, with several tiles each
        monkeypatch.setattr(kernels, name, size)
    torch.manual_seed(0)
    shapes = (2, 21, 12), (40, 12), (40,), (12, 40), (12,)
    parts = [2 * torch.randn(shape) for shape in shapes]
    parts = parts if autocast else [part.half() for part in parts]
    grad = torch.randn(2, 21, 12).half()  # the interpreter truncates to bfloat16
    exact = results([part.double() for part in parts], grad.double(), activation=activation, impl="torch")
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        ours = results(parts, grad, activation=activation, pieces=pieces, impl="triton")
        theirs = results(parts, grad, activation=activation, impl="torch")
    for a, b, want in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - want).norm() <= 1.2 * (b - want).norm() + 1e-6


@interpreted
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_vector_is_a_row(pieces: int) -> None:
    x, *weights = (torch.randn(shape).half() for shape in ((4,), (16, 4), (16,), (4, 16), (4,)))
    alone = results([x, *weights], x, pieces=pieces, impl="triton")
    row = results([x[None], *weights], x[None], pieces=pieces, impl="triton")
    for a, b in zip(alone, row, strict=True):
        assert torch.equal(a, b.view(a.shape))


@interpreted
def test_pieces_keep_only_what_goes_in_and_a_checkpoint_does_not_compute_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from subquad.ops import perceptron_triton as kernels

    x, *weights = (torch.randn(shape).half().requires_grad_() for shape in ((6, 4), (16, 4), (16,), (4, 16), (4,)))
    calls: list[int] = []
    kept: list[int] = []
    gelu = kernels.gelu

    def counted(h: Tensor) -> Tensor:
        calls.append(len(h))
        return gelu(h)

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    monkeypatch.setattr(kernels, "gelu", counted)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        perceptron(x, *weights, pieces=3, impl="triton")
    assert sorted(kept) == sorted([x.numel(), *(w.numel() for w in weights[:3])])
    assert calls == [2, 2, 2]
    y = checkpoint(lambda x: perceptron(x, *weights, pieces=3, impl="triton"), x, use_reentrant=False)
    y.sum().backward()
    assert calls == [2, 2, 2] * 2


def test_pieces_of_the_torch_path_are_the_whole() -> None:
    parts = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 4), (8, 4), (8,), (4, 8), (4,))]
    grad = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(results(parts, grad, pieces=3), results(parts, grad))


@interpreted
def test_gelu_is_exact_to_rounding() -> None:
    from subquad.ops import perceptron_triton as kernels

    h = torch.cat((torch.linspace(-4, 6, 5001), torch.tensor([0.0, -0.0, 50.0, -50.0]))).half()
    got = kernels.gelu(h).double()
    want = torch.nn.functional.gelu(h.double())
    assert ((got - want).abs() <= want.abs() * 6e-4 + 6e-8).all()
    dh, a, total = kernels.backward(h[None], torch.ones_like(h)[None], relu=False)
    x = h.double().requires_grad_()
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    assert ((dh[0].double() - slope).abs() <= slope.abs() * 6e-4 + 3e-5).all()
    assert torch.equal(a[0].double(), got)
    torch.testing.assert_close(total, dh[0].float())


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    parts = [torch.randn(shape) for shape in ((2, 4), (8, 4), (8,), (4, 8), (4,))]
    with pytest.raises(ValueError, match="16-bit"):
        perceptron(*parts, impl="triton")


@compiled
@pytest.mark.parametrize("relu", [True, False])
def test_compiles_for_hopper(relu: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import perceptron_triton as kernels

    constants = {"BM": kernels.TILE // kernels.COLUMNS, "BN": kernels.COLUMNS, "P": 66, "RELU": relu}
    types = {"R": "i32", "D": "i32", "N": "i32", "parts": "*fp32"}
    for kernel in (kernels.activate, kernels.gradients):
        names = kernel.arg_names
        constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        options = {"num_warps": kernels.FLAT_WARPS if kernel is kernels.activate else kernels.WARPS}
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
