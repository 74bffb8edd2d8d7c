"""Make the model of a task, save it, and load saved weights into it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.checks import refuse
from subquad.models.saving import WEIGHTS, Model, digest_tensors, tensors_of
from subquad.training import checkpoints
from subquad.training.task import Task

ENCODER = "tower."  # the names of an encoder's weights in a classifier, a matcher and a filler begin so


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


def load_encoder(model: nn.Module, folder: Path) -> None:
    """Load the encoder of a run, or of a folder of weights, into a model with the same encoder; its head stays.

    ValueError names a weight that is missing or has another shape.
    """
    encoder = {name: tensor for name, tensor in tensors_of(model).items() if name.startswith(ENCODER)}
    if not encoder:
        accepted = "null for a model without an encoder; classifiers of the arena's tasks have one"
        refuse("training.start", str(folder), accepted)
    path = folder / "model" if (folder / "model").is_dir() else folder
    if not (path / WEIGHTS).is_file():
        refuse("training.start", str(folder), f"a finished run, or a folder that holds {WEIGHTS}")
    advice = "the settings of both models must agree, other than the head's"
    checkpoints.copy_into(_read(path), encoder, f"training.start={path}", advice)


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
