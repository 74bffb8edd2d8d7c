"""What most mechanisms are: queries read values by weights, per head, and a projection merges the heads.

Such a mechanism writes two methods over q, k, v: `_attend`, the fast path, and `_weights`, the definition. Forward,
cross-attention, reference and pattern follow from them.
"""

import torch
from torch import Tensor

from subquad.mechanisms.base import Mixer
from subquad.mechanisms.heads import Heads
from subquad.ops.rotary import rotate


class Attention(Mixer):
    """Y = merge(W V): W [B, H, T, S] are weights that a mechanism defines and that its fast path need not make."""

    heads: Heads

    # What a mechanism writes

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        """W V by the fast path, [B, T, H, V], for queries with `lengths` and keys with `key_lengths` (the same in
        self-attention)."""
        raise NotImplementedError

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """W by the definition, [B, H, T, S], of rows without padding."""
        raise NotImplementedError

    # What follows, unless a mechanism does it in another way

    def _project(
        self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K] of x, k and v [B, S, H, ·] of the context (x if there is none); rows start at `position`."""
        q, k, v = self.heads.split(x, context)
        return *self._rotate(q, k, position), v

    def _merge(self, o: Tensor) -> Tensor:
        """[B, T, H, V] -> [B, T, D]"""
        return self.heads.merge(o)

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return self._merge(self._attend(*self._project(x), lengths, lengths))

    def _cross(self, x: Tensor, lengths: Tensor | None, context: Tensor, context_lengths: Tensor | None) -> Tensor:
        return self._merge(self._attend(*self._project(x, context), lengths, context_lengths))

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """W and V by the definition."""
        q, k, v = self._project(x, context)
        return self._weights(q, k), v

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        weights, v = self._define(x, context)
        return self._merge(torch.einsum("bhts,bshv->bthv", weights.to(v.dtype), v))

    def _pattern(self, x: Tensor) -> Tensor:
        return self._define(x)[0].to(x.dtype)

    # What a mechanism may use

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotary positions on q and k if asked for; rows start at `position` [B] (0 if None)."""
        if not self.options.rotary:
            return q, k
        positions = torch.arange(q.shape[1], device=q.device)
        if position is not None:
            positions = position[:, None] + positions
        return rotate(q, positions), rotate(k, positions)

    def _dropout(self) -> float:
        return self.options.dropout if self.training else 0.0
