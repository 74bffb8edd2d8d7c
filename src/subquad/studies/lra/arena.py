"""`subquad lra`: every mechanism on every task with the same model and the same budget, side by side on one device.

Each run is a folder of `subquad train`, so one that was interrupted resumes. results.json, which holds the figures, is
written after each run.
"""

import itertools
import json
import os
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from subquad.disk import lock_folder
from subquad.machine import origin
from subquad.measure.growth import grouped
from subquad.pool import Died, Worker
from subquad.studies.lra.plan import SHORTEST, Arena, Start, plan
from subquad.studies.lra.recipes import HYBRIDS, OPTIONS, RECIPES
from subquad.studies.results import (
    ArenaBudget,
    ArenaPretraining,
    ArenaRun,
    ArenaTable,
    Quality,
    continued,
    from_json,
    save,
    to_json,
)
from subquad.tasks import TASKS
from subquad.tasks.lra.fill import best_weights, look
from subquad.tasks.lra.pathfinder import Pathfinder, sheet
from subquad.tasks.lra.retrieval import Retrieval, bag_of_words
from subquad.tasks.lra.task import Picture

Json = dict[str, Any]
STARTS = get_args(Start)
BUSY = "another process runs or measures the arena there"


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
        results = ArenaTable(**origin(arena.place), budget=budget, runs=before.runs, baselines=before.baselines)
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
            missing = _prepare(todo, out, console, results.baselines) if prepare else {}
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


def prepare(arena: Arena, out: Path, console: Console) -> None:
    """Make the data of the runs, on all cores, and keep it; raises if some cannot be made."""
    out.mkdir(parents=True, exist_ok=True)
    missing = _prepare(plan(arena, out, None), out, console, {})
    if missing:
        raise ValueError("; ".join(dict.fromkeys(missing.values())))


def look_at(arena: Arena, out: Path) -> list[Path]:
    """Draw what the pretrained models of these tasks and mechanisms fill in so far: the PNG files."""
    jobs = [job for job in plan(arena, out, None) if issubclass(TASKS[job["task"]], Picture)]
    runs = {job["name"]: Path(job["folder"]) / "pretraining" for job in jobs if job["start"] == "pretrained"}
    begun = {name: folder for name, folder in runs.items() if best_weights(folder) is not None}
    if not begun:
        wanted = "runs that --pretrain has evaluated at least once, on image, pathfinder or pathx"
        looked = ", ".join(runs) or "no pretraining on pictures among these tasks, or no --pretrain"
        raise ValueError(f"--look found nothing in {out} ({looked}): accepted are {wanted}")
    written = []
    for name, folder in begun.items():
        written.append(out / f"filled_{name.replace('/', '_')}.png")
        look(folder, written[-1])
    return written


def _prepare(todo: Sequence[Json], out: Path, console: Console, baselines: dict[str, float]) -> dict[str, str]:
    """Prepare each data set once, before several processes need it; returns the runs without data, and why.

    `baselines`: what a bag of words scores on the stand-in for Retrieval is added, if it is not there yet.
    """
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
        if isinstance(task, Retrieval) and task.folder is None and "retrieval" not in baselines:
            baselines["retrieval"] = bag_of_words(task)
            console.print(f"{name}: a bag of words scores {baselines['retrieval']:.1f} %", highlight=False)
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
    settings: Json = to_json({key: job[key] for key in ("data", "model", "training", "pretraining") if key in job})
    return settings


def _run_of(job: Json, answer: Json, commit: str | None) -> ArenaRun:
    recipe = RECIPES[job["column"]]
    stand_in = getattr(TASKS[recipe.task], "stand_in", None) if not job["data"].get("folder") else None
    about = {key: job[key] for key in ("name", "column", "mechanism", "seed", "start", "jobs")}
    about |= {"task": stand_in or recipe.title, "settings": _settings(job), "commit": commit}
    run: ArenaRun = from_json(ArenaRun, {**about, **answer.get("result", {}), "error": answer.get("error")}, "run")
    return run


def of_size(results: ArenaTable) -> list[ArenaRun]:
    """The runs of the size that this call is about, in the order of the paper's table: a folder may hold both sizes."""
    return sorted((run for run in results.runs if run.name.startswith(f"{results.budget.size}/")), key=_place)


def row_of(run: ArenaRun) -> str:
    """The name of a run's row: its mechanism, and how it started if not from scratch."""
    return run.mechanism if run.start == "scratch" else f"{run.mechanism}, {run.start}"


def _place(run: ArenaRun) -> tuple[Any, ...]:
    """Sort key: the run's place in the table, whichever call made it."""
    names = [*OPTIONS, *HYBRIDS, run.mechanism]
    return names.index(run.mechanism), run.mechanism, STARTS.index(run.start), [*RECIPES].index(run.column), run.seed


def _quality(runs: Sequence[ArenaRun]) -> list[Quality]:
    """Means over the seeds, as `subquad report` reads them."""
    trained = grouped(((row_of(run), run.task), run) for run in runs if run.accuracy is not None)
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
    before = run.settings.get("pretraining")
    return ("" if before is None else f"{_steps(before['training'])} of pretraining, then ") + _steps(training)


def _steps(training: Json) -> str:
    seconds = "" if training.get("minutes") is None else f" or {60 * training['minutes']:.0f} s"
    return f"{training['steps']:,} steps of {training['batch']}{seconds}"


def _line(run: ArenaRun) -> str:
    where = f"{run.column}, {row_of(run)}, seed {run.seed}"
    if run.error is not None:
        return f"{where}: {run.error}"
    before = run.pretraining
    if run.ended_by == "leg" and before is not None and before.ended_by == "leg":
        return f"{where}: {before.steps:,} steps of pretraining so far, loss {_loss(before)}, the rest in the next call"
    if run.ended_by == "leg":
        return f"{where}: {run.steps:,} steps so far, the rest in the next call"
    cut = "" if run.ended_by == "steps" else " (cut short by time)"
    first = (
        ""
        if before is None
        else f", after {before.steps:,} steps of pretraining (loss {_loss(before)}), {before.seconds:.0f} s"
    )
    return f"{where}: {run.accuracy:.2f} % after {run.steps:,} steps{cut}, {run.seconds:.0f} s{first}"


def _loss(before: ArenaPretraining) -> str:
    return "-" if before.loss is None else f"{before.loss:.4f}"


def _earlier(path: Path) -> ArenaTable:
    """The results that an earlier call saved."""
    results = continued(path, ArenaTable)
    if all(run.column in RECIPES and {"data", "training"} <= run.settings.keys() for run in results.runs):
        return results
    raise ValueError(f"{path} is not what subquad lra wrote: move it away, or choose another folder with --out")
