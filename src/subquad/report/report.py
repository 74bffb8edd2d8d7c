"""`subquad report`: runs as one HTML file that opens from disk, with the same figures as CSV and PNG next to it."""

import base64
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from subquad.disk import blaming
from subquad.machine import readable
from subquad.measure.cost import Row, Spread
from subquad.report import charts, training_runs
from subquad.report.html import Cell, chart, escape, facts, number, page, size, table
from subquad.report.published import beside
from subquad.report.reproduce_html import section
from subquad.report.runs import Json, Run, compared, read, reproduced
from subquad.report.visible import visible
from subquad.studies.columns import COLUMNS, Column
from subquad.studies.published import TABLES
from subquad.studies.results import to_json
from subquad.training.folder import CONFIG

SPREADS = [field.name for field in fields(Row) if field.type == Spread | None]
PNG = {"training_ms": "training", "forward_ms": "forward", "peak_bytes": "memory", "decode_ms": "decode"}


class Written(NamedTuple):
    html: Path
    beside: list[Path]  # CSV and PNG


def write(runs: Sequence[Path], out: Path | None = None) -> Written:
    """Read the runs, write `out` (by default report.html in the first run's folder), and CSV and PNG beside it."""
    found = read(runs)
    out = out or found[0].path.parent / "report.html"
    if out.is_dir() or not out.suffix:
        out = out / "report.html"
    for run in found:  # damage is found, and named, before anything is written
        with blaming(_blamed(run), ValueError):
            make([run])
    out.parent.mkdir(parents=True, exist_ok=True)
    with blaming(", ".join(map(_blamed, found)), ValueError):
        written = [*_write_csv(found, out), *_write_png(found, out)]
    out.write_text(make(found, [path.name for path in written]), encoding="utf-8")
    return Written(out, written)


def _blamed(run: Run) -> str:
    """The file that is wrong where a run cannot be shown; the others of a training are checked as they are read."""
    return f"RUN={str(run.path.parent / CONFIG if run.kind == 'train' else run.path)!r}"


def make(runs: Sequence[Run], files: Sequence[str] = ()) -> str:
    """The document."""
    main, others = compared(runs), [run for run in runs if run.kind not in ("compare", "reproduce", "train")]
    nav = [("subquad report", "#top")]
    learning = [run for run in runs if run.kind == "train"]
    parts = [f'<h1 id="top">{_heading(runs)}</h1>', _summary(main)]
    for i, run in enumerate(main):
        sections = list(_sections(run, f"r{i}"))
        if len(main) > 1:
            parts.append(f'<h2 id="r{i}">{escape(run.title)}</h2>')
            nav.append((run.name, f"#r{i}"))
        for anchor, title, body in sections:
            level = "h3" if len(main) > 1 else "h2"
            parts.append(f'<section><{level} id="r{i}-{anchor}">{title}</{level}>{body}</section>')
            if len(main) == 1:
                nav.append((title, f"#r{i}-{anchor}"))
    for i, run in enumerate(learning):
        parts.append(training_runs.section(run, f"l{i}"))
        nav.append((run.name, f"#l{i}"))
    for i, run in enumerate(reproduced(runs)):
        parts.append(section(run, f"t{i}", _pictures(run)))
        nav.append((run.reproduced.table, f"#t{i}"))
    published = beside(TABLES.values(), runs, only_ours=True)
    if published:
        parts.append(
            '<section><h2 id="published">Ours beside published</h2><p>The tables of the papers, with what these runs '
            "measured beside them (in colour) wherever it is the same thing. Times and memory are compared as ratios "
            f"to softmax.</p>{published}</section>"
        )
        nav.append(("Published", "#published"))
    if others:
        nav.append(("Other figures", "#other"))
        parts.append('<h2 id="other">Other figures</h2>')
        parts += [_generic(run) for run in others]
    nav.append(("Machine", "#machine"))
    parts.append('<section><h2 id="machine">Machines, versions, settings</h2>')
    for run in runs:
        parts.append(f"<h3>{escape(run.title)}</h3>{_provenance(run)}")
    parts.append("</section>")
    if files:
        links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in files)
        parts.append(f'<p class="note">The same figures for other programs, next to this file: {links}.</p>')
    return page("subquad report", "\n".join(parts), nav=nav)


def _heading(runs: Sequence[Run]) -> str:
    """What the page is about, from the first kind of run that has a section of its own."""
    kinds = {run.kind for run in runs}
    headings = {
        "compare": "Which attention, at which length?",
        "train": "What was trained",
        "reproduce": "The papers' experiments, run here",
        "lra": "Long Range Arena, run here",
        "lra-efficiency": "Long Range Arena: speed and memory",
    }
    return next((heading for kind, heading in headings.items() if kind in kinds), "Figures")


