"""The kernels of the steps of compressed and transformer_xl against their torch paths, through Triton's interpreter.

Interpreted tests need their own process, as in test_linear_triton.
"""

import pytest
import torch

from subquad.ops.slots import Convolution, Slots, slots_step
from subquad.ops.sparse.relative_step import relative_step
from tests.mechanisms.test_steps import OPTIONS, check
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")
B, H = 3, 2


@interpreted
@pytest.mark.parametrize(("width", "stride", "empty"), [(16, 3, True), (20, 1, False), (80, 2, False)])
def test_slots(width: int, stride: int, empty: bool) -> None:
    key, value = (Convolution(torch.randn(H * width, width, stride), torch.randn(H * width)) for _ in range(2))
    nothing = torch.randn(H, width) if empty else None
    states = [Slots(torch.randn(B, 8, H, width), torch.randn(B, stride - 1, H, width)) for _ in range(2)]
    position = torch.tensor([0, stride - 1, 4 * stride])
    for _ in range(3):
        k, v = torch.randn(2, B, H, width)
        mine, plain = ([Slots(*(t.clone() for t in s)) for s in states] for _ in range(2))
        at = position.clone()
        count = slots_step(k, v, mine[0], mine[1], at, key, value, nothing, "triton")
        wanted = slots_step(k, v, plain[0], plain[1], position, key, value, nothing)
        assert torch.equal(at, position)
        assert torch.equal(count, wanted)
        for got, want in zip(mine, plain, strict=True):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        states = mine


@interpreted
@pytest.mark.parametrize(("width", "back"), [(16, 4), (24, 70)])
def test_relative_scores(width: int, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops.sparse import cache_triton

    monkeypatch.setattr(cache_triton, "BLOCK", 1024)
    monkeypatch.setattr(cache_triton, "FEW", 20)
    bias = torch.randn(H, width), torch.randn(H, width), torch.randn(back + 1, H, width)
    keys, values = torch.randn(2, B, back, H, width)
    position = torch.tensor([0, 3, 2 * back + 1])
    for _ in range(3):
        q, k, v = torch.randn(3, B, H, width)
        mine = keys.clone(), values.clone(), position.clone()
        o = relative_step(q, k, v, *mine, bias, 0.3, impl="triton")
        want = relative_step(q, k, v, keys, values, position, bias, 0.3)
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(mine, (keys, values, position), strict=True))


@interpreted
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "mixed"])
def test_steps_equal_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cache", "slots", "sparse.cache", "sparse.relative_step"):
        monkeypatch.setattr(f"subquad.ops.{module}.choose", always_triton)
    check(name, inplace=True, tolerance=2e-5)


def always_triton(impl: str, op: str, x: torch.Tensor, reason: str | None = None) -> str:
    assert reason is None, op
    return "triton"


@compiled
@pytest.mark.parametrize("empty", [False, True])
def test_slots_compile_for_hopper(empty: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.slots_triton import step

    constants = {"S": 3, "K": 64, "BK": 64, "BO": 64, "EMPTY": empty, "TURN": empty, "MOVES": True, "EARLY": True}
    pointers = "k v keys last_k values last_v key_weight key_bias value_weight value_bias nothing"
    types = dict.fromkeys(pointers.split(), "*bf16") | {"position": "*i64", "count": "*i64"}
    types |= {"cos": "*fp32", "sin": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in step.arg_names}
    constexprs = {(step.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=step, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 99 * 1024
