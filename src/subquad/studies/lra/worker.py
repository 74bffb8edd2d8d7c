"""The process that trains runs of the arena, one after the other; several of them share a GPU."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from subquad.measure.cost import first_line
from subquad.pool import serve
from subquad.tasks import TASKS
from subquad.tasks.lra.fill import INNER, Fill, look
from subquad.tasks.lra.task import Picture
from subquad.training.config import TrainingConfig
from subquad.training.log import curve, logged
from subquad.training.loop import Result
from subquad.training.train import train

Json = dict[str, Any]
LOOK = "filled.png"  # in the folder of a pretraining on pictures
LEAST = 1.0  # seconds of a phase, however little time is left


def run(job: Json, device: str) -> Json:
    """The figures of one run, or the error that ended it. Raises only interruptions."""
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
                return {"result": _trained(job, device, compile, capture, console)}
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                if not compile and not (capture and isinstance(error, ValueError) and "training.capture" in str(error)):
                    break
                console.print(f"{'not compiled' if compile else 'without a graph'}: {reason}", markup=False)
        return {"error": reason}


def _ways(job: Json, cuda: bool) -> Iterator[tuple[bool, bool]]:
    """(compile, capture) pairs, the fastest first: the next one is tried if a mechanism does not support this one."""
    capture = cuda and job["capture"]
    if job["compile"]:
        yield True, capture
    yield False, capture
    if capture:
        yield False, False


def _trained(job: Json, device: str, compile: bool, capture: bool, console: Console) -> Json:
    """Train both phases of a run, or as much as there is time for; returns its figures."""
    folder, faster = Path(job["folder"]), {"compile": compile, "capture": capture}
    given = {**job["training"], **faster}
    deadline = None if job["leg"] is None else time.monotonic() + 60 * job["leg"]

    def phase(name: str, data: Json, training: Json, place: Path) -> Result:
        task = TASKS[name].from_options(data)
        config = TrainingConfig.from_dict({**task.training.to_dict(), **training})
        leg = None if deadline is None else max(LEAST, deadline - time.monotonic()) / 60
        return train(task, config, job["model"], place, resume=True, device=device, console=console, leg=leg)

    if "pretraining" not in job:
        return _figures(phase(job["task"], job["data"], given, folder), folder)
    before, place = job["pretraining"], folder / "pretraining"
    filled = phase(Fill.name, before["data"], {**before["training"], **faster}, place)
    measures = filled.test or filled.validation
    known = {"steps": filled.steps, "seconds": filled.seconds, "ended_by": filled.ended_by}
    known |= {name: measures[name] for name in ("loss", "right") if name in measures}
    known["way"] = Fill.from_options(before["data"]).way(bool(job["model"].get("causal")))
    if filled.ended_by == "leg" or (deadline is not None and deadline - time.monotonic() < LEAST):
        return {"ended_by": "leg", "steps": 0, "pretraining": known}
    if issubclass(INNER[job["task"]], Picture) and not (place / LOOK).is_file():
        look(place, place / LOOK, device=device)
    result = phase(job["task"], job["data"], {**given, "start": str(place)}, folder)
    return {**_figures(result, folder), "pretraining": known}


def _figures(result: Result, folder: Path) -> Json:
    same = ("best_step", "steps", "ended_by", "seconds", "peak_bytes", "parameters", "examples_per_second")
    return {
        "accuracy": result.test.get("accuracy"),
        "loss": result.test.get("loss"),
        "validation": result.validation.get("accuracy"),
        **{name: getattr(result, name) for name in same},
        "curve": curve(logged(folder), "accuracy"),
    }


def begin(setup: Json) -> Callable[[Json], Json]:
    torch.set_num_threads(setup["threads"])

    def answer(job: Json) -> Json:
        reply = {"name": job["name"], **run(job, setup["device"])}
        # peak memory on a CPU never falls, and a CUDA error breaks the process: both need a new one for the next run
        return {**reply, "last": setup["device"] == "cpu" or "CUDA error" in reply.get("error", "")}

    return answer


if __name__ == "__main__":
    serve(begin)
