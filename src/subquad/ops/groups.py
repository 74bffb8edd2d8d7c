"""Causal attention through groups of earlier queries: what a query reads of the blocks before its own.

The groups of a query are those of its level: queries of the blocks 2ⁿ .. 2ⁿ⁺¹ - 1 have the groups that were formed from
all queries before. A group's centroid attends to all keys of the blocks before the query's.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.clusters import cluster_sums, hamming_codes, nearest

SPARE = -200.0  # the last bit of a group without members, so that it is nobody's nearest


@torch.no_grad()
def running_groups(bits: Tensor, clusters: int, iterations: int, block: int) -> tuple[list[Tensor], Tensor]:
    """For each level the labels of the queries that form its groups; and of each query the label in its own level.

    bits [B, T, H, M] as `sign_bits`, the last one the same for all. -> [B, H, start] for each level, [B, H, T].
    """
    size, start, formed, own = bits.shape[1], block, [], []
    while start < size:
        codes, label = hamming_codes(bits[:, :start], clusters, iterations)
        count = cluster_sums(bits[:, :start, :, -16:], label, clusters)[1]
        codes[..., -1] = torch.where(count > 0, 1.0, SPARE).to(codes.dtype)
        formed.append(label)
        own.append(nearest(bits[:, start : 2 * start], codes[:, :, None])[:, :, 0])
        start *= 2
    none = torch.zeros(len(bits), bits.shape[2], min(block, size), dtype=torch.int32, device=bits.device)
    return formed, torch.cat((none, *own), dim=-1)


def read_groups(
    q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, label: Tensor, block: int, topk: int, scale: float
) -> tuple[Tensor, Tensor]:
    """What every query gets of the blocks before its own [B, T, H, V], and the log of its exp-mass [B, T, H].

    q, k, v [B, T, H, ·], centroids [levels, B, H, N, K], label [B, H, T]. With `topk`, a query attends to its group's
    best keys by itself; 0: to none. Only on a GPU, in Triton; sums of gradients are not in a fixed order.
    """
    blocks = torch.arange(-(-q.shape[1] // block), device=q.device)
    levels = torch.searchsorted(2 ** torch.arange(1, 31, device=q.device), blocks, right=True, out_int32=True)
    return torch.ops.subquad.read_groups(q, k, v, centroids, label, levels, block, topk, scale)[:2]


SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor centroids, Tensor label, Tensor levels, int block, int topk, float scale"


def _forward(*given: Any) -> tuple[Tensor, ...]:
    from subquad.ops import groups_triton

    return groups_triton.read(*given)


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, label: Tensor, levels: Tensor, block: int, topk: int, *_: float  # noqa: ARG001
) -> tuple[Tensor, ...]:  # fmt: skip
    (batch, size, heads, width), exact = q.shape, torch.float32
    shape = batch, heads, len(levels), centroids.shape[3]
    lists = q.new_empty((*shape, max(topk, 1)), dtype=torch.int32)
    lse, norm = q.new_empty(shape, dtype=exact), q.new_empty((batch, heads, size), dtype=exact)
    return v.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=exact), v.new_empty((*shape, width)), lse, lists, norm


def _back(*given: Any) -> tuple[Tensor, ...]:
    from subquad.ops import groups_triton

    return groups_triton.read_back(*given)


def _back_shapes(*given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[6:10])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:], *inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, do: Tensor, dtotal: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.subquad.read_groups_back(do, dtotal, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None for _ in range(5))


_operator = torch.library.custom_op(
    "subquad::read_groups", _forward, mutates_args=(), schema=f"({SCHEMA}) -> ({', '.join(['Tensor'] * 6)})"
)
_operator.register_fake(_shapes)
_operator.register_autograd(_backward, setup_context=_save)
torch.library.custom_op(
    "subquad::read_groups_back",
    _back,
    mutates_args=(),
    schema=f"(Tensor do, Tensor dtotal, Tensor o, Tensor lse, Tensor lists, Tensor norm, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
).register_fake(_back_shapes)
