"""The causal copy task: a word of random symbols, a separator, and the same word again.

Source   made here, as in Katharopoulos et al. 2020, arXiv:2006.16236, §4.1.1, and its code (causal-copy/main.py)
Sizes    length 128, 10 symbols, words of 32 to 62 symbols, any number of examples
Split    by seed: examples of different seeds are equal only by chance
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subquad.checks import at_least
from subquad.data.bits import bits

SEPARATOR = 0  # also fills the rest of the sequence


@dataclass(frozen=True)
class Copy:
    """Examples by index. An example depends only on (seed, index), not on the machine, batch or epoch."""

    length: int = 128
    symbols: int = 10  # 1 .. symbols
    count: int = 1 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, length=9, symbols=1, count=1)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        """tokens [B, T]: w, 0, w, 0 ..; targets [B, T]: the next token; mask [B, T]: where targets count: positions
        n - 1 to 2n - 1 for a word of n symbols, whose targets are the separator and w."""
        drawn = bits(self.seed, np.asarray(indices), self.length + 1)
        low, end = self.length // 4, (self.length - 1) // 2
        n = low + (drawn[:, :1] % np.uint64(end - low)).astype(np.int64)  # [B, 1]
        word = 1 + (drawn[:, 1:] % np.uint64(self.symbols)).astype(np.int64)  # [B, T]; the first n are used
        at = np.arange(self.length)
        tokens = np.take_along_axis(word, np.where(at < n, at, np.maximum(at - n - 1, 0)), axis=1)
        tokens = np.where((at == n) | (at > 2 * n), SEPARATOR, tokens)
        targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=SEPARATOR)
        mask = (at >= n - 1) & (at < 2 * n)
        return {name: torch.from_numpy(a) for name, a in (("tokens", tokens), ("targets", targets), ("mask", mask))}
