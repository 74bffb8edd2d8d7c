"""The kernel of rotary positions against the torch path, through Triton's interpreter, and compiled for sm_90."""

import pytest
import torch
from torch import Tensor

from subquad.ops.rotary import Turns, turned, turned_qkv, turns
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_of(rows: int | None, tokens: int, width: int) -> Turns:
    positions = torch.arange(7, 7 + tokens)
    return turns(positions if rows is None else positions + 100 * torch.arange(rows)[:, None], width)


@interpreted
@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 6), (2, 64)])
@pytest.mark.parametrize("tile", [16, 2048])
def test_turned_is_that_of_torch(
    heads: int, width: int, rows: int | None, way: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subquad.ops.rotary_triton.TILE", tile)
    by = by_of(rows, 5, width)
    x = draw(2, 5, heads, 2 * width)[..., width:].requires_grad_()  # a part of a wider tensor
    grad = draw(2, heads, 5, width).transpose(1, 2)
    got, want = (turned(x, by, way, impl=impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(want, x, grad))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "keys", "values"), [(1, 2, 1), (3, 6, 5), (2, 16, 64)])
def test_queries_keys_and_values_are_those_of_torch(
    heads: int, keys: int, values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subquad.ops.rotary_triton.TILE", 64)
    by, total = by_of(None, 9, keys), heads * (2 * keys + values)
    qkv = draw(2, 9, total, dtype=dtype).requires_grad_()
    dq, dk = draw(2, 9, heads, keys, dtype=dtype), draw(2, heads, 9, keys, dtype=dtype).transpose(1, 2)
    grads = dq, dk, draw(2, 9, heads, 1, dtype=dtype).expand(2, 9, heads, values)
    results = []
    for impl in ("triton", "torch"):
        parts = turned_qkv(qkv, by, heads, heads * keys, impl=impl)
        results.append([*parts, *torch.autograd.grad(parts, qkv, grads)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want)


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        turned(draw(1, 2, 1, 4).double(), by_of(None, 2, 4), impl="triton")


@compiled
@pytest.mark.parametrize("rows", [False, True])
def test_compiles_for_hopper(rows: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import rotary_triton as kernels

    constants = {"H": 12, "HALF": 32, "W": 32, "V": 64, "VW": 64, "BM": 64, "ROWS": rows, "WAY": -1}
    signature, constexprs = {}, {}
    for i, name in enumerate(kernels.turn.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name in ("cos", "sin"):
            signature[name] = "*fp32"
        else:
            signature[name] = "*bf16" if name in ("q", "k", "v", "yq", "yk", "yv") else "i32"
    source = ASTSource(fn=kernels.turn, signature=signature, constexprs=constexprs)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS}).asm["cubin"]
