"""Kill real processes at any moment and check what is left of their runs."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from subquad.training import checkpoints
from tests.training.tiny import assert_same_run, curve, elsewhere, start

SETTINGS = {"steps": 60, "evaluate_every": 7, "checkpoint_every": 2, "log_every": 3, "ema": 0.9, "warmup": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    process = start(elsewhere, out, False, SETTINGS)
    process.join(120)
    assert process.exitcode == 0
    return out


def _file(out: Path) -> int | None:
    """An id of metrics.jsonl, which every start of a run replaces."""
    return (out / "metrics.jsonl").stat().st_ino if (out / "metrics.jsonl").exists() else None


def _wait_until_begun(out: Path, before: int | None) -> None:
    end = time.monotonic() + 60
    while _file(out) in (None, before) or not (out / "metrics.jsonl").read_bytes():
        assert time.monotonic() < end, "the run says nothing"
        time.sleep(0.002)


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_at_any_moment_and_resume_gives_the_same_curve(tmp_path: Path, whole: Path, seed: int) -> None:
    """The resumed run gives the same curve, whatever moment of an update, evaluation or checkpoint is hit."""
    chance = random.Random(seed)
    kills = 0
    while not (tmp_path / "run" / "result.json").exists():
        before = _file(tmp_path / "run")
        process = start(elsewhere, tmp_path / "run", True, SETTINGS)
        if kills < 4:
            _wait_until_begun(tmp_path / "run", before)
            time.sleep(chance.uniform(0, 0.3))
            process.kill()
            kills += 1
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
        for path in checkpoints.names(tmp_path / "run" / "checkpoints"):
            checkpoints.read(path)  # a directory with the name of a checkpoint is complete
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_makes_a_run_save_and_say_so(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    process = start(elsewhere, tmp_path, False, {**SETTINGS, "checkpoint_every": 50})
    _wait_until_begun(tmp_path, None)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    found, damaged = checkpoints.newest(tmp_path / "checkpoints")
    assert found is not None
    assert not damaged
    seen = max(line["step"] for line in curve(tmp_path))
    assert found.step >= seen
    last = start(elsewhere, tmp_path, True, SETTINGS)
    last.join(120)
    assert last.exitcode == 0
    assert_same_run(tmp_path, whole)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 60