def _summary(runs: Sequence[Run]) -> str:
    out = []
    for i, run in enumerate(runs):
        settings = run.comparison.settings
        direction = charts.FORMS[settings.get("causal")]
        width, heads, batch, dtype = (settings.get(key) for key in ("dim", "heads", "batch", "dtype"))
        shape = f"width {width}, {heads} heads, batch {batch}, {dtype}"
        out.append(f'<p class="lead">{escape(run.title)}: {direction}, {escape(shape)}.</p>')
        if run.comparison.interrupted:
            out.append('<p class="warn">This run was interrupted: what is shown was measured before that.</p>')
        said = "".join(f"<li>{line}</li>" for line in _findings(run, f"r{i}"))
        out.append(f"<ul>{said}</ul>" if said else "")
    return "\n".join(out)


def _findings(run: Run, name: str) -> Iterable[str]:
    """What a reader would look for first, in sentences, from the figures."""
    rows = run.rows
    timed = [row for row in rows if row.training_ms]
    ratios = [(row.length, row.training_ratio.median, row.mechanism) for row in timed if row.training_ratio]
    if timed:
        longest = max(row.length for row in timed)
        at = sorted((ratio, name) for length, ratio, name in ratios if length == longest and name != "softmax")
        shares = ", ".join(f"{escape(name)} {number(ratio).shown}" for ratio, name in at[:3])
        if shares:
            yield f"Fastest training steps at T = {longest:,}, as shares of softmax's time: {shares}."
    wins = charts.wins(run, "training")
    if wins:
        earliest = sorted(wins, key=lambda name: wins[name])
        shown = {name: wins[name] for i, name in enumerate(earliest) if i < 6 or name == "linear"}
        more = f" … ({len(wins)} in all)" if len(shown) < len(wins) else ""
        yield f"Mechanisms that train faster than exact softmax: {escape(charts.in_words(shown))}{more}."
        first = wins[earliest[0]].length
        below = [ratio for length, ratio, _ in ratios if length < first]
        if below and min(below) >= 1:  # not where one won at a short length and lost again
            yield f"Below T = {first:,} none of them beats exact softmax in training: use softmax there."
    elif timed and len({row.mechanism for row in timed}) > 1:
        yield "None of the mechanisms measured trains faster than exact softmax at these lengths: use softmax."
    for task, metric in dict.fromkeys((q.task, q.metric) for q in run.quality):
        ranked = [q for q in run.quality if (q.task, q.metric) == (task, metric)]
        ranked.sort(key=lambda q: q.value or 0.0, reverse=not ranked[0].lower_is_better)
        best = ", ".join(f"{escape(q.mechanism)} {number(q.value).shown}" for q in ranked[:3])
        yield f"Best {escape(metric)} on {escape(task)}: {best}."
    left_out = sum(1 for row in rows if row.skipped or row.error) + len(run.comparison.quality_missing)
    if left_out:
        what = "1 measurement was" if left_out == 1 else f"{left_out} measurements were"
        yield f'{what} not possible; <a href="#{name}-left-out">the reasons</a> are listed.'


def _sections(run: Run, name: str) -> Iterable[tuple[str, str, str]]:
    """(anchor, title, body) of what a compare run holds."""
    curves = charts.curves(run)
    if curves:
        hint = (
            '<p class="note">Both axes are logarithmic: a straight line of slope 1 grows like T, of slope 2 like '
            f"T². {charts.PAIRED} A line that ends early was not measured further. Point at a line to read what was "
            "measured, press a name to show or hide it.</p>"
        )
        yield "curves", "Cost over length", chart(f"{name}-curves-chart", curves) + hint
    crossovers = _crossovers(run)
    if crossovers:
        yield "crossovers", "Crossovers", crossovers
    if run.comparison.growth:
        yield "growth", "Growth", _growth(run)
    against = charts.quality_against_cost(run)
    if against:
        yield "quality", "Quality against cost", chart(f"{name}-quality-chart", against) + _quality(run)
    losses = charts.loss_curves(run)
    if losses:
        yield "losses", "Loss curves", chart(f"{name}-loss-chart", losses)
    pictures = _pictures(run)
    if pictures:
        yield "pictures", "Generated pictures", pictures
    if run.rows:
        yield "figures", "All figures", _figures(run, name)


