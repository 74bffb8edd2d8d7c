"""`subquad lra --pretrain`: both phases, legs, the control, and what the tables say about each figure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from subquad.models import Classifier
from subquad.report import lra as table
from subquad.report.report import write
from subquad.studies.lra import worker
from subquad.studies.lra.arena import look_at, lra, prepare
from subquad.studies.lra.plan import Arena, plan
from subquad.studies.lra.recipes import (
    FLAGSHIPS,
    HYBRIDS,
    OPTIONS,
    RECIPES,
    filling_of,
    model_of,
    parse_mechanisms,
    positions_of,
    training_of,
)
from subquad.studies.results import ArenaPretraining, ArenaTable
from subquad.tasks import TASKS
from subquad.training.config import TrainingConfig
from tests.studies.lra import test_arena
from tests.studies.lra.test_arena import data, drawn, here, quiet, record, results, shown  # noqa: F401

SMALL = ("pathfinder.train=40", "pathfinder.held_out=4")
TINY = (
    *(f"pathfinder.model.{field}" for field in ("depth=1", "dim=8", "heads=2", "ff_dim=8")),
    *(
        f"pathfinder.{phase}.{field}"
        for phase in ("training", "pretraining")
        for field in ("batch=4", "evaluate_batch=4")
    ),
    *(f"pathfinder.{phase}.evaluate_batches=1" for phase in ("training", "pretraining")),
)


def arena(**more: Any) -> Arena:
    given: dict[str, Any] = {"tasks": ("pathfinder",), "mechanisms": ("linear",), "device": "cpu", "size": "deep"}
    return Arena(
        **{**given, "pretrain": True, "data": SMALL, "settings": TINY, "steps": 2, "pretrain_steps": 3, **more}
    )


@pytest.mark.usefixtures("here")
def test_both_phases_the_control_and_what_the_tables_say(tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = arena(mechanisms=("linear+taps", "gla"), control="linear+taps", data=(*SMALL, "pathfinder.augment=flips"))
    found = lra(chosen, out, quiet())
    assert not found.failed
    assert not found.left
    ours = {(run.mechanism, run.start): run for run in found.runs}
    assert {*ours} == {("linear+taps", "pretrained"), ("linear+taps", "control"), ("gla", "pretrained")}
    ways = {run.mechanism: run.pretraining.way for run in found.runs if run.pretraining is not None}
    assert ways == {"linear+taps": "50 % hidden", "gla": "next input"}
    assert ours["linear+taps", "control"].steps == 5  # as many examples as both phases
    assert ours["linear+taps", "control"].pretraining is None
    lines = {line.row: line for line in table.how(found)}
    counted = {row: [*line.updates, *line.examples] for row, line in lines.items() if row.startswith("linear+taps")}
    assert counted == {"linear+taps, pretrained": [3, 2, 12, 8], "linear+taps, control": [0, 5, 0, 20]}
    assert {line.positions for line in lines.values()} == {"waves"}
    text = "".join(shown(made) for made in table.tables(found))
    for words in (
        "50 % hidden; flips; waves",
        "not pretrained; flips",
        "next input",
        "3 + 2",
        "12 + 8",
        "read from left to",
    ):
        assert words in " ".join(text.split())
    known = json.loads((out / "results.json").read_text())["runs"][0]
    assert known["pretraining"]["steps"] == 3
    assert known["settings"]["pretraining"]["data"]["hidden"] == 0.5
    page = write([out]).html.read_text()
    assert "how each figure came about" in page
    assert "50 % hidden" in page
    again = lra(chosen, out, quiet())
    assert json.loads((out / "results.json").read_text())["runs"][0] == known
    assert len(again.runs) == 3
    pictures = look_at(chosen, out)
    assert [path.name for path in pictures] == [
        "filled_deep_pathfinder_linear+taps_pretrained_seed0.png",
        "filled_deep_pathfinder_gla_pretrained_seed0.png",
    ]
    assert (Path(out / known["name"]) / "pretraining" / "filled.png").is_file()


def test_both_phases_resume_in_legs(tmp_path: Path) -> None:
    (job,) = plan(arena(), tmp_path, None)
    threads = torch.get_num_threads()
    seen = []
    for leg in (1e-9, 1e-9, None):  # every leg has a second of each phase, which is enough for some steps
        answer = worker.run({**job, "leg": leg}, "cpu")
        assert "error" not in answer, answer
        seen.append(answer["result"]["ended_by"])
    assert seen[-1] == "steps"
    assert answer["result"]["pretraining"]["steps"] == 3
    torch.set_num_threads(threads)


def test_a_phase_that_is_not_finished_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan(arena(pretrain_steps=10_000), tmp_path, None)
    monkeypatch.setattr(worker, "LEAST", 0.05)
    answer = worker.run({**job, "leg": 1e-9}, "cpu")["result"]
    assert answer["ended_by"] == "leg"
    assert answer["pretraining"]["ended_by"] == "leg"
    assert not (tmp_path / job["name"] / "result.json").exists()


def test_time_and_examples_are_shared_by_the_phases(tmp_path: Path) -> None:
    sizes = ("pathfinder.training.batch=8", "pathfinder.pretraining.batch=4")
    pretrained, control = plan(arena(control="linear", settings=sizes, steps=10, pretrain_steps=20), tmp_path, 120.0)
    assert pretrained["training"]["minutes"] == pretrained["pretraining"]["training"]["minutes"] == 1.0
    assert (control["training"]["steps"], control["training"]["minutes"]) == (20, 2.0)
    assert "pretraining" not in control
    named = {job["name"] for job in (pretrained, control)}
    assert named == {f"deep/pathfinder/linear/{start}/seed0" for start in ("pretrained", "control")}


def test_a_setting_of_each_part(tmp_path: Path) -> None:
    chosen = (
        "pathfinder.model.depth=3", "pathfinder.training.lr=0.1", "pathfinder.pretraining.lr=0.2",
        "pathfinder.fill.patch=4", "pathfinder.fill.hidden=0.75", "pathfinder.training.steps=40",
    )  # fmt: skip
    (job,) = plan(arena(settings=chosen, steps=None), tmp_path, None)
    assert (job["model"]["depth"], job["training"]["lr"], job["training"]["steps"]) == (3, 0.1, 40)
    assert job["training"]["warmup"] == 1  # shorter with the steps
    before = job["pretraining"]
    assert (before["training"]["lr"], before["data"]["patch"], before["data"]["hidden"]) == (0.2, 4, 0.75)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pretrain": False, "control": "linear"}, "control"), ({"control": "softmax"}, "control='softmax'.*linear"),
        ({"pretrain": False}, "pretrain_steps"), ({"pretrain_steps": 0}, "pretrain_steps=0"),
        ({"settings": ("pathfinder.lr=3",)}, "TASK.PART.KEY=VALUE"),
        ({"settings": ("text.training.lr=3",)}, "the tasks are pathfinder"),
        ({"settings": ("pathfinder.trainin.lr=3",)}, "did you mean.*training"),
        ({"settings": ("pathfinder.training.lrr=3",)}, "did you mean.*lr"),
        ({"settings": ("pathfinder.fill.of=3",)}, "patch"),
        ({"pretrain": False, "pretrain_steps": None, "settings": ("pathfinder.fill.patch=2",)}, "without --pretrain"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arena(**given)


def test_wrong_sizes_of_squares_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patch=5"):
        plan(arena(settings=("pathfinder.fill.patch=5",)), tmp_path, None)


def test_nothing_to_look_at_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluated at least once"):
        look_at(arena(), tmp_path)
    with pytest.raises(ValueError, match="no --pretrain"):
        look_at(arena(pretrain=False, pretrain_steps=None, settings=()), tmp_path)


def test_data_can_be_made_ahead(tmp_path: Path) -> None:
    console = Console(record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    prepare(arena(), tmp_path, console)
    assert "40 / 4 / 4 examples" in console.export_text()
    chosen = arena(tasks=("retrieval",), data=(f"retrieval.folder={tmp_path}",), settings=())
    with pytest.raises(ValueError, match=r"new_aan_pairs.*is missing"):
        prepare(chosen, tmp_path, console)


@pytest.mark.parametrize("column", list(RECIPES))
def test_the_deep_size_of_each_task_can_be_built(column: str) -> None:
    task = TASKS[RECIPES[column].task]()
    for chosen in (training_of(column, "deep", None, 1), filling_of(column, "deep", None, 1)):
        assert TrainingConfig.from_dict({**task.training.to_dict(), **chosen}).seed == 1
    for name in (*OPTIONS, *HYBRIDS):
        with torch.device("meta"):
            fields = {**task.model, **model_of(column, name, "deep"), "depth": 1}
            model = Classifier(vocab=16, classes=2, max_length=64, **fields)
        assert model.config.transformer.dim == RECIPES[column].deep["dim"]


def test_hybrids_and_their_positions() -> None:
    assert parse_mechanisms("flagships") == FLAGSHIPS == ("softmax", "linear", "linear+taps")
    assert model_of("pathfinder", "linear+taps", "deep")["taps"] == [1, 31, 32, 33]  # the pixel's neighbours
    assert model_of("text", "linear+taps", "deep")["taps"] == [1, 2, 3]
    assert positions_of(model_of("text", "linear", "deep")) == "sinusoidal and rotary"
    assert positions_of(model_of("text", "fnet", "deep")) == "sinusoidal"  # it has no rotary positions
    with pytest.raises(ValueError, match=r"linear\+tap'.*linear\+taps"):
        parse_mechanisms("linear+tap")


def test_a_row_of_seeds_names_the_best_and_the_bag_of_words(results: ArenaTable) -> None:  # noqa: F811
    for run in results.runs[:2]:
        run.start, run.jobs, run.name = "pretrained", 4, f"small/listops/linear/pretrained/seed{run.seed}"
        run.pretraining = ArenaPretraining(way="10 % hidden", steps=50, seconds=30.0)
        run.settings["pretraining"] = {"training": {"steps": 50, "batch": 4}}
    results.baselines = {"retrieval": 81.4}
    line = next(line for line in table.how(results) if line.row == "linear, pretrained")
    assert (line.accuracy, line.best, line.seeds, line.seconds) == (37.0, 38.0, 2, 10.0)
    text = " ".join("".join(shown(made) for made in table.tables(results)).split())
    assert "best of 2 seeds 38.00" in text
    assert "a bag of words with a threshold scores 81.4 % on them" in text
    assert "37.00 ±1.41 (16.13)" in text  # the paper's figure stands beside it


assert test_arena  # its fixtures are used above
