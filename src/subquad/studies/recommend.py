"""Which mechanism to use: the three cheapest that can do what is asked, from measured figures, with the reasons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from subquad.checks import at_least, one_of
from subquad.disk import blaming, cache_folder
from subquad.machine import readable
from subquad.measure.cost import YARDSTICK, Row
from subquad.measure.growth import between, crossover, growth_of_time, names, series
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Traits
from subquad.studies.columns import duration
from subquad.studies.results import Comparison, Quality, load

CLEARLY = 0.9  # of softmax's cost: an approximation must be this much cheaper to be put before the exact one
WORSE = 0.05  # a mechanism whose quality is worse than softmax's by more than this share ranks last


@dataclass(frozen=True, kw_only=True)
class Request:
    length: int
    causal: bool = False
    decode: bool = False
    cross: bool = False
    device: str | None = None  # None: the device of the named figures, else the CPU

    def __post_init__(self) -> None:
        at_least(self, length=1)
        if self.device is not None:
            one_of(self, device=("cpu", "cuda"))
        if self.decode and not self.causal:
            raise ValueError("decode=True cannot work with causal=False: generating one token at a time is causal")
        if self.cross and self.causal:
            raise ValueError("cross=True cannot work with causal=True: attention to another sequence is not causal")


@dataclass(frozen=True)
class Figures:
    """Measurements, and a description of where they come from."""

    results: Comparison
    origin: str


@dataclass(frozen=True)
class Choice:
    mechanism: str
    cost: float  # relative to softmax: training time; with `decode`, the geometric mean of training and decoding
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    figures: str  # which figures were used, where and how they were measured
    verdict: str  # one sentence
    choices: tuple[Choice, ...]
    missing: tuple[str, ...] = ()  # mechanisms that can do it, but lack a figure at this length


def recommend(request: Request, source: Path | None = None) -> Advice:
    figures = find(request, source)
    with blaming(f"the file of the {figures.origin}"):
        return _advise(figures, request)


def _advise(figures: Figures, request: Request) -> Advice:
    results = figures.results
    rows = [row for row in results.rows if row.causal == request.causal]
    where = f"{figures.origin}; {_described(results)}"
    if not _serves(results, request):
        form, other = ("causal", "--bidirectional") if request.causal else ("bidirectional", "--causal")
        raise ValueError(
            f"{figures.origin} hold too few {form} measurements: run `subquad compare --{form}` first, or ask for "
            f"{other}"
        )
    at = _nearest(results, request)
    quality = _quality([results], request)
    if not quality:
        quality = _quality(_shipped(), request)  # it does not depend on the device
        shipped = "it is taken from the figures that ship with the package"
        unknown = "this ranking is by speed alone, and `subquad compare --task` measures how well each learns"
        where += f". They hold no quality: {shipped if quality else unknown}"
    able = [
        name
        for name, cls in MECHANISMS.items()
        if _has_form(cls.traits, request)
        and (not request.decode or cls.traits.state is not None)
        and (not request.cross or cls.traits.cross)
    ]
    weighed = {name: _weigh(name, request, rows, results, quality, at) for name in able}
    choices = [choice for choice in weighed.values() if choice is not None]
    if not choices:
        raise ValueError(f"{figures.origin} hold no mechanism that can do this at T = {at}: run `subquad compare`")
    # recommend exact softmax unless an approximation is clearly cheaper
    worth = {YARDSTICK: CLEARLY}
    choices.sort(key=lambda c: (_falls_short(c.mechanism, quality), c.cost * worth.get(c.mechanism, 1.0)))
    best = tuple(choices[:3])
    verdict = _verdict(best[0], request, rows, choices, at)
    if at != request.length:
        verdict += f"; T = {request.length:,} was not measured, the nearest that was is {at:,}"
    return Advice(where, verdict, best, tuple(name for name in able if weighed[name] is None))


def find(request: Request, source: Path | None = None) -> Figures:
    """The figures of the named file. Without one, this machine's last comparison or a shipped one, whichever comes
    nearest to the length; this machine's if they are equally near."""
    if source is not None:
        path = source / "results.json" if source.is_dir() else source
        with blaming(str(path)):
            results = _read(path)
            measured_on, _ = _device(results), _serves(results, request)
        if request.device not in (None, measured_on):
            raise ValueError(f"device={request.device!r} cannot work: {path} was measured on {measured_on!r}")
        return Figures(results, f"figures of {path}")
    device = request.device or "cpu"
    known = []
    for own in sorted(cache_folder().glob(f"compare_{device}*.json")):
        with blaming(str(own)):
            results = _read(own)
            _serves(results, request)
        count = len(names(_timed(results, request)))
        known.append(Figures(results, f"figures of this machine ({own}, {count} mechanisms)"))
    shipped = "figures that ship with subquad, not of this machine"
    known += [Figures(results, shipped) for results in _shipped() if _device(results) == device]
    known = [figures for figures in known if _serves(figures.results, request)]
    if known:
        return min(known, key=lambda figures: abs(math.log(_nearest(figures.results, request) / request.length)))
    form = "causal" if request.causal else "bidirectional"
    raise ValueError(
        f"device={device!r}: there are no {form} figures for it, neither of this machine nor shipped; "
        f"run `subquad compare --{form} --device {device}` first"
    )


