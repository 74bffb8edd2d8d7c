"""Additive attention: a small network scores every pair of a query and a key.

Paper       Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and Translate",
            arXiv:1409.0473, §3.1 and appendix A.1.2
Definition  eₜₛ = vᵀtanh(W xₜ + U cₛ),  aₜ = softmax(eₜ),  oₜ = Σₛ aₜₛ hₛ, per head; s ≤ t when causal
            W[x; c] of the lecture notes equals W x + U c, so U c is computed once and cached
Cost        train O(T²·hidden·H) time, O(T·(D + hidden·H)) memory; decode O(T·hidden·H) a token; state T·(hidden·H + D)
Departures  several heads, and values hₛ = V cₛ with an output projection, as in the mechanisms that came later
Verified    tests/mechanisms/test_additive.py: against a scalar loop over the paper's formula, 1e-12
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.attention import QKV, Attention
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.ops.additive import additive_attention
from subquad.ops.cache import append, cached_attention
from subquad.ops.dense import hide_future


class State(NamedTuple):
    k: Tensor  # [B, C, H, hidden], U c
    v: Tensor  # [B, C, H, V]
    position: Tensor  # [B]


class Memory(NamedTuple):
    k: Tensor  # [B, S, H, hidden], U c
    v: Tensor  # [B, S, H, V]
    lengths: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    hidden: AtLeast1 | None = None  # width of the scoring network per head; None: dim/heads


class Additive(Attention):
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family, exponent = "exact", 2.0
    equivariant = rewinds = True
    unused = Attention.unused | {"rotary"}
    small = ({}, {"hidden": 3})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options, heads=False)
        self.hidden = options.hidden or self.width
        self.query = nn.Linear(options.dim, options.heads * self.hidden)  # W
        self.key = nn.Linear(options.dim, options.heads * self.hidden, bias=False)  # U; one bias inside tanh is enough
        self.value = nn.Linear(options.dim, options.dim)
        self.score = nn.Parameter(torch.empty(options.heads, self.hidden).uniform_(-1, 1) / self.hidden**0.5)  # v
        self.out = nn.Linear(options.dim, options.dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        (batch, size), device = q.shape[:2], q.device
        if self.options.causal:
            counts = torch.arange(1, size + 1, device=device).expand(batch, size)
        elif key_lengths is None:
            counts = torch.full((batch, size), k.shape[1], device=device)
        else:  # at least one key, because a softmax over none is NaN
            counts = key_lengths.clamp(min=1)[:, None].expand(batch, size)
        return self._attend_first(q, k, v, counts)

    def _attend_first(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
        """Each query sees the first counts [B, T] keys."""
        k, v, dropout = k.to(q.dtype), v.to(q.dtype), self._dropout()
        return additive_attention(q, k, v, counts, self.score, dropout=dropout, impl=self.options.impl)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (torch.tanh(q[:, :, None] + k[:, None]) * self.score).sum(-1).movedim(-1, 1)  # [B, H, T, S]
        return (hide_future(scores) if self.options.causal else scores).softmax(-1)

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> QKV:
        return self._by_head(self.query, x), *self._keys(x if context is None else context)

    def _keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        return self._by_head(self.key, context), self._by_head(self.value, context)

    def _by_head(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x).unflatten(-1, (self.options.heads, -1))

    def _merge(self, o: Tensor) -> Tensor:
        return self.out(o.flatten(-2))

    def _init_state(self, batch: int, capacity: int | None) -> State:
        k, v = (self._zeros(batch, capacity or 64, self.options.heads, n) for n in (self.hidden, self.width))
        return State(k, v, self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        state = self._init_state(*x.shape[:2]) if state is None else state
        (q, k, v), start = self._project(x), state.position
        new = State(append(state.k, k, start), append(state.v, v, start), self._advance(start, x, lengths))
        counts = start[:, None] + torch.arange(1, x.shape[1] + 1, device=x.device)  # [B, T]
        return self._merge(self._attend_first(q, new.k, new.v, counts)), new

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self._dropout():
            return super()._step(x, state)
        q, k, v = self._project(x[:, None])  # [B, 1, H, ·]
        keys = append(state.k, k, state.position, inplace=inplace)
        values = append(state.v, v, state.position, inplace=inplace)
        position = state.position.add_(1) if inplace else state.position + 1
        o = cached_attention(q[:, 0], keys, values, position, score=self.score, impl=self.options.impl)
        return self._merge(o), State(keys, values, position)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        return Memory(*self._keys(context), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        return self._merge(self._attend(self._by_head(self.query, x), memory.k, memory.v, lengths, memory.lengths))
