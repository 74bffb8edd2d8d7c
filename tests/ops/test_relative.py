"""Attention with scores that depend on the distance: through Triton's interpreter against the plain torch expression,
and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.ops.relative import relative_attention
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from subquad.ops import relative_triton
from subquad.ops.relative_triton import CONFIGS, Config

# memory that nothing wrote, which the kernels read and do not use, may hold infinities
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(CONFIGS):
        monkeypatch.setitem(CONFIGS, key, Config(16, 4, 1, 1, 255, 0))


def draw(B: int, T: int, S: int, H: int, D: int, span: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, T, H, D), (B, S, H, D), (B, S, H, D), (span + 1, H, D), (H, D), (H, D)
    return [torch.randn(shape) for shape in shapes]


def results(parts: list[Tensor], grad: Tensor, seen: Tensor, **how: Any) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in parts]
    q, k, v, r, u, w = given
    o = relative_attention(q, k, v, r, u, w, **how) * seen[..., None, None].to(q.dtype)
    return [o.detach(), *torch.autograd.grad(o, given, grad.to(o.dtype))]


CASES = [
    (1, 40, 40, 2, 8, 20, 0, 0, None),
    (2, 37, 37, 3, 5, 7, 0, 0, ((0, 0), (37, 11))),
    (2, 37, 37, 1, 16, 7, 9, 0, ((0, 0), (30, 1))),  # both ways
    (2, 20, 32, 2, 8, 12, 0, 12, ((12, 3), (32, 32))),  # after a state
    (1, 1, 1, 1, 8, 5, 5, 0, None),
    (1, 5, 5, 2, 8, 500, 0, 0, None),  # a longer memory than there are keys
    (1, 50, 50, 2, 8, 0, 3, 0, None),
]


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: tuple[Any, ...]) -> None:
    B, T, S, H, D, before, after, offset, limits = case
    ends = None if limits is None else tuple(map(torch.tensor, limits))
    first, last = (torch.zeros(B), torch.full((B,), S)) if ends is None else ends
    i = torch.arange(T) + offset
    # queries that see no key may give anything
    seen = torch.maximum(i - before, first[:, None]) < torch.minimum(i + after + 1, last[:, None])
    parts, grad = draw(B, T, S, H, D, before + after), torch.randn(B, T, H, D)
    how = {"before": before, "offset": offset, "ends": ends}
    wanted = results([part.double() for part in parts], grad, seen, impl="torch", **how)
    for name, got, exact in zip("oqkvruw", results(parts, grad, seen, impl="triton", **how), wanted, strict=True):
        assert (got - exact).norm() <= 1e-5 * exact.norm() + 1e-6, name


@interpreted
def test_what_the_kernels_cannot_do_is_refused() -> None:
    q, k, v, r, u, w = draw(1, 4, 4, 1, 8, 3)
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        relative_attention(q, k, v, r, u, w, before=3, dropout=0.1, impl="triton")
    with pytest.raises(ValueError, match="float64"):
        relative_attention(*(x.double() for x in (q, k, v, r, u, w)), before=3, impl="triton")


@outside
def test_arguments_that_do_not_fit_are_refused() -> None:
    q, k, v, r, u, w = draw(1, 4, 4, 1, 8, 3)
    for change, message in (({"before": 4}, "before=4"), ({"before": 3, "offset": 4}, "offset=4")):
        with pytest.raises(ValueError, match=message):
            relative_attention(q, k, v, r, u, w, **change)
    with pytest.raises(ValueError, match="r must be"):
        relative_attention(q, k, v, r[..., :3], u, w, before=3)


@outside
def test_scratch_does_not_grow_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_triton, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(relative_triton, "shared_memory", lambda _: 227 * 1024)
    sizes = []
    for T in (2**14, 2**20):
        q = torch.empty(1, T, 8, 64, dtype=torch.bfloat16, device="meta")
        r = torch.empty(513, 8, 64, dtype=torch.bfloat16, device="meta")
        call = relative_triton.Call(q, q, q, r, r[0], r[0], None, None, 512, 0, 0.125)
        sizes.append([(call.programs(name), call.width(name)) for name in ("forward", "queries")])
    assert sizes[0] == sizes[1]


@outside
def test_a_gpu_with_less_shared_memory_takes_smaller_tiles() -> None:
    for kernel in ("forward", "queries", "keys"):
        for size in (128, 256, 512):
            tiles = [relative_triton.fitting(CONFIGS[kernel, size], n * 1024).tile for n in (227, 99, 64, 48)]
            assert tiles[0] == CONFIGS[kernel, size].tile
            assert tiles == sorted(tiles, reverse=True)
            assert tiles[-1] >= 16


KINDS = {
    **dict.fromkeys(("q", "k", "v", "r", "u", "w", "o", "do", "qus", "qws", "dq", "dk", "dv", "scratch"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "sums", "dr"), "*fp32"),
    **dict.fromkeys(("first", "last"), "*i64"),
}


@compiled
@pytest.mark.parametrize("name", ["forward", "queries", "keys"])
def test_compiles_for_hopper_on_tensor_cores(name: str) -> None:
    kernel, config = getattr(relative_triton, f"_{name}"), CONFIGS[name, 128]
    constants = {"RANGES": True, "H": 8, "D": 64, "BD": 64, "B": config.tile, "PRECISION": "tf32"}
    names = [p.name for p in kernel.params]
    if "W" in names:
        constants["W"] = 768
    signature = {
        n: "constexpr" if n in constants else KINDS.get(n, "fp32" if n.startswith("scale") else "i32") for n in names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, n in enumerate(names)
        if n in KINDS or n.endswith(("_batch", "_stride", "_head"))
    }
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, aligned)
    options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
    binary = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert binary.metadata.shared <= config.shared
