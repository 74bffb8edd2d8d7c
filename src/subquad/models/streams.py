"""Many streams in one running batch: a server can admit and retire streams while others run."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from subquad.checks import at_least, check_methods, refuse
from subquad.models.decoding import Loop, decoder_of, position_of
from subquad.models.footprint import bytes_per_stream, check_fits
from subquad.models.generation import Prompt, Prompts, Seed, begin, check_drawing, evaluating, read_prompts
from subquad.models.sampling import Sampling, SamplingOptions
from subquad.models.state import State, overwrite, positions, select


@check_methods
class Streams:
    """streams = Streams(model, slots=64, capacity=2048)

    ids = streams.admit([[1, 2, 3], [4]], seed=[7, 8])     # read prompts in parallel, into free slots
    tokens = streams.step()                                # {id: token} of every running stream
    streams.retire(ids[0])                                 # frees its slot

    Memory is allocated once: `slots` rows of `bytes_per_stream`. The batch always has that many rows, so that a
    stream's numbers do not depend on the other streams. A stream is retired when it draws a stop token or is full.

    `state(id)` has not seen the stream's last token. To continue from it, pass that token again as the prompt:

    state, last = streams.state(ids[1]), tokens[ids[1]]
    ids = streams.admit([[last]], state=state)
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        capacity: int,
        sampling: Sampling | None = None,
        stop: int | Sequence[int] = (),
        compile: bool = False,
        **options: Unpack[SamplingOptions],
    ):
        self.slots, self.capacity = slots, capacity
        at_least(self, slots=1, capacity=1)
        self.sampling, stop = check_drawing(model, Sampling.of(sampling, **options), stop)
        if hasattr(model, "encode"):
            raise ValueError("model reads a source: accepted is a language model")
        check_fits(model, slots, capacity)
        self.model, self.modules = model, list(model.modules())
        self.bytes_per_stream = bytes_per_stream(model, capacity)
        state = decoder_of(model).init_state(slots, capacity)
        zeros = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.loop = Loop(model, state, zeros, zeros.clone(), self.sampling, stop, logprobs=True, compile=compile)
        self.active: Tensor | None = None  # [slots], 1 for running streams; None: compute it from slot_of
        self.stop = frozenset(stop)
        self.slot_of: dict[int, int] = {}
        self.left: dict[int, int] = {}  # positions that a stream may still fill
        self.logprobs: dict[int, float] = {}  # of the last step's tokens
        self.next_id = 0
        self.whole = True  # False during a step, while states are half written
        self.lock = threading.RLock()  # a server may admit from one thread and step in another

    @property
    def running(self) -> list[int]:
        return list(self.slot_of)

    @property
    def free(self) -> int:
        return self.slots - len(self.slot_of)

    def admit(
        self, prompts: Prompt, *, lengths: Tensor | None = None, seed: Seed = 0, state: State | None = None
    ) -> list[int]:
        """Start streams from prompts (and states that came before them); returns an id for each."""
        with self._alone(), torch.no_grad():
            return self._admit(read_prompts(self.model, prompts, lengths, state, seed, "prompts"))

    def _admit(self, prompts: Prompts) -> list[int]:
        count, free = len(prompts.tokens), sorted(set(range(self.slots)) - set(self.slot_of.values()))
        if count > self.free:
            raise ValueError(f"prompts has {count} rows: accepted is at most {self.free}, free of {self.slots} slots")
        reached = prompts.sizes.cpu() + (0 if prompts.state is None else position_of(prompts.state).cpu())
        if (last := int(reached.max())) > self.capacity:
            raise ValueError(f"prompts reach position {last}: accepted is at most capacity={self.capacity}")
        state = begin(self.model, prompts, self.capacity)
        loop, slots = self.loop, free[:count]
        rows = torch.tensor(slots, device=self.model.device)
        overwrite(loop.state, rows, state)
        loop.token[rows], loop.seeds[rows], loop.done[rows] = prompts.last, prompts.seeds, False
        loop.mark_seen(prompts.tokens, rows)
        self.active = None
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        self.left.update(zip(ids, (self.capacity - reached + 1).tolist(), strict=True))
        self.slot_of.update(zip(ids, slots, strict=True))  # last: if admit fails before, the slots stay free
        return ids

    def step(self) -> dict[int, int]:
        """One token for every running stream, by id; `logprobs` holds their log-probabilities."""
        with self._alone(), torch.no_grad():
            return self._step() if self.slot_of else {}

    def _step(self) -> dict[int, int]:
        self.whole = False
        if self.free:
            # empty slots are computed too: keep their counters at 0, so that they never run out of room
            if self.active is None:
                runs = set(self.slot_of.values())
                self.active = torch.tensor([int(slot in runs) for slot in range(self.slots)], device=self.model.device)
            for counter in positions(self.loop.state):
                counter.mul_(self.active)
        (token, logprob), *_ = self.loop.advance(1)
        tokens = token.tolist()
        scores = [0.0] * self.slots if logprob is None else logprob.tolist()
        made = {id: tokens[slot] for id, slot in self.slot_of.items()}
        self.logprobs = {id: scores[slot] for id, slot in self.slot_of.items()}
        for id, token_ in made.items():
            self.left[id] -= 1
            if token_ in self.stop or self.left[id] == 0:
                self.retire(id)
        self.whole = True
        return made

    def state(self, id: int) -> State:
        """A copy of a stream's state, to save, fork or admit again; it has not seen the stream's last token."""
        with self._alone():
            return select(self.loop.state, torch.tensor([self._slot(id)], device=self.model.device))

    def retire(self, id: int) -> None:
        """End a stream; its slot is free."""
        with self.lock:
            self._slot(id)
            self.active = None
            del self.slot_of[id], self.left[id]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the states for this thread; RuntimeError if an interrupted step left them half written."""
        with self.lock, evaluating(self.model, self.modules):
            if not self.whole:
                raise RuntimeError("an interrupted step left half-written states: admit the streams to a new Streams")
            yield

    def _slot(self, id: int) -> int:
        if id not in self.slot_of:
            refuse("id", id, f"a running stream: {', '.join(map(str, self.slot_of)) or 'there is none'}")
        return self.slot_of[id]
