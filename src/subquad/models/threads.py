"""Small work on a CPU runs on one thread.

The threads of an operation wait for each other at its end. In a small operation that wait costs more than a second
thread gains; and beside a busy process one of the threads is paused for milliseconds at a time, in every operation.
"""

import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

# Measured on two cores with linear attention. Two threads are 0.9 to 1.0 times as fast as one up to 3 x 10^7
# multiply-adds a step, 1.2 times at 5 x 10^7 to 10^8, 1.5 times at 4 x 10^8; beside a process that keeps one core busy
# they take 3 to 60 times as long as one thread below 10^8.
SMALL = 1 << 26
READ = 8  # multiply-adds that take about as long as reading one number of a state

Result = TypeVar("Result")


def run_small(work: float, run: Callable[[], Result]) -> Result:
    """What `run` returns; on one thread if its multiply-adds, `work`, are too few to share.

    The number of threads is as before when this returns or raises. It belongs to the Python thread that calls, so
    others that generate at the same time are not affected.
    """
    before = torch.get_num_threads()
    if work >= SMALL or before == 1:
        return run()
    try:
        torch.set_num_threads(1)
        if threading.active_count() > 1:
            _set_for_new_threads(before)
        return run()
    finally:
        torch.set_num_threads(before)


def _set_for_new_threads(number: int) -> None:
    """A Python thread that uses torch for the first time takes the number that any thread set last, and keeps it.

    So a thread that starts while this one is at work would keep one thread for ever, unless another thread sets the
    number after this one.
    """
    done = threading.Event()
    _setter(os.getpid()).put((number, done))
    done.wait()


@functools.lru_cache(maxsize=1)
def _setter(process: int) -> "queue.SimpleQueue[tuple[int, threading.Event]]":  # noqa: ARG001 (a fork needs its own)
    """A thread that calls set_num_threads and does nothing else."""
    orders: queue.SimpleQueue[tuple[int, threading.Event]] = queue.SimpleQueue()

    def obey() -> None:
        while True:
            number, done = orders.get()
            torch.set_num_threads(number)
            done.set()

    threading.Thread(target=obey, name="set_num_threads", daemon=True).start()
    return orders
