"""Ctrl-C, SIGTERM or a closed terminal: the first signal makes the run save and stop, a second one stops it at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self

from subquad.training.log import Log


class Interrupted(KeyboardInterrupt):
    """The run was interrupted and has saved everything; `code` is the exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Signals:
    """`number` is the number of the signal received, or 0."""

    def __init__(self, log: Log):
        self.number = 0
        self.log = log
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup, keep running
                    self.before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        self.log.say("stopping after this step; press Ctrl-C again to stop at once")
