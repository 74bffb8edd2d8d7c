"""Triton's interpreter is chosen when triton is first imported: tests of it run in a process of their own.

`test_kernels.py` runs every file that imports this one again in such a process; there tests marked `interpreted` run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
outside = pytest.mark.skipif(INTERPRETED, reason="needs no process of its own")

if INTERPRETED:
    pytest.importorskip("triton")
    from tests.ops.interpreter import hasten

    hasten()


def interpret(files: list[Path]) -> None:
    """Run the tests of these files once more, in Triton's interpreter."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
