"""A process that test_pool.py starts: it answers jobs, prints between answers, and dies when told to."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from subquad.pool import serve


def begin(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        sys.stdout.write("a library says something\n")
        if job["do"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if job["do"] == "sleep":
            time.sleep(600)
        return {"process": os.getpid(), "setup": setup["name"], "last": job["do"] == "last"}

    return answer


if __name__ == "__main__":
    serve(begin)
