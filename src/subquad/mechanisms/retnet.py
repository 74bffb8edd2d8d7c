"""Retention: linear attention whose weights fade with distance, at a fixed rate for each head.

Paper       Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models",
            arXiv:2307.08621, §2
Definition  oₜ = Σₛ γᵗ⁻ˢ (qₜ·kₛ/√K) vₛ,  s ≤ t,  γ = 1 - 2⁻⁵⁻ʰ in head h = 0, 1, ..., that is Sₜ = γSₜ₋₁ + kₜvₜᵀ
            y = (GroupNorm(o) ⊙ swish(x W_g)) W_out, a group for each head;  K = D/H,  V = expand_v·K
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·V
Departures  the rotation of q and k by their positions, θ in the paper, is the option rotary, off by default as in every
            mechanism. The paper also divides scores by sums over their row, which the group norm undoes: left out
Verified    tests/mechanisms/test_retnet.py: numbers by hand; equations 5 and 6 of the paper; the naive retention of
            flash-linear-attention 0.6.0, which is float32, before the norm: values and gradients within 2e-5
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1, Mixer
from subquad.mechanisms.recurrent import Recurrent, Tokens
from subquad.ops.precision import wide, wide_type
from subquad.ops.rotary import turned, turns


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    expand_v: AtLeast1 = 2  # width of values over that of keys, which is dim/heads


class RetNet(Recurrent):
    rule, convolves = "gated", False
    unused = Mixer.unused | {"dropout"}
    options: Options

    def __init__(self, options: Options):
        dim, keys = options.dim, options.dim // options.heads
        wide_dim = dim * options.expand_v
        super().__init__(options, keys, keys * options.expand_v, mixed=2 * dim + wide_dim, plain=wide_dim)
        self.turn_width = keys if options.rotary else None
        self.norm = nn.GroupNorm(options.heads, wide_dim)

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        q, k, v = self._qkv_of(mixed)
        if self.options.rotary:
            at = ranks.positions(q.shape[1], q.device)
            at = at if position is None else position[:, None] + at
            by = self._turns or turns(at, self.keys, wide_type(q))
            q, k = turned(q, by), turned(k, by)
        head = torch.arange(self.options.heads, device=q.device, dtype=wide_type(q))
        log_gate = torch.log1p(-torch.exp2(-5 - head)).expand(q.shape[:3])
        return Tokens(q * self.keys**-0.5, k, v, log_gate)

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        q, k, v = self._qkv_of(mixed)
        if self.options.rotary:  # a rotation is a product with exp(iθt)
            half, t = self.keys // 2, torch.arange(q.shape[1], device=q.device)[:, None, None]
            angle = t / 10000 ** (torch.arange(half, device=q.device, dtype=wide_type(q)) / half)
            turn = torch.polar(torch.ones_like(angle), angle)
            q, k = (turn * torch.complex(*wide(x).chunk(2, dim=-1)) for x in (q, k))
            q, k = (torch.cat((x.real, x.imag), dim=-1).to(mixed.dtype) for x in (q, k))
        decay = 1 - 2.0 ** (-5 - torch.arange(self.options.heads, dtype=wide_type(q), device=q.device))
        return Tokens(q / self.keys**0.5, k, v, decay.expand(q.shape[:3]))

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        weight, bias = self.norm.weight.to(o.dtype), self.norm.bias.to(o.dtype)
        o = F.group_norm(o.flatten(0, 1).flatten(1), self.options.heads, weight, bias, self.norm.eps)
        return self.out(o.view_as(plain).to(self.out.weight.dtype) * F.silu(plain))

    def _qkv_of(self, mixed: Tensor) -> tuple[Tensor, ...]:
        dim, heads = self.options.dim, self.options.heads
        parts = mixed.split((dim, dim, heads * self.values), dim=-1)
        return tuple(t.unflatten(-1, (heads, -1)) for t in parts)
