"""The contents of charts, as data for page.js and as PNG files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from subquad.measure.cost import Row, Spread
from subquad.measure.growth import (
    RATIOS,
    amount,
    between,
    crossover,
    grouped,
    names,
    series,
    steady_times,
    usual_softmax,
)
from subquad.mechanisms import MECHANISMS
from subquad.report.html import Cell, spelt, template
from subquad.report.runs import Json, Run, by_task
from subquad.report.visible import visible

FEW = 1e4  # if highest / lowest is larger, an axis labels decades only
CHOSEN = ("softmax", "linear")  # always shown at first, together with the BEST cheapest series
MANY, BEST = 7, 3  # a chart of more than MANY series shows only some at first
PAIRED = (  # the note below curves
    "Each time was measured within a second of softmax of the same form (causal or bidirectional), as a ratio. A line "
    "shows the median ratio times the usual time of softmax in this run, so it crosses the line of that softmax where "
    "the ratio is 1. A ring marks that point."
)
LESS = {"training": "Faster than softmax", "forward": "Faster than softmax", "memory": "Less memory than softmax"}
MEASURES = (  # key of a row, title, label of the axis, unit, key in crossovers, key of the ratio to softmax
    ("training_ms", "Training step: time over length", "forward + backward, ms", "ms", "training", "training_ratio"),
    ("forward_ms", "Forward pass: time over length", "forward, ms", "ms", "forward", "forward_ratio"),
    ("peak_bytes", "Training step: peak memory over length", "peak memory", "bytes", "memory", "memory_ratio"),
    ("decode_ms", "Decoding: time for one token after a prefix", "one token, ms", "ms", None, "decode_ratio"),
    ("state_bytes", "Decoding: what must be kept", "state", "bytes", None, None),
    ("training_ratio", "Training step against softmax", "time / time of softmax", "x", "training", None),
    ("forward_ratio", "Forward pass against softmax", "time / time of softmax", "x", "forward", None),
)
FORMS = {True: "causal", False: "bidirectional", None: "causal where there is a causal form"}
FAMILIES = {  # in the order of the lecture "week 8: XFormer", then the families that it does not have
    "exact": "Exact attention",
    "human patterns": "Human knowledge: fixed patterns",
    "clustering": "Clustering: only the critical parts",
    "learnable patterns": "Learnable patterns",
    "fewer queries or keys": "Fewer queries or keys",
    "kernels": "Kernels: k and v first",
    "new frameworks": "New frameworks",
    "attention-free": "Attention-free",
    "recurrence": "Recurrence",
    "gated and delta rules": "Running sums that forget or correct",
    "hybrid": "Hybrids",
}


def family(name: str) -> str:
    """The family of a mechanism, or of a variant of one ("softmax, bidirectional")."""
    base = name.partition(",")[0]
    return MECHANISMS[base].family if base in MECHANISMS else "other"


class Win(NamedTuple):
    """From which length on a mechanism costs less than softmax of its own form."""

    length: int
    throughout: bool  # it costs less at every measured length, of which `length` is the shortest

    def words(self) -> str:
        return "at every T measured" if self.throughout else f"from T = {self.length:,}"

    def cell(self) -> Cell:
        return Cell("every T measured" if self.throughout else f"{self.length:,}", self.length, "n")


def wins(run: Run, what: str) -> dict[str, Win]:
    """{mechanism: Win} in `training`, `forward` or `memory`. Rings, sentences and tables all use this rule."""
    measured = {name: series(run.rows, name, RATIOS[what]) for name in names(run.rows) if name != "softmax"}
    return {
        name: Win(at, ratios[0] < 1 and at == lengths[0])
        for name, (lengths, ratios) in measured.items()
        if (at := crossover(lengths, ratios)) is not None
    }


def beside_softmax(run: Run, name: str) -> list[str]:
    """Sentences: from which length on a mechanism is faster than softmax, or that it is not."""
    sentences = []
    for what, ratio in (("A training step", "training_ratio"), ("Decoding a token", "decode_ratio")):
        lengths, ratios = series(run.rows, name, ratio)
        if not lengths or name == "softmax":
            continue
        at = crossover(lengths, ratios)
        if at is None:
            sentences.append(f"{what} is not faster than softmax at T = {lengths[-1]:,}, the longest measured.")
        else:
            sentences.append(f"{what} is faster than softmax {Win(at, ratios[0] < 1 and at == lengths[0]).words()}.")
    return sentences


def in_words(won: Mapping[str, Win]) -> str:
    """The wins as text, ordered by T: "linear, local at every T measured; rfa from T = 1,462"."""
    ordered = sorted(won.items(), key=lambda item: (not item[1].throughout, item[1].length))
    always = ", ".join(name for name, win in ordered if win.throughout)
    later = [f"{name} {win.words()}" for name, win in ordered if not win.throughout]
    return "; ".join(([f"{always} at every T measured"] if always else []) + later)


def curves(run: Run, wanted: Iterable[str] | None = None) -> Json | None:
    """A view each for time, memory and state over length; None if nothing was measured.

    A series has `points`, the measurements. If they were measured in pairs with softmax, it also has `drawn`: the ratio
    times the usual cost of softmax in this run. So lines cross exactly where the ratio is 1, in agreement with `wins`.
    """
    rows = run.rows
    kept = None if wanted is None else set(wanted)
    forms = {row.mechanism: row.causal for row in rows}
    views = []
    for key, title, label, unit, crossing, against in MEASURES:
        shown = [row for row in rows if getattr(row, key) and (kept is None or row.mechanism in kept)]
        points = grouped((r.mechanism, [r.length, *point]) for r in shown if (point := _point(getattr(r, key))))
        if not points:
            continue
        lines = _drawn(rows, points, forms, key, against)
        points.update({name: [list(p) for p in line.items()] for name, line in lines.items() if name not in points})
        others = {forms[name] for name in points if name in forms and name != "softmax"}
        if kept is not None and others and forms.get("softmax") not in others:
            points.pop("softmax", None)  # it has the other form; softmax of the same form is another series
        all_series = _series(points)
        for one in all_series:
            name = one["name"]
            beside = ((r.length, amount(r, against)) for r in shown if against and r.mechanism == name)
            one["ratios"] = {length: ratio for length, ratio in beside if ratio}
            if name in lines:
                one["drawn"] = [lines[name][x] for x, *_ in one["points"]]
            if name in forms and len(set(forms.values())) > 1:
                one["form"] = FORMS[forms[name]]
        won = {name: win for name, win in wins(run, crossing).items() if name in points} if crossing else {}
        marks: Json = {"marks": {name: win.length for name, win in won.items() if not win.throughout}}
        marks["throughout"] = [name for name, win in won.items() if win.throughout]
        marks["wins"] = LESS[crossing] if crossing else ""
        x = {"label": "sequence length T", "short": "T =", "unit": "tokens", "log": True}
        y = {"label": label, "short": label.split(",")[0], "unit": unit, "log": True}
        views.append({"label": title, "x": x, "y": y, "series": all_series, **marks})
    return _chart(views)


def _chart(views: list[Json]) -> Json | None:
    return {"views": views, "chosen": _chosen(views)} if views else None


def _drawn(
    rows: list[Row], points: Mapping[str, list[list[float]]], forms: Mapping[str, bool], key: str, against: str | None
) -> dict[str, dict[float, float]]:
    """{series: {length: cost}} for series that were measured in pairs with softmax, and for that softmax."""
    if key.endswith("_ratio"):
        return {"softmax": {p[0]: 1.0 for p in points["softmax"]}} if "softmax" in points else {}
    usual = usual_softmax(rows, key, against) if against else {}
    lines: dict[str, dict[float, float]] = {}
    for name, measured in points.items():
        if not against or not any((x, forms[name]) in usual for x, *_ in measured):
            continue
        if name == "softmax":
            lines[name] = {p[0]: usual.get((int(p[0]), forms[name]), p[1]) for p in measured}
            continue
        lines[name] = dict(zip(*steady_times(rows, name, key, against), strict=True))
        if forms[name] != forms.get("softmax"):  # the run measured softmax only in the other form
            beside = f"softmax, {FORMS[forms[name]]}"
            lines[beside] = {x: cost for (x, form), cost in sorted(usual.items()) if form == forms[name]}
    return lines


def _point(value: Spread | float | None) -> list[float] | None:
    """[median, low, high] of a spread, [v] of a number; None if it was not measured."""
    if isinstance(value, Spread):
        return [value.median, value.low, value.high] if value.median else None
    return [value] if value else None


def quality_against_cost(run: Run) -> Json | None:
    """Each task's metric over its price: seconds of its training, or a training step at each measured length."""
    views = []
    steps: dict[int, dict[str, float]] = {}  # {length: {mechanism: ms}}
    for row in run.rows:
        steps.setdefault(row.length, {}).update({row.mechanism: row.training_ms.median} if row.training_ms else {})
    for (task, metric), records in by_task(run).items():
        better = "lower" if records[0].lower_is_better else "higher"
        y = {"label": f"{metric} on {task} ({better} is better)", "short": metric, "unit": ""}
        costs = {("seconds of training", "s"): {q.mechanism: q.seconds or 0.0 for q in records}}
        costs |= {(f"a training step at T = {n:,}, ms", "ms"): dict(times) for n, times in sorted(steps.items())}
        for (cost, unit), paid in costs.items():
            points = {q.mechanism: [[paid[q.mechanism], q.value or 0.0]] for q in records if paid.get(q.mechanism)}
            if points:
                x = {"label": cost, "short": "cost", "unit": unit, "log": True}
                series = _series(points)
                views.append({"label": f"{task}: {metric} against {cost}", "x": x, "y": y, "series": series})
    return _chart(views)


