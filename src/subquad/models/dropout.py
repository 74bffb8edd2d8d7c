"""Dropout; where ranks share a sequence, keyed by the position, so that the number of ranks changes nothing."""

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.ops.impl import watched
from subquad.ops.layer_norm import Drop
from subquad.ops.uniform import dropped

NEXT_ROW = 0x9E3779B97F4A7C15 >> 2  # between the seeds of two rows, so that they are far apart


class Dropout(nn.Dropout):
    """nn.Dropout, whose numbers depend on the layout of a whole tensor: a rank has only a part of it.

    Inside `sequence_parallel` a call draws one seed from the CPU's generator, which must be at the same state on every
    rank; the numbers of each row, position and channel follow from it. `ranks.alone` gives the same on one rank.
    """

    def seed(self) -> int | None:
        """What one call uses, for calls on pieces of a sequence; None where nothing is keyed."""
        if ranks.active() is None or not self.training or self.p == 0:
            return None
        return int(torch.randint(2**62, ()))

    def drop(self, x: Tensor) -> Drop | None:
        """What an op needs to drop numbers of x by itself; None if this module must."""
        if not self.training or not 0 < self.p < 1 or ranks.active() is not None or watched(self):
            return None
        return Drop(self.p, torch.randint(2**62, (1,), device=x.device))

    def forward(self, x: Tensor, seed: int | None = None, positions: Tensor | None = None) -> Tensor:
        """x [B, T, D]; `positions` [T] are those of this rank's part if x is a piece of it, with the seed of all."""
        seed = self.seed() if seed is None else seed
        if seed is None:
            return super().forward(x)
        positions = ranks.positions(x.shape[1], x.device) if positions is None else positions
        batch, length, _ = x.shape
        rows = (seed + torch.arange(batch, device=x.device) * NEXT_ROW) & (2**62 - 1)
        return dropped(x, rows.repeat_interleave(length), positions.repeat(batch), self.p)
