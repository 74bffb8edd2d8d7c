"""The papers' tables for a page, each column followed by our figures for it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from markupsafe import Markup

from subquad.measure.cost import Row
from subquad.report.html import Cell, number, render
from subquad.report.runs import Run, compared
from subquad.studies.published import Column, Memory, Published, Quality, Speed
from subquad.studies.results import EfficiencyRow, EfficiencyTable

AnyRow = TypeVar("AnyRow", Row, EfficiencyRow)
Place = tuple[int, Run | None]  # a column of the paper's table, or with a run our column beside it


def ours(column: Column, run: Run, mechanism: str | None) -> float | None:
    """The figure of a run to show beside a published one; None if the run does not have it."""
    if column.ours is None or mechanism is None:
        return None
    match column.ours:
        case Quality(task, metric):
            return _quality(run, mechanism, task, metric)
        case Speed(length, arena):
            if isinstance(run.figures, EfficiencyTable):
                return _over_naive(run.figures, mechanism, length, "steps_per_second") if arena else None
            ratio = row.training_ratio if (row := _row(run.rows, mechanism, length)) else None
            return 1 / ratio.median if ratio and ratio.median else None
        case Memory(length):
            if isinstance(run.figures, EfficiencyTable):
                return _over_naive(run.figures, mechanism, length, "peak_bytes")
            return row.memory_ratio if (row := _row(run.rows, mechanism, length)) else None


def _quality(run: Run, mechanism: str, task: str, metric: str) -> float | None:
    for q in run.quality:
        if q.value is not None and (q.mechanism, _letters(q.task), _letters(q.metric)) == (mechanism, task, metric):
            return 100 * q.value if metric == "accuracy" and q.value <= 1 else q.value
    return None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _over_naive(results: EfficiencyTable, mechanism: str, length: int, field: str) -> float | None:
    """Relative to softmax that keeps the T x T matrix in memory, as in the paper."""
    rows = (_row(results.rows, name, length) for name in (mechanism, "softmax, naive"))
    ours, theirs = (row and getattr(row, field) for row in rows)
    return ours / theirs if ours and theirs else None


def _row(rows: Sequence[AnyRow], mechanism: str, length: int) -> AnyRow | None:
    return next((row for row in rows if row.mechanism == mechanism and row.length == length), None)


def beside(tables: Iterable[Published], runs: Iterable[Run], only_ours: bool = False) -> Markup:
    """The tables, each column followed by ours if a run has the figure; `only_ours` leaves out tables without any."""
    runs = list(runs)
    repeats = [run for run in runs if run.kind in ("reproduce", "lra", "lra-efficiency")]
    shown = (_table(paper, [*compared(runs), *repeats], repeats) for paper in tables)
    return render("published.html", tables=[one for one in shown if one["ours"] or not only_ours])


def _table(paper: Published, runs: Sequence[Run], repeats: Sequence[Run]) -> dict[str, Any]:
    """`repeats` are runs that repeat the paper's experiment: mechanisms that only they tried get their own rows."""
    known = {mechanism for _, mechanism, _ in paper.rows}
    added = list(dict.fromkeys(name for run in repeats for name in _measured(paper, run) if name not in known))
    columns: list[Place] = [
        (index, run)
        for index, column in enumerate(paper.columns)
        for run in (None, *runs)
        if run is None or any(ours(column, run, name) is not None for name in (*known, *added))
    ]
    printed = [(label, mechanism, _as_printed(paper, figures)) for label, mechanism, figures in paper.rows]
    printed += [(name, name, [number(None)] * len(paper.columns)) for name in added]
    rows = []
    for label, mechanism, theirs in printed:
        cells = [Cell(label)]
        for index, run in columns:
            figure = number(ours(paper.columns[index], run, mechanism)) if run else theirs[index]
            cells.append(figure._replace(css="n ours") if run else figure)
        rows.append(cells)
    titles = [f"ours, {run.name}" if run else paper.columns[index].title for index, run in columns]
    return {"paper": paper, "added": added, "ours": len(columns) > len(paper.columns), "columns": titles, "rows": rows}


def _measured(paper: Published, run: Run) -> Iterator[str]:
    """The mechanisms of a run that have a figure for a column of the paper's table."""
    rows = run.figures.rows if isinstance(run.figures, EfficiencyTable) else run.rows
    for name in dict.fromkeys(record.mechanism for record in [*run.quality, *rows]):
        if any(ours(column, run, name) is not None for column in paper.columns):
            yield name


def _as_printed(paper: Published, figures: Sequence[float | str | None]) -> list[Cell]:
    """The paper's figures, with as many decimals as it prints in each column."""
    cells = []
    for index, figure in enumerate(figures):
        decimals = _decimals([row[2][index] for row in paper.rows])
        cell = Cell(figure) if isinstance(figure, str) else number(figure)
        if isinstance(figure, float):
            cell = cell._replace(shown=f"{figure:.{decimals}f}" if decimals else str(figure))
        cells.append(cell)
    return cells


def _decimals(figures: Sequence[float | str | None]) -> int:
    """How many decimals the paper prints in a column; 0 if it prints significant digits instead."""
    numbers = [f for f in figures if isinstance(f, float)]
    if not numbers or max(numbers) > 100 * min(numbers):
        return 0
    return max(len(str(f).partition(".")[2]) for f in numbers)
