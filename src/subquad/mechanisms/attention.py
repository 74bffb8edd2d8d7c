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
from subquad.ops.packed import apart
from subquad.ops.precision import wide_type
from subquad.ops.projection import project
from subquad.ops.rotary import Turns, turned, turned_qkv, turns

QKV = tuple[Tensor, Tensor, Tensor]


def some_outputs(linear: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """Some of a linear layer's outputs. A layer that another program replaced, as LoRA does, computes all of them."""
    if type(linear) is not nn.Linear:
        return linear(x)[..., rows]
    return F.linear(x, linear.weight[rows], linear.bias[rows])


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
        # methods of torch itself: its wrappers in Python, split and unflatten, cost as much as a small product
        parts = apart(project(x, self.qkv), (self.all_keys, self.all_keys, self.dim))
        q, k, v = (part.view(*x.shape[:-1], self.heads, -1) for part in parts)
        return q, k, v

    def cut(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [..., ·] of `qkv` -> q and k [..., 2·H, K], v [..., H, D/H]"""
        both, v = qkv.split_with_sizes((2 * self.all_keys, self.dim), -1)
        shape = qkv.shape[:-1]
        return both.view(*shape, 2 * self.heads, -1), v.view(*shape, self.heads, -1)

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, D] -> q [B, T, H, K]"""
        return some_outputs(self.qkv, x, slice(self.all_keys)).unflatten(-1, (self.heads, -1))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> k [B, S, H, K] and v [B, S, H, D/H]"""
        both = some_outputs(self.qkv, context, slice(self.all_keys, None))
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in both.split((self.all_keys, self.dim), -1))
        return k, v

    def merge(self, o: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]"""
        return project(o.flatten(-2), self.out)


class Attention(Mixer):
    """Y = merge(W V): a mechanism defines the weights W [B, H, T, S], but its fast path need not compute them."""

    may_turn: bool = True  # whether all rotations of queries and keys are those of `_rotate`
    approximates: ClassVar[bool] = False  # whether W V approximates softmax(q·k/√K) v, with q, k, v from `_project`

    def __init__(self, options: Options, heads: bool = True, width: int | None = None):
        """`heads`: make the usual projections of queries, keys, values and outputs; `width`: see `Heads`."""
        super().__init__(options)
        self.width = options.dim // options.heads
        self.turn_width = (width or self.width) if options.rotary else None
        self.turn: nn.Module | None = None  # (q, k, position) -> q, k, of a model around it, in place of rotary
        if heads:
            self.heads = Heads(options.dim, options.heads, width)
            own = type(self)._forward is Attention._forward and type(self)._project is Attention._project
            self.reads_products = own  # of x with weights, and x in no other way

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
        fused = self.options.rotary and self.turn is None and type(self.heads) is Heads
        if context is not None or not fused:
            q, k, v = self.heads.split(x, context)
            if context is None:
                return *self._rotate(q, k, position), v
            return self._rotate(q, q)[0], self._rotate(k, k)[1], v
        qkv = project(x, self.heads.qkv)
        by = self._turns_at(qkv, position, self.heads.all_keys // self.heads.heads)
        return turned_qkv(qkv, by, self.heads.heads, self.heads.all_keys)

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

    def _projections(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        if not isinstance(getattr(self, "heads", None), Heads) or not hasattr(self.heads, "qkv"):
            return {}
        sizes = (self.heads.all_keys, self.heads.all_keys, self.heads.dim)
        weights, biases = self.heads.qkv.weight.split(sizes), self.heads.qkv.bias.split(sizes)
        parts = dict(zip("qkv", zip(weights, biases, strict=True), strict=True))
        return {**parts, "o": (self.heads.out.weight, self.heads.out.bias)}

    # What a mechanism may use

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k of the same tokens with rotary positions, if options.rotary; rows start at `position` [B] or at 0."""
        if self.turn is not None:
            ranks.refuse("the rotation of another model", "accepted is rotary=True")
            return self.turn(q, k, position)
        if not self.options.rotary:
            return q, k
        by = self._turns_at(q, position, q.shape[-1])
        turned_q = turned(q, by)
        return turned_q, turned_q if k is q else turned(k, by)

    def _turns_at(self, q: Tensor, position: Tensor | None, width: int) -> Turns:
        """The turns for q [B, T, ...]: those that the caller gave, which are of the same positions, or new ones."""
        if self._turns is not None:
            return self._turns
        at = ranks.positions(q.shape[1], q.device)
        return turns(at if position is None else position[:, None] + at, width, wide_type(q))

    def _dropout(self) -> float:
        return self.options.dropout if self.training else 0.0
