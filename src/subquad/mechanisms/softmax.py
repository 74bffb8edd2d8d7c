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
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import QKV, Attention, Heads
from subquad.mechanisms.base import Traits
from subquad.ops.cache import append, cached_attention, cached_attention_step
from subquad.ops.dense import counted_attention, dense_attention, hide_future
from subquad.ops.lengths import visible_keys
from subquad.ops.rotary import Turns
from subquad.ops.sparse import Dense, sparse_attention


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


class Unprojected(Heads):
    """q = k = v = x, cut into heads."""

    def __init__(self, heads: int):
        nn.Module.__init__(self)
        self.heads = heads

    def split(self, x: Tensor, context: Tensor | None = None) -> QKV:
        return self.queries(x), *self.keys(x if context is None else context)

    def queries(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        return (self.queries(context),) * 2

    def merge(self, o: Tensor) -> Tensor:
        return o.flatten(-2)


class Softmax(Attention):
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family, exponent = "exact", 2.0
    equivariant = rewinds = True
    splits = True
    small = ({}, {"projections": False})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options, heads=options.projections)
        self.scale = options.scale or (1 / math.sqrt(self.width) if options.projections else 1.0)
        if not options.projections:
            self.heads = Unprojected(options.heads)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        if ranks.active() is not None:
            return sparse_attention(q, k, v, Dense(), causal=self.options.causal, lengths=lengths, scale=self.scale)
        causal = self.options.causal  # right padding is in every token's future
        mask = None if causal else visible_keys(key_lengths, k.shape[1])
        return dense_attention(q, k, v, mask, causal=causal, scale=self.scale, dropout=self._dropout())

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        scale = self.options.scale or (q.shape[-1] ** -0.5 if self.options.projections else 1.0)  # the definition's own
        scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
        return (hide_future(scores) if self.options.causal else scores).softmax(-1)  # [B, H, T, S]

    def _qkv(self, x: Tensor) -> QKV:
        q, k, v = self._project(x)
        return q * (self.scale * math.sqrt(q.shape[-1])), k, v

    def _init_state(self, batch: int, capacity: int | None) -> State:
        cache = self._zeros(batch, capacity or 64, self.options.heads, self.width)
        return State(cache, cache.clone(), self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        if state is not None:
            ranks.refuse("a state before a prompt of Softmax", "accepted is a prompt from the start")
        before = self._init_state(x.shape[0], ranks.whole_length(x.shape[1])) if state is None else state
        start = before.position
        q, k, v = self._project(x, position=start)
        keys, values = (ranks.tokens_of(t, 0, ranks.whole_length(x.shape[1])) for t in (k, v))
        new = State(append(before.k, keys, start), append(before.v, values, start), self._advance(start, x, lengths))
        if state is None:
            return self._merge(self._attend(q, k, v, None, None)), new
        counts = start[:, None] + torch.arange(1, x.shape[1] + 1, device=x.device)  # [B, T]
        o = counted_attention(q, new.k, new.v, counts, scale=self.scale, dropout=self._dropout())
        return self._merge(o), new

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self._dropout():
            return super()._step(x, state)
        q, k, v = self._project(x[:, None], position=state.position)  # [B, 1, H, K]
        keys = append(state.k, k, state.position, inplace=inplace)
        values = append(state.v, v, state.position, inplace=inplace)
        position = state.position.add_(1) if inplace else state.position + 1
        o = cached_attention(q[:, 0], keys, values, position, scale=self.scale)
        return self._merge(o), State(keys, values, position)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def _decodes(self, state: State) -> bool:
        return type(self) is Softmax and not self._dropout()

    def _decode(self, qkv: Tensor, state: State, turns: Turns | None) -> tuple[Tensor, State]:
        both, v_t = self.heads.cut(qkv)
        q_t, k_t = both.chunk(2, dim=1)
        o, k, v = cached_attention_step(q_t, k_t, v_t, state.k, state.v, state.position, turns, scale=self.scale)
        return o.flatten(1), State(k, v, state.position)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        return Memory(*self.heads.keys(context), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q, seen = self.heads.queries(x), memory.lengths
        if x.shape[1] > 1 or self._dropout():
            return self._merge(self._attend(q, memory.k.to(q.dtype), memory.v.to(q.dtype), lengths, seen))
        o = cached_attention(q[:, 0], memory.k, memory.v, seen.clamp(min=1), scale=self.scale)
        return self._merge(o[:, None])
