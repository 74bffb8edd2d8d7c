"""Where figures come from: the machine, the versions, the commit."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import subquad

COMMIT = "SUBQUAD_COMMIT"  # in the environment, so that the processes of a run know it too


def origin(device: str) -> dict[str, Any]:
    """What every file of figures begins with."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"subquad": subquad.__version__, "commit": commit(), "date": now, "machine": machine(device)}


def machine(device: str) -> dict[str, Any]:
    """The hardware and the versions that figures depend on."""
    kind = torch.device(device).type
    try:
        triton: str | None = version("triton")
    except PackageNotFoundError:
        triton = None
    gpu = torch.cuda.get_device_properties(device) if kind == "cuda" else None
    return {
        "device": gpu.name if gpu else "cpu",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "memory_bytes": gpu.total_memory if gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Of this source: what `tell_commit` said, else what git says, with "-dirty" where its files were changed."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    found = _git("rev-parse", "--short=12", "HEAD")
    return f"{found}-dirty" if found and _git("status", "--porcelain", "--", ".") else found


def _git(*words: str) -> str | None:
    """What git says in the folder of the package, or None."""
    try:
        found = subprocess.run(
            ["git", *words],
            cwd=Path(subquad.__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def tell_commit(name: str | None) -> None:
    """Say which commit this is, to this process and those it starts, where git does not know; None says nothing."""
    if name is not None:
        os.environ[COMMIT] = name
