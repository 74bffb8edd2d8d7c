"""Files of figures: what each kind holds, and the one place that writes and reads them.

Every kind is a dataclass whose fields are the keys of its JSON. Fields that older files lack get their defaults,
unknown keys are ignored, and a value of the wrong type raises an error that names it.
"""

import functools
import itertools
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rich.console import Console

from subquad.disk import parse_json, write_whole
from subquad.measure.cost import Row, Spread
from subquad.measure.growth import Crossover, Growth

F = TypeVar("F", bound="Figures")
Json = dict[str, Any]
Curve = list[list[float]]  # [step, value]
OPTIONAL = {"optional": True}  # a field that is left out of the file while it is None


@dataclass(kw_only=True)
class Figures:
    """What every file of figures begins with: its kind and where the figures come from (`machine.origin`)."""

    kind: str = ""
    subquad: str = ""
    commit: str | None = None
    date: str = ""
    machine: Json = field(default_factory=dict)


@dataclass(kw_only=True)
class Picture:
    title: str
    file: str  # beside the figures


@dataclass(kw_only=True)
class Quality:
    """What a model with this mechanism learned."""

    mechanism: str
    task: str
    metric: str
    value: float | None = None
    lower_is_better: bool = True
    steps: int | None = None
    seconds: float | None = None
    curve: Curve = field(default_factory=list)
    standard_error: float | None = field(default=None, metadata=OPTIONAL)  # these four: subquad demo only
    parameters: int | None = field(default=None, metadata=OPTIONAL)
    images_per_second: float | None = field(default=None, metadata=OPTIONAL)
    state_bytes_per_image: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(kw_only=True)
class MissingQuality:
    mechanism: str
    task: str
    reason: str


@dataclass(kw_only=True)
class BatchRow(Row):
    """Decoding with another batch than that of the other rows."""

    batch: int


@dataclass(kw_only=True)
class Comparison(Figures):
    """Written by `subquad compare` and `subquad demo`."""

    kind: str = "compare"
    settings: Json = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    crossovers: list[Crossover] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    quality_missing: list[MissingQuality] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    interrupted: bool = False
    quality_measured: Json | None = field(default=None, metadata=OPTIONAL)  # on which machine, if on another one
    added: list[Json] | None = field(default=None, metadata=OPTIONAL)  # figures of later runs, and where they come from
    summary: list[str] | None = field(default=None, metadata=OPTIONAL)  # subquad demo only
    batches: list[BatchRow] | None = field(default=None, metadata=OPTIONAL)  # shipped figures only


@dataclass(kw_only=True)
class ScalingRow(Row):
    """The cost of one sample, from a batch that shrinks as the length grows."""

    label: str
    batch: int = 1


