"""Continuous batching: requests join and leave a running batch, and long prompts are read in pieces between its steps.

What a request gets depends on its own prompt, sampling and seed only. Prompts are cut at the same places whoever else
is there, and whether or not a cache knows a part of them.
"""

import functools
import sys
import threading
import time
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from subquad.checks import LARGEST, check_count, check_plain, counts, refuse
from subquad.disk import logger
from subquad.models.decoding import decoder_of, head_of, limit_of, stack_of, values_of, vocab_of
from subquad.models.footprint import Rooms
from subquad.models.generation import check_drawing, evaluating
from subquad.models.sampling import PLAIN
from subquad.models.state import State, map_state, select
from subquad.models.streams import Streams
from subquad.ops.cache import BLOCK
from subquad.serve.borders import EARLY, EVERY, border_after, is_border
from subquad.serve.drafting import Draft, Drafter
from subquad.serve.reading import Reader, record
from subquad.serve.request import Drawn, Full, Request, Stats, Update

ABREAST = 8  # pieces of different prompts in one call on a GPU, which would be idle with one
LEAST = 32  # reading fewer tokens than this takes as long
SEATS = 16  # prompts that are read at the same time
MANY = 64  # streams that run; on a GPU a prompt then waits for others, since they all wait while it is read
GATHER = 0.0001  # seconds for which it waits at most, for each stream that runs
TOP = 20  # the most probable tokens that a request may ask for
GROWING = 2048  # positions of a stream by default if its state grows with each of them
UNLIMITED = 1 << 40  # positions of one whose state does not
SWITCH = 0.0005  # seconds after which a busy thread gives the interpreter to the engine


_HINTS = {name: hint for name, hint in get_type_hints(Request).items() if name not in ("prompt", "stop")}


class Cache(Protocol):
    """What the engine needs of a prefix cache."""

    every: int  # borders lie at multiples of this number of tokens
    early: tuple[int, ...]  # and after so many

    def find(self, tokens: tuple[int, ...], owner: str = "") -> tuple[int, State | None]:
        """The longest prefix whose state is kept, shorter than tokens: (its length, its state, batch 1).

        It ends at a border, or right before the last token.
        """

    def put(self, tokens: tuple[int, ...], state: State, owner: str = "") -> None:
        """Keep the state after exactly these tokens, which end at a border or before the last token of a prompt."""


class _Alike:
    """Requests of one client for the same prompt, such as `n` choices: one of them reads it."""

    __slots__ = ("prompt", "state")

    def __init__(self) -> None:
        self.state: State | None = None  # after the part of the prompt that is read
        self.prompt: list[Drawn] = []  # its log-probabilities


class _Job:
    """A request and how far it is."""

    __slots__ = (
        "alike", "begun", "cached", "draft", "id", "looked", "made", "number", "prompt", "read", "request", "scored",
        "state", "text",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, alike: _Alike):
        self.number, self.request = number, request
        self.alike: _Alike | None = alike  # until the stream starts
        self.begun = time.monotonic()
        self.scored = request.logprobs is not None
        self.state: State | None = None  # after the first `read` tokens of the prompt, until the stream starts
        self.read = 0
        self.cached = 0
        self.looked = False  # in the cache
        self.prompt: list[Drawn] = []  # log-probabilities
        self.id: int | None = None  # of the stream
        self.made = 0
        self.text: list[int] = []  # prompt and drawn tokens, for the draft model
        self.draft: Draft | None = None

    @property
    def needed(self) -> int:
        """Tokens of the prompt to read before the stream starts: its first step reads the last one."""
        return len(self.request.prompt) - 1


