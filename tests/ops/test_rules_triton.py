"""The kernels of the gated and delta rules, in Triton's interpreter and through its compiler."""

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import ops
from subquad.ops import LinearState
from subquad.ops.linear import rule_fused
from tests.ops.own_process import compiled, interpreted

Case = dict[str, Any]
linear_attention: Any = ops.linear_attention
linear_attention_step: Any = ops.linear_attention_step


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(case: Case) -> dict[str, Any]:
    b, t, h, k, v = (case.get(name, size) for name, size in (("b", 2), ("t", 70), ("h", 1), ("k", 16), ("v", 24)))
    rows = len(case["cu"]) - 1 if "cu" in case else b
    gates = (b, t, h, k) if case.get("channel") else (b, t, h)
    delta, gated = "delta" in case["rule"], "gated" in case["rule"]
    keys = draw(1, 1, h, k, seed=2).expand(b, t, h, k) if "repeated" in case else draw(b, t, h, k, seed=2)
    beta = draw(b, t, h, seed=5)
    return {
        "q": draw(b, t, h, k, seed=1),
        "k": F.normalize(keys, dim=-1),
        "v": draw(b, t, h, v, seed=3),
        "log_gate": -draw(*gates, seed=4).abs() * case.get("steep", 0.5) if gated else None,
        "beta": (torch.ones_like(beta) if "repeated" in case else beta.sigmoid()) if delta else None,
        "s": draw(rows, h, k, v, seed=6) if case.get("init") else None,
    }


def run(case: Case, dtype: torch.dtype, impl: str) -> list[Tensor]:
    """o, the last state, and the gradients of all inputs through both."""
    rounded = case.get("rounded", dtype)
    x = {name: None if t is None else t.to(rounded).to(dtype).requires_grad_() for name, t in inputs(case).items()}
    s = x.pop("s")
    s = None if s is None else s.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    options: Case = {"lengths": torch.tensor(case["lengths"])} if "lengths" in case else {}
    options |= {"cu_seqlens": torch.tensor(case["cu"])} if "cu" in case else {}
    if "poison" in case:  # what stands in the padding must not matter, not even NaN
        at = torch.arange(x["q"].shape[1]) >= options["lengths"][:, None]
        with torch.no_grad():
            for t in x.values():
                if t is not None:
                    t[at] = torch.nan if t is not x["beta"] and t is not x["log_gate"] else 0.0
    start = None if s is None else LinearState(s, s[..., 0].detach() * 0)
    normalize = case.get("normalize", False)
    options |= {"rule": case["rule"], "feature_map": case.get("map", "identity"), "initial_state": start, "impl": impl}
    o, end = linear_attention(**x, **options, normalize=normalize, eps=0.5, return_state=True)
    leaves = [t for t in (*x.values(), s) if t is not None]
    weights = [draw(*y.shape, seed=7).to(y.dtype) for y in (o, end.s)]
    return [o.detach(), end.s.detach(), *torch.autograd.grad([o, end.s], leaves, weights)]


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"rule": "delta", "b": 1, "t": 64, "h": 2, "k": 16, "v": 16},
        {"rule": "delta", "t": 1, "init": True},
        {"rule": "gated_delta", "t": 70, "init": True, "lengths": [70, 67], "poison": True},
        {"rule": "gated_delta", "b": 1, "t": 100, "init": True, "cu": [0, 3, 3, 70, 100]},
        {"rule": "gated_delta", "b": 1, "k": 80, "v": 80, "init": True},
        {"rule": "gated_delta", "b": 1, "t": 20, "normalize": True, "map": "relu"},
        {"rule": "gated", "channel": True, "t": 70, "init": True, "lengths": [67, 0], "poison": True},
        {"rule": "gated", "channel": True, "b": 1, "init": True, "steep": 5.0},
        {"rule": "gated", "channel": True, "b": 1, "t": 100, "init": True, "cu": [0, 3, 3, 70, 100], "steep": 2.0},
        {"rule": "gated", "channel": True, "b": 1, "k": 80, "v": 80, "init": True},
        {"rule": "gated", "channel": True, "b": 1, "t": 20, "normalize": True, "map": "relu"},
    ],
    ids=str,
)
def test_equals_the_torch_path(case: Case) -> None:
    """Which test_rules.py compares with a loop over the tokens."""
    for got, want in zip(run(case, torch.float32, "triton"), run(case, torch.float64, "torch"), strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).norm() <= 4e-6 * want.norm().clamp(min=1e-3)


