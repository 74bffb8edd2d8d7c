"""Checks of a model's inputs, which also set padding to zero."""

import torch
from torch import Tensor

from subquad.checks import FLOATS, INTEGERS, check_strided, shown
from subquad.ops.lengths import check_lengths, keep, readable, shape_of, zero_padding
from subquad.ops.precision import autocasts


def clean_ids(ids: Tensor, table: Tensor, lengths: Tensor | None, name: str, lengths_name: str = "lengths") -> Tensor:
    """Token ids [B, T] for a `table` [vocab, width], as int64; padding may hold anything."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"{name} has shape {shape_of(ids)}: accepted are token ids [batch, T], at least one")
    if ids.dtype not in INTEGERS:
        raise ValueError(f"{name} has dtype {ids.dtype}: accepted are integers")
    if ids.device != table.device:
        raise ValueError(f"{name} is on {ids.device}: this model is on {table.device}")
    check_strided(name, ids)
    mask = keep(check_lengths(lengths, ids, lengths_name), ids.shape[1])
    ids = (ids if mask is None else ids.masked_fill(~mask, 0)).long()
    check_ids(name, ids, table.shape[0])
    return ids


def check_ids(name: str, ids: Tensor, vocab: int) -> None:
    """Refuse ids outside a vocabulary, if they can be read without waiting for a GPU."""
    if readable(ids):
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= vocab:
            raise ValueError(f"{name} ranges from {low} to {high}: accepted are ids from 0 to {vocab - 1}")


def clean_frames(
    frames: Tensor, like: Tensor, lengths: Tensor | None, name: str, lengths_name: str = "lengths"
) -> Tensor:
    """Frames [B, T, width] for a weight `like` [..., width]; padding may hold anything."""
    width = like.shape[-1]
    if not isinstance(frames, Tensor) or frames.ndim != 3 or frames.shape[-1] != width or frames.numel() == 0:
        raise ValueError(f"{name} has shape {shape_of(frames)}: accepted is [batch, T, {width}], at least one frame")
    check_type(frames, like, name)
    check_strided(name, frames)
    return zero_padding(frames, check_lengths(lengths, frames, lengths_name))


def check_type(x: Tensor, like: Tensor, name: str) -> None:
    """Refuse a type or device other than the weight's, unless autocast or FSDP converts it."""
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: this model is on {like.device}")
    if x.dtype == like.dtype:
        return
    sharded = hasattr(like, "device_mesh")  # FSDP with mixed precision gathers weights in another type
    if x.dtype not in FLOATS or not (autocasts(x.device) or sharded):
        raise ValueError(f"{name} has dtype {x.dtype}: this model computes in {like.dtype}")


def check_position(position: object, batch: int, device: torch.device) -> None:
    """Refuse anything but the positions of a state, one per row."""
    if not isinstance(position, Tensor) or position.ndim != 1 or position.dtype != torch.int64:
        raise ValueError(f"state.position is {shown(position)}: accepted is int64 [{batch}]")
    check_strided("state.position", position)
    if position.shape != (batch,):
        raise ValueError(f"state has batch {position.shape[0]}: the input has batch {batch}")
    if position.device != device:
        raise ValueError(f"state.position is on {position.device}: this model is on {device}")


def length_of(x: object) -> int:
    """Tokens of an input; 1 for anything else, which is refused later with a better message."""
    return x.shape[1] if isinstance(x, Tensor) and x.ndim > 1 else 1


def batch_size(x: object) -> int:
    """Rows of an input; 0 for anything else, which is refused later with a better message."""
    return x.shape[0] if isinstance(x, Tensor) and x.ndim else 0