def _figures(run: Run, name: str) -> str:
    rows, missing = [], []
    for row in run.rows:
        if row.skipped or row.error:
            reason = f"skipped: {row.skipped}" if row.skipped else f"failed: {row.error}"
            missing.append([Cell(row.mechanism), Cell(f"T = {row.length:,}"), Cell(reason, css="long")])
        if any(getattr(row, column.field) is not None for column in COLUMNS):
            form = Cell("causal" if row.causal else "bidirectional")
            figures = [_figure(column, getattr(row, column.field)) for column in COLUMNS]
            rows.append([Cell(row.mechanism), form, number(row.length), *figures])
    for q in run.comparison.quality_missing:
        missing.append([Cell(q.mechanism), Cell(f"quality on {q.task}"), Cell(q.reason, css="long")])
    columns = ["mechanism", "form", "T", *(column.heading for column in COLUMNS)]
    body = table(columns, rows, name=f"{name}-rows", caption="medians; low to high in brackets", filtered=True)
    if missing:
        body += f'<h3 id="{name}-left-out">Not measured, and why</h3>' + table(["mechanism", "at", "reason"], missing)
    return body


def _figure(column: Column, value: Spread | float | None) -> Cell:
    if not isinstance(value, Spread):
        return size(value) if column.format is readable else number(value)
    low, high = number(value.low).shown, number(value.high).shown
    shown = number(value.median)
    return shown._replace(shown=f'{escape(shown.shown)} <span class="soft">({low} to {high})</span>', raw=True)


def _crossovers(run: Run) -> str:
    """A row for each mechanism that was measured beside softmax; nothing if none was."""
    measured: dict[str, dict[str, int]] = {}  # of each mechanism, the longest length in each respect
    for row in run.rows:
        for what, ratio in charts.RATIOS.items():
            if row.mechanism != "softmax" and getattr(row, ratio) is not None:
                longest = measured.setdefault(row.mechanism, {})
                longest[what] = max(longest.get(what, 0), row.length)
    won = {what: charts.wins(run, what) for what in charts.RATIOS}

    def cell(name: str, what: str) -> Cell:
        win = won[what].get(name)
        if win is not None:
            return win.cell()
        longest = measured[name].get(what)
        return Cell(f"not up to {longest:,}", math.inf, "n") if longest else number(None)

    rows = [[Cell(name), Cell(charts.family(name)), *(cell(name, what) for what in charts.RATIOS)] for name in measured]
    titles = ["mechanism", "family", "training time", "forward time", "memory"]
    return table(titles, rows, caption="the length from which each costs less than exact softmax") if rows else ""


def _growth(run: Run) -> str:
    rows = [
        [
            Cell(g.mechanism), number(g.time), number(g.documented_time), number(g.memory),
            number(g.documented_memory), Cell(", ".join(f"{n:,}" for n in g.lengths_used)),
        ]
        for g in run.comparison.growth
    ]  # fmt: skip
    titles = [
        "mechanism",
        "time, measured",
        "time, documented",
        "memory, measured",
        "memory, documented",
        "fitted over T =",
    ]
    note = (
        '<p class="note">The exponent e of T^e, fitted over the longest lengths. Fixed costs hide '
        "growth where T is small, so measured exponents tend to be below the documented ones; caches that overflow can "
        "raise them.</p>"
    )
    return table(titles, rows) + note


def _quality(run: Run) -> str:
    rows = [
        [
            Cell(q.mechanism), Cell(q.task), Cell(q.metric), number(q.value, 4),
            Cell("lower" if q.lower_is_better else "higher"), number(q.steps), number(q.seconds),
        ]
        for q in run.quality
    ]  # fmt: skip
    return table(["mechanism", "task", "metric", "value", "better is", "steps", "seconds"], rows)


def _pictures(run: Run) -> str:
    figures = []
    for picture in run.pictures:
        file = run.path.parent / picture.file
        title = escape(picture.title)
        if file.is_file():
            kind = {"jpg": "jpeg", "svg": "svg+xml"}.get(file.suffix[1:].lower(), file.suffix[1:].lower())
            data = base64.b64encode(file.read_bytes()).decode()
            css = ' class="ink"' if _ink_on_white(file) else ""
            shown = f'<img{css} alt="{title}" src="data:image/{kind};base64,{data}">'
        else:
            shown = f'<p class="warn">{escape(picture.file)} is not in the run folder.</p>'
        figures.append(f"<figure>{shown}<figcaption>{title}</figcaption></figure>")
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _ink_on_white(file: Path) -> bool:
    """Whether most of a picture is white, so that a dark page shows it inverted; photographs are only dimmed."""
    import matplotlib.image

    try:
        pixels = matplotlib.image.imread(file)
    except (OSError, SyntaxError, ValueError):  # no picture that can be read here, an SVG for example
        return False
    bright = pixels / (255 if pixels.dtype.kind == "u" else 1)
    white = bright > 0.9 if bright.ndim == 2 else (bright[..., :3] > 0.9).all(-1)
    return float(white.mean()) > 0.5


