"""What goes into an engine and what comes out of it."""

from dataclasses import dataclass
from typing import NamedTuple

from subquad.models.sampling import PLAIN, Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks for."""

    prompt: tuple[int, ...]  # tokens, at least one
    steps: int  # at most this many new tokens
    sampling: Sampling = PLAIN
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
