"""Caches [B, C, ...] in which row b uses the first `position[b]` entries."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from subquad.graphs import capturing
from subquad.ops.additive import additive_attention
from subquad.ops.impl import Impl, choose
from subquad.ops.rotary import Turns, turned

BLOCK = 64  # entries; sums over whole vectors of a CPU add up in the same order whatever follows them


def with_room(cache: Tensor, position: Tensor, more: int) -> Tensor:
    """The cache, with room for `more` entries in every row. When it grows, its size at least doubles.

    Compiled, captured and shape-only programs cannot read `position`: there the caller must allocate the room first.
    """
    return with_room_for(cache, readable_positions(cache, position), more)


def readable_positions(cache: Tensor, position: Tensor) -> list[int] | None:
    """The positions, or None where they cannot be read."""
    traced = isinstance(position, FakeTensor) or position.is_meta or torch.compiler.is_compiling()
    if traced or capturing(cache):
        return None
    return position.tolist()  # one copy from a GPU; min() and max() would be two


def with_room_for(cache: Tensor, used: list[int] | None, more: int) -> Tensor:
    """`with_room` for positions that were read; None: the room is there."""
    if used is None:
        return cache
    size, low, high = cache.shape[1], min(used), max(used)
    if low < 0 or (more and high > size):
        raise ValueError(f"state.position ranges from {low} to {high}: this state holds {size} places")
    if high + more <= size:
        return cache
    grown = cache.new_zeros(cache.shape[0], max(high + more, 2 * size) - size, *cache.shape[2:])
    return torch.cat((cache, grown), dim=1)


def append(cache: Tensor, new: Tensor, position: Tensor, inplace: bool = False) -> Tensor:
    """The cache with new [B, T, ...] written from `position` on in each row; `inplace` changes the old cache.

    Padding in `new` is written too: it is beyond the row's new position, so nothing reads it, and the next append
    overwrites it.
    """
    used, count = readable_positions(cache, position), new.shape[1]
    old, cache = cache, with_room_for(cache, used, count)
    if used is not None and used.count(used[0]) == len(used):  # all rows at one place: copy, not scatter
        cache = cache.clone() if cache is old and not inplace else cache
        cache[:, used[0] : used[0] + count] = new
        return cache
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]  # [B, 1]
    slots = position[:, None] + torch.arange(new.shape[1], device=cache.device)  # [B, T]
    write = cache.index_put_ if inplace else cache.index_put
    return write((rows, slots), new.to(cache.dtype))


def cached_attention(
    q_t: Tensor,
    k: Tensor,
    v: Tensor,
    count: Tensor,
    *,
    scale: float | None = None,
    score: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention of one query per row to the first `count` [B] entries of a cache, all at least 1.

    q_t [B, H, K], k [B, C, G, K], v [B, C, G, V] -> o [B, H, V]. It never waits for a GPU. G divides H: with grouped
    queries each key head serves H/G query heads, one after the other.
    With `score` [H, K] attention is additive: the scores are score·tanh(q + k), by default unscaled, and G is H.
    """
    scale = (q_t.shape[-1] ** -0.5 if score is None else 1.0) if scale is None else scale
    k, v = k.to(q_t.dtype), v.to(q_t.dtype)
    wide = f"heads wider than 256: {k.shape[-1]} and {v.shape[-1]}" if max(k.shape[-1], v.shape[-1]) > 256 else None
    fused = choose(impl, "cached_attention", q_t, "float64" if q_t.dtype == torch.float64 else wide) == "triton"
    gradients = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q_t, k, v, score)
    )  # rare in decoding: plain torch
    if gradients or (not fused and q_t.device.type != "cpu"):
        return _masked(q_t, k, v, count, scale, score)
    run = torch.ops.subquad.cached_attention if torch.compiler.is_compiling() else _attend
    return run(q_t, k, v, count, scale, score, fused)


