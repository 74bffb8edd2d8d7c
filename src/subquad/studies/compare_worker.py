"""The process that measures, apart from the one that keeps the figures: if it dies, only the present figure is lost.

Reads one line of JSON (settings, jobs, rows so far) from standard input and writes one JSON object a line: a job it
begins, then the figures of that job. When standard input closes, nobody waits for them any more, and it ends.
"""

import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from subquad.machine import free_bytes, readable
from subquad.measure.cost import (
    PILOT,
    YARDSTICK,
    Decode,
    Shape,
    Subject,
    Yardstick,
    first_line,
    first_run,
    grown,
    out_of_memory,
    peak_bytes,
    spread,
    time_beside,
)
from subquad.mechanisms import mechanism
from subquad.studies.settings import Settings

Row = dict[str, Any]
Job = dict[str, Any]
SAFE = 0.8  # of the free memory: an estimate is not exact
POISONED = ("CUDA error", "device-side assert", "illegal memory access")  # after these a process can use no GPU


class Skip(Exception):
    """Why something is not measured."""


def empty_row(name: str, length: int, causal: bool, skipped: str | None = None, error: str | None = None) -> Row:
    fields = ("forward_ms", "training_ms", "decode_ms", "forward_ratio", "training_ratio", "decode_ratio")
    return {
        "mechanism": name,
        "length": length,
        "causal": causal,
        **dict.fromkeys(fields),
        "peak_bytes": None,
        "memory_ratio": None,
        "state_bytes": None,
        "skipped": skipped,
        "error": error,
    }


