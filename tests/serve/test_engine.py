import queue
import random
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from subquad import LanguageModel, Sampling
from subquad.models.state import State
from subquad.models.streams import Streams
from subquad.serve import engine as serve_engine
from subquad.serve.engine import Engine
from subquad.serve.request import Drawn, Full, Request, Update

GREEDY = Sampling(temperature=0)
KINDS: tuple[Any, ...] = ("linear", "softmax", ("linear", ("local", {"window": 5})), "gated_deltanet")
SAMPLINGS = (
    GREEDY,
    Sampling(),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(top_k=5, repetition_penalty=1.3),
    Sampling(min_p=0.2, exclude=(3, 4)),
    Sampling(temperature=0, repetition_penalty=1.5),
)
ids = str


def make(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(**{"vocab": 23, "dim": 16, "depth": 2, "heads": 2, "mechanism": mechanism, **changes})
    for p in model.parameters():  # far from uniform predictions, so that tokens depend on the prefix
        p.data.mul_(1.5)
    return model.eval()


class Book:
    """The simplest prefix cache: it keeps everything."""

    def __init__(self, every: int = 4, early: tuple[int, ...] = ()):
        self.every, self.early, self.hits = every, early, 0
        self.states = dict[tuple[str, tuple[int, ...]], State]()
        self.twice = 0  # states that were made although they were there

    def find(self, tokens: tuple[int, ...], owner: str = "") -> tuple[int, State | None]:
        last = len(tokens) - 1
        for count in sorted({last, *range(self.every, last, self.every), *self.early}, reverse=True):
            if count <= last and (state := self.states.get((owner, tokens[:count]))) is not None:
                self.hits += 1
                return count, state
        return 0, None

    def put(self, tokens: tuple[int, ...], state: State, owner: str = "") -> None:
        self.twice += (owner, tokens) in self.states
        self.states[owner, tokens] = state


def finish(engine: Engine, numbers: Iterable[int]) -> dict[int, list[Update]]:
    """The updates of these requests, until all have ended."""
    updates: dict[int, list[Update]] = {number: [] for number in numbers}
    for _ in range(10_000):
        for update in engine.turn():
            updates.setdefault(update.number, []).append(update)
        if all(parts and parts[-1].end for parts in updates.values()):
            return updates
    raise AssertionError("requests did not end")


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[Drawn], str | None]]:
    updates = finish(engine, numbers := [engine.submit(request) for request in requests])
    return [([one for part in updates[n] for one in part.drawn], updates[n][-1].end) for n in numbers]


def tokens(engine: Engine, request: Request) -> list[int]:
    return [one.token for one in answers(engine, [request])[0][0]]


def random_starts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(23) for _ in range(rng.randrange(20))] for _ in range(2)]


def random_requests(
    rng: random.Random, count: int, starts: list[list[int]] | None = None, **fields: Any
) -> list[Request]:
    """Prompts that begin alike."""
    starts = random_starts(rng) if starts is None else starts
    made = []
    for _ in range(count):
        start = rng.choice(starts)
        tail = [rng.randrange(23) for _ in range(rng.randrange(1, 8))]
        prompt = tuple(start[: rng.randrange(len(start) + 1)] + tail)
        made.append(Request(prompt=prompt, steps=rng.randrange(1, 7), seed=rng.randrange(99), **fields))
    return made


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_text_is_the_same_alone_and_together_with_the_cache_on_and_off(kind: Any) -> None:
    """Log-probabilities too are equal bit by bit. Each set comes twice; test_cache.py has 200 sets."""
    early = (1, 3, 6)
    model, book = make(kind, depth=1 if isinstance(kind, str) else 2), Book(early=early)
    plain, cached, alone = (
        Engine(model, slots=4, capacity=40, piece=4, early=early, cache=cache) for cache in (None, book, None)
    )
    for number in range(28):
        if number % 2 == 0:
            requests = random_requests(random.Random(number), 5, sampling=GREEDY, logprobs=2)
            expected = [answers(alone, [request])[0] for request in requests]
            assert answers(plain, requests) == expected, number
        if number % 10 == 0:
            book.states.clear()
        assert answers(cached, requests) == expected, number
    assert book.hits > 90
    assert book.twice == 0
    assert cached.stats.cached_tokens > 300
    assert plain.stats.cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_each_request_has_its_own_sampling_as_if_it_were_alone(kind: Any) -> None:
    model = make(kind)
    engine = Engine(model, slots=8, capacity=40, piece=4, cache=Book())
    requests = [
        Request(prompt=request.prompt, steps=9, seed=request.seed, sampling=SAMPLINGS[i % len(SAMPLINGS)])
        for i, request in enumerate(random_requests(random.Random(5), 12))
    ]
    for request, (drawn, end) in zip(requests, answers(engine, requests), strict=True):
        alone = model.generate(request.prompt, 9, sampling=request.sampling, seed=request.seed)
        assert [one.token for one in drawn] == alone.tolist()
        assert end == "length"


