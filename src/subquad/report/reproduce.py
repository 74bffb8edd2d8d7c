"""A reproduced table: ours beside the published figures, in the terminal and as a plot."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table as Shown

from subquad.report.charts import name_decades, name_lengths
from subquad.report.html import number
from subquad.studies.results import save

Json = dict[str, Any]
LEAST_EPOCHS = 0.01  # no time for an epoch of a data set of which less was read
LABELS = {"per": "phone error rate, %"}


def beside(results: Json) -> Shown:
    """Ours, theirs, and how far ours was trained."""
    shown = Shown(
        title=f"{results['title']} ({results['source']})", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for column in ("row", "data", "ours", "published", "iteration", "trained", "speed"):
        left = column in ("row", "data")
        shown.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=column == "row")
    for name, found in results["results"].items():
        if "error" in found:
            theirs = found.get("published", {}).get(results["metric"])
            shown.add_row(name, "", "failed", "-" if theirs is None else f"{theirs:g}")
            continue
        shown.add_row(name, found.get("data", ""), *(escape(text) for text in _cells(found)))
    for name, value in not_run(results).items():
        shown.add_row(name, "", "not run", f"{value:g}")
    facts = results["machine"]
    notes = [f"hardware: {facts['device']}, torch {facts['torch']}", *results["differs"], *_set_here(results)]
    short = [name for name, found in results["results"].items() if found.get("cut_short_by_time")]
    if short:
        notes.append(f"cut short by the time budget: {', '.join(short)}")
    reasons: dict[str, list[str]] = {}
    for name, found in results["results"].items():
        if "error" in found:
            reasons.setdefault(found["error"], []).append(name)
    lines = [f"{', '.join(names)} failed: {why}" for why, names in reasons.items()]
    shown.caption, shown.caption_justify = escape("\n".join(["what differs: " + "; ".join(notes), *lines])), "left"
    return shown


def _set_here(results: Json) -> Iterator[str]:
    """The settings that the user changed, one line for all rows that share them."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in results["results"].items():
        if "settings" in found:
            rows.setdefault(tuple(found["settings"]), []).append(name)
    for settings, names in rows.items():
        whose = "" if len(rows) == 1 else f" for {', '.join(names)}"
        if settings:
            yield f"set here{whose}: {', '.join(settings)}"


def not_run(results: Json) -> dict[str, float]:
    """Published figures of rows that were not run."""
    return {name: value for name, value in results.get("published", {}).items() if name not in results["results"]}


def cost_of(milliseconds: float, peak: float) -> str:
    return f"{number(milliseconds).shown} ms, {number(peak / 1e6).shown} MB"


def _cells(found: Mapping[str, Any]) -> Iterator[str]:
    metric, published, value = found["metric"], found["published"], found.get("value")
    if found.get("longest"):
        cost = cost_of(found["training_ms"], found["peak_bytes"])
        yield f"N = {found['longest']:,}: {cost}{_growth(found)}"
        yield f"N = {published['longest']:,.0f}" if "longest" in published else "-"
    else:
        yield "unfinished" if found.get("unfinished") else "-" if value is None else f"{value:.4g} {metric}"
        yield f"{published[metric]:g}" if metric in published else "-"
    iteration = found.get("iteration")
    theirs = f" (theirs {published['iteration_s']:g} s)" if "iteration_s" in published else ""
    yield "-" if iteration is None else f"{iteration['iteration_ms']['median']:.0f} ms{theirs}"
    seconds, steps = found.get("seconds"), found.get("steps")
    yield "-" if seconds is None or steps is None else f"{steps:,} steps, {seconds / 60:.1f} min"
    theirs = f" (theirs {published['epoch_s']:g} s)" if "epoch_s" in published else ""
    epoch = f"; {found['seconds_per_epoch']:,.1f} s an epoch{theirs}" if found.get("epochs", 0) > LEAST_EPOCHS else ""
    cold = ", warm-up counted" if found.get("warm_up_counted") else ""
    yield f"{found['examples_per_second']:,.0f}/s{epoch}{cold}" if "examples_per_second" in found else "-"


def _growth(found: Mapping[str, Any]) -> str:
    time, memory = (found["growth"].get(key) for key in ("time", "memory"))
    return "" if time is None else f"; time as N^{time:.2f}, memory as N^{memory:.2f}"


def copy_to(results: Json, path: Path) -> None:
    """The figures as one JSON elsewhere, and the plot beside it."""
    save(results, path)
    draw(results, path.with_suffix(".png"))


