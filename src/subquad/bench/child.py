"""What a process needs that is started to run this very source."""

import os
from pathlib import Path

import subquad


def environment() -> dict[str, str]:
    """Ours, with this source first on the path: a child imports what its parent runs, installed or not."""
    source = str(Path(subquad.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}
