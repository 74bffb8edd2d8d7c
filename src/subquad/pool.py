"""Child processes: how they are started, and how they notice that their parent is gone.

A process is `python -m subquad.pool PARENT MODULE ARGUMENTS`: it runs MODULE as `python -m` would, and once PARENT is
gone it interrupts itself as Ctrl-C would. `run_all` runs commands of subquad that way. A `Worker` runs a module that
calls `serve`: it reads jobs and writes answers, each a line of JSON. `in_order` calls one function in several
processes, through the standard library's pool.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

import subquad

T = TypeVar("T")
Json = dict[str, Any]
OnLine = Callable[[str, str], None]  # (name, a line that it printed)
PATIENCE = 20.0  # seconds that a worker gets to end before it is killed


class Died(Exception):
    """A process ended before it answered."""


def environment() -> dict[str, str]:
    """Our environment, with this source first on PYTHONPATH, so that a child runs the same code as its parent."""
    source = str(Path(subquad.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def start(module: str, arguments: Sequence[str] = (), **options: Any) -> "subprocess.Popen[str]":
    """Run a module in a process that ends with this one; Ctrl-C reaches it only if this process passes it on."""
    words = [sys.executable, "-m", "subquad.pool", str(os.getpid()), module, *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    why = ", often because memory ran out" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({signal.strsignal(-code)}{why})"


class Worker:
    """A process that answers jobs. It is started for the first job, and again for the next job if it has ended."""

    def __init__(self, module: str, setup: Json, defaults: Mapping[str, str]):
        """`setup` goes to `begin` of `serve`; `defaults` are environment variables, unless they are set already."""
        self.module, self.setup, self.defaults = module, setup, defaults
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Json) -> Json:
        """The answer to a job; Died if the process ends instead."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = start(self.module, stdin=subprocess.PIPE, env={**self.defaults, **environment()})
            self._send(self.setup)
        self._send(job)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Died(ending(self.close()))
        answer: Json = json.loads(line)
        if answer.pop("last", False):
            self.close()
        return answer

    def _send(self, data: Json) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone: `ask` notices when it reads the answer
            self.process.stdin.write(json.dumps(data) + "\n")
            self.process.stdin.flush()

    def interrupt(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self, patience: float = PATIENCE) -> int | None:
        """End the process, by force after `patience` seconds; returns its exit code."""
        if self.process is None:
            return None
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            code = self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code


def serve(begin: Callable[[Json], Callable[[Json], Json]]) -> None:
    """What the module of a `Worker` runs: `begin` takes the setup and returns the function that answers a job.

    After an answer with "last" set the process ends, and the next job gets a new one.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: that must not mix with the answers
    try:
        exchange(sys.stdin, answers, begin)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def exchange(jobs: IO[str], answers: IO[str], begin: Callable[[Json], Callable[[Json], Json]]) -> None:
    answer = begin(json.loads(jobs.readline()))
    for line in jobs:
        reply = answer(json.loads(line))
        try:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
        except BrokenPipeError:  # the parent is gone
            return
        if reply.get("last"):
            return


class Process:
    """A running command of subquad; `on_line` gets each line as it is printed."""

    def __init__(self, name: str, arguments: Sequence[str], on_line: OnLine):
        self.name, self.last_line, self.on_line = name, "", on_line
        self.process = start(
            "subquad.cli", arguments, stderr=subprocess.STDOUT, env={**environment(), "COLUMNS": "200"}
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                self.last_line = line.strip()
                self.on_line(self.name, self.last_line)
        self.process.stdout.close()

    def ended(self) -> int | None:
        """The exit code, after the last line was passed on; None while it runs."""
        code = self.process.poll()
        if code is not None:
            self.reader.join()
        return code


def run_all(commands: Mapping[str, Sequence[str]], jobs: int, on_line: OnLine) -> Iterator[tuple[str, int, str]]:
    """Run commands, at most `jobs` at once, and yield (name, exit code, last line or what killed it) as each ends."""
    waiting, running = list(commands), list[Process]()
    with _interrupting(running):
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                name = waiting.pop(0)
                running.append(Process(name, commands[name], on_line))
            for process in list(running):
                code = process.ended()
                if code is not None:
                    running.remove(process)
                    yield process.name, code, ending(code) if code < 0 else process.last_line or ending(code)
            time.sleep(0.1)


@contextlib.contextmanager
def _interrupting(running: list[Process]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, interrupt every process and wait for it to end, so that it can save."""

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


def in_order(make: Callable[[int], T], numbers: Sequence[int], workers: int) -> Iterator[T]:
    """make(number) for each number, in order, in several processes; the caller may stop early."""
    if workers <= 1:
        yield from map(make, numbers)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin) as pool:
        results = pool.map(make, numbers)
        try:
            yield from results
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Before the first number: ignore Ctrl-C, since the parent stops its workers, and end if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the main thread waits for numbers that nobody will send


def end_with(parent: int) -> None:
    """Wait until the parent process is gone, then interrupt this one as Ctrl-C would."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    _, parent, module, *arguments = sys.argv
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would inherit "ignore"
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
