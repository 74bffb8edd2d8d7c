"""Mamba-2: a state space model with one decay for each head and token, which is linear attention that forgets.

Paper       Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, §5 to §7
Definition  hₜ = aₜhₜ₋₁ + Bₜ(Δₜxₜ)ᵀ,  oₜ = hₜᵀCₜ + d xₜ,  aₜ = exp(-exp(A)Δₜ),  Δₜ = softplus(u W_Δ + b) for each head
            x, B, C = silu(conv(u W)), a causal convolution over 4 tokens;  C, B: query, key of all heads of a group
            y = RMSNorm(o ⊙ silu(u W_z)) W_out, a norm for each group;  K = state, V = expansion·D/H
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·V and the 3 last inputs
Departures  none from the authors' release, whose Δ has no bounds by default either
Verified    tests/mechanisms/test_mamba2.py: Mamba2Mixer of transformers 5.23.0 with copied weights, whose decays and
            norm are float32: values and gradients within 2e-6
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.recurrent import Recurrent, Tokens, draw_decay
from subquad.ops.precision import wide


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    expansion: AtLeast1 = 2  # width inside over dim
    state: AtLeast1 = 64  # width of B and C, the keys and queries
    groups: AtLeast1 = 1  # of heads that share their B and C

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.groups:
            refuse("groups", self.groups, f"a divisor of heads={self.heads}")


class Mamba2(Recurrent):
    rule = "gated"
    small = ({"state": 6}, {"state": 6, "groups": 2, "expansion": 1})
    options: Options

    def __init__(self, options: Options):
        inner, shared = options.dim * options.expansion, 2 * options.groups * options.state
        super().__init__(options, options.state, inner // options.heads, inner + shared, options.heads + inner, True)
        rate, bias = draw_decay(options.heads, least=1)
        self.rate, self.bias = nn.Parameter(rate), nn.Parameter(bias)  # A and b
        self.skip = nn.Parameter(torch.ones(options.heads))  # d
        self.norm = nn.Parameter(torch.ones(inner))

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        x, k, q = self._xbc_of(mixed)
        step = F.softplus(wide(plain[..., : self.options.heads]) + self.bias)  # Δ [B, T, H]
        return Tokens(q, k, (x * step[..., None]).to(x.dtype), -step * wide(self.rate).exp())

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        x, k, q = self._xbc_of(mixed)
        step = F.softplus(wide(plain[..., : self.options.heads]) + wide(self.bias))
        decay = torch.exp(-torch.exp(wide(self.rate)) * step)
        return Tokens(q, k, (x * step[..., None]).to(x.dtype), decay)

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        x = self._xbc_of(mixed)[0]
        y = (o + self.skip[:, None] * x).flatten(-2)
        y = wide(y) * F.silu(wide(plain[..., self.options.heads :]))
        y = y.unflatten(-1, (self.options.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=1e-5).flatten(-2) * self.norm
        return self.out(y.to(self.out.weight.dtype))

    def _projections(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        own, shared = self.options.heads * self.values, self.options.groups * self.keys
        v, k, q = self.into.weight[: self.parts[0]].split((own, shared, shared))
        return {"q": (q, None), "k": (k, None), "v": (v, None), "o": (self.out.weight, None)}

    def _xbc_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H, V], and B and C of each head's group, [B, T, H, K]."""
        heads, groups = self.options.heads, self.options.groups
        x, b, c = mixed.split((heads * self.values, groups * self.keys, groups * self.keys), dim=-1)
        k, q = (t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2) for t in (b, c))
        return x.unflatten(-1, (heads, -1)), k, q