def draw(results: Json, path: Path) -> None:
    """Plot the curves of the rows, and their figures beside the published ones, if there are any yet."""
    panels = [panel for panel in (_lengths, _memory, _curves, _contexts, _bars, _times) if panel(None, results)]
    if not panels or find_spec("matplotlib") is None:  # without matplotlib there are figures but no plot
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.6), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis, results)
    figure.suptitle(
        f"{results['title']}: {results['machine']['device']}, {results['commit'] or 'no commit'}", fontsize=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lengths(axis: Any, results: Json) -> bool:
    return _over_length(axis, results, lambda row: row["training_ms"]["median"], "forward + backward, ms a sample")


def _memory(axis: Any, results: Json) -> bool:
    return _over_length(axis, results, lambda row: row["peak_bytes"] / 1e6, "peak memory, MB a sample")


def _over_length(axis: Any, results: Json, value: Any, label: str) -> bool:
    rows = [row for row in results["rows"] if row["training_ms"]]
    if axis is not None:
        for name in dict.fromkeys(row["label"] for row in rows):
            ours = [row for row in rows if row["label"] == name]
            axis.plot([row["length"] for row in ours], [value(row) for row in ours], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel=label)
        name_lengths(axis, sorted({row["length"] for row in rows}))
        name_decades(axis)
        axis.legend(frameon=False)
    return bool(rows)


def _curves(axis: Any, results: Json) -> bool:
    curves = {name: found["curve"] for name, found in results["results"].items() if found.get("curve")}
    if axis is not None:
        for name, curve in curves.items():
            axis.plot([step for step, _ in curve], [value for _, value in curve], label=name)
        lows = sorted(value for curve in curves.values() for _, value in curve)
        axis.set(xlabel="training step", ylabel=f"{LABELS.get(results['metric'], results['metric'])}, while training")
        axis.set_ylim(top=lows[int(0.98 * (len(lows) - 1))] * 1.05)  # the first steps would hide the rest
        axis.legend(frameon=False)
    return bool(curves)


def _contexts(axis: Any, results: Json) -> bool:
    rows = [found for found in results["results"].values() if "context" in found]
    if axis is not None:
        share = [100 * row["context"] / row["window"] for row in rows]
        axis.plot(share, [row["value"] for row in rows], "o-", label=f"ours, {rows[0]['data']}")
        theirs = axis.twinx()
        theirs.plot(share, [row["published"]["bits/byte"] for row in rows], "s--", color="gray", label="published")
        axis.set(xlabel="least context, % of the window", ylabel="bits/byte, ours")
        theirs.set_ylabel("bits/byte, published")
        axis.legend(frameon=False, loc="upper right")
    return bool(rows)


def _bars(axis: Any, results: Json) -> bool:
    metric = results["metric"]
    rows = {n: r for n, r in results["results"].items() if r.get("value") is not None and "context" not in r}
    if axis is not None:
        for place, row in enumerate(rows.values()):
            ours = place - 0.2 if metric in row["published"] else place
            axis.barh(ours, row["value"], 0.36, color="tab:blue", label="ours" if place == 0 else None)
            note = " (cut short by time)" if row.get("cut_short_by_time") else ""
            axis.annotate(f" {row['value']:.3f}{note}", (row["value"], ours), va="center", fontsize=8)
            if metric in row["published"]:
                value = row["published"][metric]
                axis.barh(place + 0.2, value, 0.36, color="lightgray")
                axis.annotate(f" {value:g} published", (value, place + 0.2), va="center", fontsize=8)
        others = not_run(results)
        for place, value in enumerate(others.values(), start=len(rows)):
            axis.barh(place, value, 0.36, color="lightgray")
            axis.annotate(f" {value:g} published", (value, place), va="center", fontsize=8)
        names = [*rows, *others]
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(max(len(names), 3) - 0.4, -0.6)  # downwards; few bars stay slim
        axis.margins(x=0.6)
        axis.set_xlabel(LABELS.get(metric, metric))
    return bool(rows)


def _times(axis: Any, results: Json) -> bool:
    found = results.get("iterations", {}).get("models", {})
    if axis is not None:
        for place, row in enumerate(found.values()):
            axis.barh(place, row["iteration_ms"]["median"], 0.5, color="tab:green")
            axis.annotate(
                f" x {row['ratio']['median']:.2f}", (row["iteration_ms"]["median"], place), va="center", fontsize=8
            )
        axis.set_yticks(range(len(found)), list(found))
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_xlabel("ms an iteration of training")
    return bool(found)
