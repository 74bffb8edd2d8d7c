"""Decoding over a pattern: exact softmax token by token, with a cache of only the keys that can still be read.

The slots of a row have three parts, [pinned | ring | log]:

    pinned  the first keys, for Global
    ring    the last keys, for Local, Dilated and Block; position j is in slot j mod size
    log     keys that are kept for ever: the summary columns, or every key (for Strided, Random and Dense); it grows

The number of tokens so far tells which position each slot holds, so only keys and values are stored. A key that belongs
to several parts is stored in the first of: pinned, log, ring. On a GPU a step is one kernel, cache_triton.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import check_count, check_heads, check_methods, check_tensor, refuse
from subquad.ops.cache import append, readable_positions, with_room, with_room_for
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import check_op_lengths
from subquad.ops.precision import wide
from subquad.ops.rotary import Turns, turned
from subquad.ops.sparse.patterns import Atom, Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.sparse.reads import Reads, reads_of

ROWS = 256  # queries that attend to the cache at once
GATHERED = 1 << 24  # elements of keys that are gathered at once


class SparseState(NamedTuple):
    k: Tensor  # [B, C, H, K]
    v: Tensor  # [B, C, H, V]
    position: Tensor  # [B]


@check_methods
class SparseCache:
    """Decodes one pattern, or one per head. It holds no tensors: those are in the `SparseState` passed in and returned.

    cache = SparseCache(Local(256, 0) | Global(4))
    state = cache.empty(batch, heads, width, capacity, like=k)
    o, state = cache.attend(q, k, v, state)     # [B, T, H, D]: a prompt
    o, state = cache.step(q, k, v, state)       # [B, H, D]: a token
    """

    def __init__(self, patterns: Pattern | Sequence[Pattern]):
        self.patterns = (patterns,) if isinstance(patterns, Pattern) else tuple(patterns)
        if not self.patterns:
            refuse("patterns", patterns, "a Pattern, or one for each head")
        atoms = {atom for pattern in self.patterns for atom in pattern.atoms}
        shapes = {(atom.l, atom.c) for atom in atoms if isinstance(atom, Summary)}
        # Strides read every key again, and a random block may be any earlier one. The log has room for one summary per
        # head, all of one shape; other patterns keep every key too.
        self.everything = (
            any(isinstance(atom, Strided | Random | Dense) for atom in atoms)
            or len(shapes) > 1
            or any(sum(isinstance(atom, Summary) for atom in p.atoms) > 1 for p in self.patterns)
        )
        self.pinned = self.ring = 0
        self.block, self.columns = 1, int(self.everything)
        if not self.everything:
            self.pinned = max((atom.tokens for atom in atoms if isinstance(atom, Global)), default=0)
            self.ring = max(map(_newest, atoms))
            self.block, self.columns = shapes.pop() if shapes else (1, 0)
        self.growing = self.columns > 0
        # the keys of patterns that differ only in the head of their draws are looked up together
        self.families: dict[Pattern, list[tuple[int, Pattern]]] = {}
        for pattern in dict.fromkeys(self.patterns):
            family, head = pattern._without_head()
            self.families.setdefault(family, []).append((head or 0, pattern))
        self.reads = self._reads()
        self.reads_text = str(self.reads)

    def size(self, length: int) -> int:
        """The number of slots for a row of that many tokens."""
        check_count("length", length, 0)
        return self.pinned + self.ring + self.columns * -(-length // self.block)

    def empty(self, batch: int, heads: int, width: int, capacity: int, like: Tensor) -> SparseState:
        """The state before the first token, with room for `capacity` tokens; type and device are those of `like`."""
        for name, value in (("batch", batch), ("heads", heads), ("width", width)):
            check_count(name, value)
        check_count("capacity", capacity, 0)
        k = like.new_zeros(batch, self.size(capacity), heads, width)
        return SparseState(k, k.clone(), torch.zeros(batch, dtype=torch.int64, device=like.device))

    def extend(self, state: SparseState, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> SparseState:
        """A new state with the tokens of these keys and values [B, T, H, ·]; row b has lengths[b] of them."""
        self._check(state, lengths, k=k, v=v)
        return self._extend(state, k, v, lengths)

    def _extend(self, state: SparseState, k: Tensor, v: Tensor, lengths: Tensor | None) -> SparseState:
        after = state.position + (k.shape[1] if lengths is None else lengths)
        if self.everything:
            k, v = append(state.k, k, state.position), append(state.v, v, state.position)
            return state._replace(k=k, v=v, position=after)
        caches = [state.k, state.v]
        if self.growing:
            used = self.pinned + self.ring + (after + self.block - 1) // self.block * self.columns
            caches = [with_room(cache, used, 0) for cache in caches]
        held = self._per_head(lambda p: self._held(p, caches[0].shape[1], after))  # [B, C, H or 1]
        source = held - state.position[:, None, None]  # the index among the new tokens; negative: an old token
        index = source.clamp(0, k.shape[1] - 1)[..., None]
        caches = [
            torch.where(source[..., None] >= 0, new.gather(1, index.expand_as(old)).to(old.dtype), old)
            for new, old in zip((k, v), caches, strict=True)
        ]
        return state._replace(k=caches[0], v=caches[1], position=after)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SparseState,
        lengths: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, SparseState]:
        """Causal attention of new tokens [B, T, H, ·] to the state and to themselves, and the new state."""
        self._check(state, lengths, q=q, k=k, v=v)
        return self._attend(q, k, v, state, lengths, scale)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: SparseState, lengths: Tensor | None, scale: float | None
    ) -> tuple[Tensor, SparseState]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.everything:
            new = self._extend(state, k, v, lengths)
            return self._gathered(q, new, state.position, scale), new
        outputs = []
        for start in range(0, q.shape[1], ROWS):
            qs, ks, vs = (t[:, start : start + ROWS] for t in (q, k, v))
            at = state.position[:, None] + torch.arange(qs.shape[1], device=q.device)  # [B, T]
            keys = torch.cat((state.k.to(k.dtype), ks), 1)
            values = torch.cat((state.v.to(v.dtype), vs), 1)
            scores = torch.einsum("bthk,bshk->bhts", wide(qs), wide(keys)) * scale
            weights = _softmax_over(scores, self._visible(state, at))
            outputs.append(torch.einsum("bhts,bshv->bthv", weights.to(values.dtype), values))
            seen = None if lengths is None else (lengths - start).clamp(0, qs.shape[1])
            state = self._extend(state, ks, vs, seen)
        return torch.cat(outputs, 1), state

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SparseState,
        scale: float | None = None,
        inplace: bool = False,
        impl: Impl = "auto",
    ) -> tuple[Tensor, SparseState]:
        """Attention of one new token of each row, [B, H, ·], to the state and itself, and the new state.

        The old state is left alone unless `inplace`. Use the returned one even then: a state that must grow is new.
        """
        check_heads("[B, H, D]", q=q, k=k, v=v)
        self._check(state, None, q=q[:, None], k=k[:, None], v=v[:, None])
        return self._step(q, k, v, state, scale, inplace, impl)

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SparseState,
        scale: float | None,
        inplace: bool,
        impl: Impl,
        moves: bool = True,
        by: Turns | None = None,
    ) -> tuple[Tensor, SparseState]:
        """`step`; without `moves` it leaves the position where it is. `by` turns q and k first."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        reason = self.reads if isinstance(self.reads, str) else unfit(q, *state)
        fused = choose(impl, "a step over a pattern", q, reason) == "triton"
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, state.k, state.v)):
            fused = False  # the kernel has no gradients
        if not fused:
            if by is not None:
                q, k = (turned(x[:, None], by)[:, 0] for x in (q, k))
            return self._step_plainly(q, k, v, state, scale, inplace, moves)
        keys, values = self._with_place(state)
        if not inplace:
            keys, values = (new.clone() if new is old else new for new, old in ((keys, state.k), (values, state.v)))
        position = state.position if inplace or not moves else state.position.clone()
        cos, sin = by or (None, None)
        o = fused_step(q, k, v, keys, values, position, self.reads_text, scale, moves, cos, sin)
        if keys is state.k and position is state.position:
            return o, state
        return o, state._replace(k=keys, v=values, position=position)

    def _step_plainly(
        self, q: Tensor, k: Tensor, v: Tensor, state: SparseState, scale: float, inplace: bool, moves: bool
    ) -> tuple[Tensor, SparseState]:
        at, write = state.position, torch.Tensor.index_put_ if inplace else torch.Tensor.index_put
        if self.everything:
            caches = [append(old, new[:, None], at, inplace) for old, new in zip(state[:2], (k, v), strict=True)]
        else:
            slot = self._per_head(lambda p: self._slot(p, at)).expand(k.shape[:2])  # [B, H]
            rows, heads = (torch.arange(n, device=k.device) for n in slot.shape)
            where = rows[:, None], slot.clamp(min=0), heads[None]
            caches = []
            for cache, new in zip(self._with_place(state), (k, v), strict=True):
                new = new.to(cache.dtype)
                new = new if self.ring else torch.where(slot[..., None] >= 0, new, cache[where])
                caches.append(write(cache, where, new))
        after = state._replace(k=caches[0], v=caches[1], position=at + 1)
        if self.everything:
            o = self._gathered(q[:, None], after, at, scale)[:, 0]
        else:
            keys, values = after.k.to(q.dtype), after.v.to(q.dtype)
            scores = torch.einsum("bhk,bshk->bhs", wide(q), wide(keys)) * scale
            weights = _softmax_over(scores, self._visible_slots(after))
            o = torch.einsum("bhs,bshv->bhv", weights.to(values.dtype), values)
        if not moves or inplace:
            after = after._replace(position=at.add_(1) if moves else at)
        return o, after

    def _with_place(self, state: SparseState) -> list[Tensor]:
        """The caches, with a slot for the next token of each row."""
        used = readable_positions(state.k, state.position) if self.growing else None
        if used is not None and not self.everything:
            used = [self.pinned + self.ring + n // self.block * self.columns for n in used]
        return [with_room_for(cache, used, self.columns) for cache in state[:2]]

    def _reads(self) -> Reads | str:
        """What a step reads, for its kernel, or why that cannot be said."""
        heads = []
        for pattern in dict.fromkeys(self.patterns):
            summary = next((atom for atom in pattern.atoms if isinstance(atom, Summary)), None)
            kept = -1 if summary is None or self.everything else summary.l - summary.c * (summary.shift + 1)
            head = reads_of(pattern, kept)
            if isinstance(head, str):
                return head
            heads.append(head)
        if len(heads) > 1:
            known = dict(zip(dict.fromkeys(self.patterns), heads, strict=True))
            heads = [known[pattern] for pattern in self.patterns]
        return Reads(self.everything, self.pinned, self.ring, self.block, self.columns, tuple(heads))

    def _check(self, state: SparseState, lengths: Tensor | None, **tokens: Tensor) -> None:
        """Refuse tokens [B, T, H, ·] and a state that do not fit together."""
        check_heads("[B, T, H, D]", **tokens)
        k = tokens["k"]
        batch, size, heads, _ = k.shape
        if len(self.patterns) not in (1, heads):
            raise ValueError(f"k has {heads} heads: this cache was made for {len(self.patterns)} patterns, one a head")
        for name, x in tokens.items():
            if x.shape[:3] != k.shape[:3] or (name == "q" and x.shape != k.shape):
                raise ValueError(f"{name} has shape {tuple(x.shape)}, k {tuple(k.shape)}: accepted is the same")
        for name, x in state._asdict().items():
            check_tensor(f"state.{name}", x)
            if name == "position":
                fits, wanted = x.shape == (batch,) and x.dtype == torch.int64, f"int64 of shape ({batch},)"
            else:
                width, least = tokens[name].shape[3], self.pinned + self.ring
                fits = x.ndim == 4 and x.shape[::2] == (batch, heads) and x.shape[3] == width and x.is_floating_point()
                fits = fits and least <= x.shape[1] == state.k.shape[1]
                wanted = f"floating point [{batch}, C, {heads}, {width}] with C >= {least}, the same for k and v,"
            if not fits or x.device != k.device:
                what = f"state.{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{what}: accepted is {wanted} on {k.device}, as `empty` makes it")
        check_op_lengths("lengths", lengths, batch, size, k.device)

    def _held(self, pattern: Pattern, size: int, position: Tensor) -> Tensor:
        """The position of the key in each slot, for heads of that pattern: [B, C]; -1 if the slot is empty."""
        device, seen = position.device, position[:, None]
        log = torch.arange(size - self.pinned - self.ring, device=device)
        summary = next((atom for atom in pattern.atoms if isinstance(atom, Summary)), None)
        if summary is None:
            log = torch.full_like(seen, -1).expand(-1, log.shape[0])
        else:
            first = summary.l - summary.c * (summary.shift + 1)
            log = log // summary.c * summary.l + first + log % summary.c
            log = torch.where((log < seen) & (log >= self.pinned), log, -1)
        pinned = torch.arange(self.pinned, device=device)
        pinned = torch.where(pinned < seen, pinned, -1)
        last = seen - 1
        ring = last - (last - torch.arange(self.ring, device=device)) % max(self.ring, 1)
        elsewhere = ring < self.pinned
        if summary is not None:
            elsewhere = elsewhere | summary._allowed(ring, ring)
        ring = torch.where(elsewhere, -1, ring)
        return torch.cat((pinned, ring, log), 1)

    def _slot(self, pattern: Pattern, at: Tensor) -> Tensor:
        """The slot for the key at positions `at` [B], for heads of that pattern; -1 if it is not kept."""
        slot = at % self.ring + self.pinned if self.ring else torch.full_like(at, -1)
        summary = next((atom for atom in pattern.atoms if isinstance(atom, Summary)), None)
        if summary is not None:
            column = at % summary.l - (summary.l - summary.c * (summary.shift + 1))
            in_log = (column >= 0) & (column < summary.c)
            log = self.pinned + self.ring + at // summary.l * summary.c + column
            slot = torch.where(in_log, log, slot)
        return torch.where(at < self.pinned, at, slot) if self.pinned else slot

    def _visible_slots(self, state: SparseState) -> Tensor:
        """Whether the newest token of each row reads the slots: [B, H or 1, C]."""
        at = state.position[:, None] - 1

        def visible(pattern: Pattern) -> Tensor:
            held = self._held(pattern, state.k.shape[1], state.position)
            return pattern._allowed(at, held, True) & (held >= 0)

        return self._per_head(visible).movedim(-1, 1)

    def _visible(self, state: SparseState, at: Tensor) -> Tensor:
        """Whether queries at positions `at` [B, T] read the cached keys and their own: [B, H or 1, T, C + T]."""

        def visible(pattern: Pattern) -> Tensor:
            j = torch.cat((self._held(pattern, state.k.shape[1], state.position), at), 1)[:, None]
            return pattern._allowed(at[..., None], j, True) & (j >= 0)

        return self._per_head(visible).movedim(-1, 1)

    def _gathered(self, q: Tensor, state: SparseState, position: Tensor, scale: float) -> Tensor:
        """Attention of queries from `position` on. The cache holds every key; only the pattern's keys are read."""
        batch, length, heads, width = q.shape
        size = state.k.shape[1]
        rows = 1
        if length > 1:
            most = max(p.keys(position[:1], size, causal=True).shape[1] for p in self.families)
            rows = max(1, GATHERED // (batch * most * heads * width))
        outputs = []
        for start in range(0, length, rows):
            qs = q[:, start : start + rows]
            at = position[:, None] + torch.arange(start, start + qs.shape[1], device=q.device)
            j = self._keys(at, size)  # [B, T, M, H or 1], M the keys of a query
            index = j.clamp(min=0).flatten(1, 2)[..., None]
            ks, vs = (
                t.gather(1, index.expand(-1, -1, *t.shape[2:])).unflatten(1, j.shape[1:3]).to(q.dtype)
                for t in (state.k, state.v)
            )  # [B, T, M, H, K]
            scores = torch.einsum("bthk,btmhk->bhtm", wide(qs), wide(ks)) * scale
            weights = _softmax_over(scores, (j >= 0).movedim(-1, 1))
            outputs.append(torch.einsum("bhtm,btmhv->bthv", weights.to(vs.dtype), vs))
        return torch.cat(outputs, 1)

    def _keys(self, at: Tensor, size: int) -> Tensor:
        """The keys that each head reads at positions `at` [B, T], filled up with -1: [B, T, M, H or 1]."""
        keys: dict[Pattern, Tensor] = {}
        for members in self.families.values():
            heads = torch.stack([torch.full_like(at, head) for head, _ in members], -1)  # [B, T, members]
            i = at[..., None].expand_as(heads).flatten()
            j = members[0][1].keys(i, size, causal=True, head=heads.flatten() if len(members) > 1 else None)
            j = j.unflatten(0, heads.shape).unbind(2)
            keys.update(zip((pattern for _, pattern in members), j, strict=True))
        most = max(j.shape[-1] for j in keys.values())
        return self._per_head(lambda pattern: F.pad(keys[pattern], (0, most - keys[pattern].shape[-1]), value=-1))

    def _per_head(self, compute: Callable[[Pattern], Tensor]) -> Tensor:
        """The result for each head's pattern, [..., H]; [..., 1] if all heads have the same pattern."""
        results = {pattern: compute(pattern) for pattern in dict.fromkeys(self.patterns)}
        heads = self.patterns if len(results) > 1 else self.patterns[:1]
        return torch.stack([results[pattern] for pattern in heads], -1)


def unfit(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> str | None:
    """What the kernel of a step cannot do with these."""
    if q.dtype == torch.float64:
        return "float64"
    if max(keys.shape[-1], values.shape[-1]) > 256:
        return f"heads wider than 256: {keys.shape[-1]} and {values.shape[-1]}"
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or position.stride(0) != 1:
        return "a state whose keys, values or positions are not in order"
    return None


def fused_step(*inputs: Any) -> Tensor:
    """The kernel of a step; its inputs are those of subquad::sparse_step."""
    run = torch.ops.subquad.sparse_step if torch.compiler.is_compiling() else _fused_step
    return run(*inputs)


def _fused_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    reads: str,
    scale: float,
    moves: bool = True,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    u: Tensor | None = None,
    w: Tensor | None = None,
    far: Tensor | None = None,
) -> Tensor:
    from subquad.ops.sparse.cache_triton import step_

    bias = None if u is None or w is None or far is None else (u, w, far)
    by = None if cos is None or sin is None else Turns(cos, sin)
    return step_(q, k, v, keys, values, position, Reads.parse(reads), scale, moves, by, bias)


_operator = torch.library.custom_op("subquad::sparse_step", _fused_step, mutates_args=("keys", "values", "position"))


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:  # noqa: ARG001
    return q.new_empty(v.shape)


def _newest(atom: Atom) -> int:
    """How many of the newest keys, its own included, a causal query of that atom may read."""
    match atom:
        case Local(before):
            return before + 1
        case Dilated(window, gap):
            return window * gap + 1
        case Block(l, before):
            return (before + 1) * l
    return 0


def _softmax_over(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed entries of the last dimension; zeros where nothing is allowed."""
    some = allowed.any(-1, keepdim=True)
    return scores.masked_fill(~allowed & some, -torch.inf).softmax(-1) * some
