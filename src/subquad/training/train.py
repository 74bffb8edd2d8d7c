"""One loop for all tasks: train until the steps or the minutes are over, measure, keep the best, lose nothing."""

import dataclasses
import errno
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.checks import check_plain
from subquad.disk import blaming
from subquad.machine import available
from subquad.training import checkpoints
from subquad.training.config import RunConfig, TrainingConfig
from subquad.training.distributed import join
from subquad.training.folder import RESULT, Folder
from subquad.training.log import Log
from subquad.training.loop import Result, Run, Stopped
from subquad.training.memory_check import check_batch, check_model
from subquad.training.signals import Signals
from subquad.training.task import Task

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(
    task: Task,
    training: TrainingConfig | None = None,
    model: Mapping[str, Any] | None = None,
    out: str | Path = "runs/run",
    *,
    resume: bool = False,
    device: str = "auto",
    console: Console | None = None,
    leg: float | None = None,
) -> Result:
    """Train a task into a folder. `model` are keywords beside the task's own; `leg`: stop after so many minutes and
    leave the rest to a later call with resume=True."""
    if leg is not None and not leg > 0:
        raise ValueError(f"leg={leg:g}: accepted is a positive number of minutes")
    training = task.training if training is None else training
    fields = {**task.model, **(model or {})}
    ranks = join(training.parallel, available(device))
    console = console or Console()
    folder = Folder(Path(out))
    config = RunConfig(task=task.name, data=options_of(task), model=fields, training=training)
    try:
        resume = resume or ranks.goes_on()
        ranks.decide(lambda: folder.check(config, resume, defaults_of(type(task))))
        ranks.decide(lambda: check_model(task, fields, ranks.device, ranks.sharded))
        run = Run(task, config, folder, ranks)  # before anything is written: what cannot work leaves nothing behind
        if ranks.world == 1 and ranks.device.type == "cpu":
            check_batch(task, run.model, run.sources["train"], training.batch, run.pieces)
        opened = ranks.decide(lambda: folder.open(config, resume, str(ranks.device)))
        ranks.begun()
        if ranks.first:
            for note in opened.notes:
                console.print(note, highlight=False, markup=False, soft_wrap=True)
        if opened.result is not None:
            with blaming(str(folder.path / RESULT), ValueError):
                result = Result(**opened.result)
                for name, hint in typing.get_type_hints(Result).items():
                    check_plain(name, getattr(result, name), hint)
            if ranks.first:
                console.print(f"{folder.path} is finished already", highlight=False, markup=False, soft_wrap=True)
            return result
        if opened.checkpoint is not None:
            run.load(opened.checkpoint)
        copy = None if opened.checkpoint is None else opened.checkpoint.history
        path = folder.path if ranks.first else None
        with Log(path, console, task.name, run.step, copy) as log, Signals(log) as signals:
            try:
                return run.go(log, signals, leg)
            except Exception:
                if ranks.first and run.step == 0:  # a first step that cannot be computed is no run to go on with
                    folder.forget()
                raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        kept = checkpoints.names(folder.checkpoints)
        last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise Stopped(f"the disk is full ({error}): {last}; free some space and go on with --resume") from error
    finally:
        folder.close()
        ranks.close()


def options_of(task: Task) -> dict[str, Any]:
    """The `data.*` settings of a task: the fields of its dataclass."""
    return {f.name: getattr(task, f.name) for f in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else {}


def defaults_of(cls: Any) -> dict[str, Any]:
    """Of each `data.*` setting of a task's class; None where the user must say it."""
    found = {}
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = None if field.default is dataclasses.MISSING else field.default
    return found
