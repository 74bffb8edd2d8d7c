"""Nyström attention: a few landmark queries and keys stand for all, and a small inverse corrects for their overlap.

Paper       Xiong et al. 2021, "Nyströmformer: A Nyström-based Algorithm for Approximating Self-Attention",
            arXiv:2102.03902, §3
Definition  O = softmax(Q K̃ᵀ) Z softmax(Q̃ Kᵀ) V + conv(V) per head, scores over √K. Q̃ and K̃ are means of `landmarks`
            segments, cut at ⌊n·i/landmarks⌋ of the row's own length n. Z ≈ A⁺ for A = softmax(Q̃ K̃ᵀ): six rounds of
            Z ← ¼ Z (13 − AZ (15 − AZ (7 − AZ))), from Aᵀ / (‖A‖₁ ‖A‖_∞). conv: one kernel a head, along positions.
            A row of at most `landmarks` queries or keys gets exact attention, as in the authors' code
Cost        train O(T·landmarks·D + landmarks³·H) time, O(T·(D + landmarks)) memory; no decoding
Departures  each matrix has its own norms in Z₀ (the authors' default takes the largest of the batch, which ties rows
            together); segments need not be equal; no convolution in cross-attention, where values have positions of
            their own; Z in at least float32; dropout on both long factors
Verified    tests/mechanisms/test_nystrom.py: landmarks ≥ T is full attention, 1e-12; Z becomes the pseudo-inverse;
            transformers 5.22.2 with the per-matrix norms, and nystrom-attention 0.0.14 with one row and head, both with
            copied weights and T divisible by the landmarks, 1e-12
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast0, AtLeast1, Traits
from subquad.ops.convolve import convolve
from subquad.ops.lengths import first, symbolic, visible_keys, zero_padding
from subquad.ops.precision import uncast, wide, wide_type
from subquad.ops.sparse import Dense, sparse_attention
from subquad.ops.sparse.api import alone
from subquad.ops.sparse.split import few_attention

PIECES = (16, 8, 4, 2, 1)  # cut the queries into the first of these numbers of pieces that divides their length


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    landmarks: AtLeast1 = 64  # segment means that stand for all queries and keys
    conv: AtLeast0 = 33  # width of the convolution over values, odd; 0: none
    iterations: AtLeast0 = 6  # of the inverse

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv and self.conv % 2 == 0:
            refuse("conv", self.conv, "0 or an odd width, which leaves the length as it is")


class Nystrom(Attention):
    traits = Traits(cross=True)
    family, exponent = "fewer queries or keys", 1.0
    joint_queries = True
    small = ({"landmarks": 6, "conv": 5}, {"landmarks": 16, "conv": 0})
    approximates = True
    splits = True
    options: Options
    _why_not_causal = "a landmark is a mean over a segment, so every query would read the future through it"

    def __init__(self, options: Options):
        super().__init__(options)
        width, heads = options.conv, options.heads
        self.conv: nn.Conv2d | None = None
        if width:
            self.conv = nn.Conv2d(heads, heads, (width, 1), padding=(width // 2, 0), groups=heads, bias=False)

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        q, k, v = self._project(x)
        o = self._attend(q, k, v, lengths, lengths)
        if self.conv is not None:
            half = 0 if ranks.active() is None else self.options.conv // 2
            around = zero_padding(v, lengths) if half == 0 else ranks.halo(zero_padding(v, lengths), half, half)
            mixed = convolve(around, self.conv.weight[:, 0, :, 0].to(v.dtype))
            o = o + mixed[:, half : half + v.shape[1]]
        return self._merge(o)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        weights, v = self._define(x, context)
        if self.conv is not None and context is None:
            weights = weights + self._convolution(x.shape[1])
        return self._merge(torch.einsum("bhts,bshv->bthv", weights, v))

    def _convolution(self, size: int) -> Tensor:
        """The convolution as a matrix over positions, [H, T, T]."""
        assert self.conv is not None
        kernel, half = self.conv.weight[:, 0, :, 0], self.options.conv // 2  # [H, conv]
        square = kernel.new_zeros(len(kernel), size, size)
        for i in range(size):
            for j in range(max(0, i - half), min(size, i + half + 1)):
                square[:, i, j] = kernel[:, j - i + half]
        return square

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        few, size, dtype = self.options.landmarks, q.shape[1], v.dtype
        with uncast(q):
            if dtype == torch.float16:  # a large inverse times values can exceed its range
                q, k, v = q.float(), k.float(), v.float()
            if (whole := ranks.whole_length(size)) > size and whole <= few:
                return sparse_attention(q, k, v, Dense(), lengths=lengths).to(dtype)
            if whole > size:
                return self._attend_long(q, k, v, lengths, key_lengths).to(dtype)
            if symbolic(size, k.shape[1]):  # pad the rows, because `_attend_long` is exact for short padded rows
                lengths, key_lengths = (
                    torch.full(t.shape[:1], t.shape[1], device=t.device) if n is None else n
                    for t, n in ((q, lengths), (k, key_lengths))
                )
                q, k, v = (F.pad(t, (0, 0, 0, 0, 0, few + 1)) for t in (q, k, v))
                return first(self._attend_long(q, k, v, lengths, key_lengths), size).to(dtype)
            if size <= few or k.shape[1] <= few:
                q, k, v, visible = *(t.transpose(1, 2) for t in (q, k, v)), visible_keys(key_lengths, k.shape[1])
                o = F.scaled_dot_product_attention(q, k, v, visible, dropout_p=self._dropout())
                return o.transpose(1, 2).to(dtype)
            return self._attend_long(q, k, v, lengths, key_lengths).to(dtype)

    def _attend_long(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, keys: Tensor | None) -> Tensor:
        """For tensors with more tokens than landmarks, padding included; `keys` [B] are the lengths of rows of keys."""
        few, visible, dropout = self.options.landmarks, visible_keys(keys, k.shape[1]), self._dropout()
        few_q, few_k = self._landmarks(q, lengths), self._landmarks(k, keys)
        cut, first_values = ranks.layout(k.shape[1]), ranks.tokens_of(v, 0, few).transpose(1, 2)
        start = 0 if cut is None else cut.offset
        if cut is not None:  # softmax(Q̃ Kᵀ) V over the keys of all ranks
            far, _ = few_attention(alone(None, "auto"), few_q.transpose(1, 2), k, v, keys)
            lengths, keys = ranks.whole_lengths(lengths), ranks.whole_lengths(keys)
        few_visible = visible_keys(keys, few)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, K]
        scores = wide(few_q) @ wide(few_k).mT / math.sqrt(q.shape[-1])
        if few_visible is not None:
            scores = scores.masked_fill(~few_visible, -math.inf)
        inverse = pseudo_inverse(scores.softmax(-1), self.options.iterations)
        if cut is None:
            summary = F.scaled_dot_product_attention(few_q, k, v, visible, dropout_p=dropout)  # softmax(Q̃ Kᵀ) V
        else:
            summary = far.to(v.dtype).transpose(1, 2)
        values = (inverse @ wide(summary)).to(v.dtype)  # [B, H, M, V]
        if keys is not None:  # where every key is its own landmark, its own value is exact
            own_key = (keys <= few)[:, None, None, None]
            values = torch.where(own_key, first_values, values)
        o = _read(q, few_k, values, few_visible, dropout)
        if lengths is not None:  # where every query is its own landmark, its own summary is exact
            own = (lengths <= few)[:, None, None, None]
            own = own if keys is None else own & ~own_key
            own_summary = summary[:, :, start : start + o.shape[2]]
            early = own_summary.shape[2]
            o = torch.cat((torch.where(own, own_summary, o[:, :, :early]), o[:, :, early:]), dim=2)
        return o.transpose(1, 2) if cut is None else ranks.tie(o.transpose(1, 2), first_values)

    def _landmarks(self, t: Tensor, lengths: Tensor | None) -> Tensor:
        """Means of the segments ⌊n·i/m⌋ .. ⌊n·(i+1)/m⌋ of each row, zero where n < M: [B, T, H, K] -> [B, H, M, K]"""
        length, size, exact = t.shape[1], self.options.landmarks, wide_type(t)
        if lengths is None and length % size == 0 and ranks.active() is None:
            # not a mean, whose gradient torch makes in the type of the sums, for every token
            means = t.unflatten(1, (size, -1)).sum(2, dtype=exact) / (length // size)
            return means.to(t.dtype).transpose(1, 2)
        # a product of zeros and ones, exact in any type
        rows = ranks.whole_lengths(lengths)
        whole = ranks.whole_length(length)
        n = torch.full(t.shape[:1], whole, device=t.device) if rows is None else rows.clamp(min=1)
        n, m = n[:, None, None], n.clamp(max=size)[:, None, None]
        segment = ((ranks.positions(length, t.device) + 1) * m - 1) // n  # [B, 1, T]; from m on beyond the row
        index = torch.arange(size, device=t.device)[:, None]
        member = (segment == index) & (index < m)  # [B, M, T]
        sums = ranks.total((member.to(t.dtype) @ t.flatten(2)).to(exact))  # [B, M, H*K]
        means = sums / ranks.total(member.sum(-1, keepdim=True)).clamp(min=1)
        return means.to(t.dtype).unflatten(-1, t.shape[2:]).transpose(1, 2)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax(Q K̃ᵀ) Z softmax(Q̃ Kᵀ), [B, H, T, S]"""

        def softmax(q: Tensor, k: Tensor) -> Tensor:
            return torch.softmax(torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1]), -1)

        m = self.options.landmarks
        if q.shape[1] <= m or k.shape[1] <= m:
            return softmax(q, k)
        few_q, few_k = (
            torch.stack([t[:, t.shape[1] * i // m : t.shape[1] * (i + 1) // m].mean(1) for i in range(m)], 1)
            for t in (q, k)
        )
        a = softmax(few_q, few_k)  # [B, H, M, M]
        one = torch.eye(m, dtype=a.dtype, device=a.device)
        z = a.mT / (a.sum(-1).amax(-1) * a.sum(-2).amax(-1))[..., None, None]
        for _ in range(self.options.iterations):
            az = a @ z
            z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
        return softmax(q, few_k) @ z @ softmax(few_q, k)


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Iterate towards the Moore-Penrose inverse of a matrix without negative entries, [..., M, N] -> [..., N, M]."""
    z = a.mT / (a.sum(-1).amax(-1) * a.sum(-2).amax(-1))[..., None, None]
    shape, a, z = z.shape, a.reshape(-1, *a.shape[-2:]), z.reshape(-1, *z.shape[-2:])
    for _ in range(iterations):
        az = a @ z
        p = torch.baddbmm(az, az, az, beta=7, alpha=-1)  # AZ (7 - AZ)
        p = torch.baddbmm(az, az, p, beta=15, alpha=-1)  # AZ (15 - AZ (7 - AZ))
        z = torch.baddbmm(z, z, p, beta=13 / 4, alpha=-1 / 4)
    return z.view(shape)


def _read(q: Tensor, few_k: Tensor, values: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    """softmax(Q K̃ᵀ) values, [B, H, T, V].

    On a GPU, the gradient of attention runs one program for each block of keys, and there are few keys. So we cut the
    queries into pieces and treat these as rows of a larger batch.
    """
    pieces = 1 if symbolic(q.shape[2]) else next(n for n in PIECES if q.shape[2] % n == 0)
    q = q.unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1)  # [B*pieces, H, T/pieces, K]
    few_k, values = few_k.repeat_interleave(pieces, 0), values.repeat_interleave(pieces, 0)
    visible = None if visible is None else visible.repeat_interleave(pieces, 0)
    o = F.scaled_dot_product_attention(q, few_k, values, visible, dropout_p=dropout)
    return o.unflatten(0, (-1, pieces)).transpose(1, 2).flatten(2, 3)
