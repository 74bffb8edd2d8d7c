"""Multi-query associative recall (MQAR): pairs of a key and a value, then each key again, to be answered by its value.

Source   made here, as in Arora et al. 2023, "Zoology", arXiv:2312.04927, §3.2, and its code (data/multiquery_ar.py with
         random_non_queries=False, as for its Figure 2)
Sizes    length 128, 8 pairs, 1,024 tokens (theirs 8,192): zero, then 511 keys, then 512 values; any number of examples
Split    by seed: examples of two seeds agree only by chance
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subquad.checks import at_least, refuse
from subquad.data.bits import bits

EMPTY = 0  # the token at all places outside pairs and queries
NOT_ASKED = -100  # the answer where a row has fewer queries than others
POWER = 0.01  # place n for a query has weight n^(POWER - 1): near ones are far more frequent; 1 would be uniform


@dataclass(frozen=True)
class Recall:
    """Examples by index. An example depends only on (seed, index), not on the machine, batch or epoch."""

    length: int = 128
    pairs: Sequence[int] = (8,)  # in an example; of several numbers, example i has number i mod n
    vocab: int = 1024
    count: int = 1 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, length=4, vocab=4, count=1, seed=0)
        if self.length % 2:
            refuse("length", self.length, "an even number: a pair has two tokens")
        most = min(self.length // 4, self.keys)
        if not self.pairs or not all(1 <= pairs <= most for pairs in self.pairs):
            room = f"a quarter of length={self.length} and the {self.keys} keys of vocab={self.vocab} allow no more"
            refuse("pairs", list(self.pairs), f"one number or several, from 1 to {most}: {room}")

    @property
    def keys(self) -> int:
        """Tokens 1 to `keys` are keys, those above are values."""
        return self.vocab // 2 - 1

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        """tokens [B, T]: k v k v .., then queries among zeros; places [B, P]: where the queries are, zero where a row
        has fewer than P; answers [B, P]: the value of each query, NOT_ASKED there."""
        indices = np.asarray(indices)
        rows, most = len(indices), max(self.pairs)
        tokens = np.full((rows, self.length), EMPTY)
        places, answers = np.zeros((rows, most), dtype=np.int64), np.full((rows, most), NOT_ASKED)
        for turn, pairs in enumerate(self.pairs):
            mine = indices % len(self.pairs) == turn
            keys, values, at = self._draw(indices[mine], pairs)
            tokens[mine, : 2 * pairs] = np.stack((keys, values), axis=2).reshape(len(keys), 2 * pairs)
            tokens[np.flatnonzero(mine)[:, None], at] = keys
            places[mine, :pairs], answers[mine, :pairs] = at, values
        made = {"tokens": tokens, "places": places, "answers": answers}
        return {name: torch.from_numpy(array) for name, array in made.items()}

    def _draw(self, indices: np.ndarray, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different keys, different values, and where each key is asked for, all [B, pairs]."""
        slots = self.length // 2 - pairs  # every second place after the pairs can hold a query
        drawn = bits(self.seed, indices, self.vocab - 1 + slots)
        keys, values, uniform = np.split(drawn, (self.keys, self.vocab - 1), axis=1)
        # weighted draws without replacement: give slot n an exponential time of rate n^(POWER - 1), and take the slots
        # with the smallest times
        times = -np.log(((uniform >> np.uint64(11)) + 0.5) * 2.0**-53) / np.arange(1, slots + 1) ** (POWER - 1)
        at = 2 * pairs + 2 * np.argsort(times, axis=1, kind="stable")[:, :pairs]
        return 1 + _different(keys, pairs), self.keys + 1 + _different(values, pairs), at


def _different(drawn: np.ndarray, count: int) -> np.ndarray:
    """[B, N] random bits -> [B, count] different numbers below N: those with the smallest bits, sorted by them."""
    size = drawn.shape[1]
    low = np.uint64((1 << size.bit_length()) - 1)  # these bits are replaced by the index
    return (np.sort(drawn & ~low | np.arange(size, dtype=np.uint64), axis=1)[:, :count] & low).astype(np.int64)
