"""Sparse attention over a sequence that several ranks share.

Local, Global   each rank gets the keys around its part, a halo, and the first keys; the rows of global tokens are
                attention of a few queries to the keys of every rank, joined by their log-sum-exp
Dense           keys and values go round in pieces, which backward asks for again instead of keeping them
others          all tokens of a share of the heads for some tokens of all heads, and back: at most H ranks
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad import ranks
from subquad.ops.lengths import zero_padding
from subquad.ops.sparse.patterns import Atom, Dense, Global, Local, Pattern
from subquad.ops.sparse.spec import ordered_atoms

PIECE = 1 << 16  # keys of all ranks together that a rank holds at once
Whole = Callable[..., Any]  # sparse_attention of what one rank has: (q, k, v, pattern, causal=, ...) -> o and lse
Parts = tuple[Tensor, Tensor]  # o [B, T, H, D] and its log-sum-exp [B, T, H]


def attention(
    whole: Whole, q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern], causal: bool, lengths: Tensor | None,
    sums: bool,
) -> Parts:  # fmt: skip
    """o for this rank's queries, and with `sums` its log-sum-exp; `patterns` has one for each head."""
    share = q.shape[2] // k.shape[2]
    k, v = (t if share == 1 else t.repeat_interleave(share, 2) for t in (k, v))
    atoms = [ordered_atoms(pattern.to_json(), causal) for pattern in patterns]
    with ranks.laid_out(q.shape[1]):
        if not all(own == (Dense(),) or all(isinstance(a, Local | Global) for a in own) for own in atoms):
            o, lse = _by_heads(whole, q, k, v, patterns, causal, lengths, sums)
        else:
            made: dict[int, Parts] = {}
            for own in dict.fromkeys(atoms):
                heads = [h for h, other in enumerate(atoms) if other == own]
                qs, ks, vs = (t if len(heads) == len(atoms) else t[:, :, heads] for t in (q, k, v))
                if own == (Dense(),):
                    found = _dense(whole, qs, ks, vs, causal, lengths)
                else:
                    found = _windows(whole, qs, ks, vs, own, causal, lengths)
                made |= {h: (found[0][:, :, n], found[1][:, :, n]) for n, h in enumerate(heads)}
            o, lse = (torch.stack([made[h][n] for h in range(len(atoms))], 2) for n in range(2))
    return zero_padding(o, lengths), lse


def _windows(
    whole: Whole, q: Tensor, k: Tensor, v: Tensor, atoms: Sequence[Atom], causal: bool, lengths: Tensor | None
) -> Parts:
    """A window around each query, and the first keys of the sequence."""
    cut, both = ranks.layout(q.shape[1]), torch.cat((k, v), -1)
    assert cut is not None
    tokens = min(max((a.tokens for a in atoms if isinstance(a, Global)), default=0), cut.total)
    window = next((a for a in atoms if isinstance(a, Local)), None)
    rows = ranks.whole_lengths(None if causal else lengths)  # causal queries see no padding
    early = min(max(tokens - cut.offset, 0), cut.size)  # queries of global tokens
    own: list[Parts] = []
    first = both
    if tokens:
        first = ranks.tokens_of(both, 0, tokens)
        seen = None if rows is None else rows.clamp(max=tokens)
        own.append(_read(whole, q[:, early:], first, Dense(), seen))
    received = [first]
    if window is not None:
        before, after = window.before, 0 if causal else window.after
        around = ranks.halo(both, before, after)
        received.append(around)
        # only keys that exist and are not among the first: positions start .. end - 1
        start, end = max(cut.offset - before, tokens), min(cut.offset + cut.size + after, cut.total)
        around = around[:, start - cut.offset + before : end - cut.offset + before]
        shift = max(cut.offset, tokens) - start  # from the first key to the first query
        seen = None if rows is None else (rows - start).clamp(0, max(end - start, 0))
        own.append(_read(whole, q[:, early:], around, Local(max(before - shift, 0), after + shift), seen))
    o, lse = _join(own) if own else _nothing(q)
    if tokens:
        if causal:  # global tokens read those before them, which are global too
            rest = _read(whole, q[:, :early], first, Local(tokens, cut.offset), None)
        else:
            few = few_attention(whole, ranks.tokens_of(q, 0, tokens), k, v, lengths)
            received.append(few[0])
            rest = tuple(t[:, cut.offset : cut.offset + early] for t in few)  # type: ignore[assignment]
        o, lse = (torch.cat((a, b), 1) for a, b in zip(rest, (o, lse), strict=True))
    return ranks.tie(o.to(q.dtype), *received), ranks.tie(lse, *received)


