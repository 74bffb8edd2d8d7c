import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from subquad import tasks
from subquad.cli import app
from subquad.models import LanguageModel
from subquad.studies.reproduce.row import Budget, settings_of, state_of
from subquad.studies.reproduce.tables import TABLES
from subquad.tasks.configure import configure
from subquad.training.config import TrainingConfig
from tests.training.tiny import Tiny

SMALL = ["--set", "training.steps=4", "--set", "model.depth=1", "--set", "model.dim=16"]


def _train(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "run"
    done = _train("digits", "--out", out, "--mechanism", "softmax", *SMALL)
    assert done.exit_code == 0, done.output
    return out


def test_a_command_trains_and_its_model_writes(whole: Path, tmp_path: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["model"] == {"mechanism": "softmax", "depth": 1, "dim": 16}
    assert config["training"]["steps"] == 4
    assert json.loads((whole / "result.json").read_text())["test"]["bits/dim"] < 4.5
    assert LanguageModel.load(whole / "model").config.transformer.mechanism[0].name == "softmax"
    arguments = ["generate", str(whole / "model"), "--count", "1", "--out", str(tmp_path / "x.png")]
    written = CliRunner().invoke(app, arguments)
    assert written.exit_code == 0, written.output
    assert (tmp_path / "x.png").exists()


def test_a_run_is_not_overwritten_and_resumes_with_its_own_settings(whole: Path) -> None:
    again = _train("digits", "--out", whole)
    assert again.exit_code == 2
    assert "holds a run" in again.stderr
    assert _train("digits", "--out", whole, "--resume").exit_code == 0  # settings need not be repeated
    other = _train("digits", "--out", whole, "--resume", "--set", "training.lr=1.0", "--mechanism", "linear")
    assert other.exit_code == 2
    assert 'model.mechanism is "linear", was "softmax"' in other.stderr
    assert "training.lr is 1.0, was 0.003" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digitz"], "did you mean 'digits'"),
        (["digits", "--set", "model.dept=1"], "did you mean 'depth'"),
        (["digits", "--set", "training.lrr=1"], "did you mean 'lr'"),
        (["digits", "--set", "data.length=1"], "data has no setting 'length'"),
        (["digits", "--set", "depth=1"], "Accepted: data.KEY=VALUE"),
        (["digits", "--minutes", "-1"], "minutes=-1.0 cannot work"),
        (["digits", "--mechanism", "softmaxx"], "softmax"),
    ],
)
def test_what_cannot_work_is_one_line_and_no_folder(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = _train(*arguments, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Tiny):
    """A task whose model depends on its data, and which has a required setting."""

    path: str
    size: int = 4
    parts: tuple[int, ...] = (1, 2)

    @property
    def model(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {"dim": 4 * self.size}

    training: ClassVar[TrainingConfig] = TrainingConfig(steps=3)


def test_a_model_may_depend_on_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "sized", Sized)
    task, config = configure("sized", ["data.path=x", "data.size=8", "data.parts=[3]", "model.depth=2"])
    assert config.model == {"dim": 32, "depth": 2}
    assert task == Sized(path="x", size=8, parts=(3,))
    with pytest.raises(ValueError, match=r"data\.size='big' cannot work: accepted is an integer"):
        configure("sized", ["data.path=x", "data.size=big"])
    with pytest.raises(ValueError, match=r"data\.path=None cannot work"):
        configure("sized", [])


def test_a_resumed_run_is_of_the_same_task(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "sized", Sized)
    done = _train("sized", "--out", whole, "--resume")
    assert done.exit_code == 2
    assert "holds a run of 'digits', not of 'sized'" in done.stderr


def test_interrupted_is_130(tmp_path: Path) -> None:
    """A real command and a real Ctrl-C."""
    command = [sys.executable, "-m", "subquad.cli", "train", "digits", "--out", str(tmp_path / "run")]
    command += ["--set", "training.steps=100000", "--set", "training.evaluate_every=1", "--set", "model.dim=16"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(2)
            break
    rest = process.stdout.read()
    assert process.wait(60) == 130
    assert "saved: --resume continues" in rest
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_warm_up_that_was_not_set_follows_the_steps(tmp_path: Path) -> None:
    def warmup(*settings: str, task: str = "text", begun: Path | None = None) -> int:
        return configure(task, settings, begun)[1].training.warmup

    assert warmup("training.steps=200") == 20
    assert warmup("training.steps=3") == 1
    assert warmup("training.steps=100000") == 200  # the task's own is enough
    assert warmup("training.steps=200", "training.warmup=150") == 150
    assert warmup("training.steps=200", task="copy") == 0  # its own warm-up is 0
    for name, task in tasks.TASKS.items():
        assert task.training.warmup <= task.training.steps // 10, name  # so runs of full length do not change
    older = configure("text", ["training.steps=200", "training.warmup=200"])[1]
    (tmp_path / "config.json").write_text(older.to_json())
    assert warmup(begun=tmp_path) == warmup("training.steps=200", begun=tmp_path) == 200


def test_a_published_tables_warm_up_stays(tmp_path: Path) -> None:
    """Also with few steps, so that rows which were started before can resume."""
    table = TABLES["speech"]
    budget = Budget(settings=("training.steps=300",), device="cpu")
    (row,) = (row for row in table.rows if row.name == "linear")
    _, config = configure(table.task, settings_of(table, row, budget))
    assert config.training.warmup == tasks.TASKS["speech"].training.warmup == 500
    (tmp_path / "config.json").write_text(config.to_json())
    assert state_of(table, row, budget, tmp_path) == ("run", "")


def test_a_run_that_was_all_warm_up_says_so(tmp_path: Path) -> None:
    done = _train("digits", "--out", tmp_path / "run", "--set", "training.warmup=10", *SMALL)
    assert done.exit_code == 0, done.output
    assert "all 4 steps were warm-up, which takes 10" in done.output


def test_ones_own_file_is_in_the_help() -> None:
    shown = " ".join(CliRunner().invoke(app, ["train", "text", "--help"]).output.split())
    assert "subquad train text --data my.txt" in shown
