"""Captured loops, kept from one call to the next: capturing a step takes longer than hundreds of replays.

A loop is kept for its model as long as the model lives and its weights stay where and as they are; `stamp` tells. A
call takes a loop of its kind out and returns it at its end, so two threads never replay one graph at the same time:
the second one captures its own. Each model keeps at most COUNT loops, on a device at most 1/SHARE of its memory.
`forget(model)` drops them, for example after an attribute of a module was changed that its step reads.
"""

import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

COUNT = 4
SHARE = 16


class Kept(NamedTuple):
    key: Hashable
    thing: Any
    size: int


class Shelf:
    """Things by kind, the oldest first, up to a count and a size; all are of one stamp."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.stamp: Hashable = None
        self.things: list[Kept] = []

    def take(self, key: Hashable, stamp: Hashable) -> Any:
        """The newest thing of that kind, which is no longer here; None if there is none. Another stamp empties it."""
        self._turn(stamp)
        for number in range(len(self.things) - 1, -1, -1):
            if self.things[number].key == key:
                return self.things.pop(number).thing
        return None

    def put(self, key: Hashable, thing: Any, size: int, stamp: Hashable) -> bool:
        """Keep a thing, in place of the oldest ones where there are too many; False if it is too large."""
        self._turn(stamp)
        if size > self.size:
            return False
        self.things.append(Kept(key, thing, size))
        while len(self.things) > self.count or sum(kept.size for kept in self.things) > self.size:
            self.things.pop(0)
        return True

    def _turn(self, stamp: Hashable) -> None:
        if stamp != self.stamp:
            self.stamp = stamp
            self.things.clear()


_shelves: "weakref.WeakKeyDictionary[nn.Module, Shelf]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # of one thread more than once: a finaliser may run anywhere


def take(model: nn.Module, key: Hashable, stamp: Hashable) -> Any:
    """A loop of that kind, if one is kept for these weights."""
    with _lock:
        shelf = _shelves.get(model)
        return None if shelf is None else shelf.take(key, stamp)


def put(model: nn.Module, key: Hashable, thing: Any, size: int, stamp: Hashable) -> bool:
    """Keep a loop that does not refer to its model: else neither would ever be freed."""
    with _lock:
        if model not in _shelves:
            _shelves[model] = Shelf(COUNT, bound(model))
        return _shelves[model].put(key, thing, size, stamp)


def forget(model: nn.Module | None = None) -> bool:
    """Drop the captured steps of a model, or of all, and free their memory; whether there were any."""
    with _lock:
        some = [model] if model is not None else list(_shelves)
        return sum(_shelves.pop(one, None) is not None for one in some) > 0


def bound(model: nn.Module) -> int:
    """The most bytes that loops of a model may keep."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def stamp(model: nn.Module) -> Hashable:
    """What a captured step read when it was captured: modules, hooks, where weights are, and how often they changed."""
    parts: list[Any] = [
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction, torch.backends.cudnn.allow_tf32,
    ]  # fmt: skip
    for module in model.modules():
        forward = module.__dict__.get("forward")  # in place of its own
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        parts.append((id(module), type(module), id(forward), *hooks))
        for tensors in (module._parameters, module._buffers):
            parts += [_stamp(tensor) for tensor in tensors.values() if tensor is not None]
    return tuple(parts)


def _stamp(tensor: Tensor) -> Hashable:
    version = 0 if tensor.is_inference() else tensor._version  # an inference tensor counts no changes
    return tensor.data_ptr(), version, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
