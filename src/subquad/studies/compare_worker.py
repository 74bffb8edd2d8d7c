"""The process that measures. Another process keeps the figures, so if this one dies only one figure is lost."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from subquad.machine import free_bytes, readable
from subquad.measure.cost import (
    PILOT,
    YARDSTICK,
    Decode,
    Row,
    Shape,
    Subject,
    Yardstick,
    first_line,
    first_run,
    grown,
    out_of_memory,
    peak_bytes,
    release,
    spread,
    time_beside,
)
from subquad.mechanisms import mechanism
from subquad.pool import serve
from subquad.studies.quality import quality
from subquad.studies.results import from_json, to_json
from subquad.studies.settings import Settings

Job = dict[str, Any]  # "kind" (row, quality or warm) and "mechanism"; of a row and of warming up "length" and "causal"
Event = dict[str, Any]  # {"begin": Job}, {"row": Row}, {"quality": its record} or {"warmed": name}
SAFE = 0.8  # of the free memory: an estimate is not exact
POISONED = ("CUDA error", "device-side assert", "illegal memory access")  # after these a process cannot use a GPU


class Skip(Exception):
    """Why something is not measured."""


def warm(name: str, shape: Shape, decode_only: bool) -> None:
    """Run everything once, so that kernels are compiled. Errors are ignored here: measuring reports them later."""
    with contextlib.suppress(Exception):
        subject = Subject(name, shape)
        if not decode_only:
            subject.forward()
            subject.training()
        if subject.mix.traits.state is not None:
            Decode(subject)()


class Bench:
    """Does jobs one after another; remembers the costs of earlier rows and the yardstick of the current shape."""

    def __init__(self, settings: Settings, rows: Sequence[Row] = ()):
        self.settings = settings
        self.rows = list(rows)
        self.yardstick: Yardstick | None = None
        self.yardstick_shape: Shape | None = None

    def do(self, job: Job) -> Event:
        if job["kind"] == "quality":
            return {"quality": quality(self.settings, job["mechanism"])}
        if job["kind"] == "row":
            return {"row": self.row(job["mechanism"], job["length"], job["causal"])}
        shape, decode_only = self.settings.shape(job["length"], job["causal"]), self.settings.decode_only
        # several processes do this at once, and large batches would not fit beside each other
        warm(job["mechanism"], replace(shape, batch=1) if decode_only else shape, decode_only)
        return {"warmed": job["mechanism"]}

    def row(self, name: str, length: int, causal: bool) -> Row:
        """The figures of one mechanism at one length, or the reason why there are none. Never raises."""
        row = Row(mechanism=name, length=length, causal=causal)
        try:
            self._measure(row, self.settings.shape(length, causal))
        except Skip as reason:
            row.skipped = str(reason)
        except Exception as error:
            amount = out_of_memory(error)
            if amount is None:
                row.error = f"{type(error).__name__}: {first_line(error)}"
            else:
                row.skipped = f"out of memory: {amount}"
        self.rows.append(row)
        release(self.settings.device)
        return row

    def _measure(self, row: Row, shape: Shape) -> None:
        name = row.mechanism
        traits, form = mechanism(name).traits, "causal" if shape.causal else "bidirectional"
        if not getattr(traits, form):
            raise Skip(f"has no {form} form")
        self._refuse_slow(name, shape, self.settings.limit * (2 if name == YARDSTICK else 1))
        self._refuse_large(name, shape)
        subject = _build(name, shape)
        if self.settings.decode_only and subject.mix.traits.state is None:
            raise Skip(f"has no {form} decoding")
        if self.settings.decode_only:
            yardstick = self._yardstick_of(shape)
        else:
            row.peak_bytes, slow = first_run(subject)
            yardstick = self._yardstick_of(shape)
            if yardstick is not None and yardstick.peak is not None:
                row.memory_ratio = row.peak_bytes / yardstick.peak
            runs = {"forward": subject.forward, "training": subject.training}
            self._time(row, runs, shape, yardstick, slow)
        if subject.mix.traits.state is not None:
            decode = Decode(subject)
            row.state_bytes, row.uncaptured = decode.bytes, decode.uncaptured
            self._time(row, {"decode": decode}, shape, yardstick, False)

    def _time(self, row: Row, runs: dict[str, Any], shape: Shape, yardstick: Yardstick | None, slow: bool) -> None:
        seconds, most = self.settings.seconds, 2 * self.settings.repeats
        times, ratios = time_beside(runs, shape.device, yardstick, seconds, most, slow=slow)
        for what in runs:
            setattr(row, f"{what}_ms", spread(times[what]))
            setattr(row, f"{what}_ratio", spread(ratios[what]))

    def _yardstick_of(self, shape: Shape) -> Yardstick | None:
        """Exact softmax of this shape, or None if softmax itself is too slow or too large."""
        if shape != self.yardstick_shape:
            self.yardstick, self.yardstick_shape = None, shape
            try:
                self._refuse_slow(YARDSTICK, shape, 2 * self.settings.limit)  # all ratios need it
                self._refuse_large(YARDSTICK, shape)
                self.yardstick = Yardstick(shape, self.settings.decode_only)
            except Exception as error:
                if not isinstance(error, Skip) and out_of_memory(error) is None:
                    raise
        return self.yardstick

    def _refuse_slow(self, name: str, shape: Shape, limit: float) -> None:
        """Judge by the lower quartile at the length before: one slow sample is not a reason to skip."""
        before = self._before(name, shape, "training_ms")
        if before is None or before.training_ms is None:
            return
        length, spent = before.length, before.training_ms.low / 1000
        expected = grown(spent, length, shape.length, mechanism(name).exponent)
        if expected > limit:
            about = f"{expected:.2g}" if expected < 99.5 else f"{expected:,.0f}"  # without an exponent
            raise Skip(
                f"too slow: a training step took {spent:.2g} s at T = {length}, so about {about} s here; "
                f"the limit is {limit:g} s"
            )

    def _refuse_large(self, name: str, shape: Shape) -> None:
        if self.settings.decode_only:  # no training step, from which memory is estimated
            return
        free = self.settings.memory or int(SAFE * free_bytes(shape.device))
        least = shape.least_bytes
        if least > free:
            raise Skip(f"does not fit: at least {readable(least)} for input and output, {readable(free)} can be used")
        before = self._before(name, shape, "peak_bytes")
        if before is not None and before.peak_bytes is not None:
            length, peak = before.length, before.peak_bytes
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
        same = [row for row in self.rows if (row.mechanism, row.causal) == (name, shape.causal)]
        shorter = [row for row in same if row.length < shape.length and getattr(row, field) is not None]
        return max(shorter, key=lambda row: row.length, default=None)


def _build(name: str, shape: Shape) -> Subject:
    try:
        return Subject(name, shape)
    except ValueError as error:  # a shape that this mechanism does not take
        raise Skip(str(error)) from None


def begin(setup: dict[str, Any]) -> Callable[[Job], Event]:
    settings = Settings.from_dict(setup["settings"])
    torch.set_num_threads(settings.threads)
    bench = Bench(settings, [from_json(Row, row, "row") for row in setup["rows"]])

    def answer(job: Job) -> Event:
        event: Event = to_json(bench.do(job))
        wrong = event.get("row", {}).get("error") or event.get("quality", {}).get("reason") or ""
        return {**event, "last": any(sign in wrong for sign in POISONED)}

    return answer


if __name__ == "__main__":
    serve(begin)
