"""Attention inside buckets: put the tokens of each bucket into slots of C places, and attend within small dense blocks.

A token in bucket -1, such as padding, is left out. An index of -1 means that a place is empty.
G stands for any leading dimensions, W for the keys that one slot sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.lengths import more_blocks, padding, symbolic
from subquad.ops.precision import wide


class Slots(NamedTuple):
    """The queries of each slot, and the keys that they may read."""

    query: Tensor  # [G, N, C] tokens
    key: Tensor  # [G, N, W] tokens: those of the slot itself, then of its neighbours
    place: Tensor  # [G, T] the place of a token, n·C + c; -1 if it is left out


def rank_slots(bucket: Tensor, buckets: int, chunk: int) -> Slots:
    """Gives each bucket its own slots, in the order of positions; a slot sees itself and the slot before.

    bucket [G, T]. A token's slot depends on its rank among the earlier tokens of its bucket, not on later tokens.
    The slot before a bucket's first slot belongs to another bucket: `same_bucket` hides it.
    """
    rank, count = ranks(bucket, buckets)
    slots = most_slots(bucket.shape[-1], buckets, chunk)
    needed = (count + chunk - 1) // chunk  # [G, buckets]
    first = needed.cumsum(-1) - needed
    place = first.gather(-1, bucket.clamp(min=0)) * chunk + rank
    return _with_neighbours(place, bucket >= 0, slots, chunk, ahead=False)


def most_slots(size: int, buckets: int, chunk: int) -> int:
    """The most slots that `rank_slots` can need for `size` tokens, whatever their buckets."""
    if symbolic(size):
        return more_blocks(size, chunk, buckets + 2)
    return min(size, size // chunk + buckets)


def slot_pairs(size: int, buckets: int, chunk: int) -> int:
    """The number of pairs that the slots of `rank_slots` compute; if it exceeds size², all pairs are cheaper."""
    return most_slots(size, buckets, chunk) * 2 * min(chunk, size) ** 2


def sorted_slots(bucket: Tensor, chunk: int, ahead: bool = False) -> Slots:
    """Sorts all tokens by (bucket, position) and cuts them into slots of C; a slot sees itself and the slot before.

    bucket [G, T]. With `ahead` it sees the slot after too. All slots are full, so it is cheaper than `rank_slots`, but
    a token's slot depends on all other tokens.
    """
    size = bucket.shape[-1]
    slots = (size + padding(size, chunk)) // chunk
    return _with_neighbours(sorted_places(bucket), bucket >= 0, slots, chunk, ahead)


def sorted_places(bucket: Tensor) -> Tensor:
    """The place of each token when all are sorted by (bucket, position), padding last: [G, T]"""
    order = torch.where(bucket < 0, torch.iinfo(bucket.dtype).max, bucket).sort(dim=-1, stable=True).indices
    counting = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, counting)


def asking_slots(slots: Slots, bucket: Tensor, asked: Tensor) -> Slots:
    """Slots for queries that read another bucket than their own token's: query t reads bucket `asked[t]` [G, T].

    It sees the same keys as the slot of the newest token up to t in that bucket. Queries that see the same keys are
    put into the same slots. A query that asks for -1 reads nothing.
    """
    size, (*_, held, chunk) = bucket.shape[-1], slots.query.shape
    last = torch.where(bucket < 0, 1 << 31, bucket)
    here = torch.arange(size, device=bucket.device)
    ordered, order = (last * size + here).sort(dim=-1)
    newest = torch.searchsorted(ordered.contiguous(), (asked * size + here).contiguous(), right=True) - 1
    newest = order.gather(-1, newest.clamp(min=0))
    known = (asked >= 0) & (bucket.gather(-1, newest) == asked) & (newest <= here)
    slot = torch.where(known, slots.place.gather(-1, newest) // chunk, -1)
    sitting = rank_slots(slot, held, chunk)
    key = lookup(slot, sitting.query[..., :1], 0).expand(*sitting.query.shape[:-1], slots.key.shape[-1])
    return Slots(sitting.query, slots.key.gather(-2, key), sitting.place)


def same_bucket(bucket: Tensor, slots: Slots, asked: Tensor | None = None) -> Tensor:
    """Whether a key is in the query's bucket, or in the bucket that it asked for: [G, N, C, W]."""
    asking = lookup(bucket if asked is None else asked, slots.query, -1)
    return asking[..., :, None] == lookup(bucket, slots.key, -2)[..., None, :]