@pytest.mark.parametrize("kind", ["linear", "softmax", ("linear", ("local", {"window": 5}))], ids=ids)
@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_changes_no_token(kind: Any, same: bool) -> None:
    """Neither one that guesses right nor one that guesses wrong; greedy and drawn."""
    model = make(kind)
    draft = model if same else make("linear", depth=1, dim=8)
    plain = Engine(model, slots=4, capacity=60, piece=4)
    quick = Engine(model, slots=4, capacity=60, piece=4, draft=draft, ahead=3)
    requests = [
        Request(prompt=request.prompt, steps=16, seed=i, sampling=SAMPLINGS[i % len(SAMPLINGS)], logprobs=1, stop=(7,))
        for i, request in enumerate(random_requests(random.Random(2), 12))
    ]
    for (a, end), (b, other) in zip(answers(plain, requests), answers(quick, requests), strict=True):
        assert [one.token for one in a] == [one.token for one in b]
        assert end == other
        scores = [torch.tensor([[one.logprob, one.top[0][1]] for one in drawn]) for drawn in (a, b)]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)
    stats = quick.stats
    assert stats.drafted > 40
    assert 0 < stats.accepted <= stats.drafted
    if same:
        assert stats.accepted > 0.95 * stats.drafted
        assert stats.steps < plain.stats.steps / 2


def test_a_draft_that_fails_leaves_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine = Engine(model, slots=2, capacity=40, draft=model)
    guess = engine.drafter.guess

    def fail(draft: Any, text: list[int], count: int) -> list[int]:
        if text[0] == 9:
            raise RuntimeError("no memory")
        return guess(draft, text, count)

    monkeypatch.setattr(engine.drafter, "guess", fail)
    requests = [Request(prompt=(n,), steps=12) for n in (9, 8)]
    for request, (drawn, end) in zip(requests, answers(engine, requests), strict=True):
        assert [one.token for one in drawn] == model.generate(request.prompt, 12, seed=0).tolist()
        assert end == "length"
    assert engine.stats.accepted > 0


def test_pieces_of_several_prompts_in_one_call_give_the_same_text() -> None:
    """As on a GPU: equal bit by bit in any company, and equal to pieces that are read alone up to rounding."""
    for kind in KINDS:
        model, requests = make(kind), random_requests(random.Random(3), 9, sampling=GREEDY, logprobs=0)
        together, each = (
            answers(Engine(model, slots=6, capacity=40, piece=4, cache=Book(), abreast=abreast), requests)
            for abreast in (4, 1)
        )
        for (a, _), (b, _) in zip(together, each, strict=True):
            assert [one.token for one in a] == [one.token for one in b]
            torch.testing.assert_close(*(torch.tensor([one.logprob for one in row]) for row in (a, b)))
        alone = Engine(model, slots=6, capacity=40, piece=4, abreast=4)
        assert [answers(alone, [request])[0] for request in requests] == together


