"""One row of a table: the settings of its run, whether it was done before, and the figures in its run folder."""

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.checks import at_least, refuse
from subquad.disk import read_sealed
from subquad.machine import available, origin
from subquad.models.footprint import imagine
from subquad.models.state import leaves
from subquad.studies.reproduce.tables import Row, Table
from subquad.studies.results import Quality, ReproducedTable, TableBudget, TrainedRow, save
from subquad.tasks import TASKS, kinds
from subquad.tasks.configure import configure
from subquad.training.config import FREE_ON_RESUME, parse
from subquad.training.folder import CONFIG, RESULT, Folder, plain, read_config, read_result
from subquad.training.log import curve, logged
from subquad.training.task import Task

Draw = Callable[[ReproducedTable, Path], None]  # makes a picture of the results


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the user allows: minutes of training per row, how many of them now (`leg`), rows in parallel (`jobs`)."""

    minutes: float | None = None
    leg: float | None = None
    jobs: int = 1
    device: str = "auto"
    settings: tuple[str, ...] = ()  # for every row, in addition to the table's own

    def __post_init__(self) -> None:
        at_least(self, jobs=1)
        for name in ("minutes", "leg"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                refuse(name, value, "a positive number of minutes")

    @property
    def given(self) -> list[str]:
        """What the user sets for every row, as --set takes it."""
        return [*([] if self.minutes is None else [f"training.minutes={self.minutes:g}"]), *self.settings]

    @property
    def place(self) -> str:
        return available(self.device)

    @property
    def written(self) -> TableBudget:
        """The budget as results.json stores it."""
        return TableBudget(minutes_a_row=self.minutes, rows_side_by_side=self.jobs, settings=list(self.settings))


@dataclass
class Reproduction:
    """A table that is being run: the chosen rows, the output folder, and the results so far."""

    table: Table
    rows: list[Row]
    budget: Budget
    folder: Path
    console: Console
    results: ReproducedTable
    draw: Draw | None = None

    def measured_now(self) -> None:
        """Call this after training or measuring: it updates machine, date and versions in the results."""
        for name, value in origin(self.budget.place).items():
            setattr(self.results, name, value)
        self.results.budget = self.budget.written

    def keep(self) -> None:
        save(self.results, self.folder / "results.json")
        if self.draw is not None:
            self.draw(self.results, self.folder / f"{self.table.name}.png")

    def say(self, name: str, line: str) -> None:
        self.console.print(f"{name}: {line}", highlight=False, markup=False, soft_wrap=True)


def settings_of(table: Table, row: Row, budget: Budget) -> list[str]:
    """Everything that is set for a row's run, as --set takes it; what comes later wins."""
    # a table's warm-up does not depend on its steps, so that earlier runs can resume
    training = {"warmup": TASKS[table.task].training.warmup, **table.training, **row.training}
    if not budget.place.startswith("cuda"):
        training = {key: value for key, value in training.items() if key not in ("compile", "capture")}
    model = {**table.model, **row.model, "mechanism": row.mechanism}
    parts = {"data": {**table.data, **row.data}, "model": model, "training": training}
    own = [f"{part}.{key}={json.dumps(value)}" for part, settings in parts.items() for key, value in settings.items()]
    left = without(row, budget)
    return [*own, *(setting for setting in budget.given if setting not in left)]


def without(row: Row, budget: Budget) -> list[str]:
    """Settings of the call that this row cannot have: an LSTM has no heads."""
    keys, lacking = {setting: parse(setting)[0] for setting in budget.given}, kinds.without(row.mechanism)
    return [setting for setting, key in keys.items() if key[0] == "model" and key[1] in lacking]


def settings_in(table: Table, row: Row, run: Path) -> list[str]:
    """Settings of a run that are not the table's own, as --set takes them, without those that may change on resume."""
    _, own = configure(table.task, settings_of(table, row, Budget(device="cpu")))
    before, now = (plain(config) for config in (own, read_config(run)))
    return [
        f"{part}.{key}={json.dumps(value)}"
        for part in ("data", "model", "training")
        for key, value in now[part].items()
        if (part != "training" or key not in FREE_ON_RESUME) and (key not in before[part] or before[part][key] != value)
    ]


