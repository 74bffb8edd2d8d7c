"""The base of most mechanisms: in each head queries read values by weights, and a projection merges the heads.

Such a mechanism writes two methods over q, k, v: `_attend`, the fast path, and `_weights`, the definition. Forward,
cross-attention, reference and pattern follow from them.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.mechanisms.base import Mixer, Options
from subquad.ops.rotary import rotate

QKV = tuple[Tensor, Tensor, Tensor]


class Heads(nn.Module):
    """x -> q, k, v for each head, and back."""

    def __init__(self, dim: int, heads: int, width: int | None = None):
        """`width`: of q and k in each head, if not dim/heads."""
        super().__init__()
        self.dim, self.heads = dim, heads
        self.all_keys = dim if width is None else heads * width  # the width of the keys of all heads
        self.qkv = nn.Linear(dim, 2 * self.all_keys + dim)  # one product instead of three
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor, context: Tensor | None = None) -> QKV:
        """q from x, k and v from the context (x itself if there is none): [B, T, D] -> 3 x [B, T, H, ·]."""
        if context is not None:
            return self.queries(x), *self.keys(context)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).split((self.all_keys, self.all_keys, self.dim), -1)
        )
        return q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, D] -> q [B, T, H, K]"""
        q = F.linear(x, self.qkv.weight[: self.all_keys], self.qkv.bias[: self.all_keys])
        return q.unflatten(-1, (self.heads, -1))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> k [B, S, H, K] and v [B, S, H, D/H]"""
        both = F.linear(context, self.qkv.weight[self.all_keys :], self.qkv.bias[self.all_keys :])
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in both.split((self.all_keys, self.dim), -1))
        return k, v

    def merge(self, o: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]"""
        return self.out(o.flatten(-2))


class Attention(Mixer):
    """Y = merge(W V): a mechanism defines the weights W [B, H, T, S], but its fast path need not compute them."""

    approximates: ClassVar[bool] = False  # whether W V approximates softmax(q·k/√K) v, with q, k, v from `_project`

    def __init__(self, options: Options, heads: bool = True, width: int | None = None):
        """`heads`: make the usual projections of queries, keys, values and outputs; `width`: see `Heads`."""
        super().__init__(options)
        self.width = options.dim // options.heads
        if heads:
            self.heads = Heads(options.dim, options.heads, width)

    # What a mechanism writes

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        """W V by the fast path, [B, T, H, V], for queries with `lengths` and keys with `key_lengths` (the same in
        self-attention)."""
        raise NotImplementedError

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """W by the definition, [B, H, T, S], for rows without padding."""
        raise NotImplementedError

    # What follows from these, unless a mechanism overrides it

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> QKV:
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

    def _qkv(self, x: Tensor) -> QKV | None:
        return self._project(x) if self.approximates else None

    # What a mechanism may use

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k with rotary positions, if options.rotary; rows start at `position` [B] (0 if None)."""
        if not self.options.rotary:
            return q, k

        def turn(t: Tensor) -> Tensor:
            positions = ranks.positions(t.shape[1], t.device)
            return rotate(t, positions if position is None else position[:, None] + positions)

        return turn(q), turn(k)

    def _dropout(self) -> float:
        return self.options.dropout if self.training else 0.0
