"""Files of figures: written whole, kept when others take their place, read again by the call that goes on."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.checks import counts
from subquad.disk import read_json, write_whole

Results = dict[str, Any]


def save(results: Results, path: Path) -> None:
    """Whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(results, indent=1, allow_nan=False)}\n".encode())


def set_aside(path: Path, console: Console) -> None:
    """Figures that are there already stay, under another name."""
    if path.is_file():
        names = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
        before = path.replace(next(name for name in names if not name.exists()))
        console.print(f"the figures that were there are now {before}", soft_wrap=True, highlight=False)


def check_rows(results: Results, path: Path) -> None:
    """Refuse rows of a comparison that are no measurements, so that nothing is computed from them."""
    rows = results.get("rows", [])
    wrong: object = rows
    if isinstance(rows, list):
        wrong = next((row for row in rows if not _is_measured(row)), None)
    if wrong is not None:
        raise ValueError(
            f"{path} is damaged, or not what subquad compare writes: {str(wrong)[:80]!r} is no row of figures"
        )


def _is_measured(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("mechanism"), str) or not counts([row.get("length")]):
        return False
    spreads = [value for value in row.values() if isinstance(value, dict)]
    numbers = [value for value in row.values() if isinstance(value, int | float)]
    whole = all({"median", "low", "high"} <= spread.keys() for spread in spreads)
    numbers += [value for spread in spreads for value in spread.values()]
    return whole and all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers)


def earlier(path: Path, kind: str, whole: Callable[[Results], bool]) -> Results:
    """What an earlier call of `subquad KIND` saved there, if any; refused, so that it is not overwritten, if it is
    something else or `whole` misses something in it."""
    if not path.exists():
        return {}
    try:
        found: Results = read_json(path)
        if found["kind"] == kind and isinstance(found["budget"], dict) and whole(found):
            return found
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is not what subquad {kind} wrote: move it away, or choose another folder with --out")
