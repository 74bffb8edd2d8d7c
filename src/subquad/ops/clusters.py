"""Clusters of vectors: k-means in Hamming space over one sequence, and online k-means over training.

G stands for any leading dimensions, N for clusters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import symbolic
from subquad.ops.precision import uncast, wide, wide_type


@torch.no_grad()
def nearest(x: Tensor, centroids: Tensor, *, signed: bool = False, impl: Impl = "auto") -> Tensor:
    """The first n with the largest x·c: x [B, T, H, K], c [H, R, N, K] or [B, H, R, N, K] -> [B, H, R, T].

    `signed`: among c and -c, which are numbered from N on. Products have at least single precision: with less, tokens
    would move to other clusters.
    """
    if choose(impl, "nearest", x, unsupported(x)) == "triton":
        return torch.ops.subquad.nearest(x, centroids, signed)
    with uncast(x):
        exact = torch.promote_types(wide_type(x), centroids.dtype)
        rows = "bhrnk" if centroids.ndim == 5 else "hrnk"
        scores = torch.einsum(f"bthk,{rows}->bhrtn", x.to(exact), centroids.to(exact))
        return (torch.cat((scores, -scores), dim=-1) if signed else scores).argmax(-1)


def unsupported(x: Tensor) -> str | None:
    if symbolic(*x.shape):
        return "the length is symbolic"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {x.dtype}"
    return f"it holds vectors of at most 256, got {x.shape[-1]}" if x.shape[-1] > 256 else None


@torch.library.custom_op("subquad::nearest", mutates_args=())
def _nearest(x: Tensor, centroids: Tensor, signed: bool) -> Tensor:
    from subquad.ops import clusters_triton

    return clusters_triton.nearest(x, centroids, signed)


@_nearest.register_fake
def _(x: Tensor, centroids: Tensor, signed: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], x.shape[2], centroids.shape[-3], x.shape[1]), dtype=torch.int32)


@torch.library.custom_op("subquad::cluster_sums", mutates_args=())
def cluster_sums(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Sums [B, H, N, K] of x [B, T, H, K] by label [B, H, T] (-1: none), and counts [B, H, N], in single precision.

    Only on a GPU, in Triton. Its gradient is `spread`.
    """
    from subquad.ops import clusters_triton

    return clusters_triton.cluster_sums(x, label, clusters)


@cluster_sums.register_fake
def _(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = x.shape[0], x.shape[2], clusters
    return x.new_empty((*shape, x.shape[3]), dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("subquad::spread", mutates_args=())
def spread(values: Tensor, label: Tensor, like: Tensor) -> Tensor:
    """Gives every token the values of its label, zeros for -1: values [B, H, N, V], label [B, H, T] -> [B, T, H, V], of
    the type of `like`. Its gradient is `cluster_sums`."""
    rows = values.to(like.dtype).flatten(0, 2)
    heads = torch.arange(values.shape[0] * values.shape[1], device=values.device).view(*values.shape[:2], 1)
    index = (heads * values.shape[2] + label.clamp(min=0)).transpose(1, 2)  # [B, T, H]
    found = rows.index_select(0, index.flatten()).view(*index.shape, -1)
    return found.masked_fill_((label < 0).transpose(1, 2)[..., None], 0)


@spread.register_fake
def _(values: Tensor, label: Tensor, like: Tensor) -> Tensor:
    return like.new_empty((len(values), label.shape[2], values.shape[1], values.shape[3]))


def _save_sums(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1], inputs[0])


def _save_spread(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1])
    ctx.clusters, ctx.dtype = inputs[0].shape[2], inputs[0].dtype


def _spread_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return cluster_sums(grad, ctx.saved_tensors[0], ctx.clusters)[0].to(ctx.dtype), None, None


cluster_sums.register_autograd(
    lambda ctx, grad, _: (spread(grad, *ctx.saved_tensors), None, None), setup_context=_save_sums
)
spread.register_autograd(_spread_back, setup_context=_save_spread)


@torch.library.custom_op("subquad::balanced", mutates_args=())
def balanced(x: Tensor, centroids: Tensor, window: int, grid: float, lengths: Tensor | None) -> Tensor:
    """The `window` tokens with the largest x·c, -1 for none: x [B, T, H, K], c [(B,) H, N, K] -> [B, H, N, window].

    Products are rounded to multiples of `grid`, if it is not 0; of equal ones the earlier counts. A row's tokens from
    `lengths` [B] on are not chosen. Only on a GPU, in Triton.
    """
    from subquad.ops import clusters_triton

    return clusters_triton.balanced(x, centroids, window, grid, lengths)


