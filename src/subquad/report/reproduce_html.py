"""A table that `subquad reproduce` ran, for the page: ours beside the published figures, training, what differs."""

from collections.abc import Mapping
from typing import Any

from subquad.report import charts
from subquad.report.html import Cell, number, size
from subquad.report.reproduce import not_run
from subquad.report.runs import Json, Run

COLUMNS = (
    "row", "data", "ours", "published", "steps", "minutes", "epochs", "examples/s", "iteration, ms", "peak memory",
    "remarks",
)  # fmt: skip


def shown(run: Run) -> Json:
    """What the template shows of it; columns without figures are left out."""
    data = run.data
    theirs = {
        label: {"published": {data["metric"]: value}, "error": "not run"} for label, value in not_run(data).items()
    }
    rows = [_cells(label, found, data["metric"]) for label, found in {**data["results"], **theirs}.items()]
    filled = [i for i in range(len(COLUMNS)) if any(row[i].shown for row in rows)]
    return {
        **{key: data[key] for key in ("title", "source", "metric", "differs")},
        "name": data["table"],
        "columns": [COLUMNS[i] for i in filled],
        "rows": [[row[i] for i in filled] for row in rows],
        "lengths": charts.curves(run),
        "losses": charts.loss_curves(run),
    }


def _cells(label: str, found: Mapping[str, Any], metric: str) -> list[Cell]:
    published, seconds = found["published"], found.get("seconds")
    iteration = (found.get("iteration") or {}).get("iteration_ms") or {}
    remarks = [found["error"]] if "error" in found else []
    remarks += ["cut short by the time budget"] if found.get("cut_short_by_time") else []
    remarks += ["not finished"] if found.get("unfinished") else []
    remarks += ["examples/s with warm-up"] if found.get("warm_up_counted") else []
    remarks += [f"longest N {found['longest']:,}"] if "longest" in found else []
    return [
        Cell(label),
        Cell(found.get("data", "")),
        number(found.get("value"), 4)._replace(css="n ours"),
        number(published.get(metric), 4),
        number(found.get("steps")),
        number(None if seconds is None else seconds / 60),
        number(found.get("epochs")),
        number(found.get("examples_per_second")),
        number(iteration.get("median")),
        size(found.get("peak_bytes")),
        Cell("; ".join(remarks), css="long"),
    ]
