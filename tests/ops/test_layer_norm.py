"""Layer normalisation against its definition in float64, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import Transformer
from subquad.ops import uniform
from subquad.ops.impl import Impl
from subquad.ops.layer_norm import Drop, LayerNorm, Norm, add_norm, layer_norm
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")


def draw(shape: tuple[int, ...], dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    x = size * torch.randn(shape) + size
    weight, bias = torch.randn(shape[-1]) + 1, torch.randn(shape[-1])
    return [x.to(dtype), weight, bias]


def results(parts: list[Tensor], grad: Tensor, **how: Any) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in parts]
    y = layer_norm(*given, **how)
    return [y.detach(), *torch.autograd.grad(y, given, grad.to(y.dtype))]


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 7, 33), (2, 300, 64), (65, 512)])
def test_values_and_gradients_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    parts = draw(shape, torch.float32)
    grad = torch.randn(shape)
    wanted = results([part.double() for part in parts], grad, impl="torch")
    for name, got, exact in zip(("y", "x", "weight", "bias"), results(parts, grad, impl="triton"), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=2e-4 if name == "x" else 2e-5, msg=name)


@interpreted
def test_sixteen_bits_and_large_numbers_lose_no_more_than_torch_does() -> None:
    parts = draw((40, 64), torch.float16, size=1e4)
    grad = torch.randn(40, 64)
    exact = results([part.double() for part in parts], grad, impl="torch")
    ours, theirs = (results(parts, grad, impl=impl) for impl in ("triton", "torch"))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - c).abs().max() <= 1.5 * (b - c).abs().max() + 1e-6


@interpreted
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("post", "added"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_with_a_residual_it_is_that_of_torch(norm: Norm, post: bool, added: bool, out: torch.dtype | None) -> None:
    x, weight, bias = draw((2, 9, 40), torch.float32)
    parts = [x, weight, *([torch.randn(x.shape).bfloat16()] if added else []), *([bias] if norm == "layer" else [])]
    grads = torch.randn(x.shape), torch.randn(x.shape).to(out or torch.float32)

    def run(impl: Impl) -> list[Tensor]:
        given = [part.clone().requires_grad_() for part in parts]
        y, shift = given[2] if added else None, given[-1] if norm == "layer" else None
        both = add_norm(given[0], y, given[1], shift, 1e-5, norm=norm, post=post, out=out, impl=impl)
        assert both[1].dtype == (out or torch.float32)
        return [*both, *torch.autograd.grad(both, given, grads)]

    for got, want in zip(run("triton"), run("torch"), strict=True):
        assert got.dtype == want.dtype
        close = {} if got.dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
        torch.testing.assert_close(got, want, **({"rtol": 1e-4, "atol": 1e-4} | close))


@interpreted
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_drops_what_dropout_with_the_same_seed_drops(post: bool, kind: torch.dtype) -> None:
    x, weight, bias = draw((3, 7, 40), torch.float32)
    parts, drop = [x, torch.randn(x.shape).to(kind), weight, bias], Drop(0.3, torch.tensor([2**40 + 5]))
    grads = torch.randn(x.shape), torch.randn(x.shape)

    def run(impl: Impl) -> list[Tensor]:
        given = [part.clone().requires_grad_() for part in parts]
        both = add_norm(*given, post=post, drop=drop, impl=impl)
        return [*both, *torch.autograd.grad(both, given, grads)]

    close = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for got, want in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(got, want, **close)


@outside
def test_dropout_by_a_seed_keeps_its_share_and_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1000, 64)
    dropped = Drop(0.25, torch.tensor([7])).apply(x)
    monkeypatch.setattr(uniform, "AT_ONCE", 64 * 7)  # in pieces
    assert torch.equal(Drop(0.25, torch.tensor([7])).apply(x), dropped)
    assert set(dropped.unique().tolist()) == {0.0, float(x[0, 0] / 0.75)}
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.01
    assert not torch.equal(dropped, Drop(0.25, torch.tensor([8])).apply(x))
    columns, rows = (dropped == 0).float().mean(0), (dropped == 0).float().mean(1)
    assert (columns - 0.25).abs().max() < 0.08
    assert (rows - 0.25).abs().max() < 0.3


@interpreted
@pytest.mark.parametrize("read", ["sum", "norm"])
def test_one_of_its_results_may_have_no_gradient(read: str) -> None:
    x, weight, bias = draw((5, 16), torch.float32)
    added, grads = torch.randn(5, 16, requires_grad=True), []
    for impl in ("triton", "torch"):
        x = x.clone().requires_grad_()
        result = add_norm(x, added, weight, bias, impl=impl)[read == "norm"]
        grads.append(torch.autograd.grad(result, (x, added), torch.ones_like(result).cumsum(-1)))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    for parts, message in ((draw((2, 4097), torch.float32), "4097"), (draw((2, 8), torch.float64), "float64")):
        with pytest.raises(ValueError, match=message):
            layer_norm(*parts, impl="triton")
    with pytest.raises(ValueError, match="no elements"):
        layer_norm(*draw((0, 8), torch.float32), impl="triton")


@outside
def test_a_model_has_it_under_the_names_of_torch() -> None:
    model = Transformer(dim=16, depth=1, heads=2, mechanism="linear")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms
    assert all(isinstance(norm, LayerNorm) for norm in norms)
    assert set(norms[0].state_dict()) == {"weight", "bias"}
    x = torch.randn(3, 16)
    torch.testing.assert_close(norms[0](x), F.layer_norm(x, (16,), norms[0].weight, norms[0].bias))


@compiled
@pytest.mark.parametrize(("width", "dtype"), [(64, "fp32"), (300, "bf16"), (768, "bf16")])
def test_compiles_for_hopper(width: int, dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import layer_norm_triton as kernels

    wide = triton.next_power_of_2(width)
    constants = {"D": width, "W": wide, "BM": kernels.TILE // wide, "P": 528, "ADD": True, "RMS": False, "TWO": False}
    constants |= {"SUM": True, "ADDED": True, "DROP": True}
    types = {"R": "i32", "eps": "fp32", "share": "fp32", "seed": "*i64"} | dict.fromkeys(
        ("mean", "scale", "parts", "s", "ds", "dx", "x"), "*fp32"
    )
    for kernel in (kernels.normalise, kernels.gradients):
        signature, constexprs = {}, {}
        for i, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name], constexprs[(i,)] = "constexpr", constants[name]
            else:
                signature[name] = types.get(name, f"*{dtype}")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
