"""What all parts do: spoil free memory, compare with float64, run cases in processes, and time alone on the GPU.

Without a GPU the cases run on the CPU, for Triton's interpreter (TRITON_INTERPRET=1) at tiny sizes.
"""

import fcntl
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.machine import available
from subquad.measure.cost import Sample, calibrate, first_line, once, release

DEVICE = available("auto")
LOCK = Path(tempfile.gettempdir()) / "subquad-gpu.lock"
WAIT = 3.0  # milliseconds that the GPU waits before a sample, so that the time of Python does not count
Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A function of a module and its arguments, so that other processes can run it. It returns a Verdict or figures."""

    part: str
    run: Callable[..., Any]
    given: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.run.__name__, *(str(one).removeprefix("torch.") for one in self.given)])


@dataclass
class Verdict:
    """What a check found: (ours, plain) errors against float64 by name, the largest of ours, and what is wrong."""

    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def compare(
        self,
        name: str,
        ours: Tensor,
        plain: Tensor,
        exact: Tensor,
        *,
        most: float = 2.0,
        floor: float = 0.0,
        slack: float = 0.0,
        least: float = 1e-12,
    ) -> None:
        """Ours may have `most` times the error of the plain expression, or of `floor`, and `slack` more."""
        mine, allowed = error(ours, exact, least), error(plain, exact, least)
        if name not in self.errors or not mine <= self.errors[name][0]:
            self.errors[name] = mine, allowed
        if not mine <= most * max(allowed, floor) + slack:
            self.wrong.append(f"{name}: {mine:.1e}, plain {allowed:.1e}")

    def within(self, name: str, ours: Tensor, exact: Tensor, bar: float) -> None:
        """The error of ours is at most `bar`."""
        self.bound(name, error(ours, exact), bar)

    def bound(self, name: str, value: float, bar: float) -> None:
        if name not in self.errors or not value <= self.errors[name][0]:
            self.errors[name] = value, bar
        if not value <= bar:
            self.wrong.append(f"{name}: {value:.1e}, at most {bar:.1e}")

    def expect(self, name: str, right: bool) -> None:
        if not right:
            self.wrong.append(name)


def error(ours: Tensor, exact: Tensor, least: float = 1e-12) -> float:
    """The norm of the difference over that of `exact`, or over `least`; NaN if ours is not finite."""
    if not bool(ours.isfinite().all()):
        return math.nan
    exact = exact.double()
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=least))


def poison() -> None:
    """Fill the allocator's free memory with NaN, which kernels must not read."""
    if DEVICE == "cpu":
        return
    held = [torch.full((1 << 22,), torch.nan, device=DEVICE) for _ in range(16)]
    held += [torch.full((1 << n,), torch.nan, device=DEVICE) for n in range(8, 22) for _ in range(4)]
    held += [torch.full((1 << n,), torch.nan, device=DEVICE) for n in (24, 26)]
    del held


@contextmanager
def deterministic() -> Iterator[None]:
    """In this mode torch.empty is filled with NaN too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def capture(run: Callable[[], Tensor], held: Sequence[Tensor]) -> Callable[[], Tensor]:
    """`run` as a CUDA graph; the tensors that it changes are as before. Without a GPU, `run` itself."""
    if DEVICE == "cpu":
        return run
    before = [t.clone() for t in held]

    def restore() -> None:
        for now, then in zip(held, before, strict=True):
            now.copy_(then)

    for _ in range(2):  # compiles
        run()
    restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    restore()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@contextmanager
def alone() -> Iterator[None]:
    """Nothing else that asks here uses the GPU meanwhile, in any process."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()


def event_ms(run: Callable[[], None], count: int = 5) -> float:
    """The median time of the GPU between two events, in milliseconds a call."""
    with alone():
        sample = calibrate(run, "cuda")
        return statistics.median(once(run, "cuda", sample) for _ in range(count))


def graph_ms(run: Callable[[], object], calls: int = 8, rewind: Callable[[], None] | None = None) -> float:
    """The median milliseconds of a call, in a CUDA graph of several calls; `rewind` comes before each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    samples = []
    with alone():
        for _ in range(7):
            if rewind is not None:
                rewind()
            samples.append(once(graph.replay, "cuda", Sample(1, WAIT)) / calls)
    return statistics.median(samples)


def attempt(case: Case) -> Figures:
    """What a case found, or how it failed; a failure does not stop the others."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    record: Figures = {"part": case.part, "case": case.name}
    try:
        found = case.run(*case.given)
        if isinstance(found, Verdict):
            errors = {name: [_finite(a), _finite(b)] for name, (a, b) in found.errors.items()}
            record |= {"ok": not found.wrong, "errors": errors, "wrong": found.wrong}
        else:
            record |= {"ok": True, **{k: _finite(v) if isinstance(v, float) else v for k, v in found.items()}}
    except Exception as failure:
        where = [f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(failure.__traceback__)[-5:]]
        said = f"{type(failure).__name__}: {first_line(failure)[:200]}"
        record |= {"ok": False, "failed": said, "where": where}
    with suppress(RuntimeError):  # after an illegal access the GPU refuses this process everything
        release(DEVICE)
    return record | {"seconds": round(time.perf_counter() - begun, 1)}


def _finite(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


def show(record: Figures) -> None:
    """One line."""
    hidden = ("part", "case", "ok", "seconds", "errors")
    words = ["ok   " if record["ok"] else "WRONG", f"{record['part']:8s}", record["case"]]
    words += [f"{name} {_short(a)}/{_short(b)}" for name, (a, b) in record.get("errors", {}).items()]
    words += [f"{k} {_short(v)}" for k, v in record.items() if k not in hidden and v not in ([], None)]
    print(*words, f"({record['seconds']} s)", flush=True)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def check_all(cases: Sequence[Case], seconds: float, workers: int) -> list[Figures]:
    """Run cases in several processes, because most of the time is compilation; what is not done in time is wrong.

    After an illegal access to memory a process can do nothing more on the GPU, so that its next cases fail too:
    believe the first, and run the others again.
    """
    end = time.monotonic() + seconds
    records = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(cases)), torch.set_num_threads, (1,), maxtasksperchild=8) as pool:
        waiting = [(case, pool.apply_async(attempt, (case,))) for case in cases]
        while waiting:
            late = time.monotonic() > end
            ended = [(case, result) for case, result in waiting if late or result.ready()]
            waiting = [one for one in waiting if one not in ended]
            for case, result in ended:
                unknown = {"part": case.part, "case": case.name, "ok": False, "seconds": seconds}
                record = result.get() if result.ready() else unknown | {"failed": "not done in time"}
                records.append(record)
                show(record)
            time.sleep(0.05)
    return records  # the pool's processes have ended: nothing runs beside what is timed next


def time_all(cases: Sequence[Case], seconds: float) -> list[Figures]:
    """Run cases one after the other in this process; those for which no time is left are left out."""
    end = time.monotonic() + seconds
    records = []
    for case in cases:
        if time.monotonic() > end:
            print("no time is left for", case.part, case.name, flush=True)
            continue
        records.append(attempt(case))
        show(records[-1])
    return records


def cores() -> int:
    return max(1, (os.cpu_count() or 1) - 3)
