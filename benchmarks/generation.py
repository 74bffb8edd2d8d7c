"""Measure generation on a GPU: correctness first, then images a second of the paper's models and of their rivals.

    python benchmarks/generation.py --out DIR                   everything; figures to DIR/generation.json
    python benchmarks/generation.py --out DIR --sections check,mnist --keep results/generation.json
                                                                 some of it, the rest from an earlier run
    python benchmarks/generation.py --tiny --out DIR            every section with tiny sizes on the CPU, as a trial
    python benchmarks/generation.py --cpu --out results         one MNIST image on the CPU; generation_cpu.json

Whole pixel loops are timed, sampling included. Loops that would take too long are timed at some positions and
integrated; the JSON says which. Figures are written after each section, so an interrupted run keeps them.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from generation_check import check
from generation_rivals import EQUAL, rivals

import subquad
from subquad.machine import tell_commit
from subquad.models import LanguageModel
from subquad.models.footprint import bytes_per_stream, largest_batch
from subquad.studies.generation import (
    MODELS,
    START,
    Figures,
    facts,
    make_loop,
    measure,
    paper_model,
    rewind,
    run_steps,
    seconds,
)
from subquad.studies.results import save

BARS = {"mnist": (8300, 9000, 142.8), "mnist-taps": (6000, 8000, None), "cifar10": (800, 1100, 17.85)}
ROWS = 10240  # rows of a lane, the same for every batch, so that the step is compiled only once
BF16 = torch.bfloat16


def tidy() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show(label: str, row: Figures) -> Figures:
    if "error" in row:
        print(f"{label:58s} failed: {row['error']}", flush=True)
    else:
        print(
            f"{label:58s} {row['sequences_per_second']:10.2f} images/s {row['milliseconds_per_step']:8.3f} ms/step"
            f"  batch {row['batch']}, {row['timed']}, prepared in {row['preparation_seconds']:.0f} s",
            flush=True,
        )
    return row


def attempt(label: str, run: Callable[[], Figures]) -> Figures:
    try:
        return show(label, run())
    except Exception as error:
        traceback.print_exc()
        return show(label, {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def shipped(device: str, dtype: torch.dtype) -> LanguageModel:
    """The shipped MNIST model, which has convolutions before its attention (taps)."""
    model = subquad.load("mnist_linear", device=device)
    assert isinstance(model, LanguageModel)
    return model.to(dtype).eval()


def linear(
    name: str,
    *,
    taps: bool = False,
    device: str = "cuda",
    rows: int = ROWS,
    small: Sequence[int] = (1, 256, 1024),
    settings: Sequence[tuple[int, int, int]] = (),
    lanes: Sequence[int] = (1, 2),
    whole: bool = True,
) -> Figures:
    """Images a second at growing batch; `settings`: (batch, lanes, steps per graph) to try without compiling."""
    length, dtype = MODELS[name]["length"], BF16 if device == "cuda" else torch.float32
    model = shipped(device, dtype) if taps else paper_model(name, device=device, dtype=dtype)
    ends, title = [0, length - 64], f"{name} linear{' with taps' if taps else ''}"
    table: Figures = {}
    for batch in sorted({*small, EQUAL[name] if device == "cuda" else small[-1]}):
        table[f"{batch}, not compiled"] = attempt(
            f"{title}, batch {batch}, not compiled",
            partial(measure, model, batch, length, unroll=8, at=ends, steps=64),
        )
    for batch, cut, unroll in settings:
        table[f"{batch}, lanes {cut}, {unroll} steps a graph, not compiled"] = attempt(
            f"{title}, batch {batch} in {cut} lanes, {unroll} steps a graph, not compiled",
            partial(measure, model, batch, length, lanes=cut, unroll=unroll, at=ends, steps=64),
        )
    for cut in lanes:
        table[f"{rows * cut}, lanes {cut}"] = attempt(
            f"{title}, batch {rows * cut} in {cut} lanes, compiled",
            partial(
                measure,
                model,
                rows * cut,
                length,
                compile=True,
                lanes=cut,
                unroll=8,
                at=None if whole else ends,
                steps=64,
            ),
        )
    best = max((row for row in table.values() if "error" not in row), key=lambda r: r["sequences_per_second"])
    if best["timed"] != "whole loop":
        batch, cut = best["batch"], best["lanes"]
        best = table["best, whole loop"] = attempt(
            f"{title}, batch {batch} in {cut} lanes, whole loop",
            lambda: measure(model, batch, length, compile=best["compiled"], lanes=cut, unroll=8),
        )
    must, goal, paper = BARS[f"{name}-taps" if taps else name]
    return {
        "table": table,
        "best": best,
        "must": must,
        "goal": goal,
        "paper": paper,
        "largest_batch_that_memory_allows": largest_batch(model, length),
    }


def summary(figures: Figures, name: str) -> Figures:
    """The speed of linear attention relative to each rival: each at its own best batch, and both at the same batch."""
    ours, found = figures[name], figures[f"{name}-rivals"]
    equal = found["equal_batch"]
    here = [row for row in ours["table"].values() if row.get("batch") == equal and "error" not in row]
    ratios: Figures = {}
    for rival, table in found["tables"].items():
        rows = [row for row in table.values() if "error" not in row]
        at_equal = [row["sequences_per_second"] for row in rows if row["batch"] == equal]
        ratios[rival] = {
            "each at its best batch": ours["best"]["sequences_per_second"]
            / max(r["sequences_per_second"] for r in rows),
            "at equal batch": max(r["sequences_per_second"] for r in here) / max(at_equal)
            if here and at_equal
            else None,
        }
    print(f"{name}: {ratios}", flush=True)
    return ratios


def depth(device: str = "cuda", far: int = 100_000, layers: int = 8) -> Figures:
    """Milliseconds a token at position 100 and at `far`, measured alternately; medians of five."""
    found: Figures = {}
    for mechanism, batch in (("linear", 1), ("linear", 1024), ("softmax", 1)):
        torch.manual_seed(0)
        model = LanguageModel(
            vocab=START + 1, mixture=10, dim=256, depth=layers, heads=8, mechanism=mechanism,
            positions="sinusoidal_concat", norm_position="post", activation="relu",
        ).to(device, BF16 if device == "cuda" else torch.float32).eval()  # fmt: skip
        loop = make_loop(model, batch, far + 400, unroll=8)
        run_steps(loop, 32)
        times: dict[int, list[float]] = {100: [], far: []}
        for _ in range(5):
            for position, measured in times.items():
                rewind(loop, START, position)
                measured.append(1000 * seconds(loop, 64) / 64)
        near, distant = (statistics.median(measured) for measured in times.values())
        spread = max(max(measured) - min(measured) for measured in times.values()) / near
        row = {
            "milliseconds at 100": times[100],
            f"milliseconds at {far}": times[far],
            "ratio of medians": distant / near,
            "noise": spread,
            "equal within noise": abs(distant / near - 1) <= max(spread, 0.01),
            "bytes of state": bytes_per_stream(model, far),
        }
        found[f"{mechanism}, batch {batch}"] = row
        print(f"position {mechanism}, batch {batch}: {row}", flush=True)
        del loop, model
        tidy()
    return found


def cpu(out: Path, rounds: int) -> None:
    """One MNIST image, batch 1: time of linear relative to softmax with a cache, measured alternately."""
    torch.set_num_threads(2)
    figures = facts() | {"model": MODELS["mnist"], "batch": 1, "rounds": rounds}
    for compiled in (False, True):
        models = {name: paper_model("mnist", name) for name in ("linear", "softmax")}
        loops = {name: make_loop(model, 1, 784, compile=compiled) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        for name, loop in loops.items():
            run_steps(loop, 8)
            print(f"{name} ready", flush=True)
        for _ in range(rounds):
            for name, loop in loops.items():
                rewind(loop, START)
                times[name].append(seconds(loop, 784))
        ratios = sorted(a / b for a, b in zip(times["linear"], times["softmax"], strict=True))
        figures["compiled" if compiled else "eager"] = {
            "linear_seconds": times["linear"],
            "softmax_with_cache_seconds": times["softmax"],
            "ratio_median": ratios[len(ratios) // 2],
            "ratio_of_best": min(times["linear"]) / min(times["softmax"]),
        }
        print(f"compiled={compiled}: {figures['compiled' if compiled else 'eager']}", flush=True)
        save(figures, out / "generation_cpu.json")


SETTINGS = [(batch, cut, 8) for batch in (10240, 20480) for cut in (1, 2, 4)] + [(20480, 2, 4), (20480, 2, 16)]
SECTIONS: dict[str, Callable[[], Figures]] = {
    "check": check,
    "mnist": lambda: linear("mnist", settings=SETTINGS),
    "mnist-taps": lambda: linear("mnist", taps=True, settings=SETTINGS),
    "depth": depth,
    "cifar10": lambda: linear("cifar10", small=(1, 256), whole=False),
    "cifar10-rivals": lambda: rivals("cifar10", attempt),
    "mnist-rivals": lambda: rivals("mnist", attempt, compiled=True),
}


def tiny() -> dict[str, Callable[[], Figures]]:
    """The sections with tiny sizes, whose figures have no meaning."""
    for name in MODELS:
        MODELS[name].update(depth=1, length=72)
    ours = {"device": "cpu", "rows": 2, "small": (1, 2), "lanes": (1, 2)}
    theirs = {"device": "cpu", "dtype": torch.float32, "equal": 2, "most": 3, "lstm_steps": 2}
    return {
        "check": lambda: check("cpu", depth=1, steps=6, batch=4),
        "mnist": lambda: linear("mnist", settings=[(4, 2, 4)], **ours),  # type: ignore[arg-type]
        "mnist-taps": lambda: linear("mnist", taps=True, settings=[(4, 2, 4)], **ours),  # type: ignore[arg-type]
        "depth": lambda: depth("cpu", far=200, layers=1),
        "cifar10": lambda: linear("cifar10", whole=False, **ours),  # type: ignore[arg-type]
        "cifar10-rivals": lambda: rivals("cifar10", attempt, **theirs),  # type: ignore[arg-type]
        "mnist-rivals": lambda: rivals("mnist", attempt, compiled=True, **theirs),  # type: ignore[arg-type]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--commit", help="commit of the measured code, if there is no repository")
    parser.add_argument("--keep", type=Path, help="figures of an earlier run: its other sections are kept")
    parser.add_argument("--tiny", action="store_true", help="run every section with tiny sizes on the CPU, as a trial")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the CPU comparison")
    args = parser.parse_args()
    tell_commit(args.commit)
    if args.cpu:
        cpu(args.out, args.rounds)
        return
    torch.set_float32_matmul_precision("high")
    figures = facts("cpu" if args.tiny else "cuda") | {"commits": {}}
    if args.keep:
        earlier = json.loads(args.keep.read_text())
        figures = earlier | figures | {"commits": earlier.get("commits", {})}
    sections = tiny() if args.tiny else SECTIONS
    begun = time.time()
    for name in args.sections.split(","):
        if name not in sections:
            sys.exit(f"section {name!r}: accepted are {', '.join(sections)}")
        try:
            figures[name] = sections[name]()
            model = name.removesuffix("-rivals")
            if model in figures and f"{model}-rivals" in figures:
                figures[f"{model}: linear over"] = summary(figures, model)
        except Exception as error:
            traceback.print_exc()
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        tidy()
        figures["commits"][name] = figures["commit"]
        save(figures, args.out / "generation.json")
        print(f"-- {name} done at {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
