"""`subquad lra`: every mechanism on every task with the same model and the same budget, side by side on one device.

Each run is a folder of the common training loop, so what is interrupted goes on where it was. results.json holds the
figures; it is written after each run.
"""

import contextlib
import itertools
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.checks import refuse
from subquad.disk import lock_folder
from subquad.machine import available, origin
from subquad.pool import environment
from subquad.studies.lra.recipes import NAMES, OPTIONS, RECIPES, Size, model_of, training_of
from subquad.studies.results import earlier, save
from subquad.tasks import TASKS
from subquad.tasks.lra.pathfinder import Pathfinder, sheet
from subquad.training.config import parse
from subquad.training.folder import CONFIG, read_config

Json = dict[str, Any]
SLACK = 1.5  # a run may take so many times its share of the minutes: the slow ones use what the fast ones leave
SEEDS = 1000  # at most: every run of them is planned before the first begins
BUSY = "another process runs or measures the arena there"
SHORTEST = 10.0  # seconds; with less left no run is begun


@dataclass(frozen=True, kw_only=True)
class Arena:
    """What is run, and what it may cost."""

    tasks: tuple[str, ...]
    mechanisms: tuple[str, ...]
    seeds: int = 1
    size: Size = "small"
    minutes: float | None = None  # of this call; what is left over goes on in the next
    steps: int | None = None  # of every run; None: as the recipes say
    cap: float | None = None  # seconds of a run; None: 1.5 times its share of the minutes
    jobs: int = 1
    device: str = "auto"
    compile: bool = False  # by torch.compile, where a mechanism can: for runs longer than the minute it takes
    capture: bool = True  # gradients as a CUDA graph, where a mechanism can
    data: tuple[str, ...] = ()  # "pathfinder.train=60000"

    def __post_init__(self) -> None:
        for name in ("tasks", "mechanisms"):
            if not getattr(self, name):
                refuse(name, "", "at least one name, or all")
        for name in ("seeds", "jobs", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                refuse(name, getattr(self, name), "an integer of at least 1")
        if self.seeds > SEEDS:
            refuse("seeds", self.seeds, f"an integer of at most {SEEDS:,}")
        for name in ("minutes", "cap"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                refuse(name, getattr(self, name), "a positive number")
        if self.minutes is not None and 60 * self.minutes < SHORTEST:
            refuse("minutes", self.minutes, f"at least {SHORTEST / 60:.2f}, with less no run is begun")
        for setting in self.data:
            column, _, _ = _read(setting)
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
    """A job for each run: seed by seed, and of a seed task by task, so that an early end leaves whole columns.

    A run that was begun keeps the seconds it was begun with, unless this call says how many a run has.
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
                jobs.append(
                    {
                        "name": str(path),
                        "column": task,
                        "mechanism": name,
                        "seed": seed,
                        "task": RECIPES[task].task,
                        "data": data,
                        "model": model_of(task, name, arena.size),
                        "training": training,
                        "compile": arena.compile,
                        "capture": arena.capture,
                        "folder": str(out / path),
                    }
                )
    return jobs


def _data(arena: Arena, task: str) -> Json:
    """Of "pathfinder.train=60000" what concerns this task."""
    recipe = RECIPES[task]
    found = dict(recipe.data if arena.size == "small" else recipe.original_data)
    for setting in arena.data:
        column, key, value = _read(setting)
        if column == task:
            known = TASKS[RECIPES[task].task]().options()
            if key not in known:
                raise ValueError(f"--data {setting} cannot work: {task} has {', '.join(known) or 'no such settings'}")
            found[key] = value
    return found


def _read(setting: str) -> tuple[str, str, Any]:
    """ "imdb.length=2000" -> text, length, 2000"""
    try:
        (column, key), value = parse(setting)
    except ValueError:
        raise ValueError(
            f"--data {setting} cannot be read: accepted is TASK.KEY=VALUE, such as text.length=2000"
        ) from None
    return NAMES.get(column, column), key, value


def lra(arena: Arena, out: Path, console: Console, prepare: bool = True) -> Json:
    """Run what is not done yet and return what results.json holds; Ctrl-C leaves the rest for the next call."""
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out, BUSY):
        return _lra(arena, out, console, prepare)


def _lra(arena: Arena, out: Path, console: Console, prepare: bool) -> Json:
    deadline = None if arena.minutes is None else time.monotonic() + 60 * arena.minutes
    before = _before(out / "results.json")
    cap = before.get("budget", {}).get("seconds_a_run") if arena.cap is None else arena.cap
    cap = arena.seconds_a_run() if cap is None else cap
    jobs = plan(arena, out, cap)
    results = _begin(arena, cap, before)
    done = {record["name"] for record in results["runs"] if record.get("ended_by") in ("steps", "minutes")}
    same = {r["name"]: r["settings"] for r in results["runs"]}
    todo = [job for job in jobs if job["name"] not in done or _completed(same[job["name"]], job) != _settings(job)]
    console.print(
        budget_line(arena.size, [{**j, "settings": _settings(j)} for j in jobs]), highlight=False, soft_wrap=True
    )
    if len(todo) < len(jobs):
        count = len(jobs) - len(todo)
        console.print(f"{count} run{' is' if count == 1 else 's are'} done already", highlight=False)
    known = {job["name"]: job for job in todo}
    results["runs"] = [r for r in results["runs"] if "error" not in r or r["name"] not in known]  # tried again
    try:
        missing = _prepare(todo, out, console) if prepare else {}
        ready = [job for job in todo if job["name"] not in missing]
        failed = ({"name": name, "error": why} for name, why in missing.items())
        for answer in itertools.chain(failed, side_by_side(ready, arena, deadline)):
            record = {**_record(known[answer["name"]], answer), "commit": results["commit"]}
            results["failed"] += "error" in record
            if "error" not in record or record["name"] not in done:  # an error takes nobody's place
                results["runs"] = [r for r in results["runs"] if r["name"] != record["name"]] + [record]
                save(results, out / "results.json")
            console.print(_line(record), highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        results["interrupted"] = True
    results["runs"].sort(key=_place)
    results["quality"] = _quality(of_size(results))
    left = [job["name"] for job in jobs if job["name"] not in {r["name"] for r in results["runs"] if _finished(r)}]
    results["left"] = left
    save(results, out / "results.json")
    return results


def _prepare(todo: Sequence[Json], out: Path, console: Console) -> dict[str, str]:
    """Each data set once, before processes ask for it at the same time; which runs lack theirs, and why."""
    missing: dict[str, str] = {}
    for name, data in {json.dumps((job["task"], job["data"])): (job["task"], job["data"]) for job in todo}.values():
        begun = time.monotonic()
        task = TASKS[name].from_options(data)
        try:
            sizes = [f"{len(task.source(split)):,}" for split in ("train", "validation", "test")]
        except (OSError, ValueError) as error:  # of the data of one task; the others have theirs
            missing |= {job["name"]: str(error) for job in todo if (job["task"], job["data"]) == (name, data)}
            continue
        console.print(f"{name}: {' / '.join(sizes)} examples, {time.monotonic() - begun:.0f} s", highlight=False)
        if isinstance(task, Pathfinder) and task.folder is None:
            sheet(task, out / f"{name}.png")
            console.print(f"{name}: some of them in {out / name}.png", highlight=False, soft_wrap=True)
    return missing


def side_by_side(todo: Sequence[Json], arena: Arena, deadline: float | None) -> Iterator[Json]:
    """The answers as they come, from so many workers."""
    waiting: queue.Queue[Json] = queue.Queue()
    for job in todo:
        waiting.put(job)
    answers: queue.Queue[Json | None] = queue.Queue()
    count = min(arena.jobs, len(todo))
    workers = [_Worker(arena, count) for _ in range(count)]
    threads = [threading.Thread(target=_feed, args=(w, waiting, answers, deadline), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    ended = 0
    try:
        while ended < count:
            try:
                answer = answers.get(timeout=0.2)
            except queue.Empty:
                continue
            if answer is None:
                ended += 1
            else:
                yield answer
    except BaseException:
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in workers:
            worker.interrupt()
        for thread in threads:
            thread.join(timeout=60)
        raise
    finally:
        for worker in workers:
            worker.close()


def _feed(
    worker: "_Worker", waiting: "queue.Queue[Json]", answers: "queue.Queue[Json | None]", deadline: float | None
) -> None:
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < SHORTEST:
            continue  # for the next call
        answers.put(worker.ask({**job, "leg": None if left is None else left / 60}))
    answers.put(None)


class _Worker:
    """worker.py in a process of its own, begun when asked, and anew when it has died."""

    def __init__(self, arena: Arena, count: int):
        self.arena, self.count = arena, count
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Json) -> Json:
        process = self.process if self.process is not None and self.process.poll() is None else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if self.arena.place == "cpu" or not line:
            self.close()
        if line:
            answer: Json = json.loads(line)
            return answer
        return {"name": job["name"], "error": f"the training process ended: {_why(process.returncode)}"}

    def _start(self) -> "subprocess.Popen[str]":
        self.close()
        threads = max(1, (os.cpu_count() or 1) // max(1, self.count))
        cpu = self.arena.place == "cpu"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "subquad.studies.lra.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # on a GPU the processor only issues work: one thread each, so that neighbours are not slowed
            env={"OMP_NUM_THREADS": str(threads if cpu else 1), **environment()},
            start_new_session=True,  # Ctrl-C is passed on
        )
        assert self.process.stdin is not None
        first = {"device": self.arena.place, "threads": threads if cpu else 1, "once": cpu}
        self.process.stdin.write(json.dumps(first) + "\n")
        return self.process

    def interrupt(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # the loop saves, and the process ends

    def close(self) -> None:
        if self.process is None:
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError, ValueError):
                    pipe.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def _why(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.strsignal(-code) or f"signal {-code}"
    return f"exit code {code}"


def _settings(job: Json) -> Json:
    found: Json = json.loads(json.dumps({key: job[key] for key in ("data", "model", "training")}))
    return found


def _completed(settings: Json, job: Json) -> Json:
    """Settings of an older run with those that came after it, as they were then."""
    defaults = json.loads(json.dumps(TASKS[job["task"]].defaults()))
    return {**settings, "data": {**defaults, **settings["data"]}}


def _record(job: Json, answer: Json) -> Json:
    about = {key: job[key] for key in ("name", "column", "mechanism", "seed")}
    recipe = RECIPES[job["column"]]
    stand_in = getattr(TASKS[recipe.task], "stand_in", None) if not job["data"].get("folder") else None
    about |= {"task": stand_in or recipe.title, "settings": _settings(job)}
    return {**about, **answer.get("result", {}), **({"error": answer["error"]} if "error" in answer else {})}


def _finished(record: Json) -> bool:
    return record.get("ended_by") in ("steps", "minutes") or "error" in record


def of_size(results: Json) -> list[Json]:
    """The runs of the size that this call is about, as the paper's table has them: a folder may hold both sizes."""
    return sorted((r for r in results["runs"] if r["name"].startswith(f"{results['budget']['size']}/")), key=_place)


def _place(record: Json) -> tuple[Any, ...]:
    """In the table, whichever call made it."""
    known = [*OPTIONS]
    rank = known.index(record["mechanism"]) if record["mechanism"] in known else len(known)
    return rank, record["mechanism"], [*RECIPES].index(record["column"]), record["seed"]


def _quality(runs: Sequence[Json]) -> list[Json]:
    """Records as `subquad report` reads them: means over the seeds."""
    found: dict[tuple[str, str], list[Json]] = {}
    for r in runs:
        if r.get("accuracy") is not None:
            found.setdefault((r["mechanism"], r["task"]), []).append(r)
    return [
        {
            "mechanism": mechanism,
            "task": task,
            "metric": "accuracy",
            "value": statistics.fmean(r["accuracy"] for r in seeds),
            "lower_is_better": False,
            "steps": seeds[0]["steps"],
            "seconds": seeds[0]["seconds"],
            "curve": seeds[0].get("curve", []),
        }
        for (mechanism, task), seeds in found.items()
    ]


def budget_line(size: str, runs: Sequence[Json]) -> str:
    """What a run of each column may take, as the runs' own settings say."""
    columns: dict[str, dict[str, None]] = {}
    for run in runs:
        training = run["settings"]["training"]
        seconds = "" if training.get("minutes") is None else f" or {60 * training['minutes']:.0f} s"
        allowed = f"{training['steps']:,} steps of {training['batch']}{seconds}"
        columns.setdefault(RECIPES[run["column"]].title, {})[allowed] = None
    seeds = len({run["seed"] for run in runs})
    told = [f"{size} models, {seeds} seed{'s' * (seeds != 1)}"]
    told += [f"{title} {' and '.join(allowed)}" for title, allowed in columns.items()]
    equal = columns and all(len(allowed) == 1 for allowed in columns.values())
    return "; ".join(told) + (": the same for every mechanism" if equal else "")


def _line(record: Json) -> str:
    where = f"{record['column']}, {record['mechanism']}, seed {record['seed']}"
    if "error" in record:
        return f"{where}: {record['error']}"
    if record["ended_by"] == "leg":
        return f"{where}: {record['steps']:,} steps so far, the rest in the next call"
    short = "" if record["ended_by"] == "steps" else " (the time was over)"
    return f"{where}: {record['accuracy']:.2f} % after {record['steps']:,} steps{short}, {record['seconds']:.0f} s"


def _begin(arena: Arena, cap: float | None, before: Json) -> Json:
    return {
        "kind": "lra",
        **origin(arena.place),
        "budget": {
            "size": arena.size,
            "seeds": arena.seeds,
            "steps": arena.steps,
            "seconds_a_run": cap,
            "jobs": arena.jobs,
        },
        "runs": before.get("runs", []),
        "quality": [],
        "rows": [],
        "left": [],
        "failed": 0,  # runs of this call
        "interrupted": False,
    }


def _before(path: Path) -> Json:
    """What an earlier call left."""

    def whole(found: Json) -> bool:
        runs, cap = found["runs"], found["budget"].get("seconds_a_run")
        if not isinstance(cap, int | float | None):
            return False
        return all(r["column"] in RECIPES and {"data", "training"} <= r["settings"].keys() for r in runs) and all(
            {"name", "mechanism", "seed", "task"} <= r.keys() for r in runs
        )

    return earlier(path, "lra", whole)
