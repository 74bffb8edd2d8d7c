"""States as values: measure, index, fork, join, save and load the state of any mechanism.

A state is a nest of tuples of tensors, batch first; this file does not depend on what the tensors mean.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.checks import check_count, check_strided, checked, refuse, shown
from subquad.disk import DIGEST, logger, parse_json, write_whole
from subquad.models.saving import describe, digest_tensors

State = Any
FORMAT = 1
HEADER = {"format": FORMAT, "kind": "state"}  # of a file, without the digest


def check_state(state: State, name: str = "state") -> None:
    """Refuse anything but a nest of tuples of tensors with the same batch and device."""
    like: Tensor | None = None
    for _, part in leaves(state):
        if not isinstance(part, Tensor):
            raise ValueError(f"{name} holds {shown(part)}: accepted is a state of init_state, prefill or generate")
        check_strided(name, part)
        like = part if like is None else like
        if part.ndim == 0 or part.shape[0] != like.shape[0] or part.device != like.device:
            raise ValueError(f"{name} holds {shown(like)} and {shown(part)}: accepted is one batch on one device")
    if like is None:
        refuse(name, state, "a state of init_state, prefill or generate")


def leaves(state: State, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path, such as layers.0.s."""
    if not isinstance(state, tuple):
        yield name, state
        return
    names = getattr(state, "_fields", range(len(state)))
    for part, value in zip(names, state, strict=True):
        yield from leaves(value, f"{name}.{part}" if name else str(part))


def map_state(change: Callable[..., Tensor], *states: State) -> State:
    """The nest of the first state, with change(tensor of each state, ...) for every tensor."""
    first = states[0]
    if isinstance(first, Tensor):
        return change(*states)
    parts = [map_state(change, *values) for values in zip(*states, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def select(state: State, rows: Tensor | slice) -> State:
    """Some rows, in that order; a slice gives views of the same memory, indices give a copy."""
    return map_state(lambda tensor: tensor[rows], state)


@checked
def fork(state: State, count: int) -> State:
    """Repeat the state of one stream `count` times, to continue it in several ways."""
    check_count("count", count)
    check_state(state)
    if (rows := batch_of(state)) != 1:
        raise ValueError(f"state has batch {rows}: fork takes the state of one stream; pick it with select")
    return map_state(lambda tensor: tensor.repeat_interleave(count, 0), state)


@checked
def join(states: Sequence[State]) -> State:
    """Join streams into one batch; growing states must have the same capacity."""
    if not states:
        raise ValueError("states is empty: at least one is needed")
    for number, state in enumerate(states):
        check_state(state, f"states[{number}]")
    first, *others = ({name: (list(t.shape[1:]), t.dtype, t.device) for name, t in leaves(state)} for state in states)
    for other in others:
        for name in first | other:
            one, two = (part.get(name, "nothing") for part in (first, other))
            if one != two:
                raise ValueError(f"states: {name} is {one} per stream in one state, {two} in another")
    return map_state(lambda *tensors: torch.cat(tensors), *states)


def overwrite(state: State, rows: Tensor, new: State) -> None:
    """Write streams into the given rows of a batch, in place; other rows are unchanged."""
    for (_, old), (_, tensor) in zip(leaves(state), leaves(new), strict=True):
        old.index_copy_(0, rows, tensor.to(old.dtype))


def batch_of(state: State) -> int:
    return next(leaves(state))[1].shape[0]


def positions(state: State) -> list[Tensor]:
    """The counters of seen tokens: the model's and each layer's."""
    return [tensor for name, tensor in leaves(state) if name.rpartition(".")[2] == "position"]


def size(state: State) -> int:
    """The bytes that a state takes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(state))


@checked
def save_state(state: State, path: str | Path, private: bool = False) -> None:
    """Write a state to one safetensors file, whole or not at all; a private one is readable by its owner only."""
    from safetensors.torch import save

    check_state(state)
    if any(tensor.device.type == "meta" for _, tensor in leaves(state)):
        raise ValueError("state is on meta and has no values: accepted is a state on a device that holds them")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        refuse("path", str(path), "a file in a folder that exists")
    # cloned, because safetensors refuses tensors that share memory
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in leaves(state)}
    about = json.dumps({**HEADER, DIGEST: digest_tensors(tensors, HEADER)})
    write_whole(Path(path), save(tensors, metadata={"subquad": about}), private)


@checked
def load_state(path: str | Path, like: State) -> State:
    """Read a state with the structure, types and device of `like`, such as init_state(1).

    The batch and the capacity of growing states come from the file.
    """
    from safetensors.torch import load_file

    check_state(like, "like")
    if not Path(path).is_file():
        refuse("path", str(path), "a file that save_state wrote")
    metadata, shapes = describe(Path(path))
    header = parse_json(metadata.get("subquad", "{}"), path)
    digest = header.pop(DIGEST, None) if isinstance(header, dict) else None
    if header != HEADER:
        raise ValueError(f"{path} is not a state: accepted is a file of save_state, format {FORMAT}")
    wanted = dict(leaves(like))
    if shapes.keys() != wanted.keys():
        odd = sorted(shapes.keys() ^ wanted.keys())[0]
        raise ValueError(f"{path} is the state of another model: only one of them has {odd}")
    tensors = load_file(path)
    if digest is None:
        logger.warning("%s has no digest, so it cannot be checked for changes", path)
    elif digest != digest_tensors(tensors, header):
        raise ValueError(f"{path} is damaged: it is not what was saved (SHA-256)")
    for name, tensor in wanted.items():
        loaded = tensors[name]
        if loaded.dtype != tensor.dtype or loaded.ndim != tensor.ndim or loaded.shape[2:] != tensor.shape[2:]:
            one, other = (f"{t.dtype} {list(t.shape)}" for t in (loaded, tensor))
            raise ValueError(f"{path} is the state of another model: {name} is {one}, this model's is {other}")
    ordered = iter([tensors[name].to(tensor.device) for name, tensor in wanted.items()])
    return map_state(lambda _: next(ordered), like)
