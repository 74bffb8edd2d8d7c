"""Patterns: which query may read which key, as an algebra of a few atoms.

Query i and key j are positions from 0. Atoms combine with `|` into their union, `causal=True` keeps j <= i.
The sets of the Sparse Transformer (arXiv:1904.10509) are Local(l, 0) with Strided(l), and Block(l) with Summary(l, c).
Only Random without `causal` depends on the length, because it draws among the blocks that exist.
"""
# ruff: noqa: ARG002 (all atoms have the same methods, and most of them need only some of the arguments)

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.checks import INTEGERS, at_least, check_count, check_device, check_methods, check_strided, refuse, shown
from subquad.disk import parse_json

__all__ = ["Block", "Dense", "Dilated", "Global", "Local", "Pattern", "Random", "Strided", "Summary"]
COUNTED = 2**22  # keys that `pairs` looks up at once
DENSEST = 2**36  # most elements of a matrix that `dense` makes
POSITIVE = ("l", "c", "gap", "tokens", "blocks", "block_size")  # fields that are at least 1; the others may be 0
Length = int | Tensor | None
Head = int | Tensor | None


@check_methods
class Pattern(ABC):
    """A set of pairs (query, key). Patterns are values: they compare, hash, and print as the code that makes them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_methods(cls)

    text: str  # as JSON: torch.compile takes strings as constants, but not patterns

    def __post_init__(self) -> None:
        # not by the module json, which torch.compile cannot trace: patterns may be made in compiled functions
        entries = []
        for atom in self.atoms:
            values = [f'"{f.name}": {getattr(atom, f.name)}' for f in fields(atom)]  # type: ignore[arg-type]
            entries.append("{" + ", ".join([f'"atom": "{type(atom).__name__}"', *values]) + "}")
        object.__setattr__(self, "text", "[" + ", ".join(entries) + "]")

    @property
    @abstractmethod
    def atoms(self) -> "tuple[Atom, ...]":
        """The parts of a union, or the pattern itself."""

    @abstractmethod
    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        """Whether the pattern holds the pairs; `_allowed` then removes j > i if causal."""

    def mask(self, i: Tensor, j: Tensor, *, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """Whether query i may read key j, elementwise on indices that broadcast.

        `length` is the number of keys. `head` replaces the head of every Random.
        """
        _check_indices(i=i, j=j, length=length, head=head)
        return self._allowed(i, j, causal, length, head)

    def _allowed(self, i: Tensor, j: Tensor, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """`mask` without the checks."""
        inside = self._mask(i, j, causal, length, head)
        return inside & (j <= i) if causal else inside

    def keys(self, i: Tensor, S: int, *, causal: bool = False, head: Head = None) -> Tensor:
        """The keys of queries i [n], each once, in any order: [n, m], filled up with -1.

        `head` replaces the head of every Random: an integer, or one for each query [n].
        """
        if i.ndim != 1:
            raise ValueError(f"i has shape {tuple(i.shape)}: accepted are the positions of n queries, [n]")
        check_count("S", S, 0)
        _check_indices(i=i, head=head)
        if isinstance(head, Tensor) and head.shape not in ((), i.shape):
            what = f"head has shape {tuple(head.shape)}"
            raise ValueError(f"{what}: accepted is one, or one for each query, {tuple(i.shape)}")
        queries, parts = i[:, None], []
        heads = head.expand(i.shape)[:, None] if isinstance(head, Tensor) else head
        for n, atom in enumerate(self.atoms):
            j = atom._keys(i, S, causal, head)
            new = (j >= 0) & (j < S)
            if causal:
                new = new & (j <= queries)
            for earlier in self.atoms[:n]:
                new = new & ~earlier._allowed(queries, j, causal, S, heads)
            parts.append(torch.where(new, j, -1))
        return torch.cat(parts, 1)

    def dense(
        self, T: int, S: int | None = None, *, causal: bool = False, device: torch.device | str | None = None
    ) -> Tensor:
        """The 0/1 matrix of T queries and S keys (by default S = T): bool [T, S]."""
        S = _keys_of(T, S)
        if device is not None:
            check_device("device", device)
        if T * S > DENSEST:
            refuse("T", T, f"T·S of at most 2**{DENSEST.bit_length() - 1}: count larger ones with pairs")
        i, j = torch.arange(T, device=device), torch.arange(S, device=device)
        return self._allowed(i[:, None], j[None], causal, S).expand(T, S).contiguous()

    def pairs(self, T: int, S: int | None = None, *, causal: bool = False) -> int:
        """The number of pairs in `dense`, counted without making that matrix."""
        S = _keys_of(T, S)
        if any(isinstance(atom, Dense) for atom in self.atoms):
            corner = min(T, S)
            return corner * (corner + 1) // 2 + (T - corner) * S if causal else T * S
        # a global token reads every key, so the rows of global tokens are full
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

    def __deepcopy__(self, _: object) -> "Pattern":
        return self  # nothing in it can change

    def to_json(self) -> str:
        return self.text

    @staticmethod
    def from_json(text: str) -> "Pattern":
        """The pattern that `to_json` wrote."""
        entries = parse_json(text, "text")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            refuse("text", text, "the JSON that to_json writes, a list of atoms")
        if not entries:
            raise ValueError("text is an empty list: a pattern needs at least one atom")
        return reduce(or_, map(_atom, entries))

    def _with(self, kind: "type[Atom]", **values: int) -> "Pattern":
        """The pattern with other values in its atoms of one kind."""
        return reduce(or_, (replace(a, **values) if isinstance(a, kind) else a for a in self.atoms))  # type: ignore[type-var]

    def _without_head(self) -> "tuple[Pattern, int | None]":
        """The pattern with head 0 in its random blocks, and the head they had.

        A pattern without random blocks, or with those of several heads, is returned as it is, with None.
        """
        heads = {atom.head for atom in self.atoms if isinstance(atom, Random)}
        return (self._with(Random, head=0), heads.pop()) if len(heads) == 1 else (self, None)

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        atoms = tuple(dict.fromkeys(self.atoms + other.atoms))
        return atoms[0] if len(atoms) == 1 else Union(atoms)


def _keys_of(T: int, S: int | None) -> int:
    """S, or T where it is None; refuses what is not a size."""
    check_count("T", T, 0)
    if S is not None:
        check_count("S", S, 0)
    return T if S is None else S


def _check_indices(**indices: int | Tensor | None) -> None:
    """Refuse tensors that are not integers, are on different devices, or have shapes that do not broadcast."""
    tensors = {name: x for name, x in indices.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if x.dtype not in INTEGERS or x.device != next(iter(tensors.values())).device:
            raise ValueError(f"{name}={shown(x)} cannot work: accepted are integers, on one device with the others")
        check_strided(name, x)
    if len({x.shape for x in tensors.values()}) > 1:
        try:
            torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(f"{shapes}: accepted are shapes that broadcast") from error


class Atom(Pattern):
    """A pattern that is not a union: a dataclass of integers."""

    def __post_init__(self) -> None:
        at_least(self, **{f.name: int(f.name in POSITIVE) for f in fields(self)})  # type: ignore[arg-type]
        super().__post_init__()

    @property
    def atoms(self) -> "tuple[Atom, ...]":
        return (self,)

    @abstractmethod
    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        """Candidates for `keys`: [n] -> [n, m]. It drops those outside 0 .. S - 1 and, if causal, those after i."""

    def __repr__(self) -> str:
        values = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        defaults = [f.default for f in fields(self)]  # type: ignore[arg-type]
        while values and defaults[-1] is not MISSING and values[-1] == defaults[-1]:
            values.pop(), defaults.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


@dataclass(frozen=True, repr=False, init=False)
class Local(Atom):
    """The keys from i - before to i + after; Local(w) is Local(w, w)."""

    before: int
    after: int

    def __init__(self, before: int, after: int | None = None) -> None:
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "after", before if after is None else after)
        self.__post_init__()

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (j >= i - self.before) & (j <= i + self.after)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        after = 0 if causal else self.after
        first = (i - self.before).clamp(min=0)[:, None]
        j = first + torch.arange(min(self.before + 1 + after, S), device=i.device)
        return torch.where(j <= i[:, None] + after, j, -1)


@dataclass(frozen=True, repr=False)
class Dilated(Atom):
    """The keys i + gap·m for |m| <= window: 2·window + 1 keys that span gap·window on each side."""

    window: int
    gap: int

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        span = self.gap * self.window
        return (j >= i - span) & (j <= i + span) & ((i - j) % self.gap == 0)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        after = 0 if causal else self.window
        first = (i - self.gap * (i // self.gap).clamp(max=self.window))[:, None]
        j = first + self.gap * torch.arange(min(self.window + 1 + after, -(-S // self.gap)), device=i.device)
        return torch.where(j <= i[:, None] + self.gap * after, j, -1)


@dataclass(frozen=True, repr=False)
class Strided(Atom):
    """The keys whose distance is a multiple of l: (i - j) mod l = 0."""

    l: int  # noqa: E741, the paper's letter

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (i - j) % self.l == 0

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return i[:, None] % self.l + self.l * torch.arange(-(-S // self.l), device=i.device)


@dataclass(frozen=True, repr=False)
class Block(Atom):
    """The keys of the query's own block of l, of the `before` blocks before it and of the `after` blocks after it."""

    l: int  # noqa: E741
    before: int = 0
    after: int = 0

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        row, column = i // self.l, j // self.l
        return (column >= row - self.before) & (column <= row + self.after)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        offsets = torch.arange(-self.before * self.l, (1 + (0 if causal else self.after)) * self.l, device=i.device)
        return i[:, None] // self.l * self.l + offsets


