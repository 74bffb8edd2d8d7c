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
from subquad.mechanisms.kernelised import Features, Kernelised, Memory
from subquad.ops.feature_maps import feature_map
from subquad.ops.linear import LinearState, linear_attention_read, linear_attention_sums
from subquad.ops.linear.deferred import GROUP, Queue, can_defer, deferred_linear_attention_step, make_queue, settle
from subquad.ops.linear.spec import Spec
from subquad.ops.precision import wide


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


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1"  # a name, or any function of [..., K]
    eps: float = 1e-6  # the least size of a denominator

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)


class Linear(Kernelised):
    small = ({}, {"feature_map": "relu"})
    approximates = True
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.map = feature_map(options.feature_map)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        return self._sum(Features(q, k, v), lengths, key_lengths)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("bthm,bshm->bhts", wide(self.map.apply(q)), wide(self.map.apply(k)))
        if self.options.causal:
            scores = scores.tril()
        d, eps = scores.sum(-1, keepdim=True), self.options.eps
        d = torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps)) if self.map.signed else d + eps
        return (scores / d).to(q.dtype)  # [B, H, T, S]

    def _how(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in ("feature_map", "eps", "impl")}

    def _init_state(self, batch: int, capacity: int | None) -> State:
        features = self.map.apply(self._zeros(1, self.width)).shape[-1]
        return State(*self._empty(batch, features))

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def defer(self, state: State) -> State | Deferred:
        if self.width > 256 or not can_defer(self._like, self.options.feature_map, self.options.impl):
            return state
        return Deferred(*state, make_queue(self._like, state.position, self.options.heads, self.width, self.width))

    def step(self, x: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        if not isinstance(state, Deferred):
            return super().step(x, state, inplace)
        q, k, v = (t[:, 0] for t in self._project(x[:, None], position=state.position))  # [B, H, K]
        spec = Spec(True, str(self.options.feature_map), self.map.signed, eps=self.options.eps)
        o = deferred_linear_attention_step(q, k, v, state.s, state.z, state.queue, state.position, spec)
        state.position.add_(1)
        return self.heads.merge(o), state

    def settle(self, state: State | Deferred, steps: int) -> None:
        if isinstance(state, Deferred):
            settle(state.s, state.z, state.queue, steps % GROUP, str(self.options.feature_map))

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        return self.memory_type(
            *linear_attention_sums(k, v, feature_map=self.options.feature_map, lengths=lengths), lengths
        )

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q, sums, options = self.heads.queries(x), LinearState(memory.s, memory.z), self.options
        return self._merge(linear_attention_read(q, sums, feature_map=options.feature_map, eps=options.eps))
