"""DeltaNet: a token does not add its value to the sum, it corrects what the sum holds under its key.

Paper       Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
            arXiv:2406.06484
Definition  Sₜ = Sₜ₋₁ + βₜkₜ(vₜ - Sₜ₋₁ᵀkₜ)ᵀ,  oₜ = Sₜᵀqₜ/√K,  βₜ = sigmoid(xₜ W_β) for each head
            q, k, v = silu(conv(x W)), a causal convolution over 4 tokens, then q and k divided by their norm
            y = RMSNorm(o) W_out, a norm for each head
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·V and the 3 last inputs
Departures  q is divided by √K, as in the authors' release
Verified    tests/mechanisms/test_deltanet.py: what is written under orthogonal keys is read back; the naive recurrence
            and chunks of flash-linear-attention 0.6.0 in its layer, float32: values and gradients within 2e-5
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.recurrent import EPS, Recurrent, Tokens, normalise, unit
from subquad.ops.precision import wide


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    expand_v: AtLeast1 = 1  # width of values over that of keys, which is dim/heads
    negative: bool = False  # β in (0, 2): a token may turn what it finds around, arXiv:2411.12537


class DeltaNet(Recurrent):
    rule = "delta"
    small = ({}, {"expand_v": 2, "negative": True})
    options: Options

    def __init__(self, options: Options):
        dim, keys = options.dim, options.dim // options.heads
        wide_dim = dim * options.expand_v
        super().__init__(options, keys, keys * options.expand_v, mixed=2 * dim + wide_dim, plain=options.heads)
        self.norm = nn.RMSNorm(self.values, eps=1e-5)

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        q, k, v = self._qkv_of(mixed)
        beta = wide(plain).sigmoid()  # [B, T, H]
        return Tokens(unit(q) * self.keys**-0.5, unit(k), v, None, 2 * beta if self.options.negative else beta)

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        q, k, v = (wide(t) for t in self._qkv_of(mixed))
        q, k = (t / (t.square().sum(-1, keepdim=True) + EPS).sqrt() for t in (q, k))
        beta = torch.sigmoid(wide(plain))
        return Tokens(q / self.keys**0.5, k, v, None, beta * 2 if self.options.negative else beta)

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        return self.out(normalise(o, self.norm).flatten(-2))

    def _qkv_of(self, mixed: Tensor) -> tuple[Tensor, ...]:
        dim, heads = self.options.dim, self.options.heads
        parts = mixed.split((dim, dim, heads * self.values), dim=-1)
        return tuple(t.unflatten(-1, (heads, -1)) for t in parts)
