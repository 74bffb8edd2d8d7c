"""Fixed attention: the own block, and the last tokens of every block, which summarise it for all that follow.

Paper       Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, §4.2-4.3
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ over A₁ ∪ A₂,  A₁ = {s : ⌊s/l⌋ = ⌊t/l⌋},  A₂ = {s : s mod l ≥ l - c}, s ≤ t;
            bidirectional: the same sets without s ≤ t. Heads take turns at the sub-blocks of c before the last
            combine: "merge" reads the union, "interleave" A₁ in even layers and A₂ in odd ones, "heads" A₁ in the first
            half of the heads and A₂ in the second
Cost        train O(T·(l + T·c/l)·D) time, T√T at l = √T, O(T·D) memory; decode O((l + T·c/l)·D) a token; state
            2·(l + T·c/l)·D: the open block and the summaries
Departures  a query that reads nothing (A₂ alone, before the first summary) gives zeros. Bidirectional is ours; there
            a last block that ends before its summary is read by its own tokens only, except by heads that summarise an
            earlier sub-block
Verified    tests/mechanisms/test_fixed.py: the paper's sets row by row; one block is dense, 1e-12; size of the state
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.checks import refuse
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.mechanisms.patterned import CombinedOptions, Patterned, combine
from subquad.ops.sparse.patterns import Block, Pattern, Summary


@dataclass(frozen=True, kw_only=True)
class Options(CombinedOptions):
    block: AtLeast1 = 128  # l
    summary: AtLeast1 = 32  # c

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.summary > self.block:
            refuse("summary", self.summary, f"at most block={self.block}")


class Fixed(Patterned):
    traits = Traits(causal=True, bidirectional=True, state="growing")
    exponent = 1.5
    small = (
        {"block": 8, "summary": 2},
        {"block": 7, "summary": 3, "combine": "interleave", "layer": 1},
        {"block": 6, "summary": 2, "combine": "heads"},
    )
    options: Options

    def _patterns(self) -> Sequence[Pattern]:
        block, summary = self.options.block, self.options.summary
        factors: list[tuple[Pattern, ...]] = [(Block(block), Summary(block, summary, n)) for n in self._shifts()]
        return combine(self.options.combine, factors, self.options.layer)

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        block, summary = self.options.block, self.options.summary
        factors = []
        for shift in self._shifts():
            from_end = block - 1 - j % block  # 0 for the last of a block
            own = i // block == j // block
            factors.append((own, (from_end // summary == shift).expand_as(own)))
        return torch.stack(combine(self.options.combine, factors, self.options.layer))

    def _shifts(self) -> list[int]:
        """Which sub-block, counted from the end of the block, each head reads; neighbours share if there are few."""
        heads = self.options.heads
        different = min(self.options.block // self.options.summary, heads)
        return [head * different // heads for head in range(heads)]
