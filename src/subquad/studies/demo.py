"""What `make demo` runs: a shipped model writes digits, six mechanisms learn to, and are measured to 16k tokens.

Each stage leaves a JSON file with its settings; a later run with the same settings reuses it.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from subquad.checks import check_count
from subquad.data import digits
from subquad.disk import read_object
from subquad.machine import machine, readable
from subquad.measure.cost import YARDSTICK
from subquad.models import LanguageModel, load, shipped
from subquad.models.footprint import bytes_per_stream, imagine
from subquad.models.loss import cross_entropy
from subquad.models.sampling import Sampling
from subquad.models.state import size
from subquad.models.threads import run_small
from subquad.studies.columns import milliseconds, plain_table
from subquad.studies.compare import Work, compare, reasons
from subquad.studies.conclusions import conclusions
from subquad.studies.results import Comparison, Picture, Quality, from_json, save, to_json
from subquad.studies.settings import LENGTHS, Settings
from subquad.tasks.digits import MODEL, Digits
from subquad.tasks.images import Images
from subquad.tasks.write_images import image_shape, save_sheet, write_images
from subquad.training.train import learn

# one of each family, at sizes that fit 64 pixels: a stride of one row of the image, a window of two
CONTENDERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "softmax": {},
    "performer": {"features": 32},
    "strided": {"stride": digits.SIDE},
    "compressed": {},
    "routing": {"clusters": 4, "window": 2 * digits.SIDE},
}
SHIPPED, IMAGES = "mnist_linear", 6  # the checkpoint that writes first, and how many images
SEED = 8  # gives images that are easy to read
BORDER = 2  # pixels around its images that are not drawn, so that three fit into 80 columns
STEPS = 150  # of each mechanism in the comparison
WRITING = 1200  # steps of the linear model that writes digits worth looking at
TEMPERATURE = 0.8  # of the small models' sampling: their rare pixels are mostly mistakes
BATCH = 32
POINTS = 50  # of each loss curve
LINE = 300  # steps between lines of progress when the output is not a terminal
SHAPE = (digits.SIDE, digits.SIDE, 1)
Json = dict[str, Any]
Draw = Callable[[Tensor], RenderableType]  # images [N, rows, columns] for the terminal


def demo(
    out: Path,
    console: Console,
    draw: Draw,
    *,
    steps: int | None = None,
    writing: int = WRITING,
    lengths: Sequence[int] = LENGTHS,
    contenders: Sequence[str] = tuple(CONTENDERS),
    count: int = 64,
    fresh: bool = False,
    work: Work | None = None,
) -> Comparison:
    """Write, train, measure, print; returns what results.json holds."""
    steps = STEPS if steps is None else steps
    check_count("steps", steps)
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    first = _shipped(out, console, draw, fresh)
    images = digits.load()[0].pixels.long()
    console.print(
        f"{len(contenders)} transformers learn {len(images):,} handwritten digits of 8 x 8 pixels, one pixel "
        f"after the other: {steps} steps of {BATCH} images each",
        highlight=False,
    )
    learned = [_digits(name, name, out, console, steps, count, fresh) for name in contenders]
    console.print(f"linear once more, {writing} steps, to write digits as an RNN", highlight=False)
    written = _digits("linear", "writing", out, console, writing, count, fresh)
    console.print(f"time and memory at T = {min(lengths):,} to {max(lengths):,}", highlight=False)
    results = _scaling(out, console, contenders, lengths, fresh, work)
    results.quality = [from_json(Quality, stage["quality"], "quality") for stage in learned]
    results.pictures = [Picture(**stage["picture"]) for stage in (first, written, *learned) if stage is not None]
    results.summary = conclusions(results)
    save(results, out / "results.json")
    for table in (_digits_table(results.quality), _lengths_table(results), reasons(results)):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    for sentence in results.summary:
        console.print(sentence, highlight=False, markup=False)
    console.print(f"\ndigits written by linear as an RNN: {out / written['picture']['file']}", soft_wrap=True)
    console.print(f"figures: {out / 'results.json'}", soft_wrap=True)
    console.print(f"{time.perf_counter() - started:.0f} s in all; a later run reuses this (--fresh starts over)")
    return results


def _shipped(out: Path, console: Console, draw: Draw, fresh: bool) -> Json | None:
    """The first stage: a shipped model writes digits, drawn as they come. None if the checkpoint is missing."""
    settings = {"checkpoint": SHIPPED, "count": IMAGES, "seed": SEED}
    path, file = out / "digits_shipped.json", "digits_shipped.png"
    stage = None if fresh else _earlier(path, settings)
    if stage is not None and (out / file).exists():
        console.print(f"digits that the shipped model {SHIPPED} wrote in an earlier run:", highlight=False)
        console.print(draw(_inner(torch.tensor(stage["images"]))))
        return stage
    try:
        folder = shipped.find(SHIPPED)
        model = load(folder).float()  # it is shipped in 16 bits, which are slow on CPUs
        assert isinstance(model, LanguageModel)
        rows, columns, _ = image_shape(model) or (0, 0, 0)
    except (ValueError, OSError) as error:
        line = f"the shipped model {SHIPPED} cannot write the first digits ({error}), so the trainings come first"
        console.print(line, highlight=False, markup=False)
        return None
    shades = model.config.embedding.vocab or 2
    state = readable(bytes_per_stream(model, rows * columns))
    console.print(
        f"the shipped model {SHIPPED} writes new digits as an RNN, one pixel after the other; what it remembers of a "
        f"digit takes {state} from the first pixel to the last",
        highlight=False,
    )
    begun = time.perf_counter()
    images = torch.zeros(IMAGES, rows * columns)
    drawing = draw(_inner(images.view(IMAGES, rows, columns)))
    start = torch.full((IMAGES, 1), shades - 1)
    how = Sampling(exclude=(shades - 1,))
    with Live(drawing, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for n, pixel in enumerate(model.stream(start, rows * columns, sampling=how, seed=SEED)):
            images[:, n] = pixel / (shades - 2)
            if live is not None and n % columns == columns - 1:
                live.refresh()
    if not console.is_terminal:
        console.print(drawing)
    console.print(f"  {IMAGES} digits in {time.perf_counter() - begun:.1f} s\n", highlight=False)
    images = images.view(IMAGES, rows, columns)
    title = f"{SHIPPED}, which ships with the package: written pixel by pixel"
    save_sheet(images[..., None], 2, out / file, columns=IMAGES)
    stage = {"settings": settings, "images": images.tolist(), "picture": {"title": title, "file": file}}
    save(stage, path)
    return stage


def _inner(images: Tensor) -> Tensor:
    return images[:, BORDER:-BORDER, BORDER:-BORDER]


def _digits(name: str, stage: str, out: Path, console: Console, steps: int, count: int, fresh: bool) -> Json:
    """Train and test one mechanism and draw its digits, or reuse this stage of an earlier run."""
    settings = {"mechanism": name, "options": CONTENDERS[name], "steps": steps, "batch": BATCH, "count": count}
    settings["temperature"] = TEMPERATURE
    path, file = out / f"digits_{stage}.json", f"digits_{stage}.png"
    before = None if fresh else _earlier(path, settings)
    if before is not None and "standard_error" in before["quality"] and (out / file).exists():
        console.print(f"  {name}: {before['quality']['value']:.3f} bits/dim, from an earlier run", highlight=False)
        return before
    task = Images("digits", validation=1)  # trains on all other images: validation chooses nothing here
    every = max(1, steps // POINTS)
    training = dataclasses.replace(
        Digits.training, steps=steps, batch=BATCH, warmup=max(1, steps // 20), log_every=every
    )
    columns = (TextColumn("  {task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    info = TextColumn("{task.fields[info]}")
    with Progress(*columns, info, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=steps, info="")

        def watch(step: int, nats: float) -> None:
            bits = nats / math.log(2)
            progress.update(bar, completed=step, info=f"{bits:.3f} bits/dim")
            if not console.is_terminal and step // LINE > (step - every) // LINE and step < steps:
                console.print(f"  {name}: {bits:.3f} bits/dim after {step:,} of {steps:,} steps", highlight=False)

        # so small a model gains nothing from a second thread, and with one it is much slower on a busy machine
        fields = {**MODEL, "mechanism": (name, CONTENDERS[name])}
        learned = run_small(0, lambda: learn(task, fields, training, watch=watch))
    model, seconds, value = learned.model.eval(), learned.seconds, learned.measures["bits/dim"]
    assert isinstance(model, LanguageModel)
    test = digits.load()[1].pixels.long()
    error = run_small(0, lambda: standard_error(model, test))
    begun = time.perf_counter()
    images = write_images(model, count, SHAPE, sampling=Sampling(temperature=TEMPERATURE))
    rate = count / (time.perf_counter() - begun)
    how = f"at temperature {TEMPERATURE} after {steps:,} steps ({value:.2f} bits/dim on unseen digits)"
    title = f"{name}: written pixel by pixel {how}"
    picture(test[:count], images, out / file, title)
    model.save(out / f"model_{stage}")
    quality = Quality(
        mechanism=name,
        task="digits",
        metric="bits/dim",
        value=value,
        standard_error=error,
        steps=steps,
        seconds=seconds,
        curve=[[step, nats / math.log(2)] for step, nats in learned.curve if step % every == 0],
        parameters=sum(p.numel() for p in model.parameters()),
        images_per_second=rate,
        state_bytes_per_image=sum(map(size, imagine(model, digits.SIDE**2).layers)),
    )
    result = {"settings": settings, "machine": machine("cpu"), "quality": to_json(quality)}
    result["picture"] = {"title": title, "file": file}
    save(result, path)
    console.print(f"  {name}: {value:.3f} bits/dim in {seconds:.0f} s; {rate:.0f} images/s written", highlight=False)
    return result


@torch.no_grad()
def standard_error(model: LanguageModel, images: Tensor) -> float:
    """The standard error of bits/dim over these images [N, 64]: how much the mean varies with the choice of images."""
    inputs = nn.functional.pad(images[:, :-1], (1, 0), value=digits.SHADES)
    bits = cross_entropy(model(inputs), images, reduction="none").mean(1) / math.log(2)  # [N]
    return float(bits.std() / math.sqrt(len(bits)))


def picture(real: Tensor, generated: Tensor, path: Path, title: str, columns: int = 16) -> None:
    """Two sheets, one above the other: images of the data set, and images from a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained")
    for axis, images, name in zip(axes, (real, generated), ("real", title), strict=True):
        rows = len(images) // columns
        sheet = images[: rows * columns].view(rows, columns, digits.SIDE, digits.SIDE)
        sheet = nn.functional.pad(sheet, (1, 0, 1, 0)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        axis.imshow(sheet.numpy(), cmap="gray_r", vmin=0, vmax=digits.SHADES - 1)
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _earlier(path: Path, settings: Json) -> Json | None:
    """What an earlier run with the same settings saved; None if there is none or its file is damaged."""
    try:
        stage = read_object(path)
    except (OSError, ValueError):
        return None
    return stage if stage.get("settings") == settings else None


def _scaling(
    out: Path, console: Console, contenders: Sequence[str], lengths: Sequence[int], fresh: bool, work: Work | None
) -> Comparison:
    settings, folder = Settings(mechanisms=tuple(contenders), lengths=tuple(lengths)), out / "scaling"
    before = None if fresh else _earlier(folder / "results.json", json.loads(json.dumps(settings.to_dict())))
    if before is not None and not before["interrupted"]:
        console.print(f"  {len(before['rows'])} measurements of an earlier run", highlight=False)
        return from_json(Comparison, before, "")
    # too few mechanisms to recommend from
    results = compare(settings, folder, console, work=work, remember=False)
    if results.interrupted:
        raise KeyboardInterrupt
    return results


def _digits_table(quality: Sequence[Quality]) -> Table:
    title = (
        f"learned: {quality[0].steps:,} steps of the same digits, width and depth for each. bits/dim on unseen digits, "
        f"± twice its standard error; guessing costs {math.log2(digits.SHADES):.2f}"
    )
    table = plain_table(title, ("mechanism", "bits/dim", "training", "writes", "state an image"))
    for record in sorted(quality, key=lambda record: record.value or 0.0):
        table.add_row(
            record.mechanism,
            f"{record.value:.2f} ± {2 * (record.standard_error or 0.0):.2f}",
            f"{record.seconds:.0f} s",
            f"{record.images_per_second:.0f} images/s",
            _or_dash(readable, record.state_bytes_per_image),
        )
    return table


def _lengths_table(results: Comparison) -> Table:
    """Which mechanism is fastest at each length, and what the longest length costs."""
    lengths, crossed = results.settings["lengths"], {c.mechanism: c.training for c in results.crossovers}
    ratios: dict[str, dict[int, float]] = {row.mechanism: {} for row in results.rows}
    for row in results.rows:
        if row.training_ratio is not None:  # softmax against itself is 1: the measured ratio is noise
            ratios[row.mechanism][row.length] = 1.0 if row.mechanism == YARDSTICK else row.training_ratio.median
    best = {n: min((at[n] for at in ratios.values() if n in at), default=None) for n in lengths}
    longest = {row.mechanism: row for row in results.rows if row.length == max(lengths)}
    title = (
        f"one layer of each at T tokens: training time, {YARDSTICK}'s being 1 (* the fastest at that T; from: faster "
        f"than {YARDSTICK} from this T on). memory of training, time of a token and state at T = {max(lengths):,}"
    )
    columns = [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in lengths]
    table = plain_table(title, ("mechanism", *columns, "from", "memory", "token", "state"), gap=1)
    for name, at in sorted(ratios.items(), key=lambda item: item[1].get(max(lengths), math.inf)):
        cells = [f"{at[n]:.2f}{'*' if at[n] == best[n] else ' '}" if n in at else "- " for n in lengths]
        cells.append("" if name == YARDSTICK else _or_dash("{:,}".format, crossed.get(name)))
        last = longest.get(name)
        cells.append(_or_dash(readable, last and last.peak_bytes))
        cells.append(_or_dash(milliseconds, last and last.decode_ms))
        cells.append(_or_dash(readable, last and last.state_bytes))
        table.add_row(name, *cells, style="bold" if name == YARDSTICK else None)
    return table


def _or_dash(form: Callable[[Any], str], value: Any) -> str:
    return "-" if value is None else form(value)