def _provenance(run: Run) -> str:
    told: Json = {key: run.data[key] for key in ("subquad", "commit", "date") if key in run.data}
    machine = {k: size(v).shown if k.endswith("_bytes") and v else v for k, v in run.machine.items()}
    settings = run.data.get("settings")
    return facts({"file": run.path.name, **told, **machine, **(settings if isinstance(settings, Mapping) else {})})


def _generic(run: Run) -> str:
    """Any other JSON: its lists of records as tables, the rest as names and values."""
    told = {"kind", "machine", "device", "gpu", "cpu", "versions", "torch", "triton", "python", "threads", "settings"}
    parts = [f'<section><h3 id="other-{escape(run.name)}">{escape(run.title)}</h3>']
    plain: Json = {}
    for path, value in _leaves({k: v for k, v in run.data.items() if k not in told}):
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            parts.append(_records(path, value))
        else:
            plain[path] = value
    return parts[0] + (facts(plain) if plain else "") + "".join(parts[1:]) + "</section>"


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """Tables of numbers (an object of objects with the same keys) count as records with their key first."""
    for key, inner in value.items():
        here = f"{path} / {key}" if path else str(key)
        if isinstance(inner, Mapping) and inner:
            kept = list(inner.values())
            if len(kept) > 1 and all(isinstance(v, Mapping) for v in kept) and _flat(kept):
                yield here, [{"": k, **v} for k, v in inner.items()]
            else:
                yield from _leaves(inner, here)
        else:
            yield here, inner


def _flat(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(not isinstance(v, (Mapping, list)) for row in rows for v in row.values())


def _records(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_value(row.get(column)) for column in columns] for row in rows]
    shown = table([c.replace("_", " ") or "case" for c in columns], cells)
    opened = " open" if len(rows) <= 24 else ""
    return f"<details{opened}><summary>{escape(title)}, {len(rows)} rows</summary>{shown}</details>"


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
    """Full precision, one file for each kind of record; spreads become three columns."""
    written = []
    for kind in ("rows", "growth", "crossovers", "quality"):
        records = []
        for run in compared(runs):
            for record in to_json(getattr(run.comparison, kind)):
                flat: Json = {"run": run.name}
                for key, value in record.items():
                    if kind == "rows" and key in SPREADS:
                        flat.update({f"{key}_{k}": (value or {}).get(k) for k in ("median", "low", "high")})
                    elif key != "curve":
                        flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
                records.append(flat)
        if records:
            written.append(_csv(out.with_name(f"{out.stem}_{kind}.csv"), records))
    points = [
        {"run": run.name, "mechanism": q.mechanism, "task": q.task, "metric": q.metric, "step": step, "value": value}
        for run in compared(runs)
        for q in run.comparison.quality
        for step, value in q.curve
    ]
    return [*written, _csv(out.with_name(f"{out.stem}_curves.csv"), points)] if points else written


def _csv(path: Path, records: Sequence[Json]) -> Path:
    columns = list(dict.fromkeys(key for record in records for key in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(
            {key: visible(value) if isinstance(value, str) else value for key, value in record.items()}
            for record in records
        )
    return path


def _write_png(runs: Sequence[Run], out: Path) -> list[Path]:
    written = []
    for run in runs:
        learning = training_runs.curves(run) if run.kind == "train" else None
        if learning:
            path = out.with_name(f"{out.stem}_{run.name}.png")
            charts.draw(learning, range(len(learning["views"])), path)
            written.append(path)
    many = len(compared(runs)) > 1
    for index, run in enumerate(compared(runs)):
        stem = f"{out.stem}_{index + 1}" if many else out.stem
        curves = charts.curves(run)
        wanted = {title: PNG[key] for key, title, *_ in charts.MEASURES if key in PNG}
        jobs = [
            (curves, i, wanted[v["label"]])
            for i, v in enumerate(curves["views"] if curves else [])
            if v["label"] in wanted
        ]
        for spec, name in ((charts.quality_against_cost(run), "quality"), (charts.loss_curves(run), "losses")):
            for i, view in enumerate(spec["views"] if spec else []):
                first = i == 0 or name == "losses"
                if spec and first and view["series"]:
                    jobs.append((spec, i, name if i == 0 else f"{name}_{i + 1}"))
        for spec, view, name in jobs:
            path = out.with_name(f"{stem}_{name}.png")
            if spec:
                charts.draw(spec, view, path)
                written.append(path)
    return written