def command_of(table: Table, row: Row, budget: Budget, run: Path) -> list[str]:
    leg = [] if budget.leg is None else ["--leg", f"{budget.leg:g}"]
    settings = (word for setting in settings_of(table, row, budget) for word in ("--set", setting))
    return ["train", table.task, "--out", str(run), "--resume", "--device", budget.device, *leg, *settings]


def state_of(table: Table, row: Row, budget: Budget, run: Path) -> tuple[str, str]:
    """The state of a row's run: "done", "run" if it still has to run, or "changed" with the settings that changed."""
    if not (run / CONFIG).is_file():
        return "run", ""
    task, config = configure(table.task, settings_of(table, row, budget))
    try:
        Folder(run).check(config, resume=True, defaults=task.defaults())
    except ValueError as error:
        return "changed", str(error)
    return ("done", "done before") if (run / RESULT).is_file() else ("run", "")


def gather(table: Table, row: Row, run: Path) -> TrainedRow:
    """A row's figures from its run folder: the test results if it is finished, otherwise how far it got."""
    task, _ = configure(table.task, (), run)
    begun, lines = read_sealed(run / CONFIG)[0], logged(run)
    figures = heading(table, row)
    try:
        figures.data = getattr(task, "data_name", task.name)
    except (OSError, ValueError):  # the data is now missing or damaged
        figures.data = getattr(task, "set", task.name)
    figures.config = {key: begun[key] for key in ("data", "model", "training")}
    figures.settings = settings_in(table, row, run)
    figures.commit, figures.device = begun.get("commit"), begun["machine"]["device"]
    figures.curve = curve(lines, table.metric)
    figures.state = numbers_kept(task, begun["model"]) if table.states else None
    if not (run / RESULT).is_file():
        last = (lines or [{}])[-1]
        figures.unfinished, figures.steps, figures.seconds = True, last.get("step"), last.get("seconds")
        return figures
    result, training = read_result(run), begun["training"]
    rates = [line["examples_per_second"] for line in lines if line["split"] == "train"]
    warm = [rate for rate in rates if rate is not None]  # without the first updates, which compile
    rate = statistics.median(warm) if warm else result["examples_per_second"]
    with contextlib.suppress(OSError, ValueError):
        examples = len(task.source("train"))
        figures.epochs = result["steps"] * training["batch"] / examples
        figures.seconds_per_epoch = examples / max(rate, 1e-9)
    return replace(
        figures,
        value=result["test"][table.metric],
        test=result["test"],
        steps_wanted=training["steps"],
        cut_short_by_time=result["ended_by"] == "minutes",
        examples_per_second=rate,
        warm_up_counted=not warm,
        examples_per_second_overall=result["examples_per_second"],
        **{name: result[name] for name in ("steps", "seconds", "peak_bytes", "parameters")},
    )


def numbers_kept(task: Task, model: Mapping[str, Any]) -> int:
    """Numbers that the first layer's mixer keeps of a sequence as long as the task's, once it has read all of it."""
    alone = task.make_model({**model, "depth": 1, "taps": ()})
    state = imagine(alone, task.options()["length"])
    return sum(part.numel() for _, part in leaves(state) if part.is_floating_point())


def heading(table: Table, row: Row, **figures: Any) -> TrainedRow:
    return TrainedRow(
        mechanism=row.plain, label=row.name, metric=table.metric, published=dict(row.published),
        variant=row.variant or None, **figures,
    )  # fmt: skip


def quality_of(row: TrainedRow) -> list[Quality]:
    """The quality records for `subquad report`, which counts the Sparse Transformer's image models in bits/byte."""
    if row.value is None or row.data is None:
        return []
    return [
        Quality(
            mechanism=_told_apart(row),
            task=row.data,
            metric="bits/byte" if row.label.startswith("sparse-") else row.metric,
            value=row.value,
            lower_is_better=row.metric != "accuracy",
            steps=row.steps,
            seconds=row.seconds,
            curve=row.curve or [],
        )
    ]


def _told_apart(row: TrainedRow) -> str:
    """The name of a row's mechanism in reports, where others of the same mechanism may stand beside it."""
    if row.variant:
        return f"{row.mechanism}, {row.variant}"
    return row.label if row.label in ("reformer-1", "linear-taps") else row.mechanism
