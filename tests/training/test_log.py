import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from subquad.training.history import CHECK, METRICS, restore
from subquad.training.log import WARMUP, Log, Meter, duration


def _lines(path: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (path / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != CHECK} for line in lines]


def test_lines_after_the_checkpoint_are_deleted(tmp_path: Path) -> None:
    with Log(tmp_path, Console(quiet=True), "run") as log:
        for step in (2, 4, 6):
            log.write(step, "train", {"loss": float(step)})
        log.write(6, "test", {"loss": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 7, "sp')  # the process died in the middle of a line
    with Log(tmp_path, Console(quiet=True), "run", step=4) as log:
        log.write(5, "train", {"loss": 5.0})
    assert [line["step"] for line in _lines(tmp_path)] == [2, 4, 5]
    assert restore(tmp_path / "nothing", 3) == ("", "")
    assert not (tmp_path / "nothing").exists()


def test_tensorboard_has_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # files of the same second are read in the order of their names, where 10 comes before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Log(tmp_path, Console(quiet=True), "run") as log:
        for step in (2, 4, 6):
            log.write(step, "train", {"loss": step / 2, "none": math.nan})
    with Log(tmp_path, Console(quiet=True), "run", step=4) as log:
        log.write(5, "train", {"loss": 2.5})
        log.write(5, "validation", {"accuracy": 50.0})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [(2, 1.0), (4, 2.0), (5, 2.5)]
    assert [point.value for point in board.Scalars("validation/accuracy")] == [50.0]


def test_without_tensorboard_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr("subquad.training.log._MISSED", set())
    out = io.StringIO()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with Log(tmp_path / name, Console(file=out, width=200), "run") as log:
            log.write(1, "train", {"loss": 1.0})
    assert out.getvalue().count("tensorboard is not installed") == 1
    assert _lines(tmp_path / "b") == [{"step": 1, "split": "train", "loss": 1.0}]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    with Log(tmp_path, Console(quiet=True), "run") as log:
        log.write(1, "validation", {"accuracy": math.nan, "loss": math.inf, "count": 3})
    assert _lines(tmp_path) == [{"step": 1, "split": "validation", "accuracy": None, "loss": None, "count": 3}]


def test_a_bar_in_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with Log(tmp_path, Console(file=out, force_terminal=True, width=100), "digits") as log:
        log.tick(5, 0.5)
        log.show(5, "loss 1.2, 100 tokens/s, 0.1 GiB, 0:07 left")
        log.say("[step 5] as it is")
    assert "0:07 left" in out.getvalue()
    assert "step 5" in out.getvalue()
    assert "[step 5] as it is" in out.getvalue()


def test_without_a_terminal_a_line_is_printed_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [1000.0]
    monkeypatch.setattr("subquad.training.log.time.monotonic", lambda: now[0])
    with Log(tmp_path, Console(file=out, width=100), "digits") as log:
        log.say("begun")
        for step, seconds in ((20, 30.0), (40, 70.0), (60, 90.0), (80, 140.0)):
            now[0] = 1000.0 + seconds
            log.show(step, f"loss of {step}")
    assert [line for line in out.getvalue().splitlines() if "loss" in line] == [
        "step 40: loss of 40",
        "step 80: loss of 80",
    ]


def test_other_ranks_print_nothing() -> None:
    out = io.StringIO()
    with Log(None, Console(file=out), "run") as log:
        log.write(1, "train", {"loss": 1.0})
        log.say("x")
        log.tick(1, 0.1)
        log.show(1, "y")
        log.sync()
    assert out.getvalue() == ""


def test_durations_are_read_by_people() -> None:
    assert [duration(seconds) for seconds in (7, 67, 3667, math.nan)] == ["0:07", "1:07", "1:01:07", "-"]


def test_a_meter_counts_neither_the_first_updates_nor_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("subquad.training.log.time.perf_counter", lambda: now[0])
    meter = Meter(30)
    assert meter.warm == 30 + WARMUP
    counted = [meter.counts]
    now[0] += 50  # of compiling
    assert meter.read(35) == pytest.approx(5 / 50)
    counted.append(meter.counts)
    now[0] += 5
    meter.restart(40)
    now[0] += 2
    with meter.paused():
        now[0] += 1000
    now[0] += 3
    assert [*counted, meter.counts] == [False, False, True]
    assert meter.read(60) == pytest.approx(20 / 5)
    now[0] += 2
    assert meter.read(64) == pytest.approx(2)
