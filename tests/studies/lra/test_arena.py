import dataclasses
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from subquad.disk import lock_folder
from subquad.measure.cost import Shape
from subquad.models import Classifier
from subquad.pool import Worker, end_with, exchange
from subquad.report import lra as table
from subquad.studies.lra import arena as harness
from subquad.studies.lra import recipes, worker
from subquad.studies.lra.arena import budget_line, lra
from subquad.studies.lra.efficiency import NAIVE, Step, efficiency, efficiency_tables
from subquad.studies.lra.plan import Arena, plan
from subquad.studies.lra.recipes import OPTIONS, PUBLISHED, RECIPES, direction, mixer, model_of, training_of
from subquad.studies.results import ArenaBudget, ArenaRun, ArenaTable, to_json
from subquad.tasks import TASKS
from subquad.tasks.lra import pathfinder
from subquad.tasks.lra.pathfinder import Pathfinder
from subquad.training.config import TrainingConfig
from subquad.training.folder import Folder, read_config

SMALL = ("pathfinder.train=12", "pathfinder.held_out=4")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder, shared: later tests read what an earlier test generated."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def data(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(drawn))
    monkeypatch.setattr(pathfinder, "CHUNK", 20)
    monkeypatch.setattr(pathfinder, "cores", lambda: 1)  # sixteen pictures need no process of their own
    recipe = RECIPES["pathfinder"]
    few = {**recipe.training, "batch": 8}  # all training in this file is on this task
    monkeypatch.setitem(RECIPES, "pathfinder", dataclasses.replace(recipe, training=few))


def quiet() -> Console:
    return Console(quiet=True)


