"""What the guides show is what the code does."""

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from subquad.cli import app
from subquad.tasks.configure import configure

GUIDES = Path(__file__).parents[1] / "guides"
NAMES = sorted(path.name for path in GUIDES.glob("*.md"))
SMALLER = (
    "training.steps=60", "training.batch=4", "training.lr=1e-2", "data.length=32", "model.dim=16", "model.depth=1",
    "model.heads=2",
)  # fmt: skip


def blocks(name: str, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", (GUIDES / name).read_text(), re.DOTALL)
    assert found
    return found


def commands(name: str) -> list[list[str]]:
    lines = [shlex.split(line) for block in blocks(name, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [words[1:] for words in lines if words[0] == "subquad"]


def run(sources: list[str], name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, name, "exec"), names)
    return names


def settings_of(words: list[str]) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == "--set"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_one(name: str) -> None:
    """Options are parsed as they are when typed, and settings are those of the task."""
    group: Any = typer.main.get_command(app)
    for command, *words in commands(name):
        group.commands[command].make_context(command, list(words))
        if command == "train":
            task, config = configure(words[0], settings_of(words))
            with torch.device("meta"):
                task.make_model(config.model)


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's commands in their order, with a smaller model, then what it does from Python."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("The sea was grey and the ships lay still. " * 60)
    for command, *words in commands("own_text.md"):
        if command == "train" and "--resume" not in words:
            words += [word for setting in SMALLER for word in ("--set", setting)]
        if command == "generate":
            words += ["--steps", "20"]
        done = CliRunner().invoke(app, [command, *words])
        assert done.exit_code == 0, done.output
    names = run(blocks("own_text.md", "python"), "own_text.md")
    without = names["model"].generate(names["first"].tokens[:, -2:-1], 40, seed=1, state=names["first"].state)
    assert not torch.equal(without, names["rest"])  # the last token makes a difference


def test_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run([source for source in blocks("own_model.md", "python") if "lightning" not in source], "own_model.md")
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["written"].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4]]
    assert names["z"].shape == (2, 30, 64)


class StandIn(types.ModuleType):
    """As much of Lightning as the guide uses."""

    LightningModule = nn.Module

    class Trainer:
        def __init__(self, max_epochs: int, **_: Any):
            self.epochs = max_epochs

        def fit(self, module: Any, loader: Any) -> None:
            optimiser = module.configure_optimizers()
            for _ in range(self.epochs):
                for index, batch in enumerate(loader):
                    optimiser.zero_grad()
                    module.training_step(batch, index).backward()
                    optimiser.step()


@pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders with few workers, and of its own dependencies
@pytest.mark.parametrize("real", [False, True])
def test_lightning(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if real:
        pytest.importorskip("lightning", reason="Lightning is not a dependency; the guide also runs with a stand-in")
    else:
        monkeypatch.setitem(sys.modules, "lightning", StandIn("lightning"))
    monkeypatch.chdir(tmp_path)
    sources = blocks("own_model.md", "python")
    wanted = [source for source in sources if source.startswith("import ") or "def batch" in source]
    names = run([source.replace("range(60)", "range(1)") for source in wanted], "own_model.md")
    assert names["after"] < 0.5 * names["before"]
