"""Measure training on a GPU: images a second of the paper's models, and iterations of text models at a long context.

    python benchmarks/train.py --out DIR                            MNIST and text; figures to DIR/train.json
    python benchmarks/train.py --out DIR --sections mnist,cifar10 --batches 64,128 --modes eager,compiled
    python benchmarks/train.py --cpu --out DIR                      tiny sizes on the CPU, as a trial

Compiling takes a minute per model, and several for 30 layers: text is timed without it unless `--modes` is given.

Times forward, backward, clipping and update of whole models on random data, in the precision of training. The speed of
`subquad train` on real data is in the results of `subquad reproduce`. Figures are written after each section.
"""

import argparse
import gc
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.machine import commit, machine, tell_commit
from subquad.measure.cost import Sample, once, spread
from subquad.studies.reproduce.scaling import Iteration, iterations
from subquad.studies.reproduce.tables import TABLES
from subquad.studies.results import save, to_json
from subquad.tasks.images import SETS, Images
from subquad.tasks.text import Text
from subquad.training.task import Batch, Task

BARS = {"mnist": (8000, 10000), "text": (0.7, 0.5)}
Figures = dict[str, Any]


def images(name: str, batch: int, mode: str, device: str, **changes: Any) -> Iteration:
    task = Images(set=name)
    torch.manual_seed(0)
    model = task.make_model({**task.model, **changes}).to(device)
    pixels = torch.randint(256, (batch, math.prod(SETS[name].shape)), dtype=torch.uint8, device=device)
    return iteration(task, model, {"pixels": pixels}, mode)


def iteration(task: Task, model: nn.Module, batch: Batch, mode: str) -> Iteration:
    """mode: "eager", "compiled", "captured" (all of it as a CUDA graph) or "compiled+captured"."""
    precision = "bf16" if next(model.parameters()).is_cuda else "fp32"
    compile, capture = "compiled" in mode, "captured" in mode
    return Iteration(task, model, batch, precision=precision, compile=compile, capture=capture)


def text(row: str, batch: int, length: int, mode: str, device: str, **changes: Any) -> Iteration:
    """A row of the table enwik8: the Sparse Transformer's 30 layers of width 512."""
    task, table = Text(length=length), TABLES["enwik8"]
    chosen = next(found for found in table.rows if found.name == row)
    torch.manual_seed(0)
    fields = {**task.model, **table.model, **chosen.model, "mechanism": chosen.mechanism, **changes}
    model = task.make_model(fields).to(device)
    tokens = torch.randint(256, (batch, length + 1), dtype=torch.uint8, device=device)
    made = {"tokens": tokens, "first": torch.zeros(batch, dtype=torch.int64, device=device)}
    return iteration(task, model, made, mode)


def rate(make: Callable[[], Iteration], count: int) -> Figures:
    """Examples a second: the median of samples of several iterations."""
    run = make()
    device = str(run.device)
    for _ in range(5):
        run()
    calls = max(1, min(20, int(500 / max(1.0, once(run, device)))))
    found = spread([once(run, device, Sample(calls)) for _ in range(7)])
    assert found is not None
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
    return {"iteration_ms": to_json(found), "examples_per_second": 1000 * count / found.median, "peak_bytes": peak}


def attempt(label: str, run: Callable[[], Figures]) -> Figures:
    try:
        found = run()
        print(
            f"{label:44s} {found['iteration_ms']['median']:9.2f} ms {found['examples_per_second']:10.1f}/s", flush=True
        )
        return found
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        tidy()


def tidy() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def image_rates(
    name: str, device: str, small: bool, batches: Sequence[int], modes: Sequence[str], dropouts: Sequence[float]
) -> Figures:
    """The paper's model; dropout is only on the layers' outputs, as in the table's runs."""
    sizes: Mapping[str, Any] = {"dim": 32, "depth": 1, "heads": 2} if small else {}
    found: Figures = {}
    for batch in (2,) if small else batches:
        for mode in modes:
            for dropout in dropouts:
                drop = {"dropout": dropout, "ff_dropout": 0.0}
                label = f"batch {batch}, {mode}, dropout {dropout}"
                make = partial(images, name, batch, mode, device, **sizes, **drop)
                found[label] = attempt(f"{name}, {label}", partial(rate, make, batch))
    return found


def text_ratios(device: str, small: bool, modes: Sequence[str]) -> Figures:
    """Dense flash, fixed, strided and linear attention in the same model, timed in turn."""
    batch, length = (1, 256) if small else (2, 12288)
    sizes: Mapping[str, Any] = {"dim": 32, "depth": 1, "heads": 2} if small else {}
    found: Figures = {"batch": batch, "length": length, "bar": {"must": BARS["text"][0], "goal": BARS["text"][1]}}
    for name in modes:
        makers = {
            row: partial(text, row, batch, length, name, device, **sizes)
            for row in ("dense", "fixed", "strided", "linear")
        }
        try:
            found[name] = iterations(makers, on_line=partial(print, flush=True))
            for row, timed in found[name].items():
                print(f"text {name}, {row:10s} {timed['iteration_ms']['median']:9.2f} ms, "
                      f"{timed['ratio']['median']:.3f} of dense", flush=True)  # fmt: skip
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        del makers
        tidy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default="mnist,text")
    parser.add_argument("--batches", default="128")
    parser.add_argument("--modes", default=None, help="any of eager, compiled, captured, compiled+captured")
    parser.add_argument("--dropouts", default="0.1")
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    device, small = ("cpu", True) if given.cpu else ("cuda", False)
    batches, dropouts = [int(n) for n in given.batches.split(",")], [float(n) for n in given.dropouts.split(",")]
    modes = given.modes.split(",") if given.modes else ["eager"] if small else ["compiled+captured"]
    sections: dict[str, Callable[[], Figures]] = {
        "mnist": partial(image_rates, "mnist", device, small, batches, modes, dropouts),
        "cifar10": partial(image_rates, "cifar10", device, small, batches, modes, dropouts),
        "text": partial(text_ratios, device, small, modes if given.modes or small else ["captured"]),
    }
    figures: Figures = {"kind": "train", "commit": commit(), "machine": machine(device)}
    figures["what"] = "forward, backward, clipping and update of whole models, bf16 autocast, made-up data"
    figures["bars"] = {"mnist, images/s (must, goal)": BARS["mnist"], "text, ratio to dense (must, goal)": BARS["text"]}
    for name in given.sections.split(","):
        figures[name] = sections[name]()
        save(figures, given.out / "train.json")


if __name__ == "__main__":
    main()