def test_beside_many_streams_prompts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "MANY", 2)
    monkeypatch.setattr(serve_engine, "GATHER", 1000.0)
    engine = Engine(make(), slots=8, capacity=80, abreast=3)

    def submit(count: int) -> None:
        for seed in range(count):
            engine.submit(Request(prompt=(1, 2, seed), steps=60, seed=seed))
        for _ in range(3):
            engine.turn()

    submit(2)
    assert (engine.stats.running, engine.stats.queued) == (2, 0)  # with few streams nothing waits
    submit(2)
    assert (engine.stats.running, engine.stats.queued) == (2, 2)
    submit(1)
    assert (engine.stats.running, engine.stats.queued) == (5, 0)
    submit(1)
    assert engine.stats.queued == 1
    submit(2)
    assert (engine.stats.running, engine.stats.queued) == (8, 0)
    engine.cancel(0)
    submit(1)  # there is no room for more
    assert (engine.stats.running, engine.stats.queued) == (8, 0)
    engine.cancel(1)
    engine.cancel(2)
    engine.turn()
    submit(1)
    assert (engine.stats.running, engine.stats.queued) == (6, 1)
    monkeypatch.setattr(serve_engine, "GATHER", 0.0)
    engine.turn()
    assert engine.stats.queued == 0


def test_log_probabilities_of_the_prompt_are_the_models() -> None:
    model, prompt = make("linear"), (5, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    book = Book()
    engine = Engine(model, slots=2, capacity=30, piece=4, cache=book)
    tokens(engine, Request(prompt=prompt, steps=1))
    number = engine.submit(Request(prompt=prompt, steps=2, logprobs=3, prompt_logprobs=True))
    first, *later = finish(engine, [number])[number]
    assert first.cached == 0  # a cache has no outputs
    assert [one.token for one in first.prompt] == list(prompt)
    assert all(part.prompt == () for part in later)
    assert first.prompt[0] == Drawn(5)
    expected = model(torch.tensor([prompt])).detach().log_softmax(-1)[0]
    for at in range(1, len(prompt)):
        one, row = first.prompt[at], expected[at - 1]
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-5)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
    drawn = first.drawn[0]
    assert drawn.logprob == pytest.approx(float(expected[-1][drawn.token]), abs=1e-5)
    assert [token for token, _ in drawn.top] == expected[-1].topk(3).indices.tolist()


def test_a_long_prompt_stalls_nobody() -> None:
    engine = Engine(make(), slots=4, capacity=500, piece=8)
    short = engine.submit(Request(prompt=(1,), steps=40))
    engine.turn()
    long = engine.submit(Request(prompt=(2,) * 200, steps=1))  # 25 pieces
    later = engine.submit(Request(prompt=(3,) * 10, steps=1))
    ends: dict[int, int] = {}
    for turn in range(60):
        made = {update.number: update for update in engine.turn()}
        assert turn >= 39 or len(made[short].drawn) == 1  # one token a turn, whatever is read
        ends |= {number: turn for number, update in made.items() if update.end}
    assert ends[later] < 6 < 20 < ends[long]


def test_the_same_prompts_are_read_once() -> None:
    """As for n answers to one prompt."""
    model, book = make(), Book()
    engine = Engine(model, slots=4, capacity=60, piece=4, cache=book)
    read = 0
    prefill = engine._prefill

    def count(tokens: Any, *others: Any) -> Any:
        nonlocal read
        read += tokens.numel()
        return prefill(tokens, *others)

    engine._prefill = count  # type: ignore[method-assign, assignment]
    requests = [Request(prompt=tuple(range(20)), steps=3, seed=seed) for seed in range(4)]
    for request, (drawn, _) in zip(requests, answers(engine, requests), strict=True):
        assert [one.token for one in drawn] == model.generate(range(20), 3, seed=request.seed).tolist()
    assert read == 19
    assert engine.stats.cached_tokens == 3 * 19


