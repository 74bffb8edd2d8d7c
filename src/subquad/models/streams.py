"""Many streams in one running batch: a server can admit and retire streams while others run."""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from subquad.checks import at_least, check_count, check_methods, refuse, shown
from subquad.models import kept
from subquad.models.decoding import Loop, captures, decoder_of, head_of, position_of, values_of, vocab_of, work_of
from subquad.models.footprint import Rooms, bytes_per_stream, check_fits
from subquad.models.generation import Prompt, Prompts, Seed, begin, check_drawing, evaluating, read_prompts
from subquad.models.sampling import Rows, Sampling, SamplingOptions, Uses
from subquad.models.state import State, leaves, map_state, overwrite, positions, select
from subquad.models.threads import run_small

# By how much the largest score must exceed the next one, relative to its size, so that rounding does not change which
# one is the largest: numbers of a parallel pass and of steps differ by some 1e-6 in float32. In fewer bits they differ
# so much that no draft would ever be sure: there a draft may change the text
SURE = {torch.float64: 1e-10, torch.float32: 1e-4}

Top = list[tuple[int, float]]  # tokens with their log-probabilities, the best first


class Checked(NamedTuple):
    """What became of a stream's draft."""

    tokens: list[int]  # new tokens of the stream: the part of the draft that it would have drawn, and often one more
    accepted: int  # how many of them were drafted
    logprobs: list[float]  # of the tokens
    top: list[Top]


def _park(loop: Loop, model: "weakref.ref[Any]", key: Hashable) -> None:
    """Keep the loop of streams that are gone."""
    if (alive := model()) is not None:
        loop.park(alive, key)


class _Stream:
    """What the host knows of a running stream."""

    __slots__ = ("left", "sampling", "slot", "stop", "top")

    def __init__(self, slot: int, left: int, sampling: Sampling, stop: frozenset[int], top: int):
        self.slot = slot
        self.left = left  # positions that it may still fill
        self.sampling = sampling
        self.stop = stop
        self.top = top  # how many of the most probable tokens it wants to know


