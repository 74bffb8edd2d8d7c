"""The log of a run: a progress bar, metrics.jsonl, TensorBoard."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress

from subquad.training import history
from subquad.training.history import METRICS

WARMUP = 10  # the first updates of a process, which rates ignore
QUIET = 60.0  # least seconds between two lines without a progress bar
CURVE = 200  # most points of a curve

_MISSED: set[str] = set()


class Log:
    """`step` is where the run resumes: later lines are deleted, so that each step is logged once. `copy` is the copy of
    the lines in the checkpoint. Ranks other than the first have path=None and log nothing."""

    def __init__(self, path: Path | None, console: Console, title: str, step: int = 0, copy: str | None = None):
        self.console, self.title = console, title
        self.file: IO[str] | None = None
        self.board: Any = None
        self.bar: Progress | None = None
        self.last_line = 0.0  # when it was printed
        if path is None:
            return
        self.check, damage = history.restore(path / METRICS, step, copy)
        if damage:
            console.print(damage, highlight=False, markup=False, soft_wrap=True)
        self.path = path / METRICS
        self.file = self.path.open("a")
        self.board = _board(path / "tensorboard", step, console)
        if console.is_terminal:
            columns = ("{task.description}", BarColumn(bar_width=20), "step {task.fields[step]:,} {task.fields[info]}")
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task(title, total=1.0, step=step, info="starting")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError, SystemExit):  # the terminal is closed
                self.bar.stop()
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()

    def write(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        """One line of metrics.jsonl; NaN and infinity become null."""
        if self.file is None:
            return
        plain = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
        text, self.check = history.text_of({"step": step, "split": split, **plain}, self.check)
        self.file.write(text)
        self.file.flush()
        if self.board is not None:
            for key, value in plain.items():
                if value is not None:
                    self.board.add_scalar(f"{split}/{key}", value, step)

    def sync(self) -> dict[str, bytes]:
        """Write everything to the disk; returns {file name: content} for a checkpoint to keep a copy."""
        if self.board is not None:
            self.board.flush()
        if self.file is None:
            return {}
        os.fsync(self.file.fileno())
        return {METRICS: self.path.read_bytes()}

    def tick(self, step: int, progress: float) -> None:
        """Advance the progress bar after a step, whose loss has not been read yet."""
        if self.bar is not None:
            self.bar.update(self.task, completed=min(1.0, progress), step=step)

    def show(self, step: int, info: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, info=info)
        elif time.monotonic() - self.last_line > QUIET:
            self.say(f"step {step:,}: {info}")

    def say(self, text: str) -> None:
        self.last_line = time.monotonic()
        if self.file is not None:
            # the run continues even if its terminal or pipe (`| head`) is closed
            with contextlib.suppress(OSError, SystemExit):
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class LossCurve(Log):
    """A log in memory, for runs without a folder; its points are (step, mean loss since the last point)."""

    def __init__(self, watch: Callable[[int, float], None] | None = None):
        super().__init__(None, Console(quiet=True), "")
        self.points: list[tuple[int, float]] = []
        self.watch = watch

    def write(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:  # noqa: ARG002
        loss = values["loss"]
        assert loss is not None
        self.points.append((step, loss))
        if self.watch is not None:
            self.watch(step, loss)


class Meter:
    """Updates per second since the last reading, without pauses such as evaluations.

    The first updates of a process compile, choose kernels and allocate, so readings that include them do not count. At
    step `warm` the caller waits for the device and calls `restart`.
    """

    def __init__(self, step: int) -> None:
        self.step, self.begun = step, time.perf_counter()
        self.warm = step + WARMUP
        self.counts = False  # whether the next reading is of warm updates only

    @contextmanager
    def paused(self) -> Iterator[None]:
        stopped = time.perf_counter()
        yield
        self.begun += time.perf_counter() - stopped

    def restart(self, step: int) -> None:
        self.step, self.begun, self.counts = step, time.perf_counter(), True

    def read(self, step: int) -> float:
        now = time.perf_counter()
        rate = (step - self.step) / max(1e-9, now - self.begun)
        self.step, self.begun = step, now
        return rate


def memory(device: torch.device) -> int:
    """The most bytes used so far: by tensors on a GPU, else by the whole process; 0 (unknown) on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _board(path: Path, step: int, console: Console) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if "tensorboard" not in _MISSED:  # only once, also if a process trains many models
            instead = "the curves are in metrics.jsonl"
            console.print(f"tensorboard is not installed (pip install tensorboard): {instead}", highlight=False)
        _MISSED.add("tensorboard")
        return None
    return SummaryWriter(str(path), purge_step=step + 1)


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; ValueError if they are damaged."""
    metrics = history.read(run / METRICS)
    if metrics.damage:
        raise ValueError(f"{run / METRICS} is damaged: {metrics.damage}; `subquad train --resume` restores it")
    return metrics.lines


def curve(lines: Iterable[Mapping[str, Any]], metric: str) -> list[list[float]]:
    """Points [step, value] in the unit of the metric: the training loss if it has that unit, else the validation."""
    bits = metric.startswith("bits/")
    split, key, unit = ("train", "loss", math.log(2)) if bits else ("validation", metric, 1.0)
    lines = [line for line in lines if line["split"] == split and line.get(key) is not None]
    points = [[line["step"], line[key] / unit] for line in lines]
    every = -(-len(points) // CURVE) or 1
    return points[every - 1 :: every]
