"""Captured loops that are kept from one call to the next: which ones are found again, and when they are dropped.

A graph is played by a function that runs the steps, so that all of this is seen without a GPU.
"""

import copy
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import subquad.models.generation as generation_module
import subquad.models.streams as streams_module
from subquad import LanguageModel
from subquad.models import decoding, kept
from subquad.models.decoding import Loop
from subquad.models.generation import bucket
from subquad.models.kept import Shelf
from subquad.models.sampling import Sampling
from subquad.models.state import leaves, map_state
from subquad.models.streams import Streams


def make(mechanism: Any = "linear", **more: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(vocab=23, dim=16, depth=2, heads=2, mechanism=mechanism, **more).eval()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """The loops that captured something, one entry for each graph."""
    loops: list[Loop] = []

    def capture(self: Loop, steps: int) -> Any:
        loops.append(self)
        mine = weakref.ref(self)
        graph = SimpleNamespace(replay=lambda: mine()._run(steps))
        self.graphs[self.rows.uses, self.tops, steps] = graph  # type: ignore[assignment]
        return graph

    monkeypatch.setattr(Loop, "_capture", capture)
    for place in (decoding, generation_module, streams_module):
        monkeypatch.setattr(place, "captures", lambda model: decoding.decoder_of(model) is model)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, wait=lambda: None))
    monkeypatch.setattr(kept, "bound", lambda _: 1 << 30)
    monkeypatch.setattr(kept, "_shelves", weakref.WeakKeyDictionary())
    return loops


def test_the_newest_thing_of_a_kind_is_taken_out() -> None:
    shelf = Shelf(3, 100)
    for thing in (1, 2, 3):
        assert shelf.put("a" if thing < 3 else "b", thing, 10, "s")
    assert shelf.take("c", "s") is None
    assert [shelf.take("a", "s") for _ in range(3)] == [2, 1, None]
    assert shelf.take("b", "s") == 3


def test_the_oldest_things_leave_by_count_and_by_size() -> None:
    shelf = Shelf(2, 100)
    assert not shelf.put("a", 0, 101, "s")
    for thing in (1, 2, 3):
        shelf.put("a", thing, 1, "s")
    assert [one.thing for one in shelf.things] == [2, 3]
    shelf.put("a", 4, 99, "s")
    assert [one.thing for one in shelf.things] == [3, 4]
    shelf.put("a", 5, 100, "s")
    assert [one.thing for one in shelf.things] == [5]


def test_another_stamp_empties_it() -> None:
    shelf = Shelf(2, 100)
    shelf.put("a", 1, 1, "old")
    assert shelf.take("a", "new") is None
    shelf.put("a", 2, 1, "old")  # its run began before the weights changed
    assert shelf.take("a", "new") is None


def test_a_stamp_sees_what_a_graph_does_not() -> None:
    model: Any = make("performer")
    seen = [kept.stamp(model)]

    def changed() -> bool:
        seen.append(kept.stamp(model))
        return seen[-1] not in seen[:-1]

    assert not changed()
    model.generate([1, 2], 3)
    model.train().eval()
    copy.deepcopy(model)
    assert not changed()
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert changed()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert changed()
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    assert changed()
    model.transformer.blocks[0].mixer.redraw(torch.Generator().manual_seed(5))
    assert changed()
    model.double()
    assert changed()
    model.head = nn.Sequential(model.head)
    assert changed()
    model.head.register_forward_hook(lambda *_: None)
    assert changed()
    model.to("meta")
    assert changed()


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_a_second_call_captures_nothing_and_draws_the_same(mechanism: str, captured: list[Loop]) -> None:
    model = make(mechanism)
    how = {"temperature": 0.9, "stop": (3,), "exclude": (3,), "logprobs": True, "full": True}
    prompts = [[[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 1]], [[1, 2, 3], [4, 5, 6]]]
    for number, prompt in enumerate(prompts):
        mine = model.generate(prompt, 70, seed=number, **how)
        made = len(captured)
        wanted = make(mechanism).generate(prompt, 70, seed=number, **how)
        del captured[made:]
        assert torch.equal(mine.tokens, wanted.tokens)
        torch.testing.assert_close(mine.logprobs, wanted.logprobs)
    assert len(captured) == 2  # a group of steps and a single one, of the first call


def test_states_that_were_returned_are_not_written_later(captured: list[Loop]) -> None:
    model = make()
    first = model.generate([1, 2, 3], 12, full=True)
    before = map_state(torch.clone, first.state)
    again = model.generate([4, 5, 6], 12, seed=9, full=True)
    more = model.generate(first.tokens[:, -1:], 5, state=first.state, full=True)
    for (name, tensor), (_, old) in zip(leaves(first.state), leaves(before), strict=True):
        assert torch.equal(tensor, old), name
    whole = model.generate([1, 2, 3], 17)
    assert torch.equal(more.tokens[0], whole[12:])
    assert not torch.equal(again.tokens, first.tokens)