@pytest.mark.parametrize("kind", KINDS, ids=ids)
@pytest.mark.parametrize("abreast", [1, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_choices_of_a_request_read_its_prompt_once(kind: Any, abreast: int, cached: bool) -> None:
    """With a cache and without one; each has the text that it has alone, and log-probabilities of the prompt too."""
    model, prompt = make(kind), tuple(range(11))
    engine, alone = (
        Engine(model, slots=5, capacity=60, piece=4, abreast=abreast, cache=cache)
        for cache in (Book() if cached else None, None)
    )
    read, prefill = 0, engine._prefill

    def count(tokens: Any, lengths: Any, *others: Any) -> Any:
        nonlocal read
        read += tokens.numel() if lengths is None else 0
        return prefill(tokens, lengths, *others)

    engine._prefill = count  # type: ignore[method-assign, assignment]
    for scored in (False, True):
        requests = [
            Request(prompt=prompt, steps=3, seed=seed, logprobs=1, prompt_logprobs=scored, owner="ab"[seed == 2])
            for seed in range(8)
        ]
        read, numbers = 0, engine.submit_all(requests)
        engine.cancel(numbers[1])
        updates = finish(engine, numbers)
        # two clients, each of whom reads it once, if log-probabilities are asked for even with the cache
        assert read == (20 if abreast == 1 else 0)
        for number, request in zip(numbers, requests, strict=True):
            if number != numbers[1]:
                own = alone.submit(request)
                expected = finish(alone, [own])[own]
                got = updates[number]
                assert [part[1:3] + part[4:] for part in got] == [part[1:3] + part[4:] for part in expected]
    assert not engine.reading
    assert engine.stats.free == 5


def test_a_choice_goes_on_when_the_one_that_reads_for_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make(), slots=4, capacity=60, piece=2)
    numbers = engine.submit_all([Request(prompt=tuple(range(12)), steps=2, seed=seed) for seed in range(3)])
    engine.turn()
    engine.cancel(numbers[0])
    updates = finish(engine, numbers)
    assert [updates[number][-1].end for number in numbers] == ["cancelled", "length", "length"]
    prefill, failed = engine._prefill, list[int]()

    def fail(*args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("no memory")
        return prefill(*args)

    monkeypatch.setattr(engine, "_prefill", fail)
    numbers = engine.submit_all([Request(prompt=tuple(range(12)), steps=2, seed=seed) for seed in range(3)])
    updates = finish(engine, numbers)
    assert [updates[number][-1].end for number in numbers] == ["error", "length", "length"]


def test_prompts_are_cut_at_the_same_places() -> None:
    engine, cuts = Engine(make(), slots=1, capacity=900), list[int]()
    prefill = engine._prefill

    def note(tokens: Any, *others: Any) -> Any:
        cuts.append(tokens.shape[1])
        return prefill(tokens, *others)

    engine._prefill = note  # type: ignore[method-assign, assignment]
    tokens(engine, Request(prompt=(1,) * 700, steps=1))
    assert cuts == [32, 32, 64, 128, 256, 187]
    for early in ((0,), (2.5,)):
        with pytest.raises(ValueError, match="early="):
            Engine(make(), early=early)
    with pytest.raises(ValueError, match="early="):
        Engine(make(), cache=Book(), early=(1,))


def test_owners_share_no_states_and_take_turns() -> None:
    book = Book()
    engine = Engine(make(), slots=1, capacity=60, piece=4, cache=book)
    prompt = tuple(range(9))
    numbers = [engine.submit(Request(prompt=prompt, steps=1, owner=owner)) for owner in ("a", "a", "a", "b")]
    updates = finish(engine, numbers)
    ends = sorted(numbers, key=lambda number: list(updates).index(number))
    assert [updates[number][0].cached for number in numbers] == [0, 8, 8, 0]  # eight are read, and end there
    assert {owner for owner, _ in book.states} == {"a", "b"}
    order: list[int] = []
    numbers = [engine.submit(Request(prompt=prompt, steps=1, owner=owner)) for owner in ("a", "a", "a", "b")]
    while len(order) < 4:
        order += [update.number for update in engine.turn() if update.end]
    assert order.index(numbers[3]) == 1  # not behind all of the other owner's
    assert len(ends) == 4


def test_stop_tokens_end_the_text_and_length_does() -> None:
    model = make()
    free = model.generate([1, 2], 12, seed=4).tolist()
    stop = next(token for token in free if free.index(token) > 2)
    engine = Engine(model, slots=2, capacity=30)
    (drawn, end), (other, length) = answers(
        engine, [Request(prompt=(1, 2), steps=12, seed=4, stop=s) for s in ((stop,), ())]
    )
    assert [one.token for one in drawn] == free[: free.index(stop) + 1]
    assert [one.token for one in other] == free
    assert (end, length) == ("stop", "length")
    assert engine.stats.free == 2


def test_cancelled_requests_leave_at_once() -> None:
    engine = Engine(make(), slots=2, capacity=300, piece=4)
    numbers = [engine.submit(Request(prompt=(1,) * size, steps=50)) for size in (1, 200, 3, 4)]
    engine.turn()
    assert (engine.stats.running, engine.stats.prefilling, engine.stats.queued) == (1, 1, 2)
    engine.cancel(*numbers[:3])  # one that draws, one that is read, one that waits
    updates = engine.turn()
    ended = {update.number: update.end for update in updates if update.end}
    assert ended == dict.fromkeys(numbers[:3], "cancelled")
    engine.cancel(numbers[0])  # it has ended
    engine.cancel(99)
    assert len([one for part in finish(engine, [numbers[3]])[numbers[3]] for one in part.drawn]) in (49, 50)
    assert (engine.stats.free, engine.stats.queued) == (2, 0)
    assert engine.turn() == []


def test_requests_that_cannot_work_are_refused_with_their_limit() -> None:
    engine = Engine(make(max_length=30, positions="learned"), slots=1, queue=2)
    assert engine.capacity == 30
    for match, fields in {
        "capacity=30": {"prompt": (1,) * 20, "steps": 12},
        "prompt is empty": {"prompt": (), "steps": 1},
        "prompt holds 23": {"prompt": (1, 23), "steps": 1},
        "prompt=": {"prompt": (1, 2.5), "steps": 1},
        "prompt=<|prompt=\\[": {"prompt": [1, 2], "steps": 1},
        "prompt=\\(|prompt=<": {"prompt": (1, 1 << 70), "steps": 1},
        "stop holds -1": {"prompt": (1,), "steps": 1, "stop": (-1,)},
        "steps=0": {"prompt": (1,), "steps": 0},
        "logprobs=21": {"prompt": (1,), "steps": 1, "logprobs": 21},
        "seed=": {"prompt": (1,), "steps": 1, "seed": 2**63},
        "exclude=": {"prompt": (1,), "steps": 1, "sampling": Sampling(exclude=(23,))},
        "owner=": {"prompt": (1,), "steps": 1, "owner": 3},
    }.items():
        with pytest.raises(ValueError, match=match):
            engine.submit(Request(**fields))
    with pytest.raises(ValueError, match="at most 30"):
        Engine(make(max_length=30, positions="learned"), capacity=31)
    with pytest.raises(ValueError, match=r"divisor of cache\.every=4"):
        Engine(make(), cache=Book(), piece=3)
    with pytest.raises(ValueError, match="a LanguageModel"):
        Engine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="23 tokens"):
        Engine(make(), draft=make(vocab=24))


def test_requests_of_one_client_are_queued_together_or_not_at_all() -> None:
    engine = Engine(make(), slots=1, queue=2)
    request = Request(prompt=(1, 2), steps=3)
    with pytest.raises(ValueError, match="4 choices at once cannot work: accepted are at most 3, as slots=1"):
        engine.submit_all([request] * 4)
    first = engine.submit_all([request] * 2)
    for _ in range(2):  # whether or not the engine has begun
        with pytest.raises(Full, match="2 requests run or wait, and 2 come: accepted are at most 3"):
            engine.submit_all([request] * 2)
        assert len(engine.known) == 2
        engine.turn()
    last = engine.submit_all([request])
    assert {parts[-1].end for parts in finish(engine, [*first, *last]).values()} == {"length"}
    with pytest.raises(ValueError, match="prompt holds 23"):
        engine.submit_all([request, Request(prompt=(23,), steps=1)])
    assert not engine.known
    assert len(finish(engine, engine.submit_all([request] * 3))) == 3


def test_an_error_of_one_prompt_hurts_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for abreast in (1, 2):
        model = make()
        engine = Engine(model, slots=4, capacity=40, piece=4, abreast=abreast)
        prefill = engine._prefill

        def fail(tokens: Any, *others: Any, prefill: Any = prefill) -> Any:
            if (tokens == 9).any():
                raise RuntimeError("no memory")
            return prefill(tokens, *others)

        monkeypatch.setattr(engine, "_prefill", fail)
        numbers = [engine.submit(Request(prompt=prompt, steps=4)) for prompt in ((1, 2), (9, 9), (3, 4))]
        updates = finish(engine, numbers)
        assert updates[numbers[1]] == [Update(numbers[1], (), "error", error="RuntimeError: no memory")]
        for number, prompt in ((numbers[0], (1, 2)), (numbers[2], (3, 4))):
            drawn = [one.token for part in updates[number] for one in part.drawn]
            assert drawn == model.generate(prompt, 4, seed=0).tolist()
        assert engine.stats.free == 4


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine = Engine(model, slots=2, capacity=40, piece=2)
    numbers = [engine.submit(Request(prompt=(n,) * size, steps=5)) for n, size in ((1, 1), (2, 9))]
    engine.turn()

    def fail(self: Any) -> Any:
        raise RuntimeError("the device was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "step", fail)
        (update,) = engine.turn()
    assert (update.number, update.end) == (numbers[0], "error")
    assert "device was lost" in update.error
    drawn = [one.token for part in finish(engine, numbers[1:])[numbers[1]] for one in part.drawn]
    assert drawn == model.generate([2] * 9, 5, seed=0).tolist()


def test_a_turn_that_fails_ends_all_requests_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = make(), queue.Queue[Update]()

    def deliver(updates: list[Update]) -> None:
        for update in updates:
            if update.end:
                ends.put(update)

    engine = Engine(model, slots=1, capacity=20, deliver=deliver)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_cancel", lambda: 1 / 0)
        numbers = {engine.submit(Request(prompt=(1,), steps=3)) for _ in range(3)}
        engine.start()
        lost = [ends.get(timeout=60) for _ in numbers]
    assert {update.number for update in lost} == numbers
    assert {update.end for update in lost} == {"error"}
    number = engine.submit(Request(prompt=(1,), steps=3))
    assert ends.get(timeout=60)[:3:2] == (number, "length")
    engine.stop()
    assert engine.stats.free == 1


def test_clients_that_vanish_leave_no_slot_taken() -> None:
    rng, model = random.Random(0), make()
    engine = Engine(model, slots=4, capacity=60, piece=4, cache=Book(), draft=model)
    ended: list[int] = []
    numbers: list[int] = []
    for _ in range(100):
        numbers += [engine.submit(request) for request in random_requests(rng, 1)]
        if rng.random() < 0.6:
            engine.cancel(rng.choice(numbers))
        ended += [update.number for update in engine.turn() if update.end]
    while engine.known:
        ended += [update.number for update in engine.turn() if update.end]
    assert sorted(ended) == numbers  # each one ends once
    assert engine.stats[:4] == (0, 0, 0, 4)
    assert engine.streams.running == []
    assert not engine.waiting
    assert not engine.leaving


def test_the_thread_serves_many_threads_and_drains() -> None:
    model = make()
    expected = {seed: model.generate([1, 2], 6, seed=seed).tolist() for seed in range(12)}
    made: dict[int, list[int]] = {}
    ends: dict[int, str | None] = {}
    seeds: dict[int, int] = {}

    def deliver(updates: list[Update]) -> None:
        for update in updates:
            made.setdefault(update.number, []).extend(one.token for one in update.drawn)
            ends[update.number] = update.end

    engine = Engine(model, slots=3, capacity=20, deliver=deliver)
    engine.start()
    with pytest.raises(RuntimeError, match="runs already"):
        engine.start()

    def client(seed: int) -> None:
        seeds[engine.submit(Request(prompt=(1, 2), steps=6, seed=seed))] = seed

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.stop(drain=True, seconds=60)
    assert {seeds[number]: drawn for number, drawn in made.items()} == expected
    assert set(ends.values()) == {"length"}
    with pytest.raises(Full, match="stops"):
        engine.submit(Request(prompt=(1,), steps=1))


def test_what_runs_when_the_engine_stops_is_cancelled() -> None:
    ends: dict[int, str | None] = {}
    begun = threading.Event()

    def deliver(updates: list[Update]) -> None:
        ends.update({update.number: update.end for update in updates})
        begun.set()

    engine = Engine(make(), slots=1, deliver=deliver)
    engine.start()
    numbers = [engine.submit(Request(prompt=(1,), steps=10**9)) for _ in range(2)]
    assert begun.wait(60)
    engine.stop(drain=False)
    assert ends == dict.fromkeys(numbers, "cancelled")
    assert engine.stats.free == 1
