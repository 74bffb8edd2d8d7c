"""Patterns: which query may read which key, as an algebra of a few atoms.

Query i and key j are positions from 0. Atoms combine with `|` into their union, `causal=True` keeps j <= i:

    Local(before, after)   j in i - before .. i + after, both ends included; Local(w) is Local(w, w)
    Dilated(window, gap)   j = i + gap·m for |m| <= window: 2·window + 1 keys that span gap·window on each side
    Strided(l)             (i - j) mod l = 0
    Block(l)               i and j in the same block of l; Block(l, before, after) adds neighbouring blocks
    Summary(l, c)          j among the last c of its block of l; `shift` moves to the c columns before those, so that
                           heads may summarise different sub-blocks
    Global(tokens)         the first `tokens` positions are read by all and read all
    Random(blocks, block_size, seed)
                           each block of queries reads `blocks` distinct blocks of keys, drawn by a counter-based hash
    Dense()                every pair

The sets of the Sparse Transformer (arXiv:1904.10509) are Local(l, 0) with Strided(l), and Block(l) with Summary(l, c).
A pattern never looks at T, except Random without `causal`, which draws among the blocks that exist: hence `length`.
"""
# ruff: noqa: ARG002 (every atom is asked with the same arguments, whether it needs them or not)

import json
from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.checks import (
    INTEGERS,
    at_least,
    check_count,
    check_device,
    check_methods,
    check_strided,
    checked,
    refuse,
    shown,
)
from subquad.disk import parse_json

COUNTED = 2**22  # keys that `pairs` looks up at once
DENSEST = 2**36  # pairs of a matrix that is written out
Length = int | Tensor | None
Head = int | Tensor | None


