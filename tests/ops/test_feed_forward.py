"""The feed-forward in one pass against its parts in float64, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import Transformer
from subquad.models import blocks
from subquad.ops.feed_forward import Mixed, feed_forward, pays
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")
OPTIONS = list(itertools.product(("relu", "gelu"), ("layer", "rms"), (False, True)))


def draw(rows: int, width: int, inner: int, norm: str) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(rows, width), torch.randn(inner, width) / 8, torch.randn(width, inner) / 16
    vectors = [torch.randn(inner), torch.randn(width), torch.randn(width) + 1, torch.randn(width)]
    parts = [x, w1, vectors[0], w2, vectors[1], vectors[2], vectors[3] if norm == "layer" else None]
    return [None if part is None else part.to(torch.float16) for part in parts]


def mix(rows: int, width: int, norm: str, pre: bool) -> Mixed:
    o, weight = torch.randn(rows, width), torch.randn(width, width) / 8
    vectors = [torch.randn(width), torch.randn(width) + 1, torch.randn(width)]
    o, weight, bias, gain, shift = (part.to(torch.float16) for part in (o, weight, *vectors))
    return Mixed(o, weight, bias, None if pre else gain, shift if norm == "layer" and not pre else None)


def definition(parts: list[Tensor | None], activation: str, norm: str, pre: bool, mixed: Mixed | None = None) -> Tensor:
    x, w1, b1, w2, b2, g, c = (None if part is None else part.double() for part in parts)
    if mixed is not None:
        o, w0, b0, g0, c0 = (None if part is None else part.double() for part in mixed)
        assert o is not None
        assert w0 is not None
        x = x + F.linear(o, w0, b0)
        if g0 is not None:
            like = x.shape[-1:]
            x = F.layer_norm(x, like, g0, c0, 1e-5) if norm == "layer" else F.rms_norm(x, like, g0, 1e-5)
    assert x is not None
    assert w1 is not None
    assert w2 is not None

    def normed(h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], g, c, 1e-5) if norm == "layer" else F.rms_norm(h, h.shape[-1:], g, 1e-5)

    h = F.linear(normed(x) if pre else x, w1, b1)
    y = x + F.linear(F.relu(h) if activation == "relu" else F.gelu(h), w2, b2)
    return y if pre else normed(y)


@interpreted
@pytest.mark.parametrize(("activation", "norm", "pre"), OPTIONS)
def test_the_kernel_is_the_definition(activation: Any, norm: Any, pre: bool) -> None:
    parts = draw(150, 64, 128, norm)
    how: dict[str, Any] = {"eps": 1e-5, "activation": activation, "norm": norm, "pre": pre}
    wanted = definition(parts, activation, norm, pre)
    fused, plain = (feed_forward(*parts, **how, impl=impl).double() for impl in ("triton", "torch"))
    assert (fused - wanted).abs().max() <= 2 * (plain - wanted).abs().max()


@interpreted
@pytest.mark.parametrize(("activation", "norm", "pre"), OPTIONS[::3])
def test_the_output_layer_of_a_mixer_comes_first(activation: Any, norm: Any, pre: bool) -> None:
    parts, mixed = draw(150, 64, 64, norm), mix(150, 64, norm, pre)
    how: dict[str, Any] = {"activation": activation, "norm": norm, "pre": pre, "mixed": mixed}
    wanted = definition(parts, **how)
    fused, plain = (feed_forward(*parts, **how, eps=1e-5, impl=impl).double() for impl in ("triton", "torch"))
    assert (fused - wanted).abs().max() <= 2 * (plain - wanted).abs().max()


@interpreted
def test_stages_are_those_for_which_a_gpu_has_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops import feed_forward_triton as kernels

    plans: list[Any] = []
    monkeypatch.setattr(kernels, "launch", lambda _kernel, _tensors, plan: plans.append(plan))
    for size in (227, 163, 99):
        monkeypatch.setattr(kernels, "shared_memory", lambda _, size=size: size * 1024)
        feed_forward(*draw(20, 256, 64, "layer"), eps=1e-5, impl="triton")
    assert [plan.stages for plan in plans] == [3, 2, 1]


@interpreted
def test_the_operator_is_well_formed_and_refuses_what_it_cannot_do() -> None:
    parts = draw(3, 64, 64, "layer")
    args = (*parts, *mix(3, 64, "layer", False), 1e-5, "relu", "layer", False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.feed_forward.default, args, test_utils=tests)
    for wrong, message in ((draw(3, 48, 64, "layer"), "widths 48"), ([p.float() for p in parts], "float32")):
        with pytest.raises(ValueError, match=message):
            feed_forward(*wrong, eps=1e-5, impl="triton")


@outside
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_block_hands_over_its_own_weights(norm: Any, norm_position: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    how = {"norm": norm, "norm_position": norm_position, "activation": "gelu"}
    model = Transformer(dim=16, depth=2, heads=2, mechanism="linear", causal=True, **how).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) / 10)
    x, state = torch.randn(3, 16), model.init_state(3)
    assert not pays(x, model.blocks[0].ff.inner.weight)
    calls = []
    with torch.no_grad():
        wanted, _ = model.step(x, state)
        monkeypatch.setattr(blocks, "pays", lambda *_: calls.append(1) or True)  # type: ignore[func-returns-value]
        torch.testing.assert_close(model.step(x, state)[0], wanted)
    assert len(calls) == 2


@compiled
@pytest.mark.parametrize("width", [64, 256])
def test_compiles_for_hopper(width: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import feed_forward_triton

    kernels, fn = feed_forward_triton, feed_forward_triton.block
    rows, warps = kernels.FEW if width == 64 else kernels.MANY
    constants = {
        "D": width, "F": 4 * width, "BM": rows, "BF": kernels.INNER, "GELU": width == 64, "RMS": False,
        "BIAS": True, "PRE": width == 64, "MIX": True, "AFTER": width == 256, "DOT": tl.bfloat16,
    }  # fmt: skip
    signature, constexprs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = {"eps": "fp32", "R": "i32"}.get(name, "*bf16")
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs)
    options = {"num_warps": warps, "num_stages": kernels.STAGES}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= kernels.STAGES * 2 * kernels.INNER * width * 2  # as `feed_forward` computes it