@balanced.register_fake
def _(x: Tensor, centroids: Tensor, window: int, grid: float, lengths: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty((len(x), *centroids.shape[-3:-1], window), dtype=torch.int32)


@torch.no_grad()
def sign_bits(x: Tensor, planes: Tensor) -> Tensor:
    """On which side of each plane x lies, -1 or 1: x [..., K], planes [M, K + 1] with the bias last -> [..., M]."""
    planes = planes.to(wide_type(x))
    side = wide(x) @ planes[:, :-1].T + planes[:, -1]
    return torch.where(side >= 0, 1.0, -1.0)


@torch.no_grad()
def hamming_clusters(
    bits: Tensor, clusters: int, iterations: int, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lloyd's k-means of bits [G, T, M]: the centroids' bits [G, N, M] and the labels of the tokens [G, T].

    Only each row's first `lengths` [G] tokens count, but all get a label. It starts from tokens spread evenly over the
    row, so it is deterministic, and with N = T every token is a centroid.
    A centroid takes the majority of each bit, and keeps its bit in a tie. A token takes the first of the nearest.
    """
    size = bits.shape[-2]
    spread = torch.arange(clusters, device=bits.device)
    if lengths is None:
        first, member = (spread * size // clusters).expand(*bits.shape[:-2], -1), bits
    else:
        first = spread * lengths[..., None] // clusters
        member = bits * (torch.arange(size, device=bits.device) < lengths[..., None])[..., None]
    centroids = bits.gather(-2, first[..., None].expand(*first.shape, bits.shape[-1]))
    moves = symbolic(size) or clusters < size  # otherwise every token is a centroid, and none moves
    for _ in range(iterations if moves else 0):
        label = nearest_bits(bits, centroids)
        votes = torch.zeros_like(centroids).scatter_add_(-2, label[..., None].expand_as(bits), member)
        centroids = torch.where(votes == 0, centroids, votes.sign())
    return centroids, nearest_bits(bits, centroids)


@torch.library.custom_op("subquad::half_bits", mutates_args=())
def half_bits(x: Tensor, planes: Tensor) -> Tensor:
    """`sign_bits` of x [B, T, H, K] in half precision, [B, T, H, M], with 1 to 16 more bits that are the same for all.

    Only on a GPU, in Triton.
    """
    from subquad.ops import clusters_triton

    return clusters_triton.half_bits(x, F.pad(planes, (0, 0, 0, 16 - len(planes) % 16)))


@half_bits.register_fake
def _(x: Tensor, planes: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:3], len(planes) // 16 * 16 + 16), dtype=torch.float16)


@torch.no_grad()
def hamming_codes(bits: Tensor, clusters: int, iterations: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`hamming_clusters` by kernels: bits [B, T, H, M] -> centroids' bits [B, H, N, M], labels [B, H, T], -1: padding.

    Only on a GPU, in Triton.
    """
    batch, size, heads, width = bits.shape
    count = torch.full((batch,), size, device=bits.device) if lengths is None else lengths
    first = torch.arange(clusters, device=bits.device) * count[:, None] // clusters  # [B, N]
    codes = bits.gather(1, first[..., None, None].expand(-1, -1, heads, width)).transpose(1, 2)
    padded = None if lengths is None else torch.arange(size, device=bits.device) >= lengths[:, None, None]
    turns = iterations if clusters < size else 0
    for turn in range(turns + 1):
        label = nearest(bits, codes[:, :, None], impl="triton")[:, :, 0]
        label = label if padded is None else label.masked_fill(padded, -1)
        if turn < turns:
            votes, _ = cluster_sums(bits, label, clusters)
            codes = torch.where(votes == 0, codes, votes.sign().to(bits.dtype))
    return codes.contiguous(), label


@torch.no_grad()
def nearest_bits(bits: Tensor, centroids: Tensor, used: Tensor | None = None) -> Tensor:
    """The first of the nearest centroids, among those in use [G, N]: bits [G, T, M], centroids [G, N, M] -> [G, T]."""
    agreement = bits @ centroids.transpose(-1, -2)
    if used is not None:
        agreement = agreement.masked_fill(~used[..., None, :], -torch.inf)
    return agreement.argmax(-1)


def cluster_means(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Means [G, N, K] of x [G, T, K] by label [G, T] (-1: none), zero for an empty cluster, and counts [G, N]."""
    index = torch.where(label < 0, clusters, label)[..., None]
    counted = F.pad(x, (0, 1), value=1.0)
    total = counted.new_zeros(*x.shape[:-2], clusters + 1, x.shape[-1] + 1)
    total = total.scatter_add(-2, index.expand_as(counted), counted)[..., :-1, :]
    return total[..., :-1] / total[..., -1:].clamp(min=1), total[..., -1]


@torch.no_grad()
def kmeans_step(centroids: Tensor, x: Tensor, label: Tensor, decay: float) -> Tensor:
    """Centroids [H, N, K] moved towards the means of x [H, T, K] by label [H, T]; those without tokens stay.

    With torch.distributed, the means are over the tokens of all ranks.
    """
    if choose("auto", "kmeans_step", x, unsupported(x[None])) == "triton":
        total, count = (t[0] for t in cluster_sums(x.transpose(0, 1)[None], label[None], len(centroids[0])))
        means = total / count[..., None].clamp(min=1)
    else:
        means, count = cluster_means(wide(x), label, centroids.shape[-2])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        stats = torch.cat((means * count[..., None], count[..., None]), dim=-1)
        torch.distributed.all_reduce(stats)
        means, count = stats[..., :-1] / stats[..., -1:].clamp(min=1), stats[..., -1]
    moved = decay * centroids.to(means.dtype) + (1 - decay) * means
    return torch.where(count[..., None] > 0, moved, centroids.to(means.dtype))
