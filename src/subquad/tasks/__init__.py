"""Experiments, one file each."""

from subquad.tasks.digits import DigitsTask
from subquad.training.task import Task

TASKS: dict[str, type[Task]] = {
    "digits": DigitsTask,
}
