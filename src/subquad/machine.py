"""This machine: its devices, its free memory, and the hardware, versions and commit that files of figures record."""

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import subquad
from subquad.checks import refuse

COMMIT = "SUBQUAD_COMMIT"  # an environment variable, so that child processes know the commit too


def available(name: str) -> str:
    """The name of a device that this machine has; "auto" becomes "cuda" if there is a GPU, otherwise "cpu"."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        refuse("device", name, '"cpu" or "cuda"')
    elif device.type == "cuda" and not has_gpu:
        refuse("device", name, '"cpu" here: torch finds no GPU')
    elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        refuse("device", name, f'"cuda:0" to "cuda:{torch.cuda.device_count() - 1}"')
    return name


def free_bytes(device: str | torch.device) -> int:
    """Free memory: of the GPU, or of this machine within the limit of its container."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable"):
            limits.append(int(line.split()[1]) * 1024)
    most, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if most.exists() and used.exists() and most.read_text().strip() != "max":
        limits.append(int(most.read_text()) - int(used.read_text()))
    return min(limits)


def readable(count: float) -> str:
    """Bytes as people read them: 17 kB, 1.2 MB, 34 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def allocation_peak(run: Callable[[], None]) -> int:
    """The most bytes that `run` holds at once in torch's CPU allocator."""
    with _no_stderr(), torch.autograd.profiler.profile(profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Hide standard error: the profiler writes there at each start and stop, whatever its log level."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def origin(device: str) -> dict[str, Any]:
    """The first entries of every file of figures."""
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
    """The commit of this source: as `tell_commit` recorded it, else from git, with "-dirty" if files were changed."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if head and _git("status", "--porcelain", "--", ".") else head


def _git(*words: str) -> str | None:
    """The output of git in the folder of the package, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(subquad.__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def tell_commit(name: str | None) -> None:
    """Record the commit for this process and its children, where git is not available; None changes nothing."""
    if name is not None:
        os.environ[COMMIT] = name