@dataclass(kw_only=True)
class TrainedRow:
    """One row of a reproduced table: what its run reached, and how."""

    mechanism: str = ""
    label: str = ""
    metric: str = ""
    published: dict[str, float] = field(default_factory=dict)
    value: float | None = None
    error: str | None = field(default=None, metadata=OPTIONAL)
    data: str | None = field(default=None, metadata=OPTIONAL)
    config: Json | None = field(default=None, metadata=OPTIONAL)
    settings: list[str] | None = field(default=None, metadata=OPTIONAL)  # in addition to the table's own
    commit: str | None = field(default=None, metadata=OPTIONAL)
    device: str | None = field(default=None, metadata=OPTIONAL)
    curve: Curve | None = field(default=None, metadata=OPTIONAL)
    unfinished: bool | None = field(default=None, metadata=OPTIONAL)
    test: Json | None = field(default=None, metadata=OPTIONAL)
    steps: int | None = field(default=None, metadata=OPTIONAL)
    steps_wanted: int | None = field(default=None, metadata=OPTIONAL)
    cut_short_by_time: bool | None = field(default=None, metadata=OPTIONAL)
    seconds: float | None = field(default=None, metadata=OPTIONAL)
    examples_per_second: float | None = field(default=None, metadata=OPTIONAL)  # updates only
    warm_up_counted: bool | None = field(default=None, metadata=OPTIONAL)  # the run was too short to leave it out
    examples_per_second_overall: float | None = field(default=None, metadata=OPTIONAL)  # all included
    peak_bytes: float | None = field(default=None, metadata=OPTIONAL)
    parameters: int | None = field(default=None, metadata=OPTIONAL)
    epochs: float | None = field(default=None, metadata=OPTIONAL)
    seconds_per_epoch: float | None = field(default=None, metadata=OPTIONAL)
    iteration: Json | None = field(default=None, metadata=OPTIONAL)
    pieces: list[str] | None = field(default=None, metadata=OPTIONAL)
    images_per_second_written: float | None = field(default=None, metadata=OPTIONAL)
    longest: int | None = field(default=None, metadata=OPTIONAL)  # scaling test only, like the next two
    training_ms: float | None = field(default=None, metadata=OPTIONAL)
    growth: Json | None = field(default=None, metadata=OPTIONAL)
    context: int | None = field(default=None, metadata=OPTIONAL)  # table of contexts only, like the next two
    window: int | None = field(default=None, metadata=OPTIONAL)
    bytes: int | None = field(default=None, metadata=OPTIONAL)
    variant: str | None = field(default=None, metadata=OPTIONAL)  # table of recall only, like the next
    state: int | None = field(default=None, metadata=OPTIONAL)  # numbers that a layer keeps of one sequence


@dataclass(kw_only=True)
class TableBudget:
    minutes_a_row: float | None = None
    rows_side_by_side: int = 1
    settings: list[str] = field(default_factory=list)  # for every row


@dataclass(kw_only=True)
class ReproducedTable(Figures):
    """Written by `subquad reproduce`."""

    kind: str = "reproduce"
    table: str = ""
    title: str = ""
    source: str = ""
    budget: TableBudget = field(default_factory=TableBudget)
    metric: str = ""
    published: dict[str, float] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    results: dict[str, TrainedRow] = field(default_factory=dict)
    rows: list[ScalingRow] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    iterations: Json | None = field(default=None, metadata=OPTIONAL)
    scaling: Json | None = field(default=None, metadata=OPTIONAL)
    interrupted: bool = False
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ArenaPretraining:
    """What came before a run: filling in the inputs of its training data."""

    way: str  # "50 % hidden", or "next input" for models that read from left to right
    steps: int
    seconds: float
    loss: float | None = None  # on held-out training inputs
    right: float | None = None  # % of hidden inputs
    ended_by: str = "steps"


@dataclass(kw_only=True)
class ArenaRun:
    """One training of the Long Range Arena."""

    name: str
    column: str
    mechanism: str
    seed: int
    task: str
    settings: Json
    start: str = "scratch"  # or "pretrained", or "control": from scratch with the updates of both phases
    pretraining: ArenaPretraining | None = field(default=None, metadata=OPTIONAL)
    jobs: int | None = field(default=None, metadata=OPTIONAL)  # runs side by side on the device
    accuracy: float | None = field(default=None, metadata=OPTIONAL)
    loss: float | None = field(default=None, metadata=OPTIONAL)
    validation: float | None = field(default=None, metadata=OPTIONAL)
    best_step: int | None = field(default=None, metadata=OPTIONAL)
    steps: int | None = field(default=None, metadata=OPTIONAL)
    ended_by: str | None = field(default=None, metadata=OPTIONAL)
    seconds: float | None = field(default=None, metadata=OPTIONAL)
    peak_bytes: float | None = field(default=None, metadata=OPTIONAL)
    parameters: int | None = field(default=None, metadata=OPTIONAL)
    examples_per_second: float | None = field(default=None, metadata=OPTIONAL)
    curve: Curve | None = field(default=None, metadata=OPTIONAL)
    error: str | None = field(default=None, metadata=OPTIONAL)
    commit: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(kw_only=True)
class ArenaBudget:
    size: str = "small"
    seeds: int = 1
    steps: int | None = None
    seconds_a_run: float | None = None
    jobs: int = 1


