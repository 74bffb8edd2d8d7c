"""`subquad reproduce TABLE`: run the rows of a published table, resume where it stopped, set ours beside theirs.

A row is a run of `subquad train` in a process of its own, so that small ones can share a GPU and a failure costs one
row. results.json is written after each; what a time budget cut short says so.
"""

import datetime
import json
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import subquad
from subquad.bench.provenance import commit, machine
from subquad.mechanisms.base import nearest
from subquad.tasks.measured import measure_contexts, measure_iterations, measure_scaling, write_samples
from subquad.tasks.processes import run_all
from subquad.tasks.rows import Budget, Json, Reproduction, command_of, gather, heading, quality_of, state_of
from subquad.tasks.tables import TABLES, Row, Table
from subquad.training.folder import CONFIG, RESULT


def reproduce(
    name: str,
    out: Path,
    console: Console,
    budget: Budget = Budget(),  # noqa: B008 -- frozen
    *,
    rows: Sequence[str] = (),
    timing: bool | None = None,
    samples: int = 0,
) -> Json:
    """Run the rows of a table (all, or those named) into out/TABLE and return what its results.json holds.

    timing   whether iterations of whole models are timed too; None: on a GPU
    samples  images or pieces of music that each trained model then writes
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}{nearest(name, TABLES)} Accepted: {', '.join(TABLES)}")
    table, folder = TABLES[name], out / name
    chosen = choose(table, rows)
    folder.mkdir(parents=True, exist_ok=True)
    run = Reproduction(table, chosen, budget, folder, console, _begin(table, budget, _before(folder)))
    try:
        if table.kind == "scaling":
            measure_scaling(run)
        elif table.kind == "context":
            trained = out / "enwik8" / "fixed"
            if not (trained / RESULT).is_file():
                run.say(name, "the model comes first: the row fixed of the table enwik8")
                reproduce("enwik8", out, console, budget, rows=("fixed",), timing=False)
            measure_contexts(run, trained)
        else:
            _train(run)
            if samples:
                write_samples(run, samples)
            if table.iterations and (budget.place.startswith("cuda") if timing is None else timing):
                measure_iterations(run)
    except KeyboardInterrupt:
        run.results["interrupted"] = True
        for row in run.rows:
            if (folder / row.name / CONFIG).is_file():
                _collect(run, row)
    run.keep()
    return run.results


def choose(table: Table, names: Sequence[str]) -> list[Row]:
    known = {row.name: row for row in table.rows}
    for name in names:
        if name not in known:
            raise ValueError(f"{table.name} has no row {name!r}{nearest(name, known)} Accepted: {', '.join(known)}")
    return [row for row in table.rows if not names or row.name in names]


def _train(run: Reproduction) -> None:
    todo = {}
    for row in run.rows:
        state, note = state_of(run.table, row, run.budget, run.folder / row.name)
        if state == "run":
            todo[row.name] = command_of(run.table, row, run.budget, run.folder / row.name)
        else:
            run.say(row.name, note)
        if state == "changed" and row.name not in run.results["results"]:
            run.results["results"][row.name] = {**heading(run.table, row), "error": note}
    rows = {row.name: row for row in run.rows}
    for name, code, last in run_all(todo, run.budget.jobs, run.say):
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise KeyboardInterrupt
        _collect(run, rows[name], last if code else None)
        run.keep()
    for row in run.rows:
        if row.name not in todo and "error" not in run.results["results"].get(row.name, {}):
            _collect(run, row)


def _collect(run: Reproduction, row: Row, error: str | None = None) -> None:
    """What a run left, into the results, in the order of the table."""
    place = run.folder / row.name
    found = gather(run.table, row, place) if (place / CONFIG).is_file() else heading(run.table, row)
    known = {**run.results["results"], row.name: found if error is None else {**found, "error": error}}
    run.results["results"] = {row.name: known[row.name] for row in run.table.rows if row.name in known}
    run.results["quality"] = [record for found in run.results["results"].values() for record in quality_of(found)]


def _begin(table: Table, budget: Budget, before: Json) -> Json:
    return {
        "kind": "reproduce",
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "subquad": subquad.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(budget.place),
        "budget": {
            "minutes_a_row": budget.minutes,
            "rows_side_by_side": budget.jobs,
            "settings": list(budget.settings),
        },
        "metric": table.metric,
        "published": {row.name: row.published[table.metric] for row in table.rows if table.metric in row.published},
        "differs": list(table.differs),
        "results": before.get("results", {}),
        "rows": before.get("rows", []),
        "growth": before.get("growth", []),
        "quality": before.get("quality", []),
        "pictures": before.get("pictures", []),
        **({"iterations": before["iterations"]} if "iterations" in before else {}),
        **({"scaling": before["scaling"]} if "scaling" in before else {}),
        "interrupted": False,
    }


def _before(folder: Path) -> Json:
    """What an earlier call left: its rows stand until they are run again."""
    try:
        found = json.loads((folder / "results.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
