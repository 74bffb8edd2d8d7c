"""`subquad reproduce TABLE`: run the rows of a published table, resume where it stopped, compare with the paper.

Each row is a run of `subquad train` in its own process, so small rows can share a GPU and a failure costs only one row.
results.json is written after each row and says which rows the time budget cut short.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from subquad.checks import check_count, nearest
from subquad.disk import blaming, lock_folder
from subquad.machine import origin
from subquad.measure.cost import first_line
from subquad.pool import run_all
from subquad.studies.reproduce.measurements import measure_contexts, measure_iterations, measure_scaling, write_samples
from subquad.studies.reproduce.row import (
    Budget,
    Draw,
    Reproduction,
    command_of,
    gather,
    heading,
    quality_of,
    settings_in,
    settings_of,
    state_of,
    without,
)
from subquad.studies.reproduce.tables import TABLES, Row, Table
from subquad.studies.results import ReproducedTable, TrainedRow, continued
from subquad.tasks.configure import configure
from subquad.training.folder import CONFIG, RESULT, Folder, read_config

# figures that a row keeps from an earlier call: measured after training, the last two with data that may be gone
AFTERWARDS = ("iteration", "pieces", "images_per_second_written", "epochs", "seconds_per_epoch")


def reproduce(
    name: str,
    out: Path,
    console: Console,
    budget: Budget = Budget(),  # noqa: B008 -- frozen
    *,
    rows: Sequence[str] = (),
    timing: bool | None = None,
    samples: int = 0,
    draw: Draw | None = None,
) -> ReproducedTable:
    """Run the rows of a table (all, or those named) into out/TABLE and return what its results.json holds. "failed"
    lists what was requested but is missing, with the reasons.

    timing   whether to time iterations of whole models too; None: only on a GPU
    samples  how many images or pieces of music each trained model writes afterwards
    draw     makes a picture of the results after each row
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}{nearest(name, TABLES)} Accepted: {', '.join(TABLES)}")
    check_count("samples", samples, 0)
    table, folder = TABLES[name], out / name
    chosen = choose(table, rows)
    for row in chosen if table.kind == "train" else ():  # refuse wrong settings before any process starts
        try:
            configure(table.task, settings_of(table, row, budget))
        except ValueError as error:
            raise ValueError(f"{name}, row {row.name}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, "another process reproduces this table there"):
        run = Reproduction(table, chosen, budget, folder, console, _begin(table, budget, folder), draw)
        try:
            if table.kind == "scaling":
                measure_scaling(run)
            elif table.kind == "context":
                _contexts(run, out)
            else:
                _train(run)
                if samples:
                    _afterwards(run, "samples", lambda: write_samples(run, samples))
                if timing and not table.iterations:
                    run.say(table.name, "--timing has nothing to time in this table")
                if table.iterations and (budget.place.startswith("cuda") if timing is None else timing):
                    _afterwards(run, "iterations", lambda: measure_iterations(run))
        except KeyboardInterrupt:
            run.results.interrupted = True
            for row in run.rows:
                if (folder / row.name / CONFIG).is_file():
                    _collect(run, row)
        run.keep()
        return run.results


def _afterwards(run: Reproduction, what: str, measure: Callable[[], None]) -> None:
    """Measure something more after training. An error is recorded, and the training results are kept."""
    try:
        measure()
    except Exception as error:
        reason = first_line(error, type(error).__name__)
        run.results.failed[what] = reason
        run.say(what, f"failed: {reason}")


def choose(table: Table, names: Sequence[str]) -> list[Row]:
    """The rows with these names, or all rows. Commas in a name may be left out."""
    known = {row.name.replace(",", ""): row for row in table.rows}  # users write commas between names
    wanted = {name.replace(",", ""): name for name in names}
    for name in (given for plain, given in wanted.items() if plain not in known):
        raise ValueError(f"{table.name} has no row {name!r}{nearest(name, known)} Accepted: {', '.join(known)}")
    return [row for name, row in known.items() if not names or name in wanted]


def _train(run: Reproduction) -> None:
    todo = {}
    for row in run.rows:
        state, note = state_of(run.table, row, run.budget, run.folder / row.name)
        if state == "run":
            todo[row.name] = command_of(run.table, row, run.budget, run.folder / row.name)
            if left := without(row, run.budget):
                run.say(row.name, f"an LSTM has no {', '.join(left)}: without it")
            continue
        run.say(row.name, note)
        _collect(run, row)
        if state == "changed":
            run.results.failed[row.name] = note
    rows = {row.name: row for row in run.rows}
    for name, code, last in run_all(todo, run.budget.jobs, run.say):
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
            raise KeyboardInterrupt
        if code == 0:
            run.measured_now()
        _collect(run, rows[name], last if code else None)
        run.keep()


def _contexts(run: Reproduction, out: Path) -> None:
    """Measure the row `fixed` of the table enwik8, and train it first if it is not trained yet."""
    table, trained = TABLES["enwik8"], out / "enwik8" / "fixed"
    (row,) = choose(table, ["fixed"])
    if (trained / RESULT).is_file():
        Folder(trained).check(read_config(trained).override(run.budget.given), resume=True)
    else:
        run.say(run.table.name, "the model comes first: the row fixed of the table enwik8")
        model = reproduce(table.name, out, run.console, run.budget, rows=(row.name,), timing=False, draw=run.draw)
        run.results.interrupted, run.results.failed = model.interrupted, model.failed
        if not (trained / RESULT).is_file():
            if not model.failed:
                run.say(run.table.name, "the model is not finished yet: run the same command again to continue")
            return
    measure_contexts(run, trained, settings_in(table, row, trained))


def _collect(run: Reproduction, row: Row, error: str | None = None) -> None:
    """Put what a run left into the results, in the order of the table. An error does not replace earlier figures."""
    place, before = run.folder / row.name, run.results.results.get(row.name, TrainedRow())
    try:
        with blaming(str(place)):
            figures = gather(run.table, row, place) if (place / CONFIG).is_file() else heading(run.table, row)
    except ValueError as unreadable:  # does not affect the other rows
        figures, error = heading(run.table, row), error or str(unreadable)
        run.say(row.name, error)
    if error is not None:
        run.results.failed[row.name] = error
        figures.error = error
        figures = figures if before.value is None else before
    elif before.config == figures.config:
        for name in AFTERWARDS:
            if getattr(figures, name) is None:
                setattr(figures, name, getattr(before, name))
    known = {**run.results.results, row.name: figures}
    run.results.results = {row.name: known[row.name] for row in run.table.rows if row.name in known}
    run.results.quality = [record for row in run.results.results.values() for record in quality_of(row)]


def _begin(table: Table, budget: Budget, folder: Path) -> ReproducedTable:
    """The results before the first row runs. Rows of an earlier call stay until they are run again; device, versions
    and date stay until something is trained or measured."""
    results = continued(folder / "results.json", ReproducedTable)
    if not results.date:
        results = ReproducedTable(**origin(budget.place), budget=budget.written)
    for row in results.results.values():
        if row.error is None and row.settings is None:  # older files have settings for the whole table only
            row.settings = results.budget.settings
    published = {row.name: row.published[table.metric] for row in table.rows if table.metric in row.published}
    return replace(
        results, table=table.name, title=table.title, source=table.source, metric=table.metric, published=published,
        differs=list(table.differs), interrupted=False, failed={},
    )  # fmt: skip
