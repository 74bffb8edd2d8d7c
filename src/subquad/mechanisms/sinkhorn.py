"""Sinkhorn attention: learn which block of keys each block of queries should see, as a relaxed permutation of blocks.

Paper       Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, §3
Definition  q̄, k̄ are means over blocks. R = balance((q̄ k̄ᵀ/√K + Gumbel noise in training) / temperature): exp, then
            `iterations` times columns and rows divided by their sums, so that R nears a permutation. Block n of the
            queries attends to its own keys and to the sorted ones Σₘ Rₙₘ Kₘ, with values Σₘ Rₙₘ Vₘ, in one softmax.
            sortcut=c: every query attends to the first c sorted blocks and to nothing else
            Causal: row n of R is a softmax over m < n, with q̄ₙ the mean of the queries up to block n's first; block 0
            sees only itself. The own block is read causally
Cost        train O(T·block·D + T²/block·D) time, O(T·(D + block·H) + (T/block)²·H) memory; the quadratic term mixes
            the T/block blocks into sorted ones; with sortcut O(T·sortcut·block·D + (T/block)²·D) time; no decoding
Departures  R from q̄·k̄, as in the sinkhorn_transformer package, where the paper has a network with an output per block,
            so that T is free. Causal rows are not balanced against each other, because column sums would see the
            future. The last block may be short: a sorted slot counts in the softmax by the part of R that falls on real
            tokens. R ignores rotary
Verified    tests/mechanisms/test_sinkhorn.py: R = I is block-local attention, R = a shift is attention to the own and
            the next block, 1e-9. sinkhorn_transformer 0.11.4: its balancing, its R before its ReLU and its attention
            given our R and v = k (it sorts keys in place of values), 1e-7 in float32; its causal form not compared.
            Kernels, for whole blocks without lengths: tests/ops/test_ordered.py, test_clusters_triton.py
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import refuse
from subquad.gradients import once_differentiable
from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.ops import ordered
from subquad.ops.impl import choose, exporting, traced, transformed
from subquad.ops.lengths import first, padding
from subquad.ops.precision import uncast, wide_type

ABSENT = 1e-20  # a sorted slot with less than this of real tokens is empty


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    block: AtLeast1 = 64  # tokens that are sorted together
    iterations: AtLeast1 = 8  # of normalising rows and columns
    temperature: float = 0.75  # of the sorting matrix; lower is closer to a permutation
    sortcut: AtLeast1 | None = None  # attend only to this many sorted blocks

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            refuse("temperature", self.temperature, "a positive number")
        if self.sortcut is not None and self.causal:
            refuse("sortcut", self.sortcut, "None with causal=True, because the first sorted blocks hold any position")


class Sinkhorn(Attention):
    traits = Traits(causal=True, bidirectional=True)
    family, exponent = "learnable patterns", 2.0
    small = ({"block": 6}, {"block": 8, "sortcut": 2}, {"block": 5, "iterations": 3, "temperature": 0.2})
    approximates = True
    options: Options

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        (batch, size, _), block = x.shape, self.options.block
        q, k, v = self.heads.split(x)
        # reasons are looked for on a GPU only: one of them depends on the length, for which a graph is compiled then
        plain = self.options.impl == "auto" and not q.is_cuda
        if not plain and choose(self.options.impl, "ordered_attention", q, self._unsupported(q, lengths)) == "triton":
            return self.heads.merge(self._by_kernels(q, k, v))
        n = torch.full((batch,), size, device=x.device) if lengths is None else lengths.clamp(min=1)
        present = torch.arange(size + padding(size, block), device=x.device) < n[:, None]
        if lengths is not None:
            q, k, v = (t.masked_fill(~first(present, size)[..., None, None], 0) for t in (q, k, v))
        with uncast(x):
            sort = self._sort(q, k, n)  # [B, H, N, N], at least float32
            present = present.unflatten(1, (-1, block))  # [B, N, C]
            share = torch.einsum("bhnm,bmc->bnhc", sort, present.to(sort.dtype))  # of real tokens in each sorted slot
        q, k, v = (self._blocks(t) for t in (*self._rotate(q, k), v))  # [B, N, C, H, K]
        sorted_k, sorted_v = (torch.einsum("bhnm,bmchk->bnchk", sort.to(t.dtype), t) for t in (k, v))
        bias = share.masked_fill(share < ABSENT, 1).log().masked_fill(share < ABSENT, -math.inf).to(q.dtype)
        if self.options.sortcut is not None:
            bias = bias.movedim(2, 1).flatten(2)[:, :, None]  # [B, H, 1, S]
            o = self._attend_biased(q.flatten(1, 2), sorted_k.flatten(1, 2), sorted_v.flatten(1, 2), bias)
            return self.heads.merge(first(o, size))
        present[..., 0] = True  # also in blocks beyond the row, because a softmax over no keys is NaN
        visible = present[:, :, None, None]  # [B, N, 1, 1, C]
        if self.options.causal:
            visible = visible & torch.ones(block, block, dtype=torch.bool, device=x.device).tril()  # [B, N, 1, C, C]
        own = torch.zeros(visible.shape, dtype=q.dtype, device=x.device).masked_fill(~visible, -math.inf)
        shape = (*bias.shape[:3], visible.shape[3], block)
        bias = torch.cat((own.expand(shape), bias[..., None, :].expand(shape)), -1)  # [B, N, H, 1 or C, 2C]
        k, v = torch.cat((k, sorted_k), dim=2), torch.cat((v, sorted_v), dim=2)
        o = self._attend_biased(*(t.flatten(0, 1) for t in (q, k, v, bias)))  # [B·N, C, H, V]
        return self.heads.merge(first(o.reshape(batch, -1, *o.shape[2:]), size))

    def _unsupported(self, q: Tensor, lengths: Tensor | None) -> str | None:
        if self._dropout():
            return "it has no dropout"
        if self.options.sortcut is not None:
            return "it has no sortcut"
        reason = ordered.unsupported(q)
        if reason is None and (lengths is not None or q.shape[1] % self.options.block):
            reason = f"it computes whole blocks of {self.options.block}, got {q.shape[1]} tokens" + (
                "" if lengths is None else " with lengths"
            )
        return reason

    def _by_kernels(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Whole blocks: their own keys are the second half of all keys, the sorted ones the first."""
        batch, size, heads, _ = q.shape
        with uncast(q):
            sort = self._sort(q, k, torch.full((batch,), size, device=q.device)).to(v.dtype)
        blocks, causal = size // self.options.block, self.options.causal
        q, k = self._rotate(q, k)
        q = q.contiguous()  # a view would keep the projections of k and v until backward
        k, v = (beside_sorted(sort, t) for t in (k, v))
        order = ordered.by_blocks((batch, heads), blocks, self.options.block, not causal, q.device)
        rule = ordered.Rule(causal=causal, scale=q.shape[-1] ** -0.5)
        return ordered.ordered_attention(q, k, v, order, rule, impl=self.options.impl)

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads.split(x)  # not rotated: R ignores positions
        return torch.stack([self._weights_of_row(*row) for row in zip(q, k, strict=True)]), v

    def _blocks(self, t: Tensor) -> Tensor:
        """[B, T, H, K] -> [B, N, C, H, K], the last block completed with zeros."""
        return F.pad(t, (0, 0, 0, 0, 0, padding(t.shape[1], self.options.block))).unflatten(1, (-1, self.options.block))

    def _attend_biased(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, K]
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=self._dropout()).transpose(1, 2)

    def _sort(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        """R of rows with n [B] tokens, zero beyond them: [B, H, N, N], or its first rows for sortcut."""
        block, size, exact = self.options.block, q.shape[1], wide_type(q)
        starts = torch.arange(0, size + padding(size, block), block, device=q.device)
        sizes = (n[:, None] - starts).clamp(1, block)[..., None, None]  # [B, N, 1, 1]
        sum_q, sum_k = (self._blocks(t).sum(2, dtype=exact) for t in (q, k))
        mean_k = sum_k / sizes
        if self.options.causal:  # up to the first query of the block
            before = F.pad(sum_q[:, :-1], (0, 0, 0, 0, 1, 0)).cumsum(1)
            mean_q = (before + q[:, starts.clamp(max=size - 1)]) / (starts + 1)[:, None, None]
        else:
            mean_q = sum_q / sizes
        logits = torch.einsum("bnhk,bmhk->bhnm", mean_q, mean_k) / math.sqrt(q.shape[-1])
        if self.training:
            logits = logits - torch.empty_like(logits).exponential_().clamp(min=ABSENT).log()  # Gumbel
        logits = logits / self.options.temperature
        if self.options.causal:
            later = torch.ones_like(logits[0, 0], dtype=torch.bool).triu()
            past = logits.masked_fill(later, -math.inf)[:, :, 1:, :-1].softmax(-1)  # row 0 has no past
            return F.pad(past, (0, 1, 1, 0))
        real = starts < n[:, None]  # [B, N]
        identity = torch.eye(starts.shape[0], dtype=torch.bool, device=q.device) & ~real[:, None]  # padding
        logits = logits.masked_fill(~(real[:, None] & real[..., None])[:, None], -math.inf)
        logits = logits.masked_fill(identity[:, None], 0)
        return balance(logits, self.options.iterations)[:, :, : self.options.sortcut]

    def _weights_of_row(self, q: Tensor, k: Tensor) -> Tensor:
        """The matrix that multiplies the values of one row, by the definition: q [n, H, K] -> [H, n, n]"""
        n, block, cut = len(q), self.options.block, self.options.sortcut
        blocks = [slice(i, min(i + block, n)) for i in range(0, n, block)]
        mean_q, mean_k = (torch.stack([t[s].mean(0) for s in blocks]) for t in (q, k))  # [N, H, K]
        if self.options.causal:
            mean_q = torch.stack([q[: s.start + 1].mean(0) for s in blocks])
        scale = math.sqrt(q.shape[-1])
        logits = torch.einsum("nhk,mhk->hnm", mean_q, mean_k) / scale / self.options.temperature
        if self.options.causal:
            past = [row[:, :i].softmax(-1) for i, row in enumerate(logits.unbind(1))]  # of row i, blocks before i
            sort = torch.stack([F.pad(row, (0, len(blocks) - i)) for i, row in enumerate(past)], dim=1)
        else:
            for _ in range(self.options.iterations):  # divisions of exp(logits), as logarithms: it may be all zeros
                for dim in (1, 2):
                    largest = logits.amax(dim, keepdim=True)
                    logits = logits - largest - (logits - largest).exp().sum(dim, keepdim=True).log()
            sort = logits.exp()
        moved = torch.zeros(len(sort), len(blocks), block, n, dtype=sort.dtype, device=sort.device)  # [H, N, C, n]
        for token in range(n):  # how much of the token is in its slot of each sorted block
            moved[:, :, token % block, token] = sort[:, :, token // block]
        q, k = (t[0] for t in self._rotate(q[None], k[None]))
        identity, rows = torch.eye(n, dtype=sort.dtype, device=sort.device), []
        for i, s in enumerate(blocks):
            own = identity[s].expand(len(sort), -1, -1)
            slots = moved[:, :cut].flatten(1, 2) if cut else torch.cat((own, moved[:, i]), 1)
            share = slots.sum(-1)[:, None]  # [H, 1, S]
            scores = torch.einsum("thk,nhk,hsn->hts", q[s], k, slots) / scale
            scores = scores.masked_fill(share < ABSENT, -math.inf)
            if self.options.causal:
                later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
                later[:, s.stop - s.start :] = False  # only the own block has a future
                scores = scores.masked_fill(later, -math.inf)
            weights = share * (scores - scores.amax(-1, keepdim=True)).exp()
            rows.append(weights / weights.sum(-1, keepdim=True) @ slots)
        return torch.cat(rows, dim=1)


def beside_sorted(sort: Tensor, t: Tensor) -> Tensor:
    """The sorted blocks, then the blocks: sort [B, H, N, N], t [B, T, H, K] of whole blocks -> [B, 2·T, H, K]."""
    if traced():
        return _beside_sorted_plain(sort, t)
    both: Tensor = _BesideSorted.apply(sort, t)
    return both


def _beside_sorted_plain(sort: Tensor, t: Tensor) -> Tensor:
    mixed = sort @ t.unflatten(1, (sort.shape[-1], -1)).permute(0, 3, 1, 2, 4).flatten(3)  # [B, H, N, C·K]
    return torch.cat((mixed.unflatten(-1, (-1, t.shape[-1])).permute(0, 2, 3, 1, 4).flatten(1, 2), t), dim=1)


class _BesideSorted(torch.autograd.Function):
    """The product reads its factor in the half where that has to be, and writes the other half. Only both are kept."""

    @staticmethod
    def forward(ctx: Any, sort: Tensor, t: Tensor) -> Tensor:
        (batch, size, heads, width), blocks = t.shape, sort.shape[-1]
        both = t.new_empty(batch * heads, 2, blocks, size // blocks * width)  # [B·H, 2, N, C·K]
        whole = both.view(batch, heads, 2 * size, width)
        whole[:, :, size:].copy_(t.transpose(1, 2))
        mixed, own = both.unbind(1)
        torch.bmm(sort.flatten(0, 1), own, out=mixed)
        ctx.save_for_backward(sort, both)
        return whole.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        sort, both = ctx.saved_tensors
        of_mixed, of_own = (t.transpose(1, 2) for t in grad.chunk(2, dim=1))  # [B, H, T, K]
        rows = of_mixed.reshape(both[:, 1].shape)
        of_sort = torch.bmm(rows, both[:, 1].mT).view(sort.shape)
        back = torch.bmm(sort.flatten(0, 1).mT, rows)
        del rows
        return of_sort, (of_own + back.view(of_own.shape)).transpose(1, 2)


def balance(logits: Tensor, iterations: int) -> Tensor:
    """Sinkhorn's iterations in log space: divide the columns, then the rows, of exp(logits) by their sums; repeat."""
    # an exported program would lose the backward of an autograd.Function; a compiled one keeps it
    if exporting() or transformed():
        return _balance_plain(logits, iterations)
    balanced: Tensor = _Balance.apply(logits, iterations)
    return balanced


def _balance_plain(logits: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


class _Balance(torch.autograd.Function):
    """Of an iteration it keeps the logarithms of its sums, not its two matrices, which backward computes again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        sums = [torch.zeros_like(logits[..., :1])]  # of rows, columns, rows, columns, ..., rows
        for _ in range(iterations):
            for dim in (-2, -1):
                sums.append(_logsumexp(logits - sums[-1], dim))
        ctx.save_for_backward(logits, *sums)
        return (logits - sums[-2]).sub_(sums[-1]).exp_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, *sums = ctx.saved_tensors
        # the logarithm of the result is logits - sums[-2] - sums[-1], and sums[n] is a function of logits - sums[n - 1]
        total = (logits - sums[-2]).sub_(sums[-1]).exp_().mul_(grad)
        of_sum, of_before = -total.sum(-1, keepdim=True), -total.sum(-2, keepdim=True)
        none = total.new_zeros(())
        for n in range(len(sums) - 1, 0, -1):
            part = (logits - sums[n - 1]).sub_(sums[n]).exp_().mul_(of_sum)
            total += part
            of_sum, of_before = of_before - part.sum(n % 2 - 2, keepdim=True), none
        return total, None


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The same as torch's, which would not overwrite x."""
    largest = x.amax(dim, keepdim=True)
    return x.sub_(largest).exp_().sum(dim, keepdim=True).log_().add_(largest)
