"""Make the model of a task, save it, and load saved weights into it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.models.saving import WEIGHTS, Model, digest_tensors, tensors_of
from subquad.training import checkpoints
from subquad.training.task import Task


def make_model(task: Task, fields: Mapping[str, Any]) -> nn.Module:
    """The task's model. Unknown keywords raise ValueError, like wrong values, not TypeError."""
    try:
        return task.make_model(fields)
    except TypeError as error:
        raise ValueError(f"model: {error}") from error


def save_model(model: nn.Module, path: Path) -> None:
    """Save a model with its config if it is one of ours; otherwise only its weights."""
    if isinstance(model, Model):
        model.save(path)
        return
    path.mkdir(parents=True, exist_ok=True)
    checkpoints.write_tensors(path / WEIGHTS, tensors_of(model))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into a model, sharded or not; ValueError if they cannot be read."""
    checkpoints.copy_into(_read(path), tensors_of(model), str(path))


def digest_in(path: Path) -> str:
    """The digest of the weights in a folder; ValueError if they cannot be read."""
    return digest_tensors(_read(path))


def damage_of(path: Path, digest: str | None) -> str:
    """A sentence if the weights cannot be read or do not have this digest, else "". None: an old run without digest."""
    try:
        actual = digest_in(path)
    except ValueError as error:
        return str(error)
    return "" if digest in (None, actual) else f"{path / WEIGHTS} is damaged: its SHA-256 has changed"


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError

    try:
        return checkpoints.read_tensors(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path / WEIGHTS} cannot be read ({error})") from error


def copy_of(task: Task, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A new model with these weights."""
    model = make_model(task, fields)
    checkpoints.copy_into(tensors, tensors_of(model), "a copy of the model")
    return model
