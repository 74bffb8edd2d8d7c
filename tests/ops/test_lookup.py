"""The gradient of a lookup against torch's, through Triton's interpreter, and its kernel compiled for sm_90."""

import pytest
import torch

from subquad.ops.lookup import lookup
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width", "shape"), [(1, 1, (3,)), (10, 24, (3, 70)), (256, 8, (300,)), (40, 520, (5, 9))]
)
def test_the_gradient_is_that_of_torch(rows: int, width: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(rows, width).to(dtype).requires_grad_()
    ids, grad = torch.randint(rows, shape), torch.randint(-9, 9, (*shape, width)).to(dtype)  # whose sums are exact
    x = lookup(ids, table, impl="triton")
    assert torch.equal(x, lookup(ids, table, impl="torch"))
    (got,) = torch.autograd.grad(x, table, grad)
    want = torch.zeros(rows, width).index_add_(0, ids.flatten(), grad.float().flatten(0, -2)).to(dtype)
    assert torch.equal(got, want)


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    for table, message in ((torch.randn(513, 2), "513"), (torch.randn(5, 2).double(), "float64")):
        with pytest.raises(ValueError, match=message):
            lookup(torch.arange(5), table.requires_grad_(), impl="triton")


@compiled
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiles_for_hopper(dtype: str) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import lookup_triton as kernels

    constants = {"V": 256, "BV": 256, "BD": 32, "BT": 64, "P": 66, "SPLIT": dtype == "fp32", "DOT": tl.bfloat16}
    types = {"ids": "*i64", "dx": f"*{dtype}", "parts": "*fp32"}
    names = kernels.gradients.arg_names
    constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernels.gradients, signature=signature, constexprs=constexprs)
    options = {"num_warps": kernels.WARPS}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
