"""What linear, performer, rfa and efficient share: weights are products of features, so sums stand for all keys.

Computing these sums is in `subquad.ops.linear`. A mechanism writes what its features are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import Traits
from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.precision import wide_type


class Memory(NamedTuple):
    s: Tensor  # [B, H, M, V], sums over the context, at least float32
    z: Tensor  # [B, H, M]
    lengths: Tensor  # [B]


class Kernelised(Attention):
    """Attention that is linear in the features of queries and keys."""

    memory_type: type[Any] = Memory
    traits = Traits(causal=True, bidirectional=True, cross=True, state="constant")
    family = "kernels"
    exponent = 1.0
    equivariant = True
    unused = Attention.unused | {"dropout"}

    def _how(self) -> dict[str, Any]:
        """feature_map, eps and impl, as `ops.linear` takes them."""
        raise NotImplementedError

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None,
        key_lengths: Tensor | None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """A sequence from its start, or cross-attention: [B, T, H, V]."""
        own, other = (lengths, None) if key_lengths is lengths else (None, key_lengths)
        causal = self.options.causal
        return linear_attention(q, k, v, causal=causal, lengths=own, key_lengths=other, log_gate=gate, **self._how())

    def _add(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, lengths: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, LinearState]:
        """A prompt behind the sums of a state: [B, T, H, V], and the sums behind it."""
        before = LinearState(state.s, state.z)
        return linear_attention(
            q, k, v, lengths=lengths, log_gate=gate, initial_state=before, return_state=True, **self._how()
        )

    def _add_one(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, gate: Tensor | None = None, inplace: bool = False
    ) -> tuple[Tensor, LinearState]:
        """A token [B, 1, H, ·] behind the sums of a state: [B, H, V], and the sums behind it."""
        q, k, v, gate = q[:, 0], k[:, 0], v[:, 0], None if gate is None else gate[:, 0]
        return linear_attention_step(
            q, k, v, LinearState(state.s, state.z), log_gate=gate, inplace=inplace, **self._how()
        )

    def _empty(self, batch: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums s [B, H, M, V] and z [B, H, M] of no keys, and the position 0."""
        heads, wide = self.options.heads, wide_type(self._like)
        s = self._zeros(batch, heads, features, self.options.dim // heads, dtype=wide)
        return s, self._zeros(batch, heads, features, dtype=wide), self._zeros(batch, dtype=torch.int64)
