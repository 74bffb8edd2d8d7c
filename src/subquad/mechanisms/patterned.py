"""What local, strided, fixed, longformer and bigbird share: each is exact softmax over its own pattern.

`subquad.ops.sparse` has the patterns, and computes and decodes them. A mechanism writes its pattern twice: as atoms,
for the fast path, and as a formula over positions i and j, for the reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import refuse
from subquad.mechanisms.attention import Attention, Heads
from subquad.mechanisms.base import KernelOptions, Traits, own_type
from subquad.ops.rotary import Turns
from subquad.ops.sparse import sparse_attention
from subquad.ops.sparse.cache import SparseCache, SparseState
from subquad.ops.sparse.patterns import Pattern

Factor = TypeVar("Factor", bound=Any)  # a Pattern or a mask: what `|` joins


@dataclass(frozen=True, kw_only=True)
class CombinedOptions(KernelOptions):
    """The options of mechanisms whose heads read one or both of two sets."""

    combine: Literal["merge", "interleave", "heads"] = "merge"  # both sets at once, layer by layer, or head by head

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.combine == "heads" and self.heads < 2:
            refuse("combine", self.combine, f'"merge" or "interleave" with heads={self.heads}')


class Patterned(Attention):
    """Exact softmax over one pattern per head."""

    state_type: type[SparseState]
    traits = Traits(causal=True, bidirectional=True, state="window")
    family = "human patterns"
    unused = Attention.unused | {"dropout"}  # weights are never stored, so they cannot be dropped
    approximates = True
    splits = True
    options: KernelOptions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own_type(cls, "state_type", SparseState)

    def __init__(self, options: KernelOptions):
        super().__init__(options)
        self.scale = self.width**-0.5
        self._follow(self._patterns())

    def _follow(self, patterns: Sequence[Pattern]) -> None:
        self.patterns = tuple(map(_first_equal, patterns))
        if self.options.causal:
            self.cache = SparseCache(self.patterns)
            self.traits = self.traits._replace(state="growing" if self.cache.growing else "window")
            self.rewinds = self.cache.everything

    def _patterns(self) -> Sequence[Pattern]:
        """One pattern per head."""
        raise NotImplementedError

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        """The definition: whether position i [T, 1] reads j [1, T] in a sequence of that size, [T, T] or [H, T, T].

        The caller adds s ≤ t if causal.
        """
        raise NotImplementedError

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        how = {"causal": self.options.causal, "scale": self.scale, "impl": self.options.impl}
        return sparse_attention(q, k, v, self.patterns, lengths=lengths, **how)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        size = q.shape[1]
        i, j = torch.arange(size, device=q.device)[:, None], torch.arange(size, device=q.device)[None]
        allowed = self._allowed(i, j, size)
        if self.options.causal:
            allowed = allowed & (j <= i)
        some = allowed.any(-1, keepdim=True)  # a query with nothing to read gives zeros
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~allowed & some, -torch.inf).softmax(-1) * some  # [B, H, T, S]

    def _init_state(self, batch: int, capacity: int | None) -> SparseState:
        return self.state_type(*self.cache.empty(batch, self.options.heads, self.width, capacity or 64, self._like))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: SparseState | None) -> tuple[Tensor, SparseState]:
        if ranks.active() is not None:
            return self._prefill_part(x, lengths, state)
        if state is not None:
            o, state = self.cache._attend(*self._project(x, position=state.position), state, lengths, self.scale)
        else:
            q, k, v = self._project(x)
            o, state = self._attend(q, k, v, None, None), Patterned._init_state(self, *x.shape[:2])
            state = self.cache._extend(state, k, v, lengths)
        return self._merge(o), state

    def _step(self, x: Tensor, state: SparseState, inplace: bool = False) -> tuple[Tensor, SparseState]:
        by = None
        if self.options.rotary and self.turn is None and type(self.heads) is Heads:  # turned with the rest of the step
            qkv = self.heads.qkv(x)
            by = self._turns_at(qkv[:, None], state.position, self.width)
            both, v = self.heads.cut(qkv)
            q, k = both.chunk(2, dim=1)
        else:
            q, k, v = (t[:, 0] for t in self._project(x[:, None], position=state.position))  # [B, H, K]
        o, state = self.cache._step(q, k, v, state, self.scale, inplace, self.options.impl, by=by)
        return self._merge(o), state

    def _step_inplace(self, x: Tensor, state: SparseState) -> tuple[Tensor, SparseState]:
        return self._step(x, state, inplace=True)

    def _decodes(self, state: SparseState) -> bool:
        return type(self)._step is Patterned._step

    def _decode(self, qkv: Tensor, state: SparseState, turns: Turns | None) -> tuple[Tensor, SparseState]:
        both, v = self.heads.cut(qkv)
        q, k = both.chunk(2, dim=1)
        o, state = self.cache._step(q, k, v, state, self.scale, True, self.options.impl, moves=False, by=turns)
        return o.flatten(1), state

    def _prefill_part(self, x: Tensor, lengths: Tensor | None, state: SparseState | None) -> tuple[Tensor, SparseState]:
        """A part of a prompt that other ranks share; every rank keeps what decoding needs of all of it."""
        if state is not None:
            ranks.refuse(f"a state before a prompt of {type(self).__name__}", "accepted is a prompt from the start")
        q, k, v = self._project(x)
        both, total, cache = torch.cat((k, v), -1), ranks.whole_length(x.shape[1]), self.cache
        new = Patterned._init_state(self, x.shape[0], total)
        rows = ranks.whole_lengths(lengths)
        # if all rows end together, a window needs the first and the last tokens alone
        first, start = (0, 0) if cache.growing or rows is not None else (cache.pinned, max(0, total - cache.ring))
        if 0 < first < start:
            pinned_k, pinned_v = ranks.tokens_of(both, 0, first).chunk(2, -1)
            new = cache._extend(new, pinned_k, pinned_v, None)
        new = new._replace(position=torch.full_like(new.position, start))
        last_k, last_v = ranks.tokens_of(both, start, total).chunk(2, -1)
        new = cache._extend(new, last_k, last_v, rows)
        return self._merge(self._attend(q, k, v, None, None)), new


@lru_cache(maxsize=1024)
def _first_equal(pattern: Pattern) -> Pattern:
    """The same object for equal patterns, by which torch.compile knows that layers can share a program."""
    return pattern


def combine(how: str, factors: Sequence[Sequence[Factor]], layer: int) -> list[Factor]:
    """One pattern per head from the factors of each head, in the three ways of the Sparse Transformer (§4.1).

    merge: every head reads the union; interleave: layer n reads factor n mod p; heads: a share of the heads each.
    """
    if how == "merge":
        return [reduce(or_, own) for own in factors]
    if how == "interleave":
        return [own[layer % len(own)] for own in factors]
    return [own[head * len(own) // len(factors)] for head, own in enumerate(factors)]
