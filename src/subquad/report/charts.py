"""What the charts show, as data for page.js, and the same as PNG."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.mechanisms import MECHANISMS
from subquad.report.html import spelt, template
from subquad.report.results import Json, Run, learned
from subquad.report.visible import visible

FEW = 1e4  # from the lowest to the highest: of more only decades have a name
CHOSEN = ("softmax", "linear")  # stand out until the reader chooses
MEASURES = (  # key of a row, title, label of the axis, unit, key in crossovers, key of the ratio to softmax
    ("training_ms", "Training step: time over length", "forward + backward, ms", "ms", "training", "training_ratio"),
    ("forward_ms", "Forward pass: time over length", "forward, ms", "ms", "forward", "forward_ratio"),
    ("peak_bytes", "Training step: peak memory over length", "peak memory", "bytes", "memory", "memory_ratio"),
    ("decode_ms", "Decoding: time for one token after a prefix", "one token, ms", "ms", None, "decode_ratio"),
    ("state_bytes", "Decoding: what must be kept", "state", "bytes", None, None),
    ("training_ratio", "Training step against softmax", "time / time of softmax", "x", "training", None),
    ("forward_ratio", "Forward pass against softmax", "time / time of softmax", "x", "forward", None),
)
FAMILIES = {  # by the lecture notes' order; the rest is what they take for granted or leave out
    "exact": "Exact attention",
    "human patterns": "Human knowledge: fixed patterns",
    "clustering": "Clustering: only the critical parts",
    "learnable patterns": "Learnable patterns",
    "fewer queries or keys": "Fewer queries or keys",
    "kernels": "Kernels: k and v first",
    "new frameworks": "New frameworks",
    "attention-free": "Attention-free",
    "recurrence": "Recurrence",
    "hybrid": "Hybrids",
}


def family(name: str) -> str:
    return MECHANISMS[name].family if name in MECHANISMS else "other"


def curves(run: Run, names: Iterable[str] | None = None) -> Json | None:
    """Time, memory and state over length, a view each; None if nothing was measured."""
    wanted = None if names is None else set(names)
    views = []
    forms = {row["mechanism"]: row.get("causal") for row in run.data.get("rows", [])}
    both = len(set(forms.values())) > 1
    for key, title, label, unit, crossing, against in MEASURES:
        points: dict[str, list[list[float]]] = {}
        ratios: dict[str, dict[int, float]] = {}
        for row in run.data.get("rows", []):
            name, point = row["mechanism"], _point(row.get(key))
            if point is not None and (wanted is None or name in wanted):
                points.setdefault(name, []).append([row["length"], *point])
                ratio = _point(row.get(against)) if against else None
                if ratio:
                    ratios.setdefault(name, {})[row["length"]] = ratio[0]
        if points:
            marks = {
                c["mechanism"]: c[crossing]
                for c in run.data.get("crossovers", [])
                if crossing and c.get(crossing) is not None and c["mechanism"] in points and c["mechanism"] != "softmax"
            }
            x = {"label": "sequence length T", "short": "T =", "unit": "tokens", "log": True}
            y = {"label": label, "short": label.split(",")[0], "unit": unit, "log": True}
            series = _series(points)
            for one in series:
                one["ratios"] = ratios.get(one["name"], {})
                if both:
                    one["form"] = "causal" if forms[one["name"]] else "bidirectional"
            views.append({"label": title, "x": x, "y": y, "series": series, "marks": marks})
    return {"views": views, "chosen": _chosen(views)} if views else None


def _point(value: Any) -> list[float] | None:
    """[median, low, high] of a measured spread, [v] of a plain number; None if it was not measured."""
    if isinstance(value, Mapping):
        return [value["median"], value["low"], value["high"]] if value.get("median") else None
    return [value] if value else None


def quality_against_cost(run: Run) -> Json | None:
    """Each task's metric over the price paid: seconds of its training, or a training step at each measured length."""
    views = []
    for task, metric in dict.fromkeys((q["task"], q["metric"]) for q in learned(run)):
        found = [q for q in learned(run) if (q["task"], q["metric"]) == (task, metric)]
        lower = found[0].get("lower_is_better", True)
        y = {"label": f"{metric} on {task} ({'lower' if lower else 'higher'} is better)", "short": metric, "unit": ""}
        costs = {"seconds of training": ("s", {q["mechanism"]: q.get("seconds") for q in found})}
        for length in sorted({row["length"] for row in run.data.get("rows", [])}):
            at = {r["mechanism"]: _point(r.get("training_ms")) for r in run.data["rows"] if r["length"] == length}
            costs[f"a training step at T = {length:,}, ms"] = ("ms", {k: v[0] for k, v in at.items() if v})
        for cost, (unit, paid) in costs.items():
            points = {q["mechanism"]: [[paid[q["mechanism"]], q["value"]]] for q in found if paid.get(q["mechanism"])}
            if points:
                x = {"label": cost, "short": "cost", "unit": unit, "log": True}
                series = _series(points)
                views.append({"label": f"{task}: {metric} against {cost}", "x": x, "y": y, "series": series})
    return {"views": views, "chosen": _chosen(views)} if views else None


