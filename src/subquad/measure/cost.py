"""Measure one mechanism at one length: time compared with exact softmax, peak memory, decoding, state.

On a GPU, time is taken between two events, and the work is issued while the GPU is kept waiting, so the time of Python
does not count; a decoding step is captured as a CUDA graph, as programs that generate do. On a CPU, speed and load
change from minute to minute, so the figure that counts is the ratio to the yardstick (exact softmax), which is measured
immediately before and after.
"""

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.checks import ALLOCATION
from subquad.graphs import recording
from subquad.machine import allocation_peak
from subquad.mechanisms import build, mechanism

YARDSTICK = "softmax"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SHORTEST_SAMPLE = 2.0  # milliseconds; shorter calls are repeated within one sample
SLOW = 0.5  # seconds; if a training step takes longer, one call is a sample
ISSUED = 4  # calls issued while the GPU waits, because its queue holds about a thousand launches
LONGEST_WAIT = 100.0  # milliseconds that the GPU waits at most
CYCLES = 2_000_000  # clock cycles of a GPU in about a millisecond
PREFILLED = 2**18  # tokens of a prompt that are read at once, before decoding
WARM = 3  # steps before a capture, to compile and load kernels
PILOT = 256  # tokens of a small run that estimates the memory at the first length


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of several samples."""

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_amounts(self)


@dataclass(kw_only=True)
class Row:
    """The figures of one mechanism at one length; None: not measured. To add a figure, add a field here, and to show it
    a column in studies/columns.py."""

    mechanism: str
    length: int
    causal: bool = False
    forward_ms: Spread | None = None
    training_ms: Spread | None = None
    decode_ms: Spread | None = None
    forward_ratio: Spread | None = None  # to exact softmax, measured just before and after
    training_ratio: Spread | None = None
    decode_ratio: Spread | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None
    state_bytes: int | None = None
    skipped: str | None = None  # why it was not tried
    error: str | None = None  # why it failed
    uncaptured: str | None = field(default=None, metadata={"optional": True})  # why decoding counts the time of Python

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length} cannot work: accepted is an integer of at least 1")
        _check_amounts(self)

    @property
    def key(self) -> tuple[str, int, bool]:
        """What no two rows of a comparison share."""
        return self.mechanism, self.length, self.causal


def _check_amounts(record: Spread | Row) -> None:
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{each.name}={value} cannot work: accepted is a finite number of at least 0")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of the input, and the settings with which a mechanism is built for it."""

    length: int
    dim: int = 64
    heads: int = 2
    batch: int = 1
    causal: bool = True
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def least_bytes(self) -> int:
        """The least that any mechanism needs: the input, the output and their gradients."""
        return 4 * self.batch * self.length * self.dim * DTYPES[self.dtype].itemsize


class Subject:
    """A mechanism built for a shape, with an input and an output gradient. Its methods are timed."""

    def __init__(self, name: str, shape: Shape):
        self.name, self.shape = name, shape
        options: dict[str, Any] = {"dim": shape.dim, "heads": shape.heads, "causal": shape.causal}
        if mechanism(name).traits.fixed_length:
            options["max_length"] = shape.length
        torch.manual_seed(0)
        self.mix = build(name, **options).to(shape.device, DTYPES[shape.dtype])
        size = (shape.batch, shape.length, shape.dim)
        self.x = torch.randn(size).to(shape.device, DTYPES[shape.dtype]).requires_grad_()
        self.gradient = torch.randn(size).to(shape.device, DTYPES[shape.dtype])

    @torch.no_grad()
    def forward(self) -> None:
        self.mix.eval()(self.x)

    def training(self) -> None:
        """Forward and backward, including the gradient of the input, as inside a network."""
        self.x.grad = None
        self.mix.zero_grad(set_to_none=True)
        self.mix.train()(self.x).backward(self.gradient)

    def own_bytes(self) -> int:
        """Parameters, buffers, the input and the output's gradient."""
        return tensor_bytes([*self.mix.parameters(), *self.mix.buffers(), self.x, self.gradient])


