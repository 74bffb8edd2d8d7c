"""Draw the next token from a model's outputs, on the device, without a random generator.

Noise is a hash of (seed of the stream, position, candidate). So a stream's tokens depend only on its own seed and its
own outputs: not on the batch, its order, the device, or how often the loop was interrupted.

To add an option, add a field of `Sampling` with its check, a line in `SamplingOptions` and a line in `adjust`.
`generate`, `stream`, `Streams` and the command line then have it too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

from subquad.checks import INTEGERS, LARGEST, at_least, check_count, check_methods, check_plain, refuse, shown
from subquad.ops.precision import wide

MASK = (1 << 32) - 1


def _option(default: Any, help: str) -> Any:
    """A field that is also an option of the command line, with this help text."""
    return field(default=default, metadata={"help": help})


@check_methods
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn. The filters apply in the order of the fields; the remaining tokens are renormalised."""

    exclude: tuple[int, ...] = ()  # tokens that are never drawn
    # applies to tokens the stream has seen (Keskar et al. 2019, arXiv:1909.05858, §4.1)
    repetition_penalty: float = _option(1.0, "Above 1: fewer repetitions.")
    temperature: float = _option(1.0, "0 takes the most probable token.")
    top_k: int | None = _option(None, "Draw from the k most probable tokens.")
    # Holtzman et al. 2020, arXiv:1904.09751
    top_p: float = _option(1.0, "Draw from the smallest set of tokens with this total probability.")
    min_p: float = _option(0.0, "Draw from tokens with at least this share of the largest probability.")

    def __post_init__(self) -> None:
        check_plain("exclude", self.exclude, Sequence[int])
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
            check_plain(name, getattr(self, name), float)
        if self.temperature < 0:
            refuse("temperature", self.temperature, "a number of at least 0, where 0 is greedy")
        if self.repetition_penalty <= 0:
            refuse("repetition_penalty", self.repetition_penalty, "a positive number, where 1 is none")
        if not 0 < self.top_p <= 1:
            refuse("top_p", self.top_p, "a probability in (0, 1]")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", self.min_p, "a share in [0, 1]")
        if self.top_k is not None:
            at_least(self, top_k=1)

    @classmethod
    def of(cls, sampling: "Sampling | None", **options: Any) -> "Sampling":
        """The sampling as given, or one made of the options that are not None."""
        given = {name: value for name, value in options.items() if value is not None}
        if sampling is None:
            return cls(**given)
        check_plain("sampling", sampling, cls)
        if given:
            names = ", ".join(given)
            raise ValueError(f"sampling and {names} came together: accepted is Sampling({names}, ...) or {names}")
        return sampling

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn with exactly the model's probabilities."""
        return self == PLAIN

    def check(self, values: int) -> None:
        """ValueError if these settings do not fit a model of `values` tokens."""
        check_count("values", values)
        wrong = [token for token in self.exclude if not 0 <= token < values]
        if wrong:
            refuse("exclude", self.exclude, f"tokens from 0 to {values - 1}, with values={values} of them")
        if len(set(self.exclude)) >= values:
            refuse("exclude", self.exclude, "fewer tokens than there are")


class SamplingOptions(TypedDict, total=False):
    """The fields of Sampling as keywords of a call; None means the default."""

    exclude: Sequence[int] | None
    repetition_penalty: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


PLAIN = Sampling()


def draw(logits: Tensor, sampling: Sampling, seeds: Tensor, position: Tensor, seen: Tensor | None = None) -> Tensor:
    """One token per row: logits [B, V], seeds [B], position [B] of the drawn token -> [B].

    A repetition penalty reads `seen` [B, V]: whether each stream has seen each token.
    """
    scores = adjust(logits, sampling, seen)
    if sampling.temperature == 0:
        return scores.argmax(-1)
    # The largest of log p + Gumbel noise is a draw from p
    return (scores + gumbel(seeds, position, scores.shape[-1])).argmax(-1)


def adjust(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits after penalty, temperature and filters: at least float32, -inf for excluded tokens."""
    scores = wide(logits)
    if sampling.exclude:
        scores = scores.clone()
        for token in sampling.exclude:
            scores[..., token] = -math.inf
    if sampling.repetition_penalty != 1:
        if seen is None:
            raise ValueError("seen=None: a repetition penalty needs the tokens seen, [B, V]")
        penalised = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    if sampling.temperature not in (0, 1):
        scores = scores / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        best = scores.topk(sampling.top_k).indices  # exactly k, even if several are equal
        scores = torch.full_like(scores, -math.inf).scatter(-1, best, scores.gather(-1, best))
    if sampling.top_p < 1:
        ranked, order = scores.sort(-1, descending=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # keep a token if those before it add up to less than top_p; the first one always stays
        keep = (before < sampling.top_p).scatter(-1, order, before < sampling.top_p)
        scores = scores.masked_fill(~keep, -math.inf)
    if sampling.min_p > 0:
        least = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def gumbel(seeds: Tensor, position: Tensor, count: int) -> Tensor:
    """Independent Gumbel noise, float32 [B, count]."""
    return -torch.log(-torch.log1p(-uniform(seeds, position, count)))


def uniform(seeds: Tensor, position: Tensor, count: int) -> Tensor:
    """Independent numbers in (0, 1), float32 [B, count]: in steps of 2^-32 if small, at most 1 - 2^-24."""
    stream = _mix(_mix(_mix((seeds >> 32) & MASK) ^ (seeds & MASK)) ^ (position & MASK))  # [B]
    candidate = torch.arange(1, count + 1, device=seeds.device) * 0x1E3779B1
    bits = _mix((stream[:, None] + candidate) & MASK)
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """A bijective hash of 32 bits in int64 (multipliers below 2^31, so that no product overflows)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def make_seeds(seed: int | Sequence[int] | Tensor, batch: int, device: torch.device) -> Tensor:
    """One seed per stream: as given, or seed, seed + 1, ... from one number."""
    check_plain("seed", seed, int | Sequence[int] | Tensor)
    if isinstance(seed, int):
        if seed > LARGEST - batch:
            refuse("seed", seed, f"an integer below 2**63 - {batch}, since stream b uses seed + b")
        return seed + torch.arange(batch, device=device)
    seeds = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)
    if seeds.shape != (batch,) or seeds.dtype not in INTEGERS or seeds.device.type == "meta":
        raise ValueError(f"seed is {shown(seeds)}: accepted is an integer or one per row, [{batch}]")
    return seeds.to(device, torch.int64)
