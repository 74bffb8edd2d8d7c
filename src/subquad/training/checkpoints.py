"""Checkpoints: directories that are written completely or not at all, with checksums of all files.

checkpoints/step_000100/ holds the tensors (tensors.safetensors, or the shards of torch.distributed.checkpoint),
metrics.jsonl so far, and state.json with everything else, including the size and SHA-256 of each file and its own
SHA-256. A checkpoint is written under another name and then renamed.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from subquad.disk import read_sealed, write_sealed, write_whole
from subquad.training import sharded
from subquad.training.distributed import Ranks
from subquad.training.history import METRICS

STATE, TENSORS = "state.json", "tensors.safetensors"
FACTS = ("config", "seconds", "evaluated", "best", "schedule", "precision", "totals")  # a run needs them to resume
FORMAT = 1
PART = ".part"  # the ending of a checkpoint that is still being written


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been checked."""

    path: Path
    facts: dict[str, Any]
    sealed: bool = True  # whether state.json has a digest; old ones have none

    @property
    def history(self) -> str | None:
        """The lines of metrics.jsonl up to this step; old checkpoints have none."""
        return (self.path / METRICS).read_text() if (self.path / METRICS).is_file() else None

    @property
    def step(self) -> int:
        return _step(self.path)

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        if not (self.path / TENSORS).exists():
            return sharded.shapes(self.path)
        from safetensors import safe_open

        with safe_open(self.path / TENSORS, framework="pt") as file:
            tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118, it is no mapping
            return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into the targets, which may be sharded."""
        if (self.path / TENSORS).exists():
            copy_into(read_tensors(self.path / TENSORS), targets, str(self.path))
        else:
            sharded.load(self.path, dict(targets))


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    ranks: Ranks,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint; every rank calls it. `files` are added by name. A failure leaves no partial checkpoint."""
    path = folder / name_of(step)
    part = path.with_name(path.name + PART)
    try:
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        ranks.barrier()
        if ranks.sharded:
            sharded.save(part, dict(tensors))
            ranks.barrier()
        elif ranks.first:
            write_tensors(part / TENSORS, tensors)
        if ranks.first:
            for name, data in (files or {}).items():
                write_whole(part / name, data)
            made = sorted(part.iterdir())
            seals = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in made}
            state = {"format": FORMAT, "step": step, "facts": dict(facts), "files": seals}
            write_sealed(part / STATE, state, allow_nan=True)  # measures other than the task's metric may be NaN
            _sync_directory(part)
            part.rename(path)
            _sync_directory(folder)
        ranks.barrier()
    except BaseException:
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return path


def names(folder: Path) -> list[Path]:
    """Finished checkpoints, the newest last."""
    paths = folder.glob("step_*") if folder.is_dir() else ()
    return sorted((path for path in paths if path.name.removeprefix("step_").isdigit()), key=_step)


def last(folder: Path) -> str:
    """Names the last checkpoint, for errors that stop a run."""
    paths = names(folder)
    return f"the last checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"


def newest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest intact checkpoint, and a sentence for each newer one that is damaged."""
    damaged: dict[Path, str] = {}
    for path in reversed(names(folder)):
        try:
            return read(path), damaged
        except ValueError as error:
            damaged[path] = str(error)
    return None, damaged


def read(path: Path) -> Checkpoint:
    """Read and check a checkpoint; ValueError names a file that is missing, truncated or changed."""
    state, sealed = read_state(path)
    for name, seal in state["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != seal["bytes"]:
            raise ValueError(f"{path} is damaged: {name} has {file.stat().st_size} bytes instead of {seal['bytes']}")
        if _digest(file) != seal["sha256"]:
            raise ValueError(f"{path} is damaged: {name} is not what was written (SHA-256)")
    return Checkpoint(path, state["facts"], sealed)


def read_state(path: Path) -> tuple[dict[str, Any], bool]:
    """state.json, and whether it has a digest; does not check the other files."""
    try:
        state, sealed = read_sealed(path / STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {STATE} cannot be read ({error})") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')!r}: this version reads {FORMAT}")
    facts, files = state.get("facts"), state.get("files")
    lacks = [key for key in FACTS if not isinstance(facts, dict) or key not in facts]
    if lacks:
        raise ValueError(f"{path} is damaged: {STATE} lacks {', '.join(lacks)}")
    if state.get("step") != _step(path):
        raise ValueError(f"{path} is damaged: {STATE} belongs to step {state.get('step')!r}")
    if not isinstance(files, dict) or not all(
        name == Path(name).name and isinstance(seal, dict) and {"bytes", "sha256"} <= seal.keys()
        for name, seal in files.items()
    ):
        raise ValueError(f"{path} is damaged: {STATE} has no valid list of files")
    return state, sealed


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints, and all unfinished ones."""
    for path in names(folder)[:-keep]:
        path.rename(path.with_name(path.name + PART))  # so that nobody reads it while it is being deleted
    for path in folder.glob(f"*{PART}"):
        shutil.rmtree(path, ignore_errors=True)


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(file, save(plain))


@torch.no_grad()
def copy_into(
    tensors: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    source: str,
    advice: str = "it belongs to another model",
) -> None:
    """Copy tensors into targets of the same names, sharded or not; errors name `source`, and end with `advice`."""
    for name, target in targets.items():
        if name not in tensors:
            raise ValueError(f"{source} lacks {name}: {advice}")
        value = tensors[name]
        if value.shape != target.shape:
            wanted = f"accepted is {list(target.shape)}"
            raise ValueError(f"{source}: {name} has shape {list(value.shape)}: {wanted}, as {advice}")
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not support it
            os.fsync(handle)
    finally:
        os.close(handle)