def work(settings: Settings, jobs: Sequence[Job], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Do the jobs in turn: {"begin": job}, then {"row": ...}, {"quality": ...} or {"warmed": ...} for each."""
    bench = Bench(settings, rows)
    for job in jobs:
        yield {"begin": job}
        if job["kind"] == "row":
            yield {"row": bench.row(job["mechanism"], job["length"], job["causal"])}
        elif job["kind"] == "warm":
            warm(job["mechanism"], settings.shape(job["length"], job["causal"]))
            yield {"warmed": job["mechanism"]}
        else:
            from subquad.studies.quality import quality

            yield {"quality": quality(settings, job["mechanism"])}


def warm(name: str, shape: Shape) -> None:
    """Run everything once, for the kernels that this compiles; what goes wrong, the measuring will meet and report."""
    with contextlib.suppress(Exception):
        subject = Subject(name, shape)
        subject.forward()
        subject.training()
        if subject.mix.traits.state is not None:
            Decode(subject)()


class Bench:
    """Measures row after row, remembers what earlier ones cost, keeps the yardstick of the present shape."""

    def __init__(self, settings: Settings, rows: Sequence[Row] = ()):
        self.settings = settings
        self.rows = list(rows)
        self.yardstick: Yardstick | None = None
        self.yardstick_shape: Shape | None = None
        self.no_yardstick = ""

    def row(self, name: str, length: int, causal: bool) -> Row:
        """The figures of one mechanism at one length; what goes wrong is in them, and nothing is raised."""
        row = empty_row(name, length, causal)
        try:
            self._measure(row, self.settings.shape(length, causal))
        except Skip as reason:
            row["skipped"] = str(reason)
        except Exception as error:
            asked = out_of_memory(error)
            if asked is None:
                row["error"] = f"{type(error).__name__}: {first_line(error)}"
            else:
                row["skipped"] = f"out of memory: {asked}"
        self.rows.append(row)
        gc.collect()
        if torch.device(self.settings.device).type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _measure(self, row: Row, shape: Shape) -> None:
        name = row["mechanism"]
        self._refuse_impossible(name, shape)
        self._refuse_slow(name, shape, self.settings.limit * (2 if name == YARDSTICK else 1))
        self._refuse_large(name, shape)
        subject = _build(name, shape)
        row["peak_bytes"], slow = first_run(subject)
        yardstick = self._yardstick_of(shape)
        if yardstick is not None:
            row["memory_ratio"] = row["peak_bytes"] / yardstick.peak
        runs = {"forward": subject.forward, "training": subject.training}
        self._time(row, runs, shape, yardstick, slow)
        if subject.mix.traits.state is not None:
            decode = Decode(subject)
            row["state_bytes"] = decode.bytes
            self._time(row, {"decode": decode}, shape, yardstick, False)

    def _time(self, row: Row, runs: dict[str, Any], shape: Shape, yardstick: Yardstick | None, slow: bool) -> None:
        times, ratios = time_beside(
            runs, shape.device, yardstick, self.settings.seconds, 2 * self.settings.repeats, slow=slow
        )
        for what in runs:
            row[f"{what}_ms"], row[f"{what}_ratio"] = spread(times[what]), spread(ratios[what])

    def _yardstick_of(self, shape: Shape) -> Yardstick | None:
        """Exact softmax of this shape, or None where it is too slow or too large itself."""
        if shape != self.yardstick_shape:
            self.yardstick = None
            self.yardstick_shape = shape
            try:
                self._refuse_slow(YARDSTICK, shape, 2 * self.settings.limit)  # all ratios need it
                self._refuse_large(YARDSTICK, shape)
                self.yardstick = Yardstick(shape)
            except Skip:
                self.yardstick = None
            except Exception as error:
                if out_of_memory(error) is None:
                    raise
                self.yardstick = None
        return self.yardstick

    def _refuse_impossible(self, name: str, shape: Shape) -> None:
        traits = mechanism(name).traits
        if shape.causal and not traits.causal:
            raise Skip("has no causal form")
        if not shape.causal and not traits.bidirectional:
            raise Skip("has no bidirectional form")

    def _refuse_slow(self, name: str, shape: Shape, limit: float) -> None:
        """By the time at the length before, the lower quartile: a neighbour's burst is no reason."""
        before = self._before(name, shape, "training_ms")
        if before is None:
            return
        length, spent = before["length"], before["training_ms"]["low"] / 1000
        expected = grown(spent, length, shape.length, mechanism(name).exponent)
        if expected > limit:
            raise Skip(
                f"too slow: a training step took {spent:.2g} s at T = {length}, so about {_seconds(expected)} s here; "
                f"the limit is {limit:g} s"
            )

    def _refuse_large(self, name: str, shape: Shape) -> None:
        free = self.settings.memory or int(SAFE * free_bytes(shape.device))
        least = shape.least_bytes
        if least > free:
            raise Skip(f"does not fit: at least {readable(least)} for input and output, {readable(free)} can be used")
        before = self._before(name, shape, "peak_bytes")
        if before is not None:
            length, peak = before["length"], before["peak_bytes"]
        else:
            length = min(PILOT, shape.length)
            if length == shape.length:
                return
            peak = peak_bytes(_build(name, self.settings.shape(length, shape.causal)))
        expected = grown(peak, length, shape.length, mechanism(name).memory)
        if expected > free:
            raise Skip(
                f"does not fit: about {readable(expected)} for a training step (from {readable(peak)} at "
                f"T = {length}), {readable(free)} can be used"
            )

    def _before(self, name: str, shape: Shape, field: str) -> Row | None:
        """The row of the longest shorter length that has this figure."""
        shorter = [
            row
            for row in self.rows
            if row["mechanism"] == name
            and row["causal"] == shape.causal
            and row["length"] < shape.length
            and row[field] is not None
        ]
        return max(shorter, key=lambda row: row["length"], default=None)


def _build(name: str, shape: Shape) -> Subject:
    try:
        return Subject(name, shape)
    except ValueError as error:  # a shape that this mechanism does not take
        raise Skip(str(error)) from None


def _seconds(value: float) -> str:
    """Two digits, and never a power of ten."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the other end closes
    os._exit(1)


def main() -> None:
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings = Settings.from_dict(given["settings"])
    torch.set_num_threads(settings.threads)
    for event in work(settings, given["jobs"], given["rows"]):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
        wrong = event.get("row", {}).get("error") or event.get("quality", {}).get("reason") or ""
        if any(sign in wrong for sign in POISONED):
            sys.exit(1)  # whoever started this starts another for the jobs that are left


if __name__ == "__main__":
    main()
