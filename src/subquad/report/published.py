"""The papers' tables as HTML, each column followed by what our runs measured of the same thing."""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from subquad.measure.cost import Row
from subquad.report.html import Cell, escape, number, table
from subquad.report.runs import Run, compared, reproduced
from subquad.studies.published import Column, Memory, Published, Quality, Speed
from subquad.studies.results import EfficiencyRow, EfficiencyTable

AnyRow = TypeVar("AnyRow", Row, EfficiencyRow)


def ours(column: Column, run: Run, mechanism: str | None) -> float | None:
    """The figure of a run that belongs beside a published one, if it has it."""
    match column.ours:
        case None:
            return None
        case _ if mechanism is None:
            return None
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
        if q.value is not None and (q.mechanism, _plain(q.task), _plain(q.metric)) == (mechanism, task, metric):
            return 100 * q.value if metric == "accuracy" and q.value <= 1 else q.value
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _over_naive(results: EfficiencyTable, mechanism: str, length: int, field: str) -> float | None:
    """As in the paper, over softmax with the T x T matrix in memory."""
    ours, theirs = (_row(results.rows, name, length) for name in (mechanism, "softmax, naive"))
    if ours is None or theirs is None or not getattr(ours, field) or not getattr(theirs, field):
        return None
    return float(getattr(ours, field) / getattr(theirs, field))


def _row(rows: Sequence[AnyRow], mechanism: str, length: int) -> AnyRow | None:
    return next((row for row in rows if row.mechanism == mechanism and row.length == length), None)


def beside(tables: Iterable[Published], runs: Iterable[Run], only_ours: bool = False) -> str:
    """The tables, each column followed by ours wherever a run has the figure; `only_ours` leaves out those without."""
    runs = list(runs)
    against = [*compared(runs), *reproduced(runs), *(run for run in runs if run.kind in ("lra", "lra-efficiency"))]
    out = []
    for shown in tables:
        columns, titles, any_ours = _columns(shown, against)
        if only_ours and not any_ours:
            continue
        decimals = [_decimals([row[2][i] for row in shown.rows]) for i in range(len(shown.columns))]
        rows = []
        for label, mechanism, figures in shown.rows:
            cells = [Cell(label)]
            for index, run in columns:
                if run is None:
                    figure = figures[index]
                    cells.append(Cell(figure) if isinstance(figure, str) else _as_printed(figure, decimals[index]))
                else:
                    value = ours(shown.columns[index], run, mechanism)
                    cells.append(number(value)._replace(css="n ours"))
            rows.append(cells)
        out.append(
            f'<section><h3 id="published-{shown.name}">{escape(shown.title)}</h3>'
            + table(["model", *titles], rows, caption=shown.source)
            + (f'<p class="note">{escape(shown.note)}</p>' if shown.note else "")
            + "</section>"
        )
    return "\n".join(out)


def _decimals(figures: Sequence[float | str | None]) -> int:
    """How many the paper prints in this column; 0 where it goes by significant digits instead."""
    numbers = [f for f in figures if isinstance(f, float)]
    if not numbers or max(numbers) > 100 * min(numbers):
        return 0
    return max(len(str(f).partition(".")[2]) for f in numbers)


def _as_printed(figure: float | None, decimals: int) -> Cell:
    cell = number(figure)
    if figure is None or isinstance(figure, int):
        return cell
    return cell._replace(shown=f"{figure:.{decimals}f}" if decimals else str(figure))


def _columns(shown: Published, runs: Sequence[Run]) -> tuple[list[tuple[int, Run | None]], list[str], bool]:
    columns: list[tuple[int, Run | None]] = []
    titles = []
    for index, column in enumerate(shown.columns):
        columns.append((index, None))
        titles.append(column.title)
        for run in runs:
            if any(ours(column, run, mechanism) is not None for _, mechanism, _ in shown.rows):
                columns.append((index, run))
                titles.append(f"ours, {run.name}")
    return columns, titles, len(columns) > len(shown.columns)
