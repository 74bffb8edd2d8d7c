"""The arguments of one call inside this folder: its tensors, and everything else in plain types."""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from subquad.ops.sparse.patterns import Atom, Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, D]
    k: Tensor  # [B, S, Hkv, D]
    v: Tensor  # [B, S, Hkv, D]
    lengths: Tensor | None  # [B], of the queries
    key_lengths: Tensor | None  # [B]


class Spec(NamedTuple):
    """Everything but the tensors. The operator takes these fields one by one, because it accepts only plain types."""

    pattern: str  # as JSON
    draws: tuple[int, ...]  # the head that each head draws random blocks for; empty: as the pattern says
    shifts: tuple[int, ...]  # the shift of each head's summary; empty: as the pattern says
    causal: bool
    scale: float
    return_lse: bool
    impl: str  # "torch" or "triton"

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return ordered_atoms(self.pattern, self.causal)

    def first_columns(self, atom: Summary) -> list[int]:
        """Where the columns of a summary start in a block: one for all heads, or one for each."""
        return [atom.l - atom.c * (shift + 1) for shift in self.shifts or (atom.shift,)]


@lru_cache(maxsize=256)
def ordered_atoms(pattern: str, causal: bool) -> tuple[Atom, ...]:
    """The atoms of a pattern (as JSON), simplified, with the cheapest rule first.

    A pair in several atoms counts for the first of them only, so the rules of the first atoms are evaluated most often.
    """
    windows: list[Local] = []
    others: list[Atom] = []
    for atom in Pattern.from_json(pattern).atoms:
        match atom:
            case Dense() | Strided(l=1):
                return (Dense(),)
            case Summary(l, c) if l == c:
                return (Dense(),)
            case Local():
                windows.append(atom)
            case Dilated(window, gap) if gap == 1 or window == 0:
                windows.append(Local(window))
            case Block(l=1):
                windows.append(Local(atom.before, atom.after))
            case _:
                others.append(atom)
    if windows:  # all windows contain j = i, so their union is a window
        others.append(Local(max(w.before for w in windows), 0 if causal else max(w.after for w in windows)))
    columns = [a for a in others if isinstance(a, Global)]
    if columns:
        others = [a for a in others if not isinstance(a, Global)] + [Global(max(a.tokens for a in columns))]
    rank = (Global, Local, Block, Dilated, Strided, Summary, Random)
    return tuple(sorted(set(others), key=lambda a: (rank.index(type(a)), repr(a))))
