from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from subquad.cli import app
from subquad.machine import available


def test_available_and_missing_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available("cpu") == "cpu"
    for wrong in ("tpu", "meta", ""):
        with pytest.raises(ValueError, match='accepted is "cpu" or "cuda"'):
            available(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available("auto") == "cpu"
    with pytest.raises(ValueError, match="device='cuda' cannot work: accepted is \"cpu\" here: torch finds no GPU"):
        available("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert available("auto") == available("cuda") == "cuda"
    assert available("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match='"cuda:0" to "cuda:1"'):
        available("cuda:2")


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--mechanisms", "linear", "--lengths", "16"],
        ["train", "copy"],
        ["reproduce", "copy"],
        ["lra", "--tasks", "listops", "--mechanisms", "linear"],
        ["lra", "--efficiency", "--mechanisms", "linear"],
        ["bench", "generation", "--mechanisms", "linear"],
    ],
)
def test_every_command_says_that_there_is_no_gpu(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out.json"  # a folder or a file, depending on the command
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--device", "cuda", "--out", str(out)])
    assert result.exit_code in (1, 2)
    assert "torch finds no GPU" in result.output
    assert not isinstance(result.exception, AssertionError)
