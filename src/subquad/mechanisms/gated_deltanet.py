"""Gated DeltaNet: the sum fades by a factor that the token chooses, then the token corrects it under its key.

Paper       Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464
Definition  S' = aₜSₜ₋₁,  Sₜ = S' + βₜkₜ(vₜ - S'ᵀkₜ)ᵀ,  oₜ = Sₜᵀqₜ/√K
            βₜ = sigmoid(xₜ W_β),  aₜ = exp(-exp(A)·softplus(xₜ W_a + b)) for each head
            q, k, v = silu(conv(x W)), a causal convolution over 4 tokens, then q and k divided by their norm
            y = (RMSNorm(o) ⊙ silu(x W_g)) W_out, a norm for each head;  K = D/H,  V = expand_v·K
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·V and the 3 last inputs
Departures  q is divided by √K, as in the authors' release; their models make keys 0.75·D wide in all, here D
Verified    tests/mechanisms/test_gated_deltanet.py: Qwen3NextGatedDeltaNet of transformers 5.23.0 with copied weights,
            values and gradients within 1e-5, its chunked and recurrent functions, and those of
            flash-linear-attention 0.6.0, within 5e-5; all compute in float32
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.mechanisms import deltanet
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.recurrent import EPS, Recurrent, Tokens, draw_decay, normalise, unit
from subquad.ops.precision import wide


@dataclass(frozen=True, kw_only=True)
class Options(deltanet.Options):
    expand_v: AtLeast1 = 2


class GatedDeltaNet(Recurrent):
    rule = "gated_delta"
    small = ({}, {"expand_v": 1, "negative": True})
    options: Options

    def __init__(self, options: Options):
        dim, heads, keys = options.dim, options.heads, options.dim // options.heads
        wide_dim = dim * options.expand_v
        super().__init__(options, keys, keys * options.expand_v, 2 * dim + wide_dim, 2 * heads + wide_dim)
        rate, bias = draw_decay(heads, least=1e-3)
        self.rate, self.bias = nn.Parameter(rate), nn.Parameter(bias)  # A and b
        self.norm = nn.RMSNorm(self.values, eps=1e-5)

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        q, k, v, beta, step, _ = self._parts_of(mixed, plain)
        log_gate = -wide(self.rate).exp() * F.softplus(wide(step) + self.bias)
        beta = wide(beta).sigmoid() * (2 if self.options.negative else 1)
        return Tokens(unit(q) * self.keys**-0.5, unit(k), v, log_gate, beta)

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        q, k, v, beta, step, _ = (wide(t) for t in self._parts_of(mixed, plain))
        q, k = (t / (t.square().sum(-1, keepdim=True) + EPS).sqrt() for t in (q, k))
        decay = torch.exp(-torch.exp(wide(self.rate)) * F.softplus(step + wide(self.bias)))
        beta = torch.sigmoid(beta)
        return Tokens(q / self.keys**0.5, k, v, decay, beta * 2 if self.options.negative else beta)

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        gate = self._parts_of(mixed, plain)[-1]
        return self.out((normalise(o, self.norm) * F.silu(gate)).flatten(-2))

    def _parts_of(self, mixed: Tensor, plain: Tensor) -> tuple[Tensor, ...]:
        """q, k [B, T, H, K], v, then logits of β and a [B, T, H], and the output's gate [B, T, H, V]."""
        dim, heads = self.options.dim, self.options.heads
        q, k, v = mixed.split((dim, dim, heads * self.values), dim=-1)
        beta, step, gate = plain.split((heads, heads, heads * self.values), dim=-1)
        q, k, v, gate = (t.unflatten(-1, (heads, -1)) for t in (q, k, v, gate))
        return q, k, v, beta, step, gate