def loss_curves(run: Run) -> Json | None:
    """The metric over training steps, a view for each task."""
    views = []
    for task, metric in dict.fromkeys((q["task"], q["metric"]) for q in learned(run)):
        found = [q for q in learned(run) if (q["task"], q["metric"]) == (task, metric) and q.get("curve")]
        points = {q["mechanism"]: [[s, v] for s, v in q["curve"] if v is not None] for q in found}
        if points:
            x = {"label": "training step", "short": "step", "unit": "steps"}
            # the metric itself where training lowers it; an accuracy is not what is trained on
            y = {"label": metric if found[0].get("lower_is_better", True) else "training loss", "unit": ""}
            views.append({"label": f"Training on {task} ({metric})", "x": x, "y": y, "series": _series(points)})
    return {"views": views, "chosen": _chosen(views)} if views else None


def _series(points: Mapping[str, list[list[float]]]) -> list[Json]:
    order = {name: i for i, name in enumerate(MECHANISMS)}
    names = sorted(
        points,
        key=lambda name: (list(FAMILIES).index(f) if (f := family(name)) in FAMILIES else 99, order.get(name, 99)),
    )
    return [{"name": name, "family": family(name), "points": sorted(points[name])} for name in names]


def _chosen(views: list[Json]) -> list[str]:
    names = list(dict.fromkeys(s["name"] for view in views for s in view["series"]))
    if len(names) <= 7:
        return names
    return [name for name in CHOSEN if name in names] or names[:2]


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
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes[0]), key=lambda found: len(found[1]))
    if any(len(series["points"]) > 1 for view in chosen for series in spec["views"][view]["series"]):
        figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130 if len(chosen) == 1 else 100, metadata=origin)
    plt.close(figure)


def _draw_view(axis: Any, shown: Json, standing_out: Sequence[str]) -> None:
    colours = dict(re.findall(r"--f-([a-z-]+): (#\w+)", template("style.css").split("@media")[0]))
    seen: dict[str, int] = {}
    ends = []
    for series in shown["series"]:
        name, kind = series["name"], series["family"]
        seen[kind] = seen.get(kind, -1) + 1
        chosen = name in standing_out
        colour = colours.get(kind.replace(" ", "-"), "gray")
        x, y = ([p[i] for p in series["points"]] for i in (0, 1))
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
            label=name,
        )
        ends.append((x[-1], y[-1], name, colour, chosen))
    single = all(len(s["points"]) == 1 for s in shown["series"])
    for x_end, y_end, name, colour, chosen in ends if single else ():
        style = {"fontsize": 8, "color": colour, "weight": "bold" if chosen else "normal"}
        axis.annotate(name, (x_end, y_end), xytext=(6, 3), textcoords="offset points", **style)
    for name, length in shown.get("marks", {}).items():
        if name in standing_out:
            axis.axvline(length, color="gray", linestyle=":", linewidth=1)
            axis.annotate(
                f"{name} wins from T = {length:,.0f}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                ha="right",
                fontsize=8,
            )
    if shown["x"].get("log"):
        axis.set_xscale("log")
    if shown["x"]["unit"] == "tokens":
        name_lengths(axis, sorted({p[0] for s in shown["series"] for p in s["points"]}))
    if shown["y"].get("log"):
        axis.set_yscale("log")
        name_decades(axis, shown["y"].get("unit"))
    axis.set_xlabel(shown["x"]["label"])
    axis.set_ylabel(shown["y"]["label"])
    axis.set_title(shown["label"], fontsize=11)
    axis.grid(alpha=0.25)


def name_lengths(axis: Any, lengths: Sequence[int]) -> None:
    """Along x, those that were measured."""
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()


def name_decades(axis: Any, unit: str | None = None) -> None:
    """Up y, in plain numbers, those of bytes in their thousands."""
    from matplotlib.ticker import EngFormatter

    low, high = axis.get_ylim()
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5) if high < FEW * low else (1,))
    axis.yaxis.set_major_formatter(EngFormatter("B") if unit == "bytes" else "{x:g}")
    axis.yaxis.set_minor_formatter("")