@check_methods
class Streams:
    """streams = Streams(model, slots=64, capacity=2048)

    ids = streams.admit([[1, 2, 3], [4]], seed=[7, 8])     # read prompts in parallel, into free slots
    tokens = streams.step()                                # {id: token} of every running stream
    streams.retire(ids[0])                                 # frees its slot

    Memory is allocated once: `slots` rows of `bytes_per_stream`. The batch always has that many rows, so that a
    stream's numbers do not depend on the other streams. A stream is retired when it draws a stop token or is full.

    Each stream may have its own sampling and stop tokens, and with Streams(..., top=20) may ask for up to so many of
    the most probable tokens: admit([[1, 2, 3]], sampling=Sampling(top_p=0.9), stop=0, top=5), then `streams.top[id]`.

    `state(id)` has not seen the stream's last token. To continue from it, pass that token again as the prompt:

    state, last = streams.state(ids[1]), tokens[ids[1]]
    ids = streams.admit([[last]], state=state)

    `propose({id: [5, 6, 7]})` checks tokens that somebody guessed in one parallel pass and keeps those that the stream
    would have drawn; the state never sees the others.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        capacity: int,
        sampling: Sampling | None = None,
        stop: int | Sequence[int] = (),
        top: int = 0,
        compile: bool = False,
        **options: Unpack[SamplingOptions],
    ):
        self.slots, self.capacity, self.most = slots, capacity, top
        at_least(self, slots=1, capacity=1)
        check_count("top", top, 0)
        self.sampling, stop = check_drawing(model, Sampling.of(sampling, **options), stop)
        if hasattr(model, "encode"):
            raise ValueError("model reads a source: accepted is a language model")
        check_fits(model, slots, capacity)
        self.model, self.modules = model, list(model.modules())
        self.bytes_per_stream = bytes_per_stream(model, capacity)
        self.decoder, self.head, self.rooms = decoder_of(model), head_of(model), Rooms(decoder_of(model))
        self.loop = self._make_loop(compile, top)
        self.active: Tensor | None = None  # [slots], 1 for running streams; None: compute it from the streams
        self.stop = frozenset(stop)
        self.streams: dict[int, _Stream] = {}
        self.samplings: Counter[Sampling] = Counter()  # of running streams
        self.asking = 0  # running streams that want to know the most probable tokens
        self.logprobs: dict[int, float] = {}  # of the last step's tokens
        self.top: dict[int, Top] = {}  # of the last step, for the streams that asked
        self.next_id = 0
        self.whole = True  # False during a step, while states are half written
        self.lock = threading.RLock()  # a server may admit from one thread and step in another

    def _make_loop(self, compile: bool, top: int) -> Loop:
        """A loop with empty rows; one of earlier streams of this kind, whose steps are captured, if it was kept."""
        model, slots = self.model, self.slots
        zeros = torch.zeros(slots, dtype=torch.int64, device=model.device)
        rows = Rows.of([self.sampling] * slots, values_of(model), model.device)
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in leaves(self.rooms.shape(self.capacity)))
        key = ("streams", slots, self.capacity, shapes, str(model.device), compile, top)
        loop: Loop | None = kept.take(model, key, kept.stamp(model)) if captures(model) else None
        if loop is None:
            state = self.decoder.init_state(slots, self.capacity)
            loop = Loop(model, state, zeros, zeros.clone(), rows, logprobs=True, compile=compile, top=top)
        else:
            one = self.decoder.init_state(1, self.capacity)
            state = map_state(lambda tensor: tensor.expand(slots, *tensor.shape[1:]), one)
            loop.restart(model, state, zeros, zeros, rows, ())
            loop.configure(rows.uses)
        if loop.capturing:
            weakref.finalize(self, _park, loop, weakref.ref(model), key).atexit = False
        return loop

    @property
    def running(self) -> list[int]:
        return list(self.streams)

    @property
    def free(self) -> int:
        return self.slots - len(self.streams)

    def admit(
        self,
        prompts: Prompt,
        *,
        lengths: Tensor | None = None,
        seed: Seed = 0,
        state: State | None = None,
        before: Sequence[Sequence[int]] | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: int | Sequence[int] = (),
        top: int = 0,
    ) -> list[int]:
        """Start streams from prompts (and states that came before them); returns an id for each.

        before    the tokens in `state`, one list for each stream: a repetition penalty counts them
        sampling  of all these streams, or one for each; None: that of Streams(...)
        stop      tokens that end these streams, in addition to those of Streams(...)
        top       how many of the most probable tokens `streams.top` lists after each step
        """
        with self._alone(), torch.no_grad():
            read = read_prompts(self.model, prompts, lengths, state, seed, "prompts", self.rooms)
            count = len(read.tokens)
            chosen = [self.sampling] * count if sampling is None else sampling
            chosen = [chosen] * count if isinstance(chosen, Sampling) else list(chosen)
            if len(chosen) != count:
                raise ValueError(
                    f"sampling has {len(chosen)} settings: accepted is one, or {count}, one for each prompt"
                )
            for one in chosen:
                _, stops = check_drawing(self.model, one, stop)
            check_count("top", top, 0)
            if top > self.most:
                refuse("top", top, f"at most {self.most}, the top of Streams(...)")
            return self._admit(read, self._check_before(before, count), chosen, self.stop.union(stops), top)

    def _check_before(self, before: Sequence[Sequence[int]] | None, count: int) -> list[Tensor]:
        if before is None:
            return []
        vocab = vocab_of(self.model)
        if len(before) != count or any(not 0 <= token < vocab for row in before for token in row):
            refuse("before", before, f"{count} lists of tokens from 0 to {vocab - 1}, one for each prompt")
        return [torch.tensor(row, dtype=torch.int64, device=self.model.device) for row in before]

    def _admit(
        self, prompts: Prompts, before: list[Tensor], samplings: list[Sampling], stop: frozenset[int], top: int
    ) -> list[int]:
        taken = {stream.slot for stream in self.streams.values()}
        count = len(prompts.tokens)
        if count > self.free:
            raise ValueError(f"prompts has {count} rows: accepted is at most {self.free}, free of {self.slots} slots")
        reached = prompts.sizes.cpu() + (0 if prompts.state is None else position_of(prompts.state).cpu())
        if (last := int(reached.max())) > self.capacity:
            raise ValueError(f"prompts reach position {last}: accepted is at most capacity={self.capacity}")
        state = begin(self.model, prompts, self.capacity, self.rooms)
        loop = self.loop
        loop.refresh(self.model)
        slots = list(itertools.islice((slot for slot in range(self.slots) if slot not in taken), count))
        rows = torch.tensor(slots, device=self.model.device)
        overwrite(loop.state, rows, state)
        loop.token[rows], loop.seeds[rows], loop.done[rows] = prompts.last, prompts.seeds, False
        loop.assign(rows, Rows.of(samplings, self.head.values, self.model.device))
        with_new = Uses.of([*self.samplings, *samplings]).coarse
        loop.configure(with_new, loop.tops)  # it makes `seen` for the first stream with a repetition penalty
        if with_new.penalty:
            loop.mark_seen(prompts.tokens, rows)
            for slot, tokens in zip(slots, before, strict=False):
                loop.seen[slot, tokens] = True  # type: ignore[index]
        self.active = None
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        lefts = (self.capacity - reached + 1).tolist()
        self.samplings.update(samplings)
        self.asking += count if top else 0
        parts = zip(slots, lefts, samplings, strict=True)
        new = {id: _Stream(*part, stop, top) for id, part in zip(ids, parts, strict=True)}
        self.streams.update(new)  # last: if admit fails before, the slots stay free
        self._configure()
        return ids

    def step(self) -> dict[int, int]:
        """One token for every running stream, by id; `logprobs` holds their log-probabilities."""
        with self._alone(), torch.no_grad():
            return self._step() if self.streams else {}

    def _step(self) -> dict[int, int]:
        self.whole = False
        if self.free:
            # empty slots are computed too: keep their counters at 0, so that they never run out of room
            if self.active is None:
                runs = {stream.slot for stream in self.streams.values()}
                self.active = torch.tensor([int(slot in runs) for slot in range(self.slots)], device=self.model.device)
            counters = positions(self.loop.state)
            torch._foreach_mul_(counters, [self.active] * len(counters))
        (token, logprob), *_ = self.loop.advance(1)
        assert logprob is not None
        parts = [token[None], logprob[None], *(tensor.T for tensor in self.loop.top if self.loop.tops)]
        drawn, scores, *best = torch.cat([part.double() for part in parts]).tolist()  # waits for the GPU once
        made = {id: int(drawn[stream.slot]) for id, stream in self.streams.items()}
        self.logprobs = {id: scores[stream.slot] for id, stream in self.streams.items()}
        self.top = {}
        ended = []
        for id, stream in self.streams.items():
            if stream.top:
                columns = zip(best[len(best) // 2 :], best, strict=False)
                self.top[id] = [(int(t[stream.slot]), p[stream.slot]) for t, p in columns][: stream.top]
            stream.left -= 1
            if stream.left == 0 or made[id] in stream.stop:
                ended.append(id)
        for id in ended:
            self.retire(id)
        self.whole = True
        return made

    def propose(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, Checked]:
        """Continue streams by tokens that somebody guessed, as far as they are those that the stream would draw.

        Each stream reads its draft in one parallel pass, alone. Noise is a hash of seed and position, so this holds for
        drawn tokens as for greedy ones. The state afterwards has seen what the stream kept and nothing else: where a
        token is refused, the kept ones are read again from the state before.

        A parallel pass rounds differently than steps. So a token counts only if its score exceeds the others' by far
        more than that; otherwise the next step decides. In 16 bits that is not possible, and a text may change.
        """
        with self._alone(), torch.no_grad():
            values = values_of(self.model)
            for id, draft in drafts.items():
                self._slot(id)
                if any(type(token) is not int or not 0 <= token < values for token in draft):
                    refuse("drafts", shown(draft), f"tokens from 0 to {values - 1} for each stream")
            return {id: self._check_draft(id, list(draft)) for id, draft in drafts.items()}

    def _check_draft(self, id: int, draft: list[int]) -> Checked:
        stream, loop, device = self.streams[id], self.loop, self.model.device
        draft = draft[: stream.left - 1]
        row = torch.tensor([stream.slot], device=device)
        before = select(loop.state, row)
        inputs = torch.cat((loop.token[row], torch.tensor(draft, dtype=torch.int64, device=device)))[None]  # [1, k + 1]
        count = inputs.shape[1]
        outputs, after = self._read(inputs, before)
        outputs = outputs[0]  # [k + 1, V]
        seen = None
        if stream.sampling.repetition_penalty != 1 and loop.seen is not None:
            read = torch.zeros(count, loop.vocab, dtype=torch.int64, device=device).scatter_(1, inputs.T, 1)
            seen = loop.seen[row] | (read.cumsum(0) > 0)
        settings = Rows.of([stream.sampling], self.head.values, device)
        places = position_of(before) + torch.arange(1, count + 1, device=device)
        seen_values = None if seen is None else seen[:, : self.head.values]
        scores = self.head.score(outputs, settings, loop.seeds[row].expand(count), places, seen_values)
        best = scores.topk(min(2, scores.shape[-1]))
        tokens = best.indices[:, 0]
        gap = best.values[:, 0] - best.values[:, -1] if scores.shape[-1] > 1 else torch.ones_like(best.values[:, 0])
        sure = gap > SURE.get(self.model.dtype, -1.0) * best.values[:, 0].abs().clamp(min=1.0)
        parts = [tokens, sure, self.head.log_prob(outputs, tokens)]
        drawn, firm, logprobs = torch.stack([part.double() for part in parts]).tolist()
        kept: list[int] = []
        for j, token in enumerate(map(int, drawn)):
            if not firm[j]:
                break
            kept.append(token)
            if token in stream.stop or j == len(draft) or token != draft[j]:
                break
        if not kept:
            return Checked([], 0, [], [])
        number = len(kept)
        if number < count:
            _, after = self._read(inputs[:, :number], before)
        tops: list[Top] = [[] for _ in kept]
        if stream.top:
            some = self.head.log_probs(outputs[:number]).topk(min(stream.top, self.head.values))
            pairs = zip(some.indices.tolist(), some.values.tolist(), strict=True)
            tops = [list(zip(*pair, strict=True)) for pair in pairs]
        self.whole = False
        overwrite(loop.state, row, after)
        loop.token[row] = kept[-1]
        if seen is not None and loop.seen is not None:
            loop.seen[row] = seen[number - 1]
        self.whole = True
        stream.left -= number
        if stream.left == 0 or kept[-1] in stream.stop:
            self.retire(id)
        accepted = sum(a == b for a, b in zip(kept, draft, strict=False))
        return Checked(kept, accepted, logprobs[:number], tops)

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Tokens [1, T] in parallel, after a state that is not changed."""
        return run_small(work_of(self.model, state, tokens.numel()), lambda: self.decoder.prefill(tokens, state=state))

    def state(self, id: int) -> State:
        """A copy of a stream's state, to save, fork or admit again; it has not seen the stream's last token."""
        with self._alone():
            return select(self.loop.state, torch.tensor([self._slot(id)], device=self.model.device))

    def retire(self, id: int) -> None:
        """End a stream; its slot is free."""
        with self.lock:
            self._slot(id)
            self.active = None
            stream = self.streams.pop(id)
            self.samplings[stream.sampling] -= 1
            if not self.samplings[stream.sampling]:
                del self.samplings[stream.sampling]
            self.asking -= 1 if stream.top else 0
            self._configure()

    def _configure(self) -> None:
        """Tell the loop what the running streams need."""
        if self.samplings:
            self.loop.configure(Uses.of(self.samplings).coarse, self.asking > 0)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the states for this thread; RuntimeError if an interrupted step left them half written."""
        with self.lock, evaluating(self.model, self.modules):
            if not self.whole:
                raise RuntimeError("an interrupted step left half-written states: admit the streams to a new Streams")
            yield

    def _slot(self, id: int) -> int:
        if id not in self.streams:
            refuse("id", id, f"a running stream: {', '.join(map(str, self.streams)) or 'there is none'}")
        return self.streams[id].slot
