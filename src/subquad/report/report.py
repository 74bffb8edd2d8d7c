"""`subquad report`: runs as one HTML file that opens from disk, with the same figures as CSV and PNG next to it."""

import base64
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from subquad.disk import blaming
from subquad.machine import readable
from subquad.measure.cost import Row, Spread
from subquad.measure.growth import RATIOS, names, series
from subquad.report import charts, lra, reproduce_html, training_runs
from subquad.report.html import Cell, number, render, size, spelt
from subquad.report.published import beside
from subquad.report.runs import Json, Run, by_task, compared, read
from subquad.studies.columns import COLUMNS, Column
from subquad.studies.published import TABLES
from subquad.studies.results import ArenaTable, to_json
from subquad.training.folder import CONFIG

SPREADS = [field.name for field in fields(Row) if field.type == Spread | None]
PNG = {"training_ms": "training", "forward_ms": "forward", "peak_bytes": "memory", "decode_ms": "decode"}
ABOUT_MACHINE = {"kind", "machine", "device", "gpu", "cpu", "versions", "torch", "triton", "python", "threads"}


class Written(NamedTuple):
    html: Path
    beside: list[Path]  # CSV and PNG


def write(runs: Sequence[Path], out: Path | None = None) -> Written:
    """Read the runs; write `out` (by default report.html in the first run's folder), with CSV and PNG beside it."""
    loaded = read(runs)
    out = out or loaded[0].path.parent / "report.html"
    if out.is_dir() or not out.suffix:
        out = out / "report.html"
    for run in loaded:  # fails for a damaged run before anything is written
        with blaming(_file_of(run), ValueError):
            make([run])
    out.parent.mkdir(parents=True, exist_ok=True)
    with blaming(", ".join(map(_file_of, loaded)), ValueError):
        written = [*_write_csv(loaded, out), *_write_png(loaded, out)]
    out.write_text(make(loaded, [path.name for path in written]), encoding="utf-8")
    return Written(out, written)


def _file_of(run: Run) -> str:
    """The file to name if a run cannot be shown. The other files of a training are checked when they are read."""
    return f"RUN={str(run.path.parent / CONFIG if run.kind == 'train' else run.path)!r}"


def make(runs: Sequence[Run], files: Sequence[str] = ()) -> str:
    """The document."""
    return render(
        "report.html",
        kinds={run.kind for run in runs},
        comparisons=[_comparison(run, f"r{i}") for i, run in enumerate(compared(runs))],
        trained=[training_runs.shown(run, f"l{i}") for i, run in enumerate(r for r in runs if r.kind == "train")],
        tables=[
            {**reproduce_html.shown(run), "anchor": f"t{i}", "pictures": _pictures(run)}
            for i, run in enumerate(run for run in runs if run.kind == "reproduce")
        ],
        published=beside(TABLES.values(), runs, only_ours=True),
        arenas=[_arena(run) for run in runs if isinstance(run.figures, ArenaTable) and lra.cells(run.figures)],
        others=[_generic(run) for run in runs if run.kind not in ("compare", "reproduce", "train")],
        machines=[(run.title, _provenance(run)) for run in runs],
        files=files,
        paired=charts.PAIRED,
    )


def _comparison(run: Run, anchor: str) -> Json:
    """The data of a comparison for the page, without sections that have no figures."""
    against = charts.quality_against_cost(run)
    sections: Json = {
        "curves": charts.curves(run),
        "crossovers": _crossovers(run),
        "growth": _growth(run),
        "quality": against and {"chart": against, "rows": _quality(run)},
        "losses": charts.loss_curves(run),
        "pictures": _pictures(run),
        "figures": run.rows and _figures(run),
    }
    settings = {key: run.settings.get(key) for key in ("dim", "heads", "batch", "dtype")}
    return {
        "anchor": anchor,
        "name": run.name,
        "title": run.title,
        "form": charts.FORMS[run.settings.get("causal")],
        "settings": settings,
        "interrupted": run.comparison.interrupted,
        "findings": _findings(run),
        "sections": {key: part for key, part in sections.items() if part},
    }


def _findings(run: Run) -> Json:
    """The main results, which a reader looks for first."""
    timed = [row for row in run.rows if row.training_ms]
    longest = max((row.length for row in timed), default=0)
    ratios = [(row.length, row.mechanism, row.training_ratio.median) for row in timed if row.training_ratio]
    at_longest = {name: ratio for length, name, ratio in ratios if length == longest and name != "softmax"}
    wins = charts.wins(run, "training")
    earliest = sorted(wins, key=lambda name: wins[name])
    shown = {name: wins[name] for i, name in enumerate(earliest) if i < 6 or name == "linear"}
    first = wins[earliest[0]].length if wins else 0
    below = [ratio for length, _, ratio in ratios if length < first]
    best = []
    for (task, metric), records in by_task(run).items():
        records.sort(key=lambda q: q.value or 0.0, reverse=not records[0].lower_is_better)
        best.append((metric, task, _listed({q.mechanism: q.value or 0.0 for q in records[:3]})))
    return {
        "longest": longest,
        "fastest": _listed(dict(sorted(at_longest.items(), key=lambda item: item[1])[:3])),
        "wins": charts.in_words(shown),
        "more": len(wins) if len(shown) < len(wins) else 0,
        "below": first if below and min(below) >= 1 else 0,  # 0 if a mechanism won at a short length and lost again
        "none_wins": not wins and len({row.mechanism for row in timed}) > 1,
        "best": best,
        "missing": sum(1 for row in run.rows if row.skipped or row.error) + len(run.comparison.quality_missing),
    }


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value).shown}" for name, value in values.items())


