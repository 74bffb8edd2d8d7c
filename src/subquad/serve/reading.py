"""Reads pieces of prompts.

On a GPU the work for one shape of a piece is recorded, and then replayed: to launch it kernel by kernel takes several
times as long as to do it, and meanwhile no stream gets on.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.disk import logger
from subquad.graphs import recording
from subquad.models import kept
from subquad.models.decoding import decoder_of, work_of
from subquad.models.state import State, leaves, map_state, size
from subquad.models.threads import run_small

Run = Callable[[], tuple[Tensor, State]]


class Recorded(NamedTuple):
    """Work on tensors that stay where they are."""

    inputs: list[Tensor]
    again: Callable[[], object]  # does the work once more
    outputs: tuple[Tensor, State]


def record(run: Run) -> tuple[Callable[[], object], tuple[Tensor, State]]:
    """What does the work of `run` again, and where its results will be."""
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        made = run()
    return graph.replay, made


class Reader:
    """`record` is what a GPU does; without it, as on a CPU, nothing is recorded."""

    def __init__(self, model: Any, record: Callable[[Run], Any] | None = None):
        self.model, self.decoder, self.record = model, decoder_of(model), record
        self.recorded: dict[Hashable, Recorded | None] = {}  # by the shape of tokens; None where it cannot be
        self.seen: set[Hashable] = set()
        self.stamp: Hashable = None

    def read(self, tokens: Tensor, lengths: Tensor | None, state: State | None, head: bool) -> tuple[Tensor, State]:
        """`prefill`; what it returns may be overwritten by the next call."""
        if self.record is None or lengths is None or state is None or head:
            return self._launch(tokens, lengths, state, head)
        if (stamp := kept.stamp(self.model)) != self.stamp:  # a record is of weights where they were
            self.recorded, self.seen, self.stamp = {}, set(), stamp
        inputs = _tensors(tokens, lengths, state)
        shape = tuple(tokens.shape)
        if shape not in self.seen:  # compiles what is then recorded
            self.seen.add(shape)
            return self._launch(tokens, lengths, state, head)
        if shape not in self.recorded:
            self.recorded[shape] = self._record(tokens, lengths, state)
        work = self.recorded[shape]
        if work is None:
            return self._launch(tokens, lengths, state, head)
        torch._foreach_copy_(work.inputs, inputs)
        work.again()
        return work.outputs

    def _launch(self, tokens: Tensor, lengths: Tensor | None, state: State | None, head: bool) -> tuple[Tensor, State]:
        work = work_of(self.model, () if state is None else state, tokens.numel())
        return run_small(work, lambda: self.decoder.prefill(tokens, lengths, state, head=head))

    def _record(self, tokens: Tensor, lengths: Tensor, state: State) -> Recorded | None:
        assert self.record is not None
        if tokens.is_cuda and 2 * size(state) > kept.bound(self.model):
            return None
        own = tokens.clone(), lengths.clone(), map_state(torch.clone, state)
        try:
            again, made = self.record(lambda: self.decoder.prefill(*own, head=False))
        except Exception as error:
            logger.info("pieces of prompts are not recorded: %s: %s", type(error).__name__, error)
            return None
        return Recorded(_tensors(*own), again, made)


def _tensors(tokens: Tensor, lengths: Tensor, state: State) -> list[Tensor]:
    return [tokens, lengths, *(tensor for _, tensor in leaves(state))]
