"""`subquad lra`: every mechanism on every task with the same model and the same budget, side by side on one device.

Each run is a folder of `subquad train`, so one that was interrupted resumes. results.json, which holds the figures, is
written after each run.
"""

import itertools
import json
import math
import os
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.checks import at_least, refuse
from subquad.disk import lock_folder
from subquad.machine import available, origin
from subquad.measure.growth import grouped
from subquad.pool import Died, Worker
from subquad.studies.lra.recipes import NAMES, OPTIONS, RECIPES, Size, model_of, training_of
from subquad.studies.results import ArenaBudget, ArenaRun, ArenaTable, Quality, continued, from_json, save, to_json
from subquad.tasks import TASKS
from subquad.tasks.lra.pathfinder import Pathfinder, sheet
from subquad.training.config import parse
from subquad.training.folder import CONFIG, read_config

Json = dict[str, Any]
SLACK = 1.5  # a run may take this many times its share of the minutes: slow runs use the time that fast ones leave
SEEDS = 1000  # at most: all runs are planned before the first one starts
BUSY = "another process runs or measures the arena there"
SHORTEST = 10.0  # seconds: with less time left no run is started


@dataclass(frozen=True, kw_only=True)
class Arena:
    """What to run, and what it may cost."""

    tasks: tuple[str, ...]
    mechanisms: tuple[str, ...]
    seeds: int = 1
    size: Size = "small"
    minutes: float | None = None  # of this call; the next call does the remaining runs
    steps: int | None = None  # of every run; None: as the recipes say
    cap: float | None = None  # seconds of a run; None: 1.5 times its share of the minutes
    jobs: int = 1
    device: str = "auto"
    compile: bool = False  # use torch.compile if the mechanism can: worth it for runs longer than the minute it takes
    capture: bool = True  # gradients from a CUDA graph, if the mechanism can
    data: tuple[str, ...] = ()  # "pathfinder.train=60000"

    def __post_init__(self) -> None:
        for name in ("tasks", "mechanisms"):
            if not getattr(self, name):
                refuse(name, "", "at least one name, or all")
        at_least(self, seeds=1, jobs=1, **({} if self.steps is None else {"steps": 1}))
        if self.seeds > SEEDS:
            refuse("seeds", self.seeds, f"an integer of at most {SEEDS:,}")
        for name in ("minutes", "cap"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                refuse(name, getattr(self, name), "a positive number")
        if self.minutes is not None and 60 * self.minutes < SHORTEST:
            refuse("minutes", self.minutes, f"at least {SHORTEST / 60:.2f}, with less no run starts")
        for setting in self.data:
            column, _, _ = _parse(setting)
            if column not in self.tasks:
                raise ValueError(f"--data {setting} cannot work: the tasks are {', '.join(self.tasks)}")

    @property
    def place(self) -> str:
        return available(self.device)

    def seconds_a_run(self) -> float | None:
        if self.cap is not None or self.minutes is None:
            return self.cap
        runs = len(self.tasks) * len(self.mechanisms) * self.seeds
        return round(SLACK * 60 * self.minutes * min(self.jobs, runs) / runs, 1)


def plan(arena: Arena, out: Path, cap: float | None) -> list[Json]:
    """A job for each run, seed by seed, then task by task, so that an early end leaves complete columns.

    A run that was started keeps its time budget, unless this call sets the seconds of a run.
    """
    jobs = []
    for seed in range(arena.seeds):
        for task in arena.tasks:
            data = TASKS[RECIPES[task].task].from_options(_data(arena, task)).options()
            for name in arena.mechanisms:
                path = Path(arena.size) / task / name / f"seed{seed}"
                training = training_of(task, arena.size, arena.steps, seed)
                minutes = None if cap is None else cap / 60
                if arena.cap is None and (out / path / CONFIG).is_file():
                    minutes = read_config(out / path).training.minutes
                if minutes is not None:
                    training["minutes"] = minutes
                job = {"name": str(path), "column": task, "mechanism": name, "seed": seed, "task": RECIPES[task].task}
                job |= {"data": data, "model": model_of(task, name, arena.size), "training": training}
                job |= {"compile": arena.compile, "capture": arena.capture, "folder": str(out / path)}
                jobs.append(job)
    return jobs


def _data(arena: Arena, task: str) -> Json:
    """The data settings of this task: the recipe's, then those of the call."""
    recipe = RECIPES[task]
    settings = dict(recipe.data if arena.size == "small" else recipe.original_data)
    known = TASKS[recipe.task]().options()
    for setting in arena.data:
        column, key, value = _parse(setting)
        if column == task:
            if key not in known:
                raise ValueError(f"--data {setting} cannot work: {task} has {', '.join(known) or 'no such settings'}")
            settings[key] = value
    return settings


def _parse(setting: str) -> tuple[str, str, Any]:
    """ "imdb.length=2000" -> text, length, 2000"""
    try:
        (column, key), value = parse(setting)
    except ValueError:
        raise ValueError(
            f"--data {setting} cannot be read: accepted is TASK.KEY=VALUE, such as text.length=2000"
        ) from None
    return NAMES.get(column, column), key, value


def lra(arena: Arena, out: Path, console: Console, prepare: bool = True) -> ArenaTable:
    """Run what is not done yet and return what results.json holds; Ctrl-C leaves the rest for the next call."""
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out, BUSY):
        deadline = None if arena.minutes is None else time.monotonic() + 60 * arena.minutes
        before = _earlier(out / "results.json")
        cap = before.budget.seconds_a_run if arena.cap is None else arena.cap
        cap = arena.seconds_a_run() if cap is None else cap
        jobs = plan(arena, out, cap)
        budget = ArenaBudget(size=arena.size, seeds=arena.seeds, steps=arena.steps, seconds_a_run=cap, jobs=arena.jobs)
        results = ArenaTable(**origin(arena.place), budget=budget, runs=before.runs)
        trained = {run.name: run for run in results.runs if run.ended_by in ("steps", "minutes")}
        todo = [job for job in jobs if job["name"] not in trained or not _same(trained[job["name"]], job)]
        planned = [_run_of(job, {}, results.commit) for job in jobs]
        console.print(budget_line(arena.size, planned), highlight=False, soft_wrap=True)
        if len(todo) < len(jobs):
            count = len(jobs) - len(todo)
            console.print(f"{count} run{' is' if count == 1 else 's are'} already done", highlight=False)
        known = {job["name"]: job for job in todo}
        results.runs = [run for run in results.runs if run.error is None or run.name not in known]  # failed: try again
        try:
            missing = _prepare(todo, out, console) if prepare else {}
            ready = [job for job in todo if job["name"] not in missing]
            failed = ({"name": name, "error": why} for name, why in missing.items())
            for answer in itertools.chain(failed, side_by_side(ready, arena, deadline)):
                run = _run_of(known[answer["name"]], answer, results.commit)
                results.failed += run.error is not None
                if run.error is None or run.name not in trained:  # an error does not replace figures
                    results.runs = [other for other in results.runs if other.name != run.name] + [run]
                    save(results, out / "results.json")
                console.print(_line(run), highlight=False, markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            results.interrupted = True
        results.runs.sort(key=_place)
        results.quality = _quality(of_size(results))
        ended = {run.name for run in results.runs if run.ended_by in ("steps", "minutes") or run.error is not None}
        results.left = [job["name"] for job in jobs if job["name"] not in ended]
        save(results, out / "results.json")
        return results


def _prepare(todo: Sequence[Json], out: Path, console: Console) -> dict[str, str]:
    """Prepare each data set once, before several processes need it; returns the runs without data, and why."""
    missing: dict[str, str] = {}
    for name, data in {json.dumps((job["task"], job["data"])): (job["task"], job["data"]) for job in todo}.values():
        begun = time.monotonic()
        task = TASKS[name].from_options(data)
        try:
            sizes = [f"{len(task.source(split)):,}" for split in ("train", "validation", "test")]
        except (OSError, ValueError) as error:  # runs on the other data sets continue
            missing |= {job["name"]: str(error) for job in todo if (job["task"], job["data"]) == (name, data)}
            continue
        console.print(f"{name}: {' / '.join(sizes)} examples, {time.monotonic() - begun:.0f} s", highlight=False)
        if isinstance(task, Pathfinder) and task.folder is None:
            sheet(task, out / f"{name}.png")
            console.print(f"{name}: examples are in {out / name}.png", highlight=False, soft_wrap=True)
    return missing


def side_by_side(todo: Sequence[Json], arena: Arena, deadline: float | None) -> Iterator[Json]:
    """Yield answers as they come, from at most `arena.jobs` workers; jobs without enough time left give no answer."""
    count = max(1, min(arena.jobs, len(todo)))
    # on a GPU one thread each is enough to issue the work
    threads = max(1, (os.cpu_count() or 1) // count) if arena.place == "cpu" else 1
    setup, environment = {"device": arena.place, "threads": threads}, {"OMP_NUM_THREADS": str(threads)}
    workers = [Worker("subquad.studies.lra.worker", setup, environment) for _ in range(count)]
    free = queue.SimpleQueue[Worker]()
    for worker in workers:
        free.put(worker)

    def ask(job: Json) -> Json | None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < SHORTEST:
            return None
        worker = free.get()
        try:
            return worker.ask({**job, "leg": None if left is None else left / 60})
        except Died as death:
            return {"name": job["name"], "error": f"the training process ended: {death}"}
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(ask, job) for job in todo]
    try:
        yield from (answer for future in as_completed(futures) if (answer := future.result()) is not None)
    except BaseException:
        for future in futures:
            future.cancel()
        for worker in workers:
            worker.interrupt()  # the training saves, and the process ends
        wait(futures, timeout=60)
        raise
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown()


def _same(run: ArenaRun, job: Json) -> bool:
    """Whether a run was trained with a job's settings. Settings that are newer than the run count as their defaults."""
    defaults = to_json(TASKS[job["task"]].defaults())
    return {**run.settings, "data": {**defaults, **run.settings["data"]}} == _settings(job)


def _settings(job: Json) -> Json:
    settings: Json = to_json({key: job[key] for key in ("data", "model", "training")})
    return settings


def _run_of(job: Json, answer: Json, commit: str | None) -> ArenaRun:
    recipe = RECIPES[job["column"]]
    stand_in = getattr(TASKS[recipe.task], "stand_in", None) if not job["data"].get("folder") else None
    about = {key: job[key] for key in ("name", "column", "mechanism", "seed")}
    about |= {"task": stand_in or recipe.title, "settings": _settings(job), "commit": commit}
    run: ArenaRun = from_json(ArenaRun, {**about, **answer.get("result", {}), "error": answer.get("error")}, "run")
    return run


def of_size(results: ArenaTable) -> list[ArenaRun]:
    """The runs of the size that this call is about, in the order of the paper's table: a folder may hold both sizes."""
    return sorted((run for run in results.runs if run.name.startswith(f"{results.budget.size}/")), key=_place)


def _place(run: ArenaRun) -> tuple[Any, ...]:
    """Sort key: the run's place in the table, whichever call made it."""
    return [*OPTIONS, run.mechanism].index(run.mechanism), run.mechanism, [*RECIPES].index(run.column), run.seed


def _quality(runs: Sequence[ArenaRun]) -> list[Quality]:
    """Means over the seeds, as `subquad report` reads them."""
    trained = grouped(((run.mechanism, run.task), run) for run in runs if run.accuracy is not None)
    quality = []
    for (mechanism, task), seeds in trained.items():
        mean, run = statistics.fmean(run.accuracy or 0.0 for run in seeds), seeds[0]
        record = Quality(mechanism=mechanism, task=task, metric="accuracy", value=mean, lower_is_better=False)
        quality.append(replace(record, steps=run.steps, seconds=run.seconds, curve=run.curve or []))
    return quality


def budget_line(size: str, runs: Sequence[ArenaRun]) -> str:
    """The budget of a run in each column, from the runs' own settings."""
    columns = grouped((RECIPES[run.column].title, _allowed(run)) for run in runs)
    columns = {title: list(dict.fromkeys(allowed)) for title, allowed in columns.items()}
    seeds = len({run.seed for run in runs})
    parts = [f"{size} models, {seeds} seed{'s' * (seeds != 1)}"]
    parts += [f"{title} {' and '.join(allowed)}" for title, allowed in columns.items()]
    equal = columns and all(len(allowed) == 1 for allowed in columns.values())
    return "; ".join(parts) + (": the same for every mechanism" if equal else "")


def _allowed(run: ArenaRun) -> str:
    training = run.settings["training"]
    seconds = "" if training.get("minutes") is None else f" or {60 * training['minutes']:.0f} s"
    return f"{training['steps']:,} steps of {training['batch']}{seconds}"


def _line(run: ArenaRun) -> str:
    where = f"{run.column}, {run.mechanism}, seed {run.seed}"
    if run.error is not None:
        return f"{where}: {run.error}"
    if run.ended_by == "leg":
        return f"{where}: {run.steps:,} steps so far, the rest in the next call"
    cut = "" if run.ended_by == "steps" else " (cut short by time)"
    return f"{where}: {run.accuracy:.2f} % after {run.steps:,} steps{cut}, {run.seconds:.0f} s"


def _earlier(path: Path) -> ArenaTable:
    """The results that an earlier call saved."""
    results = continued(path, ArenaTable)
    if all(run.column in RECIPES and {"data", "training"} <= run.settings.keys() for run in results.runs):
        return results
    raise ValueError(f"{path} is not what subquad lra wrote: move it away, or choose another folder with --out")
