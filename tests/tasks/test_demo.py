import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from subquad.cli import app
from subquad.data import digits
from subquad.models import LanguageModel
from subquad.tasks import demo as module
from subquad.tasks.demo import CONTENDERS, demo
from subquad.tasks.digits import generate, make_model

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def small(out: Path, steps: int = 8, fresh: bool = False, console: Console = QUIET) -> dict[str, Any]:
    return demo(
        out, console, steps=steps, writing=3, lengths=(16, 32), contenders=("linear", "softmax"), count=16, fresh=fresh,
        isolated=False,
    )  # fmt: skip


def test_the_demo_learns_writes_measures_and_saves(tmp_path: Path) -> None:
    results = small(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["kind"] == "compare"
    quality = {found["mechanism"]: found for found in results["quality"]}
    assert quality.keys() == {"linear", "softmax"}
    assert quality["linear"]["value"] < math.log2(digits.SHADES)
    assert quality["linear"]["steps"] == quality["softmax"]["steps"] == 8
    assert quality["linear"]["state_bytes_per_image"] < quality["softmax"]["state_bytes_per_image"] * 2
    assert {(row["mechanism"], row["length"]) for row in results["rows"]} == {
        (name, n) for name in ("linear", "softmax") for n in (16, 32)
    }
    for shown in results["pictures"]:
        assert (tmp_path / shown["file"]).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model_linear" / "model.safetensors").exists()


def test_a_later_run_reuses_what_is_done_and_does_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def learns_nothing(model: LanguageModel, images: Tensor, steps: int, *rest: Any) -> list[float]:
        trained.append(model.config.transformer.mechanism[0].name)
        return [4.0] * steps

    monkeypatch.setattr(module, "train", learns_nothing)
    monkeypatch.setattr(module, "generate", lambda _model, count, **_: torch.zeros(count, 64))
    monkeypatch.setattr(module, "picture", lambda _real, _made, path, _title: path.write_bytes(b"drawn"))
    monkeypatch.setattr(module, "bits_per_dim", lambda *_: 4.0)
    first = small(tmp_path)
    assert trained == ["linear", "softmax", "linear"]  # the last one writes
    trained.clear()
    assert small(tmp_path) == json.loads(json.dumps(first))
    assert trained == []
    (tmp_path / "digits_softmax.png").unlink()  # a stage that is not whole is done again
    small(tmp_path)
    assert trained == ["softmax"]
    small(tmp_path, steps=9)
    assert trained == ["softmax", "linear", "softmax"]
    small(tmp_path, steps=9, fresh=True)
    assert trained == ["softmax", "linear", "softmax", "linear", "softmax", "linear"]


def test_every_contender_can_be_built_and_writes_digits() -> None:
    assert len(CONTENDERS) == 6
    assert {"linear", "softmax"} < CONTENDERS.keys()
    for name, options in CONTENDERS.items():
        model = make_model((name, options))
        assert generate(model, 2).max() < digits.SHADES


def test_the_command_ends_with_tables_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(out: Path, console: Console, steps: int, fresh: bool) -> None:
        small(out, steps=2, fresh=fresh, console=console)

    monkeypatch.setattr(module, "demo", short)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "bits/dim" in result.output
    assert "growth" in result.output
    assert f"report: {tmp_path / 'report.html'}" in result.output
    assert (tmp_path / "report.html").exists()


def test_steps_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps=0"):
        demo(tmp_path, QUIET, steps=0)
