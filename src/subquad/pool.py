"""Commands of subquad in processes of their own, some at a time; what interrupts this one interrupts them first.

A process of its own is `python -m subquad.pool PARENT ...`: it saves and ends once its parent is gone,
however that went.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import subquad


def environment() -> dict[str, str]:
    """Ours, with this source first on the path: a child imports what its parent runs, installed or not."""
    source = str(Path(subquad.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def end_with(parent: int) -> None:
    """Once whoever started this process is gone, however it went: save and end, as at Ctrl-C."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)


Told = Callable[[str, str], None]  # (name, a line that it printed)


class Process:
    """`subquad ...` that tells each line it prints."""

    def __init__(self, name: str, arguments: Sequence[str], told: Told):
        self.name, self.said, self.told = name, "", told
        self.process = subprocess.Popen(
            [sys.executable, "-m", "subquad.pool", str(os.getpid()), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment(), "COLUMNS": "200"},
            start_new_session=True,  # Ctrl-C is passed on, once
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                self.said = line.strip()
                self.told(self.name, self.said)
        self.process.stdout.close()

    def ended(self) -> int | None:
        """The exit code, once everything it printed was told."""
        code = self.process.poll()
        if code is not None:
            self.reader.join()
        return code


def run_all(commands: Mapping[str, Sequence[str]], jobs: int, told: Told) -> Iterator[tuple[str, int, str]]:
    """(name, exit code, the last line or what killed it) of each as it ends, in at most `jobs` processes at once."""
    waiting, running = list(commands), list[Process]()
    with _passed_on(running):
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                name = waiting.pop(0)
                running.append(Process(name, commands[name], told))
            for process in list(running):
                code = process.ended()
                if code is not None:
                    running.remove(process)
                    yield process.name, code, _killed(-code) if code < 0 else process.said or f"exit code {code}"
            time.sleep(0.1)


def _killed(number: int) -> str:
    why = ", often for want of memory" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({signal.strsignal(number)}{why})"


@contextlib.contextmanager
def _passed_on(running: list[Process]) -> Iterator[None]:
    """Ctrl-C and a request to end go to every process, which saves; only then does this one end."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except BaseException:
        for process in running:
            process.process.send_signal(signal.SIGINT)
        for process in running:
            process.process.wait()
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def main() -> None:
    parent, *words = sys.argv[1:]
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    sys.argv = ["subquad", *words]
    runpy.run_module("subquad.cli", run_name="__main__")


if __name__ == "__main__":
    main()
