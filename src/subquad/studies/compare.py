"""Compare every mechanism with exact softmax: time, memory, decoding, state and quality, in one file of figures.

Measuring runs in its own process (compare_worker.py). This process writes results.json after each figure, so neither a
crash nor Ctrl-C loses what was measured.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from subquad.measure.cost import DTYPES, YARDSTICK, Row
from subquad.mechanisms import MECHANISMS
from subquad.pool import Died, Worker
from subquad.studies.columns import COLUMNS, milliseconds, plain_table, ratio
from subquad.studies.compare_worker import Event, Job
from subquad.studies.quality import task_name
from subquad.studies.results import Comparison, MissingQuality, Quality, from_json, save, set_aside, to_json
from subquad.studies.settings import Settings
from subquad.tasks.tokens import load_tokens

WARMERS = 8  # processes that compile at once: each takes a few hundred MB of GPU memory
WIDE = 110  # width of a terminal, in characters, that has room for every column
Work = Callable[[Settings, list[Job], list[Row]], Iterator[Event]]


def compare(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    remember: bool = True,
    work: Work | None = None,
    earlier: Sequence[Row] = (),
    seconds: float = math.inf,
) -> Comparison:
    """Measure, write out/results.json after each figure, and return what it holds.

    `remember`: keep a copy for `subquad recommend` if the comparison is complete. A copy with only a few mechanisms
    would hide better figures. `work` does the measuring: by default in its own process, which may die without harm.
    Ctrl-C stops the measuring, and this function still returns. So does the first figure after `seconds`. What
    `earlier` has is not measured again; it says what would take too long or does not fit.
    """
    until = time.monotonic() + seconds
    if settings.data is not None:
        load_tokens(Path(settings.data))  # refuse bad data before anything is measured
    _check_room(settings)
    work = work or _elsewhere
    out.mkdir(parents=True, exist_ok=True)
    results = Comparison(**origin(settings.device), settings=to_json(settings.to_dict()))
    have = {row.key for row in earlier}
    left = [job for job in plan(settings) if job["kind"] != "row" or _key(job) not in have]
    if work is _elsewhere and torch.device(settings.device).type == "cuda":
        _warm(settings, left, console)
    set_aside(out / "results.json", console)
    with _progress(console, len(left)) as report:
        try:
            while left:
                left = _run(settings, left, results, work, out, report, earlier, until)
        except KeyboardInterrupt:
            results.interrupted = True
    save(results, out / "results.json")
    if remember and whole(results):
        form = "_bidirectional" if settings.causal is False else ""
        save(results, cache_folder() / f"compare_{torch.device(settings.device).type}{form}.json")
    return results


def _check_room(settings: Settings) -> None:
    """Raise if not even the shortest length fits into memory, instead of failing slowly at every measurement."""
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


def whole(results: Comparison) -> bool:
    """Whether every mechanism was compared, to the end."""
    return not results.interrupted and set(MECHANISMS) <= set(results.settings["mechanisms"])


def _warm(settings: Settings, jobs: list[Job], console: Console) -> None:
    """Compile the kernels of all mechanisms in parallel: the measuring process would compile them one by one."""
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
    """The jobs: from short to long lengths, so that an early end leaves figures of every mechanism; then quality."""
    forms = {name: settings.is_causal(name) for name in settings.mechanisms}
    order = sorted(forms, key=lambda name: not forms[name])  # mechanisms with the same yardstick follow each other
    jobs: list[Job] = [
        {"kind": "row", "mechanism": name, "length": length, "causal": forms[name]}
        for length in settings.lengths
        for name in order
    ]
    if settings.task is not None or settings.data is not None:
        jobs += [{"kind": "quality", "mechanism": name} for name in settings.mechanisms]
    return jobs


def _run(
    settings: Settings,
    jobs: list[Job],
    results: Comparison,
    work: Work,
    out: Path,
    report: Callable[[Job, str], None],
    earlier: Sequence[Row],
    until: float,
) -> list[Job]:
    """Do jobs until all are done or the process dies; returns the remaining jobs."""
    done = 0
    try:
        for event in work(settings, jobs, [*earlier, *results.rows]):
            if "begin" in event:
                if time.monotonic() > until:
                    raise KeyboardInterrupt
                report(event["begin"], "")
                continue
            if "row" in event:
                results.rows.append(event["row"])
                report(jobs[done], _summary(event["row"]))
            else:
                report(jobs[done], _keep_quality(results, event["quality"]))
            done += 1
            _save(results, out)
        return jobs[done:] if done else []
    except Died as death:
        job, message, left = jobs[done], f"the measuring process died: {death}", jobs[done + 1 :]
        if job["kind"] == "row":
            results.rows.append(_row(job, error=message))
            same = [other for other in left if (other["kind"], other["mechanism"]) == ("row", job["mechanism"])]
            reason = f"not tried: the process died at T = {job['length']}"
            results.rows += [_row(other, skipped=reason) for other in same]
            left = [other for other in left if other not in same]
            report(job, message)
        else:
            _keep_quality(results, {"mechanism": job["mechanism"], "task": task_name(settings), "reason": message})
        _save(results, out)
        return left


def _key(job: Job) -> tuple[str, int, bool]:
    return job["mechanism"], job["length"], job["causal"]


def joined(parts: Sequence[Comparison]) -> Comparison:
    """One comparison of rows that were measured in several runs, on one machine and with the same shapes.

    The first says where most comes from; of a row in several parts the last counts. It is interrupted if a mechanism
    lacks a length. Ratios stay those to the softmax of the run they come from.
    """
    whole, *others = parts
    rows = {row.key: row for row in whole.rows}
    settings, added = dict(whole.settings), list(whole.added or [])
    for part in others:
        for key in ("dim", "heads", "batch", "device", "dtype"):
            if part.settings[key] != settings[key]:
                raise ValueError(f"{key} is {part.settings[key]} in one part and {settings[key]} in another")
        rows |= {row.key: row for row in part.rows}
        names, lengths = growth.names(part.rows), sorted({row.length for row in part.rows})
        about = {"rows": names, "lengths": lengths}
        about |= {"commit": part.commit, "date": part.date, "machine": part.machine}
        added += [entry for entry in (*(part.added or []), about) if names and entry not in added]
    lengths = sorted({row.length for row in rows.values()})
    names = [name for name in MECHANISMS if name in {row.mechanism for row in rows.values()}]
    order = {key: n for n, key in enumerate(itertools.product(lengths, names))}
    settings |= {"lengths": lengths, "mechanisms": names}
    kept = sorted(rows.values(), key=lambda row: order[row.length, row.mechanism])
    return dataclasses.replace(
        whole,
        settings=settings,
        rows=kept,
        growth=growth.growths(kept),
        crossovers=growth.crossovers(kept),
        interrupted=len(kept) < len(order),
        added=added or None,
    )


def _row(job: Job, **why: Any) -> Row:
    return Row(mechanism=job["mechanism"], length=job["length"], causal=job["causal"], **why)


def _keep_quality(results: Comparison, record: Event) -> str:
    """Store the record of a training in the results; returns a summary of it."""
    if "value" not in record:
        results.quality_missing.append(from_json(MissingQuality, record, "quality"))
        return str(record["reason"])
    results.quality.append(from_json(Quality, record, "quality"))
    return f"{record['value']:.4g} {record['metric']} after {record['steps']} steps"


def _save(results: Comparison, out: Path) -> None:
    results.growth = growth.growths(results.rows)
    results.crossovers = growth.crossovers(results.rows)
    save(results, out / "results.json")


def _elsewhere(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[Event]:
    """Do the jobs in another process; raises Died if it ends early."""
    # threads that spin for long while they wait can become twenty times slower when another program uses the cores; on
    # an idle machine a short spin costs nothing
    setup, defaults = {"settings": settings.to_dict(), "rows": to_json(rows)}, {"GOMP_SPINCOUNT": "1000"}
    process = Worker("subquad.studies.compare_worker", setup, defaults)
    try:
        for job in jobs:
            yield {"begin": job}
            event = process.ask(job)
            yield {**event, "row": from_json(Row, event["row"], "row")} if "row" in event else event
            if process.process is None:  # a GPU error ended it: the remaining jobs need a new process
                return
    finally:
        process.close(patience=0)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Job, str], None]]:
    """A progress bar in a terminal; one line per figure when the output is not a terminal."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("starting", total=total)

    def report(job: Job, summary: str) -> None:
        bar.update(task, description=_title(job), advance=1 if summary else 0)
        if summary and not console.is_terminal:
            console.print(f"{_title(job)}: {summary}", soft_wrap=True, highlight=False, markup=False)

    with bar:
        yield report


