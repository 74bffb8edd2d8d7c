"""What a process needs that is started to run this very source."""

import os
import signal
import time
from pathlib import Path

import subquad


def environment() -> dict[str, str]:
    """Ours, with this source first on the path: a child imports what its parent runs, installed or not."""
    source = str(Path(subquad.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def end_with(parent: int) -> None:
    """Once whoever started this process is gone, however it went: save and end, as at Ctrl-C."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
