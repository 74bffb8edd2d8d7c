"""Linear attention behind feature maps, and nystrom: performer, rfa, efficient, nystrom and linformer."""

import contextlib
import random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import subquad
from subquad.mechanisms import nystrom
from subquad.ops.convolve import convolve

from . import mechanism_times
from .bench import DEVICE, Case, Figures, Verdict, deterministic, poison

NAMES = ("performer", "rfa", "efficient", "nystrom")
FLOOR = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


def drawn(seed: int) -> Figures:
    """The shape, type and options of one case."""
    rng = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    causal = name != "nystrom" and rng.random() < 0.6
    options: dict[str, Any] = {}
    if name == "performer":
        kernel = rng.choice(("softmax", "softmax", "softmax", "hyperbolic", "relu"))
        options = {"features": rng.choice((256, 256, 100, 64)), "kernel": kernel}
    elif name == "rfa":
        gate = causal and rng.random() < 0.5
        options = {"features": rng.choice((64, 64, 40, 128)), "tau": rng.choice((1.0, 0.8)), "gate": gate}
    elif name == "nystrom":
        options = {"landmarks": rng.choice((64, 32)), "conv": rng.choice((33, 5, 0, 97))}
    return {
        "name": name, "causal": causal, "options": options, "batch": rng.choice((1, 2, 3)),
        "length": rng.choice((1, 63, 64, 130, 500, 777, 1024)), "heads": rng.choice((1, 2, 3)),
        "width": rng.choice((16, 20, 32, 48, 64, 64, 64, 80, 128, 256 if seed > 15 else 64)),
        "dtype": rng.choice((torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        "ragged": rng.random() < 0.4, "deterministic": rng.random() < 0.2,
        "keys": rng.choice((50, 200, 640)) if not causal and rng.random() < 0.3 else None,  # of another sequence
        "size": 20.0 if causal and rng.random() < 0.25 else 1.0,
    }  # fmt: skip


def random_case(seed: int) -> Verdict:
    case = drawn(seed)
    found = check(case)
    text = " ".join(f"{k}={v}" for k, v in case.items() if v not in (None, False, {}))
    found.wrong = [f"{wrong} ({text})" for wrong in found.wrong]
    return found


def long_case(name: str, causal: bool) -> Verdict:
    return check({
        "name": name, "causal": causal, "options": {}, "batch": 2, "length": 2048, "heads": 8, "width": 64,
        "dtype": torch.bfloat16, "ragged": False, "deterministic": False, "keys": None, "size": 1.0,
    })  # fmt: skip


def check(case: Figures) -> Verdict:
    """Values, gradients of inputs and parameters, prefill in two parts and steps."""
    dtype, dim = case["dtype"], case["heads"] * case["width"]
    batch, length, found = case["batch"], case["length"], Verdict()
    keys = case["keys"] or length
    x = (torch.randn(batch, length, dim) * case["size"]).to(DEVICE, dtype)
    context = None if case["keys"] is None else torch.randn(batch, keys, dim).to(DEVICE, dtype)
    lengths = torch.randint(1, keys + 1, (batch,)).to(DEVICE) if case["ragged"] else None
    weight = torch.randn(batch, length, dim, dtype=torch.float64).to(DEVICE)
    made = {"dim": dim, "heads": case["heads"], "causal": case["causal"], **case["options"]}
    weights = subquad.build(case["name"], **made).to(dtype).state_dict()

    def run(kind: str) -> dict[str, Tensor]:
        if case["name"] != "nystrom":  # it has no choice of implementation
            made["impl"] = "auto" if kind == "ours" else "torch"
        mix = subquad.build(case["name"], **made)
        mix.load_state_dict({key: value.to(dtype) for key, value in weights.items()})
        wide = torch.float64 if kind == "exact" else dtype
        mix = mix.to(dtype).to(DEVICE, wide)
        given = x.to(wide, copy=True).requires_grad_()
        other = None if context is None else context.to(wide, copy=True).requires_grad_()
        poison()
        y = mix(given, lengths=lengths) if other is None else mix(given, context=other, context_lengths=lengths)
        y.backward(weight.to(wide))
        results = {"y": y, "dx": given.grad, **{n: p.grad for n, p in mix.named_parameters()}}
        if other is not None:
            results["dcontext"] = other.grad
        if mix.traits.state is not None and case["size"] == 1 and length > 1:
            with torch.no_grad():
                results |= decoded(mix, x.to(wide), lengths)
        return {name: value.detach() for name, value in results.items() if value is not None}

    plainly = patch.object(nystrom, "convolve", lambda v, kernel: convolve(v, kernel, impl="torch"))
    with deterministic() if case["deterministic"] else contextlib.nullcontext():
        ours = run("ours")
        with plainly:
            plain = run("plain")
        exact = run("exact")
    largest = max(float(e.norm()) for e in exact.values())
    for name, e in exact.items():
        short = name if name in ("y", "dx", "dcontext", "prefill", "more", "step", "again", "s") else "parameters"
        zero = float(e.norm()) <= 1e-6 * largest  # but for rounding: compared with the largest one
        found.compare(short, ours[name], plain[name], e, floor=FLOOR[dtype], least=largest if zero else 1e-30)
    return found


def decoded(mix: Any, x: Tensor, lengths: Tensor | None) -> dict[str, Tensor]:
    poison()
    length = x.shape[1]
    cut = max(1, length // 3)
    first, state = mix.prefill(x[:, :cut], lengths=None if lengths is None else lengths.clamp(max=cut))
    more, state = mix.prefill(x[:, cut:], state=state)
    step, state = mix.step(x[:, 0], state)
    again, state = mix.step(x[:, length // 2], state, inplace=True)
    return {"prefill": first, "more": more, "step": step, "again": again, "s": state[0]}


FORMS = tuple((name, causal) for name in NAMES for causal in ((True, False) if name != "nystrom" else (False,)))
CHECKS = [
    *(Case("features", long_case, form) for form in FORMS),
    *(Case("features", random_case, (seed,)) for seed in range(24)),
]
TIMES = [
    *(
        Case("features", mechanism_times.training, (name, length, causal))
        for causal in (True, False)
        for length in (16384, 65536)
        for name in ("linear", "performer", "rfa", "efficient", *(() if causal else ("nystrom", "linformer")))
    ),
    *(
        Case("features", mechanism_times.decoding, (name, batch))
        for batch in (4, 64)
        for name in ("linear", "performer", "rfa", "efficient")
    ),
]
