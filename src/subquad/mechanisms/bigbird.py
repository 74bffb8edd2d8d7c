"""BigBird: a window of blocks, global tokens, and random blocks, which together keep the reach of full attention.

Paper       Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062, §2 and appendix D
Definition  oₜ = Σₛ softmaxₛ(qₜ·kₛ / √K) vₛ over the blocks beside t's own and that one, `random` blocks that are drawn
            for t's block and head, and the global tokens, which in turn read everything:
            itc  the first `block` positions and the last `block` of the row
            etc  `block` learned tokens g before the sequence; they read first, g' = g + W o(g), and are read as g'
            causal: s ≤ t, two blocks of window, random blocks from the past; no global rows and no global last block;
            learned tokens have no past to read, so they are read as g
Cost        train O(T·block·(5 + random)·D) time, O(T·D) memory; decode O(block·(3 + random)·D) a token; state 2·T·D: a
            later block may draw any earlier one
Departures  the last global block is the row's last `block` positions, whatever T is, so that padding changes nothing;
            learned tokens live inside a layer (in the paper they pass through all of them). Short rows are sparse too
Verified    tests/mechanisms/test_bigbird.py: full attention when every block is covered, 1e-12; the blocks that each
            row reads, one by one; the transformers library's with the same draws, 1e-10
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast0, AtLeast1, Traits
from subquad.mechanisms.patterned import Patterned
from subquad.ops.rotary import rotate
from subquad.ops.sparse import sparse_attention
from subquad.ops.sparse.cache import SparseState
from subquad.ops.sparse.patterns import Block, Dense, Global, Pattern, Random


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    block: AtLeast1 = 64  # tokens of a block
    random: AtLeast0 = 3  # random blocks per block of queries and head
    construction: Literal["itc", "etc"] = "itc"  # global are the ends, or extra learned tokens


class Bigbird(Patterned):
    traits = Traits(causal=True, bidirectional=True, state="growing")
    exponent = 1.0
    splits = False  # it moves tokens to the front
    small = ({"block": 3, "random": 2}, {"block": 3, "random": 2, "construction": "etc"}, {"block": 4, "random": 0})
    options: Options
    draw: Tensor

    def __init__(self, options: Options):
        super().__init__(options)
        self.turn_width = None  # positions are those of another order, or count the learned tokens
        self.may_turn = options.causal
        if options.construction == "etc":
            self.tokens = nn.Parameter(torch.randn(options.block, options.dim))
        self.register_buffer("draw", torch.tensor(self._seed))
        self.register_load_state_dict_post_hook(_follow_the_loaded_draw)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.draw.fill_(self._seed if generator is None else torch.randint(2**62, (), generator=generator))
        self.restore()

    def restore(self) -> None:
        self._follow(self._patterns(int(self.draw)))

    @property
    def _seed(self) -> int:
        return self.options.seed * 1_000_003 + self.options.layer

    def _patterns(self, seed: int | None = None) -> Sequence[Pattern]:
        """Patterns over the op's sequence, which starts with the learned tokens, or, if not causal, the last block."""
        block, causal = self.options.block, self.options.causal
        in_front = 1 if causal or self.options.construction == "etc" else 2  # global blocks
        pattern = Block(block, 1, 0 if causal else 1) | Global(in_front * block)
        if not self.options.random:
            return [pattern] * self.options.heads
        drawn = Random(self.options.random, block, self._seed if seed is None else seed, apart=2, first=in_front)
        return [pattern | replace(drawn, head=head) for head in range(self.options.heads)]

    def _allowed(self, i: Tensor, j: Tensor, size: int) -> Tensor:
        block = self.options.block
        row, column = i // block, j // block
        read = ((row - column).abs() <= 1) | (j < block)
        if self.options.construction == "itc" and not self.options.causal:
            read = read | (i < block) | (i >= size - block) | (j >= size - block)
            row, column = row + 1, column + 1  # random blocks are counted from the last block, which goes first
        heads = []
        for pattern in self.patterns:
            heads.append(read)
            for drawn in pattern.atoms:
                if isinstance(drawn, Random):
                    table = drawn.table(row, causal=self.options.causal, length=size)  # [T, 1, random]
                    heads[-1] = heads[-1] | (table == column[..., None]).any(-1)
        return torch.stack(heads)

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if self.options.construction == "etc":
            longer = torch.cat((self._read(x, lengths), x), 1)
            return super()._forward(longer, self._longer(lengths))[:, len(self.tokens) :]
        if self.options.causal:
            return super()._forward(x, lengths)
        there, back = self._last_block_first(x, lengths)
        q, k, v = self.heads.split(_take(x, there))
        if self.options.rotary:
            q, k = rotate(q, there), rotate(k, there)
        return _take(self._merge(self._attend(q, k, v, lengths, lengths)), back)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.options.construction == "itc":
            return super()._reference(x)
        return super()._reference(self._with_tokens(x))[:, len(self.tokens) :]

    def _pattern(self, x: Tensor) -> Tensor:
        """With etc, only the weights of tokens of x; the rest of a row's weight is on the learned tokens."""
        if self.options.construction == "itc":
            return super()._pattern(x)
        size = len(self.tokens)
        return super()._pattern(self._with_tokens(x))[:, :, size:, size:]

    def _init_state(self, batch: int, capacity: int | None) -> SparseState:
        if self.options.construction == "itc":
            return super()._init_state(batch, capacity)
        state = super()._init_state(batch, (capacity or 64) + len(self.tokens))
        return self._count(super()._prefill(self.tokens.expand(batch, -1, -1), None, state)[1], -1)

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: SparseState | None) -> tuple[Tensor, SparseState]:
        if self.options.construction == "itc":
            return super()._prefill(x, lengths, state)
        if state is not None:
            y, state = super()._prefill(x, lengths, self._count(state, 1))
        else:
            tokens = self.tokens.expand(x.shape[0], -1, -1)
            y, state = super()._prefill(torch.cat((tokens, x), 1), self._longer(lengths), None)
            y = y[:, len(self.tokens) :]
        return y, self._count(state, -1)

    def _step(self, x: Tensor, state: SparseState, inplace: bool = False) -> tuple[Tensor, SparseState]:
        if self.options.construction == "itc":
            return super()._step(x, state, inplace)
        y, new = super()._step(x, self._count(state, 1), inplace)
        return y, new._replace(position=state.position.add_(1) if inplace else state.position + 1)

    def _decodes(self, state: SparseState) -> bool:
        return type(self) is Bigbird and self.options.construction == "itc" and not self.options.rotary

    def _count(self, state: SparseState, sign: int) -> SparseState:
        """Add or remove the learned tokens: the op's position counts them, the state that callers see does not."""
        return state._replace(position=state.position + sign * len(self.tokens))

    def _longer(self, lengths: Tensor | None) -> Tensor | None:
        return None if lengths is None else lengths + len(self.tokens)

    def _read(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """g': the learned tokens after they have read themselves and the sequence, [B, block, D]."""
        tokens, n = self.tokens.expand(x.shape[0], -1, -1), self._longer(lengths)
        if self.options.causal:
            return tokens
        q, k, v = self._project(tokens, torch.cat((tokens, x), 1))
        o = sparse_attention(q, k, v, Dense(), key_lengths=n, scale=self.scale, impl=self.options.impl)
        return tokens + self._merge(o)

    def _with_tokens(self, x: Tensor) -> Tensor:
        """g' before x, by the definition."""
        tokens = self.tokens.expand(x.shape[0], -1, -1)
        if not self.options.causal:
            q, k, v = self._project(tokens, torch.cat((tokens, x), 1))
            weights = (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
            tokens = tokens + self._merge(torch.einsum("bhts,bshv->bthv", weights, v))
        return torch.cat((tokens, x), 1)

    def _last_block_first(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Positions [B, T] that move each row's last block to the front, where global tokens are, and back."""
        at = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        stop = at.new_full((x.shape[0], 1), x.shape[1]) if lengths is None else lengths[:, None]
        last = stop.clamp(max=self.options.block)
        there = torch.where(at < last, at + stop - last, at - last)
        back = torch.where(at < stop - last, at + last, at - stop + last)
        return tuple(torch.where(at < stop, to, at) for to in (there, back))  # type: ignore[return-value]


def _take(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(1, at[..., None].expand_as(x))


def _follow_the_loaded_draw(module: nn.Module, _: Any) -> None:
    assert isinstance(module, Bigbird)
    module.restore()
