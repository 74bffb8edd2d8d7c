"""Sharded tensors on disk, by torch.distributed.checkpoint: each rank writes its part, and any number of ranks can read
them. The index is a pickle: load only checkpoints you trust."""

import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save tensors; every rank calls it. OSError if a rank cannot write."""
    with _quiet():
        try:
            save_state(tensors, storage_writer=FileSystemWriter(folder, overwrite=True))
        except CheckpointException as error:
            causes = (cause for cause, _ in error.failures.values())
            raise next((cause for cause in causes if isinstance(cause, OSError)), error) from error


def load(folder: Path, targets: dict[str, Tensor]) -> None:
    """Load into the targets in place; every rank calls it, or a single process."""
    with _quiet():
        load_state(targets, storage_reader=FileSystemReader(folder), no_dist=not dist.is_initialized())


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


# torch warns about its internals (TypedStorage, a single process), which users cannot change
_quiet = partial(warnings.catch_warnings, action="ignore")
