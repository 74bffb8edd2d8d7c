"""The table of recall: the share of right answers, by the size of the state and the number of pairs."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table as Shown

from subquad.report.charts import family
from subquad.report.html import Cell, number
from subquad.report.runs import Json
from subquad.studies.results import ReproducedTable, TrainedRow

SOLVED = 0.99  # of the answers


class Recalled(NamedTuple):
    """One row: a mechanism at one width."""

    mechanism: str
    variant: str
    state: int  # numbers that a layer keeps of a sequence
    accuracy: dict[int, float]  # by the number of pairs

    @property
    def points(self) -> list[tuple[int, float]]:
        return sorted(self.accuracy.items())

    @property
    def solved(self) -> int:
        """The largest number of pairs up to which nearly all answers are right; 0 if there is none."""
        most = 0
        for pairs, share in self.points:
            if share < SOLVED:
                break
            most = pairs
        return most


def recalled(results: ReproducedTable) -> list[Recalled]:
    """The rows that were trained to the end, if this is a table of recall."""
    return [
        Recalled(row.mechanism, row.variant or "", row.state, shares)
        for row in results.results.values()
        if row.state is not None and (shares := dict(_shares(row)))
    ]


def _shares(row: TrainedRow) -> Iterator[tuple[int, float]]:
    for name, value in (row.test or {}).items():
        if match := re.fullmatch(r"accuracy, (\d+) pairs", name):
            yield int(match[1]), value


def page(results: ReproducedTable) -> Json | None:
    """What a page shows of it: the columns and cells of a table, and a chart; None if this is no table of recall."""
    rows = recalled(results)
    return {"columns": columns(rows), "rows": cells(rows), "chart": chart(rows)} if rows else None


def columns(rows: list[Recalled]) -> list[str]:
    return ["mechanism", "model", "state", *(f"{pairs} pairs" for pairs in _pairs(rows)), "solved"]


def cells(rows: list[Recalled]) -> list[list[Cell]]:
    """A row for each model, those with the same width together: the share of right answers at each number of pairs."""
    return [
        [
            Cell(row.mechanism),
            Cell(row.variant),
            number(row.state),
            *(_share(row.accuracy.get(pairs)) for pairs in _pairs(rows)),
            Cell(f"{row.solved} pairs" if row.solved else "-", row.solved, "n"),
        ]
        for row in rows
    ]


def shown(rows: list[Recalled]) -> Shown:
    """The same for the terminal."""
    table = Shown(title="right answers by pairs", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for n, column in enumerate(columns(rows)):
        table.add_column(column, justify="left" if n < 2 else "right")
    for row in cells(rows):
        table.add_row(*(cell.shown for cell in row))
    return table


def chart(rows: list[Recalled]) -> Json:
    """Accuracy over pairs, a view for each width, for page.js."""
    # the unit of lengths, whose marks on the axis are the numbers that were measured
    x = {"label": "pairs of key and value", "short": "pairs =", "unit": "tokens", "log": True}
    y = {"label": "right answers", "short": "right", "unit": "share", "range": [0, 1]}
    views = [
        {
            "label": f"Right answers over pairs, {variant}",
            "x": x,
            "y": y,
            "series": [
                {"name": row.mechanism, "family": family(row.mechanism), "points": [*map(list, row.points)]}
                for row in rows
                if row.variant == variant
            ],
        }
        for variant in dict.fromkeys(row.variant for row in rows)
    ]
    return {"views": views, "chosen": list(dict.fromkeys(row.mechanism for row in rows))}


def draw(axis: Any, rows: list[Recalled]) -> None:
    """Accuracy over pairs of the models of one width."""
    for row in rows:
        label = f"{row.mechanism}, {row.state:,}"
        axis.plot([pairs for pairs, _ in row.points], [100 * share for _, share in row.points], "o-", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(_pairs(rows), [str(n) for n in _pairs(rows)])
    axis.minorticks_off()
    axis.set(xlabel="pairs of key and value", ylabel="right answers, %", ylim=(-3, 103), title=rows[0].variant)
    axis.legend(frameon=False, title="numbers in a layer's state", fontsize=8, title_fontsize=8)


def _pairs(rows: list[Recalled]) -> list[int]:
    return sorted({pairs for row in rows for pairs in row.accuracy})


def _share(value: float | None) -> Cell:
    return Cell("", "", "n") if value is None else Cell(f"{100 * value:.1f} %", value, "n")