@check_methods
class Pattern(ABC):
    """A set of pairs (query, key). Patterns are values: they compare, hash, and print as the code that makes them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_methods(cls)

    @property
    def atoms(self) -> "tuple[Pattern, ...]":
        return (self,)

    @abstractmethod
    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        """Membership of the pair, before `causal` removes j > i."""

    @abstractmethod
    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        """Candidate keys of queries i [n] -> [n, m]; `keys` drops those outside 0 .. S - 1 and, causal, after i."""

    def mask(self, i: Tensor, j: Tensor, *, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """Whether query i may read key j, elementwise on indices that broadcast.

        `length`: how many keys exist; `head`: draw for that head, or those, instead of the one that a Random names.
        """
        _check_indices(i=i, j=j, length=length, head=head)
        return self._allowed(i, j, causal, length, head)

    def _allowed(self, i: Tensor, j: Tensor, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """`mask` of indices that are known to be right."""
        inside = self._mask(i, j, causal, length, head)
        return inside & (j <= i) if causal else inside

    def keys(self, i: Tensor, S: int, *, causal: bool = False, head: Head = None) -> Tensor:
        """The keys of queries i [n], each once and in no promised order: [n, m], with -1 where a row has fewer.

        `head`: as for mask; one, or one for each query [n].
        """
        if i.ndim != 1:
            raise ValueError(f"i has shape {tuple(i.shape)}: accepted are the positions of n queries, [n]")
        check_count("S", S, 0)
        _check_indices(i=i, head=head)
        if isinstance(head, Tensor) and head.shape not in ((), i.shape):
            raise ValueError(
                f"head has shape {tuple(head.shape)}: accepted is one, or one for each query, {tuple(i.shape)}"
            )
        rows, found = i[:, None], []
        for at, atom in enumerate(self.atoms):
            j = atom._keys(i, S, causal, head)
            new = (j >= 0) & (j < S)
            if causal:
                new = new & (j <= rows)
            for earlier in self.atoms[:at]:
                heads = head[:, None] if isinstance(head, Tensor) else head
                new = new & ~earlier._allowed(rows, j, causal, S, heads)
            found.append(torch.where(new, j, -1))
        return torch.cat(found, 1)

    def dense(
        self, T: int, S: int | None = None, *, causal: bool = False, device: torch.device | str | None = None
    ) -> Tensor:
        """The 0/1 matrix, bool [T, S], of T queries and S keys (S = T unless said)."""
        _check_sizes(T, S)
        if device is not None:
            check_device("device", device)
        if T * (T if S is None else S) > DENSEST:
            refuse("T", T, f"T·S of at most 2**{DENSEST.bit_length() - 1}: count larger ones with pairs")
        i, j = torch.arange(T, device=device), torch.arange(T if S is None else S, device=device)
        return self._allowed(i[:, None], j[None], causal, len(j)).expand(len(i), len(j)).contiguous()

    def pairs(self, T: int, S: int | None = None, *, causal: bool = False) -> int:
        """How many pairs `dense` would hold, counted at the cost of the pattern and without that matrix."""
        _check_sizes(T, S)
        S = T if S is None else S
        if any(isinstance(atom, Dense) for atom in self.atoms):
            corner = min(T, S)
            return corner * (corner + 1) // 2 + (T - corner) * S if causal else T * S
        # a row of a global token is full, whatever else is in the union
        full = 0 if causal else min(T, max((a.tokens for a in self.atoms if isinstance(a, Global)), default=0))
        width = self.keys(torch.tensor([T]), S, causal=causal).shape[1]
        rows = max(1, COUNTED // max(1, width))
        chunks = (torch.arange(start, min(start + rows, T)) for start in range(full, T, rows))
        return full * S + sum(int((self.keys(i, S, causal=causal) >= 0).sum()) for i in chunks)

    def draw(self, T: int, path: str | Path, *, causal: bool = False, title: str | None = None) -> None:
        """Write a picture of `dense(T)`, queries down and keys across."""
        check_count("T", T)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.subplots()
        axes.imshow(self.dense(T, causal=causal).numpy(), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
        axes.set(title=title or repr(self), xlabel="key", ylabel="query")
        figure.savefig(path, dpi=160)

    def to_json(self) -> str:
        return json.dumps([{"atom": type(atom).__name__, **asdict(atom)} for atom in self.atoms])  # type: ignore[call-overload]

    @staticmethod
    def from_json(text: str) -> "Pattern":
        return from_json(text)

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        atoms = tuple(dict.fromkeys(self.atoms + other.atoms))
        return atoms[0] if len(atoms) == 1 else Union(atoms)

    def __repr__(self) -> str:
        values = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        defaults = [f.default for f in fields(self)]  # type: ignore[arg-type]
        while values and defaults[-1] is not MISSING and values[-1] == defaults[-1]:
            values.pop(), defaults.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


def _check_sizes(T: int, S: int | None) -> None:
    check_count("T", T, 0)
    if S is not None:
        check_count("S", S, 0)


def _check_indices(**indices: int | Tensor | None) -> None:
    """Refuse what are no integers, or tensors of them on one device whose shapes broadcast."""
    tensors = {name: x for name, x in indices.items() if isinstance(x, Tensor)}
    first = next(iter(tensors.values()), None)
    for name, x in tensors.items():
        if x.dtype not in INTEGERS or (first is not None and x.device != first.device):
            raise ValueError(f"{name}={shown(x)} cannot work: accepted are integers, on one device with the others")
        check_strided(name, x)
    if len({x.shape for x in tensors.values()}) > 1:
        try:
            torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(f"{shapes}: accepted are shapes that broadcast") from error


@dataclass(frozen=True, repr=False, init=False)
class Local(Pattern):
    """The keys i - before .. i + after: before + 1 + after of them."""

    before: int
    after: int

    def __init__(self, before: int, after: int | None = None) -> None:
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "after", before if after is None else after)
        at_least(self, before=0, after=0)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (j >= i - self.before) & (j <= i + self.after)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        after = 0 if causal else self.after
        first = (i - self.before).clamp(min=0)[:, None]
        j = first + torch.arange(min(self.before + 1 + after, S), device=i.device)
        return torch.where(j <= i[:, None] + after, j, -1)


@dataclass(frozen=True, repr=False)
class Dilated(Pattern):
    """The keys i + gap·m for |m| <= window."""

    window: int
    gap: int

    def __post_init__(self) -> None:
        at_least(self, window=0, gap=1)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        span = self.gap * self.window
        return (j >= i - span) & (j <= i + span) & ((i - j) % self.gap == 0)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        after = 0 if causal else self.window
        first = (i - self.gap * (i // self.gap).clamp(max=self.window))[:, None]
        j = first + self.gap * torch.arange(min(self.window + 1 + after, -(-S // self.gap)), device=i.device)
        return torch.where(j <= i[:, None] + self.gap * after, j, -1)


@dataclass(frozen=True, repr=False)
class Strided(Pattern):
    """The keys a multiple of l away."""

    l: int  # noqa: E741, the paper's letter

    def __post_init__(self) -> None:
        at_least(self, l=1)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (i - j) % self.l == 0

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return i[:, None] % self.l + self.l * torch.arange(-(-S // self.l), device=i.device)


@dataclass(frozen=True, repr=False)
class Block(Pattern):
    """The keys of the query's own block of l, and of `before` blocks before and `after` blocks after it."""

    l: int  # noqa: E741
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        at_least(self, l=1, before=0, after=0)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        row, column = i // self.l, j // self.l
        return (column >= row - self.before) & (column <= row + self.after)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        offsets = torch.arange(-self.before * self.l, (1 + (0 if causal else self.after)) * self.l, device=i.device)
        return i[:, None] // self.l * self.l + offsets


