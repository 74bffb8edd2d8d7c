"""metrics.jsonl: one line per measurement, with a checksum of this line and all lines before it.

A killed run may leave an incomplete last line. Any other difference is reported as damage, and a resumed run restores
the file from the copy in its checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from subquad.disk import parse_json, set_aside, write_whole

METRICS = "metrics.jsonl"
CHECK = "check"  # the last key of a line; old lines have none


class History(NamedTuple):
    texts: list[str]  # the intact lines, with their newlines
    lines: list[dict[str, Any]]  # the same, parsed, without checksums
    damage: str  # a sentence about the first damaged line, or nothing
    last: str  # the checksum of the last intact line


def text_of(line: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """(the line as text, its checksum); `previous` is the checksum of the line before."""
    check = _check(line, previous)
    return json.dumps({**line, CHECK: check}, allow_nan=False) + "\n", check


def read(path: Path) -> History:
    """All intact lines; lines after a damaged one can be intact, since each has its own checksum."""
    texts: list[str] = []
    lines: list[dict[str, Any]] = []
    damage, previous, checked = "", "", False
    *whole, rest = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, raw in enumerate([*whole, rest] if rest else whole, start=1):
        try:
            line = _parse(raw)
        except ValueError as error:
            if number > len(whole) and _is_beginning(raw):
                continue
            damage = damage or f"line {number} cannot be read ({error})"
            continue
        check = line.pop(CHECK, None)
        if check is None and not checked:  # an old line, without a checksum
            previous = ""
        elif check is None or check != _check(line, previous):
            damage = damage or f"line {number} was changed, or a line before it is missing"
            checked, previous = True, check or ""
            continue
        checked, previous = check is not None, check or ""
        texts.append(raw.decode() + "\n")
        lines.append(line)
    return History(texts, lines, damage, previous)


def restore(path: Path, step: int, copy: str | None = None) -> tuple[str, str]:
    """Delete the lines after `step` and those of the test. `copy`, from a checkpoint of that step, replaces a
    file that differs from it. Returns the last line's checksum, and a sentence if the file was damaged."""
    history = read(path)
    both = zip(history.texts, history.lines, strict=True)
    kept = [text for text, line in both if line["step"] <= step and line["split"] != "test"]
    damaged = bool(history.damage) or copy not in (None, "".join(kept))
    sentence = ""
    if damaged and step > 0:
        why = history.damage or "lines are missing"
        aside = f"; it was renamed to {set_aside(path).name}" if path.exists() else ""
        instead = "damaged lines were removed" if copy is None else "the copy in the checkpoint replaces it"
        sentence = f"{path} is damaged: {why}{aside}; {instead}"
    text = "".join(kept) if copy is None else copy
    if text or path.exists():
        write_whole(path, text.encode())
    return read(path).last, sentence


def _parse(raw: bytes) -> dict[str, Any]:
    line = parse_json(raw, "it")
    plain = isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("split"), str)
    if not plain or not all(
        isinstance(value, str) if key in ("split", CHECK) else value is None or isinstance(value, int | float)
        for key, value in line.items()
    ):
        raise ValueError("accepted are a step, a split and numbers")
    return line


def _is_beginning(raw: bytes) -> bool:
    """Whether this may be the beginning of a line that a killed process did not finish."""
    try:
        json.loads(raw.decode(errors="replace"))
    except json.JSONDecodeError as error:
        return not error.msg.startswith("Extra data")
    except RecursionError:
        return False
    return False


def _check(line: Mapping[str, Any], previous: str) -> str:
    return hashlib.sha256(f"{previous}{json.dumps(line)}".encode()).hexdigest()[:16]
