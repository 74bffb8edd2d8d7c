"""Figures that do not come from a training run: cost over length, iterations, contexts, and what models write."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from subquad.checks import check_plain, counts, refuse
from subquad.machine import readable
from subquad.measure.cost import DTYPES
from subquad.measure.growth import amount
from subquad.studies.reproduce import scaling
from subquad.studies.reproduce.row import Reproduction, heading, settings_of
from subquad.studies.reproduce.tables import Row
from subquad.studies.results import Json, Picture
from subquad.studies.settings import parse_lengths
from subquad.tasks.configure import configure
from subquad.training.config import differences, parse
from subquad.training.folder import RESULT, read_config

SCORED = 131_072  # bytes of the test part that each context is evaluated on


def measure_scaling(run: Reproduction) -> None:
    """Measure every contender at every length that an earlier call did not. The settings must be those of that call."""
    cuda = run.budget.place.startswith("cuda")
    usual: Json = {"device": run.budget.place, "dtype": "bfloat16" if cuda else "float32"}
    usual |= {} if cuda else {"tokens": 8192, "samples": 3}
    given = _scaling_settings(run.budget.settings)
    lengths = given.pop("lengths", scaling.LENGTHS)
    options, results = {**usual, **given}, run.results
    changed = differences(options, results.scaling or {}) if results.rows else []
    if changed:
        raise ValueError(
            f"{run.folder} was measured with other settings ({'; '.join(changed)}): --out chooses another folder"
        )
    results.scaling = options
    order = {row.name: place for place, row in enumerate(run.table.rows)}
    for row in run.rows:
        have = {measured.length for measured in results.rows if measured.label == row.name}
        left = sorted({*lengths} - have)
        if not left and row.name in results.results:
            run.say(row.name, "done before")
            continue
        for new in scaling.layers(lengths=left, contenders=(row.name,), **options):
            results.rows.append(new)
            results.rows.sort(key=lambda r: (order[r.label], r.length))
            results.growth = scaling.growth(results.rows)
            run.measured_now()
            run.keep()
            time = new.training_ms
            cost = "" if time is None else f"{time.median:.3g} ms, {readable(new.peak_bytes or 0)} a sample"
            run.say(row.name, f"N = {new.length:,}: {new.skipped or new.error or cost}")
        last = next((r for r in reversed(results.rows) if r.label == row.name and r.training_ms), None)
        grown = next((g for g in results.growth if g.mechanism == row.name), None)
        results.results[row.name] = heading(
            run.table,
            row,
            settings=[f"{key}={value}" for key, value in given.items() if usual.get(key) != value],
            longest=last.length if last else 0,
            training_ms=amount(last, "training_ms") if last else None,
            peak_bytes=last.peak_bytes if last else None,
            growth={"time": grown and grown.time, "memory": grown and grown.memory},
        )
        run.keep()


def _scaling_settings(settings: tuple[str, ...]) -> Json:
    """Settings of the scaling test. It trains nothing, so it does not accept those of `subquad train`."""
    known = ("tokens", "limit", "samples", "dim", "heads", "dtype", "lengths")
    options: Json = {}
    for setting in settings:
        (key, *rest), value = parse(setting)
        if key not in known or rest:
            raise ValueError(
                f"--set {setting} is not a setting of the scaling test: accepted are {', '.join(known)}, as KEY=VALUE"
            )
        if key == "lengths":
            value = parse_lengths(setting.partition("=")[2].strip().strip("[]"))
        if key == "dtype" and value not in DTYPES:
            refuse(key, value, " or ".join(DTYPES))
        if key == "limit":
            check_plain(key, value, float)
            if value <= 0:
                refuse(key, value, "a positive number of seconds")
        if key not in ("dtype", "limit") and not counts(value if key == "lengths" else [value]):
            refuse(key, value, f"{'integers' if key == 'lengths' else 'an integer'} of at least 1")
        options[key] = value
    dim, heads = options.get("dim", scaling.DIM), options.get("heads", scaling.HEADS)
    if dim % heads:
        refuse("heads", heads, f"a divisor of dim={dim}")
    return options


def measure_contexts(run: Reproduction, trained: Path, settings: list[str]) -> None:
    """bits/byte of a finished run of the task text, at each least context, scaled to the window of that run.

    settings  those of that run in addition to its table's own
    """
    from subquad.data import text
    from subquad.models import LanguageModel
    from subquad.tasks.text import measure_context

    config = read_config(trained)
    length, corpus = config.data["length"], text.load(config.data["set"])
    cuda = run.budget.place.startswith("cuda")
    model = LanguageModel.load(trained / "model", run.budget.place)
    tokens = corpus.test[: length + 1 + (SCORED if cuda else 4 * length)]
    for row in run.rows:
        least = int(row.published["context"]) * length // 12288
        precision = torch.bfloat16 if cuda else None
        value, count = measure_context(model, tokens, length, least, 8 if cuda else 1, precision)
        run.results.results[row.name] = heading(
            run.table, row, data=corpus.name, settings=settings, value=value, context=least, window=length,
            bytes=count,
        )  # fmt: skip
        run.say(row.name, f"{value:.4f} bits/byte with at least {least:,} bytes before each")
        run.measured_now()
        run.keep()


def measure_iterations(run: Reproduction) -> None:
    """Time an iteration of whole models: those of the chosen rows, relative to the first one that the table names."""
    first, *others = run.table.iterations
    chosen = {row.name: row for row in run.rows if row.name in run.table.iterations}
    if len(chosen) < 2 or first not in chosen:
        why = f"--rows must name {first}, which the others are compared with, and one of {', '.join(others)}"
        run.say("iterations", f"not timed: {why}")
        return
    makers = {name: partial(_iteration, run, row) for name, row in {first: chosen[first], **chosen}.items()}
    models = scaling.iterations(makers, on_line=lambda line: run.say("iterations", line))
    for name, timed in models.items():
        if name in run.results.results:
            run.results.results[name].iteration = timed
        run.say(name, f"{timed['iteration_ms']['median']:.1f} ms, {timed['ratio']['median']:.2f} of {first}")
    run.results.iterations = {"beside": first, "models": models}
    run.measured_now()
    run.keep()


def _iteration(run: Reproduction, row: Row) -> scaling.Iteration:
    """An iteration with a row's own task and settings, on a batch of its training data."""
    task, config = configure(run.table.task, settings_of(run.table, row, run.budget))
    training, place = config.training, run.budget.place
    torch.manual_seed(0)
    batch = task.source("train").batch(np.arange(training.micro_batch or training.batch), 0)
    batch = {name: tensor.to(place) for name, tensor in batch.items()}
    model = task.make_model(config.model).to(place)
    precision = "bf16" if place.startswith("cuda") else "fp32"
    return scaling.Iteration(
        task, model, batch, precision=precision, compile=training.compile, capture=training.capture
    )


def write_samples(run: Reproduction, count: int) -> None:
    """Let the trained models write files: a sheet of images, or pieces of music."""
    from subquad.models import LanguageModel
    from subquad.models.shipped import card
    from subquad.tasks import TASKS
    from subquad.training.task import WriteOptions

    task = TASKS[run.table.task]
    for row in run.rows:
        if "out" not in task.write_options or not (run.folder / row.name / RESULT).is_file():
            continue
        folder, trained = run.folder / row.name, run.results.results[row.name]
        out = run.folder / f"{row.name}.png" if task.writes == "images" else folder / "piece"
        model, data = LanguageModel.load(folder / "model", run.budget.place), card(folder / "model").get("data", {})
        written = task.write(model, data, WriteOptions(count=count, out=out), run.console)
        if task.writes != "images":
            trained.pieces = [str(path.relative_to(run.folder)) for path in written.files]
            continue
        trained.images_per_second_written = written.per_second
        picture = Picture(title=f"{row.name}: {count} images, {trained.value:.3f} bits/dim", file=out.name)
        run.results.pictures = [p for p in run.results.pictures if p.file != out.name] + [picture]
        run.keep()
