"""The gradient of a small table against its sums in float64, through Triton's interpreter, and compiled for sm_90."""

import pytest
import torch

from subquad.ops.lookup import LARGEST, lookup
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "rows", "width"), [((1,), 1, 1), ((3, 50), 300, 20), ((2, 300), 40, 70)])
def test_values_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], rows: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(rows, shape), torch.randn(rows, width).to(dtype).requires_grad_()
    places = torch.randn(shape[-1], width).to(dtype).requires_grad_()
    assert torch.equal(lookup(ids, table, impl="triton"), table[ids])
    y = lookup(ids, table, places, impl="triton")
    assert torch.equal(y, table[ids] + places)
    for grad in (
        torch.randn(*shape, width),
        torch.randn(width, *shape).movedim(0, -1),
        torch.randn(()).expand(y.shape),
    ):
        got = torch.autograd.grad(y, (table, places), grad.to(dtype), retain_graph=True)
        given = grad.to(dtype).double()
        of_table = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids.flatten(), given.flatten(0, -2))
        for ours, exact in zip(got, (of_table, given.reshape(-1, *places.shape).sum(0)), strict=True):
            assert ours.dtype == dtype
            assert (ours - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max() + 1e-6


@interpreted
def test_places_may_come_beside_the_rows() -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(40, (2, 50)), torch.randn(40, 20, requires_grad=True)
    places = torch.randn(50, 7, requires_grad=True)
    y = lookup(ids, table, places, beside=True, impl="triton")
    plain = lookup(ids, table, places, beside=True, impl="torch")
    assert torch.equal(y, plain)
    assert torch.equal(y[1], torch.cat((table[ids[1]], places), -1))
    grad = torch.randn(y.shape)
    for ours, theirs in zip(*(torch.autograd.grad(x, (table, places), grad) for x in (y, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@interpreted
def test_only_what_is_asked_for_has_a_gradient() -> None:
    ids, table, places = torch.randint(4, (2, 5)), torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    lookup(ids, table, places, impl="triton").sum().backward()
    assert torch.equal(places.grad, torch.full((5, 3), 2.0))


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    ids, table = torch.zeros(2, dtype=torch.int64), torch.ones(4, 3, requires_grad=True)
    for given, rows, message in ((ids, table.double(), "float64"), (ids[:0], table, "no elements")):
        with pytest.raises(ValueError, match=message):
            lookup(given, rows, impl="triton")
    with pytest.raises(ValueError, match="places are"):
        lookup(ids, table, torch.ones(2, 3).half(), impl="triton")
    with pytest.raises(ValueError, match=f"at most {LARGEST}"):
        lookup(ids, torch.ones(LARGEST + 1, 1, requires_grad=True), impl="triton")


@outside
def test_on_a_cpu_it_is_that_of_torch() -> None:
    ids, table = torch.randint(4, (9,)), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda table: lookup(ids, table), (table,))


@compiled
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_compiles_for_hopper(dtype: str) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import lookup_triton as kernels

    split = dtype == "fp32"
    sums = {"BM": kernels.TOKENS, "BV": kernels.ROWS, "BD": kernels.COLUMNS, "P": 66, "SPLIT": split}
    sums["DOT"] = tl.bfloat16 if split else tl.float16
    types = {"ids": "*i64", "parts": "*fp32"} | dict.fromkeys(("g", "table", "places", "y"), f"*{dtype}")
    how = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    for kernel, constants, options in (
        (kernels.sum_by_id, sums, how),
        (kernels.gather, {"BM": 16, "BD": 128, "ADD": True}, {"debug": True}),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