@interpreted
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("width", [24, 80])
def test_bfloat16_equals_the_torch_path(rule: str, width: int) -> None:
    """With states narrower than a tile, and wider."""
    case = {"rule": rule, "channel": rule == "gated", "b": 1, "t": 20, "k": width, "v": width, "init": True}
    for got, want in zip(run(case, torch.bfloat16, "triton"), run(case, torch.float64, "torch"), strict=True):
        assert (got - want).norm() <= 1.5e-2 * want.norm()


@interpreted
def test_repeated_keys_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk's inverse subtracts nearly equal values then: rounded to bfloat16 it was wrong by 2 to 6 percent."""
    from subquad.ops.linear import rule_launches_triton
    from tests.ops.interpreter import multiply_as_a_gpu_does

    multiply_as_a_gpu_does(monkeypatch)
    monkeypatch.setattr(rule_launches_triton, "INTERPRETED", False)
    case = {"rule": "delta", "repeated": True, "t": 100, "h": 2, "k": 8, "init": True, "rounded": torch.bfloat16}
    for got, want in zip(run(case, torch.bfloat16, "triton"), run(case, torch.float64, "torch"), strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


@interpreted
def test_steep_gates_cost_no_digits() -> None:
    """Of what follows them in the chunk; nor do they make up a gradient where o is the same for any gates."""
    case = {"rule": "gated_delta", "repeated": True, "b": 1, "t": 98, "init": True, "steep": 10.0}
    wanted = run(case, torch.float64, "torch")
    largest = max(want.norm() for want in wanted)
    for got, want in zip(run(case, torch.float32, "triton"), wanted, strict=True):
        assert (got - want).norm() <= 3e-7 * want.norm() + 3e-8 * largest


@interpreted
def test_a_gate_of_minus_infinity_forgets_everything() -> None:
    x = inputs({"rule": "gated", "channel": True, "b": 1})
    assert x["log_gate"] is not None
    x["log_gate"][:, 40] = -torch.inf
    short = {name: None if t is None else t.float() for name, t in x.items() if name != "s"}
    last = {name: None if t is None else t[:, 40:] for name, t in short.items()}
    options: Case = {"rule": "gated", "feature_map": "identity", "normalize": False, "return_state": True}
    (o, end), (late, same) = (linear_attention(**t, **options, impl="triton") for t in (short, last))
    torch.testing.assert_close(o[:, 40:], late, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end.s, same.s, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("rule", "channel"), [("gated", True), ("delta", False), ("gated_delta", False), ("gated_delta", True)]
)
def test_steps_equal_the_torch_path(rule: str, channel: bool, inplace: bool) -> None:
    x = inputs({"rule": rule, "channel": channel, "t": 3, "h": 2, "k": 12, "v": 20, "init": True})
    assert x["s"] is not None
    for normalize in (False, True):
        states = {
            dtype: LinearState(x["s"].to(dtype, copy=True), x["s"][..., 0].to(dtype, copy=True))
            for dtype in (torch.float32, torch.float64)
        }
        for t in range(3):
            outputs = []
            for dtype, impl in ((torch.float32, "triton"), (torch.float64, "torch")):
                token = {name: None if y is None else y[:, t].to(dtype) for name, y in x.items() if name != "s"}
                q, k, v = (token.pop(name) for name in "qkv")
                before = states[dtype]
                kept = before.s.clone()
                o, states[dtype] = linear_attention_step(
                    q, k, v, before, rule=rule, normalize=normalize, eps=0.5, inplace=inplace, impl=impl, **token
                )
                assert (states[dtype].s is before.s) == inplace
                assert inplace or torch.equal(before.s, kept)
                outputs.append(o)
            torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=1e-5, atol=1e-5)
        for a, b in zip(states[torch.float32], states[torch.float64], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("rule", ["linear", "gated", "delta"])
def test_a_step_has_gradients(rule: str) -> None:
    x = inputs({"rule": rule, "t": 1, "b": 1, "init": True})
    found = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "torch")):
        given = {name: None if t is None else t.to(dtype).requires_grad_() for name, t in x.items()}
        token = {name: None if t is None else t[:, 0] for name, t in given.items() if name != "s"}
        q, k, v = (token.pop(name) for name in "qkv")
        state = LinearState(given["s"], given["s"][..., 0].detach().abs())
        o, end = linear_attention_step(q, k, v, state, **token, rule=rule, impl=impl)
        leaves = [t for t in given.values() if t is not None]
        found.append([o, end.s, end.z, *torch.autograd.grad(o.sum() + end.s.sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@interpreted
def test_what_the_kernels_cannot_do_is_refused_by_name() -> None:
    x = inputs({"rule": "gated_delta", "channel": True, "t": 4})
    x.pop("s")
    with pytest.raises(ValueError, match="a delta rule with a gate for each channel"):
        linear_attention(
            **{n: None if t is None else t.float() for n, t in x.items()}, rule="gated_delta", impl="triton"
        )
    wide = {name: torch.zeros(1, 2, 1, 300) for name in "qkv"}
    with pytest.raises(ValueError, match="at most 256 fit"):
        linear_attention(**wide, rule="delta", beta=torch.zeros(1, 2, 1), impl="triton")


def build(kernel: str, width_k: int, width_v: int, gate: int, delta: bool, even: bool) -> Any:
    """The kernel as it is compiled for bfloat16 on a Hopper GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.linear import rule_kernels_triton, rule_launches_triton

    fn = getattr(rule_kernels_triton, kernel)
    cfg = rule_launches_triton.config(kernel, width_k, width_v, True)
    block_k, block_v = rule_launches_triton.blocks(kernel, width_k, width_v, True)
    constants: Case = {
        "K": width_k, "V": width_v, "H": 4, "C": rule_fused.CHUNK, "BK": block_k, "BV": block_v, "EVEN": even,
        "PACKED": False, "LENGTHS": not even, "GATE": gate, "DELTA": delta, "INIT": True, "END": True, "BACK": False,
        "STEEP": False, "QUERIES": True, "EXACT": False, "SUM": tl.float32, "DOT": tl.bfloat16, "PREC": "ieee",
        **dict.fromkeys(("QT", "KT", "GT"), 4 * width_k), **dict.fromkeys(("VT", "UT", "OT", "NT"), 4 * width_v),
    }  # fmt: skip
    wide = {"fade", "worst", "init", "final", "end", "dinit", "dg", "dbeta", "g"}
    signature, constexprs, attrs = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in fn.fn.__annotations__:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
            continue
        numbers = name in ("T", "L", "NS", "TOKENS") or re.fullmatch("[qkvgubon][bth]", name)
        indices = name in ("cu", "owner", "lengths")
        signature[name] = "i32" if numbers else "*i32" if indices else "*fp32" if name in wide else "*bf16"
        attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": cfg.warps, "num_stages": cfg.stages, "maxnreg": 255}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def never_written(cubin: bytes, folder: Path) -> set[int]:
    """Uniform registers that the machine code reads, and nothing in it writes."""
    from triton.backends.nvidia import driver

    tool = Path(driver.__file__).parent / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    done = subprocess.run([tool, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    reads: set[int] = set()
    writes: set[int] = set()
    for line in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(.*?);", done.stdout):
        name, _, rest = line.partition(" ")
        parts = [part.strip() for part in rest.split(",")]
        target = re.fullmatch(r"UR(\d+)", parts[0])
        if target and name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")):
            first, parts = int(target[1]), parts[1:]
            writes |= {first, first + 1} if ".64" in name or "WIDE" in name else {first}
        for i, part in enumerate(parts):
            description = re.search(r"gdesc\[UR(\d+)\]", part)
            if description:  # of A and of B, each 64 bits; A may also come in registers
                first = int(description[1])
                reads |= set(range(first + 2 if i >= 2 or re.match(r"R\d", parts[i - 1]) else first, first + 4))
            else:
                reads |= {int(number) for number in re.findall(r"UR(\d+)", part)}
    return reads - writes


SHAPES = [(64, 64), *(pytest.param(k, v, marks=pytest.mark.slow) for k, v in ((32, 64), (64, 32), (128, 128), (8, 80)))]
KERNELS = [
    *itertools.product(("invert", "solve", "walk", "read", "walk_back", "gradients"), (1,), (True,)),
    *itertools.product(("decay", "walk", "read", "walk_back", "gradients"), (2,), (False,)),
]


@compiled
@pytest.mark.parametrize(("width_k", "width_v"), SHAPES)
@pytest.mark.parametrize(("kernel", "gate", "delta"), KERNELS)
def test_compiles_for_hopper(
    kernel: str, gate: int, delta: bool, width_k: int, width_v: int, tmp_path: Path
) -> None:  # fmt: skip
    """The compiler accepts every kernel, it fits, and no register is read that was never written (ptxas 12.8 can)."""
    built = build(kernel, width_k, width_v, gate, delta, even=width_k % 64 == 0 and width_v % 64 == 0)
    assert built.metadata.shared <= 227 * 1024
    assert not never_written(built.asm["cubin"], tmp_path)
