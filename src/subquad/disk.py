"""Files: JSON whose errors name the file."""

import json
from pathlib import Path
from typing import Any

DEEPEST = 100  # levels of nesting; files of this package have fewer than ten


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError names a file that is not UTF-8, not JSON or nested too deep."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ValueError(f"{path} holds {wrong:#04x} at byte {error.start:,}: accepted is JSON in UTF-8") from error
    return parse_json(text, path)


def parse_json(text: str, source: object) -> Any:
    """JSON from anywhere; `source` is what an error names."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{source} is nested too deep: accepted are {DEEPEST} levels") from None
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        raise ValueError(f"{source} is not JSON: {error}") from error
    level, depth = [data], 0
    while level:
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
        if depth > DEEPEST + 1:
            raise ValueError(f"{source} is nested too deep: accepted are {DEEPEST} levels")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The same, of a file that must hold an object with keys."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}: accepted is a JSON object")
    return data