def _title(job: Job) -> str:
    return f"{job['mechanism']}, T = {job['length']}" if job["kind"] == "row" else f"{job['mechanism']}, learning"


def _summary(row: Row) -> str:
    if row.decode_ms is not None and row.training_ms is None:
        return f"one token {milliseconds(row.decode_ms)}"
    if row.training_ms is None:
        return row.error or row.skipped or "nothing measured"
    beside = row.mechanism != YARDSTICK and row.training_ratio is not None
    share = f" ({ratio(row.training_ratio)} of softmax)" if beside and row.training_ratio else ""
    return f"training {milliseconds(row.training_ms)}{share}, peak {readable(row.peak_bytes or 0)}"


def tables(results: Comparison, width: int = 120) -> list[Table]:
    """The figures at each mechanism's longest measured length, and the reasons why others are missing."""
    settings, quality = results.settings, {record.mechanism: record for record in results.quality}
    title = (
        f"{results.machine['device']}, {settings['dtype']}, batch {settings['batch']}, width {settings['dim']}, "
        f"{settings['heads']} heads. x: ratio to exact softmax in the same run. "
        "growth: training time grows as T to this power (documented). from T: faster than softmax from this length on"
    )
    wide = width >= WIDE
    columns = [column for column in COLUMNS if wide or not column.wide]
    metric = results.quality[0].metric if quality else ""
    titles = ["mechanism", "T", *(column.title for column in columns), "growth", "from T"]
    table = plain_table(title, [*titles, metric] if quality and wide else titles, gap=2 if wide else 1)
    growths = {record.mechanism: record for record in results.growth}
    crossed = {record.mechanism: record.training for record in results.crossovers}
    for row in _longest(results.rows):
        name, exponents, since = row.mechanism, growths[row.mechanism], crossed.get(row.mechanism)
        other_form = settings["causal"] is None and not row.causal
        cells = [name + ("*" if other_form else ""), f"{row.length:,}"]
        for column in columns:
            figure = getattr(row, column.field)
            itself = name == YARDSTICK and column.format is ratio  # the measured ratio to itself is noise
            cells.append("-" if figure is None else "1.00" if itself else column.format(figure))
        time = "-" if exponents.time is None else f"{exponents.time:.2f}"
        cells.append(f"{time} ({exponents.documented_time:g})")
        cells.append("" if name == YARDSTICK else "-" if since is None else f"{since:,}")
        cells += [_learned(quality.get(name), metric)] if quality and wide else []
        table.add_row(*cells, style="bold" if name == YARDSTICK else None)
    if any(not row.causal for row in results.rows) and settings["causal"] is None:
        table.caption, table.caption_justify = "* bidirectional, against bidirectional softmax", "left"
    learned = plain_table(None, ("learned", f"{metric} on {results.quality[0].task}") if quality else ())
    for name, record in quality.items() if not wide else ():  # the first table has no room for this column
        learned.add_row(name, _learned(record, metric), style="bold" if name == YARDSTICK else None)
    return [shown for shown in (table, learned, reasons(results)) if shown.row_count]