@dataclass(kw_only=True)
class ArenaTable(Figures):
    """Written by `subquad lra`."""

    kind: str = "lra"
    budget: ArenaBudget = field(default_factory=ArenaBudget)
    runs: list[ArenaRun] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    rows: list[Json] = field(default_factory=list)  # always empty
    baselines: dict[str, float] = field(default_factory=dict)  # by column: % of a bag of words, on a stand-in
    left: list[str] = field(default_factory=list)
    failed: int = 0  # how many runs of the last call failed
    interrupted: bool = False


@dataclass(kw_only=True)
class EfficiencyRow:
    mechanism: str
    length: int
    steps_per_second: float | None = None
    peak_bytes: int | None = None
    step_ms: Spread | None = None
    captured: bool = False
    skipped: str | None = None


@dataclass(kw_only=True)
class EfficiencyTable(Figures):
    """Written by `subquad lra --efficiency`."""

    kind: str = "lra-efficiency"
    settings: Json = field(default_factory=dict)
    rows: list[EfficiencyRow] = field(default_factory=list)
    interrupted: bool = False


KINDS: tuple[type[Figures], ...] = (Comparison, ReproducedTable, ArenaTable, EfficiencyTable)


_hints = functools.cache(get_type_hints)


def to_json(value: Any) -> Any:
    """Figures, or any part of them, as plain JSON values."""
    if is_dataclass(value):
        kept = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_json(v) for f, v in kept if v is not None or not f.metadata.get("optional")}
    if isinstance(value, Mapping):
        return {key: to_json(inner) for key, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def from_json(kind: Any, value: Any, name: str) -> Any:
    """The inverse of `to_json`; raises TypeError or ValueError that names the value that does not fit."""
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        return kind(**{key: from_json(hints[key], value[key], key) for key in hints if key in value})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else from_json(inner[0], value, name)
    if origin is list and isinstance(value, list):
        return [from_json(inner[0], item, name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: from_json(inner[1], item, name) for key, item in value.items()}
    if kind is Any or _fits(kind, value):
        return value
    raise TypeError(f"{name}={str(value)[:80]!r} is not {getattr(kind, '__name__', kind)}")


def _fits(kind: Any, value: Any) -> bool:
    if isinstance(value, bool) or kind not in (int, float):
        return kind in (bool, str) and isinstance(value, kind)
    return isinstance(value, int) or (kind is float and isinstance(value, float) and math.isfinite(value))


def parse(data: Json, path: Path) -> Figures | None:
    """The figures that a JSON object holds; None if its kind has no type here."""
    for kind in (known for known in KINDS if known.kind == data.get("kind")):
        try:
            figures: Figures = from_json(kind, data, "")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged, or not what subquad {kind.kind} writes: {error}") from error
        return figures
    return None


def save(figures: Figures | Json, path: Path) -> None:
    """Write the file whole or not at all: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(to_json(figures), indent=1, allow_nan=False)}\n".encode())


def load(path: Path, kind: type[F]) -> F:
    """The figures of a file that must be of this kind."""
    data = parse_json(path.read_bytes(), path)
    figures = parse(data, path) if isinstance(data, dict) else None
    if not isinstance(figures, kind):
        raise ValueError(f'{path} is not what `subquad {kind.kind}` writes: its kind is not "{kind.kind}"')
    return figures


def continued(path: Path, kind: type[F]) -> F:
    """What an earlier call of the same command saved there, or empty figures. Raises if the file holds something else,
    so that it is not overwritten."""
    if not path.exists():
        return kind()
    try:
        return load(path, kind)
    except ValueError as error:
        raise ValueError(
            f"{path} is not what subquad {kind.kind} wrote: move it away, or choose another folder with --out"
        ) from error


def set_aside(path: Path, console: Console) -> None:
    """Rename figures that are there already, so that they are kept."""
    if path.is_file():
        names = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
        before = path.replace(next(name for name in names if not name.exists()))
        console.print(f"the figures that were there are now {before}", soft_wrap=True, highlight=False)
