"""Synthesizer: attention weights that come from one token alone, or from no token, instead of from pairs.

Paper       Tay et al. 2020, "Synthesizer: Rethinking Self-Attention in Transformer Models", arXiv:2005.00743, §3
Definition  oₜ = Σₛ softmaxₛ(Aₜₛ) vₛ per head, s ≤ t when causal, with the logits A of
            dense              Aₜ = W₂ relu(W₁ xₜ), of length max_length
            random, fixed      A = R, learned, or drawn once and kept
            factorised_dense   Aₜₛ = a(xₜ)[s div b] · b(xₜ)[s mod b], with a·b ≥ max_length
            factorised_random  A = R₁R₂ᵀ of rank `rank`
            dot                Aₜₛ = qₜ·kₛ/√K, so that "dense+dot" is a mixture: A = Σ αᵢ Aᵢ with learned α, Σ αᵢ = 1
Cost        train O(T²·D) time, O(T²·H) memory: the paper's own parameters are T x T (random) or max_length wide
            (dense); no decoding
Departures  rows shorter than max_length take the first columns; dense, dot and factorised_random logits are products of
            a query side and a key side, so those kinds run as ordinary attention over learned keys
Verified    tests/mechanisms/test_synthesizer.py: random with R = QKᵀ/√K is dot-product attention, 1e-12
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.ops.dense import hide_future
from subquad.ops.lengths import first, visible_keys

KINDS = ("dense", "random", "fixed", "factorised_dense", "factorised_random", "dot")


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    kind: str = "dense"  # or several, joined by "+": a mixture
    rank: AtLeast1 = 8  # of factorised_random

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.kinds
        if not set(kinds) <= set(KINDS) or len(set(kinds)) < len(kinds):
            refuse("kind", self.kind, f"different ones of {', '.join(KINDS)}, joined by +")

    @property
    def kinds(self) -> list[str]:
        return str(self.kind).split("+")


class Synthesizer(Attention):
    traits = Traits(causal=True, bidirectional=True, fixed_length=True)
    family, exponent, memory = "new frameworks", 2.0, 2.0
    unused = frozenset({"rotary"})
    small = ({"kind": "dense"}, {"kind": "random+factorised_dense"}, {"kind": "fixed+factorised_random+dot", "rank": 3})
    options: Options
    fixed: Tensor

    def __init__(self, options: Options):
        super().__init__(options)
        heads, length, kinds = options.heads, options.max_length or 0, options.kinds
        self.mixture = nn.Parameter(torch.zeros(heads, len(kinds)))  # softmax of it is α
        if "dense" in kinds:
            self.w1 = nn.Linear(options.dim, options.dim)
            self.w2 = nn.Parameter(torch.randn(heads, length, self.width) / math.sqrt(self.width))
        if "random" in kinds:
            self.random = nn.Parameter(torch.randn(heads, length, length))
        if "fixed" in kinds:
            self.register_buffer("fixed", torch.empty(heads, length, length))
        if "factorised_dense" in kinds:
            self.columns = math.isqrt(max(length - 1, 0)) + 1  # b; a·b >= max_length
            self.a = nn.Linear(options.dim, heads * math.ceil(length / self.columns))
            self.b = nn.Linear(options.dim, heads * self.columns)
        if "factorised_random" in kinds:
            self.r1 = nn.Parameter(torch.randn(heads, length, options.rank) / options.rank**0.25)
            self.r2 = nn.Parameter(torch.randn(heads, length, options.rank) / options.rank**0.25)
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        if "fixed" in self.options.kinds:
            generator = generator or self._generator()
            self.fixed.copy_(torch.randn(self.fixed.shape, generator=generator, dtype=torch.float32))

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        q, k, v = self.heads.split(x)
        size, causal = x.shape[1], self.options.causal
        sides: list[tuple[Tensor, Tensor]] = []  # [B, H, T, ·] and [B, H, S, ·], whose products are logits
        bias: Tensor | None = None  # logits that are not a product, [B, H, T, S]
        for kind, share in zip(self.options.kinds, self.mixture.softmax(-1).T[..., None, None], strict=True):
            if kind in ("dense", "factorised_random", "dot"):
                left, right = self._sides(kind, x, q, k)
                sides.append((left * share, right))
            else:
                bias = share * self._bias(kind, x) + (0 if bias is None else bias)
        nothing = q.new_zeros(*q.transpose(1, 2).shape[:3], 1)
        left, right = (torch.cat(side, dim=-1) for side in zip(*(sides or [(nothing, nothing)]), strict=True))
        visible = None if causal else visible_keys(lengths, size)
        mask = visible if bias is None or visible is None else bias.masked_fill(~visible, -math.inf)
        if bias is not None and visible is None:
            mask = hide_future(bias) if causal else bias
        how: dict[str, Any] = {"dropout_p": self._dropout(), "is_causal": causal and bias is None, "scale": 1.0}
        return self._merge(F.scaled_dot_product_attention(left, right, v.transpose(1, 2), mask, **how).transpose(1, 2))

    def _sides(self, kind: str, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        size = x.shape[1]
        if kind == "dense":
            left = F.relu(self.w1(x)).unflatten(-1, (self.options.heads, -1)).transpose(1, 2)
            right = first(self.w2, size).expand(x.shape[0], -1, -1, -1)
        elif kind == "dot":
            left, right = q.transpose(1, 2) / math.sqrt(q.shape[-1]), k.transpose(1, 2)
        else:
            left, right = (first(r, size).expand(x.shape[0], -1, -1, -1) for r in (self.r1, self.r2))
        return left, right

    def _bias(self, kind: str, x: Tensor) -> Tensor:
        size = x.shape[1]
        if kind == "factorised_dense":
            a, b = (f(x).unflatten(-1, (self.options.heads, -1)).transpose(1, 2) for f in (self.a, self.b))
            return first((a[..., None] * b[..., None, :]).flatten(-2), size, -1)  # [B, H, T, S]
        square = self.random if kind == "random" else self.fixed
        return first(first(square, size), size, 2)[None]

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Every kind's logits in full, mixed, masked, normalised."""
        (batch, size), heads = x.shape[:2], self.options.heads
        s, (q, k, v) = torch.arange(size, device=x.device), self.heads.split(x)
        logits = x.new_zeros(batch, heads, size, size)
        for number, kind in enumerate(self.options.kinds):
            share = self.mixture.exp()[:, number] / self.mixture.exp().sum(-1)
            if kind == "dense":
                hidden = F.relu(self.w1(x)).view(batch, size, heads, -1)
                part = torch.einsum("bthk,hsk->bhts", hidden, self.w2[:, :size])
            elif kind == "dot":
                part = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
            elif kind == "factorised_dense":
                a, b = self.a(x).view(batch, size, heads, -1), self.b(x).view(batch, size, heads, -1)
                part = (a[..., s // self.columns] * b[..., s % self.columns]).movedim(1, 2)
            elif kind == "factorised_random":
                part = (self.r1[:, :size] @ self.r2[:, :size].mT)[None]
            else:
                part = (self.random if kind == "random" else self.fixed)[None, :, :size, :size]
            logits = logits + share[:, None, None] * part
        return (hide_future(logits) if self.options.causal else logits).softmax(-1), v