def loss_curves(run: Run) -> Json | None:
    """The metric over training steps, a view for each task."""
    views = []
    for (task, metric), records in by_task(run).items():
        points = {q.mechanism: q.curve for q in records if q.curve}
        if points:
            x = {"label": "training step", "short": "step", "unit": "steps"}
            # training lowers the loss, not the accuracy, so tasks with an accuracy show curves of the loss
            y = {"label": metric if records[0].lower_is_better else "training loss", "unit": ""}
            views.append({"label": f"Training on {task} ({metric})", "x": x, "y": y, "series": _series(points)})
    return _chart(views)


def _series(points: Mapping[str, list[list[float]]]) -> list[Json]:
    return [
        {"name": name, "family": family(name), "points": sorted(points[name])} for name in sorted(points, key=_place)
    ]


def _place(name: str) -> tuple[int, int]:
    kind, base = family(name), name.partition(",")[0]
    return [*FAMILIES, kind].index(kind), [*MECHANISMS, base].index(base)


def _chosen(views: list[Json]) -> list[str]:
    """The series shown at first: all if there are few; else softmax, linear and the lowest lines at the longest T."""
    every = list(dict.fromkeys(s["name"] for view in views for s in view["series"]))
    if len(every) <= MANY:
        return every
    lines = [s for s in views[0]["series"] if len(s["points"]) > 1]
    far = max((s["points"][-1][0] for s in lines), default=0)
    ends = sorted((_line(s)[-1], s["name"]) for s in lines if s["points"][-1][0] == far)
    kept = {*CHOSEN, *[name for _, name in ends if name not in CHOSEN][:BEST]}
    forms = {s["form"] for s in views[0]["series"] if s["name"] in kept and "form" in s}
    kept |= {f"softmax, {form}" for form in forms}
    return [name for name in every if name in kept] or every[:2]


