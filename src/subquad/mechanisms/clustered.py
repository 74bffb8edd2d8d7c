"""Clustered attention: group similar queries, attend once for each group, and repair what matters most for each query.

Paper       Vyas, Katharopoulos, Fleuret 2020, "Fast Transformers with Clustered Attention", arXiv:2007.04825, §3
Definition  Queries are hashed to sign bits and grouped by k-means in Hamming space. A group's centroid μ, the mean of
            its queries, attends to all keys: a = softmax(μ·k/√K)
            plain: every query of the group gets Σ aₛvₛ
            improved: P = the top-k keys of a, m = Σ_P aₛ; query i gets m·Σ_P softmax_P(qᵢ·kₛ/√K)vₛ + Σ_{s ∉ P} aₛvₛ
            causal: the own block exactly, and the blocks before as above, joined like two parts of one softmax; the
            exp-mass of the blocks before is Σ exp(μ·k) if plain, Σ_P exp(q·k)/m if improved. Each time the sequence
            has doubled, to 2ⁿ blocks, new groups are formed from all queries so far, and later queries join the
            nearest
Cost        train O(T·clusters·(K + V + bits·iterations) + T·topk·(K + V)) time a head, causal also O(T·block·(K + V));
            O(T·(clusters + topk·(K + V) + block)) memory; no decoding
Departures  The causal form is ours: in the published one groups depend on the future, and it drops all but the top-k.
            k-means starts from queries spread evenly over the row, and the planes are drawn once
Verified    tests/mechanisms/test_clustered.py: full attention for topk = T (causal too), for a cluster per query, for
            equal queries (causal too), 1e-10. By hand, with copied q, k, v and groups: values and gradients equal those
            of fast-transformers' kernels to 7e-7, except that improved passes no gradient through m there. Kernels:
            tests/ops/test_ordered.py, test_clusters_triton.py
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast0, AtLeast1, Traits
from subquad.ops import ordered
from subquad.ops.buckets import give_back, lookup, most_slots, pair_attention, rank_slots, slot_attention, take
from subquad.ops.clusters import (
    balanced,
    cluster_means,
    cluster_sums,
    half_bits,
    hamming_clusters,
    hamming_codes,
    nearest_bits,
    sign_bits,
    spread,
)
from subquad.ops.groups import read_groups, running_groups
from subquad.ops.impl import choose
from subquad.ops.lengths import at_most, keep, symbolic, visible_keys
from subquad.ops.opaque import attention_operator
from subquad.ops.precision import wide
from subquad.ops.prefix import join_softmax, join_top, prefix
from subquad.ops.sparse import Block, Dense, sparse_attention

CHUNK = 32  # queries of a slot if the length is symbolic, so that T / clusters is not known
PAIRS_A_KEY = 16  # fetching one key for a slot takes as long as this many pairs of a query and a key


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    clusters: AtLeast1 = 64  # of queries
    topk: AtLeast1 = 32  # keys of a cluster that each query attends to exactly
    improved: bool = True  # False: every query takes its cluster's output
    bits: AtLeast1 = 63  # of the sign hash that is clustered
    iterations: AtLeast0 = 10  # of Lloyd's algorithm on the hashes
    block: AtLeast1 = 64  # causal: attended to exactly


class Clustered(Attention):
    traits = Traits(causal=True, bidirectional=True, cross=True)
    family, exponent = "clustering", 1.0
    joint_queries = True
    small = (
        {"clusters": 4, "topk": 6, "bits": 16, "iterations": 3, "block": 5},
        {"clusters": 5, "improved": False, "bits": 16, "iterations": 3, "block": 4},
        {"clusters": 3, "topk": 9, "bits": 7, "iterations": 2, "block": 7},
    )
    approximates = True
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.scale = self.width**-0.5
        # for the operator, because a traced forward cannot make strings
        self.settings, self.settings_without_dropout = (
            json.dumps(dataclasses.asdict(o)) for o in (options, dataclasses.replace(options, dropout=0.0))
        )
        # the last column shifts planes off the origin: without it, parallel vectors would have Hamming distance 0
        self.register_buffer("planes", torch.empty(options.bits, self.width + 1))
        self.planes: Tensor
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.planes.copy_(torch.randn(self.planes.shape, generator=generator or self._generator()))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        fused = self._fused(q)
        if not self.options.causal:
            attend = self._by_kernels if fused else self._bidirectional
            return attend(q, k, v, lengths, key_lengths)
        bits = half_bits(q.detach(), self.planes) if fused else sign_bits(q.transpose(1, 2), self.planes)
        if symbolic(q.shape[1]) or torch.compiler.is_dynamo_compiling():  # compiling the loop takes minutes
            settings = self.settings if self._dropout() else self.settings_without_dropout
            return _operator([q, k, v, bits], settings, self._dropout() > 0)
        return self._causal(q, k, v, bits)

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, keys: Tensor | None) -> Tensor:
        clusters, topk, (size, heads) = self.options.clusters, self.options.topk, q.shape[1:3]
        counts = None if lengths is None else lengths[:, None].expand(-1, heads)
        bits, present = sign_bits(q.transpose(1, 2), self.planes), keep(lengths, size)
        _, label = hamming_clusters(bits, clusters, self.options.iterations, counts)  # [B, H, T]
        if present is not None:
            label = label.masked_fill(~present[:, None], -1)
        centroids, _ = cluster_means(wide(q).transpose(1, 2), label, clusters)  # [B, H, N, K]
        scores = torch.einsum("bhnk,bshk->bhns", centroids, wide(k)) * self.scale
        visible = visible_keys(keys, k.shape[1])
        scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1)
        own = label.clamp(min=0)[..., None]  # [B, H, T, 1]
        if not self.options.improved:
            o = torch.einsum("bhns,bshv->bhnv", self._dropped(weights), wide(v))
            return _pick(o, own).to(v.dtype).transpose(1, 2)

        if symbolic(k.shape[1]):  # there may be fewer keys than topk
            scores, weights = (F.pad(t, (0, topk), value=x) for t, x in ((scores, -torch.inf), (weights, 0.0)))
            v = F.pad(v, (0, 0, 0, 0, 0, topk))
        best, top = scores.topk(at_most(topk, scores.shape[-1]), dim=-1)  # [B, H, N, topk]
        mass = weights.gather(-1, top).sum(-1, keepdim=True)
        rest = torch.einsum("bhns,bshv->bhnv", self._dropped(weights.scatter(-1, top, 0.0)), wide(v))
        exact = self._over(top.masked_fill(best == -torch.inf, -1), q * self.scale, k, v, label)
        return (exact * _pick(mass, own) + _pick(rest, own)).to(v.dtype).transpose(1, 2)

    def _fused(self, q: Tensor) -> bool:
        return choose(self.options.impl, "ordered_attention", q, self._unsupported(q)) == "triton"

    def _unsupported(self, q: Tensor) -> str | None:
        if self._dropout():
            return "it has no dropout"
        if self.options.causal and torch.are_deterministic_algorithms_enabled():
            return "its sums of gradients are not in a fixed order, and torch's algorithms must be deterministic"
        sizes = self.options.clusters, self.options.block, self.options.topk, q.shape[3]
        if self.options.causal and max(sizes) > 128:
            return f"it holds at most 128 clusters, tokens of a block, topk and channels of a head, got {sizes}"
        return ordered.unsupported(q)

    def _causal_by_kernels(self, q: Tensor, k: Tensor, v: Tensor, bits: Tensor) -> Tensor:
        """`_causal`, in which a query fetches its group's best keys where they lie."""
        clusters, block = self.options.clusters, self.options.block
        own, mass = sparse_attention(q, k, v, Block(block), causal=True, scale=self.scale, return_lse=True)
        if q.shape[1] <= block:
            return own
        formed, label = running_groups(bits, clusters, self.options.iterations, block)
        sums = (cluster_sums(q[:, : of.shape[-1]], of, clusters) for of in formed)
        centroids = torch.stack([total / count[..., None].clamp(min=1) for total, count in sums]).to(q.dtype)
        topk = self.options.topk if self.options.improved else 0
        before, total = read_groups(q, k, v, centroids, label, block, topk, self.scale)
        share = torch.sigmoid(total - mass)[..., None].to(own.dtype)
        return torch.lerp(own, before, share.expand_as(own))

    def _by_kernels(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, keys: Tensor | None) -> Tensor:
        """`_bidirectional` without scores of all centroids and keys."""
        clusters, topk = self.options.clusters, min(self.options.topk, k.shape[1])
        bits = half_bits(q.detach(), self.planes)
        _, label = hamming_codes(bits, clusters, self.options.iterations, lengths)
        total, count = cluster_sums(q, label, clusters)
        centroids = (total / count[..., None].clamp(min=1)).to(q.dtype)  # [B, H, N, K]
        if keys is not None:
            keys = keys.clamp(min=1)  # because a softmax over no keys is NaN
        o, mass = sparse_attention(
            centroids.transpose(1, 2), k, v, Dense(), key_lengths=keys, scale=self.scale, return_lse=True
        )
        o, mass = wide(o.transpose(1, 2)), mass.transpose(1, 2)[..., None]  # [B, H, N, V], [B, H, N, 1]
        if not self.options.improved:
            return spread(o, label, v)
        top = balanced(k.detach(), centroids.detach(), topk, 0.0, keys)  # [B, H, N, topk]
        none, (near, values) = top < 0, (take(t, top.clamp(min=0)) for t in (k, v))
        scores = torch.einsum("bhnk,bhnpk->bhnp", wide(centroids), wide(near)) * self.scale
        known = (scores - mass).exp().masked_fill(none, 0)
        rest = o - torch.einsum("bhnp,bhnpv->bhnv", known, wide(values))
        order = ordered.to_lists(
            label, torch.arange(top[0, 0].numel(), device=q.device).view(top.shape[2:]).where(~none, -1)
        )
        near, values = (t.flatten(2, 3).transpose(1, 2) for t in (near, values))  # [B, N·topk, H, ·]
        exact = ordered.ordered_attention(
            q, near, values, order, ordered.Rule(once=True, scale=self.scale), impl=self.options.impl
        )
        return torch.addcmul(spread(rest, label, v), exact, spread(known.sum(-1, keepdim=True), label, v))

    def _over(self, top: Tensor, q: Tensor, k: Tensor, v: Tensor, label: Tensor) -> Tensor:
        """Softmax attention of each query over its cluster's top keys [B, H, N, topk], [B, H, T, V]."""
        clusters, size, keys = self.options.clusters, q.shape[1], k.shape[1]
        chunk = CHUNK if symbolic(size) else -(-size // clusters)
        if not symbolic(size, keys) and size * keys <= PAIRS_A_KEY * most_slots(size, clusters, chunk) * top.shape[-1]:
            chosen = torch.zeros(*top.shape[:-1], keys + 1, dtype=torch.bool, device=top.device)
            chosen = chosen.scatter_(-1, torch.where(top < 0, keys, top), True)[..., :-1]  # [B, H, N, S]
            visible = _pick(chosen, label.clamp(min=0)[..., None]) & (label >= 0)[..., None]
            return pair_attention(q, k, v, visible, dropout=self._dropout()).transpose(1, 2)
        slots = rank_slots(label, clusters, chunk)  # all queries of a slot are of one cluster and share its keys
        index = _pick(top, lookup(label, slots.query[..., :1], 0))
        visible = (slots.query >= 0)[..., :, None] & (index >= 0)[..., None, :]
        o, _ = slot_attention(q, k, v, slots.query, index, visible, None, self._dropout())
        return give_back(o, slots.place)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, bits: Tensor) -> Tensor:
        if self._fused(q):
            if bits.dtype != torch.float16:  # made where the length was symbolic
                bits = F.pad(bits.transpose(1, 2).to(torch.float16), (0, 16 - bits.shape[-1] % 16), value=1.0)
            return self._causal_by_kernels(q, k, v, bits)
        size, block, dtype = q.shape[1], self.options.block, v.dtype
        q, k, v = (wide(F.pad(t, (0, 0, 0, 0, 0, -size % block))) for t in (q * self.scale, k, v))
        own, mass = self._own_block(q, k, v)  # [B, H, T, V] and [B, H, T]
        parts, start = [own[:, :, :block]], block
        while start < size:  # twice as far each time
            stop = min(2 * start, q.shape[1])
            past = k[:, : stop - block], v[:, : stop - block]
            before, before_mass = self._blocks_before(q[:, :stop], *past, bits, start)
            share = torch.sigmoid(before_mass - mass[:, :, start:stop])[..., None]
            parts.append(torch.lerp(own[:, :, start:stop], before, share.expand_as(before)))
            start = stop
        return torch.cat(parts, dim=2)[:, :, :size].to(dtype).transpose(1, 2)

    def _own_block(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Exact causal attention inside each block, and the log of its exp-mass."""
        block = self.options.block
        q, k, v = (t.unflatten(1, (-1, block)) for t in (q, k, v))  # [B, N, C, H, ·]
        scores = wide(torch.einsum("bnchk,bndhk->bhncd", q, k))  # wide, because autocast computes products in 16 bits
        future = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        o = wide(torch.einsum("bhncd,bndhv->bhncv", self._dropped(scores.softmax(-1)), v))
        return o.flatten(2, 3), scores.logsumexp(-1).flatten(2, 3)

    def _blocks_before(self, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The output of queries from `start` on from the blocks before their own, and the log of its exp-mass.

        Groups are formed from the queries before `start`. k and v end one block before q.
        """
        clusters, block = self.options.clusters, self.options.block
        codes, label = hamming_clusters(bits[:, :, :start], clusters, self.options.iterations)
        centroids, count = cluster_means(q[:, :start].transpose(1, 2), label, clusters)  # [B, H, N, K]
        label = nearest_bits(bits[:, :, start : q.shape[1]], codes, count > 0)  # [B, H, T]
        label = F.pad(label, (0, q.shape[1] - start - label.shape[-1]))  # the rest of the last block
        scores = wide(torch.einsum("bhnk,bshk->bhns", centroids, k))
        in_blocks = scores.unflatten(-1, (-1, block))  # [B, H, N, blocks, C]
        o = wide(torch.einsum("bhnmc,bmchv->bhnmv", in_blocks.softmax(-1), v.unflatten(1, (-1, block))))
        mass, o = prefix((in_blocks.logsumexp(-1, keepdim=True), o), join_softmax)  # over the blocks up to each
        upto = torch.arange(start, q.shape[1], device=q.device) // block - 1
        at = (label * mass.shape[-2] + upto)[..., None]  # [B, H, T, 1]: its cluster, up to the block before its own
        o, mass = _pick(o.flatten(2, 3), at), _pick(mass.flatten(2, 3), at)
        if not self.options.improved:
            return o, mass[..., 0]

        topk = min(self.options.topk, k.shape[1])
        more = max(0, topk - block)
        best, key = in_blocks.detach().topk(topk - more, dim=-1)
        key = key + torch.arange(0, k.shape[1], block, device=q.device)[:, None]
        best, key = F.pad(best, (0, more), value=-torch.inf), F.pad(key, (0, more), value=-1)
        _, key = prefix((best, key), join_top)  # the top keys of the blocks up to each
        top = _pick(key.flatten(2, 3), at)  # [B, H, T, topk]
        none = top < 0
        keys, values = take(k, top), take(v, top)  # [B, H, T, topk, ·]
        of_centroid = scores.flatten(2).gather(-1, (label[..., None] * scores.shape[-1] + top.clamp(min=0)).flatten(2))
        of_centroid = of_centroid.view(top.shape).masked_fill(none, -torch.inf)
        of_query = torch.einsum("bthk,bhtpk->bhtp", q[:, start:], keys).masked_fill(none, -torch.inf)
        known = (of_centroid - mass).exp()
        rest = o - torch.einsum("bhtp,bhtpv->bhtv", known, values)
        exact = torch.einsum("bhtp,bhtpv->bhtv", self._dropped(of_query.softmax(-1)), values)
        total = of_query.logsumexp(-1) - of_centroid.logsumexp(-1) + mass[..., 0]
        return exact * known.sum(-1, keepdim=True) + rest, total

    def _dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self._dropout())

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The definition, for one row and head at a time: [B, H, T, S]."""
        define = self._define_causal if self.options.causal else self._define_bidirectional
        rows = [torch.stack([define(q[b, :, h], k[b, :, h]) for h in range(q.shape[2])]) for b in range(len(q))]
        return torch.stack(rows)

    def _define_bidirectional(self, q: Tensor, k: Tensor) -> Tensor:
        _, label = self._lloyd(q)
        weights = q.new_zeros(len(q), len(k))
        for cluster in label.unique():
            own = label == cluster
            weights[own] = self._for_cluster(q[own].mean(0), q[own], k)[0]
        return weights

    def _define_causal(self, q: Tensor, k: Tensor) -> Tensor:
        block, rows, groups = self.options.block, [], {}
        for i in range(len(q)):
            first = i // block * block
            scores = q[i] @ k[first : i + 1].T / math.sqrt(q.shape[-1])
            weights = scores.softmax(-1)
            if first:
                start = block << int(math.log2(first // block))
                if start not in groups:
                    groups[start] = self._lloyd(q[:start])
                codes, label = groups[start]
                differ = (codes != self._sides(q[i])).sum(-1)
                nearest = min(label.unique().tolist(), key=differ.tolist().__getitem__)
                centroid = q[:start][label == nearest].mean(0)
                before, mass = self._for_cluster(centroid, q[i : i + 1], k[:first])
                share = torch.sigmoid(mass - scores.logsumexp(-1))
                weights = torch.cat((before[0] * share, weights * (1 - share)))
            rows.append(F.pad(weights, (0, len(k) - i - 1)))
        return torch.stack(rows)

    def _for_cluster(self, centroid: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The weights that queries q of one group give to all keys k, and the log of their exp-mass."""
        scores = centroid @ k.T / math.sqrt(k.shape[-1])
        share = scores.softmax(-1).expand(len(q), -1)
        if not self.options.improved:
            return share, scores.logsumexp(-1).expand(len(q))
        top = scores.topk(min(self.options.topk, len(k))).indices
        exact = q @ k[top].T / math.sqrt(k.shape[-1])
        kept = share[0, top].sum()
        return share.index_copy(1, top, kept * exact.softmax(-1)), exact.logsumexp(-1) - kept.log()

    def _sides(self, q: Tensor) -> Tensor:
        return q @ self.planes[:, :-1].T + self.planes[:, -1] >= 0

    def _lloyd(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The bits of each centroid and the group of each query."""
        bits, clusters = self._sides(q), self.options.clusters
        codes = bits[[c * len(q) // clusters for c in range(clusters)]]
        for _ in range(self.options.iterations):
            label = (bits[:, None] != codes).sum(-1).argmin(-1)
            for c in range(clusters):
                ones, number = bits[label == c].sum(0), (label == c).sum()
                codes[c] = torch.where(2 * ones == number, codes[c], 2 * ones > number)
        return codes, (bits[:, None] != codes).sum(-1).argmin(-1)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, N, D] at index [B, H, T, 1] -> [B, H, T, D]"""
    return x.gather(2, index.expand(-1, -1, -1, x.shape[-1]))


def _causally(inputs: Sequence[Tensor], options: str) -> Tensor:
    """The causal form with these options, as an operator computes it: it uses no parameters."""
    mix = Clustered.__new__(Clustered)
    nn.Module.__init__(mix)
    mix.options, mix.scale = Options(**json.loads(options)), inputs[0].shape[-1] ** -0.5
    return mix._causal(*inputs)


_operator = attention_operator("clustered_causal", _causally)
