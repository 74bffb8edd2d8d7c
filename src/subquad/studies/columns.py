"""The columns of a comparison, in one table that the terminal and the report share.

To add a column, add a field to `measure.cost.Row` and an entry here. The CSV writes every field without an entry.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from subquad.machine import readable
from subquad.measure.cost import Spread


def duration(milliseconds: float) -> str:
    for unit, size in (("s", 1000.0), ("ms", 1.0)):
        if milliseconds >= size:
            return f"{milliseconds / size:.3g} {unit}"
    return f"{1000 * milliseconds:.3g} µs"


def milliseconds(spread: Spread) -> str:
    return duration(spread.median)


def ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}"


class Column(NamedTuple):
    field: str  # of a Row
    title: str  # in the terminal
    heading: str  # in the report
    format: Callable[[Any], str]  # in the terminal; "-" where there is no figure
    wide: bool = False  # shown only in a wide terminal


def plain_table(title: str | None, columns: Sequence[str], gap: int = 2, folds: Collection[str] = ()) -> Table:
    """A table without lines: names align left, figures align right, and only the columns in `folds` wrap."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=column not in folds)
    return table


COLUMNS = (
    Column("training_ms", "train", "training, ms", milliseconds),
    Column("training_ratio", "x", "training / softmax", ratio),
    Column("forward_ms", "forward", "forward, ms", milliseconds, wide=True),
    Column("forward_ratio", "x", "forward / softmax", ratio, wide=True),
    Column("peak_bytes", "memory", "peak memory", readable),
    Column("decode_ms", "token", "one token, ms", milliseconds),
    Column("state_bytes", "state", "state", readable),
)
