"""Models of a task: made, saved so that they can be used, and filled again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.models.model import Model
from subquad.models.store import WEIGHTS, tensors_of
from subquad.training import checkpoints
from subquad.training.task import Task


class DamagedWeights(ValueError):
    """Saved weights that are gone, or not what was written."""


def make_model(task: Task, fields: Mapping[str, Any]) -> nn.Module:
    """A keyword that the model does not know is a wrong value of the user's, not an error of ours."""
    try:
        return task.make_model(fields)
    except TypeError as error:
        raise ValueError(f"model: {error}") from error


def save_model(model: nn.Module, path: Path) -> None:
    """With its config where it has one; weights alone otherwise."""
    if isinstance(model, Model):
        model.save(path)
        return
    path.mkdir(parents=True, exist_ok=True)
    checkpoints.write_tensors(path / WEIGHTS, tensors_of(model))


def load_weights(model: nn.Module, path: Path) -> None:
    """Into a model that is there, sharded or not."""
    from safetensors import SafetensorError

    try:
        found = checkpoints.read_tensors(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DamagedWeights(f"{path / WEIGHTS} cannot be read ({error})") from error
    checkpoints.copy_into(found, tensors_of(model), str(path))


def copy_of(task: Task, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model of its own with these weights."""
    model = make_model(task, fields)
    checkpoints.copy_into(tensors, tensors_of(model), "a copy of the model")
    return model
