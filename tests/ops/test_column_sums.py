"""Sums of columns against those in float64, through Triton's interpreter, and compiled for sm_90."""

import pytest
import torch

from subquad.ops.column_sums import column_sums
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (7, 33), (64, 16), (65, 100), (500, 1), (200, 33)])
def test_they_are_exact_to_rounding(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import column_sums_triton as kernels

    for name, size in (("TILE", 256), ("COLUMNS", 16), ("FEW", 64), ("NARROW", 8), ("PROGRAMS", 16)):
        monkeypatch.setattr(kernels, name, size)
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    for given in (x, x.mT.contiguous().mT, torch.cat((x, x + 1), 1)[:, : shape[1]], x[:1].expand(shape)):
        for kind in (torch.float32, dtype):
            got, exact = column_sums(given, kind, impl="triton"), given.double().sum(0)
            assert got.dtype == kind
            rounding = torch.finfo(kind).eps * exact.abs() + 1e-6 * given.double().abs().sum(0)
            assert ((got - exact).abs() <= rounding).all()
            assert torch.equal(got, column_sums(given, kind, impl="triton"))


@outside
def test_on_a_cpu_they_are_those_of_torch() -> None:
    x = torch.randn(9, 5).bfloat16()
    assert torch.equal(column_sums(x, torch.float32), x.sum(0, dtype=torch.float32))


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    for x, message in ((torch.ones(2, 3).double(), "float64"), (torch.ones(0, 3), "no elements")):
        with pytest.raises(ValueError, match=message):
            column_sums(x, torch.float32, impl="triton")


@compiled
@pytest.mark.parametrize(("columns", "given", "made"), [(128, "*bf16", "*fp32"), (8, "*fp32", "*bf16")])
def test_compiles_for_hopper(columns: int, given: str, made: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import column_sums_triton as kernels

    constants = {"BM": kernels.TILE // columns, "BN": columns, "P": 264}
    names = kernels.add_rows.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names} | {"x": given, "y": made}
    constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(fn=kernels.add_rows, signature=signature, constexprs=constexprs)
    options = {"num_warps": kernels.WARPS}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
