"""Attention over an index: tokens are put in order by bucket, and each query reads the neighbours of its place.

Every token has a code in each round. A query reads the keys whose code is its own or one less (with `ahead`, also one
more), in any of the rounds: softmax over the union. In the order of the codes those keys are a short range.

G stands for B·H·R rows of the index, R for rounds. Places count in the order, tokens in the sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.buckets import pair_attention
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import symbolic

TILE = 64  # places of one program


class Order(NamedTuple):
    """Where queries and keys stand. Every token stands at one place in every round; without codes a token may stand at
    many places, or at none, and -1 is an empty place."""

    query: Tensor  # int32 [G, P], the tokens in order
    key: Tensor  # int32 [G, S]
    query_code: Tensor | None  # int32 [B, H, T, R]; None: a query reads all of the range of its tile
    key_code: Tensor | None  # int32 [B, H, S, R]
    queries: Tensor  # int32 [G, N, 4]: for each tile its first place and its end, and those of the keys that it reads
    keys: Tensor  # int32 [G, M, 4]: for each tile of keys, the same with the queries that read it


class Sorted(NamedTuple):
    token: Tensor  # int32 [G, T], by (cell, token)
    cell: Tensor  # int32 [G, T] of each place
    start: Tensor  # int32 [G, cells + 1], the first place of each cell


def by_rank(bucket: Tensor, buckets: int, chunk: int) -> Order:
    """Chunks of each bucket by rank: causal, since a token's rank does not depend on later ones. bucket [B, H, R, T]"""
    here = _sort(bucket, buckets)
    code = _rank_codes(here, chunk)
    tiles = _tiles(here.start, bucket.shape[-1])
    by_token = _by_token(code, here.token, bucket.shape)
    queries, keys = (_ranges(code, tiles, code, *reach, one_order=True) for reach in ((1, 0), (0, 1)))
    return Order(here.token, here.token, by_token, by_token, queries, keys)


