import io
import json
import math
from pathlib import Path

from rich.console import Console

from subquad.training.log import METRICS, Log, Meter, duration, forget


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / METRICS).read_text().splitlines()]


def test_what_was_logged_after_a_checkpoint_is_forgotten(tmp_path: Path) -> None:
    with Log(tmp_path, Console(quiet=True), "run") as log:
        for step in (2, 4, 6):
            log.write(step, "train", {"loss": float(step)})
        log.write(6, "test", {"loss": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 7, "sp')  # the process died in the middle of a line
    with Log(tmp_path, Console(quiet=True), "run", step=4) as log:
        log.write(5, "train", {"loss": 5.0})
    assert [line["step"] for line in _lines(tmp_path)] == [2, 4, 5]
    forget(tmp_path / "nothing", 3)
    assert not (tmp_path / "nothing").exists()


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    with Log(tmp_path, Console(quiet=True), "run") as log:
        log.write(1, "validation", {"accuracy": math.nan, "loss": math.inf, "count": 3})
    assert _lines(tmp_path) == [{"step": 1, "split": "validation", "accuracy": None, "loss": None, "count": 3}]


def test_a_bar_in_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with Log(tmp_path, Console(file=out, force_terminal=True, width=100), "digits") as log:
        log.tick(5, 0.5)
        log.show("loss 1.2, 100 tokens/s, 0.1 GiB, 0:07 left")
        log.say("[step 5] as it is")
    assert "0:07 left" in out.getvalue()
    assert "step 5" in out.getvalue()
    assert "[step 5] as it is" in out.getvalue()


def test_other_ranks_say_nothing() -> None:
    out = io.StringIO()
    with Log(None, Console(file=out), "run") as log:
        log.write(1, "train", {"loss": 1.0})
        log.say("x")
        log.tick(1, 0.1)
        log.show("y")
        log.sync()
    assert out.getvalue() == ""


def test_durations_are_read_by_people() -> None:
    assert [duration(seconds) for seconds in (7, 67, 3667, math.nan)] == ["0:07", "1:07", "1:01:07", "-"]


def test_a_meter_does_not_count_what_lies_between_updates() -> None:
    meter = Meter(10)
    meter.begun -= 5
    with meter.paused():
        meter.begun -= 0
    rate = meter.read(20)
    assert 0 < rate <= 2
    assert meter.step == 20
