import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from subquad.cli import app
from subquad.data import digits
from subquad.report.drawing import INK, Drawing
from subquad.studies import demo as module
from subquad.studies.demo import CONTENDERS, demo
from subquad.studies.results import Comparison, from_json, to_json
from subquad.tasks.digits import MODEL, Digits
from subquad.tasks.images import Images
from subquad.tasks.write_images import write_images
from subquad.training.config import TrainingConfig
from subquad.training.train import Learned
from tests.studies.in_process import work

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SHIPPED", "a checkpoint that is not there")
    monkeypatch.setattr(module, "MODEL", {**MODEL, "dim": 16, "depth": 1})


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in place of the shipped one."""
    Digits().make_model({"depth": 1, "dim": 8, "heads": 1}).save(tmp_path / "shipped")
    monkeypatch.setattr(module, "SHIPPED", str(tmp_path / "shipped"))
    return tmp_path / "shipped"


def beginning(out: Path, fresh: bool = False, **how: Any) -> tuple[str, dict[str, Any] | None]:
    """What the first stage prints, and what it saves."""
    out.mkdir(exist_ok=True)
    file = io.StringIO()
    found = module._shipped(out, Console(file=file, width=80, **how), Drawing, fresh)
    return file.getvalue(), found


def small(out: Path, steps: int = 8, fresh: bool = False, console: Console = QUIET) -> dict[str, Any]:
    results = demo(
        out, console, Drawing, steps=steps, writing=3, lengths=(16, 32), contenders=("linear", "softmax"), count=16,
        fresh=fresh, work=work,
    )  # fmt: skip
    data: dict[str, Any] = to_json(results)
    return data


def test_the_demo_writes_learns_measures_and_saves(tmp_path: Path, shipped: Path) -> None:
    file = io.StringIO()
    results = small(tmp_path, console=Console(file=file, width=80))
    text = file.getvalue()
    assert text.index("shipped model") < text.index("transformers learn") < text.index("Speed: ")
    assert " ".join(results["summary"]) in " ".join(text.split())
    long = [line for line in text.splitlines() if len(line) > 80]
    assert all(str(tmp_path) in line for line in long)  # paths are not broken, so that they can be copied
    assert results["pictures"][0]["file"] == "digits_shipped.png"
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

    def learns_nothing(task: Images, fields: dict[str, Any], training: TrainingConfig, **_: Any) -> Learned:
        trained.append(fields["mechanism"][0])
        curve = [(step, 4.0) for step in range(1, training.steps + 1)]
        return Learned(task.make_model(fields), {"bits/dim": 4.0}, curve, 1.0)

    monkeypatch.setattr(module, "learn", learns_nothing)
    monkeypatch.setattr(module, "write_images", lambda _model, count, *_, **__: torch.zeros(count, 64))
    monkeypatch.setattr(module, "picture", lambda _real, _made, path, _title: path.write_bytes(b"drawn"))
    monkeypatch.setattr(module, "standard_error", lambda *_: 0.1)
    first = small(tmp_path)
    assert trained == ["linear", "softmax", "linear"]  # the last one writes
    trained.clear()
    assert small(tmp_path) == json.loads(json.dumps(first))
    assert trained == []
    (tmp_path / "digits_softmax.png").unlink()  # an incomplete stage is done again
    small(tmp_path)
    assert trained == ["softmax"]
    trained.clear()
    kept = tmp_path / "digits_linear.json"  # as an older version wrote it, without the standard error
    quality = json.loads(kept.read_text())
    del quality["quality"]["standard_error"]
    kept.write_text(json.dumps(quality))
    small(tmp_path)
    assert trained == ["linear"]
    trained[:] = ["softmax"]
    small(tmp_path, steps=9)
    assert trained == ["softmax", "linear", "softmax"]
    small(tmp_path, steps=9, fresh=True)
    assert trained == ["softmax", "linear", "softmax", "linear", "softmax", "linear"]


def test_every_contender_can_be_built_and_writes_digits() -> None:
    assert len(CONTENDERS) == 6
    assert {"linear", "softmax"} < CONTENDERS.keys()
    for name, options in CONTENDERS.items():
        model = Images("digits").make_model({**MODEL, "mechanism": (name, options)})
        assert write_images(model, 2, (8, 8, 1)).max() < digits.SHADES


def test_the_command_ends_with_tables_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(out: Path, console: Console, draw: Any, steps: int, fresh: bool) -> None:
        small(out, steps=2, fresh=fresh, console=console)

    monkeypatch.setattr(module, "demo", short)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "bits/dim" in result.output
    for begin in ("Speed: ", "Memory: ", "Quality: "):
        assert begin in result.output
    assert f"report: {tmp_path / 'report.html'}" in result.output
    assert (tmp_path / "report.html").exists()


def test_steps_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps=0"):
        demo(tmp_path, QUIET, Drawing, steps=0)


def test_the_shipped_model_writes_first(tmp_path: Path, shipped: Path) -> None:
    text, found = beginning(tmp_path)
    assert " ".join(text.split()).startswith(f"the shipped model {shipped} writes new digits")
    drawn = [line for line in text.splitlines() if len(line) == 6 * 4 + 5 * 2]  # without their borders
    assert len(drawn) == 2
    assert all(set(line) <= set(INK) for line in drawn)
    assert any(line.strip() for line in drawn)
    assert found is not None
    images = torch.tensor(found["images"])
    assert images.shape == (6, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    png = tmp_path / found["picture"]["file"]
    assert png.read_bytes().startswith(b"\x89PNG")
    png.write_bytes(b"kept")
    text, again = beginning(tmp_path)
    assert "in an earlier run" in " ".join(text.split())
    assert [line for line in text.splitlines() if line in drawn] == drawn
    assert again == json.loads(json.dumps(found))
    assert png.read_bytes() == b"kept"
    beginning(tmp_path, fresh=True)
    assert png.read_bytes() != b"kept"


def test_in_a_terminal_digits_appear_as_they_are_written(tmp_path: Path, shipped: Path) -> None:
    text, _ = beginning(tmp_path, force_terminal=True, color_system="truecolor")
    assert text.count("\u2580") > 8 * 6 * 4 * 2  # once a row of pixels


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_without_the_shipped_model_the_demo_says_so_and_goes_on(tmp_path: Path, shipped: Path, what: str) -> None:
    weights = shipped / "model.safetensors"
    weights.write_bytes(b"broken") if what == "broken" else weights.unlink()
    text, found = beginning(tmp_path)
    assert "cannot write the first digits" in " ".join(text.split())
    assert found is None


def test_an_interrupt_leaves_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Learned:
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(module, "learn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_length_shows_who_is_fastest_there() -> None:
    def row(name: str, length: int, ratio: float) -> dict[str, Any]:
        spread = {"median": ratio, "low": ratio, "high": ratio}
        more = {"peak_bytes": 10**6, "decode_ms": spread, "state_bytes": 1000}
        return {"mechanism": name, "length": length, "training_ratio": spread, **more}

    rows = [row("softmax", 512, 1.0), row("softmax", 2048, 1.0), row("linear", 512, 1.5), row("linear", 2048, 0.25)]
    crossovers = [{"mechanism": "softmax", "training": None}, {"mechanism": "linear", "training": 700}]
    file = io.StringIO()
    results = {"rows": rows, "crossovers": crossovers, "settings": {"lengths": [512, 2048]}}
    Console(file=file, width=80).print(module._lengths_table(from_json(Comparison, results, "")))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["linear", "1.50", "0.25*", "700", "1", "MB", "250", "µs", "1", "kB"] in lines
    assert ["softmax", "1.00*", "1.00", "1", "MB", "1", "ms", "1", "kB"] in lines
