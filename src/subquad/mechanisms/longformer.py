"""Longformer: a sliding window, dilated on some heads, and a few global tokens that read and are read by all.

Paper       Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150, §3.1
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ over s = t + gₕ·m, |m| ≤ window, and the first `global_tokens` positions;
            gₕ is the dilation of head h. A global row t reads every s, with projections q', k', v' of its own, which
            start as copies of q, k, v; other rows reach global tokens with q, k, v, each key once.
            causal: s ≤ t, and global rows, which read nothing but their past anyway, are rows like the others
Cost        train O(T·(window + global_tokens)·D) time, O(T·D) memory; decode O((window·max gₕ + global_tokens)·D) a
            token; state 2·(window·max gₕ + 1 + global_tokens)·D: a ring, and the global tokens pinned
Departures  global tokens are the first ones, as the classification token is; the causal form has no q', k', v'
Verified    tests/mechanisms/test_longformer.py: a scalar loop over the definition, 1e-12; window ≥ T is full attention;
            all tokens global with copied projections is full attention; the transformers library's, 1e-6
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import QKV
from subquad.mechanisms.base import AtLeast0
from subquad.mechanisms.patterned import Patterned
from subquad.ops.lengths import symbolic
from subquad.ops.rotary import rotate
from subquad.ops.sparse import sparse_attention
from subquad.ops.sparse.api import alone
from subquad.ops.sparse.patterns import Dense, Dilated, Global, Local, Pattern
from subquad.ops.sparse.split import few_attention


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    window: AtLeast0 = 256  # keys on each side; when causal, before
    dilation: int | Sequence[int] = 1  # the gap between keys of the window, for all heads or one for each
    global_tokens: AtLeast0 = 1  # how many positions at the start are global; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dilation, Sequence):  # a list, as a configuration file has it
            object.__setattr__(self, "dilation", tuple(self.dilation))
        gaps = self.gaps
        if len(gaps) != self.heads or any(isinstance(g, bool) or not isinstance(g, int) or g < 1 for g in gaps):
            refuse("dilation", self.dilation, f"an integer of at least 1, or {self.heads} of them, one for each head")

    @property
    def gaps(self) -> tuple[int, ...]:
        return tuple(self.dilation) if isinstance(self.dilation, Sequence) else (self.dilation,) * self.heads


class Longformer(Patterned):
    exponent = 1.0
    small = (
        {"window": 4, "global_tokens": 2},
        {"window": 3, "dilation": (1, 1, 2, 4), "global_tokens": 1},
        {"window": 5, "global_tokens": 0},
    )
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.global_rows = options.global_tokens > 0 and not options.causal
        self.may_turn = not self.global_rows  # which turn queries and keys by themselves
        if self.global_rows:
            dim, local = options.dim, self.heads.qkv.state_dict()
            self.global_q, self.global_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
            self.global_q.load_state_dict({name: p[:dim] for name, p in local.items()})
            self.global_kv.load_state_dict({name: p[dim:] for name, p in local.items()})

    def _patterns(self) -> Sequence[Pattern]:
        window, tokens, causal = self.options.window, self.options.global_tokens, self.options.causal
        patterns: list[Pattern] = []
        for gap in self.options.gaps:
            sliding = Local(window, 0 if causal else window) if gap == 1 else Dilated(window, gap)
            patterns.append(sliding | Global(tokens) if tokens else sliding)
        return patterns

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        gap = torch.tensor(self.options.gaps, device=i.device)[:, None, None]  # [H, 1, 1]
        sliding = ((i - j) % gap == 0) & ((i - j).abs() <= gap * self.options.window)
        return sliding | (j < self.options.global_tokens)

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        o = self._attend(*self._project(x), lengths, lengths)
        if self.global_rows:
            q, k, v = self._project_global(x)
            if (cut := ranks.layout(x.shape[1])) is not None:
                rows, _ = few_attention(alone(self.scale, self.options.impl), q, k, v, lengths)
                own = rows[:, cut.offset : cut.offset + cut.size].to(o.dtype)
                return self.heads.merge(ranks.tie(torch.cat((own, o[:, own.shape[1] :]), 1), rows))
            rows = sparse_attention(q, k, v, Dense(), key_lengths=lengths, scale=self.scale, impl=self.options.impl)
            if symbolic(x.shape[1]):  # there may be fewer tokens than global ones
                here = torch.arange(x.shape[1], device=x.device)[:, None, None] < rows.shape[1]
                o = torch.where(here, F.pad(rows, (0, 0, 0, 0, 0, x.shape[1]))[:, : x.shape[1]], o)
            else:
                o = torch.cat((rows, o[:, rows.shape[1] :]), 1)
        return self.heads.merge(o)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        weights, v = self._define(x)
        o = torch.einsum("bhts,bshv->bthv", weights, v)
        if self.global_rows:
            rows, v = self._define_global(x)
            o = torch.cat((torch.einsum("bhts,bshv->bthv", rows, v), o[:, rows.shape[2] :]), 1)
        return self._merge(o)

    def _pattern(self, x: Tensor) -> Tensor:
        weights = super()._pattern(x)
        rows = self._define_global(x)[0] if self.global_rows else weights[:, :, :0]
        return torch.cat((rows, weights[:, :, rows.shape[2] :]), 2)

    def _define_global(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the global rows, [B, H, global_tokens, T], and v'."""
        q, k, v = self._project_global(x)
        return (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])).softmax(-1), v

    def _project_global(self, x: Tensor) -> QKV:
        """q' of the global tokens, k' and v' of all."""
        k, v = self.global_kv(x).unflatten(-1, (2, self.options.heads, -1)).unbind(2)  # [B, T, H, K]
        few = F.pad(x, (0, 0, 0, self.options.global_tokens + 1)) if symbolic(x.shape[1]) else x
        q = self.global_q(ranks.tokens_of(few, 0, self.options.global_tokens)).unflatten(-1, k.shape[2:])
        if self.options.rotary:  # the first tokens are the same on every rank
            q, k = rotate(q, torch.arange(q.shape[1], device=q.device)), self._rotate(k, k)[0]
        return q, k, v
