"""Generated arrays: made once, written completely or not at all, and shared by processes through memory maps."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from subquad.data import files

Arrays = dict[str, np.ndarray]


def generated() -> Path:
    """The folder of generated data: lra in the data folder."""
    return files.folder() / "lra"


def kept(folder: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `folder`, memory-mapped; if there are none, they are made and written first."""
    if not any(folder.glob("*.npy")):
        try:
            with files.atomic(folder) as part:
                part.mkdir(parents=True)
                for name, array in make().items():
                    np.save(part / f"{name}.npy", array)
        except OSError:
            if not any(folder.glob("*.npy")):  # otherwise another process was first and wrote the same arrays
                raise
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            arrays[path.stem] = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is damaged: delete {folder}, and it will be made again") from error
    return arrays


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
