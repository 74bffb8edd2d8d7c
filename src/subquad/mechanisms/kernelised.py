"""What linear, performer, rfa and efficient share: weights are products of features, so sums replace all keys.

`subquad.ops.linear` computes these sums. A mechanism computes its features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import KernelOptions, Traits, own_type
from subquad.ops.impl import choose
from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.precision import autocasts, wide_type


class Memory(NamedTuple):
    s: Tensor  # [B, H, M, V], sums over the context, at least float32
    z: Tensor  # [B, H, M]
    lengths: Tensor  # [B]


class Features(NamedTuple):
    q: Tensor  # [B, T, H, M], or the input of the op's feature map
    k: Tensor  # [B, S, H, M]
    v: Tensor  # [B, S, H, V]
    gate: Tensor | None = None  # the log gate of a causal sum, [B, S, H]
    more: tuple[Tensor, ...] = ()  # the fields of the state after these tokens, besides sums and position


class Kernelised(Attention):
    """Attention that is linear in the features of queries and keys."""

    options: KernelOptions
    state_type: type[Any]
    memory_type: type[Any] = Memory
    traits = Traits(causal=True, bidirectional=True, cross=True, state="constant")
    family, exponent = "kernels", 1.0
    equivariant = True
    splits = True
    unused = Attention.unused | {"dropout"}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.memory_type is Memory:
            own_type(cls, "memory_type", Memory)

    # What a mechanism writes

    def _how(self) -> dict[str, Any]:
        """feature_map, eps and impl, as `ops.linear` takes them."""
        raise NotImplementedError

    def _features(self, x: Tensor, lengths: Tensor | None, state: Any) -> Features:
        """The features that `ops.linear` sums when x continues a state."""
        return Features(*self._project(x, position=state.position))

    # What follows

    def _sum(self, features: Features, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        """A sequence from its start, or cross-attention: [B, T, H, V]."""
        own, other = (lengths, None) if key_lengths is lengths else (None, key_lengths)
        how = {"lengths": own, "key_lengths": other, "log_gate": features.gate, **self._how()}
        return linear_attention(*features[:3], causal=self.options.causal, **how)

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        state = self._init_state(x.shape[0], None) if state is None else state
        q, k, v, gate, more = self._features(x, lengths, state)
        how = {"lengths": lengths, "log_gate": gate, "initial_state": LinearState(state.s, state.z), **self._how()}
        o, sums = linear_attention(q, k, v, return_state=True, **how)
        return self._merge(o), self.state_type(*sums, *more, self._advance(state.position, x, lengths))

    def _step(self, x: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        features = self._features(x[:, None], None, state)
        q, k, v = features.q.squeeze(1), features.k.squeeze(1), features.v.squeeze(1)  # [B, H, ·]
        gate = None if features.gate is None else features.gate.squeeze(1)
        how = {"log_gate": gate, "inplace": inplace, **self._how()}
        o, sums = linear_attention_step(q, k, v, LinearState(state.s, state.z), **how)
        position = state.position.add_(1) if inplace else state.position + 1
        return self._merge(o), self.state_type(*sums, *features.more, position)

    def _continues_on_kernels(self, x: Tensor, state: Any) -> bool:
        """Whether kernels without gradients may continue a state in place of `_prefill` and `_step` above."""
        whole = all(t.is_contiguous() for t in state)
        return not torch.is_grad_enabled() and whole and choose(self.options.impl, "linear_attention", x) == "triton"

    def _merge(self, o: Tensor) -> Tensor:
        return self.heads.merge(o if autocasts(o.device) else o.to(self.heads.out.weight.dtype))

    def _empty(self, batch: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sums s [B, H, M, V] and z [B, H, M] without any key, and position 0."""
        z = self._zeros(batch, self.options.heads, features, dtype=wide_type(self._like))
        s = z.new_zeros(*z.shape, self.width)
        return s, z, self._zeros(batch, dtype=torch.int64)
