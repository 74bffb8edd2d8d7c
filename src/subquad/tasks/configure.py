"""Configure a task from its name and the user's settings, and train it in a run folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from subquad.checks import nearest
from subquad.disk import blaming
from subquad.tasks import TASKS
from subquad.training.config import RunConfig, parse
from subquad.training.distributed import attempt
from subquad.training.folder import CONFIG, Folder, read_config
from subquad.training.loop import Result
from subquad.training.task import Task
from subquad.training.train import train


def start(
    name: str,
    out: Path,
    settings: Sequence[str] = (),
    *,
    resume: bool = False,
    device: str = "auto",
    leg: float | None = None,
    console: Console | None = None,
) -> Result:
    """Train `name` with settings such as "model.depth=16". A resumed run keeps its settings: any that are given again
    must be the same."""
    again = resume or attempt() > 0
    task, config = configure(name, settings, out if again and Folder(out).begun else None)
    fields = config.model
    return train(task, config.training, fields, out, resume=resume, device=device, console=console, leg=leg)


def configure(name: str, settings: Sequence[str] = (), begun: Path | None = None) -> tuple[Task, RunConfig]:
    """The task and its whole configuration. Defaults are the task's own, or those of the run that `begun` holds."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}{nearest(name, TASKS)} Accepted: {', '.join(TASKS)}")
    cls = TASKS[name]
    if begun is not None:
        config = read_config(begun)
        if config.task != name:
            raise ValueError(f"{begun} holds a run of {config.task!r}, not of {name!r}: --out chooses another folder")
        with blaming(str(begun / CONFIG), ValueError):
            cls.from_options(config.data)
        config = config.override(settings)
        return cls.from_options(config.data), config
    of_data = [setting for setting in settings if setting.strip().startswith("data.")]
    data = RunConfig(task=name, data=cls.defaults()).override(of_data).data
    task = cls.from_options(data)  # its model and its training may depend on its data
    config = RunConfig(task=name, data=task.options(), model=task.model, training=task.training).override(settings)
    if not any(parse(setting)[0] == ["training", "warmup"] for setting in settings):
        # a task's warm-up suits its own number of steps: in a shorter run it takes at most a tenth of them
        warmup = min(config.training.warmup, max(1, config.training.steps // 10))
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, warmup=warmup))
    return task, config
