"""The process that trains runs of the arena, one after the other; several of them share a GPU."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from subquad.measure.cost import first_line
from subquad.pool import serve
from subquad.training.config import TrainingConfig
from subquad.training.log import curve, logged
from subquad.training.loop import Result
from subquad.training.train import train

Json = dict[str, Any]


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
                result = _trained(job, device, compile, capture, console)
                return {"result": {**_figures(result), "curve": curve(logged(folder), "accuracy")}}
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


def _trained(job: Json, device: str, compile: bool, capture: bool, console: Console) -> Result:
    from subquad.tasks import TASKS

    task = TASKS[job["task"]].from_options(job["data"])
    faster = {"compile": compile, "capture": capture}
    training = TrainingConfig.from_dict({**task.training.to_dict(), **job["training"], **faster})
    return train(
        task, training, job["model"], job["folder"], resume=True, device=device, console=console, leg=job["leg"]
    )  # fmt: skip


def _figures(result: Result) -> Json:
    same = ("best_step", "steps", "ended_by", "seconds", "peak_bytes", "parameters", "examples_per_second")
    return {
        "accuracy": result.test.get("accuracy"),
        "loss": result.test.get("loss"),
        "validation": result.validation.get("accuracy"),
        **{name: getattr(result, name) for name in same},
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
