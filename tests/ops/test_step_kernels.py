"""The small kernels of a decoding step, drawing and short convolution, against torch and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch

from subquad.models import logistic_mixture
from subquad.models.sampling import Rows, Sampling, draw_next
from subquad.ops.short_conv import short_conv_step
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")
MIXED = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.7, min_p=0.05),
    Sampling(repetition_penalty=1.7, exclude=(3, 5)),
    Sampling(top_k=5, top_p=0.9, temperature=1.3),
    Sampling(temperature=0, repetition_penalty=0.5, exclude=(0,)),
]


@interpreted
@pytest.mark.parametrize("values", [40, 300])
@pytest.mark.parametrize(
    "samplings", [[Sampling()], [Sampling(temperature=0)], [Sampling(temperature=0.5)], MIXED, MIXED[:4] + MIXED[:2]]
)
def test_a_drawn_token_is_torchs(values: int, samplings: list[Sampling], monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.models import sampling_triton

    monkeypatch.setattr(sampling_triton, "BLOCK", 128)  # so that 300 tokens take several
    torch.manual_seed(0)
    batch = 6
    rows = Rows.of(samplings, values, torch.device("cpu"))
    rows = rows._replace(uses=rows.uses.coarse) if len(samplings) > 1 else rows
    seeds = torch.tensor([0, 1, 1 << 40, -5, 7, 123])
    seen = torch.rand(batch, values + 2) < 0.2
    for step in range(4):
        logits = (3 * torch.randn(batch, values)).to(torch.float16 if step % 2 else torch.float32)
        stop = torch.tensor([1, 2, 30]) if step > 1 else None
        made = []
        for impl in ("torch", "triton"):
            token, done = torch.arange(batch), torch.tensor([0, 0, 1, 0, 1, 0]).bool()
            logprob = torch.zeros(batch) if step != 1 else None
            state = (seeds, torch.full((batch,), step), seen[:, :values])
            draw_next(logits, rows, *state, token, done, stop, logprob, impl)
            made.append((token, done, logprob))
        (token, done, logprob), (other, ended, score) = made
        assert torch.equal(token, other)
        assert torch.equal(done, ended)
        if logprob is not None and stop is not None:
            torch.testing.assert_close(logprob, score)


@interpreted
def test_a_value_of_a_mixture_is_torchs() -> None:
    torch.manual_seed(0)
    seeds, position = torch.arange(300) * 7 - 50, torch.arange(300)
    for dtype in (torch.float32, torch.bfloat16):
        outputs = (2 * torch.randn(300, 30)).to(dtype)
        outputs[:, 20:] -= 3
        drawn = [logistic_mixture.draw(outputs, seeds, position, impl) for impl in ("torch", "triton")]
        assert drawn[0].unique().numel() > 60
        assert torch.equal(*drawn)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.draw_from_mixture.default, (outputs, seeds, position), test_utils=tests)


@interpreted
def test_the_operator_of_a_draw_is_well_formed() -> None:
    rows = Rows.of([Sampling(temperature=0.5)], 9, torch.device("cpu"))
    logits, token, done = torch.randn(2, 9), torch.zeros(2).long(), torch.zeros(2).bool()
    settings = (*rows[1:5], *rows[7:])
    args = (logits, logits, [int(use) for use in rows.uses], *settings, True, token + 1, token + 2, None, token, done)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.draw_next.default, (*args, None, torch.zeros(2)), test_utils=tests)
    with pytest.raises(ValueError, match="at most 64"):
        draw_next(logits, rows, token, token, None, token, done, torch.arange(70), None, "triton")


@interpreted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [24, 40])
def test_a_ring_is_read_and_written_in_one_pass(width: int, bias: bool) -> None:
    torch.manual_seed(0)
    back, rows = torch.tensor([1, 3, 7]), 4
    weight, shift = torch.randn(4, width), torch.randn(width) if bias else None
    rings = [torch.randn(rows, 7, width)] * 2
    rings[1] = rings[0].clone()
    position = torch.tensor([0, 3, 6, 1000])
    for _ in range(9):
        x = torch.randn(rows, 2 * width)[:, :width]
        wanted, rings[0] = short_conv_step(x, weight, back, rings[0], position, shift, inplace=True, impl="torch")
        y, _ = short_conv_step(x, weight, back, rings[1], position, shift, inplace=True, impl="triton")
        torch.testing.assert_close(y, wanted)
        assert torch.equal(*rings)
        position = position + 1
    with pytest.raises(ValueError, match="it writes in place"):
        short_conv_step(x, weight, back, rings[0], position, impl="triton")


@interpreted
def test_the_operator_of_a_short_convolution_is_well_formed() -> None:
    args = (torch.randn(2, 8), torch.randn(3, 8), torch.tensor([1, 2]), torch.randn(2, 2, 8), torch.tensor([4, 5]))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.short_conv_step.default, (*args, None), test_utils=tests)


@compiled
def test_drawing_and_turning_compile_for_hopper() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from subquad.models import sampling_triton
    from subquad.ops import short_conv_triton, turned_triton

    flags = ("NOISE", "GREEDY", "EXCLUDE", "PENALTY", "TEMPERATURE", "MINP", "LOGPROB", "EARLY")
    pointers: dict[str, Any] = {
        **dict.fromkeys(("x", "raw", "w", "ring", "bias", "y"), "*bf16"),
        **dict.fromkeys(("least", "half"), "fp32"),
        **dict.fromkeys(("seeds", "position", "stop", "token", "back", "p"), "*i64"),
        **dict.fromkeys(("penalty", "temperature", "min_p"), "*fp64"),
        **dict.fromkeys(("greedy", "exclude", "seen", "done"), "*i1"),
        **dict.fromkeys(("logprob", "cos", "sin"), "*fp32"),
    }  # fmt: skip
    for fn, constants, warps in (
        (sampling_triton.next_token, {"V": 8192, "BV": 8192, "STOP": 2, **dict.fromkeys(flags, True)}, 16),
        (short_conv_triton.shift, {"D": 256, "BD": 256, "L": 56, "J": 8, "BIAS": True}, 1),
        (sampling_triton.mixture, {"C": 10, "BC": 16, "BM": 32, "LAST": 255}, 4),
        (turned_triton.angles, {"RATE": -0.25, "W": 32, "BW": 32}, 1),
    ):
        signature, constexprs = {}, {}
        for i, name in enumerate(fn.arg_names):
            signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
            if name in constants:
                constexprs[(i,)] = constants[name]
        source = ASTSource(fn=fn, signature=signature, constexprs=constexprs)
        options = {"num_warps": warps, "launch_pdl": True, "maxnreg": sampling_triton.REGISTERS}
        built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert built.asm["cubin"]
        assert f".maxnreg {sampling_triton.REGISTERS}" in built.asm["ptx"]
        assert warps * 32 * sampling_triton.REGISTERS <= 65536
