"""Measure generation on a GPU: correctness first, then images a second of the paper's models, beside their rivals.

    python bench/generation.py --out DIR                         everything; figures to DIR/generation.json
    python bench/generation.py --out DIR --sections check,mnist  some of it
    python bench/generation.py --cpu --out results               one MNIST image on the CPU; generation_cpu.json

Whole pixel loops are timed, sampling included. Loops that would take too long are timed at some positions and
integrated; the JSON says which. Figures are written after each section, so that a run cut short keeps them.
"""

import argparse
import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.bench.generation import (
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
    write,
)
from subquad.models import LanguageModel, logistic_mixture
from subquad.models.generation import bytes_per_stream, generate, largest_batch

BARS = {"mnist": (6000, 8000, 142.8), "cifar10": (800, 1100, 17.85)}
PAPER = {"mnist": {"softmax": 7.56, "recompute": 0.45}, "cifar10": {"softmax": 0.32, "recompute": 0.004}}
BF16 = torch.bfloat16


def tidy() -> None:
    gc.collect()
    torch._dynamo.reset()
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
        torch.cuda.empty_cache()


def check() -> Figures:
    """The captured loop gives the tokens of the plain one, with the same seeds; the same on the CPU in float32."""
    found: Figures = {}
    for mechanism in ("linear", "softmax", ("linear", "local"), "reformer", "sinkhorn", "performer", "mixed"):
        name = mechanism if isinstance(mechanism, str) else "+".join(mechanism)
        try:
            torch.manual_seed(0)
            model = LanguageModel(vocab=40, dim=64, depth=2, heads=4, mechanism=mechanism).eval()
            prompt = [[1, 2, 3, 4, 5], [6], [7, 8, 9]] * 11
            here = model.generate(prompt, 60, seed=3)
            model.cuda()
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                captured = model.generate(prompt, 60, seed=3)
                laned = model.generate(prompt, 60, seed=3, lanes=2)
            plain = torch.stack(list(generate_plain(model, prompt, 60)), 1)
            found[name] = {
                "captured equals plain": torch.equal(captured, plain),
                "lanes equal plain": torch.equal(laned, plain),
                "tokens equal to the CPU's": float((captured.cpu() == here).float().mean()),
                "notes": [str(note.message)[:200] for note in notes],
            }
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(f"check {name}: {found[name]}", flush=True)
    for dtype in (torch.float32, BF16):
        try:
            model = paper_model("mnist", device="cuda", dtype=dtype)
            plain = run_steps(make_loop(model, 64, 96), 96)
            fast = run_steps(make_loop(model, 64, 96, compile=True, lanes=2, unroll=8), 96)
            same = float((plain == fast).float().mean())
            found[f"mnist {dtype}: compiled, captured, lanes"] = {"tokens equal to the plain loop's": same}
        except Exception as error:
            traceback.print_exc()
            found[f"mnist {dtype}"] = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(f"check mnist {dtype}: {list(found.values())[-1]}", flush=True)
    tidy()
    return found


def generate_plain(model: LanguageModel, prompt: Any, steps: int) -> Any:
    """The tokens of generate without a capture: as many calls of one step."""
    out = generate(model, prompt, 1, seed=3, full=True)
    yield out.tokens[:, 0]
    for _ in range(steps - 1):
        out = generate(model, out.tokens[:, -1:], 1, seed=3, full=True, state=out.state)
        yield out.tokens[:, 0]


