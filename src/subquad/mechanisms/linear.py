"""Linear attention: replace softmax by a feature map and attention becomes a running sum.

Paper       Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, §3
Definition  oₜ = φ(qₜ)ᵀSₜ / (φ(qₜ)ᵀzₜ + ε),  Sₜ = Σₛ φ(kₛ)vₛᵀ,  zₜ = Σₛ φ(kₛ),  φ = elu + 1
            with s ≤ t when causal, every s otherwise; a map that can be negative divides by sign(d)·max(|d|, ε)
            feature_map="cosformer"  φ(qₜ)·φ(kₛ) = relu(qₜ)·relu(kₛ) cos(π/2·(t - s)/length) (arXiv:2202.08791)
            feature_map="hedgehog"   φ(x) = (softmax(Wx), softmax(-Wx)), W of q and W of k learned (arXiv:2402.04347)
            feature_map="taylor"     φ(q)·φ(k) = 1 + x + x²/2, x = q·k/√features, as in Based (arXiv:2402.18668)
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·(V + 1), with 2K in place of K
            for cosformer and hedgehog, and (f + 1)(f + 2)/2 for taylor with f = features
Departures  rotary positions turn q and k before φ, so the denominator stays positive. cosformer: the authors' length is
            that of the longer sequence, so earlier outputs change when T grows; here it is an option, and longer
            sequences are refused (a state on a GPU, or in a compiled program, is not looked at). There is no
            cross-attention, since positions of x and of a context are not on one axis, and no rotary. hedgehog: the
            paper's e^±Wx, normalised along the features as its authors do, without their floor of 1e-12; W is the
            identity at first. taylor: xᵢxⱼ and xⱼxᵢ are one feature; Based's window and convolution are not here
Verified    tests/mechanisms/test_linear.py: closed forms of the lecture notes, the recurrence of the paper's eq. 16-20.
            With copied weights in float64, 1e-15: cosFormer's release (8e12da1, with its angles in float64) and the
            map of Hedgehog's authors in LoLCATs (375df84), both causal and bidirectional; for taylor Based's release
            (32c1bd4) and fla-core 0.6.0, causal
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.checks import check_eps, refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.kernelised import Features, Kernelised, Memory
from subquad.mechanisms.linear_maps import OWN, Given
from subquad.ops.feature_maps import FUSED, feature_map
from subquad.ops.linear import LinearState, linear_attention_read, linear_attention_sums
from subquad.ops.linear.deferred import GROUP, Queue, can_defer, linear_attention_step_in_place, make_queue, settle
from subquad.ops.linear.spec import Spec
from subquad.ops.rotary import Turns


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
    features: AtLeast1 | None = None  # for taylor: the width of q and k in each head; None is 16, as in Based
    length: AtLeast1 | None = None  # for cosformer, which needs it: the longest sequence; weights fall to 0 over it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)
        if self.features is not None:
            if self.feature_map != "taylor":
                refuse("features", self.features, 'None, unless feature_map="taylor"')
            if self.rotary and self.features % 2:
                refuse("features", self.features, "an even number with rotary=True, which turns pairs")
        if self.feature_map != "cosformer":
            if self.length is not None:
                refuse("length", self.length, 'None, unless feature_map="cosformer"')
        elif self.length is None:
            refuse("length", None, 'an integer of at least 1 with feature_map="cosformer": the longest sequence')
        elif self.rotary:
            refuse("rotary", True, 'False with feature_map="cosformer", whose weights know the position')

    @property
    def key_width(self) -> int:
        """The width of q and k in each head."""
        return (self.features or 16) if self.feature_map == "taylor" else self.dim // self.heads


class Linear(Kernelised):
    small = (
        {},
        {"feature_map": "relu"},
        {"feature_map": "cosformer", "length": 200},
        {"feature_map": "hedgehog"},
        {"feature_map": "taylor", "features": 3},
    )
    approximates = True
    options: Options

    def __init__(self, options: Options):
        super().__init__(options, width=options.key_width)
        kind = OWN.get(options.feature_map, Given) if isinstance(options.feature_map, str) else Given
        self.prepare = kind(options.feature_map, options.heads, options.key_width, options.length)
        self.map = feature_map(self.prepare.map, others=OWN)
        self.equivariant = not self.prepare.positions
        self.traits = self.traits._replace(cross=self.traits.cross and not self.prepare.positions)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        self.prepare.check(q.shape[1])
        return self._sum(self._prepared(q, k, v), lengths, key_lengths)

    def _features(self, x: Tensor, lengths: Tensor | None, state: Any) -> Features:
        self.prepare.check(x.shape[1], lengths, state.position)
        return self._prepared(*self._project(x, position=state.position), state.position)

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor | None = None) -> Features:
        return Features(self.prepare.queries(q, position), self.prepare.keys(k, position), v)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.prepare.products(q, k)
        if self.options.causal:
            scores = scores.tril()
        d, eps = scores.sum(-1, keepdim=True), self.options.eps
        d = torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps)) if self.map.signed else d + eps
        return (scores / d).to(q.dtype)  # [B, H, T, S]

    def _how(self) -> dict[str, Any]:
        return {"feature_map": self.prepare.map, "eps": self.options.eps, "impl": self.options.impl}

    def _init_state(self, batch: int, capacity: int | None) -> State:
        q = self._zeros(1, 1, self.options.heads, self.options.key_width)
        return State(*self._empty(batch, self.map.apply(self.prepare.queries(q)).shape[-1]))

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def defer(self, state: State) -> State | Deferred:
        if self.width > 256 or not can_defer(self._like, self.options.feature_map, self.options.impl):
            return state
        return Deferred(*state, make_queue(self._like, state.position, self.options.heads, self.width, self.width))

    def step(self, x: Tensor, state: Any, inplace: bool = False, turns: Turns | None = None) -> tuple[Tensor, Any]:
        if not isinstance(state, Deferred):
            return super().step(x, state, inplace, turns)
        return self._with(turns, self._step_deferred, x, state)

    def _step_deferred(self, x: Tensor, state: Deferred) -> tuple[Tensor, Deferred]:
        qkv = self.heads.qkv(x)
        width = self.heads.all_keys // self.heads.heads
        turns = self._turns_at(qkv[:, None], state.position, width) if self.options.rotary else None
        o, state = self._decode(qkv, state, turns)
        state.position.add_(1)
        return self.heads.out(o), state

    def _decodes(self, state: State | Deferred) -> bool:
        named = isinstance(self.options.feature_map, str) and self.options.feature_map in FUSED
        return named and type(self) is Linear

    def _decode(self, qkv: Tensor, state: Any, turns: Turns | None) -> tuple[Tensor, Any]:
        both, v = self.heads.cut(qkv)
        spec = Spec(True, str(self.options.feature_map), self.map.signed, eps=self.options.eps)
        queue = state.queue if isinstance(state, Deferred) else None
        how = (queue, state.position, spec, turns, self.options.impl)
        return linear_attention_step_in_place(both, v, state.s, state.z, *how).flatten(1), state

    def settle(self, state: State | Deferred, steps: int) -> None:
        if isinstance(state, Deferred):
            settle(state.s, state.z, state.queue, steps % GROUP, str(self.options.feature_map))

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        sums = linear_attention_sums(self.prepare.keys(k), v, feature_map=self.prepare.map, lengths=lengths)
        return self.memory_type(*sums, lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q, sums = self.prepare.queries(self.heads.queries(x)), LinearState(memory.s, memory.z)
        return self._merge(linear_attention_read(q, sums, feature_map=self.prepare.map, eps=self.options.eps))
