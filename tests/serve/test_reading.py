"""Recorded pieces of prompts, with a record that runs the work again in place of a CUDA graph."""

import random
from typing import Any

import torch

from subquad.models.state import map_state
from subquad.serve.engine import Engine
from subquad.serve.reading import Reader
from tests.serve.test_engine import GREEDY, KINDS, Book, answers, make, random_requests


def imitate(run: Any) -> Any:
    """Like a graph: the work is done by `again` only, from where its inputs are, to where its results were."""
    outputs, state = run()
    outputs.fill_(torch.nan)

    def again() -> None:
        new, after = run()
        outputs.copy_(new)
        map_state(lambda old, found: old.copy_(found), state, after)

    return again, (outputs, state)


def test_texts_are_the_same_when_pieces_are_recorded() -> None:
    for kind in KINDS:
        model, requests = make(kind), random_requests(random.Random(5), 9, sampling=GREEDY, logprobs=0)
        plain, recorded = (Engine(model, slots=6, capacity=40, piece=4, cache=Book(), abreast=4) for _ in range(2))
        recorded.reader = Reader(model, imitate)
        assert answers(recorded, requests) == answers(plain, requests)
        assert any(recorded.reader.recorded.values())


def test_a_record_is_of_the_weights_that_there_are() -> None:
    model = make("linear")
    reader, tokens, lengths = Reader(model, imitate), torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 2])
    state = model.init_state(2)

    def check() -> None:
        exact = model.prefill(tokens, lengths, state, head=False)[1]
        for _ in range(3):
            found = reader.read(tokens, lengths, state, False)[1]
            map_state(torch.testing.assert_close, found, exact)

    check()
    assert list(reader.recorded) == [(2, 3)]
    work = reader.recorded[2, 3]
    check()
    assert reader.recorded[2, 3] is work
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    check()
    assert reader.recorded[2, 3] is not work


def test_what_cannot_be_recorded_is_read_as_before() -> None:
    def fail(run: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    model, requests = make("linear"), random_requests(random.Random(7), 6, sampling=GREEDY)
    plain, failing = (Engine(model, slots=6, capacity=40, piece=4, abreast=4) for _ in range(2))
    failing.reader = Reader(model, fail)
    assert answers(failing, requests) == answers(plain, requests)
    assert set(failing.reader.recorded.values()) == {None}
