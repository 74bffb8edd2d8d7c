"""Run small computations on a CPU on one thread.

The threads of an operation wait for each other at its end. In a small operation that wait costs more than a second
thread saves. If another process keeps a core busy, each operation may also pause a thread for milliseconds.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

# Measured on two cores with linear attention. Two threads are 0.9 to 1.0 times as fast as one up to 3 x 10^7
# multiply-adds a step, 1.2 times at 5 x 10^7 to 10^8, 1.5 times at 4 x 10^8; beside a process that keeps one core busy
# they take 3 to 60 times as long as one thread below 10^8.
SMALL = 1 << 26
READ = 8  # multiply-adds that take as long as reading one number of a state

Result = TypeVar("Result")


def run_small(work: float, run: Callable[[], Result]) -> Result:
    """Call `run`; on one thread if `work`, its multiply-adds, are too few to share.

    Afterwards the number of threads is as before, also after an error or an interrupt. It changes only for the calling
    Python thread, because others may generate or start at the same time.
    """
    before = torch.get_num_threads()
    if work >= SMALL or before == 1:
        return run()
    set_own = _thread_setters()
    if set_own is None:
        if threading.active_count() > 1:  # torch.set_num_threads would also set it for threads that start meanwhile
            return run()
        set_own = (torch.set_num_threads,)
    try:
        for set_number in set_own:
            set_number(1)
        return run()
    finally:
        try:
            set_own[0](before)
        finally:  # even if an interrupt comes between the two
            set_own[-1](before)


@functools.cache
def _thread_setters() -> tuple[Callable[[int], object], ...] | None:
    """The functions in torch's libraries that set the threads of OpenMP and of MKL for the calling thread only.

    torch.set_num_threads calls the same, but also keeps the number for threads that first use torch later. None if
    torch was built without them.
    """
    try:
        (path,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.[sd]*")
        library = ctypes.PyDLL(str(path))
        setters = [library.omp_set_num_threads]
        if torch.backends.mkl.is_available():
            setters.append(library.MKL_Set_Num_Threads_Local)
    except (OSError, ValueError, AttributeError):
        return None
    before = torch.get_num_threads()
    setters[0](before + 1)
    works = torch.get_num_threads() == before + 1  # False if it belongs to an OpenMP that torch does not use
    setters[0](before)
    return tuple(setters) if works else None
