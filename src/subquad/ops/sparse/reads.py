"""What one token reads of a cache, as a few integers for each head, which the kernel of a step (cache_triton.py) takes.

Causal sets of positions below p come in four forms, which do not overlap once the third and fourth are cut to the gap
between the first two:

    front    the first keys (Global)
    window   the newest keys: what Local, Block and Dense hold starts at some position and ends at p
    comb     every m-th key, or c of every m: Strided, Dilated, Summary
    draws    blocks drawn at random
"""

import itertools
from functools import lru_cache
from typing import NamedTuple

from subquad.ops.sparse.patterns import Atom, Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary

ALL = 2**31 - 1  # further back than any position


class Head(NamedTuple):
    """The reads of one head, of a token at position p. The kernel reads the fields in this order."""

    front: int = 0  # keys 0 .. front - 1
    before: int = -1  # the window reaches back to p - before; -1: it does not
    block: int = 1  # and to the start of this many blocks of `block` before p's own
    blocks: int = -1
    kept: int = -1  # keys j of j mod (the cache's block) from this on are in the log; -1: none
    step: int = 1  # the comb: keys j with (j - first) mod step < teeth, at most `reach` before p
    teeth: int = 1
    first: int = 0
    follows: int = 0  # 1: `first` is p mod step instead
    reach: int = -1
    size: int = 1  # of a drawn block
    draws: int = 0
    seed: int = 0
    seed_high: int = 0
    head: int = 0
    apart: int = 0
    skipped: int = 0


class Reads(NamedTuple):
    """A cache's slots, [pinned | ring | log], or one for every position, and the reads of each head."""

    everything: bool
    pinned: int
    ring: int
    block: int
    columns: int
    heads: tuple[Head, ...]  # one, if all heads read the same

    def __str__(self) -> str:
        """For an operator, which takes only plain types; `parse` reads it."""
        return " ".join(str(int(n)) for n in (*self[:-1], *itertools.chain(*self.heads)))

    @staticmethod
    def parse(text: str) -> "Reads":
        return _parse(text)

    @property
    def combs(self) -> bool:
        return any(head.reach >= 0 for head in self.heads)

    @property
    def draws(self) -> int:
        return max(head.draws for head in self.heads)

    def most(self, size: int) -> int:
        """The most keys that a head reads of a cache of that many slots."""
        positions = size
        if self.columns and not self.everything:
            positions = (size - self.pinned - self.ring) // self.columns * self.block
        most = 0
        for head in self.heads:
            window = max(head.before, (head.blocks + 1) * head.block - 1)
            comb = (min(head.reach, positions) // head.step + 1) * head.teeth if head.reach >= 0 else 0
            most = max(most, min(window, size) + head.front + comb + head.size * head.draws)
        return min(most, size)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Reads:
    everything, pinned, ring, block, columns, *rest = map(int, text.split())
    fields = len(Head._fields)
    heads = tuple(Head(*rest[n : n + fields]) for n in range(0, len(rest), fields))
    return Reads(bool(everything), pinned, ring, block, columns, heads)


def reads_of(pattern: Pattern, kept: int = -1) -> Head | str:
    """The reads of a head with this pattern, or why they do not have that form."""
    head = Head(kept=kept)
    combs: list[Atom] = []
    draws: list[Random] = []
    for atom in pattern.atoms:
        match atom:
            case Global(tokens):
                head = head._replace(front=max(head.front, tokens))
            case Local(before):
                head = head._replace(before=max(head.before, before))
            case Dense():
                head = head._replace(before=ALL)
            case Block(l, before) if head.blocks < 0 or head.block == l:
                head = head._replace(block=l, blocks=max(head.blocks, before))
            case Block():
                return f"blocks of two sizes in {pattern}"
            case Dilated() | Strided() | Summary():
                combs.append(atom)
            case Random():
                draws.append(atom)
    if len(combs) + len(draws) > 1:
        return f"{' and '.join(map(repr, (*combs, *draws)))} in one head, which may hold a key twice"
    for comb in combs:
        match comb:
            case Strided(l):
                head = head._replace(step=l, follows=1, reach=ALL)
            case Dilated(window, gap):
                head = head._replace(step=gap, follows=1, reach=min(window * gap, ALL))
            case Summary(l, c, shift):
                head = head._replace(step=l, teeth=c, first=l - c * (shift + 1), reach=ALL)
    for drawn in draws:
        seed, high = (_signed(number) for number in (drawn.seed, drawn.seed >> 32))
        about = {"head": drawn.head, "apart": drawn.apart, "skipped": drawn.first}
        head = head._replace(size=drawn.block_size, draws=drawn.blocks, seed=seed, seed_high=high, **about)
    return head


def _signed(number: int) -> int:
    """The lowest 32 bits as int32."""
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
