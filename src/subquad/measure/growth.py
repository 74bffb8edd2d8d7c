"""From times over lengths to two numbers: how fast they grow, and from which length on something is cheaper."""

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
FAR = 0.25  # between exponents of time over length, measured and documented, that is worth a sentence
FLAT = 0.3  # an exponent of time over length below which it is not the work that is measured
RATIOS = {"training": "training_ratio", "forward": "forward_ratio", "memory": "memory_ratio"}  # to softmax
LONGEST = 3  # lengths that are fitted: the longest ones, where what grows fastest has taken over


@dataclass(kw_only=True)
class Growth:
    """Exponents e of T^e of training time and memory, measured and documented."""

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
    """Least squares of log(value) over log(length); None of fewer than two points."""
    if len(lengths) < 2:
        return None
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> int | None:
    """The length from which on the ratio stays below 1, between two measured ones on log axes.

    The shortest length if it is below 1 everywhere, None if it is not below 1 at the longest.
    """
    points = sorted(zip(lengths, ratios, strict=True))
    if not points or points[-1][1] >= 1:
        return None
    dear = [n for n, (_, ratio) in enumerate(points) if ratio >= 1]
    if not dear:
        return points[0][0]
    (left, above), (right, below) = points[dear[-1]], points[dear[-1] + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    return round(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))


def between(lengths: Sequence[int], values: Sequence[float], length: int) -> float | None:
    """The value at a length inside the measured ones, on log axes; None outside them: nothing is extrapolated."""
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
    """(length, causal) -> what softmax of that form cost: the median over all mechanisms it was measured beside."""
    costs = grouped(
        ((row.length, row.causal), ours / times_softmax)
        for row in rows
        if (ours := amount(row, cost)) is not None and (times_softmax := amount(row, ratio)) is not None
    )
    return {shape: statistics.median(measured) for shape, measured in costs.items()}


def steady_times(
    rows: Sequence[Row], name: str, cost: str = "training_ms", ratio: str = "training_ratio"
) -> tuple[list[int], list[float]]:
    """(lengths, training times) of a mechanism as its ratio to softmax times what softmax usually took at that length:
    machines change speed from one minute to the next, but the ratio was measured within a second. Where there is no
    ratio it is the time itself. `cost` and `ratio` name other fields that come in such a pair."""
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
    """Where each mechanism that was measured beside softmax becomes cheaper, in each respect."""
    return [
        Crossover(mechanism=name, **{what: crossover(*series(rows, name, ratio)) for what, ratio in RATIOS.items()})
        for name in names(rows)
        if any(series(rows, name, ratio)[0] for ratio in RATIOS.values())
    ]


def growth_of_time(growth: Growth) -> list[str]:
    """A sentence where the measured growth is far from the documented one, which a reader would not expect."""
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
