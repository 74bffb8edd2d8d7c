"""A table that `subquad reproduce` ran: ours beside the published figures, how far it was trained, what differs."""

from subquad.report import charts
from subquad.report.html import Cell, chart, escape, number, size, table
from subquad.report.reproduce import not_run
from subquad.report.runs import Run
from subquad.studies.results import TrainedRow

COLUMNS = [
    "row", "data", "ours", "published", "steps", "minutes", "epochs", "examples/s", "iteration, ms", "peak memory",
    "remarks",
]  # fmt: skip


def section(run: Run, name: str, pictures: str) -> str:
    """As HTML, with the curves of its runs."""
    results = run.reproduced
    theirs = {
        label: TrainedRow(published={results.metric: value}, error="not run")
        for label, value in not_run(results).items()
    }
    rows = [_cells(label, row, results.metric) for label, row in {**results.results, **theirs}.items()]
    filled = [i for i in range(len(COLUMNS)) if any(row[i].shown for row in rows)]
    columns, rows = [COLUMNS[i] for i in filled], [[row[i] for i in filled] for row in rows]
    body = table(columns, rows, caption=f"{results.source}; the measure is {results.metric}")
    differs = "".join(f"<li>{escape(line)}</li>" for line in results.differs)
    for spec, kind in ((charts.curves(run), "lengths"), (charts.loss_curves(run), "losses")):
        body += chart(f"{name}-{kind}", spec) if spec else ""
    return (
        f'<section><h2 id="{name}">{escape(results.title)}</h2>{body}'
        f"<p>What differs from the paper:</p><ul>{differs}</ul>{pictures}</section>"
    )


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
