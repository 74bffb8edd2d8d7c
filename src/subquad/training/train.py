"""One loop for all tasks: `train` writes a folder, resumes, and tests the best weights; `learn` trains in memory, for a
demo or a comparison."""

import errno
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from torch import nn

from subquad.checks import check_plain, refuse
from subquad.disk import blaming
from subquad.machine import available
from subquad.training import checkpoints
from subquad.training.config import RunConfig, TrainingConfig
from subquad.training.distributed import Ranks, join, place_of
from subquad.training.folder import CONFIG, RESULT, Folder
from subquad.training.log import Log, LossCurve
from subquad.training.loop import Result, Run, Stopped
from subquad.training.memory_check import check_batch, check_model
from subquad.training.signals import Signals
from subquad.training.task import Task

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """Train a task into a folder. `model`: keywords that override the task's own. `leg`: stop after this many minutes;
    a later call with resume=True continues."""
    if leg is not None and not leg > 0:
        raise ValueError(f"leg={leg:g}: accepted is a positive number of minutes")
    training = task.training if training is None else training
    fields = {**task.model, **(model or {})}
    ranks = join(training.parallel, available(device), training.sequence)
    console = console or Console()
    folder = Folder(Path(out))
    config = RunConfig(task=task.name, data=task.options(), model=fields, training=training)
    try:
        resume = resume or ranks.restarted()
        ranks.decide(lambda: folder.check(config, resume, task.defaults()))
        ranks.decide(lambda: check_model(task, fields, ranks.device, ranks.sharded))
        run = Run(task, config, folder, ranks)  # before anything is written, so that a failure leaves no folder
        if ranks.world == 1 and ranks.device.type == "cpu":
            check_batch(task, run.model, run.sources["train"], training.batch, run.pieces)
        opened = ranks.decide(lambda: folder.open(config, resume, str(ranks.device)))
        ranks.mark_begun()
        notes = [*opened.notes, f"{folder.path} is already finished"] if opened.result else opened.notes
        for note in notes if ranks.first else ():
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        if opened.result is not None:
            with blaming(str(folder.path / RESULT), ValueError):
                result = Result(**opened.result)
                for name, hint in typing.get_type_hints(Result).items():
                    check_plain(name, getattr(result, name), hint)
            return result
        copy = None
        if opened.checkpoint is not None:
            run.load(opened.checkpoint)
            copy = opened.checkpoint.history
        path = folder.path if ranks.first else None
        with Log(path, console, task.name, run.step, copy) as log, Signals(log) as signals:
            try:
                return run.go(log, signals, leg)
            except Exception:
                if ranks.first and run.step == 0:  # the first step failed: there is nothing to resume
                    (folder.path / CONFIG).unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        last = checkpoints.last(folder.checkpoints)
        raise Stopped(f"the disk is full ({error}): {last}; free some space and continue with --resume") from error
    finally:
        folder.lock.close()
        ranks.close()


class Learned(NamedTuple):
    model: nn.Module
    measures: dict[str, float]  # of the test part, with the last weights
    curve: list[tuple[int, float]]  # (step, mean loss in nats since the last point), every `log_every` steps
    seconds: float  # of training


def learn(
    task: Task,
    fields: Mapping[str, Any],
    training: TrainingConfig,
    *,
    device: str = "cpu",
    examples: int | None = None,
    watch: Callable[[int, float], None] | None = None,
) -> Learned:
    """Train in memory: the same updates as `train`, but no folder, no validation and no checkpoints.

    fields    all keywords of the model; the task's own are not added
    examples  number of test examples to measure; None: all
    watch     called with each point of the curve
    """
    if training.sequence is not None:
        refuse("sequence", training.sequence, "None: this process trains alone")
    config = RunConfig(task=task.name, model=fields, training=training)
    run = Run(task, config, None, Ranks(place_of(available(device))))
    log = LossCurve(watch)
    result = run.go(log, Signals(log))
    measures = run.measure("test", examples)
    assert measures is not None  # nothing can interrupt it
    return Learned(run.model, measures, log.points, result.seconds)
