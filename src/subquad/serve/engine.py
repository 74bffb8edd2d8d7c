"""Continuous batching: requests join and leave a running batch, and long prompts are read in pieces between its steps.

What a request gets depends on its own prompt, sampling and seed only. Prompts are cut at the same places whoever else
is there, and whether or not a cache knows a part of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from subquad.models.sampling import Sampling
from subquad.models.state import State


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks for."""

    prompt: tuple[int, ...]  # tokens, at least one
    steps: int  # at most this many new tokens
    sampling: Sampling = Sampling()
    seed: int = 0
    stop: tuple[int, ...] = ()  # tokens that end the text
    logprobs: int | None = None  # None: none; n: of the drawn token and of the n most probable ones
    prompt_logprobs: bool = False  # also of the prompt's tokens
    owner: str = ""  # requests of different owners never share cached states


class Drawn(NamedTuple):
    """A token, with log-probabilities under the model if they were asked for."""

    token: int
    logprob: float | None = None  # None also for the first token of a prompt, which nothing predicts
    top: tuple[tuple[int, float], ...] = ()  # the most probable tokens, the best first


class Update(NamedTuple):
    """What one turn of the engine made for one request."""

    number: int
    drawn: tuple[Drawn, ...] = ()  # in order; the token that stopped the text is the last one
    end: str | None = None  # None while it runs; "stop", "length", "cancelled" or "error"
    cached: int = 0  # prompt tokens that came from the cache
    prompt: tuple[Drawn, ...] = ()  # the prompt's tokens, once, if their log-probabilities were asked for
    error: str = ""


class Full(Exception):
    """The queue is full: try again later."""


class Stats(NamedTuple):
    """Counts of an engine. Those below `steps` are totals since it was made."""

    running: int  # streams that draw tokens
    queued: int
    prefilling: int  # requests whose prompt is being read
    free: int  # slots
    steps: int  # of the whole batch
    tokens: int  # drawn
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that came from the cache
    drafted: int  # tokens that the draft model proposed
    accepted: int  # of these
    bytes_per_stream: int
    state_bytes: int  # of all slots


class Cache(Protocol):
    """What the engine needs of a prefix cache."""

    every: int  # it keeps states after multiples of this number of tokens

    def find(self, tokens: tuple[int, ...], owner: str = "") -> tuple[int, State | None]:
        """The longest prefix whose state is kept, shorter than tokens: (its length, its state, batch 1)."""

    def put(self, tokens: tuple[int, ...], state: State, owner: str = "") -> None:
        """Keep the state after exactly these tokens."""


class Engine:
    """engine = Engine(model, slots=256)

    number = engine.submit(Request(prompt=(1, 2, 3), steps=100))
    updates = engine.turn()                       # or engine.start(), and `deliver` gets the updates of every turn

    piece    tokens of a prompt that are read between two steps; the states of the cache lie at multiples of it
    deliver  called with the updates of each turn, from the engine's thread
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
        deliver: Callable[[list[Update]], None] | None = None,
    ):
        raise NotImplementedError

    def submit(self, request: Request) -> int:
        """Queue a request from any thread; returns its number. Full if the queue is; ValueError if it cannot work."""
        raise NotImplementedError

    def cancel(self, number: int) -> None:
        """End a request from any thread, such as one whose client has left; a finished one is left alone."""
        raise NotImplementedError

    def turn(self) -> list[Update]:
        """Admit requests, read pieces of their prompts, and draw one token for every running stream."""
        raise NotImplementedError

    def start(self) -> None:
        """Take turns in a thread while there is work."""
        raise NotImplementedError

    def stop(self, drain: bool = True, seconds: float = 30.0) -> None:
        """Refuse new requests, finish those that run for at most `seconds` if `drain`, cancel the rest, end the thread."""
        raise NotImplementedError

    @property
    def stats(self) -> Stats:
        raise NotImplementedError
