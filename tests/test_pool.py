import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad import pool as processes
from subquad.pool import Died, Worker, environment, in_order, run_all

# starts a process like `subquad reproduce`, without its imports
PARENT = """
import os, subprocess, sys
subprocess.call([sys.executable, "-m", "subquad.pool", str(os.getpid()), "subquad.cli", *sys.argv[1:]])
"""
# gets numbers from two workers, and waits for the rest
ASKS = """
import threading
from subquad.pool import in_order
from tests.test_pool import square
if __name__ == "__main__":
    answers = in_order(square, range(50), 2)
    print(next(answers), flush=True)
    threading.Event().wait()
"""


def test_commands_run_in_parallel_and_report_their_output() -> None:
    lines: list[tuple[str, str]] = []
    commands = {"right": ["--version"], "wrong": ["show", "no such mechanism"]}
    found = {name: (code, last) for name, code, last in run_all(commands, 2, lambda *line: lines.append(line))}
    assert found["right"][0] == 0
    assert f"subquad {subquad.__version__}" in found["right"][1]
    assert found["wrong"][0] == 2
    assert any(name == "wrong" and "no such mechanism" in line for name, line in lines)


def test_a_killed_process_says_what_killed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed:
        def __init__(self, name: str, *_: Any) -> None:
            self.name, self.last_line = name, "step 400: validation 3.4"

        def ended(self) -> int:
            return -signal.SIGKILL

    monkeypatch.setattr(processes, "Process", Killed)
    assert list(run_all({"row": []}, 1, lambda *_: None)) == [
        ("row", -9, "killed by signal 9 (Killed, often because memory ran out)")
    ]


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("tests.answering", {"name": "here"}, {})

    def kill() -> None:
        if worker.process is not None:
            worker.process.kill()

    watchdog = threading.Timer(120, kill)  # so that it fails instead of hanging
    watchdog.start()
    yield worker
    watchdog.cancel()
    worker.close(patience=0)


def test_a_worker_answers_job_after_job_in_one_process(worker: Worker) -> None:
    answers = [worker.ask({"do": "answer"}) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["setup"] == "here"
    assert worker.ask({"do": "last"}) == answers[0]  # it ends after this, and the next job gets another process
    assert worker.ask({"do": "answer"})["process"] != answers[0]["process"]
    assert worker.close() == 0


def test_a_worker_that_is_killed_is_named_and_followed_by_another(worker: Worker) -> None:
    with pytest.raises(Died, match=r"killed by signal 9 \(Killed, often because memory ran out\)"):
        worker.ask({"do": "die"})
    assert worker.ask({"do": "answer"})["setup"] == "here"


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_worker_that_is_interrupted_ends(worker: Worker, before: Any) -> None:
    handler = signal.signal(signal.SIGINT, before)  # a shell ignores it in background jobs, and children inherit that
    try:
        worker.ask({"do": "answer"})
    finally:
        signal.signal(signal.SIGINT, handler)
    threading.Timer(0.5, worker.interrupt).start()
    with pytest.raises(Died, match="exit code 130"):
        worker.ask({"do": "sleep"})


def test_a_process_saves_and_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    tiny = (
        "data.length=24", "model.dim=16", "model.depth=1", "model.heads=2", "training.batch=4",
        "training.steps=1000000", "training.log_every=1",
    )  # fmt: skip
    words = ["train", "copy", "--out", str(tmp_path), "--device", "cpu"]
    words += [word for setting in tiny for word in ("--set", setting)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment(), "COLUMNS": "200"},
    )  # fmt: skip
    assert parent.stdout is not None
    with parent.stdout:
        said = next((line for line in parent.stdout if "1,000,000 steps" in line), "")  # it trains
        parent.kill()
        parent.wait()
        rest = parent.stdout.read()  # until the process, which holds the other end, has ended
    assert said
    assert "saved: --resume continues" in rest
    assert list(tmp_path.glob("checkpoints/step_*"))


def square(number: int) -> int:
    return number * number


def test_processes_answer_in_order_and_may_be_stopped() -> None:
    assert list(in_order(square, range(5), 1)) == [0, 1, 4, 9, 16]
    if os.cpu_count():
        answers = in_order(square, range(50), 2)
        assert [next(answers) for _ in range(3)] == [0, 1, 4]
        answers.close()  # type: ignore[attr-defined]


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    path = os.pathsep.join((str(Path(__file__).parents[1]), environment()["PYTHONPATH"]))
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "asks.py")], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"0\n"
        parent.kill()
        parent.communicate(timeout=120)  # until the workers, which hold the other end too, have ended
