"""From times over lengths to two numbers: how fast they grow, and from which length on something is cheaper."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.mechanisms import mechanism

Row = dict[str, Any]
FAR = 0.25  # between exponents of time over length, measured and documented, that is worth a sentence
FLAT = 0.3  # an exponent of time over length below which it is not the work that is measured
LONGEST = 3  # lengths that are fitted: the longest ones, where what grows fastest has taken over


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """Least squares of log(value) over log(length); None of fewer than two points."""
    if len(lengths) < 2:
        return None
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return top / sum((a - mean_x) ** 2 for a in x)


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> int | None:
    """The length from which on the ratio stays below 1, between two measured ones on log axes.

    The shortest length if it is below 1 everywhere, None if it is not below 1 at the longest.
    """
    points = sorted(zip(lengths, ratios, strict=True))
    if not points or points[-1][1] >= 1:
        return None
    first = next((n for n in range(len(points)) if all(ratio < 1 for _, ratio in points[n:])), len(points))
    if first == 0:
        return points[0][0]
    (left, above), (right, below) = points[first - 1], points[first]
    share = math.log(above) / (math.log(above) - math.log(below))
    return round(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))


def between(lengths: Sequence[int], values: Sequence[float], length: int) -> float | None:
    """The value at a length inside the measured ones, on log axes; None outside them: nothing is extrapolated."""
    points = sorted(zip(lengths, values, strict=True))
    if not points or not points[0][0] <= length <= points[-1][0]:
        return None
    for (left, a), (right, b) in zip(points, [*points[1:], points[-1]], strict=True):
        if left == length:
            return a
        if left < length < right:
            share = math.log(length / left) / math.log(right / left)
            return math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return None


def series(rows: Sequence[Row], name: str, field: str) -> tuple[list[int], list[float]]:
    """(lengths, values) of a mechanism: medians where the field has a spread."""
    found = [(row["length"], row[field]) for row in rows if row["mechanism"] == name and row.get(field) is not None]
    found.sort(key=lambda pair: pair[0])
    return [n for n, _ in found], [_median(v) for _, v in found]


def _median(value: Any) -> float:
    median: float = value["median"] if isinstance(value, dict) else value
    return median


def usual_softmax(
    rows: Sequence[Row], cost: str = "training_ms", ratio: str = "training_ratio"
) -> dict[tuple[int, bool], float]:
    """(length, causal) -> what softmax of that form cost: the median over all mechanisms it was measured beside."""
    found: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        if row.get(ratio) is not None and row.get(cost) is not None:
            softmax = _median(row[cost]) / _median(row[ratio])
            found.setdefault((row["length"], bool(row.get("causal"))), []).append(softmax)
    return {at: statistics.median(costs) for at, costs in found.items()}


def steady_times(
    rows: Sequence[Row], name: str, cost: str = "training_ms", ratio: str = "training_ratio"
) -> tuple[list[int], list[float]]:
    """(lengths, training times) of a mechanism as its ratio to softmax times what softmax usually took at that length.

    Machines change speed from one minute to the next; the ratio was measured within a second, and what softmax usually
    took is the median over the whole run. Where there is no ratio it is the time itself. `cost` and `ratio` name other
    fields that come in such a pair.
    """
    usual = usual_softmax(rows, cost, ratio)
    found = []
    for row in rows:
        if row["mechanism"] == name and row.get(cost) is not None:
            value = _median(row[cost])
            if row.get(ratio) is not None:
                value = _median(row[ratio]) * usual[row["length"], bool(row.get("causal"))]
            found.append((row["length"], value))
    found.sort()
    return [length for length, _ in found], [value for _, value in found]


def names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mechanism"] for row in rows))


def growths(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Measured exponents of training time and memory beside the documented ones."""
    found = []
    for name in names(rows):
        cls = mechanism(name)
        lengths, times = steady_times(rows, name)
        sizes, peaks = series(rows, name, "peak_bytes")
        found.append(
            {
                "mechanism": name,
                "time": exponent(lengths[-LONGEST:], times[-LONGEST:]),
                "memory": exponent(sizes[-LONGEST:], peaks[-LONGEST:]),
                "documented_time": cls.exponent,
                "documented_memory": cls.memory,
                "lengths_used": lengths[-LONGEST:],
            }
        )
    return found


def crossovers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """From which length on a mechanism is cheaper than exact softmax, in each respect."""
    fields = {"training": "training_ratio", "forward": "forward_ratio", "memory": "memory_ratio"}
    return [
        {"mechanism": name, **{what: crossover(*series(rows, name, field)) for what, field in fields.items()}}
        for name in names(rows)
        if any(series(rows, name, field)[0] for field in fields.values())
    ]


def growth_of_time(growth: Mapping[str, Any]) -> list[str]:
    """A sentence where the measured growth is far from the documented one, which a reader would not expect."""
    measured, documented = growth["time"], growth["documented_time"]
    if abs(measured - documented) < FAR:
        return []
    longest = max(growth.get("lengths_used") or [0])
    until = f" up to T = {longest:,}" if longest else ""
    grew = "hardly grew" if measured < FLAT else f"grew about as T^{measured:.2g}"
    why = (
        "at these lengths fixed costs still hide the work, which is documented to grow as"
        if measured < documented
        else "caches that overflow and the like add to the work, which is documented to grow as"
    )
    return [f"its time {grew}{until} here: {why} T^{documented:g} beyond"]
