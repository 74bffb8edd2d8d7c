"""Draw the next token from a model's outputs, on the device, without a random generator.

Noise is a hash of (seed of the stream, position, candidate). So a stream's tokens depend only on its own seed and its
own outputs: not on the batch, its order, the device, or how often the loop was interrupted.

The rows of a batch may have different settings: `Rows` holds them as tensors. A setting that a row does not use changes
no bit of it, so a row draws the same token whatever the others use.

To add an option, add a field of `Sampling` with its check, a line in `SamplingOptions`, a tensor in `Rows` and a line
in `adjust`. `generate`, `stream`, `Streams` and the command line then have it too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from subquad.checks import INTEGERS, LARGEST, at_least, check_count, check_methods, check_plain, refuse, shown
from subquad.ops.impl import Impl, choose
from subquad.ops.precision import wide
from subquad.ops.uniform import uniform


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


class Uses(NamedTuple):
    """What some row of a batch needs. A compiled or captured step does only this."""

    greedy: bool
    noise: bool  # a row draws, so not all are greedy
    plain: bool  # a row draws with exactly the model's probabilities
    adjust: bool  # a row does not
    exclude: bool
    penalty: bool
    temperature: bool
    ranks: bool  # top_k or top_p, which sort the tokens
    min_p: bool

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "Uses":
        chosen = list(samplings)
        draws = [s for s in chosen if s.temperature > 0]  # no filter removes the token that a greedy row takes
        return cls(
            greedy=len(draws) < len(chosen),
            noise=bool(draws),
            plain=any(s.plain for s in chosen),
            adjust=any(not s.plain for s in chosen),
            exclude=any(s.exclude for s in chosen),
            penalty=any(s.repetition_penalty != 1 for s in chosen),
            temperature=any(s.temperature != 1 for s in draws),
            ranks=any(s.top_k is not None or s.top_p < 1 for s in draws),
            min_p=any(s.min_p > 0 for s in draws),
        )

    @property
    def coarse(self) -> "Uses":
        """The same with cheap things that need not be done, so that few combinations are captured or compiled."""
        scales = self.temperature or self.ranks or self.min_p
        return self._replace(greedy=True, temperature=scales, min_p=scales)


class Rows(NamedTuple):
    """The settings of each row of a batch, or of one row that holds for all; N is 1 or B."""

    uses: Uses
    plain: Tensor  # [N, 1] bool
    greedy: Tensor  # [N, 1] bool
    penalty: Tensor  # [N, 1] float64, as all numbers below; 1 for none
    temperature: Tensor  # [N, 1], 1 for none and for greedy rows
    top_k: Tensor  # [N, 1] int64, LARGEST for none
    top_p: Tensor  # [N, 1], 2 for none, since sums of probabilities may round to a little above 1
    min_p: Tensor  # [N, 1], its logarithm
    exclude: Tensor | None  # [N, V] bool; None: nothing

    @classmethod
    def of(cls, samplings: Sequence[Sampling], values: int, device: torch.device) -> "Rows":
        """The settings for a model of `values` tokens."""

        def column(numbers: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).to(device)[:, None]

        uses, exclude = Uses.of(samplings), None
        if uses.exclude:
            exclude = torch.zeros(len(samplings), values, dtype=torch.bool)
            for row, sampling in zip(exclude, samplings, strict=True):
                row[list(sampling.exclude)] = True
        return cls(
            uses,
            column([s.plain for s in samplings], torch.bool),
            column([s.temperature == 0 for s in samplings], torch.bool),
            column([s.repetition_penalty for s in samplings]),
            column([s.temperature or 1.0 for s in samplings]),
            column([LARGEST if s.top_k is None else s.top_k for s in samplings], torch.int64),
            column([s.top_p if s.top_p < 1 else 2.0 for s in samplings]),
            column([math.log(s.min_p) if s.min_p else -math.inf for s in samplings]),
            None if exclude is None else exclude.to(device),
        )

    def part(self, rows: slice) -> "Rows":
        """The settings of some rows: views of the same memory."""
        if len(self.plain) == 1:
            return self
        return type(self)(self.uses, *(None if t is None else t[rows] for t in self[1:]))  # type: ignore[arg-type]


def draw(
    logits: Tensor, sampling: Sampling | Rows, seeds: Tensor, position: Tensor, seen: Tensor | None = None
) -> Tensor:
    """One token per row: logits [B, V], seeds [B], position [B] of the drawn token -> [B].

    A repetition penalty reads `seen` [B, V]: whether each stream has seen each token.
    """
    return score(logits, sampling, seeds, position, seen).argmax(-1)


def draw_next(
    logits: Tensor,
    rows: Rows,
    seeds: Tensor,
    position: Tensor,
    seen: Tensor | None,
    token: Tensor,
    done: Tensor,
    stop: Tensor | None,
    logprob: Tensor | None,
    impl: Impl = "auto",
) -> None:
    """`draw` for the step of a loop, in place: `token` [B] becomes the drawn one, unless its row is `done` [B].

    A row is done from a token of `stop` on. `logprob` [B] of the token is by the logits as they are; 0 for a done row.
    """
    if choose(impl, "draw_next", logits, _unsupported(logits, stop, logprob)) == "torch":
        new = draw(logits, rows, seeds, position, seen)
        if logprob is not None:
            logprob.copy_(logits.float().log_softmax(-1).gather(-1, new[:, None])[:, 0].masked_fill(done, 0))
        take_token(new, token, done, stop)
        return
    # top-k and top-p sort the tokens, which torch does; the kernel then draws from what they leave
    sorts = rows.uses.ranks
    scores = adjust(logits, rows, seen) if sorts else logits
    settings = (*rows[1:5], *rows[7:])
    torch.ops.subquad.draw_next(
        scores, logits, [int(use) for use in rows.uses], *settings, not sorts and rows.uses.adjust, seeds, position,
        seen, token, done, stop, logprob,
    )  # fmt: skip


def take_token(new: Tensor, token: Tensor, done: Tensor, stop: Tensor | None) -> None:
    """`token` becomes the new one in rows that are not done; rows are done from a token of `stop` on."""
    if stop is not None:
        new = torch.where(done, token, new)
        done.logical_or_((new[:, None] == stop).any(1))
    token.copy_(new)


def _unsupported(logits: Tensor, stop: Tensor | None, logprob: Tensor | None) -> str | None:
    if logits.dtype == torch.float64 or logits.shape[-1] > 1 << 20 or logits.stride(-1) != 1:
        return f"it reads 16 and 32 bits, of at most {1 << 20} tokens side by side"
    if stop is not None and len(stop) > 64:
        return f"{len(stop)} stop tokens, where at most 64 are compared"
    return "it writes log-probabilities as float32" if logprob is not None and logprob.dtype != torch.float32 else None


torch.library.define(
    "subquad::draw_next",
    "(Tensor scores, Tensor logits, int[] uses, Tensor plain, Tensor greedy, Tensor penalty, Tensor temperature,"
    " Tensor min_p, Tensor? exclude, bool adjusts, Tensor seeds, Tensor position, Tensor? seen, Tensor(a!) token,"
    " Tensor(b!) done, Tensor? stop, Tensor(c!)? logprob) -> ()",
)


@torch.library.impl("subquad::draw_next", "CompositeExplicitAutograd")
def _(scores: Tensor, logits: Tensor, uses: list[int], *args: Any) -> None:
    from subquad.models import sampling_triton

    plain, greedy, penalty, temperature, min_p, exclude, adjusts, *others = args
    none = penalty  # top_k and top_p were applied before
    rows = Rows(Uses(*map(bool, uses)), plain, greedy, penalty, temperature, none, none, min_p, exclude)
    sampling_triton.draw_next(scores, logits, rows, adjusts, *others)


@torch.library.register_fake("subquad::draw_next")
def _(*_: object) -> None:
    return


def score(
    logits: Tensor, sampling: Sampling | Rows, seeds: Tensor, position: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Of each token, [B, V]; the largest one is drawn."""
    rows = sampling if isinstance(sampling, Rows) else Rows.of([sampling], logits.shape[-1], logits.device)
    scores = adjust(logits, rows, seen)
    if not rows.uses.noise:
        return scores
    # The largest of log p + Gumbel noise is a draw from p
    noise = gumbel(seeds, position, scores.shape[-1])
    return scores + (noise.masked_fill(rows.greedy, 0) if rows.uses.greedy else noise)


