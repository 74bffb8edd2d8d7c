"""A reproduced table: our figures beside the published ones, in the terminal and as a plot."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table as Shown

from subquad.measure.growth import amount, grouped
from subquad.report import recall
from subquad.report.charts import name_lengths, name_plainly
from subquad.report.html import number
from subquad.studies.results import ReproducedTable, TrainedRow, save

PARTLY = 0.01  # of an epoch: if a run read less, its time an epoch is not shown
LABELS = {"per": "phone error rate, %"}


def beside(results: ReproducedTable) -> Shown:
    """Our figures, the published ones, and how long ours were trained."""
    shown = Shown(title=f"{results.title} ({results.source})", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("row", "data", "ours", "published", "iteration", "trained", "speed"):
        left = column in ("row", "data")
        shown.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=column == "row")
    for name, row in results.results.items():
        if row.error is not None:
            theirs = row.published.get(results.metric)
            shown.add_row(name, "", "failed", "-" if theirs is None else f"{theirs:g}")
            continue
        shown.add_row(name, row.data or "", *(escape(text) for text in _cells(row)))
    for name, value in not_run(results).items():
        shown.add_row(name, "", "not run", f"{value:g}")
    facts = results.machine
    notes = [f"hardware: {facts['device']}, torch {facts['torch']}", *results.differs, *_set_here(results)]
    cut = [name for name, row in results.results.items() if row.cut_short_by_time]
    if cut:
        notes.append(f"cut short by the time budget: {', '.join(cut)}")
    reasons = grouped((row.error, name) for name, row in results.results.items() if row.error is not None)
    lines = [f"{', '.join(names)} failed: {why}" for why, names in reasons.items()]
    shown.caption, shown.caption_justify = escape("\n".join(["what differs: " + "; ".join(notes), *lines])), "left"
    return shown


def _set_here(results: ReproducedTable) -> Iterator[str]:
    """Settings of rows that differ from the table's own; rows with the same settings share a line."""
    rows = grouped((tuple(r.settings), name) for name, r in results.results.items() if r.settings is not None)
    for settings, names in rows.items():
        whose = "" if len(rows) == 1 else f" for {', '.join(names)}"
        if settings:
            yield f"set here{whose}: {', '.join(settings)}"


def not_run(results: ReproducedTable) -> dict[str, float]:
    """Published figures of rows that were not run."""
    return {name: value for name, value in results.published.items() if name not in results.results}


def _cells(row: TrainedRow) -> Iterator[str]:
    published, metric = row.published, row.metric
    if row.longest and row.training_ms is not None and row.peak_bytes is not None:
        cost = f"{number(row.training_ms).shown} ms, {number(row.peak_bytes / 1e6).shown} MB"
        time, memory = ((row.growth or {}).get(key) for key in ("time", "memory"))
        growth = "" if time is None else f"; time as N^{time:.2f}, memory as N^{memory:.2f}"
        yield f"N = {row.longest:,}: {cost}{growth}"
        yield f"N = {published['longest']:,.0f}" if "longest" in published else "-"
    else:
        yield "unfinished" if row.unfinished else "-" if row.value is None else f"{row.value:.4g} {metric}"
        yield f"{published[metric]:g}" if metric in published else "-"
    theirs = f" (theirs {published['iteration_s']:g} s)" if "iteration_s" in published else ""
    yield "-" if row.iteration is None else f"{row.iteration['iteration_ms']['median']:.0f} ms{theirs}"
    yield "-" if row.seconds is None or row.steps is None else f"{row.steps:,} steps, {row.seconds / 60:.1f} min"
    theirs = f" (theirs {published['epoch_s']:g} s)" if "epoch_s" in published else ""
    epoch = f"; {row.seconds_per_epoch:,.1f} s an epoch{theirs}" if (row.epochs or 0) > PARTLY else ""
    cold = ", warm-up counted" if row.warm_up_counted else ""
    yield "-" if row.examples_per_second is None else f"{row.examples_per_second:,.0f}/s{epoch}{cold}"


def copy_to(results: ReproducedTable, path: Path) -> None:
    """Copy the figures to another JSON file, with the plot beside it."""
    save(results, path)
    draw(results, path.with_suffix(".png"))


