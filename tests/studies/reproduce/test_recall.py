"""The table of recall at a size for a test: rows are trained, and shown by what they keep and by how much they were
told."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from subquad.report import recall
from subquad.report.report import write as report
from subquad.report.reproduce import beside, copy_to, draw
from subquad.studies.reproduce import run as module
from subquad.studies.reproduce.row import Budget, numbers_kept
from subquad.studies.reproduce.run import reproduce
from subquad.studies.reproduce.tables import RECALL_WIDTHS, RECALLERS, TABLES
from subquad.studies.results import ReproducedTable, TrainedRow, load
from subquad.tasks.recall import Recall
from tests.studies.reproduce.test_run import here

TINY = (
    "data.length=16", "data.pairs=[2, 4]", "data.vocab=20", "data.held_out=8", "model.depth=1", "training.steps=2",
    "training.batch=4", "training.log_every=1", "training.evaluate_batches=1",
)  # fmt: skip


def answered(mechanism: str, width: int, state: int, *shares: float) -> TrainedRow:
    test = {"accuracy": 0.5, **{f"accuracy, {4 * 2**n} pairs": share for n, share in enumerate(shares)}}
    label, variant = f"{mechanism}-{width}", f"width {width}"
    return TrainedRow(mechanism=mechanism, label=label, variant=variant, metric="accuracy", state=state, test=test)


@pytest.fixture
def results() -> ReproducedTable:
    rows = (
        answered("linear", 32, 1056, 1.0, 0.4, 0.1),
        answered("deltanet", 32, 1056, 1.0, 0.995, 0.6),
        answered("linear", 64, 4160, 0.9, 1.0, 0.3),
    )
    unfinished = TrainedRow(mechanism="softmax", label="softmax-32", variant="width 32", state=16384, unfinished=True)
    found = {row.label: row for row in (*rows, unfinished)}
    return ReproducedTable(table="recall", title="Recall", metric="accuracy", machine={"device": "cpu"}, results=found)


def test_rows_are_trained_and_shown_by_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_all", here)
    console = Console(record=True, width=200, quiet=False)
    budget = Budget(device="cpu", settings=TINY)
    found = reproduce("recall", tmp_path, console, budget, rows=("linear-32", "softmax-32", "linear-64"), draw=draw)
    assert found.failed == {}
    assert list(found.results) == ["linear-32", "softmax-32", "linear-64"]
    states = {name: row.state for name, row in found.results.items()}
    assert states == {"linear-32": 32 * 33, "softmax-32": 2 * 16 * 32, "linear-64": 64 * 65}  # z is a column of 32
    row = found.results["linear-32"]
    assert row.value == row.test["accuracy"]
    assert (row.variant, row.steps) == ("width 32", 2)
    assert [quality.mechanism for quality in found.quality] == [
        "linear, width 32",
        "softmax, width 32",
        "linear, width 64",
    ]
    assert (tmp_path / "recall" / "recall.png").read_bytes().startswith(b"\x89PNG")

    copy_to(found, tmp_path / "copy" / "recall.json")
    again = load(tmp_path / "copy" / "recall.json", ReproducedTable)
    rows = recall.recalled(again)
    assert rows == recall.recalled(found)
    assert [sorted(row.accuracy) for row in rows] == 3 * [[2, 4]]
    assert rows[0].accuracy[4] == row.test["accuracy, 4 pairs"]
    page = report([tmp_path / "copy" / "recall.json"]).html.read_text()
    assert "Right answers over pairs, width 32" in page
    assert "<td>linear</td><td>width 64</td>" in page
    console.print(beside(found))
    console.print(recall.shown(rows))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["mechanism", "model", "state", "2", "pairs", "4", "pairs", "solved"] in lines


def test_what_is_solved_has_no_gap(results: ReproducedTable) -> None:
    rows = recall.recalled(results)
    assert [(row.mechanism, row.state, row.solved) for row in rows] == [
        ("linear", 1056, 4), ("deltanet", 1056, 8), ("linear", 4160, 0)
    ]  # fmt: skip
    shown = [[cell.shown for cell in row] for row in recall.cells(rows)]
    assert recall.columns(rows) == ["mechanism", "model", "state", "4 pairs", "8 pairs", "16 pairs", "solved"]
    assert shown[1] == ["deltanet", "width 32", "1,056", "100.0 %", "99.5 %", "60.0 %", "8 pairs"]
    assert shown[2][-1] == "-"


def test_the_chart_has_a_view_for_each_width(results: ReproducedTable) -> None:
    page = recall.page(results)
    assert page is not None
    views = page["chart"]["views"]
    assert [view["label"].rpartition(", ")[2] for view in views] == ["width 32", "width 64"]
    series = {one["name"]: one["points"] for one in views[0]["series"]}
    assert series == {"linear": [[4, 1.0], [8, 0.4], [16, 0.1]], "deltanet": [[4, 1.0], [8, 0.995], [16, 0.6]]}
    json.dumps(page["chart"])
    assert recall.page(ReproducedTable(results={"a": TrainedRow(test={"accuracy": 1.0})})) is None


def test_every_mechanism_is_there_at_every_width_with_one_budget() -> None:
    table = TABLES["recall"]
    assert {row.name for row in table.rows} == {f"{name}-{width}" for name in RECALLERS for width in RECALL_WIDTHS}
    assert {"linear", "deltanet", "softmax"} <= set(RECALLERS)
    for row in table.rows:
        assert not row.training
        assert not row.data
        assert row.model == {"dim": int(row.variant.split()[1])}


@pytest.mark.parametrize(("mechanism", "at"), [("linear", 32 * 33), ("softmax", 2 * 24 * 32)])
def test_a_state_is_that_of_one_layer_without_taps(mechanism: Any, at: int) -> None:
    task = Recall(length=24, pairs=2, vocab=20)
    model = {**task.model, "mechanism": mechanism, "dim": 32}
    assert numbers_kept(task, model) == at
    assert numbers_kept(task, {**model, "taps": (), "depth": 4}) == at
