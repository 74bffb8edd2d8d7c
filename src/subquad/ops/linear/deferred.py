"""The step of linear attention that reads its sums at every token and writes them at every fourth.

Decoding waits for memory: a step reads and writes S, [K, V] a head, for a handful of products. Here the newest keys and
values wait beside S, o = φ(q)(S + Σ φ(kⱼ)vⱼᵀ) / (φ(q)z + Σ φ(q)φ(kⱼ)) counts them in, and the fourth token adds all of
them to S and z, one by one: both are then, bit for bit, what four single steps would have left.

Without a queue the same kernel writes at every token. It also turns q and k by their rotary positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.feature_maps import FEATURE_MAPS, FUSED
from subquad.ops.impl import Impl, choose
from subquad.ops.linear import chunked
from subquad.ops.linear.spec import Spec
from subquad.ops.precision import uncast
from subquad.ops.rotary import Turns, turned

GROUP = 4  # tokens between two writes, a power of two; 8 saves 4% more traffic and costs more instructions than that


class Queue(NamedTuple):
    """Keys and values that the sums do not hold yet, of tokens from `start` on."""

    keys: Tensor  # [B, GROUP - 1, H, K] before the feature map
    values: Tensor  # [B, GROUP - 1, H, V]
    start: Tensor  # [B], a position at which the sums held everything


def make_queue(like: Tensor, position: Tensor, heads: int, width_k: int, width_v: int) -> Queue:
    """An empty queue in the type of `like`; what is not written yet is never read."""
    shape = len(position), GROUP - 1, heads
    return Queue(like.new_empty(*shape, width_k), like.new_empty(*shape, width_v), position.clone())


def can_defer(like: Tensor, feature_map: object, impl: Impl) -> bool:
    """Whether the fused step serves this kind of call; the torch path gains nothing by waiting."""
    known = isinstance(feature_map, str) and feature_map in FUSED and like.dtype != torch.float64
    return known and choose(impl, "linear_attention_step", like) == "triton"


def linear_attention_step_in_place(
    both: Tensor,
    v_t: Tensor,
    s: Tensor,
    z: Tensor,
    queue: Queue | None,
    position: Tensor,
    spec: Spec,
    turns: Turns | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """One token at `position` [B]: q and k, both [B, 2·H, K], v_t [B, H, V] -> o [B, H, V]; s and z are changed.

    With a queue, which the fused step alone serves, s and z are changed later. `turns` of the positions turn q and k.
    """
    fused = can_defer(both, spec.feature_map, impl)
    if fused or queue is not None:
        q_t, k_t = both.chunk(2, dim=1)
        return deferred_linear_attention_step(q_t, k_t, v_t, s, z, queue, position, spec, turns)
    both = both if turns is None else turned(both[:, None], turns)[:, 0]
    q, k = FEATURE_MAPS[spec.feature_map].apply(both.to(s.dtype)).chunk(2, dim=1)  # [B, H, K]
    s.addcmul_(k[..., None], v_t[..., None, :].to(s.dtype))
    z.add_(k)
    with uncast(q):
        # bmm itself: a product with @ takes twice as long on a CPU
        o = torch.bmm(q.flatten(0, 1)[:, None], s.flatten(0, 1)).view(v_t.shape)  # [B, H, V]
    if spec.normalize:
        o = o / chunked.divisor_of((q * z).sum(-1, keepdim=True), spec.signed, spec.eps)
    return chunked.saturate(o, v_t.dtype).to(v_t.dtype)


def deferred_linear_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    s: Tensor,
    z: Tensor,
    queue: Queue | None,
    position: Tensor,
    spec: Spec,
    turns: Turns | None = None,
) -> Tensor:
    """One token at `position` [B]: q_t, k_t [B, H, K], v_t [B, H, V] -> o [B, H, V]; s, z and the queue are changed.

    `turns` of the positions, for one token a row: q_t and k_t are turned first.
    """
    q_t, k_t, v_t = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_t, k_t, v_t))
    keys, values, start = queue or (None, None, position)
    cos, sin = (None, None) if turns is None else turns
    return torch.ops.subquad.linear_attention_step_deferred(
        q_t, k_t, v_t, s, z, keys, values, start, position, cos, sin, *spec
    )


def settle(s: Tensor, z: Tensor, queue: Queue, count: int, feature_map: str = "elu+1") -> None:
    """Add the `count` tokens that wait, the same number in every row, to s and z."""
    for j in range(count):
        k = FEATURE_MAPS[feature_map].apply(queue.keys[:, j].to(s.dtype))  # [B, H, K]
        s.addcmul_(k[..., None], queue.values[:, j, :, None].to(s.dtype))
        z.add_(k)