def draw(results: ReproducedTable, path: Path) -> None:
    """Plot the rows' curves, and their figures beside the published ones, as far as there are any."""
    trained = results.results.values()
    panels: list[Callable[[Any, ReproducedTable], None]] = []
    if any(row.training_ms for row in results.rows):
        panels.append(partial(_over_length, field="training_ms", unit=1.0, label="forward + backward, ms a sample"))
        panels.append(partial(_over_length, field="peak_bytes", unit=1e6, label="peak memory, MB a sample"))
    by_pairs = grouped((row.variant, row) for row in recall.recalled(results))
    panels += [partial(_recall, rows=rows) for rows in by_pairs.values()]
    panels += [_curves] if any(row.curve for row in trained) and not by_pairs else []
    panels += [_contexts] if any(row.context is not None for row in trained) else []
    single = any(row.value is not None and row.context is None for row in trained)
    panels += [_bars] if single and not by_pairs else []
    panels += [_times] if (results.iterations or {}).get("models") else []
    if not panels or find_spec("matplotlib") is None:  # without matplotlib there are figures but no plot
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.6), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis, results)
    figure.suptitle(f"{results.title}: {results.machine['device']}, {results.commit or 'no commit'}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _over_length(axis: Any, results: ReproducedTable, field: str, unit: float, label: str) -> None:
    rows = [row for row in results.rows if row.training_ms]
    for name, ours in grouped((row.label, row) for row in rows).items():
        axis.plot([row.length for row in ours], [(amount(row, field) or 0.0) / unit for row in ours], "o-", label=name)
    axis.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel=label)
    name_lengths(axis, sorted({row.length for row in rows}))
    name_plainly(axis.yaxis)
    axis.legend(frameon=False)


def _recall(axis: Any, results: ReproducedTable, rows: list[recall.Recalled]) -> None:  # noqa: ARG001
    recall.draw(axis, rows)


def _curves(axis: Any, results: ReproducedTable) -> None:
    curves = {name: row.curve for name, row in results.results.items() if row.curve}
    for name, curve in curves.items():
        axis.plot([step for step, _ in curve], [value for _, value in curve], label=name)
    lows = sorted(value for curve in curves.values() for _, value in curve)
    axis.set(xlabel="training step", ylabel=f"{LABELS.get(results.metric, results.metric)}, while training")
    axis.set_ylim(top=lows[int(0.98 * (len(lows) - 1))] * 1.05)  # the first steps would hide the rest
    axis.legend(frameon=False)


def _contexts(axis: Any, results: ReproducedTable) -> None:
    rows = [row for row in results.results.values() if row.context is not None]
    share = [100 * (row.context or 0) / (row.window or 1) for row in rows]
    axis.plot(share, [row.value for row in rows], "o-", label=f"ours, {rows[0].data}")
    theirs = axis.twinx()
    theirs.plot(share, [row.published["bits/byte"] for row in rows], "s--", color="gray", label="published")
    axis.set(xlabel="least context, % of the window", ylabel="bits/byte, ours")
    theirs.set_ylabel("bits/byte, published")
    axis.legend(frameon=False, loc="upper right")


def _bars(axis: Any, results: ReproducedTable) -> None:
    metric = results.metric
    rows = {n: r for n, r in results.results.items() if r.value is not None and r.context is None}
    published = {n: r.published[metric] for n, r in rows.items() if metric in r.published} | not_run(results)
    names = list(dict.fromkeys([*rows, *published]))
    for place, row in enumerate(rows.values()):
        ours = place - 0.2 if metric in row.published else place
        axis.barh(ours, row.value, 0.36, color="tab:blue", label="ours" if place == 0 else None)
        note = " (cut short by time)" if row.cut_short_by_time else ""
        axis.annotate(f" {row.value:.3f}{note}", (row.value, ours), va="center", fontsize=8)
    for name, value in published.items():
        theirs = names.index(name) + (0.2 if name in rows else 0)
        axis.barh(theirs, value, 0.36, color="lightgray")
        axis.annotate(f" {value:g} published", (value, theirs), va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), 3) - 0.4, -0.6)  # first name on top; few bars stay thin
    axis.margins(x=0.6)
    axis.set_xlabel(LABELS.get(metric, metric))


def _times(axis: Any, results: ReproducedTable) -> None:
    models = (results.iterations or {})["models"]
    for place, row in enumerate(models.values()):
        time = row["iteration_ms"]["median"]
        axis.barh(place, time, 0.5, color="tab:green")
        axis.annotate(f" x {row['ratio']['median']:.2f}", (time, place), va="center", fontsize=8)
    axis.set_yticks(range(len(models)), list(models))
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlabel("ms an iteration of training")
