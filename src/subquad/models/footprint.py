"""How much memory streams take, computed before it is allocated."""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from subquad.checks import check_count
from subquad.machine import free_bytes
from subquad.models import kept
from subquad.models.decoding import decoder_of, defer, stack_of, values_of
from subquad.models.state import State, leaves, map_state, size

_memories: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
MOST = 64  # answers for a model
FAR = 1 << 20  # positions for which every state that grows is larger than for one
SHARE = 0.95  # of the free memory that streams may take


def bytes_per_stream(model: Any, capacity: int) -> int:
    """Bytes of one stream's state with room for `capacity` positions, computed without allocating anything."""
    return size(imagine(decoder_of(model), capacity))


def largest_batch(model: Any, capacity: int) -> int:
    """Streams that fit into the free memory of the model's device; a container's memory limit counts too."""
    return int(SHARE * free_bytes(model.device)) // _bytes_at_work(model, capacity)


def check_fits(model: Any, batch: int, capacity: int) -> None:
    """ValueError if `batch` streams do not fit; it says how many do."""
    check_count("batch", batch)
    most = largest_batch(model, capacity)
    if batch > most and kept.forget():  # captured steps give way
        most = largest_batch(model, capacity)
    if batch > most:
        state, room = bytes_per_stream(model, capacity), int(SHARE * free_bytes(model.device))
        raise ValueError(
            f"batch={batch} cannot work: the state of a stream of {capacity} positions takes {state:,} bytes, and"
            f" {room:,} bytes are free on {model.device}: accepted is at most {most}"
        )


def _bytes_at_work(model: Any, capacity: int) -> int:
    """A stream's state, a copy of its largest layer (as not all mechanisms write in place), and a step's vectors."""
    return _remembered(model, ("bytes at work", capacity), lambda: _count_bytes(model, capacity))


def _count_bytes(model: Any, capacity: int) -> int:
    decoder = decoder_of(model)
    state = imagine(decoder, capacity)
    layers = getattr(getattr(state, "decoder", state), "layers", (state,))
    stack = stack_of(model).config
    vectors = 4 * (4 * stack.dim + 2 * stack.ff_width) + 16 * values_of(model)
    return size(defer(decoder, state)) + max(size(layer) for layer in layers) + vectors


class Rooms:
    """Gives states room for a number of positions."""

    def __init__(self, decoder: Any):
        self.decoder = decoder

    @functools.cached_property
    def grows(self) -> bool:
        """Whether a state needs more room for more positions."""
        least, more = ([tensor.shape for _, tensor in leaves(self.shape(count))] for count in (1, FAR))
        return least != more

    def shape(self, capacity: int) -> State:
        return imagine(self.decoder, capacity)

    def fit(self, state: State, capacity: int, trim: bool = False) -> State:
        """The state with as much room as init_state gives; with `trim` not more either, and then nothing else is kept.

        Growing tensors grow at the end of their second dimension. A state that is as wanted is returned as it is.
        """

        def resize(tensor: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
            more = wanted.shape[1] - tensor.shape[1] if wanted.shape != least.shape else 0
            if more > 0:
                return torch.cat((tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])), 1)
            return tensor[:, :more].clone() if more < 0 and trim else tensor

        return map_state(resize, state, self.shape(1), self.shape(capacity)) if self.grows else state


def imagine(decoder: Any, capacity: int) -> State:
    """One stream's state, of fake tensors: they have shapes but take no memory."""
    return _remembered(getattr(decoder, "model", decoder), ("state", capacity), lambda: _imagine(decoder, capacity))


def _imagine(decoder: Any, capacity: int) -> State:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        if hasattr(decoder, "encode"):
            weight = next(decoder.decoder.parameters())
            return decoder.init_state(weight.new_empty(1, 1, decoder.config.encoder.dim), capacity=capacity)
        return decoder.init_state(1, capacity)


def _remembered(model: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """make(), once for a model of these modules, in this type and on this device: it takes longer than some steps."""
    if not isinstance(model, nn.Module):
        return make()
    known = _memories.setdefault(model, {})
    whole = key, model.dtype, model.device, tuple(map(id, model.modules()))
    if whole not in known:
        if len(known) >= MOST:
            known.clear()
        known[whole] = make()
    return known[whole]
