"""Short training for quality: what a small model with each mechanism learns in the same few steps of the same data."""

import math
from pathlib import Path
from typing import Any

from subquad.mechanisms import mechanism
from subquad.studies.settings import Settings
from subquad.tasks import TRIALS
from subquad.tasks.lra.task import Classification
from subquad.tasks.tokens import Tokens
from subquad.training.config import TrainingConfig
from subquad.training.task import Task, Trial
from subquad.training.train import learn

DIM, DEPTH, HEADS, BATCH = 64, 2, 2, 32  # of every model here
POINTS = 50  # of a curve


def quality(settings: Settings, name: str) -> dict[str, Any]:
    """The record of one mechanism, or the reason why there is none. Never raises."""
    record: dict[str, Any] = {"mechanism": name, "task": task_name(settings)}
    causal, traits = settings.is_causal(name), mechanism(name).traits
    if not (traits.causal if causal else traits.bidirectional):
        return {**record, "reason": f"has no {'causal' if causal else 'bidirectional'} form"}
    try:
        trial = trial_of(settings)
        task = trial.form(causal)
        if task is None:
            return {**record, "reason": "has no causal form, which this task needs"}
        return {**record, **_train(task, trial.examples, name, settings, causal)}
    except Exception as error:
        return {**record, "reason": f"{type(error).__name__}: {error}"}


def task_name(settings: Settings) -> str:
    return settings.task or Path(settings.data or "").name


def trial_of(settings: Settings) -> Trial:
    if settings.data is not None:
        return Trial(causal=Tokens(settings.data), examples=64)
    assert settings.task is not None
    return TRIALS[settings.task]


def _train(task: Task, examples: int | None, name: str, settings: Settings, causal: bool) -> dict[str, Any]:
    """A short run, the same for all mechanisms."""
    every = max(1, settings.steps // POINTS)
    fields: dict[str, Any] = {"mechanism": name, "dim": DIM, "depth": DEPTH, "heads": HEADS}
    if isinstance(task, Classification):
        fields["causal"] = causal
    training = TrainingConfig(
        steps=settings.steps, batch=BATCH, lr=2e-3, betas=(0.9, 0.98), warmup=max(1, settings.steps // 20),
        log_every=every, precision="fp32",
    )  # fmt: skip
    learned = learn(task, fields, training, device=settings.device, examples=examples)
    percent = isinstance(task, Classification)  # measured in %, recorded as a fraction
    unit = math.log(2) if task.metric.startswith("bits/") else 1.0
    return {
        "metric": task.metric,
        "value": learned.measures[task.metric] / (100 if percent else 1),
        "lower_is_better": not task.higher_is_better,
        "steps": settings.steps,
        "seconds": learned.seconds,
        "curve": [[step, loss / unit] for step, loss in learned.curve if step % every == 0],
    }
