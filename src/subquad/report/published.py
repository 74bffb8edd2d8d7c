"""The papers' tables for a page, each column followed by our figures of the same thing."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from subquad.report.html import Cell, number, render
from subquad.report.runs import Json, Run, compared, learned
from subquad.studies.published import Column, Memory, Published, Quality, Speed

Place = tuple[int, Run | None]  # a column of the paper's table, or (with a run) ours beside it


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
            if run.kind == "lra-efficiency":
                return _over_naive(run, mechanism, length, "steps_per_second") if arena else None
            ratio = (_row(run, mechanism, length) or {}).get("training_ratio")
            return 1 / ratio["median"] if ratio and ratio.get("median") else None
        case Memory(length):
            if run.kind == "lra-efficiency":
                return _over_naive(run, mechanism, length, "peak_bytes")
            ratio = (_row(run, mechanism, length) or {}).get("memory_ratio")
            return float(ratio) if ratio else None


def _quality(run: Run, mechanism: str, task: str, metric: str) -> float | None:
    for q in learned(run):
        if q["mechanism"] == mechanism and _letters(q["task"]) == task and _letters(q["metric"]) == metric:
            value: float = q["value"]
            return 100 * value if metric == "accuracy" and value <= 1 else value
    return None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _over_naive(run: Run, mechanism: str, length: int, key: str) -> float | None:
    """As in the paper: over softmax that keeps the T x T matrix in memory."""
    ours, theirs = ((_row(run, name, length) or {}).get(key) for name in (mechanism, "softmax, naive"))
    return ours / theirs if ours and theirs else None


def _row(run: Run, mechanism: str, length: int) -> Json | None:
    rows: list[Json] = run.data.get("rows", [])
    return next((row for row in rows if row["mechanism"] == mechanism and row["length"] == length), None)


def beside(tables: Sequence[Published], runs: Iterable[Run], only_ours: bool = False) -> Markup:
    """The tables, each column followed by ours wherever a run has the figure; `only_ours` leaves out those without."""
    runs = list(runs)
    repeats = [run for run in runs if run.kind in ("reproduce", "lra", "lra-efficiency")]
    shown = (_table(paper, [*compared(runs), *repeats], repeats) for paper in tables)
    return render("published.html", tables=[one for one in shown if one["ours"] or not only_ours])


def _table(paper: Published, runs: Sequence[Run], repeats: Sequence[Run]) -> dict[str, Any]:
    """Runs that repeat the paper's experiment also get rows for what they tried and the paper did not."""
    known = {mechanism for _, mechanism, _ in paper.rows}
    added = list(dict.fromkeys(name for run in repeats for name in _measured(paper, run) if name not in known))
    columns: list[Place] = []
    for index, column in enumerate(paper.columns):
        columns.append((index, None))
        columns += [
            (index, run) for run in runs if any(ours(column, run, name) is not None for name in (*known, *added))
        ]
    rows = [(label, mechanism, _as_printed(paper, figures)) for label, mechanism, figures in paper.rows]
    rows += [(name, name, [number(None)] * len(paper.columns)) for name in added]
    return {
        "paper": paper,
        "added": added,
        "ours": len(columns) > len(paper.columns),
        "columns": [f"ours, {run.name}" if run else paper.columns[index].title for index, run in columns],
        "rows": [
            [
                Cell(label),
                *(
                    number(ours(paper.columns[index], run, mechanism))._replace(css="n ours") if run else theirs[index]
                    for index, run in columns
                ),
            ]
            for label, mechanism, theirs in rows
        ],
    }


def _measured(paper: Published, run: Run) -> Iterator[str]:
    """The mechanisms of a run that have a figure for a column of the paper's table."""
    names = [q["mechanism"] for q in learned(run)] + [row["mechanism"] for row in run.data.get("rows", [])]
    for name in dict.fromkeys(names):
        if any(ours(column, run, name) is not None for column in paper.columns):
            yield name


def _as_printed(paper: Published, figures: Sequence[float | str | None]) -> list[Cell]:
    """Figures with as many decimals as the paper prints in their column."""
    cells = []
    for index, figure in enumerate(figures):
        decimals = _decimals([row[2][index] for row in paper.rows])
        cell = Cell(figure) if isinstance(figure, str) else number(figure)
        if isinstance(figure, float):
            cell = cell._replace(shown=f"{figure:.{decimals}f}" if decimals else str(figure))
        cells.append(cell)
    return cells


def _decimals(figures: Sequence[float | str | None]) -> int:
    """How many decimals the paper prints in a column; 0 where it prints significant digits instead."""
    numbers = [f for f in figures if isinstance(f, float)]
    if not numbers or max(numbers) > 100 * min(numbers):
        return 0
    return max(len(str(f).partition(".")[2]) for f in numbers)
