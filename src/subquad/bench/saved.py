"""Files of figures: written whole, kept when others take their place, read again by the call that goes on."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

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
