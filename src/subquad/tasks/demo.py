"""What `make demo` runs: six mechanisms learn real digits, write new ones as RNNs, and are timed to 16k tokens.

Each stage leaves a JSON file with the settings it ran under; a later run with the same settings reads it instead.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from subquad.bench.compare import compare, tables
from subquad.bench.provenance import machine
from subquad.bench.saved import save
from subquad.bench.settings import LENGTHS, Settings, readable
from subquad.data import digits
from subquad.disk import read_json
from subquad.models import LanguageModel
from subquad.tasks.digits import PIXELS, bits_per_dim, generate, make_model, picture, train

# of each family one, at sizes that fit 64 pixels: a stride of one row of the image, a window of two
CONTENDERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "softmax": {},
    "performer": {"features": 32},
    "strided": {"stride": digits.SIDE},
    "compressed": {},
    "routing": {"clusters": 4, "window": 2 * digits.SIDE},
}
STEPS = 150  # of each in the comparison
WRITING = 1300  # of linear once more, for digits worth looking at
TEMPERATURE = 0.8  # of what is written: a small model's rare pixels are mostly mistakes
BATCH = 32
POINTS = 50  # kept of each loss curve
Json = dict[str, Any]


def demo(
    out: Path,
    console: Console,
    *,
    steps: int | None = None,
    writing: int = WRITING,
    lengths: Sequence[int] = LENGTHS,
    contenders: Sequence[str] = tuple(CONTENDERS),
    count: int = 64,
    fresh: bool = False,
    isolated: bool = True,
) -> Json:
    """Train, generate, measure, print; returns what results.json holds."""
    steps = STEPS if steps is None else steps
    for name, value in (("steps", steps), ("writing", writing)):
        if value < 1:
            raise ValueError(f"{name}={value} cannot work: accepted is an integer of at least 1")
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    images = digits.load()[0].images
    console.print(
        f"{len(contenders)} transformers learn {len(images):,} handwritten digits of 8 x 8 pixels, one pixel "
        f"after the other: {steps} steps of {BATCH} images each",
        highlight=False,
    )
    learned = [_digits(name, name, out, console, steps, count, fresh) for name in contenders]
    console.print(f"linear once more, {writing} steps, to write digits as an RNN", highlight=False)
    written = _digits("linear", "writing", out, console, writing, count, fresh)
    console.print(f"time and memory at T = {min(lengths):,} to {max(lengths):,}", highlight=False)
    results = _scaling(out, console, contenders, lengths, fresh, isolated)
    results["quality"] = [found["quality"] for found in learned]
    results["pictures"] = [found["picture"] for found in (written, *learned)]
    save(results, out / "results.json")
    console.print()
    console.print(_digits_table(learned))
    for table in tables({**results, "quality": []}, console.width):  # what was learned stands above
        console.print(table)
    console.print(f"\ndigits written by linear as an RNN: {out / written['picture']['file']}", soft_wrap=True)
    console.print(f"figures: {out / 'results.json'}", soft_wrap=True)
    console.print(f"{time.perf_counter() - started:.0f} s in all; a later run reuses what is done (--fresh: anew)")
    return results


def _digits(name: str, stage: str, out: Path, console: Console, steps: int, count: int, fresh: bool) -> Json:
    """One mechanism: trained, tested, its digits drawn; or what an earlier run left of the same stage."""
    settings = {
        "mechanism": name,
        "options": CONTENDERS[name],
        "steps": steps,
        "batch": BATCH,
        "count": count,
        "temperature": TEMPERATURE,
    }
    kept, file = out / f"digits_{stage}.json", f"digits_{stage}.png"
    found = None if fresh else _kept(kept, settings)
    if found is not None and (out / file).exists():
        console.print(f"  {name}: {found['quality']['value']:.3f} bits/dim, from an earlier run", highlight=False)
        return found
    training, test = digits.load()
    torch.manual_seed(0)
    model = make_model((name, CONTENDERS[name]))
    columns = (TextColumn("  {task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begun = time.perf_counter()
    info = TextColumn("{task.fields[info]}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread, and loses much to a busy neighbour
    with Progress(*columns, info, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=steps, info="")
        curve = train(
            model,
            training.images,
            steps,
            lambda step, bits: progress.update(task, completed=step, info=f"{bits:.3f} bits/dim"),
            BATCH,
        )
    torch.set_num_threads(threads)
    seconds = time.perf_counter() - begun
    value = bits_per_dim(model, test.images)
    begun = time.perf_counter()
    images = generate(model, count, temperature=TEMPERATURE)
    rate = count / (time.perf_counter() - begun)
    title = (
        f"{name}: written pixel by pixel at temperature {TEMPERATURE} after {steps:,} steps "
        f"({value:.2f} bits/dim on unseen digits)"
    )
    picture(test.images[:count], images, out / file, title)
    model.save(out / f"model_{stage}")
    every = max(1, steps // POINTS)
    found = {
        "settings": settings,
        "machine": machine("cpu"),
        "quality": {
            "mechanism": name,
            "task": "digits",
            "metric": "bits/dim",
            "value": value,
            "lower_is_better": True,
            "steps": steps,
            "seconds": seconds,
            "curve": [[n, sum(curve[n - every : n]) / every] for n in range(every, steps + 1, every)],
            "parameters": sum(p.numel() for p in model.parameters()),
            "images_per_second": rate,
            "state_bytes_per_image": _state_bytes(model),
        },
        "picture": {"title": title, "file": file},
    }
    save(found, kept)
    console.print(f"  {name}: {value:.3f} bits/dim in {seconds:.0f} s; {rate:.0f} images/s written", highlight=False)
    return found


def _state_bytes(model: LanguageModel) -> int | None:
    """Of one image at its last pixel; None where a layer has no state."""
    if model.transformer.traits.state is None:
        return None
    state = model.init_state(1, capacity=PIXELS)
    return sum(t.numel() * t.element_size() for layer in state.layers for t in layer)


def _kept(path: Path, settings: Json) -> Json | None:
    """What an earlier run of the same settings left, if it is whole."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("settings") == settings else None


def _scaling(
    out: Path, console: Console, contenders: Sequence[str], lengths: Sequence[int], fresh: bool, isolated: bool
) -> Json:
    settings = Settings(mechanisms=tuple(contenders), lengths=tuple(lengths))
    folder = out / "scaling"
    written = json.loads(json.dumps(settings.to_dict()))
    found = None if fresh else _kept(folder / "results.json", written)
    if found is not None and not found["interrupted"]:
        console.print(f"  {len(found['rows'])} measurements of an earlier run", highlight=False)
        return found
    found = compare(settings, folder, console, isolated=isolated, remember=False)  # six of them advise nobody
    if found["interrupted"]:
        raise KeyboardInterrupt
    return found


def _digits_table(learned: Sequence[Json]) -> Table:
    title = (
        f"digits: guessing costs {math.log2(digits.SHADES):.2f} bits/dim; equal steps, width, depth and data for all"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("mechanism", "bits/dim", "training", "written", "state an image"):
        table.add_column(column, justify="left" if column == "mechanism" else "right", no_wrap=True)
    for found in sorted((found["quality"] for found in learned), key=lambda quality: quality["value"]):
        state = found["state_bytes_per_image"]
        table.add_row(
            found["mechanism"],
            f"{found['value']:.3f}",
            f"{found['seconds']:.0f} s",
            f"{found['images_per_second']:.0f} images/s",
            "-" if state is None else readable(state),
        )
    return table
