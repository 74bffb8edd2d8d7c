"""Local attention: every token reads a window around itself.

Paper       Luong et al. 2015, arXiv:1508.04025, §3.2 (a window around a position); as self-attention the sliding window
            of Longformer, arXiv:2004.05150, §3.1
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ over |t - s| ≤ window; t - window ≤ s ≤ t when causal
Cost        train O(T·window·D) time, O(T·D) memory; decode O(window·D) a token; state 2·(window + 1)·D
Departures  the window slides with the token and is not cut at block borders; `window` counts one side, as in Longformer
Verified    tests/mechanisms/test_local.py: a scalar loop, 1e-12; fast-transformers' window of 17 is |i - j| < 9
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast0
from subquad.mechanisms.patterned import Patterned
from subquad.ops.sparse.patterns import Local as Window
from subquad.ops.sparse.patterns import Pattern


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    window: AtLeast0 = 128  # tokens on each side; when causal, before


class Local(Patterned):
    exponent = 1.0
    small = ({"window": 5},)
    options: Options

    def _patterns(self) -> Sequence[Pattern]:
        window = self.options.window
        return [Window(window, 0 if self.options.causal else window)] * self.options.heads

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        return (i - j).abs() <= self.options.window
