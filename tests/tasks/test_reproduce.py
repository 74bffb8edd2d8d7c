import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from subquad.cli import app
from subquad.models import LanguageModel
from subquad.report.report import write as report
from subquad.tasks import reproduce as module
from subquad.tasks.figures import beside, copy_to
from subquad.tasks.reproduce import choose, reproduce
from subquad.tasks.rows import Budget, command_of, gather
from subquad.tasks.tables import TABLES
from subquad.tasks.train import start
from subquad.training.folder import Folder, read_config

TINY = (
    "data.length=24", "model.dim=16", "model.depth=1", "model.heads=2", "training.steps=2", "training.batch=4",
    "training.log_every=1", "training.evaluate_batches=1", "training.drop_at=1",
)  # fmt: skip
BUDGET = Budget(device="cpu", settings=TINY)


def here(commands: dict[str, list[str]], jobs: int, told: Any) -> Any:
    """What run_all does, in this process."""
    for name, (_, task, *arguments) in commands.items():
        out = Path(arguments[arguments.index("--out") + 1])
        settings = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
        told(name, "begins")
        try:
            start(task, out, settings, resume=True, device="cpu", console=Console(quiet=True))
            yield name, 0, "done"
        except (TypeError, ValueError) as error:
            yield name, 1, str(error)


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=160, quiet=False)


def test_rows_are_run_once_and_stand_beside_the_published_ones(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    monkeypatch.setenv("SUBQUAD_COMMIT", "abc")
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear", "softmax"))
    assert list(found["results"]) == ["linear", "softmax"]
    assert found["commit"] == "abc"
    assert json.loads((tmp_path / "copy" / "linear" / "config.json").read_text())["commit"] == "abc"
    row = found["results"]["linear"]
    assert row["value"] == row["test"]["bits/symbol"] > 0
    assert (row["steps"], row["steps_wanted"], row["cut_short_by_time"]) == (2, 2, False)
    assert [step for step, _ in row["curve"]] == [1, 2]
    assert row["warm_up_counted"]  # two updates are not enough
    assert row["examples_per_second"] == row["examples_per_second_overall"]
    assert json.loads((tmp_path / "copy" / "results.json").read_text())["results"]["linear"]["value"] == row["value"]
    assert (tmp_path / "copy" / "copy.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(
        module, "run_all", lambda commands, *_: iter(()) if not commands else pytest.fail(str(commands))
    )
    again = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert again["results"] == found["results"]  # of both: what was done stays
    assert "linear: done before" in console.export_text(clear=False)
    other = reproduce(
        "copy", tmp_path, console, Budget(device="cpu", settings=(*TINY, "training.lr=1e-2")), rows=("linear",)
    )
    assert other["results"]["linear"]["value"] == row["value"]
    assert "training.lr is 0.01, was 0.001" in console.export_text()

    console.print(beside(found))
    shown = console.export_text()
    assert "linear" in shown
    assert "bits/symbol" in shown
    assert "what differs: hardware: cpu" in shown
    assert "warm-up counted" in " ".join(shown.split())
    copy_to(found, tmp_path / "results" / "copy.json")
    assert (tmp_path / "results" / "copy.png").exists()
    html = report([tmp_path / "copy"]).html.read_text()
    assert "bits/symbol" in html
    assert "not run" not in html


def test_published_figures_stand_there_without_ours_too(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert found["published"] == {}  # the paper shows curves
    found["published"] = {"linear": 1.25, "other": 2.5}
    copy_to(found, tmp_path / "copy" / "results.json")
    console.export_text()
    console.print(beside(found))
    lines = [line.split() for line in console.export_text().splitlines() if "not run" in line]
    assert lines == [["other", "not", "run", "2.5"]]
    html = report([tmp_path / "copy"]).html.read_text()
    assert html.count("not run") == 1
    assert "2.5" in html


def test_speed_is_the_median_of_what_came_after_the_warm_up(tmp_path: Path) -> None:
    (row,) = choose(TABLES["copy"], ["linear"])
    start("copy", tmp_path, [*TINY, 'model.mechanism="linear"'], device="cpu", console=Console(quiet=True))
    rates = (None, 7.0, 100.0, 120.0, 3000.0, 110.0)
    lines = [{"step": n, "split": "train", "loss": 1.0, "examples_per_second": r} for n, r in enumerate(rates, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = gather(TABLES["copy"], row, tmp_path)
    assert found["examples_per_second"] == 110.0
    assert not found["warm_up_counted"]
    assert found["seconds_per_epoch"] * found["epochs"] == pytest.approx(2 * 4 / 110.0)  # two updates of four examples
    assert found["seconds"] == json.loads((tmp_path / "result.json").read_text())["seconds"]


def test_a_failed_row_says_why_and_costs_no_other(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("lstm", "linear"))  # an LSTM has no heads=2
    assert "heads" in found["results"]["lstm"]["error"]
    assert found["results"]["linear"]["value"] > 0
    console.print(beside(found))
    assert "failed" in console.export_text()


def test_the_scaling_test_goes_on_where_it_stopped(tmp_path: Path, console: Console) -> None:
    tiny = ("tokens=64", "dim=16", "heads=2", "samples=1", "lengths=[32, 64]")
    budget = Budget(device="cpu", settings=tiny)
    first = reproduce("scaling", tmp_path, console, budget, rows=("linear",))
    assert [row["length"] for row in first["rows"]] == [32, 64]
    both = reproduce("scaling", tmp_path, console, budget, rows=("linear", "lstm"))
    assert both["rows"][:2] == first["rows"]
    assert both["results"]["lstm"]["longest"] == 64
    with pytest.raises(ValueError, match="tokens"):
        reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=("depth=3",)))


def test_contexts_are_those_of_a_trained_model(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0)).tolist()))
    monkeypatch.setattr(module, "run_all", here)
    small = (
        f"data.set={text}", "data.length=64", 'model.mechanism=["fixed", {"block": 8, "summary": 2}]', "model.dim=16",
        "model.depth=1", "model.heads=2", "training.steps=1", "training.batch=2", "training.micro_batch=2",
    )  # fmt: skip
    budget = Budget(device="cpu", settings=small)
    found = reproduce("context", tmp_path, console, budget, rows=("6,144", "9,216"))
    assert [row["context"] for row in found["results"].values()] == [32, 48]
    assert all(row["bytes"] == 199 - 64 for row in found["results"].values())
    assert found["results"]["6,144"]["data"] == "text.txt"
    console.print(beside(found))
    assert "0.9952" in console.export_text()


