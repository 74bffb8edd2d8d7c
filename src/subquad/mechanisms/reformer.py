"""Reformer: hash queries so that similar ones meet in a bucket, and attend inside buckets only.

Paper       Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", OpenReview:rkgNKkHtvB, §2
Definition  k = q/|q| (one projection for both).  Each round hashes h(x) = argmax [xR; -xR], R random, and lets i see
            Pᵢ = {j : h(j) = h(i), chunk(i) - chunk(j) ∈ {0, 1}, j ≤ i}.  oᵢ = Σⱼ softmaxⱼ(qᵢ·kⱼ - 10⁵[i = j]) vⱼ over
            the union of the rounds' sets: a round attends to its own set with qᵢ·kⱼ - log Nᵢⱼ, Nᵢⱼ the number of rounds
            that see the pair, and rounds are weighed by their log-sum-exp. A token attends to itself only when it has
            nothing else.
            causal: chunk(i) = ⌊rank of i among the earlier tokens of its bucket / C⌋
            bidirectional: chunk(i) = ⌊rank of i in the sort by (bucket, position) / C⌋, and chunks -1, 0, 1 apart count
Cost        train O(rounds·T·C·(K + V)) time, O(rounds·T·(C + K + V)) memory a head, sorting aside;
            decode O(rounds·C·(K + V)) a token and head; state 2·T·D, and rounds·buckets·2C integers a head
Departures  Causal chunks follow the rank inside the bucket: in a sort of the whole sequence, who sees whom depends on
            the future (strict_causal=False is the paper's). The bidirectional form also looks one chunk ahead. The
            first chunk does not look back to the last. The number of buckets does not follow T. Rotary positions turn q
            and k, not what is hashed. No 1/√K, as in the authors' code, since |k| = 1
Verified    tests/mechanisms/test_reformer.py: one bucket is full shared-QK attention with the self mask, 1e-10. By
            hand, in float64: strict_causal=False equals reformer-pytorch 1.4.4 (1e-8 with four rounds), the one-bucket
            limit equals transformers 5.22 LSHSelfAttention to 3e-6, whose other cases mix buckets inside a chunk.
            Kernels: tests/ops/test_ordered.py, test_clusters_triton.py
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.bucketed import Bucketed, Tokens
from subquad.ops import buckets, ordered
from subquad.ops.clusters import nearest
from subquad.ops.lengths import at_most, keep, symbolic
from subquad.ops.precision import wide_type

SELF = 1e5  # subtracted from a token's score for itself; finite


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    rounds: AtLeast1 = 4  # of hashing, whose results are combined by their log-sum-exp
    chunk: AtLeast1 = 64  # tokens that attend together, and to the chunk before
    buckets: int | tuple[int, ...] = 32  # a tuple is hashed by factors: their product is the number, their sum the cost
    strict_causal: bool = True  # False: chunks of the whole sorted sequence, as in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        odd = [f for f in self.factors if isinstance(f, bool) or not isinstance(f, int) or f < 2 or f % 2]
        if odd or self.buckets == ():
            refuse("buckets", self.buckets, "1, an even integer, or a tuple of even integers")

    @property
    def factors(self) -> tuple[int, ...]:
        if self.buckets == 1 and not isinstance(self.buckets, bool):
            return ()
        return self.buckets if isinstance(self.buckets, tuple) else (self.buckets,)


class Reformer(Bucketed):
    small = (
        {"rounds": 3, "chunk": 4, "buckets": 4},
        {"rounds": 2, "chunk": 3, "buckets": (2, 4)},
        {"rounds": 2, "chunk": 16, "buckets": 1},
        {"rounds": 2, "chunk": 5, "buckets": 4, "strict_causal": False},
    )
    apart = True
    options: Options

    def __init__(self, options: Options):
        self.buckets = math.prod(options.factors)
        super().__init__(options, options.strict_causal, (options.rounds, self.buckets), options.chunk)
        self.query = nn.Linear(options.dim, options.dim)  # of the keys as well
        self.value = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)
        shape = (options.heads, options.rounds, self.width, sum(options.factors) // 2)
        self.register_buffer("rotation", torch.empty(shape))
        self.rotation: Tensor
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.rotation.copy_(torch.randn(self.rotation.shape, generator=generator or self._generator()))

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        tokens = self._hashed(x, lengths)
        if self._fused(tokens.q):
            return self._merge(self._attend_ordered(tokens))
        return self._merge(self._attend_near(_with_keys(tokens)))

    def _tokens(self, x: Tensor, lengths: Tensor | None, position: Tensor | None = None) -> Tokens:
        return _with_keys(self._hashed(x, lengths, position))

    def _hashed(self, x: Tensor, lengths: Tensor | None, position: Tensor | None = None) -> Tokens:
        """Tokens whose keys are still the queries, of any length."""
        q, v = (t.unflatten(-1, (self.options.heads, -1)) for t in (self.query(x), self.value(x)))
        bucket, present = self._hash(q), keep(lengths, x.shape[1])
        if present is not None:
            bucket = bucket.masked_fill(~present[:, None, None], -1)
        q, _ = self._rotate(q, q, position)
        return Tokens(q, q, v, bucket, bucket)

    def _hash(self, q: Tensor) -> Tensor:
        """Buckets [B, H, rounds, T] of q [B, T, H, K]: of several factors the first counts most."""
        bucket, first = None, 0
        for factor in self.options.factors:
            part = self.rotation[..., first : first + factor // 2].transpose(-1, -2)
            own, first = nearest(q, part, signed=True, impl=self.options.impl), first + factor // 2
            bucket = own if bucket is None else bucket * factor + own
        if bucket is None:  # there is one bucket
            return torch.zeros(len(q), q.shape[2], self.options.rounds, q.shape[1], dtype=torch.int64, device=q.device)
        return bucket

    def _attend_ordered(self, tokens: Tokens) -> Tensor:
        q, _, v, _, bucket = tokens
        if self.strict:
            order = ordered.by_rank(bucket, self.buckets, self.options.chunk)
        else:
            order = ordered.by_place(bucket, self.buckets, self.options.chunk, ahead=not self.options.causal)
        rule = ordered.Rule(ahead=not self.options.causal, causal=self.options.causal, apart=True, unit=True)
        return ordered.ordered_attention(q, None, v, order, rule, impl=self.options.impl)

    def _attend_near(self, tokens: Tokens, lists: buckets.Lists | None = None, start: Tensor | None = None) -> Tensor:
        q, k, v, _, bucket = tokens
        size, chunk = q.shape[1], self.options.chunk
        if lists is None and not symbolic(size) and size**2 <= self._pairs(size):
            return self._attend_short(q, k, v, bucket)
        token = torch.arange(size, device=q.device).expand_as(bucket)  # [B, H, R, T]
        if lists is not None and start is not None:
            bucket, token = buckets.in_reach(lists, bucket, start)
        if self.strict:
            slots = buckets.rank_slots(bucket, self.buckets, at_most(chunk, bucket.shape[-1]))
        else:
            slots = buckets.sorted_slots(bucket, at_most(chunk, size), ahead=not self.options.causal)
        queries, keys = (
            buckets.lookup(token, slots.query, -1),
            buckets.lookup(token, slots.key, -1),
        )  # [B, H, R, N, C] and [..., W]
        visible = buckets.same_bucket(bucket, slots)
        if self.options.causal:
            visible &= keys[..., None, :] <= queries[..., :, None]
        rows = slots.query - (bucket.shape[-1] - size)  # earlier tokens are not queries: they are below 0
        visible &= (rows >= 0)[..., None]

        bias = -SELF * (queries[..., :, None] == keys[..., None, :]).to(wide_type(q))
        *_, places, width = slots.query.shape
        if self.options.rounds > 1:
            code = slots.place // width + bucket * (places + 1)
            codes = torch.full((*code.shape[:-1], k.shape[1] + 1), -9, device=q.device)  # the last one is for padding
            codes = codes.scatter_(-1, torch.where(bucket < 0, k.shape[1], token), code)
            bias = (
                bias - buckets.rounds_together(codes, queries, keys, ahead=not self.options.causal).to(bias.dtype).log()
            )
        rows, keys, visible, bias = (t.flatten(2, 3) for t in (rows, keys, visible, bias))  # rounds are just more slots
        o, lse = buckets.slot_attention(
            q, k, v, rows, keys, visible, bias, self._dropout()
        )  # [B, H, R·N, C, V], without V
        rounds = torch.arange(self.options.rounds, device=q.device)[:, None]
        place = slots.place[..., -size:] + rounds * (places * width)  # [B, H, R, T]
        share = buckets.give_back(lse[..., None], place).softmax(dim=2)  # of each round
        o = (buckets.give_back(o, place) * share.to(o.dtype)).sum(2)  # [B, H, T, V]
        return o.transpose(1, 2)

    def _pairs(self, size: int) -> int:
        """How many pairs of a query and a key the slots of all rounds hold."""
        chunk, rounds = self.options.chunk, self.options.rounds
        if self.strict:
            return rounds * buckets.slot_pairs(size, self.buckets, chunk)
        return rounds * size * (2 if self.options.causal else 3) * chunk

    def _attend_short(self, q: Tensor, k: Tensor, v: Tensor, bucket: Tensor) -> Tensor:
        """Compute all pairs: with few tokens in many buckets, most places of the slots would be empty."""
        size = q.shape[1]
        place = buckets.ranks(bucket, self.buckets)[0] if self.strict else buckets.sorted_places(bucket)
        # number the chunks of all buckets with gaps between buckets, so that chunks are close if their numbers are
        number = (bucket * (size + 2) + place // self.options.chunk).to(torch.int32)  # [B, H, R, T]
        own = torch.eye(size, dtype=torch.bool, device=q.device)
        seen, behind = own, 0 if self.options.causal else -1
        for part in number.unbind(2):
            gap = part[..., :, None] - part[..., None, :]
            seen = seen | (gap >= behind) & (gap <= 1)
        if self.options.causal:
            seen = seen & torch.ones_like(own).tril()
        return buckets.pair_attention(q, k, v, seen, -SELF * own, self._dropout())

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Softmax over the union of the rounds' sets."""
        i, j = torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(x.shape[1], device=x.device)
        q, v = (t.unflatten(-1, (self.options.heads, -1)) for t in (self.query(x), self.value(x)))
        seen = i == j
        for r in range(self.options.rounds):
            bucket, first = torch.zeros_like(q[..., 0], dtype=torch.int64), 0
            for factor in self.options.factors:
                part = torch.einsum("bthk,hkm->bthm", q, self.rotation[:, r, :, first : first + factor // 2])
                bucket, first = bucket * factor + torch.cat((part, -part), dim=-1).argmax(-1), first + factor // 2
            bucket = bucket.transpose(1, 2)  # [B, H, T]
            mine, other = bucket[..., :, None], bucket[..., None, :]
            same = mine == other
            before = same & (j < i) if self.strict else (other < mine) | same & (j < i)
            chunk = before.sum(-1) // self.options.chunk
            gap = chunk[..., :, None] - chunk[..., None, :]
            seen = seen | same & ((gap >= 0) & (gap <= 1) & (j <= i) if self.options.causal else gap.abs() <= 1)
        q, _ = self._rotate(q, q)
        scores = torch.einsum("bthk,bshk->bhts", q, q / q.norm(dim=-1, keepdim=True).clamp(min=1e-6)) - 1e5 * (i == j)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1), v

    def _seen(self, near: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        near = near.flatten(2).sort(-1).values[:, :, None]  # [B, H, 1, R·2C]
        once = (near >= 0) & (near != F.pad(near, (1, -1), value=-1))
        return near, once, -SELF * (near == position)[..., None, :]


def _with_keys(tokens: Tokens) -> Tokens:
    return tokens._replace(k=F.normalize(tokens.q, dim=-1, eps=1e-6))