def lookup(values: Tensor, tokens: Tensor, empty: int) -> Tensor:
    """The values [G, S] of the tokens [G, N, C], and `empty` for empty places."""
    values = values.gather(-1, tokens.clamp(min=0).flatten(-2)).view(tokens.shape)
    return values.masked_fill(tokens < 0, empty)


def rounds_together(codes: Tensor, query: Tensor, key: Tensor, ahead: bool = False) -> Tensor:
    """The number of rounds in which a query sees a key, [G, R, N, C, W]; at least 1, also for pairs that never meet.

    codes [G, R, S]: the slot of each token in each round, numbered so that only neighbours in one bucket differ by 1.
    """
    times = torch.zeros(1, dtype=torch.int8, device=codes.device)
    for code in codes.unbind(-2):
        of_query, of_key = (lookup(code, t.flatten(-3, -2), -1).view(t.shape) for t in (query, key))
        gap = of_query[..., :, None] - of_key[..., None, :]
        times = times + ((gap <= 1) & (gap >= (-1 if ahead else 0)))
    return times.clamp(min=1)


def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, visible: Tensor, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention in every slot: outputs [B, H, N, C, V], and the log-sum-exp of the scores [B, H, N, C].

    q [B, T, H, K], k and v [B, S, H, ·]; query [B, H, N, C] and key [B, H, N, W] index tokens; visible [B, H, N, C, W];
    scores are q·k + bias. A query that sees nothing gets zeros and the smallest finite log-sum-exp.
    """
    scores = wide(take(q, query) @ take(k, key).mT)  # [B, H, N, C, W]
    seen = visible.any(-1)
    hidden = ~visible & seen[..., None]  # rows that see nothing stay finite and become zeros below
    scores = (scores if bias is None else scores + bias).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.nn.functional.dropout((scores - lse[..., None]).exp(), dropout)
    o = weights.to(v.dtype) @ take(v, key)  # [B, H, N, C, V]
    return o.masked_fill(~seen[..., None], 0), lse.masked_fill(~seen, torch.finfo(lse.dtype).min)


def pair_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Softmax attention over all pairs, for when slots would be mostly empty: q, k, v [B, T, H, ·] -> [B, T, H, V].

    visible [B, H, T, T]; scores are q·k + bias. A query that sees nothing gets zeros.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = wide(q @ k.mT)
    seen = visible.any(-1, keepdim=True)
    scores = (scores if bias is None else scores + bias).masked_fill(~visible & seen, -torch.inf)
    weights = torch.nn.functional.dropout(scores.softmax(-1) * seen, dropout)
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens by index: x [B, T, H, D], index [B, H, ...] -> [B, H, ..., D]; -1 gives an arbitrary token."""
    batch, size, heads, width = x.shape
    row = torch.arange(batch, device=x.device).view(-1, *[1] * (index.ndim - 1))
    head = torch.arange(heads, device=x.device).view(1, -1, *[1] * (index.ndim - 2))
    # selecting whole rows is much faster than gather, and so is its gradient
    flat = (row * size + index.clamp(min=0)) * heads + head
    return x.reshape(-1, width).index_select(0, flat.flatten()).view(*index.shape, width)


def give_back(x: Tensor, place: Tensor) -> Tensor:
    """Moves results from places to tokens: x [B, H, N, C, D], place [B, H, ...] -> [B, H, ..., D]; zeros at -1."""
    group = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], *[1] * (place.ndim - 2))
    flat = group * (x.shape[2] * x.shape[3]) + place.clamp(min=0)
    tokens = x.flatten(0, 3).index_select(0, flat.flatten()).view(*place.shape, -1)
    return tokens.masked_fill((place < 0)[..., None], 0)


class Lists(NamedTuple):
    """The state of decoding: the newest tokens of every bucket, which are all that later tokens can see."""

    members: Tensor  # [G, buckets, 2C] positions; the token of rank r is at r mod 2C
    total: Tensor  # [G, buckets] tokens so far


def empty_lists(shape: tuple[int, ...], buckets: int, chunk: int, device: torch.device) -> Lists:
    members = torch.full((*shape, buckets, 2 * chunk), -1, dtype=torch.int32, device=device)
    return Lists(members, torch.zeros(*shape, buckets, dtype=torch.int64, device=device))


