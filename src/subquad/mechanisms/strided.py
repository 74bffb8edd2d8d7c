"""Strided attention: the recent past and every l-th token before it, so that two layers reach everything.

Paper       Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, §4.2-4.3
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ over A₁ ∪ A₂,  A₁ = {t - l .. t},  A₂ = {s : (t - s) mod l = 0}, s ≤ t;
            bidirectional: A₁ = {t - l .. t + l} and A₂ to both sides
            combine: "merge" reads the union, "interleave" A₁ in even layers and A₂ in odd ones, "heads" A₁ in the first
            half of the heads and A₂ in the second
Cost        train O(T·(l + T/l)·D) time, T√T at l = √T, O(T·D) memory; decode O((l + T/l)·D) a token; state 2·T·D: a
            stride comes back to every key, so all are kept ("interleave" keeps l + 1 in the layers that read A₁)
Departures  A₁ has l + 1 keys, as in the paper's formula; the authors' kernels keep l. Bidirectional is ours
Verified    tests/mechanisms/test_strided.py: the paper's sets row by row; two hops cover; stride 1 is dense, 1e-12
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.mechanisms.base import AtLeast1, Traits
from subquad.mechanisms.patterned import CombinedOptions, Patterned, combine
from subquad.ops.sparse.patterns import Local, Pattern
from subquad.ops.sparse.patterns import Strided as Stride


@dataclass(frozen=True, kw_only=True)
class Options(CombinedOptions):
    stride: AtLeast1 = 128  # l


class Strided(Patterned):
    traits = Traits(causal=True, bidirectional=True, state="growing")
    exponent = 1.5
    small = ({"stride": 6}, {"stride": 5, "combine": "interleave", "layer": 1}, {"stride": 7, "combine": "heads"})
    options: Options

    def _patterns(self) -> Sequence[Pattern]:
        stride, causal, heads = self.options.stride, self.options.causal, self.options.heads
        factors: tuple[Pattern, Pattern] = Local(stride, 0 if causal else stride), Stride(stride)
        return combine(self.options.combine, [factors] * heads, self.options.layer)

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        stride = self.options.stride
        factors = (i - j).abs() <= stride, (i - j) % stride == 0
        return torch.stack(combine(self.options.combine, [factors] * self.options.heads, self.options.layer))
