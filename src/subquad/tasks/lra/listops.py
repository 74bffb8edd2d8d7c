"""ListOps: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10); the value is one of ten classes.

Rules     of the arena's generator (google-research/long-range-arena, data/listops.py): a node above depth 10 is an
          operator with probability 1/4, else a digit; 2 to 10 arguments; expressions of 501 to 1,999 tokens; all of
          them different; 96,000 for training, 2,000 each for validation and test
Departs   its trees are drawn level by level for thousands of expressions at once, so that 100,000 take seconds
"""

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import ClassVar, NamedTuple

import numpy as np

from subquad.checks import at_least
from subquad.data.generated import Arrays, cores, generated, kept
from subquad.pool import in_order
from subquad.tasks.lra.task import Classification, cut
from subquad.training.task import Source, Split, Trial

LONGEST = 2000  # positions
LENGTHS = (501, 1999)  # tokens of an accepted expression
DEPTH = 10
OPERATOR = 0.25  # probability
ARGUMENTS = (2, 10)
DIGIT, NAMES, CLOSE = 1, ("[MIN", "[MAX", "[MED", "[SM"), 15  # 0 is padding, 1 to 10 are digits, 11 to 14 operators
VOCAB = 16
CHUNK = 16_384  # trees drawn at once, of which about one in twelve has an accepted length


class Level(NamedTuple):
    """The nodes of many trees at one depth, in order: the children of a node are next to each other."""

    tree: np.ndarray  # the tree that each node belongs to
    arguments: np.ndarray  # how many an operator has; 0 for a digit
    symbol: np.ndarray  # 0 .. 9 for a digit, 0 .. 3 for an operator


class Expressions(NamedTuple):
    tokens: np.ndarray  # uint8, one expression after the other
    lengths: np.ndarray  # int16
    values: np.ndarray  # uint8
    drawn: int  # how many trees were drawn to get these


