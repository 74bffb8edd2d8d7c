"""Experiments, one file each."""

from subquad.tasks.copy import Copy
from subquad.tasks.digits import DigitsTask
from subquad.tasks.images import Images
from subquad.tasks.music import Music
from subquad.tasks.pairs import Pairs
from subquad.tasks.speech import Speech
from subquad.tasks.text import Text
from subquad.training.task import Task

TASKS: dict[str, type[Task]] = {
    "digits": DigitsTask,
    "copy": Copy,
    "images": Images,
    "text": Text,
    "speech": Speech,
    "music": Music,
    "pairs": Pairs,
}