def test_kinds_of_calls_do_not_share(captured: list[Loop]) -> None:
    model = make("softmax")
    calls: list[Any] = [
        {}, {"steps": 12}, {"temperature": 0.0}, {"top_k": 3}, {"stop": 5}, {"logprobs": True}, {"exclude": (1,)},
        {"prompt": [[1], [2]]}, {"steps": 200}, {"repetition_penalty": 1.1},
    ]  # fmt: skip
    kinds = []
    for call in calls:
        before = len(captured)
        model.generate(**{"prompt": [1, 2], "steps": 13, **call})
        kinds.append(len(captured) - before)
    assert kinds == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert len(kept._shelves[model].things) == kept.COUNT
    for seed, temperature in ((1, 0.5), (2, 2.0)):  # numbers are written where the steps read them
        call = {"temperature": temperature, "seed": seed, "prompt": [3], "steps": 9}
        assert torch.equal(model.generate(**call), make("softmax").generate(**call))


def test_changed_weights_are_seen(captured: list[Loop]) -> None:
    model = make()
    first = model.generate([1, 2, 3], 10)
    changes: list[Any] = [
        lambda: model.head.weight.data.normal_(),
        lambda: setattr(model.head, "weight", nn.Parameter(torch.randn_like(model.head.weight))),
        lambda: model.double(),
    ]
    for change in changes:
        with torch.no_grad():
            change()
            model.head.weight.add_(0.5 * torch.randn_like(model.head.weight))
        before = len(captured)
        now = model.generate([1, 2, 3], 10)
        assert len(captured) > before
        assert torch.equal(now, copy.deepcopy(model).generate([1, 2, 3], 10))
        assert not torch.equal(first, now)


def test_two_threads_never_share_a_loop(captured: list[Loop]) -> None:
    model = make()
    model.generate([1, 2, 3], 20)
    wanted = [make().generate([1, 2, 3], 20, seed=seed) for seed in range(4)]
    found: dict[int, Any] = {}

    def run(seed: int) -> None:
        for _ in range(3):
            found[seed] = model.generate([1, 2, 3], 20, seed=seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, tokens in enumerate(wanted):
        assert torch.equal(found[seed], tokens)


def test_a_model_and_its_loops_die_together(captured: list[Loop]) -> None:
    model = make("softmax")
    model.generate([1, 2], 9)
    streams = Streams(model, slots=2, capacity=30)
    streams.admit([[1, 2]])
    for _ in range(6):
        streams.step()
    del streams
    gone = [weakref.ref(model), *(weakref.ref(loop) for loop in captured)]
    assert len(gone) == 3
    captured.clear()
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_forgetting(captured: list[Loop]) -> None:
    model = make()
    model.generate([1, 2], 9)
    assert kept.forget(model)
    assert not kept.forget(model)
    model.generate([1, 2], 9)
    assert kept.forget()
    assert len(captured) == 2


def test_a_stream_leaves_its_loop_also_when_nobody_reads_on(captured: list[Loop]) -> None:
    model = make()
    for _ in range(3):
        tokens: Any = model.stream([1, 2, 3], 20)
        assert [next(tokens) for _ in range(6)] == make().generate([1, 2, 3], 6).tolist()
        tokens.close()
    assert len(kept._shelves[model].things) == 1


def test_streams_begin_empty_on_a_kept_loop(captured: list[Loop]) -> None:
    model = make("softmax")
    wanted: list[Any] = []
    for number in range(3):
        streams = Streams(model, slots=3, capacity=30, temperature=0.8)
        ids = streams.admit([[1, 2, 3], [4]], seed=[5, 6], sampling=[Sampling(repetition_penalty=1.3), Sampling()])
        drawn = [[streams.step()[id] for id in ids] for _ in range(8)]
        wanted = wanted or drawn
        assert drawn == wanted, number
        del streams
    assert len({id(loop) for loop in captured}) == 1


def test_running_streams_notice_changed_weights_when_they_admit(captured: list[Loop]) -> None:
    model = make()
    streams = Streams(model, slots=2, capacity=30)
    streams.admit([[1, 2, 3]])
    for _ in range(5):
        streams.step()
    assert len(streams.loop.graphs) == 1
    with torch.no_grad():
        model.head.weight.mul_(2)
    streams.admit([[1]])
    assert not streams.loop.graphs
    streams.step()
    streams.step()
    assert streams.loop.graphs


def test_a_failed_call_leaves_nothing(captured: list[Loop]) -> None:
    def fail(count: int) -> None:
        if count == 9:
            raise KeyboardInterrupt

    model = make()
    with pytest.raises(KeyboardInterrupt):
        model.generate([1, 2, 3], 20, told=fail)
    assert model not in kept._shelves


def test_buckets_hold_little_more_than_is_needed() -> None:
    for room in (1, 63, 64, 65, 500, 4096 + 63, 5000, 100_000):
        assert room <= bucket(room, None) <= max(room + 64, 1.25 * room)
    assert len({bucket(room, None) for room in range(4097, 8193)}) <= 9
    assert bucket(700, 784) <= 784
    assert bucket(100, 70) == 100  # too long in any case, as the model will say