class Decode:
    """Decode one token after another from the end of a subject's sequence; each sample starts there again.

    On a GPU a call replays a captured step. `uncaptured` says why that cannot be: then a call runs the step.
    """

    @torch.no_grad()
    def __init__(self, subject: Subject):
        self.mix, self.token = subject.mix.eval(), subject.x[:, -1].detach()
        rows = max(1, PREFILLED // subject.shape.length)
        states = [self.mix.prefill(part)[1] for part in subject.x.detach().split(rows)]
        state = states[0] if len(states) == 1 else type(states[0])(*map(torch.cat, zip(*states, strict=True)))
        del states
        self.bytes = tensor_bytes(list(state))
        _, self.start = self.mix.step(self.token, state)  # so that a growing cache grows now, not while timed
        del state
        self.room = subject.shape.length - 2  # steps that a cache of twice the length takes without growing again
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uncaptured: str | None = None
        self.rewind()
        if self.token.is_cuda and self.room < 1:
            self.uncaptured = "the sequence is so short that the cache would grow"
        elif self.token.is_cuda:
            self._capture()

    def rewind(self) -> None:
        if self.graph is None:  # the state may have grown
            self.state = type(self.start)(*(t.clone() for t in self.start))
            return
        for old, first in zip(self.state, self.start, strict=True):
            old.copy_(first)

    def __call__(self) -> None:
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    @torch.no_grad()
    def _step(self) -> None:
        _, self.state = self.mix.step(self.token, self.state, inplace=True)

    def _capture(self) -> None:
        for _ in range(WARM):
            self._step()
        self.rewind()
        graph, held = torch.cuda.CUDAGraph(), self.state
        try:
            with recording(graph):
                self._step()
            self.graph = graph
        except Exception as error:
            self.uncaptured = f"{type(error).__name__}: {first_line(error)}"
        self.state = held


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def spread(samples: Sequence[float]) -> Spread | None:
    """Median and quartiles; None if there are no samples."""
    if not samples:
        return None
    low, _, high = statistics.quantiles(samples if len(samples) > 1 else 2 * list(samples), n=4, method="inclusive")
    return Spread(statistics.median(samples), low, high)


class Sample(NamedTuple):
    """How often a run is called in one sample, and how long a GPU waits before it."""

    calls: int = 1  # in a row
    wait: float = 0.0  # milliseconds that a GPU sleeps first, while the calls are queued


SINGLE = Sample()


def once(run: Callable[[], object], device: str, sample: Sample = SINGLE) -> float:
    """Time one sample; returns milliseconds per call."""
    if isinstance(run, Decode):
        run.rewind()
    if torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if sample.wait:
            torch.cuda._sleep(round(sample.wait * CYCLES))
        start.record()
        for _ in range(sample.calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / sample.calls
    begun = time.perf_counter()
    for _ in range(sample.calls):
        run()
    return (time.perf_counter() - begun) * 1000 / sample.calls


def calls_for(milliseconds: float) -> int:
    """How many calls make a sample long enough to be timed well."""
    return max(1, min(50, math.ceil(SHORTEST_SAMPLE / max(milliseconds, 1e-3))))


def calibrate(run: Callable[[], None], device: str, wait: bool = True) -> Sample:
    """Choose how to sample `run`. `wait`: on a GPU, count only the time of the GPU, not that of Python."""
    if torch.device(device).type != "cuda":
        return Sample(calls_for(once(run, device)))
    run()  # the first call compiles kernels
    issued = once(run, device)  # at least the time to issue it
    if not wait:
        return Sample(calls_for(issued))
    most = run.room if isinstance(run, Decode) and run.graph is not None else ISSUED  # a replay is one launch
    calls = min(most, calls_for(issued))
    return Sample(calls, min(LONGEST_WAIT, 1.5 * calls * issued))


class Yardstick:
    """Exact softmax of one shape. It is timed before and after everything else of that shape."""

    def __init__(self, shape: Shape, decode_only: bool = False):
        self.subject = Subject(YARDSTICK, shape)
        self.peak: int | None = None
        slow = False
        self.runs: dict[str, Callable[[], None]] = {}
        if not decode_only:
            self.peak, slow = first_run(self.subject)
            self.runs = {"forward": self.subject.forward, "training": self.subject.training}
        if self.subject.mix.traits.state is not None:
            self.runs["decode"] = Decode(self.subject)
        # one token is quick at any length
        quick = {what: run for what, run in self.runs.items() if not slow or what == "decode"}
        self.samples = {w: calibrate(run, shape.device) if w in quick else SINGLE for w, run in self.runs.items()}
        self.last: dict[str, float] = {}

    def sample(self, kinds: Iterable[str]) -> dict[str, float]:
        """Milliseconds for each of `kinds` that softmax has; other runs of softmax are not timed, to save time."""
        device = self.subject.shape.device
        times = {what: once(self.runs[what], device, self.samples[what]) for what in kinds if what in self.runs}
        self.last |= times
        return times


def time_beside(
    runs: dict[str, Callable[[], None]],
    device: str,
    yardstick: Yardstick | None,
    seconds: float,
    most: int = 8,
    slow: bool = False,
    wait: bool = True,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(milliseconds, ratios to the yardstick) of each run: two samples of ours between two of the yardstick, repeated.

    Repeats until `seconds` are used: at least once, and at most `most` samples of each run. The last sample of the
    yardstick is also the first one for the next mechanism, which saves time at long lengths. `slow`: a single call is
    known to be long enough for a sample. `wait`: on a GPU, count only the time of the GPU, not that of Python.
    """
    how = {what: SINGLE if slow else calibrate(run, device, wait) for what, run in runs.items()}
    times: dict[str, list[float]] = {what: [] for what in runs}
    ratios: dict[str, list[float]] = {what: [] for what in runs}
    before: dict[str, float] = {}
    if yardstick is not None:
        before = dict(yardstick.last) if runs.keys() <= yardstick.last.keys() else yardstick.sample(runs)
    begun = time.perf_counter()
    for _ in range(max(1, most // 2)):
        block = {what: [once(run, device, how[what]) for _ in range(2)] for what, run in runs.items()}
        after = yardstick.sample(runs) if yardstick else {}
        for what, samples in block.items():
            times[what] += samples
            if what in after:
                ratios[what] += [t / ((before[what] + after[what]) / 2) for t in samples]
        before = after
        blocks = len(next(iter(times.values()))) / 2
        if (time.perf_counter() - begun) * (blocks + 1) / blocks > seconds:  # the next block would take too long
            break
    return times, ratios


def first_run(subject: Subject) -> tuple[int, bool]:
    """(peak bytes of a training step, whether one call is long enough for a sample); this also warms up."""
    if torch.device(subject.shape.device).type == "cuda":
        return peak_bytes(subject), False  # the first run is always slow: it compiles kernels
    begun = time.perf_counter()
    peak = peak_bytes(subject)
    return peak, time.perf_counter() - begun > SLOW


def peak_bytes(subject: Subject) -> int:
    """Peak memory of a training step: what it holds at once, plus the parameters and the input.

    On a GPU the allocator reports it. On a CPU every allocation and release of torch's allocator is recorded and added
    up in order. That gives the same number each time, unlike the resident size of the process.
    """
    cuda = torch.device(subject.shape.device).type == "cuda"
    if cuda:
        subject.training()  # the first run makes lasting workspaces, which should not count
    subject.x.grad = None
    subject.mix.zero_grad(set_to_none=True)
    if not cuda:
        return subject.own_bytes() + allocation_peak(subject.training)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.training()
    torch.cuda.synchronize()
    return subject.own_bytes() + torch.cuda.max_memory_allocated() - before


def release(device: str) -> None:
    """Free the memory of deleted tensors."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def grown(value: float, before: int, now: int, exponent: float) -> float:
    """What `value` at length `before` becomes at length `now` if it grows as documented."""
    return value * (now / before) ** exponent


def out_of_memory(error: BaseException) -> str | None:
    """How much memory was requested, if the error says that memory ran out; else None."""
    text = str(error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not ALLOCATION.search(text):
        return None
    amount = re.search(r"allocate ([\d.]+ ?\w*)", text)
    return f"{amount[1]} were requested at once" if amount else "more was requested than is free"


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    """The first line of an error, for a cell of a table; some errors have no text."""
    return next(iter(str(error).strip().splitlines()), otherwise)
