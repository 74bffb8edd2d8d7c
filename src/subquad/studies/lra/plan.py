"""What `subquad lra` is asked for, as a list of runs. Each has a folder, and is trained in one phase or in two."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from subquad.checks import at_least, nearest, refuse
from subquad.machine import available
from subquad.studies.lra.recipes import NAMES, RECIPES, Size, filling_of, model_of, training_of
from subquad.tasks import TASKS
from subquad.tasks.lra.fill import Fill
from subquad.training.config import TrainingConfig, parse
from subquad.training.folder import CONFIG, read_config

Json = dict[str, Any]
Start = Literal["scratch", "pretrained", "control"]
SLACK = 1.5  # a run may take this many times its share of the minutes: slow runs use the time that fast ones leave
SEEDS = 1000  # at most: all runs are planned before the first one starts
SHORTEST = 10.0  # seconds: with less time left no run is started
PARTS = ("model", "training", "pretraining", "fill")  # of a run's settings; fill: what pretraining hides


@dataclass(frozen=True, kw_only=True)
class Arena:
    """What to run, and what it may cost."""

    tasks: tuple[str, ...]
    mechanisms: tuple[str, ...]
    seeds: int = 1
    size: Size = "small"
    pretrain: bool = False  # fill in hidden inputs of the training data first
    control: str | None = None  # a mechanism that is also trained from scratch, with the updates of both phases
    minutes: float | None = None  # of this call; the next call does the remaining runs
    steps: int | None = None  # of every run on its task; None: as the recipes say
    pretrain_steps: int | None = None  # of every pretraining; None: as the recipes say
    cap: float | None = None  # seconds of a run, both phases; None: 1.5 times its share of the minutes
    jobs: int = 1
    device: str = "auto"
    compile: bool = False  # use torch.compile if the mechanism can: worth it for runs longer than the minute it takes
    capture: bool = True  # updates as CUDA graphs, if the mechanism can
    data: tuple[str, ...] = ()  # "pathfinder.train=60000"
    settings: tuple[str, ...] = ()  # "pathfinder.model.depth=6"

    def __post_init__(self) -> None:
        for name in ("tasks", "mechanisms"):
            if not getattr(self, name):
                refuse(name, "", "at least one name, or all")
        given = {name: 1 for name in ("steps", "pretrain_steps") if getattr(self, name) is not None}
        at_least(self, seeds=1, jobs=1, **given)
        if self.seeds > SEEDS:
            refuse("seeds", self.seeds, f"an integer of at most {SEEDS:,}")
        for name in ("minutes", "cap"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                refuse(name, getattr(self, name), "a positive number")
        if self.minutes is not None and 60 * self.minutes < SHORTEST:
            refuse("minutes", self.minutes, f"at least {SHORTEST / 60:.2f}, with less no run starts")
        for name in ("control", "pretrain_steps"):
            if getattr(self, name) is not None and not self.pretrain:
                refuse(name, getattr(self, name), "none, or a value together with --pretrain")
        if self.control is not None and self.control not in self.mechanisms:
            refuse("control", self.control, f"a mechanism of this call: {', '.join(self.mechanisms)}")
        for setting in self.data:
            column, _, _ = _parse_data(setting)
            if column not in self.tasks:
                raise ValueError(f"--data {setting} cannot work: the tasks are {', '.join(self.tasks)}")
        for setting in self.settings:
            self._check_setting(setting)

    def _check_setting(self, setting: str) -> None:
        column, part, key, _ = _parse_setting(setting)
        if column not in self.tasks:
            raise ValueError(f"--set {setting} cannot work: the tasks are {', '.join(self.tasks)}")
        if part not in PARTS:
            raise ValueError(f"--set {setting} names no settings{nearest(part, PARTS)} Accepted: {', '.join(PARTS)}")
        if part in ("pretraining", "fill") and not self.pretrain:
            raise ValueError(f"--set {setting} cannot work without --pretrain")
        known = (
            [*Fill.defaults().keys() - {"of", "settings"}]
            if part == "fill"
            else [field.name for field in fields(TrainingConfig)]
        )
        if part != "model" and key not in known:
            wrong = f"--set {setting} names no setting of {part}{nearest(key, known)}"
            raise ValueError(f"{wrong} Accepted: {', '.join(known)}")

    @property
    def place(self) -> str:
        return available(self.device)

    def starts(self) -> Iterator[tuple[str, Start]]:
        """Each row of the table: a mechanism, and how its runs start."""
        for name in self.mechanisms:
            yield name, "pretrained" if self.pretrain else "scratch"
            if name == self.control:
                yield name, "control"

    def seconds_a_run(self) -> float | None:
        if self.cap is not None or self.minutes is None:
            return self.cap
        runs = len(self.tasks) * len([*self.starts()]) * self.seeds
        return round(SLACK * 60 * self.minutes * min(self.jobs, runs) / runs, 1)

    def set_of(self, column: str, part: str) -> Json:
        """The settings of the call for a part of this task's runs."""
        found = (_parse_setting(setting) for setting in self.settings)
        return {key: value for where, which, key, value in found if (where, which) == (column, part)}