def _nearest(results: Comparison, request: Request) -> int:
    """The requested length, limited to the range that was measured."""
    lengths = [row.length for row in _timed(results, request)]
    return min(max(request.length, min(lengths)), max(lengths))


def _shipped() -> list[Comparison]:
    folder = files("subquad.studies").joinpath("figures")
    return [_read(Path(str(path))) for path in folder.iterdir() if path.name.endswith(".json")]


def _read(path: Path) -> Comparison:
    try:
        return load(path, Comparison)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as the results.json of a comparison: {error.strerror}") from None


def _serves(results: Comparison, request: Request) -> bool:
    """Whether most of its mechanisms that have the requested form were measured in it."""
    compared = names(results.rows)
    possible = [name for name in compared if name in MECHANISMS and _has_form(MECHANISMS[name].traits, request)]
    return len(names(_timed(results, request))) * 2 > len(possible)


def _timed(results: Comparison, request: Request) -> list[Row]:
    return [row for row in results.rows if row.causal == request.causal and row.training_ms]


def _device(results: Comparison) -> str:
    return str(results.settings["device"]).partition(":")[0]


def _described(results: Comparison) -> str:
    settings, machine = results.settings, results.machine
    cpu = f"{machine['cpu']}, {_counted(machine['threads'], 'thread')}" if _device(results) == "cpu" else None
    return (
        f"{cpu or machine['device']}, {settings['dtype']}, batch {settings['batch']}, width {settings['dim']}, "
        f"{_counted(settings['heads'], 'head')}, {results.date[:10]}"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _has_form(traits: Traits, request: Request) -> bool:
    return traits.causal if request.causal else traits.bidirectional


def _weigh(
    name: str, request: Request, rows: Sequence[Row], results: Comparison, quality: Mapping[str, Quality], length: int
) -> Choice | None:
    """The choice with its reasons; None if a figure that it needs was not measured."""

    def figure(field: str) -> float | None:
        return between(*series(rows, name, field), length)

    training, ratio, exact = figure("training_ms"), figure("training_ratio"), name == YARDSTICK
    if training is None or ratio is None:
        return None
    cost = 1.0 if exact else ratio
    if exact:
        reasons = [f"exact attention, nothing approximated: {duration(training)} for a training step at T = {length:,}"]
    else:
        took = f"a training step takes {duration(training)} at T = {length:,}"
        reasons = [f"{took}, {_compared(ratio)} exact softmax in the same run"]
        lengths, ratios = series(rows, name, "training_ratio")
        since = crossover(lengths, ratios)
        if since is None:
            reasons.append("not faster than softmax at the longest length measured")
        else:
            throughout = " at every length measured," if since <= lengths[0] else ""
            reasons.append(f"faster than softmax{throughout} from T = {since:,} on")
    if request.decode:
        decode, decode_ratio, state = figure("decode_ms"), figure("decode_ratio"), figure("state_bytes")
        if decode is None or decode_ratio is None:
            return None
        cost = 1.0 if exact else math.sqrt(ratio * decode_ratio)
        beside = "" if exact else f" ({_compared(decode_ratio)} softmax with its cache)"
        grows = _growth_of_state(series(rows, name, "state_bytes")[1])
        kept = "" if state is None else f" and keeps a state of {readable(state)}{grows}"
        reasons.append(f"decodes a token in {duration(decode)}{beside}{kept}")
    peak, memory = figure("peak_bytes"), figure("memory_ratio")
    if peak is not None:
        times = "" if memory is None else "the same as" if 0.95 < memory < 1.05 else _times(memory)
        beside = "" if memory is None or exact else f", {times} that of softmax"
        reasons.append(f"peak memory of a training step: {readable(peak)}{beside}")
    growth = next((g for g in results.growth if g.mechanism == name), None)
    if growth is not None:
        reasons += growth_of_time(growth)
    if name in quality and not exact:
        mine, softmax = quality[name], quality[YARDSTICK]
        reasons.append(
            f"quality on {mine.task}: {mine.value:.3f} {mine.metric}, softmax {softmax.value:.3f}, "
            f"after {mine.steps} steps"
        )
    if MECHANISMS[name].traits.fixed_length:
        reasons.append("has parameters for each position: needs max_length, and accepts no longer sequence")
    return Choice(name, cost, tuple(reasons))


def _growth_of_state(sizes: Sequence[float]) -> str:
    if len(sizes) < 2:
        return ""
    if sizes[0] == sizes[-1]:
        return ", the same at every length measured"
    return ", which no longer grows" if sizes[-2] == sizes[-1] else ", which grows with the length"


def _quality(sources: Sequence[Comparison], request: Request) -> dict[str, Quality]:
    """The quality of each mechanism, from the first comparison that has it."""
    for source in sources:
        formed = {row.mechanism for row in source.rows if row.causal == request.causal}
        known = {q.mechanism: q for q in source.quality if q.mechanism in formed and q.value is not None}
        if YARDSTICK in known:
            return {name: record for name, record in known.items() if record.metric == known[YARDSTICK].metric}
    return {}


def _falls_short(name: str, quality: Mapping[str, Quality]) -> bool:
    if name not in quality:
        return False
    mine, exact = quality[name].value or 0.0, quality[YARDSTICK].value or 0.0
    return (mine - exact if quality[name].lower_is_better else exact - mine) > WORSE * abs(exact)


def _verdict(best: Choice, request: Request, rows: Sequence[Row], choices: Sequence[Choice], length: int) -> str:
    if best.mechanism != YARDSTICK:
        return f"use {best.mechanism}: {_compared(best.cost)} exact softmax at T = {length:,}" + (
            " over training and decoding together" if request.decode else ""
        )
    rivals = [choice.mechanism for choice in choices if choice.mechanism != YARDSTICK]
    later = [(crossover(*series(rows, name, "training_ratio")) or 0, n, name) for n, name in enumerate(rivals)]
    at, _, name = min((entry for entry in later if entry[0] > length), default=(0, 0, ""))
    if not at:
        return f"use flash softmax: nothing measured is clearly cheaper at T = {length:,}"
    return f"use flash softmax: you are below the crossover at T = {at:,} ({name}, training time)"


def _compared(ratio: float) -> str:
    if 0.95 < ratio < 1.05:
        return "as fast as"
    return f"{_times(1 / ratio)} as fast as" if ratio < 1 else f"{_times(ratio)} as slow as"


def _times(ratio: float) -> str:
    """A ratio with two digits, never with an exponent."""
    return f"{ratio:.2g} times" if ratio < 99.5 else f"{round(ratio, 1 - math.floor(math.log10(ratio))):,.0f} times"
