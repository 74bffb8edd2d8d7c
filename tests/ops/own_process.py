"""Triton's interpreter and its compiler need opposite settings when triton is first imported: a process for each.

`test_kernels.py` runs every file that imports this one again in such processes; there tests marked `interpreted` or
`compiled` run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INNER = os.environ.get("SUBQUAD_TRITON_TEST")
interpreted = pytest.mark.skipif(INNER != "interpret", reason="runs in a process with TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INNER != "compile", reason="runs in a process that compiles")
outside = pytest.mark.skipif(INNER is not None, reason="needs no process of its own")


def run_again(files: list[Path], mode: str, cache: Path) -> None:
    """Run the tests of these files in a new process, with triton set to "interpret" or to "compile"."""
    env = {**os.environ, "SUBQUAD_TRITON_TEST": mode, "TRITON_INTERPRET": "1" if mode == "interpret" else "0"}
    env |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    env = {k: v for k, v in env.items() if not k.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
