"""Transformer-XL: attention over the last `memory` positions, across segments, with relative positions.

Paper       Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
            arXiv:1901.02860, §3
Definition  oₜ = Σₛ softmaxₛ(((qₜ + u)·kₛ + (qₜ + w)·W_r R_{t-s}) / √K) vₛ,  t - memory ≤ s ≤ t when causal,
            |t - s| ≤ memory otherwise; R is the sinusoid of a distance, u and w are learned per head
Cost        train O(T·memory·D) time, O(T·D) memory in the kernels and O(T·memory·H) in plain torch; decode O(memory·D)
            a token; state 2·memory·D
Departures  every query sees exactly `memory` positions back, so that a sequence gives the same numbers whole, in
            segments and token by token (the paper's queries see one to two segments); the state keeps projected keys
            and values of the past, without gradient; u and w belong to the layer
Verified    tests/mechanisms/test_transformer_xl.py: an explicit gather of R_{t-s}, segments against one pass, 1e-12;
            not against public code
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.graphs import capturing
from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.ops.lengths import keep
from subquad.ops.relative import Ends, relative_attention
from subquad.ops.rotary import Turns
from subquad.ops.sparse.relative_step import relative_step


class State(NamedTuple):
    k: Tensor  # [B, memory, H, K], the last positions: position j is in slot j mod memory; the others are never seen
    v: Tensor  # [B, memory, H, V]
    position: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    memory: AtLeast1 = 512  # positions back that a query sees


class TransformerXL(Attention):
    traits = Traits(causal=True, bidirectional=True, state="window")
    family, exponent = "recurrence", 1.0
    splits = True
    unused = Attention.unused | {"rotary"}
    small = ({"memory": 5}, {"memory": 64})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.after = 0 if options.causal else options.memory  # positions ahead that a query sees
        self.relative = nn.Linear(options.dim, options.dim, bias=False)  # W_r
        self.u, self.w = (nn.Parameter(torch.randn(options.heads, self.width) * 0.02) for _ in range(2))

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        q, k, v = self.heads.split(x)
        if ranks.active() is None:
            return self._merge(self._attend_band(q, k, v, ends=_ends(lengths)))
        around, seen = (self.options.memory, self.after), keep(lengths, x.shape[1])
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if seen is None else seen
        k, v, seen = (ranks.halo(t, *around) for t in (k, v, seen.to(torch.uint8)))
        first = (seen.cumsum(1) == 0).sum(1)  # what exists is in one piece
        return self._merge(self._attend_band(q, k, v, around[0], (first, first + seen.sum(1))))

    def _init_state(self, batch: int, capacity: int | None) -> State:
        past = self._zeros(batch, self.options.memory, self.options.heads, self.width)
        return State(past, past.clone(), self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        if state is not None:
            ranks.refuse("a state before a prompt of TransformerXL", "accepted is a prompt from the start")
        state = self._init_state(x.shape[0], None) if state is None else state
        q, k, v = self.heads.split(x)
        if ranks.active() is not None:
            (past_k, at), (past_v, _) = (ranks.last_tokens(t.detach(), self.options.memory, lengths) for t in (k, v))
            position, none = at[:, -1] + 1, torch.zeros_like(state.position)
            past = [_into_ring(t, none, position, self.options.memory).to(state.k.dtype) for t in (past_k, past_v)]
            return self._forward(x, lengths), State(past[0], past[1], position)
        k, v = (
            torch.cat((_from_ring(old, state.position).to(new.dtype), new), dim=1)
            for old, new in ((state.k, k), (state.v, v))
        )
        memory = self.options.memory
        ends = (memory - state.position).clamp(min=0), torch.full_like(state.position, k.shape[1])
        added = self._advance(torch.zeros_like(state.position), x, lengths)
        position = state.position + added
        past = [_into_ring(t.detach(), added, position, memory).to(state.k.dtype) for t in (k, v)]
        return self._merge(self._attend_band(q, k, v, memory, ends)), State(past[0], past[1], position)

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        q, k, v = (t[:, 0] for t in self.heads.split(x[:, None]))  # [B, H, K]
        far = self._relative(q)
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (q, far, self.u, self.w))
        if self._dropout() or gradients:
            return super()._step_inplace(x, state) if inplace else super()._step(x, state)
        new = state if inplace else State(*(t.clone() for t in state))
        o = relative_step(q, k, v, *new, (self.u, self.w, far), self.width**-0.5, self.options.impl)
        return self._merge(o), new

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def _decodes(self, state: State) -> bool:
        return type(self) is TransformerXL and not self._dropout() and not torch.is_grad_enabled()

    def _decode(self, qkv: Tensor, state: State, turns: Turns | None) -> tuple[Tensor, State]:
        both, v = self.heads.cut(qkv)
        q, k = both.chunk(2, dim=1)
        bias = self.u, self.w, self._relative(q)
        o = relative_step(q, k, v, *state, bias, self.width**-0.5, self.options.impl, moves=False)
        return o.flatten(1), state

    def _relative(self, like: Tensor) -> Tensor:
        """W_r R for the distances memory .. -after, [memory + after + 1, H, K]."""
        traced = torch.compiler.is_compiling() or type(like) is not Tensor
        make = _waves if traced or capturing(like) else _kept_waves
        waves = make(self.options.memory, self.after, self.options.dim, like.device, like.dtype)
        return self.relative(waves).unflatten(-1, (self.options.heads, -1))

    def _attend_band(self, q: Tensor, k: Tensor, v: Tensor, offset: int = 0, ends: Ends | None = None) -> Tensor:
        """Attention of queries to keys that start `offset` before the first query."""
        r, before = self._relative(q), self.options.memory
        band = q, k, v, r, self.u, self.w
        dropout, impl = self._dropout(), self.options.impl
        return relative_attention(*band, before=before, offset=offset, ends=ends, dropout=dropout, impl=impl)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        s, dim = torch.arange(q.shape[1], device=q.device), self.options.dim
        distance = s[:, None] - s  # [T, S]
        angles = [[d / 10000 ** (2 * i / dim) for i in range((dim + 1) // 2)] for d in range(1 - len(s), len(s))]
        waves = torch.tensor([[*map(math.sin, row), *map(math.cos, row)][:dim] for row in angles], dtype=torch.float64)
        r = waves.to(q)[distance + len(s) - 1]  # R_{t-s}, [T, S, D]
        r = self.relative(r).unflatten(-1, (self.options.heads, -1))
        scores = torch.einsum("bthk,bshk->bhts", q + self.u, k) + torch.einsum("bthk,tshk->bhts", q + self.w, r)
        visible = (distance <= self.options.memory) & (distance >= -self.after)
        return (scores / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf).softmax(-1)


def _ends(lengths: Tensor | None) -> Ends | None:
    return None if lengths is None else (torch.zeros_like(lengths), lengths)


def _from_ring(ring: Tensor, position: Tensor) -> Tensor:
    """The last positions of each row in order, [B, memory, H, ·]."""
    slots = torch.arange(ring.shape[1], device=ring.device)
    return _take(ring, (position[:, None] + slots) % ring.shape[1])


def _into_ring(t: Tensor, first: Tensor, position: Tensor, memory: int) -> Tensor:
    """The ring after `position` [B], of the `memory` entries of t [B, ·, H, ·] from `first` [B] on, the last ones."""
    slots = torch.arange(memory, device=t.device)
    return _take(t, first[:, None] + (slots - position[:, None]) % memory)


def _take(t: Tensor, index: Tensor) -> Tensor:
    return t.gather(1, index[..., None, None].expand(-1, -1, *t.shape[2:]))


def _waves(memory: int, after: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """R of the distances memory .. -after."""
    distances = memory - torch.arange(memory + after + 1, device=device)
    return sinusoid(distances, dim).to(dtype)


@lru_cache(maxsize=16)
def _kept_waves(memory: int, after: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`_waves`, which take longer to make than a step."""
    with torch.inference_mode(False):  # whose tensors training may not use
        return _waves(memory, after, dim, device, dtype)


def sinusoid(distances: Tensor, dim: int) -> Tensor:
    """R: sines of a distance at dim/2 rates, then the cosines, as in the paper's code; [...] -> [..., dim]."""
    rates = 10000 ** -(torch.arange(0, dim, 2, device=distances.device, dtype=torch.float64) / dim)
    angle = distances[..., None] * rates
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[..., :dim]
