"""The process that trains: one run after the other, as the harness tells it, several of these side by side on one GPU.

Reads a job a line from standard input and writes what came of it a line to standard output, both JSON. When standard
input closes, nobody waits any more, and it ends.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console

from subquad.measure.cost import first_line
from subquad.pool import end_with
from subquad.training.config import TrainingConfig
from subquad.training.log import curve, logged
from subquad.training.loop import Result
from subquad.training.train import train

Json = dict[str, Any]


def run(job: Json, device: str) -> Json:
    """The figures of one run, or why there are none; nothing is raised but interruptions."""
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.device(device).type == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with (folder / "log.txt").open("a") as file:
        console = Console(file=file, width=160)
        for compile, capture in _ways(job, cuda):
            try:
                trained = _trained(job, device, compile, capture, console)
                return {"result": {**_figures(trained), "curve": curve(logged(folder), "accuracy")}}
            except Exception as error:
                said = f"{type(error).__name__}: {first_line(error)}"
                if not compile and not (capture and isinstance(error, ValueError) and "training.capture" in str(error)):
                    break
                console.print(f"{'not compiled' if compile else 'without a graph'}: {said}", markup=False)
        return {"error": said}


def _ways(job: Json, cuda: bool) -> Iterator[tuple[bool, bool]]:
    """(compile, capture), the fastest first; what a mechanism cannot is left out."""
    capture = cuda and job["capture"]
    if job["compile"]:
        yield True, capture
    yield False, capture
    if capture:
        yield False, False


def _trained(job: Json, device: str, compile: bool, capture: bool, console: Console) -> Result:
    from subquad.tasks import TASKS

    task = TASKS[job["task"]].from_options(job["data"])
    faster = {"compile": compile, "capture": capture}
    training = TrainingConfig.from_dict({**task.training.to_dict(), **job["training"], **faster})
    return train(
        task, training, job["model"], job["folder"], resume=True, device=device, console=console, leg=job["leg"]
    )  # fmt: skip


def _figures(result: Result) -> Json:
    return {
        "accuracy": result.test.get("accuracy"),
        "loss": result.test.get("loss"),
        "validation": result.validation.get("accuracy"),
        "best_step": result.best_step,
        "steps": result.steps,
        "ended_by": result.ended_by,
        "seconds": result.seconds,
        "peak_bytes": result.peak_bytes,
        "parameters": result.parameters,
        "examples_per_second": result.examples_per_second,
    }


def serve(jobs: IO[str], answers: IO[str]) -> None:
    first = json.loads(jobs.readline())
    torch.set_num_threads(first["threads"])
    for line in jobs:
        job = json.loads(line)
        answer = run(job, first["device"])
        try:
            answers.write(json.dumps({"name": job["name"], **answer}) + "\n")
            answers.flush()
        except BrokenPipeError:
            break  # nobody asks any more
        if first["once"] or "CUDA error" in answer.get("error", ""):
            break  # memory of a CPU process is only ever counted up, and an error of the GPU outlives its run


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        serve(sys.stdin, answers)
    except KeyboardInterrupt:  # the run has saved, and whoever pressed Ctrl-C is told so by the harness
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