def _line(one: Json) -> list[float]:
    """The heights at which a series is drawn, one for each of its points."""
    heights: list[float] = one.get("drawn") or [p[1] for p in one["points"]]
    return heights


def draw(spec: Json, views: int | Sequence[int], path: Path, origin: Mapping[str, str] | None = None) -> None:
    """One view as PNG, or several side by side; `origin` becomes text inside the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    spec = spelt(spec, lambda text: visible(text).replace("$", r"\$"))  # to matplotlib $ begins a formula
    chosen = (views,) if isinstance(views, int) else tuple(views)
    figure, axes = plt.subplots(1, len(chosen), figsize=(2 + 7 * len(chosen), 6), layout="constrained", squeeze=False)
    for axis, view in zip(axes[0], chosen, strict=True):
        _draw_view(axis, spec["views"][view], spec["chosen"])
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes[0]), key=lambda legend: len(legend[1]))
    if any(len(series["points"]) > 1 for view in chosen for series in spec["views"][view]["series"]):
        figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130 if len(chosen) == 1 else 100, metadata=origin)
    plt.close(figure)


def _draw_view(axis: Any, shown: Json, standing_out: Sequence[str]) -> None:
    colours = dict(re.findall(r"--f-([a-z-]+): (#\w+)", template("style.css").split("@media")[0]))
    seen: dict[str, int] = {}
    ends = []
    marks = shown.get("marks", {})
    won = {name: Win(length, False) for name, length in marks.items()}
    won |= {name: Win(0, True) for name in shown.get("throughout", ())}
    for one in shown["series"]:
        name, kind = one["name"], one["family"]
        seen[kind] = seen.get(kind, -1) + 1
        chosen = name in standing_out
        colour = colours.get(kind.replace(" ", "-"), "gray")
        x, y = [p[0] for p in one["points"]], _line(one)
        many = len(x) > 60
        axis.plot(
            x,
            y,
            color=colour,
            marker=None if many else "os^Dv"[seen[kind] % 5],
            linestyle=("-", "--", ":", "-.")[seen[kind] % 4] if not chosen else "-",
            linewidth=2.4 if chosen else 1,
            markersize=5 if chosen else 3.5,
            alpha=1 if chosen else 0.75,
            label=f"{name} (wins {won[name].words()})" if chosen and name in won else name,
        )
        if chosen and name in marks:
            at = between(x, y, marks[name])
            axis.plot(marks[name], at, color=colour, marker="o", markersize=11, fillstyle="none", linestyle="none")
        ends.append((x[-1], y[-1], name, colour, chosen))
    single = all(len(s["points"]) == 1 for s in shown["series"])
    for x_end, y_end, name, colour, chosen in ends if single else ():
        style = {"fontsize": 8, "color": colour, "weight": "bold" if chosen else "normal"}
        axis.annotate(name, (x_end, y_end), xytext=(6, 3), textcoords="offset points", **style)
    if shown["x"].get("log"):
        axis.set_xscale("log")
    if single:
        axis.margins(x=0.12)  # room for the names
    if shown["x"]["unit"] == "tokens":
        name_lengths(axis, sorted({p[0] for s in shown["series"] for p in s["points"]}))
    elif shown["x"].get("log"):
        name_plainly(axis.xaxis)
    if shown["y"].get("log"):
        axis.set_yscale("log")
        name_plainly(axis.yaxis, shown["y"].get("unit"))
    axis.set_xlabel(shown["x"]["label"])
    axis.set_ylabel(shown["y"]["label"])
    axis.set_title(shown["label"], fontsize=11)
    axis.grid(alpha=0.25)


def name_lengths(axis: Any, lengths: Sequence[int]) -> None:
    """Mark the measured lengths on the x axis."""
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()


def name_plainly(axis: Any, unit: str | None = None) -> None:
    """Label a logarithmic axis with plain numbers; bytes get kB, MB and so on. An axis within one decade is labelled
    like a linear one, because it has too few decades."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < FEW * low else (1,)))
    axis.set_major_formatter(EngFormatter("B") if unit == "bytes" else "{x:g}")
    axis.set_minor_formatter("")