@dataclass(frozen=True, repr=False)
class Summary(Pattern):
    """The last c columns of every block of l; shifted: those with l - c·(shift + 1) <= j mod l < l - c·shift."""

    l: int  # noqa: E741
    c: int
    shift: int = 0

    def __post_init__(self) -> None:
        at_least(self, l=1, c=1, shift=0)
        if self.c * (self.shift + 1) > self.l:
            raise ValueError(f"{self!r}: c·(shift + 1) must be at most l, got {self.c * (self.shift + 1)} > {self.l}")

    def columns(self, S: int, device: torch.device | None = None) -> Tensor:
        """The columns below S, ascending: int64 [about S·c/l]."""
        check_count("S", S, 0)
        first = self.l - self.c * (self.shift + 1)
        j = torch.arange(-(-S // self.l), device=device)[:, None] * self.l + first
        j = (j + torch.arange(self.c, device=device)).flatten()
        return j[: S // self.l * self.c + min(max(S % self.l - first, 0), self.c)]

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        place = j % self.l + 0 * i
        return (place >= self.l - self.c * (self.shift + 1)) & (place < self.l - self.c * self.shift)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return self.columns(S, i.device).expand(len(i), -1)


@dataclass(frozen=True, repr=False)
class Global(Pattern):
    """The first `tokens` positions: columns that all read, rows that read all. Causal leaves the columns."""

    tokens: int

    def __post_init__(self) -> None:
        at_least(self, tokens=1)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (i < self.tokens) | (j < self.tokens)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        rows = not causal and (i.is_meta or bool((i < self.tokens).any()))
        j = torch.arange(S if rows else min(self.tokens, S), device=i.device).expand(len(i), -1)
        return torch.where((i[:, None] < self.tokens) | (j < self.tokens), j, -1)


@dataclass(frozen=True, repr=False)
class Random(Pattern):
    """Each block of queries reads `blocks` distinct blocks of keys, or all there are to draw from if those are fewer.

    The draw depends on (seed, head, block of queries) and on nothing drawn before it. Causal: from the blocks before
    the query's own, whatever T is. Otherwise: from all blocks of the sequence, so it follows the number of keys.
    Nothing is drawn fewer than `apart` blocks away (apart=2 leaves out the own block and its neighbours), nor among
    the `first` blocks, nor, without `causal`, among the `last`: what a window and global tokens read already.
    """

    blocks: int
    block_size: int
    seed: int = 0
    head: int = 0
    apart: int = 0
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        at_least(self, blocks=1, block_size=1, seed=0, head=0, apart=0, first=0, last=0)

    def table(self, row: Tensor, *, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """The key blocks of query blocks `row` [...] -> [..., blocks], -1 where there are fewer.

        `length` (keys, not blocks) is needed without `causal`; it and `head` are integers or broadcast with row.
        """
        _check_indices(row=row, length=length, head=head)
        row = row.to(torch.int64)
        if causal:
            stop, gap_start, gap = row - max(self.apart, 1) + 1, row, torch.zeros_like(row)
        elif length is None:
            raise ValueError("Random without causal draws among the blocks that exist: pass length, the number of keys")
        else:
            stop = torch.zeros_like(row) + (length + self.block_size - 1) // self.block_size - self.last
            gap_start = torch.minimum((row - self.apart + 1).clamp(min=self.first), stop)
            gap_stop = torch.minimum((row + self.apart).clamp(min=self.first), stop)
            gap = (gap_stop - gap_start).clamp(min=0)
        row = row + torch.zeros_like(stop)
        choices = (stop - self.first - gap).clamp(min=0)
        wanted = choices.clamp(max=self.blocks)
        ranks: list[Tensor] = []
        # Floyd's sampling: the n-th draw falls on 0 .. top, and a repeat becomes top, which no earlier draw could reach
        for n in range(self.blocks):
            top = choices - wanted + n
            rank = _hash(self.seed, n, self.head if head is None else head, row) * (top + 1) >> 32
            repeated = torch.zeros_like(rank, dtype=torch.bool)
            for other in ranks:
                repeated = repeated | (other == rank)
            ranks.append(torch.where(n < wanted, torch.where(repeated, top, rank), -1))
        drawn = torch.stack(ranks, -1)
        block = drawn + self.first
        block = block + gap[..., None] * (block >= gap_start[..., None])
        return torch.where(drawn >= 0, block, -1)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        table = self.table(i // self.block_size, causal=causal, length=length, head=head)
        column = j // self.block_size
        inside = table[..., 0] == column
        for n in range(1, self.blocks):
            inside = inside | (table[..., n] == column)
        return inside

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        table = self.table(i // self.block_size, causal=causal, length=S, head=head)[..., None]  # [n, blocks, 1]
        j = table * self.block_size + torch.arange(self.block_size, device=i.device)
        return torch.where(table >= 0, j, -1).flatten(1)


@dataclass(frozen=True, repr=False)
class Dense(Pattern):
    """Every pair."""

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return i + j >= 0

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return torch.arange(S, device=i.device).expand(len(i), -1)


@dataclass(frozen=True, repr=False, eq=False)
class Union(Pattern):
    """What any of the parts allows: made by `|`, flat, each atom once, equal in whatever order it was written."""

    parts: tuple[Pattern, ...]

    @property
    def atoms(self) -> tuple[Pattern, ...]:
        return self.parts

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        inside = self.parts[0]._mask(i, j, causal, length, head)
        for part in self.parts[1:]:
            inside = inside | part._mask(i, j, causal, length, head)
        return inside

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return self.keys(i, S, causal=causal, head=head)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Union) and frozenset(self.parts) == frozenset(other.parts)

    def __hash__(self) -> int:
        return hash(frozenset(self.parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


ATOMS: dict[str, type[Pattern]] = {
    kind.__name__: kind for kind in (Local, Dilated, Strided, Block, Summary, Global, Random, Dense)
}


@checked
def from_json(text: str) -> Pattern:
    """The pattern that `Pattern.to_json` wrote."""
    entries = parse_json(text, "text")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        refuse("text", text, "the JSON that to_json writes, a list of atoms")
    if not entries:
        raise ValueError("text is an empty list: a pattern needs at least one atom")
    return reduce(or_, map(_atom, entries))


def _atom(entry: dict[str, Any]) -> Pattern:
    name = entry.pop("atom", None)
    if not isinstance(name, str) or name not in ATOMS:
        raise ValueError(f"text has an atom {shown(name)}, which is not one of {', '.join(ATOMS)}")
    known = [field.name for field in fields(ATOMS[name])]  # type: ignore[arg-type]
    if not entry.keys() <= set(known):
        raise ValueError(f"text has {name} with {', '.join(entry)}: accepted are {', '.join(known)}")
    try:
        return ATOMS[name](**entry)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"text has {name} with {', '.join(entry) or 'nothing'}: {error}") from error


def changed(pattern: Pattern, kind: type[Pattern], **values: int) -> Pattern:
    """The pattern with other values in its atoms of one kind."""
    atoms = (replace(a, **values) if isinstance(a, kind) else a for a in pattern.atoms)  # type: ignore[type-var]
    return reduce(or_, atoms)


def without_head(pattern: Pattern) -> tuple[Pattern, int | None]:
    """The pattern with head 0 in place of the one that it draws random blocks for, and that head.

    A pattern that draws for several heads, or for none, stays as it is, with None.
    """
    heads = {atom.head for atom in pattern.atoms if isinstance(atom, Random)}
    return (changed(pattern, Random, head=0), heads.pop()) if len(heads) == 1 else (pattern, None)


def _hash(seed: int, draw: int, head: int | Tensor, row: Tensor) -> Tensor:
    """32 well-mixed bits of the counters, held in int64: the same on every device, and for a row by itself."""
    h: Any = 0
    for counter in (seed, seed >> 32, draw, head, row):  # numbers first: they are mixed once for all rows
        h = _mix(h ^ (counter & 0xFFFFFFFF))
    return h


def _mix(h: Any) -> Any:
    # a multiply-xorshift permutation of 32 bits (Wellons' lowbias32), offset so that zero does not map to itself
    h = (h + 0x9E3779B9) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)
