"""A table of `subquad reproduce` for the page: our figures beside the published ones, training, what differs."""

from subquad.report import charts, recall
from subquad.report.html import Cell, number, size
from subquad.report.reproduce import not_run
from subquad.report.runs import Json, Run
from subquad.studies.results import TrainedRow

COLUMNS = (
    "row", "data", "ours", "published", "steps", "minutes", "epochs", "examples/s", "iteration, ms", "peak memory",
    "remarks",
)  # fmt: skip


def shown(run: Run) -> Json:
    """The data for the template, without columns that have no figures."""
    results = run.reproduced
    theirs = {n: TrainedRow(published={results.metric: v}, error="not run") for n, v in not_run(results).items()}
    rows = [_cells(label, row, results.metric) for label, row in {**results.results, **theirs}.items()]
    filled = [i for i in range(len(COLUMNS)) if any(row[i].shown for row in rows)]
    return {
        "results": results,
        "name": results.table,
        "columns": [COLUMNS[i] for i in filled],
        "rows": [[row[i] for i in filled] for row in rows],
        "lengths": charts.curves(run),
        "losses": charts.loss_curves(run),
        "recall": recall.page(results),
    }


def _cells(label: str, row: TrainedRow, metric: str) -> list[Cell]:
    iteration = (row.iteration or {}).get("iteration_ms") or {}
    remarks = [row.error] if row.error else []
    remarks += ["cut short by the time budget"] if row.cut_short_by_time else []
    remarks += ["not finished"] if row.unfinished else []
    remarks += ["examples/s with warm-up"] if row.warm_up_counted else []
    remarks += [f"longest N {row.longest:,}"] if row.longest is not None else []
    return [
        Cell(label),
        Cell(row.data or ""),
        number(row.value, 4)._replace(css="n ours"),
        number(row.published.get(metric), 4),
        number(row.steps),
        number(None if row.seconds is None else row.seconds / 60),
        number(row.epochs),
        number(row.examples_per_second),
        number(iteration.get("median")),
        size(row.peak_bytes),
        Cell("; ".join(remarks), css="long"),
    ]
