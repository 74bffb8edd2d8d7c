"""Recording of CUDA graphs: threads take turns, and a failure leaves the thread's random numbers as they were."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from subquad.graphs import recording


class Generator:
    """While it is recorded from, its state is one that waits for the recording to end."""

    def __init__(self) -> None:
        self.state = "own"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()

    @contextmanager
    def graph(_: Any, **__: Any) -> Iterator[None]:
        assert made.state == "own"
        made.state = "recorded"
        yield  # a failure leaves it so
        made.state = "own"

    monkeypatch.setattr(torch.cuda, "default_generators", (made,), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return made


def test_a_failure_beside_another_recording_restores_the_random_numbers(generator: Generator) -> None:
    graph: Any = None
    begun, results = threading.Event(), []

    def fail() -> None:
        begun.set()
        try:
            with recording(graph):
                raise RuntimeError("it waits")
        except RuntimeError as error:
            results.append(str(error))

    other = threading.Thread(target=fail)
    with recording(graph):
        other.start()
        begun.wait()
        other.join(0.1)
        assert other.is_alive()  # it waits for its turn
    other.join()
    assert results == ["it waits"]
    assert generator.state == "own"