class Here(Worker):
    """A worker in this process: starting another process takes longer than the few steps of most tests."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        answers = io.StringIO()
        exchange(io.StringIO(f"{json.dumps(self.setup)}\n{json.dumps(job)}\n"), answers, worker.begin)
        answer: dict[str, Any] = json.loads(answers.getvalue())
        assert answer.pop("last")
        return answer


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(harness, "Worker", Here)
    yield
    torch.set_num_threads(threads)


def test_every_mechanism_of_the_paper_and_ours_has_options() -> None:
    assert tuple(name for _, name, _ in table.PAPER.rows) == PUBLISHED
    assert len(OPTIONS) == 25
    for column in RECIPES:
        for name in OPTIONS:
            fields = {"max_length": 128, "dim": 8, "depth": 1, "heads": 2, "mechanism": mixer(column, name)}
            Classifier(vocab=16, classes=2, positions="learned", **fields, **direction(name, {}))


def test_mechanisms_that_are_causal_only_read_from_left_to_right() -> None:
    one_way = ["retnet", "gla", "mamba2", "deltanet", "gated_deltanet"]
    assert [name for name in OPTIONS if model_of("listops", name, "small").get("causal")] == one_way
    fields = model_of("listops", "gla", "original")
    assert (fields["causal"], fields["pooling"]) == (True, "mean")  # a first position would see nothing
    assert model_of("listops", "linear", "original")["pooling"] == "cls"
    assert recipes.directions(OPTIONS).endswith(f"{', '.join(one_way)}.")
    assert recipes.directions(PUBLISHED) == ""


@pytest.mark.parametrize("column", list(RECIPES))
def test_both_sizes_of_each_task_can_be_built_and_trained(column: str) -> None:
    recipe = RECIPES[column]
    cls = TASKS[recipe.task]
    task = cls()
    for size in ("small", "original"):
        chosen = training_of(column, size, None, 1)
        assert TrainingConfig.from_dict({**task.training.to_dict(), **chosen}).seed == 1
    small = {**task.model, **model_of(column, "linear", "small")}
    assert (small["dim"], small["depth"], small["heads"], small["ff_dim"], small["pooling"]) == (64, 2, 2, 128, "mean")
    original = {**task.model, **model_of(column, "linear", "original")}
    assert original["dim"] == recipe.original["dim"]
    for name in OPTIONS:
        for size in ("small", "original"):
            with torch.device("meta"):
                fields = {**task.model, **model_of(column, name, size)}
                assert Classifier(vocab=16, classes=2, max_length=64, **fields)


def test_fewer_steps_warm_up_for_less() -> None:
    whole = training_of("listops", "small", None, 0)
    assert (whole["steps"], whole["warmup"]) == (2500, 200)
    assert training_of("listops", "small", 250, 0)["warmup"] == 20


def test_a_few_steps_are_not_spent_on_evaluations() -> None:
    assert "evaluate_every" not in training_of("listops", "small", 500, 0)
    assert training_of("listops", "small", 250, 0)["evaluate_every"] == 50
    assert training_of("listops", "small", 20, 0)["evaluate_every"] == 20


def test_names() -> None:
    assert recipes.parse_tasks("listops, imdb") == ("listops", "text")
    assert recipes.parse_tasks("all") == ("listops", "text", "retrieval", "image", "pathfinder")
    assert recipes.parse_mechanisms("published") == PUBLISHED
    with pytest.raises(ValueError, match="listops"):
        recipes.parse_tasks("listop")
    with pytest.raises(ValueError, match="linear"):
        recipes.parse_mechanisms("linea")
    with pytest.raises(ValueError, match="small"):
        recipes.check_size("big")


def test_the_budget_is_the_same_for_all_and_kept(tmp_path: Path) -> None:
    arena = Arena(tasks=("pathfinder", "image"), mechanisms=("linear", "local"), seeds=3, minutes=6, jobs=4)
    assert arena.seconds_a_run() == 1.5 * 360 * 4 / 12
    jobs = plan(arena, tmp_path, arena.seconds_a_run())
    assert len({job["name"] for job in jobs}) == 12
    by_column: dict[str, set[str]] = {}
    for job in jobs:
        without = {key: value for key, value in job["training"].items() if key != "seed"}
        by_column.setdefault(job["column"], set()).add(json.dumps(without))
    assert all(len(budgets) == 1 for budgets in by_column.values())


def test_the_original_reads_pixels_as_the_arena_does(tmp_path: Path) -> None:
    for size, pixels in (("small", "values"), ("original", "tokens")):
        (job,) = plan(Arena(tasks=("image",), mechanisms=("linear",), size=recipes.check_size(size)), tmp_path, None)
        assert job["data"]["pixels"] == pixels
    (job,) = plan(Arena(tasks=("image",), mechanisms=("linear",), data=("image.pixels=tokens",)), tmp_path, None)
    assert job["data"]["pixels"] == "tokens"


@pytest.mark.parametrize("wrong", ["pathfinder.train", "nothing.x=1", "pathfinder.sise=2"])
def test_wrong_data_settings_say_so(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data"):
        plan(Arena(tasks=("pathfinder",), mechanisms=("linear",), data=(wrong,)), tmp_path, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "steps=0"), ({"cap": -5.0}, "cap=-5"), ({"minutes": float("nan")}, "minutes=nan"),
        ({"minutes": 0.1}, "minutes=0.1"),
        ({"tasks": ()}, "tasks"), ({"mechanisms": ()}, "mechanisms"), ({"data": ("pathx.train=3",)}, "pathx.train"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_made(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Arena(**{"tasks": ("pathfinder",), "mechanisms": ("linear",), **given})


@pytest.mark.usefixtures("here")
def test_a_run_that_was_begun_keeps_its_seconds(tmp_path: Path) -> None:
    given: dict[str, Any] = {"tasks": ("pathfinder",), "steps": 2, "device": "cpu", "data": SMALL}
    lra(Arena(mechanisms=("linear",), **given), tmp_path / "out", quiet())
    for arena in (Arena(mechanisms=("linear", "fnet"), minutes=2, **given), Arena(mechanisms=("linear",), **given)):
        results = lra(arena, tmp_path / "out", quiet())
        assert not results.failed
    minutes = {r.mechanism: r.settings["training"].get("minutes") for r in results.runs}
    assert minutes == {"linear": None, "fnet": 1.5}


@pytest.mark.parametrize(
    "text",
    [
        "xx{",
        '{"kind": "lra", "budget": {"seconds_a_run": "x"}, "runs": []}',
        '{"kind": "reproduce"}',
        '{"kind": "lra", "budget": {}, "runs": [{}]}',
        '{"kind": "lra", "runs": 5}',
    ],
)
def test_results_that_are_not_ours_are_not_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json is not what subquad lra wrote"):
        lra(Arena(tasks=("pathfinder",), mechanisms=("linear",), device="cpu"), tmp_path, quiet())
    assert (tmp_path / "results.json").read_text() == text


@pytest.mark.usefixtures("here")
def test_data_that_is_missing_costs_no_other_task(tmp_path: Path) -> None:
    data = (*SMALL, f"retrieval.folder={tmp_path}")
    arena = Arena(tasks=("retrieval", "pathfinder"), mechanisms=("linear",), steps=1, device="cpu", data=data)
    results = lra(arena, tmp_path / "out", quiet())
    found = {r.column: r for r in results.runs}
    assert "new_aan_pairs.train.tsv is missing" in (found["retrieval"].error or "")
    assert found["pathfinder"].accuracy is not None
    assert results.failed == 1
    assert (tmp_path / "out" / "pathfinder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("here")
def test_data_that_is_broken_costs_no_other_task(tmp_path: Path) -> None:
    (tmp_path / "new_aan_pairs.train.tsv").write_text("label\ta\tb\tc\td\n")
    data = (*SMALL, f"retrieval.folder={tmp_path}")
    arena = Arena(tasks=("retrieval", "pathfinder"), mechanisms=("linear",), steps=1, device="cpu", data=data)
    results = lra(arena, tmp_path / "out", quiet())
    found = {r.column: r for r in results.runs}
    assert "new_aan_pairs.train.tsv:1 has the label" in (found["retrieval"].error or "")
    assert found["pathfinder"].curve == [[1, found["pathfinder"].validation]]


def test_runs_are_trained_written_and_not_repeated(tmp_path: Path) -> None:
    given: dict[str, Any] = {"tasks": ("pathfinder",), "steps": 2, "jobs": 2, "device": "cpu", "data": SMALL}
    arena = Arena(mechanisms=("linear", "fnet"), cap=60.0, **given)
    results = lra(arena, tmp_path / "out", quiet())
    assert [r.mechanism for r in results.runs] == ["linear", "fnet"]
    for record in results.runs:
        assert record.ended_by == "steps"
        assert record.steps == 2
        assert 0 <= (record.accuracy or 0) <= 100
        assert (tmp_path / "out" / record.name / "result.json").is_file()
    assert not results.left
    written = (tmp_path / "out" / "results.json").read_text()
    again = lra(arena, tmp_path / "out", quiet())
    assert to_json(again.runs) == json.loads(written)["runs"]
    assert {q.task for q in again.quality} == {"Pathfinder"}
    console = Console(file=io.StringIO(), width=400)
    changed = lra(Arena(mechanisms=("linear",), cap=60.0, **{**given, "steps": 3}), tmp_path / "out", console)
    assert "other settings" in console.file.getvalue()  # type: ignore[attr-defined]
    assert changed.runs == again.runs  # earlier figures are kept


@pytest.mark.usefixtures("here")
def test_a_run_of_before_a_setting_came_is_the_same_run(tmp_path: Path) -> None:
    data = (*SMALL, "pathfinder.pixels=tokens")  # the behaviour before this setting existed
    given: dict[str, Any] = {"tasks": ("pathfinder",), "mechanisms": ("fnet",), "device": "cpu", "data": data}
    arena, out = Arena(steps=1, cap=60.0, **given), tmp_path / "out"
    (record,) = lra(arena, out, quiet()).runs
    for file in (out / "results.json", out / record.name / "config.json"):
        text = file.read_text()
        assert '"pixels"' in text
        older = re.sub(r'"pixels": "tokens",\s*', "", text)
        file.write_text(re.sub(r',\s*"sha256": "\w{64}"', "", older))
    (again,) = lra(arena, out, quiet()).runs
    assert (again.accuracy, again.error) == (record.accuracy, None)
    folder = Folder(out / record.name)
    now = dataclasses.replace(read_config(folder.path), data=record.settings["data"])
    with pytest.raises(ValueError, match="pixels is new"):
        folder.check(now, resume=True)
    folder.check(now, resume=True, defaults=Pathfinder.defaults())


def test_only_an_equal_budget_is_called_so(results: ArenaTable) -> None:
    assert budget_line("small", results.runs).endswith("60 s: the same for every mechanism")
    results.runs[0].settings["training"] = {"steps": 5, "batch": 8}
    assert "ListOps 5 steps of 8 and 100 steps of 8 or 60 s" in budget_line("small", results.runs)
    assert "the same" not in budget_line("small", results.runs)
    assert budget_line("small", []) == "small models, 0 seeds"


def test_a_worker_whose_parent_is_gone_stops_as_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    parents = iter((1234, 1234, 1))
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("os.kill", lambda *which: sent.append(which))
    monkeypatch.setattr("time.sleep", lambda _: None)
    end_with(1234)
    assert sent == [(os.getpid(), signal.SIGINT)]

    def nobody(_: str) -> int:
        raise BrokenPipeError

    answers = io.StringIO()
    monkeypatch.setattr(answers, "write", nobody)
    monkeypatch.setattr(worker, "run", lambda *_: {"result": {}})
    jobs = [{"threads": torch.get_num_threads(), "device": "cuda"}, {"name": "a"}, {"name": "b"}]
    exchange(io.StringIO("".join(f"{json.dumps(job)}\n" for job in jobs)), answers, worker.begin)


def test_what_a_mechanism_cannot_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"folder": str(tmp_path), "compile": True, "capture": True}
    assert list(worker._ways(job, cuda=True)) == [(True, True), (False, True), (False, False)]
    tried = []

    def trained(_: Any, device: str, compile: bool, capture: bool, console: Any) -> Any:
        tried.append((compile, capture))
        raise RuntimeError("no graph of this" if compile else "out of memory\nand more")

    monkeypatch.setattr(worker, "_trained", trained)
    assert worker.run(job, "cpu") == {"error": "RuntimeError: out of memory"}
    assert tried == [(True, False), (False, False)]
    assert "not compiled: RuntimeError: no graph of this" in (tmp_path / "log.txt").read_text()


def test_ctrl_c_while_data_is_made_leaves_everything_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "_prepare", interrupted)
    results = lra(Arena(tasks=("listops",), mechanisms=("linear",), device="cpu"), tmp_path / "out", quiet())
    assert results.interrupted
    assert results.left == ["small/listops/linear/seed0"]


def test_what_there_is_no_time_for_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(tasks=("pathfinder",), mechanisms=("linear",), minutes=1, device="cpu", data=SMALL)
    monkeypatch.setattr(harness, "SHORTEST", 100.0)
    results = lra(arena, tmp_path / "out", quiet(), prepare=False)
    assert results.left == ["small/pathfinder/linear/seed0"]


def record(column: str, mechanism: str, accuracy: float, seed: int = 0, task: str | None = None) -> ArenaRun:
    about = {"name": f"small/{column}/{mechanism}/seed{seed}", "column": column, "mechanism": mechanism, "seed": seed}
    figures = {"seconds": 10.0, "peak_bytes": 2e9, "steps": 100, "parameters": 5000, "ended_by": "steps"}
    settings = {"training": {"steps": 100, "batch": 8, "minutes": 1.0}}
    title = task or RECIPES[column].title
    return ArenaRun(**about, task=title, accuracy=accuracy, settings=settings, **figures)


@pytest.fixture
def results() -> ArenaTable:
    budget = ArenaBudget(size="small", seeds=2, steps=100, seconds_a_run=60.0, jobs=4)
    runs = [
        record("listops", "linear", 36.0), record("listops", "linear", 38.0, 1), record("listops", "softmax", 17.5),
        record("text", "linear", 66.0), record("text", "softmax", 64.0),
        record("retrieval", "linear", 70.0, task="IMDb same-movie pairs"),
    ]  # fmt: skip
    return ArenaTable(runs=runs, budget=budget)


def shown(table: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_the_table_sets_ours_beside_the_paper_s(results: ArenaTable) -> None:
    text = shown(table.accuracy_table(results, {"listops linear": "why"}))
    row = next(line for line in text.splitlines() if line.startswith("linear"))
    assert "37.00 ±1.41 (16.13)*" in row
    assert "66.00 (65.90)" in row
    assert "70.00 " in row
    assert "53.09" not in row  # the paper's Retrieval uses other data
    assert "51.50 (41.02)" in row  # averages of ListOps and Text
    assert any(line.startswith("mean") and "27.25" in line for line in text.splitlines())
    assert any(line.startswith("deviation") and "13.79" in line for line in text.splitlines())
    title = " ".join(text.split("mechanism ")[0].split())
    assert "2 seeds; ListOps 100 steps of 8 or 60 s; Text 100 steps of 8 or 60 s; Retrieval" in title


def test_rows_are_in_the_paper_s_order_whichever_call_made_them(results: ArenaTable) -> None:
    results.runs += [record("text", name, 60.0) for name in ("nystrom", "performer", "ours", "local")]
    found = table.averages(results, ("text",))
    assert [*found] == ["softmax", "local", "linear", "performer", "nystrom", "ours"]


def test_the_other_size_is_another_table(results: ArenaTable) -> None:
    other = dataclasses.replace(record("listops", "linear", 90.0), name="original/listops/linear/seed0")
    before = shown(table.accuracy_table(results))
    results.runs.append(other)
    assert shown(table.accuracy_table(results)) == before
    assert "90.0" not in str(harness._quality(harness.of_size(results)))


def test_what_failed_has_a_row(results: ArenaTable) -> None:
    results.runs.append(dataclasses.replace(record("text", "local", 0.0), accuracy=None, error="out of memory"))
    row = next(line for line in shown(table.accuracy_table(results)).splitlines() if line.startswith("local"))
    assert "- (52.98)" in row


def test_quality_is_the_mean_over_seeds(results: ArenaTable) -> None:
    found = {(q.mechanism, q.task): q.value for q in harness._quality(results.runs)}
    assert found["linear", "ListOps"] == 37.0
    assert len(found) == 5


def test_without_a_column_of_the_paper_s_average_there_is_none(results: ArenaTable) -> None:
    results.runs = [record("pathx", "linear", 50.0), record("pathx", "local", 50.0)]
    text = shown(table.accuracy_table(results))
    assert "average" not in text
    assert text.count("50.00 (FAIL)") == 2  # like all of the paper's
    assert next(line for line in text.splitlines() if line.startswith("mean")).split() == ["mean", "50.00"]


def test_what_it_cost_has_means_and_deviations(results: ArenaTable) -> None:
    titles = [shown(found) for found in table.cost_tables(results)]
    assert [text.split("\n")[0].strip() for text in titles] == ["seconds", "peak memory, GB", "steps", "parameters"]
    assert all("mean" in text and "deviation" in text for text in titles)


def test_surprising_figures_ask_for_a_note(results: ArenaTable, tmp_path: Path) -> None:
    assert set(table.surprising(results)) == {"listops softmax", "listops linear"}
    (tmp_path / "notes.json").write_text(json.dumps({"listops linear": "Padding is masked here."}))
    notes = table.read_notes(tmp_path / "notes.json")
    lines = table.note_lines(results, notes)
    assert lines[0] == "listops linear: Padding is masked here."
    assert next(line for line in lines if line.startswith("needs")).startswith("needs a note: listops softmax")
    (tmp_path / "notes.json").write_text("[1]")
    with pytest.raises(ValueError, match="sentences"):
        table.read_notes(tmp_path / "notes.json")


def test_naive_and_flash_softmax_are_the_same_model() -> None:
    shape = Shape(length=40, batch=2, causal=False)
    tokens = torch.randint(97, 123, (2, 40), dtype=torch.uint8)
    naive, flash = (Step(name, shape, tokens) for name in (NAIVE, "softmax"))
    torch.testing.assert_close(naive.model.eval()(tokens), flash.model.eval()(tokens))


def test_efficiency_measures_steps_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    path = tmp_path / "efficiency.json"
    found = efficiency(("linear",), path, quiet(), device="cpu", lengths=(64, 256), batch=2)
    assert json.loads(path.read_text())["rows"] == to_json(found.rows)
    assert found.settings["text"] == "random letters"
    rows = {(r.mechanism, r.length): r for r in found.rows}
    assert len(rows) == 6
    assert all((r.steps_per_second or 0) > 0 for r in rows.values())
    assert (rows[NAIVE, 256].peak_bytes or 0) > (rows["linear", 256].peak_bytes or 0)
    assert "softmax, naive" in shown(efficiency_tables(found)[0])
    for table_, key in zip(efficiency_tables(found), ("steps_per_second", "peak_bytes"), strict=True):
        lines = shown(table_).splitlines()
        assert "256 over naive" in " ".join(" ".join(lines).split())  # the longest length measured
        ratios = [getattr(rows["linear", 256], key) / getattr(rows[other, 256], key) for other in (NAIVE, "softmax")]
        row = next(line for line in lines if line.startswith("linear")).split()
        assert row[-2:] == [f"{ratio:.2f}" for ratio in ratios]
    efficiency((), path, quiet(), device="cpu", lengths=(64,), batch=2)
    assert json.loads(path.with_suffix(".1.json").read_text())["rows"] == to_json(found.rows)
    with lock_folder(tmp_path, "busy"), pytest.raises(ValueError, match="another process"):
        efficiency((), path, quiet(), device="cpu", lengths=(64,), batch=2)
    for wrong in ({"lengths": (0,)}, {"batch": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            efficiency(("linear",), path, quiet(), device="cpu", **wrong)


def test_a_step_of_the_efficiency_table_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    tokens = torch.randint(97, 123, (2, 64), dtype=torch.uint8)
    step = Step("linear", Shape(length=64, batch=2, causal=False, device="cpu", dtype="float32"), tokens)
    before = [p.clone() for p in step.model.parameters()]
    step.training()
    assert all(not torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True) if p.ndim > 1)
