"""A linear layer of a decoding step against its parts in float64, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import LanguageModel
from subquad.mechanisms import softmax
from subquad.models import fused_step, language_model
from subquad.models.state import map_state
from subquad.ops import row_linear as op
from subquad.ops.cache import cached_attention_step
from subquad.ops.layer_norm import LayerNorm
from subquad.ops.row_linear import Norm, norm_of, row_linear
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")
NORMS = ("none", "layer", "rms")


def draw(rows: int, width: int, columns: int, norm: str, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    torch.manual_seed(0)
    parts = {
        "x": torch.randn(rows, 2 * width)[:, :width],  # a part of something wider
        "weight": torch.randn(columns, width) / width**0.5,
        "bias": torch.randn(columns),
        "residual": torch.randn(rows, columns),
    }
    made: dict[str, Any] = {name: part.to(dtype) for name, part in parts.items()}
    gain, shift = (1 + torch.randn(width) / 4).to(dtype), torch.randn(width).to(dtype)
    made["norm"] = None if norm == "none" else Norm(gain, shift if norm == "layer" else None, 1e-5, norm)
    made["x"] += 3 * (norm == "layer")
    return made


def definition(x: Tensor, weight: Tensor, bias: Any, residual: Any, norm: Norm | None, activation: str) -> Tensor:
    x = x.double()
    if norm is not None and norm.kind == "layer":
        x = F.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
    elif norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm.weight.double(), norm.eps)
    y = F.linear(x, weight.double(), None if bias is None else bias.double())
    y = {"none": lambda y: y, "relu": F.relu, "gelu": F.gelu}[activation](y)
    return y if residual is None else y + residual.double()


@interpreted
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 48, 40), (3, 96, 20), (11, 80, 72), (70, 160, 24)])
def test_the_kernels_are_the_definition(rows: int, width: int, columns: int) -> None:
    for norm, activation in itertools.product(NORMS, ("none", "gelu")):
        parts = draw(rows, width, columns, norm)
        wanted = definition(**parts, activation=activation)
        fused, plain = (row_linear(**parts, activation=activation, impl=impl).double() for impl in ("triton", "torch"))
        assert (fused - wanted).abs().max() <= 2 * (plain - wanted).abs().max()


@interpreted
def test_parts_that_are_not_there_are_not_read() -> None:
    for rows in (2, 9):
        parts = draw(rows, 32, 16, "none") | {"bias": None, "residual": None}
        wanted = definition(**parts, activation="relu")
        assert (row_linear(**parts, activation="relu", impl="triton") - wanted).abs().max() < 1e-2
    parts = draw(2, 32, 16, "layer", torch.float32)
    wanted = definition(**parts, activation="none")
    torch.testing.assert_close(row_linear(**parts, impl="triton").double(), wanted, rtol=1e-5, atol=1e-5)


@interpreted
def test_the_operator_is_well_formed_and_refuses_what_it_cannot_do() -> None:
    parts = draw(2, 32, 16, "layer")
    norm = parts["norm"]
    args = (parts["x"], parts["weight"], parts["bias"], *norm[:3], norm.kind, "gelu", parts["residual"])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.row_linear.default, args, test_utils=tests)
    for wrong, message in (
        (draw(2, 32, 16, "none", torch.float64), "not torch.float64"),
        (draw(9, 32, 16, "none", torch.float32), "for 9 rows, not torch.float32"),
        (parts | {"weight": parts["weight"].requires_grad_()}, "no gradients"),
        (draw(513, 32, 16, "none"), "513 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            row_linear(**wrong, impl="triton")


@interpreted
@pytest.mark.parametrize("rows", [2, 9])
def test_a_model_steps_by_kernels_as_by_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [("linear", {"impl": "triton"}), "softmax"]
    how: dict[str, Any] = {"positions": "rotary", "taps": (1, 2)} if rows == 2 else {"norm": "rms"}
    model = LanguageModel(vocab=23, dim=32, depth=2, heads=2, mechanism=layers, activation="gelu", **how)
    model = model.eval().to(torch.float32 if rows == 2 else torch.float16)
    by_kernels = functools.partial(row_linear, impl="triton")
    with torch.no_grad():
        _, state = model.prefill(torch.randint(23, (rows, 3)), state=model.init_state(rows, 16))
        mine = map_state(torch.clone, state)
        for step in range(3):
            token = torch.randint(23, (rows,))
            wanted, state = model.step(token, state, inplace=True)
            with monkeypatch.context() as patch:
                for place in (fused_step, language_model):
                    patch.setattr(place, "row_linear", by_kernels)
                patch.setattr(softmax, "cached_attention_step", functools.partial(cached_attention_step, impl="triton"))
                got, mine = model.step(token, mine, inplace=True)
            torch.testing.assert_close(got, wanted, rtol=0.02 * rows, atol=1e-4 if rows == 2 else 0.01, msg=str(step))


@outside
def test_the_twin_is_made_of_the_modules_own_operations() -> None:
    torch.manual_seed(0)
    x, linear = torch.randn(3, 16), nn.Linear(16, 8)
    for norm in (LayerNorm(16), nn.LayerNorm(16, eps=1e-3), nn.LayerNorm(16, bias=False), nn.RMSNorm(16)):
        nn.init.normal_(norm.weight)
        parts = {"norm": norm_of(norm, x.dtype), "residual": x[:, :8]}
        got = row_linear(x, linear.weight, linear.bias, activation="gelu", **parts)
        assert torch.equal(got, x[:, :8] + F.gelu(linear(norm(x))))


@outside
def test_norms_that_are_watched_or_unknown_are_left_to_themselves() -> None:
    norm = nn.LayerNorm(8)
    norm.register_forward_hook(lambda *_: None)
    assert norm_of(norm, torch.float32) is None
    assert norm_of(nn.LayerNorm(8, elementwise_affine=False), torch.float32) is None
    assert norm_of(nn.LayerNorm((2, 8)), torch.float32) is None
    assert norm_of(nn.Identity(), torch.float32) is None
    assert not op.plain(nn.Bilinear(2, 2, 2))


@compiled
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 768, 2304), (1, 3072, 768), (256, 768, 768)])
def test_compiles_for_hopper(rows: int, width: int, columns: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import row_linear_triton as kernels

    constants: dict[str, Any] = {
        "N": columns, "K": width, "NORM": "layer", "BIAS": True, "SHIFT": True, "ACT": "gelu", "ADD": True,
        "EARLY": True,
    }  # fmt: skip
    if rows <= op.FEW:
        fn, (block, wide) = kernels.few, kernels.few_blocks(columns, width)
        constants |= {"BN": block, "BK": wide}
        options = {"num_warps": min(8, max(2, block * wide // 1024)), "num_stages": 1}
    else:
        fn, sizes = kernels.tiles, kernels.tile_blocks(rows, columns, width)
        constants |= dict(zip(("BM", "BN", "BK"), sizes[:3], strict=True)) | {"DOT": tl.bfloat16}
        options = {"num_warps": sizes[3], "num_stages": sizes[4]}
    signature, constexprs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = {"eps": "fp32", "B": "i32", "xb": "i32"}.get(name, "*bf16")
    aligned = {*"xwbgcry", "xb"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name in aligned}
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "launch_pdl": True})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 227 * 1024
    assert "ld.global.v4" in built.asm["ptx"] or "cp.async" in built.asm["ptx"]
    assert "griddepcontrol.wait" in built.asm["ptx"]