def linear(name: str, quick: bool) -> Figures:
    """Images a second at growing batch: rows a lane are kept the same, so that the step is compiled once."""
    length, rows = MODELS[name]["length"], 5120 if name == "mnist" else 2560
    model = paper_model(name, device="cuda", dtype=BF16)
    at = None if name == "mnist" else [0, length // 2, length - 64]
    table = {}
    for batch in (1, 256, 1024):
        table[f"{batch}, not compiled"] = attempt(
            f"{name} linear, batch {batch}, not compiled",
            partial(measure, model, batch, length, unroll=8, at=[0, length - 64], steps=64),
        )
    for lanes in (1, 2, 4, 8):
        batch = rows * lanes
        table[f"{batch}, lanes {lanes}"] = attempt(
            f"{name} linear, batch {batch} in {lanes} lanes, compiled",
            partial(measure, model, batch, length, compile=True, lanes=lanes, unroll=8, at=at, steps=64),
        )
    if not quick:
        batch = 4 * rows
        table[f"{batch}, lanes 1"] = attempt(
            f"{name} linear, batch {batch} in one lane, compiled",
            lambda: measure(model, batch, length, compile=True, unroll=8, at=[0, length - 64], steps=64),
        )
        table[f"{batch}, lanes 2, not compiled"] = attempt(
            f"{name} linear, batch {batch} in two lanes, not compiled",
            lambda: measure(model, batch, length, lanes=2, unroll=8, at=[0, length - 64], steps=64),
        )
        table["256-way softmax"] = attempt(
            f"{name} linear, 256-way softmax, batch {2 * rows} in 2 lanes, compiled",
            lambda: measure(
                paper_model(name, head="categorical", device="cuda", dtype=BF16), 2 * rows, length,
                compile=True, lanes=2, unroll=8, at=[0, length - 64], steps=64,
            ),
        )  # fmt: skip
    best = max((row for row in table.values() if "error" not in row), key=lambda r: r["sequences_per_second"])
    if best["timed"] != "whole loop":
        lanes = best["lanes"]
        label = f"{name} linear, batch {best['batch']} in {lanes} lanes, whole loop"
        best = table["best, whole loop"] = attempt(
            label, lambda: measure(model, best["batch"], length, compile=best["compiled"], lanes=lanes, unroll=8)
        )
    must, goal, paper = BARS[name]
    tidy()
    return {"table": table, "best": best, "must": must, "goal": goal, "paper": paper}


def softmax(name: str) -> Figures:
    """The rivals: softmax with a cache at the largest batch memory allows and at an equal one, recomputing, an LSTM."""
    length, table = MODELS[name]["length"], {}
    model = paper_model(name, "softmax", device="cuda", dtype=BF16)
    most = int(0.9 * largest_batch(model, length)) // 64 * 64
    spots = [0, length // 4, length // 2, 3 * length // 4, length - 16]
    for batch in sorted({256, 1024, min(2560, most), most}):
        for compiled in (False, True):
            if compiled and batch != most:
                continue
            what = "compiled" if compiled else "captured"
            table[f"cache, {batch}, {what}"] = attempt(
                f"{name} softmax with a cache, batch {batch}, {what}",
                partial(measure, model, batch, length, compile=compiled, unroll=8, at=spots, steps=16),
            )
    for batch in (1, 64, 1024):
        table[f"recompute, {batch}"] = attempt(
            f"{name} softmax recomputing the prefix, batch {batch}", partial(recompute, model, batch, length)
        )
    for batch in (1024, 10240):
        table[f"LSTM, {batch}"] = attempt(f"{name} LSTM of equal size, batch {batch}", partial(lstm, name, batch))
    tidy()
    return {"table": table, "paper": PAPER[name]}


@torch.no_grad()
def recompute(model: LanguageModel, batch: int, length: int) -> Figures:
    """Forward over the prefix for each new pixel, as the paper's baseline; some lengths, integrated."""
    spots, times = [1, length // 4, length // 2, 3 * length // 4, length], []
    seeds = torch.arange(batch, device="cuda")
    for n in spots:
        tokens = torch.zeros(batch, n, dtype=torch.int64, device="cuda")
        for timed in (False, True):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            rounds = 3 if timed else 1
            for _ in range(rounds):
                outputs = model.head(model.transformer(model.embedding(tokens))[:, -1])  # type: ignore[misc]
                logistic_mixture.draw(outputs, seeds, torch.full_like(seeds, n))
            torch.cuda.synchronize()
            spent = (time.perf_counter() - begun) / rounds
        times.append(spent)
    total = float(torch.trapezoid(torch.tensor(times), torch.tensor(spots, dtype=torch.float32)))
    return {
        "batch": batch,
        "length": length,
        "sequences_per_second": batch / total,
        "milliseconds_per_step": 1000 * total / length,
        "timed": f"prefixes of {spots}, integrated",
        "preparation_seconds": 0.0,
    }


class Lstm(nn.Module):
    """Layers of width 512: 2.1 million weights each, 3 for 8 layers of the transformer, 6 for 16."""

    def __init__(self, layers: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(START + 1, width)
        self.gates = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, 30)

    def forward(self, token: Tensor, h: list[Tensor], c: list[Tensor], seeds: Tensor, position: Tensor) -> None:
        x = self.embedding(token)
        for gates, hidden, cell in zip(self.gates, h, c, strict=True):
            i, f, g, o = gates(torch.cat((x, hidden), -1)).chunk(4, -1)
            new = f.float().sigmoid() * cell + i.float().sigmoid() * g.float().tanh()
            cell.copy_(new)
            x = (o.float().sigmoid() * new.tanh()).to(x.dtype)
            hidden.copy_(x)
        position.add_(1)
        token.copy_(logistic_mixture.draw(self.head(x), seeds, position))


@torch.no_grad()
def lstm(name: str, batch: int) -> Figures:
    length, layers = MODELS[name]["length"], 3 * MODELS[name]["depth"] // 8
    begun = time.perf_counter()
    model = Lstm(layers).to("cuda", BF16)
    h = [torch.zeros(batch, 512, device="cuda", dtype=BF16) for _ in range(layers)]
    c = [torch.zeros(batch, 512, device="cuda") for _ in range(layers)]
    token = torch.full((batch,), START, device="cuda")
    seeds, position = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    step = torch.compile(model, dynamic=False)
    for _ in range(3):
        step(token, h, c, seeds, position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(token, h, c, seeds, position)
    torch.cuda.synchronize()
    prepared, begun = time.perf_counter() - begun, time.perf_counter()
    steps = min(length, 784)
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    total = (time.perf_counter() - begun) * length / steps
    return {
        "batch": batch,
        "length": length,
        "sequences_per_second": batch / total,
        "milliseconds_per_step": 1000 * total / length,
        "timed": "whole loop" if steps == length else f"{steps} steps, which all cost the same",
        "preparation_seconds": prepared,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def depth() -> Figures:
    """Milliseconds a token at position 100 and at position 100,000; medians of five."""
    found: Figures = {}
    for mechanism in ("linear", "softmax"):
        for batch in (1, 1024) if mechanism == "linear" else (1,):
            try:
                torch.manual_seed(0)
                model = LanguageModel(
                    vocab=START + 1, mixture=10, dim=256, depth=8, heads=8, mechanism=mechanism,
                    positions="sinusoidal_concat", norm_position="post", activation="relu",
                ).to("cuda", BF16).eval()  # fmt: skip
                loop = make_loop(model, batch, 100_400, unroll=8)
                run_steps(loop, 32)
                row: dict[str, list[float]] = {}
                for position in (100, 100_000, 100, 100_000):
                    times = []
                    for _ in range(5):
                        rewind(loop, START, position)
                        times.append(1000 * seconds(loop, 64) / 64)
                    row.setdefault(str(position), []).append(sorted(times)[2])
                found[f"{mechanism}, batch {batch}"] = row
                found[f"{mechanism}, bytes of state at 100,000"] = bytes_per_stream(model, 100_000)
                del loop, model
            except Exception as error:
                traceback.print_exc()
                found[f"{mechanism}, batch {batch}"] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"position {mechanism}, batch {batch}: {found[f'{mechanism}, batch {batch}']}", flush=True)
    tidy()
    return found


def cpu(out: Path, rounds: int) -> None:
    """One MNIST image, batch 1: linear over softmax with a cache, turn by turn."""
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
        write(figures, out / "generation_cpu.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    names = ("check", "mnist", "depth", "mnist-rivals", "cifar10", "cifar10-rivals")
    parser.add_argument("--sections", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="fewer variants")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="of the CPU comparison")
    args = parser.parse_args()
    if args.cpu:
        cpu(args.out, args.rounds)
        return
    torch.set_float32_matmul_precision("high")
    figures = facts("cuda")
    sections: dict[str, Callable[[], Figures]] = {
        "check": check,
        "mnist": lambda: linear("mnist", args.quick),
        "depth": depth,
        "mnist-rivals": lambda: softmax("mnist"),
        "cifar10": lambda: linear("cifar10", True),
        "cifar10-rivals": lambda: softmax("cifar10"),
    }
    begun = time.time()
    for name in args.sections.split(","):
        if name not in sections:
            sys.exit(f"section {name!r}: accepted are {', '.join(sections)}")
        try:
            figures[name] = sections[name]()
        except Exception as error:
            traceback.print_exc()
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        tidy()
        write(figures, args.out / "generation.json")
        print(f"-- {name} done at {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
