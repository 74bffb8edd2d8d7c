"""Models on disk: model.safetensors beside config.json in one directory, never pickle.

Each file is replaced whole. The weights carry their own copy of the config, so that a crash between the two files is
noticed when loading, and nothing is lost.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from subquad.disk import parse_json, read_json
from subquad.models.model import Model

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"

M = TypeVar("M", bound=Model)


def write(model: Model, directory: str | Path) -> None:
    """Save a model; ValueError if its config holds code, which JSON cannot."""
    from safetensors.torch import save

    header = {
        "format": FORMAT,
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": model.config.to_dict(),
    }
    text = json.dumps(header, indent=2, allow_nan=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors_of(model).items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / WEIGHTS, save(tensors, metadata={"subquad": text}))
    write_whole(directory / CONFIG, text.encode() + b"\n")


def read_header(directory: str | Path) -> dict[str, Any]:
    """What was saved there: the model's class, its type, its config."""
    directory = Path(directory)
    weights, config = directory / WEIGHTS, directory / CONFIG
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} does not exist: a saved model is a directory with {WEIGHTS} and {CONFIG}")
    inside = _metadata(weights).get("subquad")
    if inside is None and not config.is_file():
        raise FileNotFoundError(
            f"{config} does not exist, and {weights} was not saved by subquad and carries no config"
        )
    if not config.is_file():
        return _check_header(parse_json(inside or "", weights), weights)
    header = _check_header(read_json(config), config)
    if inside is not None and _check_header(parse_json(inside, weights), weights) != header:
        raise ValueError(
            f"{config} is not the config that {weights} was saved with: "
            f"restore it, or delete it to load the weights with the config they carry"
        )
    return header


def read(cls: type[M], directory: str | Path, device: str | torch.device = "cpu") -> M:
    """Load a model of that class; every tensor must be there, in its shape, and nothing else."""
    header = read_header(directory)
    if header["model"] != cls.__name__:
        raise ValueError(f"{directory} holds a {header['model']}: load it with {header['model']}.load or models.load")
    dtype = getattr(torch, header["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{directory} has dtype={header['dtype']!r}: accepted is the name of a torch type")
    model: M = cls(cls.config_type.from_dict(header["config"])).to(device, dtype)
    _fill(model, _load(Path(directory) / WEIGHTS, device), directory)
    return model.eval()


def _fill(model: nn.Module, found: Mapping[str, Tensor], directory: str | Path) -> None:
    wanted = tensors_of(model)
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names]
        raise ValueError(f"{Path(directory) / WEIGHTS} does not fit its config: it {' and '.join(parts)}")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}: accepted is {list(tensor.shape)}"
            raise ValueError(f"{Path(directory) / WEIGHTS}: {name} has shape {shapes}")
    for name, tensor in wanted.items():
        tensor.data = found[name]  # also takes the type over, should it differ from the model's


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model, tied ones once, under their first name."""
    named: dict[str, Tensor] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for name in first.values()}


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error})") from error


def _load(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path, device=str(device))


def _check_header(header: Any, path: Path) -> dict[str, Any]:
    keys = ("format", "model", "dtype", "config")
    if not isinstance(header, dict) or sorted(header) != sorted(keys):
        raise ValueError(f"{path} is not a model's config: accepted are the keys {', '.join(keys)}")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']!r}: this version reads {FORMAT}")
    return header


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