def test_a_budget_becomes_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.tasks.rows.available", lambda name: name)  # as on a machine with a GPU
    table = TABLES["mnist"]
    (row,) = choose(table, ["reformer-1"])
    budget = Budget(minutes=7, leg=2.5, device="cuda", settings=("training.lr=1e-4",))
    command = command_of(table, row, budget, tmp_path)
    assert command[:2] == ["train", "images"]
    assert command[command.index("--leg") + 1] == "2.5"
    assert 'model.mechanism=["reformer", {"rounds": 1, "chunk": 29, "buckets": 64}]' in command
    assert command.index("training.minutes=7") < command.index("training.lr=1e-4")
    assert "training.compile=true" in command
    on_cpu = command_of(table, row, Budget(minutes=7, device="cpu"), tmp_path)
    assert "training.compile=true" not in on_cpu  # what pays on a GPU only


def test_wrong_names_are_one_line() -> None:
    run = CliRunner(env={"COLUMNS": "160"})
    result = run.invoke(app, ["reproduce", "mnits"])
    assert result.exit_code == 2
    assert "did you mean 'mnist'" in result.output
    result = run.invoke(app, ["reproduce", "mnist", "--rows", "linear,local"])
    assert result.exit_code == 2
    assert "reformer-4" in result.output


def test_models_write_after_training(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.tasks.measured import write_samples
    from subquad.tasks.rows import Reproduction

    table = TABLES["mnist"]
    (row,) = choose(table, ["linear"])
    place = tmp_path / "linear"
    fields = {"vocab": 257, "mixture": 10, "max_length": 16, "dim": 16, "depth": 1, "heads": 2, "mechanism": "linear"}
    LanguageModel(**fields).save(place / "model")
    (place / "result.json").write_text("{}")
    results: dict[str, Any] = {
        "results": {"linear": {"value": 1.0}},
        "pictures": [],
        "rows": [],
        "machine": {"device": "cpu"},
    }
    results |= {"title": "t", "commit": None, "metric": "bits/dim"}
    monkeypatch.setattr("subquad.tasks.figures.draw", lambda *_: None)
    write_samples(Reproduction(table, [row], BUDGET, tmp_path, console, results), 4)
    assert (tmp_path / "linear.png").exists()
    assert results["pictures"][0]["file"] == "linear.png"


def test_an_interruption_keeps_what_is_done_and_says_how_far_the_rest_came(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(commands: dict[str, list[str]], jobs: int, told: Any) -> Any:
        yield from here({"linear": commands["linear"]}, jobs, told)
        Folder(tmp_path / "copy" / "softmax").open(read_config(tmp_path / "copy" / "linear"), False, "cpu")
        yield "softmax", 130, "interrupted at step 1"

    monkeypatch.setattr(module, "run_all", interrupted)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear", "softmax"))
    assert found["interrupted"]
    assert found["results"]["linear"]["value"] > 0
    assert found["results"]["softmax"]["unfinished"]
    console.print(beside(found))
    assert "unfinished" in console.export_text()
