"""Experiments, one file each. A new task is a file here and its name in ALL, or in ARENA of lra/fill.py."""

from collections.abc import Mapping
from typing import Any

from subquad.models import LanguageModel
from subquad.tasks.copy import Copy
from subquad.tasks.digits import Digits
from subquad.tasks.images import Images
from subquad.tasks.lra.fill import ARENA, Fill
from subquad.tasks.music import Music
from subquad.tasks.pairs import Pairs
from subquad.tasks.recall import Recall
from subquad.tasks.speech import Speech
from subquad.tasks.text import Text
from subquad.tasks.write_images import image_shape
from subquad.training.task import Task

ALL: tuple[type[Task], ...] = (Digits, Copy, Images, Text, Speech, Music, Pairs, Recall, *ARENA, Fill)
TASKS = {task.name: task for task in ALL}
TRIALS = {name: trial for name, task in sorted(TASKS.items()) if (trial := task.trial()) is not None}


def writer_of(model: LanguageModel, card: Mapping[str, Any], shape: str | None = None) -> type[Task]:
    """The task that writes what this model generates: the task on its card if that can write; else images if their
    shape is known or was given, and text otherwise."""
    own = TASKS.get(str(card.get("task")))
    if own is not None and own.writes:
        return own
    return Text if image_shape(model, shape) is None else Images