def reasons(results: Comparison) -> Table:
    """The reasons for missing figures."""
    columns = ("mechanism", "T", "why")
    table = Table(*columns, title="not measured", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in growth.names(results.rows):
        lost = [row for row in results.rows if row.mechanism == name and (row.error or row.skipped)]
        if lost:  # only the first reason: those of longer lengths follow from it
            until = "" if len(lost) == 1 else f" to {lost[-1].length:,}"
            table.add_row(name, f"{lost[0].length:,}{until}", escape(lost[0].error or lost[0].skipped or ""))
    for row in results.rows:
        if row.uncaptured:
            table.add_row(row.mechanism, f"{row.length:,}", escape(f"a step without Python: {row.uncaptured}"))
    for missing in results.quality_missing:
        table.add_row(missing.mechanism, missing.task, escape(missing.reason))
    return table


def _longest(rows: list[Row]) -> list[Row]:
    """The row of each mechanism's longest measured length; the longest and the fastest first."""
    timed = [row for row in sorted(rows, key=lambda row: row.length) if row.training_ms is not None]
    longest = {row.mechanism: row for row in timed}.values()
    return sorted(longest, key=lambda row: (-row.length, row.training_ms and row.training_ms.median))


def _learned(record: Quality | None, metric: str) -> str:
    """The value, and its unit if it differs from the column's: the two forms may learn different tasks."""
    if record is None or record.value is None:
        return "-"
    return f"{record.value:.3f}" + ("" if record.metric == metric else f" {record.metric}")