def few_attention(whole: Whole, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Parts:
    """Queries [B, n, H, D] that all ranks have, over the keys of all ranks; the result is on every rank."""
    o, lse = whole(q, k, v, Dense(), key_lengths=lengths)
    every = ranks.gather(torch.cat((o.to(lse.dtype), lse[..., None]), -1))  # [ranks, B, n, H, D + 1]
    return _join([(part[..., :-1], part[..., -1]) for part in every])


def _dense(whole: Whole, q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Tensor | None) -> Parts:
    """Every key, or those up to the query: a rank's own, then pieces of those of the others."""
    cut = ranks.layout(q.shape[1])
    assert cut is not None
    size, world = max(1, PIECE // len(cut.sizes)), len(cut.sizes)
    every = None if causal or lengths is None else ranks.gather(lengths, "lengths")  # [ranks, B]
    others = range(cut.rank) if causal else [r for r in range(world) if r != cut.rank]

    def piece(q: Tensor, both: Tensor, at: int) -> Parts:
        """Attention to the tokens at .. at + size - 1 of each other rank's part."""
        own = both[:, at : at + size]
        lacking = min(size, max(cut.sizes) - at) - own.shape[1]
        own = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, lacking))
        got = ranks.gather(own, "gather")  # [ranks, B, size, H, 2 D]
        held = {r: min(max(cut.sizes[r] - at, 0), size) for r in others}
        held = {r: n for r, n in held.items() if n > 0}
        if not held:
            o, lse = _nothing(q)
        elif every is None:
            o, lse = _read(whole, q, torch.cat([got[r, :, :n] for r, n in held.items()], 1), Dense(), None)
        else:
            seen = {r: (every[r] - at).clamp(0, n) for r, n in held.items()}
            o, lse = _join([_read(whole, q, got[r, :, :n], Dense(), seen[r]) for r, n in held.items()])
        return ranks.tie(o, got), ranks.tie(lse, got)

    both = torch.cat((k, v), -1)
    mine = whole(q, k, v, Dense(), causal=True) if causal else whole(q, k, v, Dense(), key_lengths=lengths)
    o, lse = mine[0].to(mine[1].dtype), mine[1]
    for at in range(0, max(cut.sizes), size):
        if torch.is_grad_enabled():
            part = checkpoint(piece, q, both, at, use_reentrant=False, **ranks.recomputing())
        else:
            part = piece(q, both, at)
        o, lse = _join([(o, lse), part])
    return o.to(q.dtype), lse


def _by_heads(
    whole: Whole, q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern], causal: bool, lengths: Tensor | None,
    sums: bool,
) -> Parts:  # fmt: skip
    """All tokens of this rank's share of the heads; the log-sum-exp is that of the queries only with `sums`."""
    group, heads, width = ranks.active(), q.shape[2], q.shape[3]
    assert group is not None
    if heads < group.world:
        raise ValueError(
            f"{group.world} ranks with {heads} heads cannot work for {patterns[0]}: its heads are shared out, so "
            "accepted are at most as many ranks as heads"
        )
    kind = q.dtype
    q, k, v = ranks.to_heads(torch.cat((q, k, v), -1)).split(width, -1)
    own = list(patterns[ranks.heads_of(heads, group)[group.rank]])
    o, lse = whole(q, k, v, own, causal=causal, lengths=ranks.whole_lengths(lengths))
    if not sums:
        return ranks.to_tokens(o, heads), lse
    both = ranks.to_tokens(torch.cat((o.to(lse.dtype), lse[..., None]), -1), heads)
    return both[..., :-1].to(kind), both[..., -1]


def _read(whole: Whole, q: Tensor, both: Tensor, pattern: Pattern, seen: Tensor | None) -> Parts:
    """Queries [B, T, H, D] and keys with values [B, S, H, 2 D], `seen` [B] of them; either may be empty."""
    if 0 in (q.shape[1], both.shape[1]):
        return _nothing(q)
    k, v = both.chunk(2, -1)
    o, lse = whole(q, k, v, pattern, key_lengths=seen)
    return o.to(lse.dtype), lse


def _nothing(q: Tensor) -> Parts:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)


def _join(parts: Sequence[Parts]) -> Parts:
    """Attention over several disjoint sets of keys, as attention over all of them."""
    if len(parts) == 1:
        return parts[0]
    o, lse = (torch.stack(same) for same in zip(*parts, strict=True))
    most = lse.detach().amax(0).clamp(min=torch.finfo(lse.dtype).min)  # finite, where there is no key at all
    weight = (lse - most).exp()  # [n, B, T, H]
    mass = weight.sum(0)
    some = mass > 0
    safe = mass.masked_fill(~some, 1)
    return (weight[..., None] * o).sum(0) / safe[..., None], torch.where(some, most + safe.log(), -torch.inf)
