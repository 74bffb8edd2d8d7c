"""Every mechanism beside exact softmax: time, memory, decoding, state, quality; one file of figures.

The measuring runs in a process of its own (bench/worker.py). This one keeps the figures: it writes results.json after
each of them, so that neither a crash nor Ctrl-C loses what was measured.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.checks import refuse
from subquad.disk import cache_folder
from subquad.machine import free_bytes, origin, readable
from subquad.measure import growth
from subquad.measure.cost import DTYPES, YARDSTICK
from subquad.mechanisms import MECHANISMS
from subquad.pool import environment
from subquad.studies import compare_worker as worker
from subquad.studies.compare_worker import Job, Row
from subquad.studies.quality import task_name
from subquad.studies.results import save, set_aside
from subquad.studies.settings import Settings
from subquad.tasks.tokens import load_tokens

WARMERS = 8  # processes that compile at once: each takes some hundred MB of the GPU
Results = dict[str, Any]
Work = Callable[[Settings, list[Job], list[Row]], Iterator[dict[str, Any]]]


class Died(Exception):
    """The measuring process ended before its jobs did."""


def compare(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    isolated: bool = True,
    remember: bool = True,
    work: Work | None = None,
) -> Results:
    """Measure, write out/results.json after each figure, and return what it holds.

    `isolated`: in a process of its own, which may die without harm. `remember`: keep a copy for `subquad recommend`,
    if it is a whole comparison: one of a few mechanisms, or half of one, would hide better figures.
    Ctrl-C ends the measuring, not this function.
    """
    if settings.data is not None:
        load_tokens(Path(settings.data))  # refused before anything is measured
    check_room(settings)
    work = work or (_elsewhere if isolated else worker.work)
    out.mkdir(parents=True, exist_ok=True)
    results = _empty(settings)
    left = plan(settings)
    if work is _elsewhere and torch.device(settings.device).type == "cuda":
        _warm(settings, left, console)
    set_aside(out / "results.json", console)
    with _progress(console, len(left)) as told:
        try:
            while left:
                left = _run(settings, left, results, work, out, told)
        except KeyboardInterrupt:
            results["interrupted"] = True
    save(results, out / "results.json")
    if remember and whole(results):
        form = "_bidirectional" if settings.causal is False else ""
        save(results, cache_folder() / f"compare_{torch.device(settings.device).type}{form}.json")
    return results


def check_room(settings: Settings) -> None:
    """Refuse what not even the shortest length has memory for: nothing would be measured, slowly."""
    free, shortest = free_bytes(settings.device), settings.shape(settings.lengths[0], causal=True)
    weights = 2 * 4 * settings.dim**2 * DTYPES[settings.dtype].itemsize  # of softmax, with their gradients
    if weights > free:
        refuse("dim", settings.dim, f"a smaller one: weights take {readable(weights)}, {readable(free)} are free")
    if shortest.least_bytes > free:
        one = dataclasses.replace(shortest, batch=1).least_bytes
        if one > free:
            refuse("lengths", shortest.length, f"a shorter one: it takes {readable(one)}, {readable(free)} are free")
        accepted = f"at most {free // one:,}: one sequence takes {readable(one)}, {readable(free)} are free"
        refuse("batch", settings.batch, accepted)


def whole(results: Results) -> bool:
    """Whether every mechanism was compared, to the end."""
    return not results["interrupted"] and set(MECHANISMS) <= set(results["settings"]["mechanisms"])


def _warm(settings: Settings, jobs: list[Job], console: Console) -> None:
    """Compile the kernels of all mechanisms side by side, which the measuring process would do one after the other."""
    first = [{**job, "kind": "warm"} for job in jobs if job["kind"] == "row" and job["length"] == settings.lengths[0]]
    count = max(1, min(WARMERS, (os.cpu_count() or 1) // 2, len(first)))

    def drain(part: list[Job]) -> None:
        with contextlib.suppress(Died):
            for _ in _elsewhere(settings, part, []):
                pass

    console.print(f"compiling the kernels of {len(first)} mechanisms, {count} at a time", highlight=False)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(drain, (first[n::count] for n in range(count))))


def plan(settings: Settings) -> list[Job]:
    """Lengths from short to long, so that an early end leaves something of everybody; then quality."""
    jobs: list[Job] = []
    # those that share a yardstick one after the other
    order = sorted(settings.mechanisms, key=lambda name: not settings.is_causal(name))
    for length in settings.lengths:
        for name in order:
            jobs.append({"kind": "row", "mechanism": name, "length": length, "causal": settings.is_causal(name)})
    if settings.task is not None or settings.data is not None:
        jobs += [{"kind": "quality", "mechanism": name} for name in settings.mechanisms]
    return jobs


def _run(
    settings: Settings, jobs: list[Job], results: Results, work: Work, out: Path, told: Callable[[Job, str], None]
) -> list[Job]:
    """Do jobs until all are done or the process dies; returns those that are left."""
    done = 0
    try:
        for event in work(settings, jobs, results["rows"]):
            if "begin" in event:
                told(event["begin"], "")
                continue
            if "row" in event:
                results["rows"].append(event["row"])
                told(jobs[done], _summary(event["row"]))
            else:
                found = event["quality"]
                results["quality" if "value" in found else "quality_missing"].append(found)
                told(jobs[done], _quality_summary(found))
            done += 1
            _refresh(results)
            save(results, out / "results.json")
        return jobs[done:] if done and done < len(jobs) else []
    except Died as death:
        job = jobs[done]
        message = f"the measuring process died: {death}"
        if job["kind"] == "row":
            for other in jobs[done:]:
                if other["kind"] == "row" and other["mechanism"] == job["mechanism"]:
                    first = other is job
                    reason = f"not tried: the process died at T = {job['length']}"
                    row = worker.empty_row(
                        other["mechanism"], other["length"], other["causal"],
                        skipped=None if first else reason, error=message if first else None,
                    )  # fmt: skip
                    results["rows"].append(row)
            told(job, message)
            left = [
                other
                for other in jobs[done:]
                if not (other["kind"] == "row" and other["mechanism"] == job["mechanism"])
            ]
        else:
            results["quality_missing"].append(
                {"mechanism": job["mechanism"], "task": task_name(settings), "reason": message}
            )
            left = jobs[done + 1 :]
        _refresh(results)
        save(results, out / "results.json")
        return left


def _elsewhere(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
    """worker.work in another process; Died if that ends early."""
    process = subprocess.Popen(
        [sys.executable, "-m", "subquad.studies.compare_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # threads that spin for long while they wait lose twenty times their time to any neighbour on the machine; a
        # short spin costs nothing where there is none
        env={"GOMP_SPINCOUNT": "1000", **environment()},
        start_new_session=True,  # Ctrl-C is ours; it is ended below
    )
    assert process.stdin is not None
    assert process.stdout is not None
    finished = 0
    try:
        # the pipe stays open: when it closes, because this process has ended however it did, the other one ends too
        process.stdin.write(json.dumps({"settings": settings.to_dict(), "jobs": jobs, "rows": rows}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            event = _event(line)
            if event is not None:
                finished += "begin" not in event
                yield event
        code = process.wait()
        # a process that leaves after an error of the GPU has reported it: the rest needs another one
        if finished < len(jobs) and not (code == 1 and finished):
            raise Died(signal.strsignal(-code) if code < 0 else f"exit code {code}")
    except BrokenPipeError:
        raise Died(f"exit code {process.wait()}") from None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _event(line: str) -> dict[str, Any] | None:
    """A line of the worker; anything else that a library prints is none."""
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


def _empty(settings: Settings) -> Results:
    written = settings.to_dict()
    return {
        "kind": "compare",
        **origin(settings.device),
        "settings": {**written, "lengths": list(settings.lengths), "mechanisms": list(settings.mechanisms)},
        "rows": [],
        "growth": [],
        "crossovers": [],
        "quality": [],
        "quality_missing": [],
        "pictures": [],
        "interrupted": False,
    }


def _refresh(results: Results) -> None:
    results["growth"] = growth.growths(results["rows"])
    results["crossovers"] = growth.crossovers(results["rows"])


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Job, str], None]]:
    """A bar in a terminal, a line a figure elsewhere."""
    if not console.is_terminal:

        def say(job: Job, summary: str) -> None:
            if summary:
                console.print(f"{_title(job)}: {summary}", soft_wrap=True, highlight=False, markup=False)

        yield say
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)

        def show(job: Job, summary: str) -> None:
            progress.update(task, description=_title(job), advance=1 if summary else 0)

        yield show


def _title(job: Job) -> str:
    return f"{job['mechanism']}, T = {job['length']}" if job["kind"] == "row" else f"{job['mechanism']}, learning"


def _summary(row: Row) -> str:
    if row["training_ms"] is None:
        return row["error"] or row["skipped"] or "nothing measured"
    beside = row["mechanism"] != YARDSTICK and row["training_ratio"] is not None
    ratio = f" ({row['training_ratio']['median']:.2f} of softmax)" if beside else ""
    return f"training {milliseconds(row['training_ms'])}{ratio}, peak {readable(row['peak_bytes'])}"


def _quality_summary(found: dict[str, Any]) -> str:
    if "value" not in found:
        return str(found["reason"])
    return f"{found['value']:.4g} {found['metric']} after {found['steps']} steps"


def tables(results: Results, width: int = 120) -> list[Table]:
    """What was measured, at the longest length of each mechanism; and why something was not."""
    rows, settings = results["rows"], results["settings"]
    title = (
        f"{results['machine']['device']}, {settings['dtype']}, batch {settings['batch']}, width {settings['dim']}, "
        f"{settings['heads']} heads. x: times exact softmax of the same run. "
        "growth: training time as T to this power (documented). from T: faster than softmax beyond it"
    )
    quality = {found["mechanism"]: found for found in results["quality"]}
    wide = width >= 110
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2 if wide else 1, 0, 0))
    columns = ["mechanism", "T", "train", "x", *(["forward", "x"] if wide else []), "memory", "token", "state"]
    columns += ["growth", "from T"] + ([_metric(quality)] if quality and wide else [])
    for column in columns:
        table.add_column(column, justify="left" if column == "mechanism" else "right", no_wrap=True)
    grown = {found["mechanism"]: found for found in results["growth"]}
    crossed = {found["mechanism"]: found["training"] for found in results["crossovers"]}
    for row in sorted(_longest(rows), key=lambda row: (-row["length"], row["training_ms"]["median"])):
        name = row["mechanism"]
        found = grown[name]
        other_form = settings["causal"] is None and not row["causal"]
        cells = [name + ("*" if other_form else ""), f"{row['length']:,}"]
        cells += [milliseconds(row["training_ms"]), _ratio(row, "training_ratio")]
        cells += [milliseconds(row["forward_ms"]), _ratio(row, "forward_ratio")] if wide else []
        cells += [readable(row["peak_bytes"]), milliseconds(row["decode_ms"])]
        cells.append("-" if row["state_bytes"] is None else readable(row["state_bytes"]))
        cells.append(f"{'-' if found['time'] is None else format(found['time'], '.2f')} ({found['documented_time']:g})")
        cells.append("" if name == YARDSTICK else "-" if crossed.get(name) is None else f"{crossed[name]:,}")
        if quality and wide:
            cells.append(_quality_cell(quality, name))
        table.add_row(*cells, style="bold" if name == YARDSTICK else None)
    if any(not row["causal"] for row in rows) and settings["causal"] is None:
        table.caption, table.caption_justify = "* bidirectional, against bidirectional softmax", "left"
    learned = Table(box=None, padding=(0, 2, 0, 0))
    if quality and not wide:  # has no room beside the others
        learned.add_column("learned", no_wrap=True)
        learned.add_column(f"{_metric(quality)} on {results['quality'][0]['task']}", justify="right", no_wrap=True)
        for name in quality:
            learned.add_row(name, _quality_cell(quality, name), style="bold" if name == YARDSTICK else None)
    return [found for found in (table, learned, reasons(results)) if found.row_count]


def reasons(results: Results) -> Table:
    """Why something was not measured."""
    table = Table(title="not measured", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("mechanism", "T", "why"):
        table.add_column(column, overflow="fold")
    rows = results["rows"]
    for name in growth.names(rows):
        lost = [row for row in rows if row["mechanism"] == name and (row["error"] or row["skipped"])]
        if lost:  # the first reason; those of longer lengths follow from it
            until = "" if len(lost) == 1 else f" to {lost[-1]['length']:,}"
            table.add_row(name, f"{lost[0]['length']:,}{until}", escape(lost[0]["error"] or lost[0]["skipped"]))
    for missing in results["quality_missing"]:
        table.add_row(missing["mechanism"], missing["task"], escape(missing["reason"]))
    return table


def _longest(rows: list[Row]) -> list[Row]:
    """The row of each mechanism's longest measured length."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["training_ms"] is not None and row["length"] >= last.get(row["mechanism"], row)["length"]:
            last[row["mechanism"]] = row
    return list(last.values())


def _metric(quality: dict[str, dict[str, Any]]) -> str:
    return str(next(iter(quality.values()))["metric"])


def _quality_cell(quality: dict[str, dict[str, Any]], name: str) -> str:
    """The value, with its unit where that is not the column's: the two forms may learn different things."""
    if name not in quality:
        return "-"
    unit = "" if quality[name]["metric"] == _metric(quality) else f" {quality[name]['metric']}"
    return f"{quality[name]['value']:.3f}{unit}"


def milliseconds(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    value = found["median"]
    for unit, size in (("s", 1000.0), ("ms", 1.0)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{1000 * value:.3g} µs"


def _ratio(row: Row, field: str) -> str:
    if row[field] is None:
        return "-"
    return "1.00" if row["mechanism"] == YARDSTICK else f"{row[field]['median']:.2f}"  # beside itself: noise