@dataclass(frozen=True, repr=False)
class Summary(Atom):
    """The last c keys of every block of l; with a shift, those where l - c·(shift + 1) <= j mod l < l - c·shift.

    With shifts, heads can summarise different parts of a block.
    """

    l: int  # noqa: E741
    c: int
    shift: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c * (self.shift + 1) > self.l:
            raise ValueError(f"{self!r}: c·(shift + 1) must be at most l, got {self.c * (self.shift + 1)} > {self.l}")

    def columns(self, S: int, device: torch.device | None = None) -> Tensor:
        """The keys below S that it holds, in ascending order: int64 [n]."""
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
class Global(Atom):
    """All queries read the first `tokens` keys, and, if not causal, the first `tokens` queries read all keys."""

    tokens: int

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return (i < self.tokens) | (j < self.tokens)

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        rows = not causal and (i.is_meta or bool((i < self.tokens).any()))
        j = torch.arange(S if rows else min(self.tokens, S), device=i.device).expand(len(i), -1)
        return torch.where((i[:, None] < self.tokens) | (j < self.tokens), j, -1)


@dataclass(frozen=True, repr=False)
class Random(Atom):
    """Each block of queries reads `blocks` different blocks of keys, or all candidates if there are fewer.

    The draw depends only on (seed, head, block of queries). Causal: it is among the blocks before the query's own, for
    any T. Otherwise it is among all blocks, so it depends on the number of keys.
    Blocks that a window or global tokens read already can be left out: those less than `apart` blocks away (apart=2
    leaves out the own block and its neighbours), the `first` blocks, and, without `causal`, the `last`.
    """

    blocks: int
    block_size: int
    seed: int = 0
    head: int = 0
    apart: int = 0
    first: int = 0
    last: int = 0

    def table(self, row: Tensor, *, causal: bool = False, length: Length = None, head: Head = None) -> Tensor:
        """The key blocks of query blocks `row` [...] -> [..., blocks], filled up with -1.

        Without `causal`, `length` is needed: the number of keys. It and `head` are integers or broadcast with row.
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
        # Floyd's sampling: draw n is from 0 .. top, and a repeat becomes top, which no earlier draw could be
        for n in range(self.blocks):
            top = choices - wanted + n
            rank = _hash(self.seed, n, self.head if head is None else head, row) * (top + 1) >> 32
            repeated = reduce(or_, (other == rank for other in ranks), torch.zeros_like(rank, dtype=torch.bool))
            ranks.append(torch.where(n < wanted, torch.where(repeated, top, rank), -1))
        drawn = torch.stack(ranks, -1)
        block = drawn + self.first
        block = block + gap[..., None] * (block >= gap_start[..., None])
        return torch.where(drawn >= 0, block, -1)

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        table = self.table(i // self.block_size, causal=causal, length=length, head=head)
        column = j // self.block_size
        return reduce(or_, (block == column for block in table.unbind(-1)))

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        table = self.table(i // self.block_size, causal=causal, length=S, head=head)[..., None]  # [n, blocks, 1]
        j = table * self.block_size + torch.arange(self.block_size, device=i.device)
        return torch.where(table >= 0, j, -1).flatten(1)


@dataclass(frozen=True, repr=False)
class Dense(Atom):
    """Every pair."""

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return i + j >= 0

    def _keys(self, i: Tensor, S: int, causal: bool, head: Head) -> Tensor:
        return torch.arange(S, device=i.device).expand(len(i), -1)


@dataclass(frozen=True, repr=False, eq=False)
class Union(Pattern):
    """The pairs of all its parts. `|` makes it, without nesting and with each atom once; the order does not matter."""

    parts: tuple[Atom, ...]

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return self.parts

    def _mask(self, i: Tensor, j: Tensor, causal: bool, length: Length, head: Head) -> Tensor:
        return reduce(or_, (part._mask(i, j, causal, length, head) for part in self.parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Union) and frozenset(self.parts) == frozenset(other.parts)

    def __hash__(self) -> int:
        return hash(frozenset(self.parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


ATOMS = {kind.__name__: kind for kind in (Local, Dilated, Strided, Block, Summary, Global, Random, Dense)}


def _atom(entry: dict[str, Any]) -> Atom:
    name = entry.pop("atom", None)
    if not isinstance(name, str) or name not in ATOMS:
        raise ValueError(f"text has an atom {shown(name)}, which is not one of {', '.join(ATOMS)}")
    known = [field.name for field in fields(ATOMS[name])]
    if not entry.keys() <= set(known):
        raise ValueError(f"text has {name} with {', '.join(entry)}: accepted are {', '.join(known)}")
    try:
        return ATOMS[name](**entry)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"text has {name} with {', '.join(entry) or 'nothing'}: {error}") from error


def _hash(seed: int, draw: int, head: int | Tensor, row: Tensor) -> Tensor:
    """32 random bits from the counters, as int64: the same on every device, and for each row alone."""
    h: Any = 0
    for counter in (seed, seed >> 32, draw, head, row):  # numbers first: each is mixed once for all rows
        # a multiply-xorshift permutation of 32 bits (Wellons' lowbias32), offset so that zero does not map to itself
        h = ((h ^ (counter & 0xFFFFFFFF)) + 0x9E3779B9) & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        h = h ^ (h >> 16)
    return h