def plan(arena: Arena, out: Path, cap: float | None) -> list[Json]:
    """A job for each run, seed by seed, then task by task, so that an early end leaves complete columns.

    A run that was started keeps its time budget, unless this call sets the seconds of a run.
    """
    return [
        _job(arena, out, cap, seed, task, name, start)
        for seed in range(arena.seeds)
        for task in arena.tasks
        for name, start in arena.starts()
    ]


def _job(arena: Arena, out: Path, cap: float | None, seed: int, task: str, name: str, start: Start) -> Json:
    data = TASKS[RECIPES[task].task].from_options(data_of(arena, task)).options()
    path = Path(arena.size) / task / name / ("" if start == "scratch" else start) / f"seed{seed}"
    given, before = arena.set_of(task, "training"), arena.set_of(task, "pretraining")
    training = {**training_of(task, arena.size, given.get("steps", arena.steps), seed), **given}
    filling = {**filling_of(task, arena.size, before.get("steps", arena.pretrain_steps), seed), **before}
    share = 0.0  # of the run's time for pretraining
    if start != "scratch":
        ahead = filling["steps"] * filling["batch"]
        share = ahead / (ahead + training["steps"] * training["batch"])
    if start == "control":
        training["steps"] += round(ahead / training["batch"])
        share = 0.0
    folder = out / path
    _limit(training, folder, cap, 1 - share, arena.cap is None)
    job = {"name": str(path), "column": task, "mechanism": name, "seed": seed, "task": RECIPES[task].task}
    job |= {"start": start, "data": data, "training": training}
    job |= {"model": {**model_of(task, name, arena.size), **arena.set_of(task, "model")}, "jobs": arena.jobs}
    job |= {"compile": arena.compile, "capture": arena.capture, "folder": str(folder)}
    if start == "pretrained":
        _limit(filling, folder / "pretraining", cap, share, arena.cap is None)
        recipe = RECIPES[task]
        options = {"of": recipe.task, "settings": data, "hidden": recipe.hidden, **recipe.predict}
        fill = Fill.from_options({**options, **arena.set_of(task, "fill")})
        job["pretraining"] = {"data": fill.options(), "training": filling}
    return job


def _limit(training: Json, folder: Path, cap: float | None, share: float, keep: bool) -> None:
    """Set the minutes of a phase: those it began with, or its share of the seconds of a run."""
    minutes = None if cap is None else cap * share / 60
    if keep and (folder / CONFIG).is_file():
        minutes = read_config(folder).training.minutes
    if minutes is not None:
        training["minutes"] = minutes


def data_of(arena: Arena, task: str) -> Json:
    """The data settings of this task: the recipe's, then those of the call."""
    recipe = RECIPES[task]
    settings = dict(recipe.data_fields(arena.size))
    known = TASKS[recipe.task]().options()
    for setting in arena.data:
        column, key, value = _parse_data(setting)
        if column == task:
            if key not in known:
                raise ValueError(f"--data {setting} cannot work: {task} has {', '.join(known) or 'no such settings'}")
            settings[key] = value
    return settings


def _parse_data(setting: str) -> tuple[str, str, Any]:
    """ "imdb.length=2000" -> text, length, 2000"""
    try:
        (column, key), value = parse(setting)
    except ValueError:
        raise ValueError(
            f"--data {setting} cannot be read: accepted is TASK.KEY=VALUE, such as text.length=2000"
        ) from None
    return NAMES.get(column, column), key, value


def _parse_setting(setting: str) -> tuple[str, str, str, Any]:
    """ "imdb.model.depth=2" -> text, model, depth, 2"""
    try:
        (column, part, key), value = parse(setting)
    except ValueError:
        example = "text.model.depth=4, text.training.lr=1e-3 or text.pretraining.batch=64"
        raise ValueError(
            f"--set {setting} cannot be read: accepted is TASK.PART.KEY=VALUE, such as {example}"
        ) from None
    return NAMES.get(column, column), part, key, value
