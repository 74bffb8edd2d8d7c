"""gMLP: half of the channels gate the other half after one learned matrix over positions.

Paper       Liu et al. 2021, "Pay Attention to MLPs", arXiv:2105.08050, §2 and §4.3 (tiny attention)
Definition  [u, v] = GELU(x U),  Y = (u ⊙ g) V,  g = W LN(v) + b (+ softmax(q kᵀ/√a) v' P with attention=a > 0)
            with W [max_length, max_length], lower triangular when causal; a row of n tokens uses W[:n, :n] and b[:n]
Cost        train O(T²·D·expansion) time, O(T·D·expansion) memory; its own parameters are T x T; no decoding
Departures  the norm before it belongs to the block; no official code is public, so its width is an option
Verified    tests/mechanisms/test_gmlp.py: near-identity start g ≈ 1, triangular weights against a masked loop, 1e-12
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast0, AtLeast1, Mixer, Traits
from subquad.ops.layer_norm import LayerNorm
from subquad.ops.lengths import first, visible_keys, zero_padding
from subquad.ops.triangular import triangular_product


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    expansion: AtLeast1 = 4  # width of [u, v] over dim
    attention: AtLeast0 = 0  # width of the tiny attention; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expansion * self.dim % 2:
            refuse("expansion", self.expansion, f"one that makes expansion·dim even, with dim={self.dim}")


class GMLP(Mixer):
    traits = Traits(causal=True, bidirectional=True, fixed_length=True)
    family, exponent, memory = "attention-free", 2.0, 2.0
    unused = frozenset({"heads", "dropout", "rotary"})
    small = ({"expansion": 2}, {"expansion": 2, "attention": 8})
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        length, half = options.max_length or 0, options.expansion * options.dim // 2
        self.into = nn.Linear(options.dim, 2 * half)
        self.norm = LayerNorm(half)
        self.weight = nn.Parameter(torch.empty(length, length).uniform_(-1, 1) * 1e-3 / length)
        self.bias = nn.Parameter(torch.ones(length))  # with W near zero the gate starts at one
        self.out = nn.Linear(half, options.dim)
        self.qkv = nn.Linear(options.dim, 3 * options.attention) if options.attention else None
        self.spread = nn.Linear(options.attention, half) if options.attention else None

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        u, v = F.gelu(self.into(x)).chunk(2, dim=-1)
        v = zero_padding(self.norm(v), lengths)
        weight = self._square(x.shape[1])
        gate = triangular_product(weight, v) if self.options.causal else torch.einsum("ts,bsd->btd", weight, v)
        gate = gate + first(self.bias, x.shape[1], 0)[:, None]
        if self.qkv is not None and self.spread is not None:
            q, k, w = (t[:, None] for t in self.qkv(x).chunk(3, dim=-1))  # [B, 1, T, a]
            visible = None if self.options.causal else visible_keys(lengths, x.shape[1])
            o = F.scaled_dot_product_attention(q, k, w, visible, is_causal=self.options.causal)
            gate = gate + self.spread(o[:, 0])
        return self.out(u * gate)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        u, v = F.gelu(self.into(x)).chunk(2, dim=-1)
        v, gates = self.norm(v), []
        for t in range(x.shape[1]):
            seen = t + 1 if self.options.causal else x.shape[1]
            gate = self.weight[t, :seen] @ v[:, :seen] + self.bias[t]  # [B, D']
            if self.qkv is not None and self.spread is not None:
                q, k, w = self.qkv(x).chunk(3, dim=-1)
                scores = torch.einsum("bsa,ba->bs", k[:, :seen], q[:, t]) / math.sqrt(self.options.attention)
                gate = gate + self.spread(torch.einsum("bs,bsa->ba", scores.softmax(-1), w[:, :seen]))
            gates.append(gate)
        return self.out(u * torch.stack(gates, 1))

    def _pattern(self, x: Tensor) -> Tensor:
        """The matrix over positions, the same for every input and channel."""
        weight = self._square(x.shape[1])
        return (weight.tril() if self.options.causal else weight).expand(x.shape[0], 1, -1, -1)

    def _square(self, size: int) -> Tensor:
        return first(first(self.weight, size, 0), size)
