import threading
from typing import Any

import pytest
import torch

from subquad import LanguageModel
from subquad.models import footprint
from subquad.models.sampling import Sampling
from subquad.models.state import overwrite
from subquad.models.streams import Streams


def make(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab": 20, "dim": 16, "depth": 2, "heads": 2, "mechanism": mechanism, "positions": "learned"}
    return LanguageModel(**{**fields, "max_length": 24, **changes}).eval()


@pytest.mark.parametrize("mechanism", ["linear", "softmax", ("linear", ("local", {"window": 3})), "sinkhorn"])
def test_streams_come_and_go_without_touching_the_others(mechanism: Any) -> None:
    model = make(mechanism)
    streams = Streams(model, slots=3, capacity=24)
    made: dict[int, list[int]] = {}

    def go(steps: int) -> None:
        for _ in range(steps):
            for id, token in streams.step().items():
                made.setdefault(id, []).append(token)

    first, second = streams.admit([[1, 2, 3], [4]], seed=[7, 8])
    go(4)
    (third,) = streams.admit([5, 6], seed=9)
    go(3)
    streams.retire(first)
    assert streams.running == [second, third]
    (fourth,) = streams.admit([[1, 2]], seed=3)
    go(30)  # until every stream is full
    assert streams.running == []
    assert streams.step() == {}
    lengths = {first: 7, second: 24, third: 23, fourth: 23}
    prompts = {first: ([1, 2, 3], 7), second: ([4], 8), third: ([5, 6], 9), fourth: ([1, 2], 3)}
    for id, (prompt, seed) in prompts.items():
        assert made[id] == model.generate(prompt, lengths[id], seed=seed).tolist()


def test_other_streams_change_no_bit() -> None:
    model = make()
    states = []
    for company in (False, True):
        streams = Streams(model, slots=4, capacity=24)
        (id,) = streams.admit([[1, 2, 3]], seed=5)
        if company:
            streams.admit([[9] * 10, [8]], seed=6)
        for _ in range(6):
            streams.step()
        states.append(streams.state(id))
    for a, b in zip(states[0].layers, states[1].layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_stop_tokens_retire_and_log_probabilities_are_the_models() -> None:
    model = make()
    free = model.generate([1], 12, seed=2, full=True, logprobs=True)
    stop = int(free.tokens[0, 5])
    end = free.tokens[0].tolist().index(stop) + 1
    streams = Streams(model, slots=2, capacity=24, stop=[stop])
    (id,) = streams.admit([[1]], seed=2)
    tokens, scores = [], []
    while streams.running:
        tokens.append(streams.step()[id])
        scores.append(streams.logprobs[id])
    assert tokens == free.tokens[0, :end].tolist()
    torch.testing.assert_close(torch.tensor(scores), free.logprobs[0, :end], rtol=1e-4, atol=1e-5)


def test_a_stream_moves_to_another_server() -> None:
    model = make("softmax")
    whole = model.generate([1, 2, 3], 12, seed=4).tolist()
    one, other = (Streams(model, slots=2, capacity=24) for _ in range(2))
    (id,) = one.admit([[1, 2, 3]], seed=4)
    tokens = [one.step()[id] for _ in range(5)]
    other.admit([[9, 9]], seed=1)
    (moved,) = other.admit([[tokens[-1]]], seed=4, state=one.state(id))
    tokens += [other.step()[moved] for _ in range(7)]
    assert tokens == whole


def test_each_stream_has_its_own_repetition_penalty() -> None:
    model = make()
    with torch.no_grad():
        model.head.bias.fill_(50)
    streams = Streams(model, slots=2, capacity=24, sampling=Sampling(temperature=0, repetition_penalty=1e6))
    (first,) = streams.admit([[1, 2]])
    made = [streams.step()[first] for _ in range(9)]
    streams.retire(first)
    (second,) = streams.admit([[3]])
    again = [streams.step()[second] for _ in range(9)]
    assert len({1, 2, *made}) == 11
    assert len({3, *again}) == 10


def test_memory_is_reported_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("softmax", max_length=None, positions="none")
    assert Streams(model, slots=2, capacity=50).bytes_per_stream == 2 * 2 * 50 * 16 * 4 + 3 * 8
    monkeypatch.setattr(footprint, "free_bytes", lambda _: 10**6)
    most = footprint.largest_batch(model, 50)
    Streams(model, slots=most, capacity=50)
    with pytest.raises(ValueError, match=f"at most {most}"):
        Streams(model, slots=most + 1, capacity=50)


def test_streams_cannot_continue_after_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have already read the token and others have not, so later tokens would be wrong."""
    model = make()
    streams = Streams(model, slots=2, capacity=24)
    (id,) = streams.admit([[1, 2, 3]])
    streams.step()

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.transformer.blocks[1].mixer, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            streams.step()
    for use in (streams.step, lambda: streams.state(id), lambda: streams.admit([[1]])):
        with pytest.raises(RuntimeError, match="interrupted"):
            use()


def test_an_interrupted_admission_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("softmax")
    expected = model.generate([1, 2, 3], 20, seed=4).tolist()
    streams = Streams(model, slots=2, capacity=24)
    (id,) = streams.admit([[1, 2, 3]], seed=4)

    def interrupt(*arguments: Any) -> None:
        overwrite(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("subquad.models.streams.overwrite", interrupt)  # after the prompt's state was written
        with pytest.raises(KeyboardInterrupt):
            streams.admit([[5] * 9])
    assert streams.running == [id]
    assert [streams.step()[id] for _ in range(20)] == expected
    (other,) = streams.admit([[1, 2, 3]], seed=4)
    assert [streams.step()[other] for _ in range(20)] == expected


def test_one_thread_admits_while_another_steps() -> None:
    model = make(dropout=0.5).train()
    expected = [model.generate([1, 2], 6, seed=seed).tolist() for seed in range(12)]
    streams = Streams(model, slots=4, capacity=7)
    made: dict[int, list[int]] = {}
    ids: list[int] = []

    def admit() -> None:
        while len(ids) < 12:
            if streams.free:
                ids.extend(streams.admit([[1, 2]], seed=len(ids)))

    thread = threading.Thread(target=admit)
    thread.start()
    while thread.is_alive() or streams.running:
        for id, token in streams.step().items():
            made.setdefault(id, []).append(token)
    thread.join()
    assert [made[id] for id in ids] == expected
    assert model.training


def test_what_cannot_work_raises() -> None:
    model = make()
    streams = Streams(model, slots=2, capacity=4)
    with pytest.raises(ValueError, match="prompts has 3 rows"):
        streams.admit([[1], [2], [3]])
    with pytest.raises(ValueError, match="position 5"):
        streams.admit([[1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="id=7"):
        streams.retire(7)
    with pytest.raises(ValueError, match="slots=0"):
        Streams(model, slots=0, capacity=4)


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_each_stream_has_its_own_sampling(mechanism: Any) -> None:
    model = make(mechanism, vocab=40)
    settings = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=4),
        Sampling(top_p=0.7, min_p=0.05),
        Sampling(temperature=0, repetition_penalty=1.4),
        Sampling(repetition_penalty=2.0, temperature=1.5),
        Sampling(exclude=tuple(range(30))),
    ]
    streams = Streams(model, slots=9, capacity=24, temperature=0.5)
    made: dict[int, list[int]] = {}
    ids: list[int] = []
    for start in range(0, 8, 2):  # they come and go at different times
        ids += streams.admit([[1, 2], [3]], seed=[start, 9], sampling=settings[start : start + 2])
        for _ in range(3):
            for id, token in streams.step().items():
                made.setdefault(id, []).append(token)
    (default,) = streams.admit([[5, 6]], seed=3)
    while streams.running:
        for id, token in streams.step().items():
            made.setdefault(id, []).append(token)
    for number, (id, sampling) in enumerate(zip(ids, settings, strict=True)):
        prompt, seed = ([1, 2], number) if number % 2 == 0 else ([3], 9)
        assert made[id] == model.generate(prompt, len(made[id]), seed=seed, sampling=sampling).tolist()
    assert made[default] == model.generate([5, 6], 23, seed=3, temperature=0.5).tolist()


def test_mixtures_draw_as_each_stream_asks() -> None:
    model = make(vocab=257, mixture=2, max_length=30)
    streams = Streams(model, slots=3, capacity=12)
    settings = [Sampling(), Sampling(temperature=0), Sampling(top_k=9)]
    ids = streams.admit([[256]] * 3, seed=[1, 2, 3], sampling=settings)
    made = [streams.step() for _ in range(12)]
    for seed, (id, sampling) in enumerate(zip(ids, settings, strict=True), 1):
        assert [step[id] for step in made] == model.generate([256], 12, seed=seed, sampling=sampling).tolist()


def test_streams_have_their_own_stop_tokens_and_most_probable_tokens() -> None:
    model = make()
    free = model.generate([1], 12, seed=2).tolist()
    stop = next(token for token in free if free.index(token) > 2)
    streams = Streams(model, slots=3, capacity=24, top=4)
    (first,), (second,) = streams.admit([[1]], seed=2, stop=[stop], top=2), streams.admit([[1]], seed=2)
    made: dict[int, list[int]] = {first: [], second: []}
    with torch.no_grad():
        while first in streams.running:
            tokens = streams.step()
            for id, token in tokens.items():
                made[id].append(token)
            expected = model(torch.tensor([[1, *made[first][:-1]]])).log_softmax(-1)[0, -1].topk(2)
            assert list(streams.top) == [first]
            assert [token for token, _ in streams.top[first]] == expected.indices.tolist()
            assert [score for _, score in streams.top[first]] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert made[first] == free[: free.index(stop) + 1]
    streams.step()
    assert streams.top == {}
    assert streams.running == [second]


def test_a_repetition_penalty_counts_the_tokens_before_a_state() -> None:
    model = make()
    with torch.no_grad():
        model.head.bias.fill_(50)
        _, state = model.prefill(torch.tensor([[1, 2, 3, 4]]))
    streams = Streams(model, slots=2, capacity=24)
    (id,) = streams.admit(
        [[5]], state=state, before=[[1, 2, 3, 4]], sampling=Sampling(temperature=0, repetition_penalty=1e6)
    )
    assert len({1, 2, 3, 4, 5, *(streams.step()[id] for _ in range(15))}) == 20


def test_wrong_settings_of_a_stream_raise() -> None:
    streams = Streams(make(), slots=2, capacity=8, top=2)
    for match, arguments in {
        "sampling has 1 settings": {"sampling": [Sampling()]},
        "exclude=": {"sampling": Sampling(exclude=(20,))},
        "stop=": {"stop": 20},
        "top=3": {"top": 3},
        "before=": {"before": [[1]]},
        "before=<|before=": {"before": [[1], [20]]},
    }.items():
        with pytest.raises(ValueError, match=match):
            streams.admit([[1], [2]], **arguments)
    assert streams.free == 2
