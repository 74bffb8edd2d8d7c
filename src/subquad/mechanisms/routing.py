"""Routing attention: learn centroids by online k-means, and let tokens attend to those nearest to the same centroid.

Paper       Roy, Saffar, Vaswani, Grangier 2020, "Efficient Content-Based Sparse Attention with Routing Transformers",
            arXiv:2003.05997, §4
Definition  q, k are layer-normed without scale or shift; μ the centroids of the head, kept in the same space.
            bidirectional: each μ takes the w queries and the w keys nearest to it, and these queries attend to these
            keys by softmax(q·k/√K); a query chosen several times gets the mean of its results, one never chosen gets 0.
            Of equally near tokens the earlier is taken
            causal: each token joins the centroid nearest to it. Keys of a cluster form chunks of w, by rank among the
            earlier ones. A query sees the newest chunk of its cluster and the one before, up to itself; 0 if none
            training moves μ ← norm(λμ + (1 - λ)·mean of the queries and keys nearest to it)
Cost        train O(T·(clusters·K + w·(K + V))) time, O(T·(clusters + w + K + V)) memory a head, sorting aside;
            decode O(w·(K + V)) a token and head; state 2·T·D, and clusters·2w integers a head.
            The paper's T^1.5 comes from clusters = √T and w = √T: choose clusters·window ≥ T, or tokens go unchosen
Departures  Causal by cluster and rank, because the w nearest of a whole sequence depend on its future;
            strict_causal=False is the paper's, with the causal mask inside a cluster. 1/√K, which the released code
            lacks (scale=1.0). Centroids are normed after each step. The mean over clusters is exact. share_qk=None
            shares when causal, as there. The loss is left to you: `commitment` returns it (β = 1e-4 there). Rotary
            positions turn q and k, not what is routed
Verified    tests/mechanisms/test_routing.py: one cluster is full attention with normed q and k, 1e-10; k-means steps
            against the formula. By hand, in float64: the bidirectional form equals KmeansAttention of
            routing-transformer 1.6.1 without padding, 1.1e-5; two gloo ranks moved to the same mean. Kernels:
            tests/ops/test_ordered.py, test_clusters_triton.py
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.bucketed import Bucketed, Tokens
from subquad.mechanisms.checking import check_padded
from subquad.ops import buckets, ordered
from subquad.ops.clusters import balanced, kmeans_step, nearest
from subquad.ops.lengths import at_most, keep, symbolic
from subquad.ops.precision import uncast, wide, wide_type


class Routed(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor
    v: Tensor  # [B, T, H, V]
    normed: tuple[Tensor, ...]  # q and k as they are routed, or one tensor if they are shared
    centroids: Tensor  # [H, clusters, K]
    near: tuple[Tensor, ...]  # their nearness to each centroid, [B, H, clusters, T]; empty where kernels compute it


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    clusters: AtLeast1 = 16  # centroids of each head
    window: AtLeast1 = 128  # tokens of a cluster that attend together
    share_qk: bool | None = None  # one projection for q and k; None: when causal
    # λ. Each training forward is a step, so with gradient accumulation each micro-batch is one. Keep the parameters in
    # float32 (autocast is fine): a 16-bit centroid cannot move by thousandths.
    decay: float = 0.999  # of the moving average that updates the centroids
    scale: float | None = None  # of the scores; None: 1/√K
    strict_causal: bool = True  # False: the balanced choice of the paper, which looks ahead

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay <= 1:
            refuse("decay", self.decay, "a number from 0 to 1")
        if self.scale is not None and not self.scale > 0:
            refuse("scale", self.scale, "None or a positive number")


class Routing(Bucketed):
    small = (
        {"clusters": 4, "window": 5},
        {"clusters": 3, "window": 4, "share_qk": False},
        {"clusters": 4, "window": 6, "share_qk": True, "strict_causal": False},
    )
    apart = False
    options: Options

    def __init__(self, options: Options):
        super().__init__(options, options.strict_causal, (options.clusters,), options.window)
        self.shared = options.causal if options.share_qk is None else options.share_qk
        self.scale = options.scale or 1 / math.sqrt(self.width)
        self.qkv = nn.Linear(options.dim, (2 if self.shared else 3) * options.dim)
        self.out = nn.Linear(options.dim, options.dim)
        self.register_buffer("centroids", torch.empty(options.heads, options.clusters, self.width))
        self.register_buffer("_last", torch.empty_like(self.centroids), persistent=False)
        self.centroids: Tensor
        self._last: Tensor  # the centroids of the last training forward
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        drawn = torch.randn(self.centroids.shape, generator=generator or self._generator())
        self.centroids.copy_(_norm(drawn, eps=1e-12))
        self.restore()

    def restore(self) -> None:
        self._last.copy_(self.centroids)

    def commitment(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Mean squared distance of queries and keys to their centroids; the paper adds 1e-4 times this to the loss."""
        x, lengths = check_padded(self, x, lengths)
        routed = self._route(x)
        label = torch.cat(self._nearest(routed, lengths), dim=-1)  # [B, H, T], or [B, H, 2T]
        heads = torch.arange(self.options.heads, device=x.device)[:, None]
        own = self.centroids[heads, label.clamp(min=0)].transpose(1, 2)
        distance = (torch.cat(routed.normed, dim=1) - own).square().mean(-1)  # [B, T, H]
        real = label.transpose(1, 2) >= 0
        return (distance * real).sum() / real.sum().clamp(min=1)

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        # In backward, checkpointed and reversible layers run forward again: do not learn then, and route the same way
        again = self.training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        learns = self.training and not again
        if learns:
            with torch.no_grad():
                self._last.copy_(self.centroids)
        routed = self._route(x, centroids=self._last if learns or again else self.centroids)
        clusters = self._nearest(routed, lengths) if learns or self.strict else ()
        if learns:
            self._learn(routed, clusters)
        if not self.strict:
            return self._merge(self._balanced(routed, lengths))
        tokens = Tokens(*routed[:3], clusters[0], clusters[-1])
        return self._merge(self._attend_ordered(tokens) if self._fused(tokens.q) else self._attend_near(tokens))

    def _tokens(self, x: Tensor, lengths: Tensor | None, position: Tensor | None = None) -> Tokens:
        routed = self._route(x, position)
        clusters = self._nearest(routed, lengths)
        return Tokens(*routed[:3], clusters[0], clusters[-1])

    def _route(self, x: Tensor, position: Tensor | None = None, centroids: Tensor | None = None) -> Routed:
        parts = self.qkv(x).unflatten(-1, (-1, self.options.heads, self.width)).unbind(2)
        *normed, v = *(_norm(t) for t in parts[:-1]), parts[-1]
        q, k = self._rotate(normed[0], normed[-1], position)
        centroids = self.centroids if centroids is None else centroids
        near: tuple[Tensor, ...] = ()
        if not self._fused(v):
            with torch.no_grad(), uncast(x):
                near = tuple(torch.einsum("hck,bthk->bhct", centroids.to(wide_type(x)), wide(t)) for t in normed)
        return Routed(q, k, v, tuple(normed), centroids, near)

    @torch.no_grad()
    def _learn(self, routed: Routed, clusters: tuple[Tensor, ...]) -> None:
        """One step of k-means with the tokens of this batch, on all ranks."""
        tokens = routed.normed[0] if len(routed.normed) == 1 else torch.cat(routed.normed, dim=1)
        label = torch.cat(clusters, dim=-1).transpose(0, 1).flatten(1)  # [H, B·T], or [H, B·2T]
        moved = kmeans_step(self.centroids, tokens.flatten(0, 1).transpose(0, 1), label, self.options.decay)
        self.centroids.copy_(_norm(moved, eps=1e-12))

    def _balanced(self, routed: Routed, lengths: Tensor | None) -> Tensor:
        """Attention among the w tokens nearest to each centroid: [B, T, H, V]."""
        q, k, v, _, _, near = routed
        if not near:
            return self._balanced_by_lists(routed, lengths)
        q = q * self.scale
        (batch, size, heads), width = q.shape[:3], v.shape[-1]
        chosen = []
        # with so few tokens every centroid takes all of them, so the mean over centroids is the result of one
        if not symbolic(size) and size <= self.options.window:
            near = tuple(nearness[:, :, :1] for nearness in near)
        present = keep(lengths, size)
        for nearness in near:
            if present is not None:
                nearness = nearness.masked_fill(~present[:, None, None], -torch.inf)
            if symbolic(size):  # there may be fewer tokens than places
                nearness = F.pad(nearness, (0, self.options.window), value=-torch.inf)
            # Keep half of the digits: equal tokens stay equal in any order of summation, and then position decides
            steps = (nearness / torch.finfo(nearness.dtype).eps ** 0.5).round()
            steps, tokens = (t[..., : self.options.window] for t in steps.sort(dim=-1, descending=True, stable=True))
            chosen.append(tokens.masked_fill(steps == -torch.inf, -1))  # [B, H, clusters, w]
        queries, keys = chosen[0], chosen[-1]
        visible = (queries >= 0)[..., :, None] & (keys >= 0)[..., None, :]
        if self.options.causal:
            visible &= keys[..., None, :] <= queries[..., :, None]
        o, _ = buckets.slot_attention(q, k, v, queries, keys, visible, None, self._dropout())  # [B, H, clusters, w, V]
        o = torch.cat((o, visible.any(-1, keepdim=True).to(o.dtype)), dim=-1)  # one more column, to count
        index = queries.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, width + 1)
        total = torch.zeros(batch, heads, size, width + 1, dtype=wide_type(o), device=o.device)
        total = total.scatter_add(2, index, wide(o.flatten(2, 3)))
        return (total[..., :-1] / total[..., -1:].clamp(min=1)).to(v.dtype).transpose(1, 2)

    def _balanced_by_lists(self, routed: Routed, lengths: Tensor | None) -> Tensor:
        """The same by the kernels of `subquad.ops.ordered`."""
        window, (q, k, v, normed, centroids, _) = self.options.window, routed
        if q.shape[1] <= window:
            centroids = centroids[:, :1]
        grid = torch.finfo(wide_type(q)).eps ** 0.5
        chosen = [balanced(t.detach(), centroids, window, grid, lengths) for t in normed]
        order = ordered.by_lists(chosen[0], chosen[-1])
        rule = ordered.Rule(causal=self.options.causal, scale=self.scale)
        return ordered.ordered_attention(q, None if self.shared else k, v, order, rule, impl=self.options.impl)

    def _nearest(self, routed: Routed, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """The clusters of queries and keys, [B, H, T], -1 for padding."""
        clusters = tuple(near.argmax(-2) for near in routed.near) or tuple(
            nearest(t, routed.centroids[:, None])[:, :, 0] for t in routed.normed
        )
        present = keep(lengths, routed.q.shape[1])
        return clusters if present is None else tuple(c.masked_fill(~present[:, None], -1) for c in clusters)

    def _attend_ordered(self, tokens: Tokens) -> Tensor:
        q, k, v, asked, cluster = tokens
        clusters, window, impl = self.options.clusters, self.options.window, self.options.impl
        if self.shared:
            order = ordered.by_rank(cluster[:, :, None], clusters, window)
        else:
            order = ordered.by_asking(cluster[:, :, None], asked[:, :, None], clusters, window)
        rule = ordered.Rule(causal=True, scale=self.scale)
        return ordered.ordered_attention(q, None if self.shared else k, v, order, rule, impl=impl)

    def _attend_near(self, tokens: Tokens, lists: buckets.Lists | None = None, start: Tensor | None = None) -> Tensor:
        tokens = tokens._replace(q=tokens.q * self.scale)
        q, k, v, asked, cluster = tokens
        size, clusters, window = q.shape[1], self.options.clusters, self.options.window
        if lists is None and not symbolic(size) and size**2 <= buckets.slot_pairs(size, clusters, window):
            return self._all_pairs(tokens)
        token = torch.arange(size, device=q.device).expand_as(cluster)  # [B, H, T]
        if lists is not None and start is not None:
            cluster, token = buckets.in_reach(lists, cluster, start)
            asked = F.pad(asked, (cluster.shape[-1] - size, 0), value=-1)
        slots = buckets.rank_slots(cluster, clusters, at_most(window, cluster.shape[-1]))
        if not self.shared:
            slots = buckets.asking_slots(slots, cluster, asked)
        queries, keys = buckets.lookup(token, slots.query, -1), buckets.lookup(token, slots.key, -1)
        visible = buckets.same_bucket(cluster, slots, asked) & (keys[..., None, :] <= queries[..., :, None])
        rows = slots.query - (cluster.shape[-1] - size)
        visible &= (rows >= 0)[..., None]
        o, _ = buckets.slot_attention(q, k, v, rows, keys, visible, None, self._dropout())  # [B, H, N, C, V]
        return buckets.give_back(o, slots.place[..., -size:]).transpose(1, 2)

    def _all_pairs(self, tokens: Tokens) -> Tensor:
        """Compute all pairs: with few tokens, most places of the slots would be empty."""
        q, k, v, asked, cluster = tokens
        same = (asked[..., :, None] == cluster[..., None, :]) & (asked >= 0)[..., None]
        same &= torch.ones_like(same[0, 0]).tril()
        newest = (same.sum(-1, keepdim=True) - 1) // self.options.window
        chunk = buckets.ranks(cluster, self.options.clusters)[0] // self.options.window  # [B, H, T]
        return buckets.pair_attention(q, k, v, same & (chunk[..., None, :] >= newest - 1), dropout=self._dropout())

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The definition, for one row and head at a time."""
        _, _, v, normed, *_ = self._route(x)
        q, k = self._rotate(normed[0], normed[-1])
        q, rows = q * (self.options.scale or q.shape[-1] ** -0.5), []
        for b in range(len(x)):
            for h in range(self.options.heads):
                scores = q[b, :, h] @ k[b, :, h].T
                near_q, near_k = (
                    wide(t[b, :, h]) @ self.centroids[h].T.to(wide_type(x)) for t in (normed[0], normed[-1])
                )
                total, times = torch.zeros_like(scores), scores.new_zeros(len(scores), 1)
                for seen in self._two_chunks(near_q, near_k) if self.strict else self._nearest_sets(near_q, near_k):
                    seen = seen.tril() if self.options.causal else seen
                    some = seen.any(-1, keepdim=True)
                    weights = scores.masked_fill(~seen & some, -torch.inf).softmax(-1)
                    total, times = total + weights * some, times + some
                rows.append(total / times.clamp(min=1))
        return torch.stack(rows).unflatten(0, (len(x), -1)), v

    def _nearest_sets(self, near_q: Tensor, near_k: Tensor) -> list[Tensor]:
        """One mask for each centroid: the queries nearest to it with the keys nearest to it."""
        grid, masks = math.sqrt(torch.finfo(near_q.dtype).eps), []
        for c in range(self.options.clusters):
            rows = ((-near[:, c] / grid).round().tolist() for near in (near_q, near_k))
            queries, keys = (sorted(range(len(far)), key=far.__getitem__)[: self.options.window] for far in rows)
            masks.append(torch.zeros(len(near_q), len(near_k), dtype=torch.bool, device=near_q.device))
            masks[-1][torch.tensor(queries)[:, None], torch.tensor(keys)] = True
        return masks

    def _two_chunks(self, near_q: Tensor, near_k: Tensor) -> list[Tensor]:
        """One mask: each query with the newest chunk of its cluster and the one before."""
        seen = torch.zeros(len(near_q), len(near_k), dtype=torch.bool, device=near_q.device)
        for i, cluster in enumerate(near_q.argmax(-1)):
            members = (near_k[: i + 1].argmax(-1) == cluster).nonzero()[:, 0]
            newest = (len(members) - 1) // self.options.window
            seen[i, members[max(0, newest - 1) * self.options.window :]] = True
        return [seen]

    def _seen(self, near: Tensor, position: Tensor) -> tuple[Tensor, Tensor, None]:
        return near, near >= 0, None


def _norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)
