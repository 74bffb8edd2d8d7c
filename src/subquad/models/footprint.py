"""How much memory streams take: known before any is used."""

from typing import Any

import torch

from subquad.checks import check_count
from subquad.machine import free_bytes
from subquad.models.decoding import decoder_of, defer, stack_of, values_of
from subquad.models.state import State, size


def bytes_per_stream(model: Any, capacity: int) -> int:
    """Memory that one stream's state takes with room for `capacity` positions; nothing is allocated to find out."""
    return size(imagine(decoder_of(model), capacity))


def largest_batch(model: Any, capacity: int, free: int | None = None) -> int:
    """Streams that fit into the memory that is free on the model's device."""
    return _free(model.device, free) // _bytes_at_work(model, capacity)


def check_fits(model: Any, batch: int, capacity: int, free: int | None = None) -> None:
    """ValueError if so many streams do not fit, with how many do."""
    check_count("batch", batch)
    most = largest_batch(model, capacity, free)
    if batch > most:
        state, room = bytes_per_stream(model, capacity), _free(model.device, free)
        raise ValueError(
            f"batch={batch} cannot work: a stream of {capacity} positions holds {state:,} bytes of state, and"
            f" {room:,} bytes are free on {model.device}: accepted is at most {most}"
        )


def _bytes_at_work(model: Any, capacity: int) -> int:
    """A stream's state, its widest layer once more (not every mechanism writes in place), and vectors on their way."""
    decoder = decoder_of(model)
    state = imagine(decoder, capacity)
    layers = getattr(state.decoder if hasattr(state, "decoder") else state, "layers", (state,))
    stack = stack_of(model).config
    vectors = 4 * (4 * stack.dim + 2 * stack.ff_width) + 16 * values_of(model)
    return size(defer(decoder, state)) + max(size(layer) for layer in layers) + vectors


def imagine(decoder: Any, capacity: int) -> State:
    """The shapes of one stream's state, without its memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        if hasattr(decoder, "encode"):
            weight = next(decoder.decoder.parameters())
            return decoder.init_state(weight.new_empty(1, 1, decoder.config.encoder.dim), capacity=capacity)
        return decoder.init_state(1, capacity)


def _free(device: torch.device, free: int | None) -> int:
    return int(0.95 * free_bytes(device)) if free is None else free