def admit(lists: Lists, bucket: Tensor, position: Tensor) -> Lists:
    """New lists with the tokens of these buckets [G, T] at these positions [G, T], in order."""
    buckets, size = lists.members.shape[-2:]
    rank, more = ranks(bucket, buckets)
    count = lists.total + more
    own = bucket.clamp(min=0)
    rank = rank + lists.total.gather(-1, own)
    newest = (bucket >= 0) & (rank >= count.gather(-1, own) - size)
    spare = buckets * size  # older tokens are written here and dropped
    slot = torch.where(newest, own * size + rank % size, spare)
    flat = torch.nn.functional.pad(lists.members.flatten(-2), (0, 1))
    flat = flat.scatter(-1, slot, position.expand(bucket.shape).to(flat.dtype))
    return Lists(flat[..., :-1].unflatten(-1, (buckets, size)), count)


def recall(lists: Lists) -> Tensor:
    """The positions in the chunk of each bucket's newest token and in the chunk before, in order: [G, buckets, 2C]."""
    size = lists.members.shape[-1]
    chunk = size // 2
    start = ((lists.total - 1).div(chunk, rounding_mode="floor") - 1) * chunk
    rank = start[..., None] + torch.arange(size, device=start.device)
    positions = lists.members.gather(-1, rank % size).long()
    return positions.masked_fill((rank < 0) | (rank >= lists.total[..., None]), -1)


def in_reach(lists: Lists, bucket: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Buckets and positions of the listed tokens, then of new ones in `bucket` [B, ..., T] from `start` [B] on."""
    earlier = recall(lists)
    own = torch.arange(earlier.shape[-2], device=bucket.device)[:, None]
    new = start.view(-1, *[1] * (bucket.ndim - 1)) + torch.arange(bucket.shape[-1], device=bucket.device)
    buckets = torch.cat((torch.where(earlier < 0, -1, own).flatten(-2), bucket), dim=-1)
    return buckets, torch.cat((earlier.flatten(-2), new.expand_as(bucket)), dim=-1)


@torch.library.custom_op("subquad::bucket_step", mutates_args=("keys", "values", "members", "total"))
def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, members: Tensor, total: Tensor, asked: Tensor,
    bucket: Tensor, position: Tensor, scale: float, apart: bool,
) -> Tensor:  # fmt: skip
    """One token of each row enters the caches and the lists of its buckets, in place, and attends: [B, H, V].

    q, k, v [B, H, ·]; caches [B, C, H, ·]; lists as in `Lists` [B, H, R, ...]; bucket, and the one that is read, asked
    [B, H, R]; position [B]. `apart`: a token reads itself only if it sees nothing else. Only on a GPU, in Triton.
    """
    from subquad.ops import buckets_triton

    return buckets_triton.step(q, k, v, keys, values, members, total, asked, bucket, position, scale, apart)


@step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def ranks(bucket: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Each token's rank in its bucket [G, T], and the size of each bucket [G, buckets]."""
    size = bucket.shape[-1]
    last = torch.where(bucket < 0, buckets, bucket)
    ordered, order = last.sort(dim=-1, stable=True)
    edges = torch.arange(buckets + 1, device=bucket.device).expand(*bucket.shape[:-1], -1).contiguous()
    start = torch.searchsorted(ordered.contiguous(), edges)  # [G, buckets + 1]
    rank = torch.arange(size, device=bucket.device) - start.gather(-1, ordered)
    return torch.empty_like(rank).scatter_(-1, order, rank), start.diff(dim=-1)


def _with_neighbours(place: Tensor, member: Tensor, slots: int, chunk: int, ahead: bool) -> Slots:
    """The slots, given the place of each token, and for each slot the keys of its neighbours."""
    size = place.shape[-1]
    spare = slots * chunk
    tokens = torch.arange(size, device=place.device).expand_as(place)
    held = torch.full((*place.shape[:-1], spare + 1), -1, device=place.device)
    held = held.scatter_(-1, torch.where(member, place, spare), tokens)[..., :-1]
    query = held.unflatten(-1, (slots, chunk))  # [G, N, C]
    none = torch.full_like(query[..., :1, :], -1)
    seen = [query, torch.cat((none, query[..., :-1, :]), dim=-2)]
    if ahead:
        seen.append(torch.cat((query[..., 1:, :], none), dim=-2))
    return Slots(query, torch.cat(seen, dim=-1), torch.where(member, place, -1))