def _figures(run: Run) -> dict[str, Any]:
    """The table of all measurements, and the reasons for those that are missing."""
    rows, missing = [], []
    for row in run.rows:
        if row.skipped or row.error:
            reason = f"skipped: {row.skipped}" if row.skipped else f"failed: {row.error}"
            missing.append([Cell(row.mechanism), Cell(f"T = {row.length:,}"), Cell(reason, css="long")])
        if row.uncaptured:
            reason = f"a decoding step without the time of Python: {row.uncaptured}"
            missing.append([Cell(row.mechanism), Cell(f"T = {row.length:,}"), Cell(reason, css="long")])
        figures = {column: getattr(row, column.field) for column in COLUMNS}
        if any(figure is not None for figure in figures.values()):
            cells = (_figure(column, figure) for column, figure in figures.items())
            rows.append([Cell(row.mechanism), Cell(charts.FORMS[row.causal]), number(row.length), *cells])
    for q in run.comparison.quality_missing:
        missing.append([Cell(q.mechanism), Cell(f"quality on {q.task}"), Cell(q.reason, css="long")])
    return {"columns": [column.heading for column in COLUMNS], "rows": rows, "missing": missing}


def _figure(column: Column, value: Spread | float | None) -> Cell:
    if not isinstance(value, Spread):
        return size(value) if column.format is readable else number(value)
    shown, low, high = (number(v) for v in (value.median, value.low, value.high))
    return shown._replace(
        shown=Markup('{} <span class="soft">({} to {})</span>').format(shown.shown, low.shown, high.shown)
    )


def _crossovers(run: Run) -> list[list[Cell]]:
    """A row for each mechanism that was measured beside softmax; no rows if none was."""
    won = {what: charts.wins(run, what) for what in RATIOS}
    rows = []
    for name in names(run.rows):
        measured = {what: series(run.rows, name, ratio)[0] for what, ratio in RATIOS.items()}
        if name != "softmax" and any(measured.values()):
            cells = (_crossover(won[what].get(name), lengths) for what, lengths in measured.items())
            rows.append([Cell(name), Cell(charts.family(name)), *cells])
    return rows


def _crossover(win: charts.Win | None, lengths: Sequence[int]) -> Cell:
    if win is not None:
        return win.cell()
    return Cell(f"not up to {max(lengths):,}", math.inf, "n") if lengths else number(None)


def _growth(run: Run) -> list[list[Cell]]:
    rows = []
    for g in run.comparison.growth:
        figures = (number(value) for value in (g.time, g.documented_time, g.memory, g.documented_memory))
        rows.append([Cell(g.mechanism), *figures, Cell(", ".join(f"{n:,}" for n in g.lengths_used))])
    return rows


def _quality(run: Run) -> list[list[Cell]]:
    rows = []
    for q in run.quality:
        better = Cell("lower" if q.lower_is_better else "higher")
        figures = number(q.value, 4), better, number(q.steps), number(q.seconds)
        rows.append([Cell(q.mechanism), Cell(q.task), Cell(q.metric), *figures])
    return rows


def _pictures(run: Run) -> list[Json]:
    """The pictures of a run as data; a picture whose file is missing has no data."""
    shown = []
    for picture in run.pictures:
        file, data, ink = run.path.parent / picture.file, "", False
        if file.is_file():
            kind = {"jpg": "jpeg", "svg": "svg+xml"}.get(file.suffix[1:].lower(), file.suffix[1:].lower())
            data = f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
            ink = _ink_on_white(file)
        shown.append({"title": picture.title, "file": picture.file, "data": data, "ink": ink})
    return shown


def _ink_on_white(file: Path) -> bool:
    """Whether most of a picture is white. A dark page inverts such pictures and only dims the others."""
    import matplotlib.image

    try:
        pixels = matplotlib.image.imread(file)
    except (OSError, SyntaxError, ValueError):  # a kind of picture that matplotlib cannot read, such as SVG
        return False
    bright = pixels / (255 if pixels.dtype.kind == "u" else 1)
    white = bright > 0.9 if bright.ndim == 2 else (bright[..., :3] > 0.9).all(-1)
    return float(white.mean()) > 0.5


def _provenance(run: Run) -> Json:
    known: Json = {key: run.data[key] for key in ("subquad", "commit", "date") if key in run.data}
    machine = {k: size(v).shown if k.endswith("_bytes") and v else v for k, v in run.machine.items()}
    return {"file": run.path.name, **known, **machine, **run.settings}