class Engine:
    """engine = Engine(model, slots=256)

    number = engine.submit(Request(prompt=(1, 2, 3), steps=100))
    updates = engine.turn()                       # or engine.start(), and `deliver` gets the updates of every turn

    slots     streams that run at the same time; the batch always has that many rows
    capacity  positions that a stream may fill; None: as many as the model has, and 2,048 if its state grows
    queue     requests that may wait, besides those that run
    cache     keeps states of prompts at borders and at their ends
    draft     a smaller model that guesses tokens, which the model then checks in one pass
    piece     tokens of a prompt that are read between two steps, from its first one on; it divides cache.every
    early     places where the first pieces end, besides multiples of `piece`; with a cache, those of the cache
    deliver   called with the updates of each turn, from the engine's thread
    abreast   pieces of different prompts that are read in one call, on a GPU: always a batch of that many rows, so that
              a row's numbers do not depend on the others. On a CPU a piece is read alone
    ahead     tokens that the draft model guesses; it rests while more than `crowd` streams run, since a step of many
              streams is the better use of the machine
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 256,
        capacity: int | None = None,
        queue: int = 1024,
        cache: Cache | None = None,
        draft: Any = None,
        piece: int | None = None,
        early: tuple[int, ...] | None = None,
        deliver: Callable[[list[Update]], None] | None = None,
        abreast: int | None = None,
        ahead: int = 4,
        crowd: int = 4,
    ):
        check_drawing(model, PLAIN, ())
        cuda = model.device.type == "cuda"
        if piece is None:
            piece = EVERY if cache is None else cache.every
        if early is None:
            early = EARLY if cache is None else cache.early
        abreast = (ABREAST if cuda else 1) if abreast is None else abreast
        for name, count in (
            ("slots", slots),
            ("queue", queue),
            ("piece", piece),
            ("abreast", abreast),
            ("ahead", ahead),
        ):
            check_count(name, count)
        check_count("crowd", crowd, 0)
        if cache is not None and cache.every % piece:
            refuse("piece", piece, f"a divisor of cache.every={cache.every}: states lie between pieces")
        if not counts(early) or (cache is not None and early != cache.early):
            refuse("early", early, "a tuple of numbers of tokens, with a cache those of the cache")
        self.limit = limit_of(model)
        if capacity is None:
            grows = stack_of(model).traits.state in ("growing", None)
            capacity = self.limit or (GROWING if grows else UNLIMITED)
        check_count("capacity", capacity)
        if self.limit is not None and capacity > self.limit:
            refuse("capacity", capacity, f"at most {self.limit}, the positions of this model")
        self.model, self.modules = model, list(model.modules())
        self.slots, self.capacity, self.most = slots, capacity, queue
        self.cache, self.piece, self.early, self.abreast, self.deliver = cache, piece, early, abreast, deliver
        self.ahead, self.crowd = ahead, crowd
        self.drafter = None if draft is None else Drafter(draft, model)
        self.values, self.vocab = values_of(model), vocab_of(model)
        self.decoder, self.head, self.rooms = decoder_of(model), head_of(model), Rooms(decoder_of(model))
        self.reader = Reader(model, record if cuda else None)
        self.streams = self._make_streams()
        self.single = functools.cache(lambda token: (Drawn(token),))  # made once for each token of the vocabulary

        self.work = threading.Condition()  # guards what other threads touch: the next four
        self.waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by owner; the first owner is served next
        self.known: dict[int, _Job] = {}  # requests that have not ended
        self.leaving: set[int] = set()  # numbers to cancel
        self.closed = self.ending = False
        self.turning = threading.Lock()
        self.thread: threading.Thread | None = None
        self.reading: deque[_Job] = deque()
        self.drawing: dict[int, _Job] = {}  # by the id of the stream
        self.next_number = 0
        self.counts = dict.fromkeys(("steps", "tokens", "prompt_tokens", "cached_tokens", "drafted", "accepted"), 0)

    @functools.cached_property
    def empty(self) -> State:
        """The state before a prompt, for pieces that are read abreast; they copy it."""
        empty: State = self.decoder.init_state(1, self.capacity)
        return empty

    def _make_streams(self) -> Streams:
        # whole blocks, so that the end of a cache is no special case in ops/cache.py; `check` keeps to the capacity
        room = -(-self.capacity // BLOCK) * BLOCK
        return Streams(self.model, slots=self.slots, capacity=room, top=min(TOP, self.values))

    # What other threads call

    def check(self, requests: Sequence[Request]) -> None:
        """ValueError if one cannot work; it names the limit. A long prompt that several share is looked at once."""
        known: set[int] = set()
        for request in requests:
            if id(request.prompt) not in known:
                if not request.prompt:
                    raise ValueError("prompt is empty: at least one token is needed, such as a start token")
                _check_tokens("prompt", request.prompt, self.vocab)
                known.add(id(request.prompt))
            self._check_rest(request)

    def _check_rest(self, request: Request) -> None:
        for name, hint in _HINTS.items():
            check_plain(name, getattr(request, name), hint)
        check_count("steps", request.steps)
        _check_tokens("stop", request.stop, self.values)
        request.sampling.check(self.values)
        if request.logprobs is not None and not 0 <= request.logprobs <= self.streams.most:
            refuse("logprobs", request.logprobs, f"None, or a number from 0 to {self.streams.most}")
        if not -LARGEST <= request.seed < LARGEST:
            refuse("seed", request.seed, "an integer of 64 bits")
        reached = len(request.prompt) + request.steps - 1
        if reached > self.capacity:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and steps={request.steps} reach position {reached}: "
                f"accepted is at most capacity={self.capacity}"
            )

    def submit(self, request: Request) -> int:
        """Queue a request from any thread; returns its number. Full if the queue is; ValueError if it cannot work."""
        return self.submit_all((request,))[0]

    def submit_all(self, requests: Sequence[Request], checked: bool = False) -> list[int]:
        """Queue all of them or none; `checked`: they have passed `check`. ValueError if they never fit."""
        if not checked:
            self.check(requests)
        most = self.slots + self.most
        limit = f"accepted are at most {most:,}, as slots={self.slots} and queue={self.most}"
        if len(requests) > most:
            raise ValueError(f"{len(requests):,} choices at once cannot work: {limit}")
        with self.work:
            if self.closed:
                raise Full("the engine stops: no new requests")
            if len(self.known) + len(requests) > most:
                raise Full(f"{len(self.known):,} requests run or wait, and {len(requests):,} come: {limit}")
            alike: defaultdict[Any, _Alike] = defaultdict(_Alike)
            asked = [(id(one.prompt), one.owner, one.logprobs, one.prompt_logprobs) for one in requests]
            jobs = [
                _Job(number, request, alike[what])
                for number, (request, what) in enumerate(zip(requests, asked, strict=True), self.next_number)
            ]
            self.next_number += len(jobs)
            for job in jobs:
                self.known[job.number] = job
                self.waiting.setdefault(job.request.owner, deque()).append(job)
            self.work.notify_all()
            return [job.number for job in jobs]

    def cancel(self, *numbers: int) -> None:
        """End requests from any thread, such as those of a client that has left; finished ones are left alone."""
        with self.work:
            self.leaving.update(number for number in numbers if number in self.known)
            self.work.notify_all()

    @property
    def stats(self) -> Stats:
        with self.work:
            queued = self._queued()
        each = self.streams.bytes_per_stream
        running, reading = len(self.drawing), len(self.reading)
        return Stats(
            running, queued, reading, self.slots - running - reading, **self.counts,
            bytes_per_stream=each, state_bytes=each * self.slots,
        )  # fmt: skip

    def _queued(self) -> int:
        return sum(map(len, self.waiting.values()))

    def start(self) -> None:
        """Take turns in a thread while there is work."""
        with self.work:
            if self.thread is not None:
                raise RuntimeError("the engine runs already")
            self.closed = self.ending = False
            self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # torch gives the interpreter up in every operation. By default a busy thread gives it back after 5 ms only,
        # which a step of a hundred operations cannot wait for
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH))
        self.thread.start()

    def stop(self, drain: bool = True, seconds: float = 30.0) -> None:
        """Refuse new requests, with `drain` wait `seconds` for the others, cancel what is left, and end the thread."""
        with self.work:
            self.closed = True
            if drain and self.thread is not None:
                self.work.wait_for(lambda: not self.known, timeout=seconds)
            self.leaving.update(self.known)
            self.ending = True
            thread, self.thread = self.thread, None
            self.work.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        device = torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext()
        with device:
            while True:
                with self.work:
                    self.work.wait_for(lambda: self.known or self.leaving or self.ending)
                    if self.ending and not self.known:
                        return
                try:
                    updates = self.turn()
                except Exception as error:
                    updates = self._fail(error)
                if updates and self.deliver is not None:
                    try:
                        self.deliver(updates)
                    except Exception:
                        logger.exception("deliver failed: its updates are lost")

    def _fail(self, error: Exception) -> list[Update]:
        """End all requests after an error that no part of a turn expects, such as too little memory for new streams."""
        logger.exception("a turn failed, so all requests end")
        with self.work:
            jobs, self.known = list(self.known.values()), {}
            self.waiting.clear()
            self.work.notify_all()
        self.reading.clear()
        return [self._end(job, "error", error=describe(error)) for job in jobs]

    # A turn

    def turn(self) -> list[Update]:
        """Admit requests, read pieces of their prompts, and draw at least one token for every running stream."""
        with self.turning, torch.no_grad(), evaluating(self.model, self.modules):
            updates = self._cancel()
            self._admit()
            updates += self._read()
            try:
                updates += self._draw()
            except Exception as error:
                logger.exception("a step failed: its requests end, and the next ones get new streams")
                updates += [self._end(job, "error", error=describe(error)) for job in list(self.drawing.values())]
                self.streams = self._make_streams()
            made = 0
            for update in updates:
                made += len(update.drawn)
                if update.end is not None:
                    self._forget(update.number)
            self.counts["tokens"] += made
            return updates

    def _cancel(self) -> list[Update]:
        with self.work:
            leaving, self.leaving = self.leaving, set()
            jobs = [self.known[number] for number in sorted(leaving) if number in self.known]
            for job in jobs:
                queued = self.waiting.get(job.request.owner, deque())
                if job in queued:
                    queued.remove(job)
                    if not queued:
                        del self.waiting[job.request.owner]
        for job in jobs:
            if job in self.reading:
                self.reading.remove(job)
        return [self._end(job, "cancelled") for job in jobs]

    def _admit(self) -> None:
        """Owners take turns, so that one with many requests does not hold up the others."""
        with self.work:
            if self._gathers():
                return
            while self.waiting and len(self.reading) < SEATS and len(self.drawing) + len(self.reading) < self.slots:
                owner, jobs = self.waiting.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    self.waiting[owner] = jobs
                self.reading.append(job)

    def _gathers(self) -> bool:
        """Whether the prompts that wait should wait for more of them: to read one takes as long as to read a few."""
        free = self.slots - len(self.drawing)
        if self.reading or len(self.drawing) < MANY or self._queued() >= min(self.abreast, free):
            return False
        latest = time.monotonic() - GATHER * len(self.drawing)
        return all(job.begun > latest for jobs in self.waiting.values() for job in jobs)

    def _read(self) -> list[Update]:
        """Pieces of prompts, of about `piece` tokens for each row; prompts take turns."""
        updates: list[Update] = []
        budget = self.piece
        while self.reading and budget > 0:
            group = self._next_group()
            budget -= max(LEAST, max(count for _, count in group))
            try:
                self._read_pieces(group)
            except Exception as error:
                if len(group) == 1:
                    updates.append(self._end(group[0][0], "error", error=describe(error)))
                    continue
                logger.exception("reading %d prompts together failed, so each is read alone", len(group))
                for part in group:
                    job = part[0]
                    try:
                        self._read_pieces([(job, self._border(job) - job.read)])
                    except Exception as own:
                        updates.append(self._end(job, "error", error=describe(own)))
                        group = [other for other in group if other is not part]
            self.reading.extend(job for job, _ in group if job.read < job.needed)
            updates += self._place([job for job, _ in group if job.read == job.needed])
            self._admit()  # a prompt that is done leaves its seat
        return updates

    def _next_group(self) -> list[tuple[_Job, int]]:
        """Jobs that leave the queue of readers, with the number of tokens to read for each."""
        group: list[tuple[_Job, int]] = []
        readers = list(self.reading)
        for job in readers:
            if not job.looked and not self._waits(job, readers):
                self._find(job)
            job.looked = not self._waits(job, readers)  # else it looks again when the other one has read the piece
            if not job.looked:
                continue
            count = self._border(job) - job.read
            first = group[0][1] if group else count
            fits = count == first if 0 in (count, first) else self._width(count) == self._width(first)
            if fits:
                group.append((job, count))
                self.reading.remove(job)
            if len(group) == self.abreast and first:  # those that have nothing to read begin together
                break
        return group

    def _border(self, job: _Job) -> int:
        """Where the next piece of a prompt ends."""
        return min(border_after(job.read, self.piece, self.early), job.needed)

    def _keeps(self, job: _Job, count: int) -> bool:
        """Whether the cache is given the state of a prompt after `count` tokens: at borders, and where reading ends."""
        cache = self.cache
        return cache is not None and (count == job.needed or is_border(count, cache.every, cache.early))

    def _waits(self, job: _Job, readers: list[_Job]) -> bool:
        """Whether an earlier request reads the same piece next, whose state this one will then have."""
        end, request = self._border(job), job.request
        if end == job.read:
            return False
        earlier = [other for other in readers if other.number < job.number and other.read < other.needed]
        if any(other.alike is job.alike for other in earlier):
            return True
        if request.prompt_logprobs or not self._keeps(job, end):
            return False
        return any(
            other.read < end <= other.needed
            and self._keeps(other, end)
            and other.request.owner == request.owner
            and other.request.prompt[job.read : end] == request.prompt[job.read : end]  # quick: most differ here
            and other.request.prompt[:end] == request.prompt[:end]
            for other in earlier
        )

    def _width(self, count: int) -> int:
        """Columns of a call that reads pieces of several prompts: a few sizes, that depend on the piece only."""
        return min(self.piece, max(LEAST, 1 << (count - 1).bit_length()))

    def _find(self, job: _Job) -> None:
        request, alike = job.request, job.alike
        if alike is not None and alike.state is not None:
            job.read = job.cached = job.needed
            job.state, job.prompt = alike.state, list(alike.prompt)
            return
        # log-probabilities of a prompt need the outputs at all its tokens, which no cache has
        if self.cache is None or request.prompt_logprobs:
            return
        try:
            found, state = self.cache.find(request.prompt, request.owner)
        except Exception:
            logger.exception("the cache failed: a prompt is read from its start")
            return
        if state is not None and job.read < found <= job.needed:
            job.read = job.cached = found
            job.state = state

    def _read_pieces(self, group: list[tuple[_Job, int]]) -> None:
        if group[0][1] == 0:
            return
        scored = any(job.request.prompt_logprobs for job, _ in group)
        if self.abreast == 1:
            ((job, count),) = group
            tokens = torch.tensor([job.request.prompt[job.read : job.read + count]], device=self.model.device)
            room = -(-(job.read + count) // BLOCK) * BLOCK  # what lies behind the piece must not change its numbers
            state = None if job.state is None else self.rooms.fit(job.state, room)
            outputs, state = self._prefill(tokens, None, state, scored)
            results = [(outputs[0], state)]
        else:
            width, rows = self._width(group[0][1]), len(group)
            tokens = torch.zeros(self.abreast, width, dtype=torch.int64)
            for row, (job, count) in zip(tokens, group, strict=False):
                row[:count] = torch.tensor(job.request.prompt[job.read : job.read + count])
            counts = [count for _, count in group]
            lengths = torch.tensor(counts + [1] * (self.abreast - rows), device=self.model.device)
            empty = self.empty
            states = [empty if job.state is None else self.rooms.fit(job.state, self.capacity) for job, _ in group]
            states += [empty] * (self.abreast - rows)
            joined = map_state(lambda *parts: torch.cat(parts), *states)
            outputs, state = self._prefill(tokens.to(self.model.device), lengths, joined, scored)
            results = [
                (outputs[i, :count], map_state(torch.clone, select(state, slice(i, i + 1))))
                for i, count in enumerate(counts)
            ]
        for (job, count), (outputs, state) in zip(group, results, strict=True):
            if job.request.prompt_logprobs:
                self._note(job, outputs, count)
            job.state, job.read = state, job.read + count
            if job.read == job.needed and job.alike is not None:
                job.alike.state, job.alike.prompt = state, list(job.prompt)
            if self.cache is not None and self._keeps(job, job.read):
                kept = self.rooms.fit(state, job.read, trim=True)
                try:
                    self.cache.put(job.request.prompt[: job.read], kept, job.request.owner)
                except Exception:
                    logger.exception("the cache failed: it does not keep a state")

    def _prefill(self, tokens: Tensor, lengths: Tensor | None, state: State | None, head: bool) -> tuple[Tensor, State]:
        return self.reader.read(tokens, lengths, state, head)

    def _note(self, job: _Job, outputs: Tensor, count: int) -> None:
        """Log-probabilities of the tokens after those that were read."""
        request = job.request
        logprobs = self.head.log_probs(outputs)  # [T, V]
        later = request.prompt[job.read + 1 : job.read + count + 1]
        own = logprobs.gather(-1, torch.tensor(later, device=logprobs.device)[:, None].clamp(max=self.values - 1))
        best = logprobs.topk(request.logprobs or 0)
        rows = zip(later, own[:, 0].tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for token, logprob, tokens, values in rows:
            logprob = logprob if token < self.values else None  # the model cannot draw it, such as a start token
            job.prompt.append(Drawn(token, logprob, tuple(zip(tokens, values, strict=True))))

    def _place(self, jobs: list[_Job]) -> list[Update]:
        """Start the streams of prompts that have been read: of those that are alike in one call."""
        alike: dict[Any, list[_Job]] = {}
        for job in jobs:
            request = job.request
            before = request.sampling.repetition_penalty != 1 and job.state is not None
            alike.setdefault((request.stop, request.logprobs or 0, before, job.state is None), []).append(job)
        updates: list[Update] = []
        for same in alike.values():
            try:
                self._start_streams(same)
            except Exception as error:
                if len(same) == 1:
                    updates.append(self._end(same[0], "error", error=describe(error)))
                    continue
                logger.exception("starting %d streams together failed, so each is started alone", len(same))
                for job in same:
                    updates += self._place([job])
        return updates

    def _start_streams(self, jobs: list[_Job]) -> None:
        """Streams of the same stop tokens and number of log-probabilities."""
        requests = [job.request for job in jobs]
        first, states = requests[0], [job.state for job in jobs if job.state is not None]
        state = states[0] if states else None
        if len(states) > 1:
            states = [self.rooms.fit(one, self.capacity) for one in states]
            state = map_state(lambda *parts: torch.cat(parts), *states)
        penalty = any(request.sampling.repetition_penalty != 1 for request in requests)
        ids = self.streams.admit(
            [[request.prompt[-1]] for request in requests],
            state=state,
            seed=[request.seed for request in requests],
            before=[request.prompt[:-1] for request in requests] if penalty and state is not None else None,
            sampling=[request.sampling for request in requests],
            stop=first.stop,
            top=first.logprobs or 0,
        )
        for id, job, request in zip(ids, jobs, requests, strict=True):
            job.id, job.state, job.alike = id, None, None
            if request.prompt_logprobs:
                job.prompt.insert(0, Drawn(request.prompt[0]))
            if self.drafter is not None:
                job.text, job.draft = list(request.prompt), Draft(request.sampling, request.seed)
            self.drawing[id] = job
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += job.cached

    def _draw(self) -> list[Update]:
        drafted: dict[int, tuple[Drawn, ...]] = {}
        if self.drafter is not None and len(self.drawing) <= self.crowd:
            drafted = self._draft(self.drafter)
        running = self.streams.streams
        if not running or (drafted and all(drafted.get(id) for id in running)):  # every stream has got on
            return [self._report(self.drawing[id], drawn) for id, drawn in drafted.items() if drawn]
        made = self.streams.step()
        self.counts["steps"] += 1
        logprobs, tops, updates = self.streams.logprobs, self.streams.top, []
        for id, token in made.items():
            job = self.drawing[id]
            drawn: tuple[Drawn, ...]
            drawn = (Drawn(token, logprobs[id], tuple(tops.get(id, ()))),) if job.scored else self.single(token)
            if drafted:
                drawn = drafted.pop(id, ()) + drawn
            updates.append(self._report(job, drawn))
        return updates + [self._report(self.drawing[id], drawn) for id, drawn in drafted.items() if drawn]

    def _draft(self, drafter: Drafter) -> dict[int, tuple[Drawn, ...]]:
        """Tokens of streams whose drafts held, at least partly."""
        made = {}
        for id, job in self.drawing.items():
            # one token may follow the draft, and one may come from a step
            count = min(self.ahead, job.request.steps - job.made - 2, self.capacity - len(job.text) - 1)
            if count < 1 or job.draft is None:
                continue
            try:
                guess = drafter.guess(job.draft, job.text, count)
                checked = self.streams.propose({id: guess})[id] if guess else None
            except Exception:
                logger.exception("a draft failed: its stream goes on without")
                job.draft = None
                continue
            if checked is not None:
                self.counts["drafted"] += len(guess)
                self.counts["accepted"] += checked.accepted
                parts = zip(checked.tokens, checked.logprobs, checked.top, strict=True)
                made[id] = tuple(Drawn(t, p, tuple(top)) if job.scored else Drawn(t) for t, p, top in parts)
        return made

    def _report(self, job: _Job, drawn: tuple[Drawn, ...]) -> Update:
        first, request = job.made == 0, job.request
        job.made += len(drawn)
        if job.draft is not None:
            job.text += [one.token for one in drawn]
        if drawn[-1].token in request.stop:
            return self._end(job, "stop", drawn, first)
        if job.made >= request.steps:
            return self._end(job, "length", drawn, first)
        return Update(job.number, drawn, None, job.cached, tuple(job.prompt) if first else ())

    def _end(self, job: _Job, end: str, drawn: tuple[Drawn, ...] = (), first: bool = False, error: str = "") -> Update:
        if job.id is not None:
            self.drawing.pop(job.id, None)
            if job.id in self.streams.streams:
                self.streams.retire(job.id)
        return Update(job.number, drawn, end, job.cached, tuple(job.prompt) if first else (), error)

    def _forget(self, number: int) -> None:
        with self.work:
            self.known.pop(number, None)
            self.work.notify_all()


def _check_tokens(name: str, tokens: tuple[int, ...], count: int) -> None:
    """Refuse anything but a tuple of tokens below `count`; a long prompt takes a millisecond."""
    if not isinstance(tokens, tuple):
        refuse(name, tokens, "a tuple of tokens")
    try:
        ids = torch.frombuffer(array("q", tokens), dtype=torch.int64) if tokens else torch.zeros(0)
    except (TypeError, OverflowError):
        refuse(name, tokens, f"a tuple of tokens from 0 to {count - 1}")
    if (wrong := (ids < 0) | (ids >= count)).any():
        raise ValueError(f"{name} holds {int(ids[wrong][0])}: accepted are tokens from 0 to {count - 1}")


def describe(error: Exception) -> str:
    """An error as a client may see it."""
    return f"{type(error).__name__}: {error}"[:500]
