"""Arrays that are made once: written whole or not at all, read by any number of processes without a copy each."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from subquad.data import files

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


def generated() -> Path:
    """Where what is made here is kept: lra in the data folder."""
    return files.folder() / "lra"


def kept(folder: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `folder`, mapped into memory; made and written there first if nobody has."""
    if not any(folder.glob("*.npy")):  # a folder appears with all that belongs in it
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            for name, array in make().items():
                np.save(part / f"{name}.npy", array)
            try:
                part.rename(folder)
            except OSError:
                if not any(folder.glob("*.npy")):  # no other process was first, with the same arrays
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return {path.stem: _mapped(path) for path in sorted(folder.glob("*.npy"))}


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: delete {path.parent}, and it is made again") from error


def in_order(make: Callable[[int], T], numbers: Sequence[int], workers: int) -> Iterator[T]:
    """make(number) of each, in order, over so many processes; a caller who has enough stops early."""
    if workers <= 1:
        yield from map(make, numbers)
        return
    # Ctrl-C is for the one who waits here: workers end with what they have begun
    ignore = (signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with ProcessPoolExecutor(workers, get_context("spawn"), *ignore) as pool:
        results = pool.map(make, numbers)
        try:
            yield from results
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
