"""Scaled dot-product attention with several heads: the exact original that everything else is measured against.

Paper       Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ, with s ≤ t when causal, every s otherwise; q, k, v = x W per head
            projections=False: q = k = v = x and no scale, the parameter-free self-attention of the lecture notes
Cost        train O(T²·D) time, O(T·D) memory; decode O(T·D) a token; state 2·T·D
Departures  none; the fast path is torch's scaled_dot_product_attention, or one pass over the cache when decoding
Verified    tests/mechanisms/test_softmax.py: equal to torch.nn.MultiheadAttention with copied weights, 1e-6
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import Heads, Mixer, Traits, keep
from subquad.ops.cache import append, cached_attention
from subquad.ops.dense import dense_attention

ROWS = 512  # queries at a time against a cache, so that the mask of a long continued prompt stays small


class State(NamedTuple):
    k: Tensor  # [B, C, H, K]
    v: Tensor  # [B, C, H, V]
    position: Tensor  # [B]


class Memory(NamedTuple):
    k: Tensor  # [B, S, H, K]
    v: Tensor  # [B, S, H, V]
    lengths: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    projections: bool = True  # False: no parameters, softmax(x·x^T)·x unscaled
    scale: float | None = None  # of the scores; None: 1/√K, or 1 without projections

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and self.scale <= 0:
            refuse("scale", self.scale, "None or a number above 0")


class Softmax(Mixer):
    options_type = Options
    state_type = State
    memory_type = Memory
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family = "exact"
    exponent = 2.0
    equivariant = True
    small = ({}, {"projections": False})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        width = options.dim // options.heads
        self.scale = options.scale or (1 / math.sqrt(width) if options.projections else 1.0)
        self.heads = Heads(options.dim, options.heads) if options.projections else None

    def _forward(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        q, k, v = self._project(x, context)
        if self.options.causal:
            return self._merge(self._attend(q, k, v, causal=True))  # right padding is in every token's future
        mask = _visible(lengths if context is None else context_lengths, k.shape[1])
        return self._merge(self._attend(q, k, v, mask))

    def _reference(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        q, k, v = self._project(x, context)
        weights = self._weights(q, k, lengths if context is None else context_lengths)
        return self._merge(torch.einsum("bhts,bshv->bthv", weights, v))

    def _pattern(self, x: Tensor) -> Tensor:
        q, k, _ = self._project(x)
        return self._weights(q, k, None)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._project(x)
        return q * (self.scale * math.sqrt(q.shape[-1])), k, v

    def _init_state(self, batch: int, capacity: int | None) -> State:
        heads = self.options.heads
        cache = self._like.new_zeros(batch, capacity or 64, heads, self.options.dim // heads)
        return State(cache, cache.clone(), torch.zeros(batch, dtype=torch.int64, device=cache.device))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        fresh = state is None
        state = state if state is not None else self._init_state(*x.shape[:2])
        q, k, v = self._project(x, position=state.position)
        new = State(
            append(state.k, k, state.position),
            append(state.v, v, state.position),
            self._advance(state.position, x, lengths),
        )
        if fresh:
            return self._merge(self._attend(q, k, v, causal=True)), new
        slots = torch.arange(new.k.shape[1], device=x.device)
        first = state.position[:, None, None, None]  # [B, 1, 1, 1]
        parts = []
        for start in range(0, x.shape[1], ROWS):
            rows = q[:, start : start + ROWS]
            at = first + torch.arange(start, start + rows.shape[1], device=x.device)[:, None]  # [B, 1, T, 1]
            parts.append(self._attend(rows, new.k.to(q.dtype), new.v.to(q.dtype), slots <= at))
        return self._merge(torch.cat(parts, dim=1)), new

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self.training and self.options.dropout:
            return super()._step(x, state)
        q, k, v = self._project(x[:, None], position=state.position)  # [B, 1, H, K]
        keys = append(state.k, k, state.position, inplace=inplace)
        values = append(state.v, v, state.position, inplace=inplace)
        position = state.position.add_(1) if inplace else state.position + 1
        o = cached_attention(q[:, 0], keys, values, position, scale=self.scale)
        return self._merge(o), State(keys, values, position)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        return Memory(*self._keys(context), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q, seen = self._queries(x), memory.lengths
        if x.shape[1] == 1 and not (self.training and self.options.dropout):
            o = cached_attention(q[:, 0], memory.k, memory.v, seen.clamp(min=1), scale=self.scale)[:, None]
        else:
            o = self._attend(q, memory.k.to(q.dtype), memory.v.to(q.dtype), _visible(seen, memory.k.shape[1]))
        return self._merge(o)

    def _queries(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.options.heads, -1)) if self.heads is None else self.heads.queries(x)

    def _keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        if self.heads is not None:
            return self.heads.keys(context)
        k = context.unflatten(-1, (self.options.heads, -1))
        return k, k

    def _project(
        self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if context is None and self.heads is not None:
            q, k, v = self.heads.split(x)
        else:
            q, (k, v) = self._queries(x), self._keys(x if context is None else context)
        return *self._rotate(q, k, position), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dropout = self.options.dropout if self.training else 0.0
        return dense_attention(q, k, v, mask, causal=causal, scale=self.scale, dropout=dropout)

    def _weights(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> Tensor:
        scale = self.options.scale or (q.shape[-1] ** -0.5 if self.options.projections else 1.0)  # the definition's own
        scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
        if self.options.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        mask = _visible(lengths, k.shape[1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1)  # [B, H, T, S]

    def _merge(self, o: Tensor) -> Tensor:
        return o.flatten(-2) if self.heads is None else self.heads.merge(o)


def _visible(lengths: Tensor | None, size: int) -> Tensor | None:
    """Keys a query may see, [B, 1, 1, S]; an empty row sees one zero key, so that no softmax is over nothing."""
    mask = None if lengths is None else keep(lengths.clamp(min=1), size)
    return None if mask is None else mask[:, None, None]
