"""Times of whole mechanisms as `subquad compare` takes them, beside exact softmax of the same shape."""

import functools
import time
from typing import Any

import torch

from subquad import build
from subquad.measure.cost import Decode, Shape, Subject, peak_bytes

from .bench import DEVICE, Figures, event_ms, graph_ms

LENGTH = 16384
ROWS = 4


def subject(name: str, length: int, causal: bool, batch: int, options: dict[str, Any] | None = None) -> Subject:
    shape = Shape(length=length, dim=512, heads=8, batch=batch, causal=causal, device=DEVICE, dtype="bfloat16")
    made = Subject(name, shape)
    if options:
        made.mix = build(name, dim=512, heads=8, causal=causal, **options).to(DEVICE, torch.bfloat16)
    return made


def training(name: str, length: int, causal: bool, options: dict[str, Any] | None = None) -> Figures:
    """Milliseconds and peak memory of forward and of forward and backward, and their ratios to softmax."""
    ours = dict(_training(name, length, causal, options))
    ms, peak = softmax_training(length, causal)
    return ours | {"ratio": ours["training_ms"] / ms, "memory_ratio": ours["peak_mib"] / peak}


@functools.cache
def softmax_training(length: int, causal: bool) -> tuple[float, float]:
    found = _training("softmax", length, causal, None)
    return found["training_ms"], found["peak_mib"]


def _training(name: str, length: int, causal: bool, options: dict[str, Any] | None) -> Figures:
    made = subject(name, length, causal, ROWS, options)
    begun = time.perf_counter()
    made.training()
    torch.cuda.synchronize()
    found: Figures = {"first_call_s": time.perf_counter() - begun, "peak_mib": peak_bytes(made) / 2**20}
    return found | {"forward_ms": event_ms(made.forward), "training_ms": event_ms(made.training)}


def decoding(name: str, batch: int, options: dict[str, Any] | None = None) -> Figures:
    """Microseconds of a captured step after 16k tokens, one or eight in a graph; batch: a multiple of ROWS."""
    found = _decoding(name, batch, options)
    one, eight = softmax_decoding(batch)
    if "uncaptured" not in found:
        found |= {"ratio": found["one_us"] / one, "ratio_of_eight": found["eight_us"] / eight}
    return found


@functools.cache
def softmax_decoding(batch: int) -> tuple[float, float]:
    found = _decoding("softmax", batch, None)
    return found["one_us"], found["eight_us"]


@torch.no_grad()
def _decoding(name: str, batch: int, options: dict[str, Any] | None) -> Figures:
    made = subject(name, LENGTH, True, ROWS, options)
    made.x = made.x.detach().repeat(batch // ROWS, 1, 1)  # drawing all rows would take longer than all else
    run = Decode(made)
    if run.graph is None:
        return {"uncaptured": run.uncaptured}

    def step() -> None:
        run.mix.step(run.token, run.state, inplace=True)

    one = event_ms(run)
    run.rewind()
    return {"one_us": 1000 * one, "eight_us": 1000 * graph_ms(step, 8, run.rewind)}