def _arena(run: Run) -> Json:
    """The tables of `subquad lra`: how each figure came about, in columns that sort."""
    assert isinstance(run.figures, ArenaTable)
    lines = lra.how(run.figures)
    columns = ["task", "row", "accuracy, %", "best of the seeds", "seeds", "pretrained", "augmentation", "positions"]
    columns += ["updates before", "updates on the task", "examples before", "examples on the task", "GPU seconds"]
    rows = []
    for line in lines:
        named = [Cell(line.task), Cell(line.row), number(line.accuracy, 4), number(line.best, 4), number(line.seeds)]
        words = [Cell(line.pretrained), Cell(line.augmentation), Cell(line.positions)]
        counts = [number(round(value)) for value in (*line.updates, *line.examples)]
        rows.append([*named, *words, *counts, number(round(line.seconds))])
    caption = lra.caption(run.figures)
    return {"name": run.name, "title": run.title, "columns": columns, "rows": rows, "notes": caption.splitlines()}


def _generic(run: Run) -> Json:
    """Any other JSON file: lists of records become tables, the rest is shown as names and values."""
    plain: Json = {}
    tables = []
    for path, value in _leaves({k: v for k, v in run.data.items() if k not in {*ABOUT_MACHINE, "settings"}}):
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            rows = [[_value(row.get(column)) for column in columns] for row in value]
            tables.append((path, [column.replace("_", " ") or "case" for column in columns], rows))
        else:
            plain[path] = value
    return {"name": run.name, "title": run.title, "plain": plain, "tables": tables}


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """(path, value) of all values in nested objects. Several objects of plain values become one table."""
    for key, inner in value.items():
        here = f"{path} / {key}" if path else str(key)
        if not isinstance(inner, Mapping) or not inner:
            yield here, inner
        elif len(inner) > 1 and all(isinstance(v, Mapping) and _is_flat(v) for v in inner.values()):
            yield here, [{"": k, **v} for k, v in inner.items()]
        else:
            yield from _leaves(inner, here)


def _is_flat(record: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, Mapping | list) for value in record.values())


def _value(value: Any) -> Cell:
    if isinstance(value, bool) or value is None:
        return Cell({True: "yes", False: "no", None: ""}[value])
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, Mapping):
        return Cell(", ".join(f"{k} {_value(v).shown}" for k, v in value.items()), css="long")
    if isinstance(value, list):
        return Cell(", ".join(_value(v).shown for v in value), css="long")
    return Cell(str(value))


def _write_csv(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write a CSV file in full precision for each kind of record; a spread becomes three columns."""
    files: dict[str, list[Json]] = {kind: [] for kind in ("rows", "growth", "crossovers", "quality", "curves")}
    for run in compared(runs):
        for kind in ("rows", "growth", "crossovers", "quality"):
            for record in to_json(getattr(run.comparison, kind)):
                flat: Json = {"run": run.name}
                for key, value in record.items():
                    if key in SPREADS:
                        flat.update({f"{key}_{k}": (value or {}).get(k) for k in ("median", "low", "high")})
                    elif key != "curve":
                        flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
                files[kind].append(flat)
        for q in run.comparison.quality:
            about = {"run": run.name, "mechanism": q.mechanism, "task": q.task, "metric": q.metric}
            files["curves"] += [{**about, "step": step, "value": value} for step, value in q.curve]
    return [_csv(out.with_name(f"{out.stem}_{kind}.csv"), records) for kind, records in files.items() if records]


def _csv(path: Path, records: Sequence[Json]) -> Path:
    columns = list(dict.fromkeys(key for record in records for key in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(spelt(record) for record in records)
    return path


def _write_png(runs: Sequence[Run], out: Path) -> list[Path]:
    jobs: list[tuple[str, Json, int | Sequence[int]]] = []  # (end of the file's name, chart, views)
    for run in runs:
        training = training_runs.curves(run) if run.kind == "train" else None
        if training:
            jobs.append((run.name, training, range(len(training["views"]))))
    titles = {title: PNG[key] for key, title, *_ in charts.MEASURES if key in PNG}
    several = len(compared(runs)) > 1
    for index, run in enumerate(compared(runs), start=1):
        prefix = f"{index}_" if several else ""
        if curves := charts.curves(run):
            labels = [view["label"] for view in curves["views"]]
            jobs += [(f"{prefix}{titles[label]}", curves, i) for i, label in enumerate(labels) if label in titles]
        if quality := charts.quality_against_cost(run):
            jobs.append((f"{prefix}quality", quality, 0))
        if losses := charts.loss_curves(run):
            count = len(losses["views"])
            jobs += [(f"{prefix}losses" + (f"_{i + 1}" if i else ""), losses, i) for i in range(count)]
    written = []
    for name, spec, views in jobs:
        written.append(out.with_name(f"{out.stem}_{name}.png"))
        charts.draw(spec, views, written[-1])
    return written