def adjust(logits: Tensor, sampling: Sampling | Rows, seen: Tensor | None = None) -> Tensor:
    """Logits after penalty, temperature and filters: at least float32, -inf for excluded tokens."""
    rows = sampling if isinstance(sampling, Rows) else Rows.of([sampling], logits.shape[-1], logits.device)
    uses, scores = rows.uses, wide(logits)
    if not uses.adjust:
        return scores
    penalty, temperature, top_p, min_p = (
        numbers.to(scores.dtype) for numbers in (rows.penalty, rows.temperature, rows.top_p, rows.min_p)
    )
    if rows.exclude is not None and uses.exclude:
        scores = scores.masked_fill(rows.exclude, -math.inf)
    if uses.penalty:
        if seen is None:
            raise ValueError("seen=None: a repetition penalty needs the tokens seen, [B, V]")
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(seen, penalised, scores)
    if uses.temperature:
        scores = scores / temperature
    if uses.ranks:
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)  # of equal tokens the first one ranks higher
        keep = torch.arange(scores.shape[-1], device=scores.device) < rows.top_k  # [B, V]
        probabilities = ranked.masked_fill(~keep, -math.inf).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # keep a token if those before it add up to less than top_p; the first one always stays
        keep = keep & (before < top_p)
        scores = scores.masked_fill(~keep.scatter(-1, order, keep), -math.inf)
    if uses.min_p:
        least = scores.amax(-1, keepdim=True) + min_p
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def gumbel(seeds: Tensor, position: Tensor, count: int) -> Tensor:
    """Independent Gumbel noise, float32 [B, count]."""
    return gumbel_of(uniform(seeds, position, count))


def gumbel_of(u: Tensor) -> Tensor:
    """Gumbel noise of uniform numbers."""
    return -torch.log(-torch.log1p(-u))


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
