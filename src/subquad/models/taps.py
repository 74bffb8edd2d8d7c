"""A short convolution before a mixer: a weighted sum of each token and a few near ones, per channel.

Paper       such as Fu et al. 2023 (H3), arXiv:2212.14052, §3.2; taps need not be adjacent, such as the pixel above
Definition  yₜ = w₀ ⊙ xₜ + Σⱼ wⱼ ⊙ xₜ₋ₙⱼ with x = 0 before the first token
            where not causal, + Σⱼ uⱼ ⊙ xₜ₊ₙⱼ with x = 0 behind the last
Cost        O(T·D·J); a state of max(n)·D numbers
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad import ranks
from subquad.ops.short_conv import ShortConv


class Recent(NamedTuple):
    """The last inputs, in a ring: the token at position p is in place p modulo the ring's size."""

    ring: Tensor  # [B, L, D], zeros before the first token
    position: Tensor  # [B]


class Taps(ShortConv):
    """x [B, T, D] -> y [B, T, D]; `taps` are distances in tokens, looking back and, where not causal, also ahead."""

    def __init__(self, dim: int, taps: Sequence[int], causal: bool = True):
        super().__init__(dim, taps, causal)
        self.taps = tuple(taps)

    def _draw(self, count: int, dim: int) -> Tensor:
        return torch.cat((torch.ones(1, dim), 0.3 * torch.randn(count - 1, dim)))  # mostly the token itself

    def init_state(self, batch: int) -> Recent:
        ring = self.make_ring(batch)
        return Recent(ring, torch.zeros(batch, dtype=torch.int64, device=ring.device))

    def check(self, state: Recent, batch: int) -> None:
        """Refuse a ring for other taps or another batch."""
        wanted = (batch, self.reach, self.weight.shape[1])
        if tuple(state.ring.shape) != wanted:
            raise ValueError(f"state.recent.ring is {list(state.ring.shape)}: taps={self.taps} keep {list(wanted)}")

    def prefill(self, x: Tensor, lengths: Tensor | None, state: Recent | None) -> tuple[Tensor, Recent]:
        """Read many tokens after those in the state: (y, the state after the first `lengths` of them)."""
        ring, position = self.init_state(x.shape[0]) if state is None else state
        y, ring = self.advance(x, ring, position, lengths)
        return y, Recent(ring, position + ranks.tokens_read(x.shape[1], lengths))

    def step(self, x: Tensor, state: Recent, inplace: bool = False) -> tuple[Tensor, Recent]:
        """One token, x [B, D] -> (y [B, D], the new state)."""
        y, state = self.decode(x, state, inplace)
        return y, Recent(state.ring, state.position.add_(1) if inplace else state.position + 1)

    def decode(self, x: Tensor, state: Recent, inplace: bool = True) -> tuple[Tensor, Recent]:
        """`step` without moving `position`, which the caller does for all layers at once."""
        y, ring = self.advance_one(x, state.ring, state.position, inplace)
        return y, Recent(ring, state.position)

    def extra_repr(self) -> str:
        return f"taps={self.taps}"
