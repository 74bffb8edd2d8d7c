"""What a demo showed, in three sentences that hold whatever its figures are."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.machine import readable
from subquad.measure.cost import YARDSTICK
from subquad.studies.columns import duration

Row = Mapping[str, Any]
CLOSE = 0.05  # of the time: neither faster nor slower


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """On speed, on memory, on quality."""
    return [_speed(results), _memory(results["rows"]), _quality(results["quality"])]


def _speed(results: Mapping[str, Any]) -> str:
    timed = [row for row in results["rows"] if row["training_ratio"] is not None]
    others = [row for row in timed if row["mechanism"] != YARDSTICK]
    if not others:
        return f"Speed: nothing could be timed beside {YARDSTICK}."
    length = max(row["length"] for row in others)
    at = {row["mechanism"]: row["training_ratio"]["median"] for row in others if row["length"] == length}
    best = min(at, key=lambda name: at[name])
    if at[best] < 1 - CLOSE:
        text = f"Speed: at {length:,} tokens {best} trains fastest: it {_beside(at[best])}"
    else:
        text = f"Speed: at {length:,} tokens nothing trains clearly faster than {YARDSTICK}: {best} {_beside(at[best])}"
    if "linear" not in at:
        return text + "."
    if best != "linear":
        text += f"; linear {_beside(at['linear'])}"
    crossed = {found["mechanism"]: found["training"] for found in results["crossovers"]}.get("linear")
    if crossed is None:
        return text + "."
    shortest = min(row["length"] for row in others if row["mechanism"] == "linear")
    since = "at every length measured" if crossed <= shortest else f"from about {crossed:,} tokens on"
    return f"{text}; linear takes less time than {YARDSTICK} {since}."


def _beside(ratio: float) -> str:
    """A time, as a multiple of softmax's, in words."""
    if abs(ratio - 1) <= CLOSE:
        return f"takes about as long as {YARDSTICK}"
    return f"is {1 / ratio:.2g} times as fast as {YARDSTICK}" if ratio < 1 else f"takes {ratio:.2g} times as long"


def _memory(rows: Sequence[Row]) -> str:
    states = {
        name: {row["length"]: row for row in rows if row["mechanism"] == name and row["state_bytes"] is not None}
        for name in ("linear", YARDSTICK)
    }
    lengths = states["linear"].keys() & states[YARDSTICK].keys()
    if not lengths:
        return f"Memory: the states of linear and {YARDSTICK} were not both measured."
    length = max(lengths)
    ours, theirs = states["linear"][length], states[YARDSTICK][length]
    constant = len({row["state_bytes"] for row in states["linear"].values()}) == 1 and len(states["linear"]) > 1
    times = theirs["state_bytes"] / ours["state_bytes"]
    text = (
        f"Memory: to go on after {length:,} tokens linear keeps {readable(ours['state_bytes'])}"
        f"{', as at every length,' if constant else ''} and {YARDSTICK} a cache of {readable(theirs['state_bytes'])}, "
        f"{f'{times:,.3g} times as much' if times >= 1 else 'which is less'}"
    )
    if ours["decode_ms"] is None or theirs["decode_ms"] is None:
        return text + "."
    first, second = (duration(row["decode_ms"]["median"]) for row in (ours, theirs))
    return f"{text}; the next token takes {first} and {second}."


def _quality(quality: Sequence[Mapping[str, Any]]) -> str:
    best, *others = sorted(quality, key=lambda found: found["value"])
    figure = f"{best['value']:.2f} ± {2 * best['standard_error']:.2f} {best['metric']} on unseen {best['task']}"
    if not others:
        return f"Quality: {best['mechanism']} alone was trained, and reaches {figure} after {best['steps']:,} steps."
    near: list[Mapping[str, Any]] = []
    behind: list[Mapping[str, Any]] = []
    for found in others:
        noise = 2 * math.hypot(found["standard_error"], best["standard_error"])
        (near if found["value"] - best["value"] <= noise else behind).append(found)
    parts = []
    if near:
        names = "all others" if not behind else _list([found["mechanism"] for found in near])
        parts.append(f"{names} {'is' if len(near) == 1 and behind else 'are'} within the noise of that")
    if behind:
        gaps = [f"{found['value'] - best['value']:.2f}" for found in behind]
        gap = gaps[0] if gaps[0] == gaps[-1] else f"{gaps[0]} to {gaps[-1]}"
        names = "all others" if not near and len(behind) > 1 else _list([found["mechanism"] for found in behind])
        parts.append(f"{names} {'is' if len(behind) == 1 else 'are'} {gap} behind")
    return (
        f"Quality: after {best['steps']:,} steps each, {best['mechanism']} learned best, {figure}; "
        f"{'; '.join(parts)} (one training each)."
    )


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
