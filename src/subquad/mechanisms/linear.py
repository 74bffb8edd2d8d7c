"""Linear attention: replace softmax by a feature map and attention becomes a running sum.

Paper       Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, §3
Definition  oₜ = φ(qₜ)ᵀSₜ / (φ(qₜ)ᵀzₜ + ε),  Sₜ = Σₛ φ(kₛ)vₛᵀ,  zₜ = Σₛ φ(kₛ),  φ = elu + 1
            with s ≤ t when causal, every s otherwise; a map that can be negative divides by sign(d)·max(|d|, ε)
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·(V + 1)
Departures  rotary positions turn q and k before φ, so the denominator stays positive
Verified    tests/mechanisms/test_linear.py: closed forms of the lecture notes, the recurrence of the paper's eq. 16-20
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.checks import check_eps
from subquad.mechanisms import base
from subquad.mechanisms.base import Heads, Mixer, Traits, keep
from subquad.ops.feature_maps import feature_map
from subquad.ops.impl import Impl
from subquad.ops.linear import (
    LinearState,
    linear_attention,
    linear_attention_read,
    linear_attention_step,
    linear_attention_sums,
)
from subquad.ops.linear.deferred import (
    GROUP,
    Queue,
    can_defer,
    deferred_linear_attention_step,
    make_queue,
    settle,
)


class State(NamedTuple):
    s: Tensor  # [B, H, M, V] at least float32
    z: Tensor  # [B, H, M]
    position: Tensor  # [B]


class Deferred(NamedTuple):
    """A state whose sums are written at every fourth step only."""

    s: Tensor
    z: Tensor
    position: Tensor
    queue: Queue


class Memory(NamedTuple):
    s: Tensor  # [B, H, M, V], sums over the context, at least float32
    z: Tensor  # [B, H, M]
    lengths: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1"  # a name, or any function of [..., K]
    eps: float = 1e-6  # the least size of a denominator
    impl: Impl = "auto"  # "auto", "torch" or "triton"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)


class Linear(Mixer):
    options_type = Options
    state_type = State
    memory_type = Memory
    traits = Traits(causal=True, bidirectional=True, cross=True, state="constant")
    family = "kernels"
    exponent = 1.0
    equivariant = True
    unused = Mixer.unused | {"dropout"}
    small = ({}, {"feature_map": "relu"})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.map = feature_map(options.feature_map)
        self.heads = Heads(options.dim, options.heads)

    def _forward(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        q, k, v = self._project(x, context)
        own, other = (lengths, None) if context is None else (None, context_lengths)
        o = linear_attention(q, k, v, causal=self.options.causal, lengths=own, key_lengths=other, **self._how())
        return self.heads.merge(o)

    def _reference(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        q, k, v = self._project(x, context)
        weights = self._weights(q, k, lengths if context is None else context_lengths)
        return self.heads.merge(torch.einsum("bhts,bshv->bthv", weights, v))

    def _pattern(self, x: Tensor) -> Tensor:
        q, k, _ = self._project(x)
        return self._weights(q, k, None)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._project(x)

    def _init_state(self, batch: int, capacity: int | None) -> State:
        heads, width = self.options.heads, self.options.dim // self.options.heads
        features = self.map.apply(self._like.new_zeros(1, width)).shape[-1]
        s = self._like.new_zeros(
            batch, heads, features, width, dtype=torch.promote_types(self._like.dtype, torch.float32)
        )
        return State(s, s.new_zeros(batch, heads, features), torch.zeros(batch, dtype=torch.int64, device=s.device))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        state = state if state is not None else self._init_state(x.shape[0], None)
        o, sums = linear_attention(
            *self._project(x, position=state.position),
            causal=True,
            lengths=lengths,
            initial_state=LinearState(state.s, state.z),
            return_state=True,
            **self._how(),
        )
        return self.heads.merge(o), State(sums.s, sums.z, self._advance(state.position, x, lengths))

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        q, k, v = (t[:, 0] for t in self._project(x[:, None], position=state.position))  # [B, H, K]
        o, sums = linear_attention_step(q, k, v, LinearState(state.s, state.z), inplace=inplace, **self._how())
        position = state.position.add_(1) if inplace else state.position + 1
        return self.heads.merge(o), State(sums.s, sums.z, position)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def defer(self, state: State) -> State | Deferred:
        heads, width = self.options.heads, self.options.dim // self.options.heads
        if width > 256 or not can_defer(self._like, self.options.feature_map, self.options.impl):
            return state
        return Deferred(*state, make_queue(self._like, state.position, heads, width, width))

    def step(self, x: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        if not isinstance(state, Deferred):
            return super().step(x, state, inplace)
        q, k, v = (t[:, 0] for t in self._project(x[:, None], position=state.position))  # [B, H, K]
        o = deferred_linear_attention_step(
            q, k, v, state.s, state.z, state.queue, state.position,
            feature_map=str(self.options.feature_map), eps=self.options.eps,
        )  # fmt: skip
        state.position.add_(1)
        return self.heads.merge(o), state

    def settle(self, state: State | Deferred, steps: int) -> None:
        if isinstance(state, Deferred):
            settle(state.s, state.z, state.queue, steps % GROUP, str(self.options.feature_map))

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        return Memory(*linear_attention_sums(k, v, feature_map=self.options.feature_map, lengths=lengths), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        sums, o = LinearState(memory.s, memory.z), self.options
        q = self.heads.queries(x)
        return self.heads.merge(linear_attention_read(q, sums, feature_map=o.feature_map, eps=o.eps))

    def _project(
        self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads.split(x, context)
        return *self._rotate(q, k, position), v

    def _how(self) -> dict[str, Any]:
        options = self.options
        return {"feature_map": options.feature_map, "eps": options.eps, "impl": options.impl}

    def _weights(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("bthm,bshm->bhts", self.map.apply(q).to(wide), self.map.apply(k).to(wide))
        if self.options.causal:
            scores = scores.tril()
        mask = keep(lengths, k.shape[1])
        if mask is not None:
            scores = scores * mask[:, None, None]
        d, eps = scores.sum(-1, keepdim=True), self.options.eps
        d = torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps)) if self.map.signed else d + eps
        return (scores / d).to(q.dtype)  # [B, H, T, S]
