"""How fast costs grow with length, and from which length on a mechanism is cheaper than softmax."""

import itertools
import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from subquad.measure.cost import Row, Spread
from subquad.mechanisms import mechanism

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
FAR = 0.25  # difference of measured and documented exponents that is worth a sentence
FLAT = 0.3  # below this exponent of time, fixed costs hide the work
RATIOS = {"training": "training_ratio", "forward": "forward_ratio", "memory": "memory_ratio"}  # to softmax
LONGEST = 3  # fit only the longest lengths, where the fastest-growing cost dominates


@dataclass(kw_only=True)
class Growth:
    """Exponents e in T^e of training time and memory, measured and documented."""

    mechanism: str
    time: float | None = None
    memory: float | None = None
    documented_time: float | None = None
    documented_memory: float | None = None
    lengths_used: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Crossover:
    """The length from which a mechanism is cheaper than exact softmax; None: not at the longest one measured."""

    mechanism: str
    training: int | None = None
    forward: int | None = None
    memory: int | None = None


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The slope of log(value) over log(length) by least squares; None for fewer than two points."""
    if len(lengths) < 2:
        return None
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> int | None:
    """The length from which the ratio stays below 1, interpolated between measured lengths on log axes.

    The shortest length if it is below 1 everywhere, None if it is not below 1 at the longest.
    """
    points = sorted(zip(lengths, ratios, strict=True))
    if not points or points[-1][1] >= 1:
        return None
    dearer = [n for n, (_, ratio) in enumerate(points) if ratio >= 1]
    if not dearer:
        return points[0][0]
    (left, above), (right, below) = points[dearer[-1]], points[dearer[-1] + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    return round(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))


def between(lengths: Sequence[int], values: Sequence[float], length: int) -> float | None:
    """The value at a length, interpolated on log axes; None outside the measured lengths."""
    points = dict(sorted(zip(lengths, values, strict=True)))
    if length in points:
        return points[length]
    for (left, a), (right, b) in itertools.pairwise(points.items()):
        if left < length < right:
            share = math.log(length / left) / math.log(right / left)
            return math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return None


def series(rows: Sequence[Row], name: str, field: str) -> tuple[list[int], list[float]]:
    """(lengths, values) of a mechanism where the field was measured."""
    points = sorted((row.length, v) for row in rows if row.mechanism == name and (v := amount(row, field)) is not None)
    return [length for length, _ in points], [v for _, v in points]


def amount(row: Row, field: str) -> float | None:
    """A figure as one number: the median of a spread."""
    figure: Spread | float | None = getattr(row, field)
    return figure.median if isinstance(figure, Spread) else figure


def usual_softmax(
    rows: Sequence[Row], cost: str = "training_ms", ratio: str = "training_ratio"
) -> dict[tuple[int, bool], float]:
    """(length, causal) -> the usual cost of softmax: the median over all mechanisms it was compared with."""
    costs = grouped(
        ((row.length, row.causal), ours / times_softmax)
        for row in rows
        if (ours := amount(row, cost)) is not None and (times_softmax := amount(row, ratio)) is not None
    )
    return {shape: statistics.median(measured) for shape, measured in costs.items()}


def steady_times(
    rows: Sequence[Row], name: str, cost: str = "training_ms", ratio: str = "training_ratio"
) -> tuple[list[int], list[float]]:
    """(lengths, training times) of a mechanism: its ratio to softmax times the usual time of softmax at that length.
    Machines change speed from minute to minute, but the ratio was measured within a second. Without a ratio it is the
    measured time. `cost` and `ratio` can name another pair of fields."""
    usual = usual_softmax(rows, cost, ratio)
    times = {}
    for row in sorted(rows, key=lambda row: row.length):
        ours, times_softmax = amount(row, cost), amount(row, ratio)
        if row.mechanism == name and ours is not None:
            times[row.length] = ours if times_softmax is None else times_softmax * usual[row.length, row.causal]
    return list(times), list(times.values())


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.mechanism for row in rows))


def growths(rows: Sequence[Row]) -> list[Growth]:
    """Measured exponents of training time and memory beside the documented ones."""
    growths = []
    for name in names(rows):
        cls = mechanism(name)
        lengths, times = steady_times(rows, name)
        sizes, peaks = series(rows, name, "peak_bytes")
        growth = Growth(
            mechanism=name,
            time=exponent(lengths[-LONGEST:], times[-LONGEST:]),
            memory=exponent(sizes[-LONGEST:], peaks[-LONGEST:]),
            documented_time=cls.exponent,
            documented_memory=cls.memory,
            lengths_used=lengths[-LONGEST:],
        )
        growths.append(growth)
    return growths


def crossovers(rows: Sequence[Row]) -> list[Crossover]:
    """For each mechanism that was compared with softmax: from which length on it is cheaper in time and memory."""
    return [
        Crossover(mechanism=name, **{what: crossover(*series(rows, name, ratio)) for what, ratio in RATIOS.items()})
        for name in names(rows)
        if any(series(rows, name, ratio)[0] for ratio in RATIOS.values())
    ]


def growth_of_time(growth: Growth) -> list[str]:
    """A sentence if the measured growth is far from the documented one, to explain the difference."""
    measured, documented = growth.time, growth.documented_time
    if measured is None or documented is None or abs(measured - documented) < FAR:
        return []
    longest = max(growth.lengths_used, default=0)
    until = f" up to T = {longest:,}" if longest else ""
    grew = "hardly grew" if measured < FLAT else f"grew about as T^{measured:.2g}"
    why = (
        "at these lengths fixed costs still hide the work, which is documented to grow as"
        if measured < documented
        else "caches that overflow and the like add to the work, which is documented to grow as"
    )
    return [f"its time {grew}{until} here: {why} T^{documented:g} beyond"]
