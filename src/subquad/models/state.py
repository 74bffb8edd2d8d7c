"""States as values: measured, indexed, forked, written to disk and read back, whatever mechanisms they belong to.

A state is a nest of tuples whose leaves are tensors, batch first; nothing here knows what a leaf means.
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


def check_state(state: State, name: str = "state") -> None:
    """Refuse what is not a nest of tuples of tensors, all with one batch and on one device."""
    like: Tensor | None = None
    for part in _parts(state):
        if not isinstance(part, Tensor):
            raise ValueError(f"{name} holds {shown(part)}: accepted is a state of init_state, prefill or generate")
        check_strided(name, part)
        like = part if like is None else like
        if part.ndim == 0 or part.shape[0] != like.shape[0] or part.device != like.device:
            raise ValueError(f"{name} holds {shown(like)} and {shown(part)}: accepted is one batch on one device")
    if like is None:
        refuse(name, state, "a state of init_state, prefill or generate")


def _parts(state: State) -> Iterator[Any]:
    if isinstance(state, tuple):
        for part in state:
            yield from _parts(part)
    else:
        yield state


def leaves(state: State, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path, such as layers.0.s."""
    if isinstance(state, Tensor):
        yield name, state
        return
    names = getattr(state, "_fields", range(len(state)))
    for part, value in zip(names, state, strict=True):
        yield from leaves(value, f"{name}.{part}" if name else str(part))


def map_state(change: Callable[[Tensor], Tensor], state: State) -> State:
    """The same nest with every tensor changed."""
    return rebuild(state, {name: change(tensor) for name, tensor in leaves(state)})


def rebuild(like: State, tensors: dict[str, Tensor], name: str = "") -> State:
    """The nest of `like` around other tensors."""
    if isinstance(like, Tensor):
        return tensors[name]
    names = getattr(like, "_fields", range(len(like)))
    parts = [
        rebuild(value, tensors, f"{name}.{part}" if name else str(part))
        for part, value in zip(names, like, strict=True)
    ]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def select(state: State, rows: Tensor | slice) -> State:
    """Some rows, in that order; a slice gives views of the same memory, indices give a copy."""
    return map_state(lambda tensor: tensor[rows], state)


@checked
def fork(state: State, count: int) -> State:
    """The state of one stream, `count` times, to be continued in as many ways."""
    check_count("count", count)
    check_state(state)
    rows = batch_of(state)
    if rows != 1:
        raise ValueError(f"state has batch {rows}: fork takes the state of one stream; pick it with select")
    return map_state(lambda tensor: tensor.repeat_interleave(count, 0), state)


@checked
def join(states: Sequence[State]) -> State:
    """Streams side by side in one batch; growing states must have one capacity."""
    if not states:
        raise ValueError("states is empty: at least one is needed")
    for number, state in enumerate(states):
        check_state(state, f"states[{number}]")
    columns = [dict(leaves(state)) for state in states]
    for other in columns[1:]:
        for name, tensor in columns[0].items():
            if name not in other or other[name].shape[1:] != tensor.shape[1:]:
                theirs = list(other[name].shape[1:]) if name in other else "nothing"
                raise ValueError(
                    f"states: {name} is {list(tensor.shape[1:])} a stream in one state, {theirs} in another"
                )
            if other[name].dtype != tensor.dtype or other[name].device != tensor.device:
                raise ValueError(f"states: {name} is {shown(tensor)} in one state, {shown(other[name])} in another")
    return rebuild(states[0], {name: torch.cat([column[name] for column in columns]) for name in columns[0]})


def overwrite(state: State, rows: Tensor, new: State) -> None:
    """Put streams into the given rows of a batch, in place; other rows are not touched."""
    for (_, old), (_, tensor) in zip(leaves(state), leaves(new), strict=True):
        old.index_copy_(0, rows, tensor.to(old.dtype))


def batch_of(state: State) -> int:
    return next(leaves(state))[1].shape[0]


def positions(state: State) -> list[Tensor]:
    """The counters of tokens seen, of the model and of each layer."""
    return [tensor for name, tensor in leaves(state) if name.rpartition(".")[2] == "position"]


def size(state: State) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(state))


@checked
def save_state(state: State, path: str | Path) -> None:
    """Write a state to one safetensors file, whole or not at all."""
    from safetensors.torch import save

    check_state(state)
    if any(tensor.device.type == "meta" for _, tensor in leaves(state)):
        raise ValueError("state is on meta and has no values: accepted is a state on a device that holds them")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        refuse("path", str(path), "a file in a folder that exists")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in leaves(state)}
    shared: dict[str, Tensor] = {}  # safetensors refuses two names for one memory
    for name, tensor in tensors.items():
        taken = any(tensor.data_ptr() == other.data_ptr() for other in shared.values())
        shared[name] = tensor.clone() if taken else tensor
    header = {"format": FORMAT, "kind": "state"}
    about = json.dumps({**header, DIGEST: digest_tensors(shared, header)})
    write_whole(Path(path), save(shared, metadata={"subquad": about}))


@checked
def load_state(path: str | Path, like: State) -> State:
    """Read a state back into the nest, the types and the device of `like`, such as init_state(1).

    The batch and the capacity of growing states are the file's own.
    """
    from safetensors.torch import load_file

    check_state(like, "like")
    if not Path(path).is_file():
        refuse("path", str(path), "a file that save_state wrote")
    metadata, held = describe(Path(path))
    header = parse_json(metadata.get("subquad", "{}"), path)
    digest = header.pop(DIGEST, None) if isinstance(header, dict) else None
    if header != {"format": FORMAT, "kind": "state"}:
        raise ValueError(f"{path} is not a state: accepted is a file of save_state, format {FORMAT}")
    wanted = dict(leaves(like))
    if held.keys() != wanted.keys():
        odd = sorted(held.keys() ^ wanted.keys())[0]
        raise ValueError(f"{path} is the state of another model: {odd} is in one of them only")
    tensors = load_file(path)
    if digest is None:
        logger.warning("%s has no digest: whether it is as it was saved cannot be checked", path)
    elif digest != digest_tensors(tensors, header):
        raise ValueError(f"{path} is damaged: it is not what was saved (SHA-256)")
    for name, tensor in wanted.items():
        fits = tensors[name].ndim == tensor.ndim and tensors[name].shape[2:] == tensor.shape[2:]
        if not fits or tensors[name].dtype != tensor.dtype:
            one, other = (f"{t.dtype} {list(t.shape)}" for t in (tensors[name], tensor))
            raise ValueError(f"{path} is the state of another model: {name} is {one}, this model's is {other}")
    return rebuild(like, {name: tensor.to(wanted[name].device) for name, tensor in tensors.items()})