def by_place(bucket: Tensor, buckets: int, chunk: int, ahead: bool) -> Order:
    """Chunks of the whole order by (bucket, token), in which a query reads its own bucket. bucket [B, H, R, T]"""
    size, up, here = bucket.shape[-1], int(ahead), _sort(bucket, buckets)
    place = torch.arange(size, dtype=torch.int32, device=bucket.device)
    code = here.cell * (size // chunk + 3) + place // chunk
    whole = torch.arange(0, size + 1, size, dtype=torch.int32, device=bucket.device)
    tiles = _tiles(whole.expand(len(code), 2), size)
    by_token = _by_token(code, here.token, bucket.shape)
    queries, keys = (_ranges(code, tiles, code, *reach, one_order=not ahead) for reach in ((1, up), (up, 1)))
    return Order(here.token, here.token, by_token, by_token, queries, keys)


def by_asking(bucket: Tensor, asked: Tensor, buckets: int, chunk: int) -> Order:
    """As `by_rank`, for queries that read another bucket than their own token's: [B, H, 1, T] both. A query reads up to
    the newest chunk that the bucket `asked` has at its position."""
    size, keys, queries = bucket.shape[-1], _sort(bucket, buckets), _sort(asked, buckets)
    key_code = _rank_codes(keys, chunk)
    packed = _packed(keys.cell, keys.token, buckets + 1)
    wanted = _packed(queries.cell, queries.token, buckets + 1)
    # a flat search: places of the row before, and of cells before in this row, are subtracted again
    count = torch.searchsorted(packed.flatten(), wanted, right=True, out_int32=True)
    row = torch.arange(len(packed), dtype=torch.int32, device=count.device)[:, None] * size
    count = count - row - keys.start.gather(-1, queries.cell.long())
    newest = (count + (chunk - 1)) // chunk - 1  # -1: there is none
    query_code = queries.cell * (size // chunk + 3) + newest
    return Order(
        queries.token,
        keys.token,
        _by_token(query_code, queries.token, asked.shape),
        _by_token(key_code, keys.token, bucket.shape),
        _ranges(query_code, _tiles(queries.start, size), key_code, 1, 0),
        _ranges(key_code, _tiles(keys.start, size), query_code, 0, 1),
    )


def by_lists(queries: Tensor, keys: Tensor) -> Order:
    """Lists of tokens that attend to each other, -1 for none: queries [B, H, N, w] read keys [B, H, N, x]."""
    (batch, heads, lists, width), other, device = queries.shape, keys.shape[3], queries.device
    query, key = (t.to(torch.int32).flatten(2).flatten(0, 1).contiguous() for t in (queries, keys))
    of_queries, of_keys = (_table(batch * heads, lists, *n, device) for n in ((width, other), (other, width)))
    return Order(query, key, None, None, of_queries, of_keys)


def by_blocks(shape: Sequence[int], blocks: int, size: int, first: bool, device: torch.device) -> Order:
    """Block n of the queries reads block n of the keys' first half and block n of their second half.

    shape (B, H). Without `first`, the first block of the first half is hidden. Keys are blocks·size twice.
    """
    at = torch.arange(blocks * size, dtype=torch.int32, device=device)
    keys = torch.stack((at.view(blocks, size), at.view(blocks, size) + blocks * size), 1).flatten()
    code = at // size * 3
    hidden = code if first else torch.where(at < size, -9, code)
    rows = shape[0] * shape[1]
    query, key = (t.expand(rows, -1).contiguous() for t in (at, keys))
    mine, its = (t.expand(*shape, -1)[..., None].contiguous() for t in (code, torch.cat((hidden, code))))
    of_queries, of_keys = (_table(rows, blocks, *n, device) for n in ((size, 2 * size), (2 * size, size)))
    return Order(query, key, mine, its, of_queries, of_keys)


def _table(rows: int, lists: int, own: int, other: int, device: torch.device) -> Tensor:
    """Tiles of lists of `own` places, each with the list of `other` places that it reads: [rows, N, 4]."""
    per = -(-own // TILE)
    n = torch.arange(lists * per, dtype=torch.int32, device=device)
    at, first = n // per, n // per * own + n % per * TILE
    stop = torch.minimum(first + TILE, (at + 1) * own)
    return torch.stack((first, stop, at * other, (at + 1) * other), -1).expand(rows, -1, -1).contiguous()


def to_lists(label: Tensor, keys: Tensor) -> Order:
    """Queries in order of their `label` [B, H, T] read the list of that label: keys [B, H, N, w], -1 for none."""
    here, (size, device), (lists, width) = (
        _sort(label[:, :, None], keys.shape[2]),
        (label.shape[-1], label.device),
        keys.shape[2:],
    )
    tiles = _tiles(here.start, size)
    cell = _at(here.cell, tiles[0].clamp(max=size - 1))
    used = (tiles[1] > tiles[0]) & (cell < lists)  # padding reads nothing
    lo = torch.where(used, cell * width, 0)
    queries = torch.stack((*tiles, lo, torch.where(used, lo + width, 0)), -1)
    per = -(-width // TILE)
    n = torch.arange(lists * per, dtype=torch.int32, device=device)
    at, first = n // per, n // per * width + n % per * TILE
    own = torch.stack((first, torch.minimum(first + TILE, (at + 1) * width)), -1).expand(len(lo), -1, -1)
    table = torch.cat((own, here.start[:, at, None], here.start[:, at + 1, None]), -1)
    tokens = keys.to(torch.int32).flatten(2).flatten(0, 1)
    return Order(here.token, tokens.contiguous(), None, None, queries.contiguous(), table.contiguous())


def _packed(cell: Tensor, token: Tensor, cells: int) -> Tensor:
    """One number for (row, cell, token), in that order."""
    rows, size = cell.shape
    dtype = torch.int32 if rows * cells * size < 2**31 else torch.int64
    row = torch.arange(rows, dtype=dtype, device=cell.device)[:, None]
    return (row * cells + cell) * size + token


def _sort(bucket: Tensor, buckets: int) -> Sorted:
    """Sort the tokens of every row of [B, H, R, T]; -1, which is padding, comes last. One sort of plain integers."""
    size, cells, device = bucket.shape[-1], buckets + 1, bucket.device
    cell = torch.where(bucket < 0, buckets, bucket).to(torch.int32).flatten(0, 2)  # [G, T]
    packed = _packed(cell, torch.arange(size, dtype=torch.int32, device=device), cells)
    ordered = packed.flatten().sort().values.view_as(packed)
    row = torch.arange(len(packed), dtype=packed.dtype, device=device)[:, None]
    edges = (row * cells + torch.arange(cells + 1, dtype=packed.dtype, device=device)) * size
    start = torch.searchsorted(ordered.flatten(), edges, out_int32=True) - (row * size).to(torch.int32)
    both = ordered // size
    return Sorted((ordered - both * size).to(torch.int32), (both - row * cells).to(torch.int32), start)


def _rank_codes(here: Sorted, chunk: int) -> Tensor:
    """Codes of places, [G, T]. Codes of two buckets are at least 3 apart."""
    size = here.cell.shape[-1]
    rank = torch.arange(size, dtype=torch.int32, device=here.cell.device) - _at(here.start, here.cell)
    return here.cell * (size // chunk + 3) + rank // chunk


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.long())


def _by_token(code: Tensor, token: Tensor, shape: Sequence[int]) -> Tensor:
    """Codes of places [G, T] as codes of tokens [B, H, T, R], so that those of one token are adjacent."""
    _, _, rounds, size = shape
    row = torch.arange(len(code), device=code.device)[:, None]
    flat = (row // rounds * size + token) * rounds + row % rounds
    return torch.empty_like(code).flatten().scatter_(0, flat.flatten(), code.flatten()).view(*shape[:2], size, rounds)


def _tiles(start: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cut every cell into tiles: the first places and the ends, [G, N]. Spare tiles are empty."""
    cells = start.shape[-1] - 1
    needed = (start.diff(dim=-1) + (TILE - 1)) // TILE
    stop = needed.cumsum(-1, dtype=torch.int32)
    n = torch.arange(min(size, size // TILE + cells), dtype=torch.int32, device=start.device).expand(len(start), -1)
    cell = torch.searchsorted(stop, n.contiguous(), right=True).clamp(max=cells - 1)
    first = start.gather(-1, cell) + (n - (stop - needed).gather(-1, cell)) * TILE
    end = torch.minimum(first + TILE, start.gather(-1, cell + 1))
    return first.clamp(max=size), torch.maximum(end, first).clamp(max=size)


def _ranges(
    code: Tensor, tiles: tuple[Tensor, Tensor], other: Tensor, down: int, up: int, one_order: bool = False
) -> Tensor:
    """The tiles of places with these codes, and the places of the others from `down` below to `up` above: [G, N, 4].

    `one_order`: both sides have one order, and later keys are hidden.
    """
    (first, stop), last = tiles, code.shape[-1] - 1
    lo = torch.searchsorted(other, _at(code, first.clamp(max=last)) - down, out_int32=True)
    hi = torch.searchsorted(other, _at(code, (stop - 1).clamp(min=0)) + up, right=True, out_int32=True)
    if one_order:
        lo, hi = (lo, torch.minimum(hi, stop)) if down else (torch.maximum(lo, first), hi)
    hi = torch.where(first < stop, hi, lo)
    return torch.stack((first, stop, lo, hi), -1)


class Rule(NamedTuple):
    """What pairs are visible, and how they score. The operator takes these fields one by one."""

    ahead: bool = False  # a query also reads codes one above its own
    causal: bool = False  # no key after the query
    apart: bool = False  # a token reads itself only if it sees nothing else
    unit: bool = False  # keys count as vectors of length 1
    once: bool = False  # no token stands at two places, although there are no codes
    scale: float = 1.0


def ordered_attention(
    q: Tensor, k: Tensor | None, v: Tensor, order: Order, rule: Rule, *, impl: Impl = "auto"
) -> Tensor:
    """softmax(scale·q·kᵀ) v over the pairs that meet in `order`: q [B, T, H, D], k, v [B, S, H, D] -> as q.

    `k` None: keys are the queries. Where keys are more, the queries are the last of them. A query that sees nothing
    gives zeros, or its own value with `apart`. In lists a query that stands at several places gets the mean of its
    results, without those that see nothing.
    """
    if choose(impl, "ordered_attention", q, unsupported(q)) == "torch":
        return plain(q, k, v, order, rule)
    tensors = [q, k, v, order.query, order.key, order.query_code, order.key_code, order.queries, order.keys]
    return torch.ops.subquad.ordered(*tensors, *rule)[0]


def unsupported(q: Tensor) -> str | None:
    if symbolic(*q.shape):
        return "the length is symbolic"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {q.dtype}"
    if q.shape[3] * q.dtype.itemsize > 512:
        return f"it holds heads of at most 256, or 128 in float32, got D={q.shape[3]} in {q.dtype}"
    return None


def plain(q: Tensor, k: Tensor | None, v: Tensor, order: Order, rule: Rule) -> Tensor:
    """The same by its definition, over all pairs."""
    k = q if k is None else k
    k = F.normalize(k, dim=-1, eps=1e-6) if rule.unit else k
    q = q * rule.scale
    size, keys, device = q.shape[1], k.shape[1], q.device
    i, j = torch.arange(keys - size, keys, device=device)[:, None], torch.arange(keys, device=device)
    hidden = torch.zeros(size, keys, dtype=torch.bool, device=device)
    hidden = hidden | (j > i) if rule.causal else hidden
    bias = -1e5 * (i == j) if rule.apart else None
    if order.query_code is None or order.key_code is None:
        return _plain_lists(q, k, v, order, hidden)
    seen = torch.zeros_like(hidden)
    for mine, its in zip(order.query_code.unbind(-1), order.key_code.unbind(-1), strict=True):
        gap = mine[..., :, None] - its[..., None, :]
        seen = seen | (gap >= -int(rule.ahead)) & (gap <= 1)
    if rule.apart:
        seen = seen | (i == j)
    return pair_attention(q, k, v, seen & ~hidden, bias)


def _plain_lists(q: Tensor, k: Tensor, v: Tensor, order: Order, hidden: Tensor) -> Tensor:
    (batch, size, heads, _), keys = q.shape, k.shape[1]
    total, times = torch.zeros_like(v[:, :1]).expand(-1, size, -1, -1), q.new_zeros(batch, size, heads, 1)
    tables = order.queries.view(batch * heads, -1, 4)
    for n in range(tables.shape[1]):
        seen = torch.zeros(batch * heads, size, keys, dtype=torch.bool, device=q.device)
        for g, (first, stop, lo, hi) in enumerate(tables[:, n].tolist()):
            rows, columns = (t[t >= 0].long() for t in (order.query[g, first:stop], order.key[g, lo:hi]))
            seen[g, rows[:, None], columns] = True
        seen = (seen & ~hidden).view(batch, heads, size, keys)
        total = total + pair_attention(q, k, v, seen)
        times = times + seen.any(-1).transpose(1, 2)[..., None]
    return total / times.clamp(min=1).to(v.dtype)


SCHEMA = (
    "Tensor q, Tensor? k, Tensor v, Tensor query, Tensor key, Tensor? query_code, Tensor? key_code, Tensor queries, "
    "Tensor keys, bool ahead, bool causal, bool apart, bool unit, bool once, "
    "float scale"
)
INPUTS = SCHEMA.count("Tensor")


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from subquad.ops import ordered_triton

    q, k, v, *index = given[:INPUTS]
    return ordered_triton.attend(q, k, v, Order(*index), Rule(*given[INPUTS:]))


def _forward_shapes(q: Tensor, k: Tensor | None, v: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    (batch, size, heads, width), rule, codes = q.shape, Rule(*rest[INPUTS - 4 :]), rest[1]
    lists = codes is None and not rule.once
    low = (codes is None or codes.shape[-1] == 1) and not rule.apart and v.dtype != torch.float32
    places = query.shape[1] if lists else size
    own = v.new_empty((lists + low, batch, places, heads, width))
    return v.new_empty(q.shape), q.new_empty((batch, heads, places), dtype=torch.float32), own


def _gradients(do: Tensor, o: Tensor, lse: Tensor, own: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from subquad.ops import ordered_triton

    q, k, v, *index = given[:INPUTS]
    return ordered_triton.gradients(do, o, lse, own, q, k, v, Order(*index), Rule(*given[INPUTS:]))


def _gradient_shapes(do: Tensor, o: Tensor, lse: Tensor, own: Tensor, *given: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    q, k, v = given[:3]
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:INPUTS])
    ctx.rule = inputs[INPUTS:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the last output is as large as the first


def _backward(ctx: Any, do: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dq, dk, dv = torch.ops.subquad.ordered_backward(do, *ctx.saved_tensors, *ctx.rule)
    return dq, None if ctx.saved_tensors[4] is None else dk, dv, *(None for _ in range(INPUTS - 3 + len(ctx.rule)))


_operator = torch.library.custom_op(
    "subquad::ordered", _forward, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_operator.register_fake(_forward_shapes)
_operator.register_autograd(_backward, setup_context=_save)
torch.library.custom_op(
    "subquad::ordered_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, Tensor own, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
).register_fake(_gradient_shapes)