def cached_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    turns: Turns | None = None,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """One token at `position` [B]: its key and value are written into the caches, and its query attends to all.

    q_t, k_t [B, H, K], v_t [B, H, V], turned first by `turns` of the positions where given; k [B, C, H, K],
    v [B, C, H, V] -> o [B, H, V] and the caches, which are changed in place, or new ones where they had to grow.
    """
    scale = q_t.shape[-1] ** -0.5 if scale is None else scale
    wide = f"heads wider than 256: {k.shape[-1]} and {v.shape[-1]}" if max(k.shape[-1], v.shape[-1]) > 256 else None
    kinds = {x.dtype for x in (q_t, k_t, v_t, k, v)}
    mixed = f"one type for all but float64, not {', '.join(map(str, kinds))}"
    reason = mixed if len(kinds) > 1 or torch.float64 in kinds else wide
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_t, k_t, v_t, k, v)):
        reason = "it has no gradients"
    if choose(impl, "cached_attention_step", q_t, reason) == "torch":
        if turns is not None:
            q_t, k_t = (turned(x[:, None], turns)[:, 0] for x in (q_t, k_t))
        k = append(k, k_t[:, None], position, inplace=True)
        v = append(v, v_t[:, None], position, inplace=True)
        return cached_attention(q_t, k, v, position + 1, scale=scale, impl=impl), k, v
    used = readable_positions(k, position)
    k, v = with_room_for(k, used, 1), with_room_for(v, used, 1)
    cos, sin = (None, None) if turns is None else turns
    q_t, k_t, v_t = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_t, k_t, v_t))
    return torch.ops.subquad.cached_attention_step(q_t, k_t, v_t, k, v, position, cos, sin, scale), k, v


def _masked(q_t: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, score: Tensor | None) -> Tensor:
    if score is not None:
        return additive_attention(q_t[:, None], k, v, count[:, None], score * scale, impl="torch")[:, 0]
    seen = torch.arange(k.shape[1], device=k.device) < count[:, None]  # [B, C]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, G, C, K]
    o = F.scaled_dot_product_attention(_by_group(q_t, k), k, v, seen[:, None, None], scale=scale)
    return o.flatten(1, 2)


def _by_group(q_t: Tensor, k: Tensor) -> Tensor:
    """q_t [B, H, K] -> [B, G, H/G, K]: the queries of a group are like several queries of one head."""
    return q_t.unflatten(1, (k.shape[1], -1))


def _attend(
    q_t: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, score: Tensor | None, fused: bool
) -> Tensor:
    if fused:
        from subquad.ops.cache_triton import attend

        return attend(q_t, k, v, count, scale, score=score)
    high = int(count.max())
    if len(count) > 1 or score is not None:
        # always masked and in whole blocks: else a row's rounding would depend on how long the other rows are
        high = -(-high // BLOCK) * BLOCK
        return _masked(q_t, k[:, :high], v[:, :high], count, scale, score)
    k, v = k[:, :high].transpose(1, 2), v[:, :high].transpose(1, 2)
    return F.scaled_dot_product_attention(_by_group(q_t, k), k, v, scale=scale).flatten(1, 2).contiguous()


# An operator, so that a compiled program too reads only the part of the cache that is in use
_operator = torch.library.custom_op("subquad::cached_attention", _attend, mutates_args=())


@_operator.register_fake
def _(q_t: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return q_t.new_empty(*q_t.shape[:2], v.shape[-1])


torch.library.define(
    "subquad::cached_attention_step",
    "(Tensor q_t, Tensor k_t, Tensor v_t, Tensor(a!) k, Tensor(b!) v, Tensor position, Tensor? cos, Tensor? sin,"
    " float scale) -> Tensor",
)


@torch.library.impl("subquad::cached_attention_step", "CompositeExplicitAutograd")
def _(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, k: Tensor, v: Tensor, position: Tensor, cos: Tensor | None,
    sin: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    from subquad.ops.cache_triton import attend

    by = None if cos is None or sin is None else Turns(cos, sin)
    return attend(q_t, k, v, position, scale, (k_t, v_t), by).contiguous()


@torch.library.register_fake("subquad::cached_attention_step")
def _(q_t: Tensor, k_t: Tensor, v_t: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return q_t.new_empty(*q_t.shape[:2], v_t.shape[-1])
