"""Three sentences on what a demo measured. They are correct for any figures."""

import math
from collections.abc import Sequence

from subquad.machine import readable
from subquad.measure.cost import YARDSTICK, Row
from subquad.measure.growth import amount
from subquad.studies.columns import milliseconds
from subquad.studies.results import Comparison, Quality

CLOSE = 0.05  # times that differ by less than this share count as equal


def conclusions(results: Comparison) -> list[str]:
    """On speed, on memory, on quality."""
    return [_speed(results), _memory(results.rows), _quality(results.quality)]


def _speed(results: Comparison) -> str:
    others = [row for row in results.rows if row.training_ratio is not None and row.mechanism != YARDSTICK]
    if not others:
        return f"Speed: nothing could be timed beside {YARDSTICK}."
    length = max(row.length for row in others)
    at = {row.mechanism: amount(row, "training_ratio") or 0.0 for row in others if row.length == length}
    best = min(at, key=lambda name: at[name])
    if at[best] < 1 - CLOSE:
        text = f"Speed: at {length:,} tokens {best} trains fastest: it {_beside(at[best])}"
    else:
        text = f"Speed: at {length:,} tokens nothing trains clearly faster than {YARDSTICK}: {best} {_beside(at[best])}"
    if "linear" not in at:
        return text + "."
    if best != "linear":
        text += f"; linear {_beside(at['linear'])}"
    crossed = {crossover.mechanism: crossover.training for crossover in results.crossovers}.get("linear")
    if crossed is None:
        return text + "."
    shortest = min(row.length for row in others if row.mechanism == "linear")
    since = "at every length measured" if crossed <= shortest else f"from about {crossed:,} tokens on"
    return f"{text}; linear takes less time than {YARDSTICK} {since}."


def _beside(ratio: float) -> str:
    """A time, as a multiple of softmax's, in words."""
    if abs(ratio - 1) <= CLOSE:
        return f"takes about as long as {YARDSTICK}"
    return f"is {1 / ratio:.2g} times as fast as {YARDSTICK}" if ratio < 1 else f"takes {ratio:.2g} times as long"


def _memory(rows: Sequence[Row]) -> str:
    linear, softmax = (
        {row.length: row for row in rows if row.mechanism == name and row.state_bytes} for name in ("linear", YARDSTICK)
    )
    if not linear.keys() & softmax.keys():
        return f"Memory: the states of linear and {YARDSTICK} were not both measured."
    length = max(linear.keys() & softmax.keys())
    ours, theirs = (measured[length].state_bytes or 0 for measured in (linear, softmax))
    constant = len({row.state_bytes for row in linear.values()}) == 1 and len(linear) > 1
    text = (
        f"Memory: to continue after {length:,} tokens linear keeps {readable(ours)}"
        f"{', as at every length,' if constant else ''} and {YARDSTICK} a cache of {readable(theirs)}, "
        f"{f'{theirs / ours:,.3g} times as much' if theirs >= ours else 'which is less'}"
    )
    first, second = linear[length].decode_ms, softmax[length].decode_ms
    if first is None or second is None:
        return text + "."
    return f"{text}; the next token takes {milliseconds(first)} and {milliseconds(second)}."


def _quality(quality: Sequence[Quality]) -> str:
    best, *others = sorted(quality, key=_value)
    figure = f"{_value(best):.2f} ± {2 * (best.standard_error or 0):.2f} {best.metric} on unseen {best.task}"
    if not others:
        return f"Quality: {best.mechanism} alone was trained, and reaches {figure} after {best.steps:,} steps."
    noise = {q.mechanism: 2 * math.hypot(q.standard_error or 0, best.standard_error or 0) for q in others}
    gaps = {q.mechanism: _value(q) - _value(best) for q in others}
    near = [name for name, gap in gaps.items() if gap <= noise[name]]
    behind = {name: gap for name, gap in gaps.items() if name not in near}
    parts = []
    if near:
        names = _list(near) if behind else "all others"
        parts.append(f"{names} {'is' if len(near) == 1 and behind else 'are'} within the noise of that")
    if behind:
        ends = dict.fromkeys(f"{gap:.2f}" for gap in (min(behind.values()), max(behind.values())))
        names = "all others" if not near and len(behind) > 1 else _list(list(behind))
        parts.append(f"{names} {'is' if len(behind) == 1 else 'are'} {' to '.join(ends)} behind")
    return (
        f"Quality: after {best.steps:,} steps each, {best.mechanism} learned best, {figure}; "
        f"{'; '.join(parts)} (one training each)."
    )


def _value(record: Quality) -> float:
    return math.inf if record.value is None else record.value


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
