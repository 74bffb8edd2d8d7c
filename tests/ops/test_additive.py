"""Additive attention in Triton: through the interpreter against the plain torch expression, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.ops.additive import additive_attention
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from subquad.ops import additive_triton


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and pieces so small that a short sequence has several."""
    sizes = {"QUERIES": 16, "KEYS": 32, "UNITS": 16, "POSITIONS": 16, "OTHERS": 16, "ROWS": 32}
    for name, size in {**sizes, "TILES": 2, "HELD": 2**14}.items():
        monkeypatch.setattr(additive_triton, name, size)


def results(parts: list[Tensor], counts: Tensor, grad: Tensor, **how: Any) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in parts]
    q, k, v, score = given
    o = additive_attention(q, k, v, counts, score, **how)
    return [o.detach(), *torch.autograd.grad(o, given, grad.to(o.dtype))]


def agree(T: int, S: int, H: int, U: int, V: int, counts: Tensor, size: float = 1.0) -> None:
    torch.manual_seed(0)
    B = len(counts)
    parts = [size * torch.randn(B, T, H, U), size * torch.randn(B, S, H, U), torch.randn(B, S, H, V), torch.randn(H, U)]
    grad = torch.randn(B, T, H, V)
    wanted = results([part.double() for part in parts], counts, grad, impl="torch")
    for name, got, exact in zip("oqkvs", results(parts, counts, grad, impl="triton"), wanted, strict=True):
        assert (got - exact).norm() <= 2e-5 * exact.norm(), name


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [(1, 20, 2, 8, 8), (2, 70, 2, 20, 7)], ids=str)
def test_causal(case: tuple[int, ...]) -> None:
    B, T, H, U, V = case
    agree(T, T, H, U, V, torch.arange(1, T + 1).expand(B, T))


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_rows_of_other_lengths_and_a_query_after_a_cache() -> None:
    agree(33, 50, 1, 3, 16, torch.tensor([[50], [11]]).expand(2, 33))
    agree(1, 9, 1, 1, 4, torch.tensor([[4]]))


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_queries_see_numbers_of_keys_in_any_order() -> None:
    torch.manual_seed(3)
    agree(70, 90, 2, 12, 5, torch.randint(1, 91, (2, 70)))
    agree(100, 40, 1, 4, 4, torch.randint(1, 41, (2, 100)))


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_nothing_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, real=real, **how: real(*size, **how).fill_(torch.nan))
    torch.manual_seed(4)
    agree(70, 70, 1, 4, 4, torch.arange(1, 71).expand(1, 70))
    agree(70, 90, 2, 4, 4, torch.randint(1, 80, (2, 70)))
    agree(70, 90, 1, 4, 4, torch.arange(80, 10, -1).expand(1, 70))


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [8.0, 100.0])
def test_exponents_that_overflow_are_added_before(size: float) -> None:
    T = 40
    agree(T, T, 1, 20, 4, torch.arange(1, T + 1).expand(1, T), size)


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_only_the_counted_keys_are_read() -> None:
    torch.manual_seed(0)
    q, k, v, score = torch.randn(1, 5, 1, 4), torch.randn(1, 40, 1, 4), torch.randn(1, 40, 1, 4), torch.randn(1, 4)
    counts = torch.full((1, 5), 7)
    want = additive_attention(q, k, v, counts, score, impl="triton")
    v[:, 7:] = 1e30
    torch.testing.assert_close(additive_attention(q, k, v, counts, score, impl="triton"), want)


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_a_gpu_with_less_shared_memory_takes_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_triton, "shared_memory", lambda _: 64 * 1024)
    monkeypatch.setattr(additive_triton, "QUERIES", 32)
    x, counts = torch.empty(1, 4, 1, 100), torch.full((1, 4), 4)
    assert additive_triton.Call(x, x, x, counts, x[0, 0]).tile == {"BM": 16, "BN": 16}
    agree(40, 40, 1, 8, 100, torch.arange(1, 41).expand(1, 40))


@interpreted
def test_what_the_kernels_cannot_do_is_refused() -> None:
    x, counts = torch.randn(1, 4, 1, 4), torch.full((1, 4), 4)
    for how, message in (({"dropout": 0.1}, "dropout=0.1"), ({}, "float64")):
        parts = [part if how else part.double() for part in (x, x, x)]
        with pytest.raises(ValueError, match=message):
            additive_attention(parts[0], parts[1], parts[2], counts, x[0, 0], impl="triton", **how)


@outside
def test_shapes_that_do_not_fit_are_refused() -> None:
    x, counts = torch.randn(1, 4, 2, 4), torch.full((1, 4), 4)
    for k, score, n in ((x[:, :, :1], x[0, 0], counts), (x, x[0, 0, :, :3], counts), (x, x[0, 0], counts[:, :3])):
        with pytest.raises(ValueError, match="accepted are"):
            additive_attention(x, k, x, n, score)


KINDS = {
    **dict.fromkeys(("q", "k", "v", "o", "do", "parts"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "score", "eq", "ek", "large_q", "large_k"), "*fp32"),
    **dict.fromkeys(("ds", "dq", "dk", "dv", "shares"), "*fp32"),
    "counts": "*i32",
    "zero": "fp32",
}


@compiled
@pytest.mark.parametrize("V", [64, 256])
@pytest.mark.parametrize("name", ["forward", "pairs", "units", "queries"])
def test_compiles_for_hopper_and_elements_share_a_reciprocal(name: str, V: int) -> None:
    kernel, x = getattr(additive_triton, f"_{name}"), torch.empty(1, 1, 1, V, device="meta")
    warps, stages, registers = additive_triton.Call(x, x, x, x, x).launches(name)
    constants: dict[str, Any] = {"BX": 16, "ROWS": 256, "BU": 64, "BP": 16, "BQ": 8, "BT": 16}
    constants |= {"H": 8, "V": V, "BV": V, "BM": 64, "BN": 64, "FAST": True, "PRECISION": "tf32"}
    names = [p.name for p in kernel.params]
    constants = {n: value for n, value in constants.items() if n in names}
    signature = {n: "constexpr" if n in constants else KINDS.get(n, "i32") for n in names}
    whole = ("wide_q", "wide_k")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, n in enumerate(names)
        if KINDS.get(n, "")[:1] == "*" or n in whole or n.endswith(("_batch", "_stride", "_head"))
    }
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    binary = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert binary.metadata.shared <= additive_triton.SHARED
    reciprocals = {"forward": 64 * 64, "pairs": 64 * 64, "units": 2 * 16 * 64, "queries": 0}  # of a round
    assert binary.asm["ptx"].count("rcp.approx.ftz.f32") == reciprocals[name] // (32 * warps)