def draw(seed: int, number: int, trees: int = CHUNK, lengths: tuple[int, int] = LENGTHS) -> Expressions:
    """Draw this many random trees and keep those of an accepted length; the same for the same seed and number."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
    levels, accepted = _grow(random, trees, lengths)
    renumbered = np.cumsum(accepted) - 1
    levels = [
        Level(renumbered[level.tree[chosen]], level.arguments[chosen], level.symbol[chosen])
        for level in levels
        for chosen in (accepted[level.tree],)
    ]
    sizes, values = _fold(levels)
    return Expressions(_write(levels, sizes), sizes[0].astype(np.int16), values.astype(np.uint8), trees)


def _grow(random: np.random.Generator, trees: int, lengths: tuple[int, int]) -> tuple[list[Level], np.ndarray]:
    """(levels from the roots down, which trees have an accepted length)"""
    shortest, longest = lengths
    length = np.zeros(trees, np.int64)
    tree = np.arange(trees)
    levels = []
    for depth in range(1, DEPTH + 1):
        operator = random.random(len(tree)) < (OPERATOR if depth < DEPTH else 0)
        low, high = ARGUMENTS
        count = np.where(operator, low + (random.random(len(tree)) * (high - low + 1)).astype(np.int64), 0)
        symbol = (random.random(len(tree)) * np.where(operator, len(NAMES), 10)).astype(np.int64)
        levels.append(Level(tree, count, symbol))
        length += np.bincount(tree, np.where(operator, 2, 1), trees).astype(np.int64)
        count = np.where(length[tree] <= longest, count, 0)  # do not grow trees that are too long already
        tree = np.repeat(tree, count)
    return levels, (length >= shortest) & (length <= longest)


def _fold(levels: list[Level]) -> tuple[list[np.ndarray], np.ndarray]:
    """(tokens under each node of each level, values of the roots), from the leaves up"""
    sizes: list[np.ndarray] = []
    below_size, below_value = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for level in reversed(levels):
        operator = level.arguments > 0
        size, value = np.where(operator, 2, 1), level.symbol.copy()
        if operator.any():
            count, kind = level.arguments[operator], level.symbol[operator]
            first = np.cumsum(count) - count
            size[operator] += np.add.reduceat(below_size, first)
            least, most, sums = (f.reduceat(below_value, first) for f in (np.minimum, np.maximum, np.add))
            value[operator] = np.choose(kind, (least, most, _medians(below_value, first, count), sums % 10))
        sizes.insert(0, size)
        below_size, below_value = size, value
    return sizes, below_value


def _medians(values: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Of each group, rounded down."""
    at = np.arange(ARGUMENTS[1])
    rows = values[np.minimum(first[:, None] + at, len(values) - 1)]
    rows = np.sort(np.where(at < count[:, None], rows, 99), axis=1)
    middle = np.take_along_axis(rows, np.stack(((count - 1) // 2, count // 2), axis=1), axis=1)
    return middle.sum(axis=1) // 2


def _write(levels: list[Level], sizes: list[np.ndarray]) -> np.ndarray:
    """The tokens of all expressions, one after the other, from the roots down."""
    tokens = np.zeros(int(sizes[0].sum()), np.uint8)
    at = np.cumsum(sizes[0]) - sizes[0]  # where each node of this level is written
    for depth, level in enumerate(levels):
        operator = level.arguments > 0
        tokens[at] = np.where(operator, DIGIT + 10 + level.symbol, DIGIT + level.symbol)
        tokens[(at + sizes[depth] - 1)[operator]] = CLOSE
        if not operator.any():
            break
        count, below = level.arguments[operator], sizes[depth + 1]
        before = np.cumsum(below) - below  # written under nodes to the left, of this level
        first = np.cumsum(count) - count
        at = np.repeat(at[operator] + 1 - before[first], count) + before
    return tokens


def generate(count: int, seed: int = 0, workers: int | None = None, lengths: tuple[int, int] = LENGTHS) -> Expressions:
    """So many different expressions, drawn in parallel; the same for the same seed, however many processes."""
    chosen: dict[bytes, tuple[np.ndarray, int]] = {}  # tokens and value, by their digest
    drawn = 0
    workers = min(cores(), 1 + count * lengths[1] // 4_000_000) if workers is None else workers
    numbers = range(1 + 60 * count // CHUNK)  # twice what short expressions need, five times what those of the arena do
    for part in in_order(partial(draw, seed, lengths=lengths), numbers, workers):
        drawn += part.drawn
        ends = np.cumsum(part.lengths.astype(np.int64))
        for expression, value in zip(np.split(part.tokens, ends[:-1]), part.values, strict=True):
            key = blake2b(expression.tobytes(), digest_size=16).digest()
            if len(chosen) < count:
                chosen.setdefault(key, (expression, value))
        if len(chosen) == count:
            tokens, values = zip(*chosen.values(), strict=True)
            return Expressions(np.concatenate(tokens), np.array([*map(len, tokens)], np.int16), np.array(values), drawn)
    raise RuntimeError(f"{len(chosen)} of {count} expressions in {drawn} trees: the draw does not follow its rules")


@dataclass(frozen=True)
class ListOps(Classification):
    train: int = 96_000  # examples
    seed: int = 0
    held_out: int = 2_000  # of validation and of test each
    shortest: int = LENGTHS[0]  # tokens of an expression
    longest: int = LENGTHS[1]

    name: ClassVar[str] = "listops"
    vocab: ClassVar[int] = VOCAB
    classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        at_least(self, train=1, seed=0, held_out=1, shortest=1, longest=self.shortest)

    @classmethod
    def trial(cls) -> Trial:
        short = cls(train=2000, held_out=500, shortest=16, longest=128)
        return Trial(causal=short, bidirectional=short)

    def positions(self) -> int:
        return LONGEST if self.longest == LENGTHS[1] else self.longest

    def source(self, split: Split) -> Source:
        name = f"listops_{self.train}_{self.seed}"
        if (self.held_out, self.shortest, self.longest) != (2_000, *LENGTHS):
            name += f"_{self.held_out}_{self.shortest}_{self.longest}"
        return cut(kept(generated() / name, self._make), split, self.train, self.held_out, self.held_out)

    def _make(self) -> Arrays:
        made = generate(self.train + 2 * self.held_out, self.seed, lengths=(self.shortest, self.longest))
        tokens = np.zeros((len(made.lengths), self.positions()), np.uint8)
        tokens[np.arange(tokens.shape[1]) < made.lengths[:, None]] = made.tokens
        return {"tokens": tokens, "labels": made.values, "lengths": made.lengths}
