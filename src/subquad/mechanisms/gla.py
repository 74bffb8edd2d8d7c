"""Gated linear attention: each channel of a key has a decay of its own, which the token chooses.

Paper       Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training",
            arXiv:2312.06635, §4
Definition  Sₜ = Diag(αₜ)Sₜ₋₁ + kₜvₜᵀ,  oₜ = Sₜᵀqₜ/√K,  αₜ = sigmoid(xₜ W₁ W₂ + b)^(1/16) for each channel of k
            y = (norm(o) ⊙ swish(x W_g)) W_out, a norm for each head; W₁ has 16 columns
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·V
Departures  the norm is RMS, as in the authors' release; the paper writes LayerNorm. The output gate has no bias
Verified    tests/mechanisms/test_gla.py: the recurrence of the paper; the layer of flash-linear-attention 0.6.0 with
            its naive recurrence, which is float32: values and gradients within 2e-5
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.recurrent import Recurrent, Tokens, normalise
from subquad.ops.precision import wide


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    key_width: AtLeast1 | None = None  # of a head; None: half of dim/heads, rounded up
    rank: AtLeast1 = 16  # of the matrix that makes the decays
    temperature: AtLeast1 = 16  # the root that is taken of a sigmoid: the larger, the slower a channel forgets


class GLA(Recurrent):
    rule, convolves = "gated", False
    small = ({}, {"key_width": 3, "rank": 5, "temperature": 1})
    options: Options

    def __init__(self, options: Options):
        dim, values = options.dim, options.dim // options.heads
        keys = options.key_width or (values + 1) // 2
        super().__init__(options, keys, values, mixed=2 * options.heads * keys + dim, plain=dim + options.rank)
        self.decay = nn.Linear(options.rank, options.heads * keys)
        self.norm = nn.RMSNorm(values, eps=1e-5)

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        q, k, v = self._qkv_of(mixed)
        logit = wide(self.decay(plain[..., self.options.dim :])).view(k.shape)
        return Tokens(q * self.keys**-0.5, k, v, F.logsigmoid(logit) / self.options.temperature)

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        q, k, v = self._qkv_of(mixed)
        low = plain[..., self.options.dim :]  # x W₁
        alpha = torch.sigmoid(wide(self.decay(low))) ** (1 / self.options.temperature)
        return Tokens(q / self.keys**0.5, k, v, alpha.unflatten(-1, (self.options.heads, -1)))

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        return self.out(normalise(o, self.norm).flatten(-2) * F.silu(plain[..., : self.options.dim]))

    def _qkv_of(self, mixed: Tensor) -> tuple[Tensor, ...]:
        heads = self.options.heads
        parts = mixed.split((heads * self.keys, heads * self.keys, self.options.dim), dim=-1)
        return tuple(t.unflatten(-1, (heads, -1)) for t in parts)
