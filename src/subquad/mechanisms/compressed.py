"""Memory-compressed attention: a strided convolution turns every few keys and values into one slot; queries read slots.

Paper       Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198, §4.2.3
Definition  kⱼ' = Σᵢ Wᵢ k_{j·stride + i} + b for 0 ≤ i < stride, per head, and vⱼ' likewise with weights of its own;
            oₜ = Σⱼ softmaxⱼ(qₜ·kⱼ' / √K) vⱼ'. Slot j starts at position j·stride whatever T is.
            Bidirectional: a row's last slot is completed with zeros. Causal: t reads the slots whose last position is
            at most t; a t before the end of slot 0 reads a learned null value instead
Cost        train O(T²/stride·D) time, O(T·D) memory; decode O(T/stride·D) a token; state 2·(T/stride + stride)·D
Departures  the null value is read only where there is no slot, so stride=1 with W = I is full attention; a query does
            not see the tokens of its own unfinished slot; rotary positions rotate a slot by its last position; the
            paper alternates this with local attention, which here is a choice of mechanism per layer
Verified    tests/mechanisms/test_compressed.py: the full attention limit, 1e-12; memory_compressed_attention 0.0.7 with
            copied weights, one head, T divisible by the stride, 1e-12 once its null slot scores far below the others
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.mechanisms import base
from subquad.mechanisms.attention import QKV, Attention
from subquad.mechanisms.base import AtLeast1, Traits
from subquad.ops.cache import append, cached_attention, readable_positions, with_room_for
from subquad.ops.dense import counted_attention, dense_attention
from subquad.ops.lengths import padding, symbolic, zero_padding
from subquad.ops.precision import wide_type
from subquad.ops.rotary import Turns, rotate, turned, turns
from subquad.ops.slots import Convolution, Slots, convolved, slots_step


class State(NamedTuple):
    k: Tensor  # [B, C/stride, H, K], finished slots
    v: Tensor  # [B, C/stride, H, V]
    last_k: Tensor  # [B, stride-1, H, K], the position % stride keys of the unfinished slot
    last_v: Tensor  # [B, stride-1, H, V]
    position: Tensor  # [B]


class Memory(NamedTuple):
    k: Tensor  # [B, S/stride, H, K], slots
    v: Tensor  # [B, S/stride, H, V]
    lengths: Tensor  # [B], of the context


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    stride: AtLeast1 = 3  # tokens that become one key and one value


class Compressed(Attention):
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family, exponent = "fewer queries or keys", 2.0
    small = ({}, {"stride": 1}, {"stride": 8})
    may_turn = False
    splits = True
    options: Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.turn_width = None  # slots are at other positions than tokens
        dim, heads, stride = options.dim, options.heads, options.stride
        self.key = nn.Conv1d(dim, dim, stride, stride, groups=heads)
        self.value = nn.Conv1d(dim, dim, stride, stride, groups=heads)
        self.nothing = nn.Parameter(torch.zeros(heads, dim // heads)) if options.causal and stride > 1 else None

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> QKV:
        return self.heads.split(x, context)  # not rotated yet: slots are rotated instead of keys

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        at, counts, stride = ranks.positions(q.shape[1], q.device), key_lengths, self.options.stride
        q = self._turn(q, at)
        if (cut := ranks.layout(q.shape[1])) is not None:
            slots_k, slots_v = self._slots_of_all(k, v, lengths, cut)
            if self.options.causal:
                return self._attend_first(q, slots_k, slots_v, (at[None] + 1) // stride)
            visible = self._visible(ranks.whole_lengths(lengths), slots_k.shape[1])
            return dense_attention(q, slots_k, slots_v, visible, dropout=self._dropout())
        if self.options.causal and symbolic(q.shape[1]):
            return self._attend_first(q, *self._compress_all(k, v, None), (at[None] + 1) // stride)
        if self.options.causal:
            whole = k.shape[1] // stride * stride
            return self._attend_causally(q, *self._compress(k[:, :whole], v[:, :whole]))
        if counts is None and symbolic(k.shape[1]):
            counts = torch.full(k.shape[:1], k.shape[1], device=q.device)  # hides the extra slots
        k, v = self._compress_all(k, v, counts)
        return dense_attention(q, k, v, self._visible(counts, k.shape[1]), dropout=self._dropout())

    def _slots_of_all(self, k: Tensor, v: Tensor, lengths: Tensor | None, cut: ranks.Layout) -> tuple[Tensor, Tensor]:
        """The slots of all ranks: a slot is made by the rank of its first token, with the tokens after its part."""
        stride = self.options.stride
        first = [-(-start // stride) for start in (*cut.starts, cut.total)]  # the first slot of each rank
        counts = [b - a for a, b in itertools.pairwise(first)]
        around = ranks.halo(zero_padding(torch.cat((k, v), -1), lengths), 0, stride - 1)
        lead = first[cut.rank] * stride - cut.offset
        own = around[:, lead : lead + counts[cut.rank] * stride]
        if counts[cut.rank]:
            rows = torch.full(k.shape[:1], first[cut.rank], device=k.device)
            own_k, own_v = own.contiguous().chunk(2, -1)
            slots = torch.cat(self._compress(own_k, own_v, rows), -1)
        else:
            unused = (around, *self.key.parameters(), *self.value.parameters())
            slots = ranks.tie(own.new_zeros(len(k), 0, *own.shape[2:]), *unused)
        every = ranks.gather(F.pad(slots, (0, 0, 0, 0, 0, max(counts) - slots.shape[1])))
        slots = torch.cat([part[:, :count] for part, count in zip(every, counts, strict=True)], 1)
        return slots[..., : k.shape[-1]], slots[..., k.shape[-1] :]

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        return Memory(*self._compress_all(*self.heads.keys(context), lengths), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q = self.heads.queries(x)
        visible = self._visible(memory.lengths, memory.k.shape[1])
        k, v = memory.k.to(q.dtype), memory.v.to(q.dtype)
        return self._merge(dense_attention(q, k, v, visible, dropout=self._dropout()))

    def _compress_all(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """The slots of whole sequences, the last one completed with zeros: [B, N, H, K]"""
        missing = padding(k.shape[1], self.options.stride)
        return self._compress(*(F.pad(zero_padding(t, lengths), (0, 0, 0, 0, 0, missing)) for t in (k, v)))

    def _visible(self, lengths: Tensor | None, slots: int) -> Tensor | None:
        """Slots a query may see, [B, 1, 1, N]; an empty row sees one, because a softmax over none is NaN."""
        if lengths is None:
            return None
        starts = torch.arange(slots, device=lengths.device) * self.options.stride
        return (starts < lengths.clamp(min=1)[:, None])[:, None, None]

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights of the null value and of each slot, [B, H, T, 1+N], and all values, [B, 1+N, H, V]."""
        q, k, v = self.heads.split(x, context)
        nothing = torch.zeros_like(v[:, 0]) if self.nothing is None else self.nothing.expand_as(v[:, 0])
        return self._weights(q, k), torch.stack([nothing, *self._slots(v, self.value)], 1)

    def _pattern(self, x: Tensor) -> Tensor:
        """The weights of slots, each divided equally among the tokens of the slot."""
        weights = self._define(x)[0][..., 1:]  # [B, H, T, N]
        tokens = torch.arange(x.shape[1], device=x.device) // self.options.stride
        member = (tokens == torch.arange(weights.shape[-1], device=x.device)[:, None]).to(x.dtype)  # [N, T]
        return weights @ (member / member.sum(-1, keepdim=True))

    def _init_state(self, batch: int, capacity: int | None) -> State:
        heads, stride = self.options.heads, self.options.stride
        k = self._zeros(batch, -(-(capacity or 64) // stride), heads, self.width)
        last = self._zeros(batch, stride - 1, heads, self.width)
        return State(k, k.clone(), last, last.clone(), self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        ranks.refuse("prefill of Compressed", "accepted is forward, or a prompt on one rank")
        before = self._init_state(*x.shape[:2]) if state is None else state
        (size, stride), device = (x.shape[1], self.options.stride), x.device
        q, k, v = self.heads.split(x)
        at = before.position[:, None] + torch.arange(size, device=device)  # [B, T]
        q = self._turn(q, at)
        first, rest = before.position // stride, before.position % stride  # [B], the open slot, and its tokens so far
        k, v = (  # [B, stride-1+T, H, K], from slot `first` on
            append(F.pad(last, (0, 0, 0, 0, 0, size)).to(new.dtype), new, rest)
            for last, new in ((before.last_k, k), (before.last_v, v))
        )
        position = self._advance(before.position, x, lengths)
        kept = ((position // stride - first) * stride)[:, None] + torch.arange(stride - 1, device=device)
        kept = kept.clamp(max=k.shape[1] - 1)  # [B, stride-1]; entries beyond the row's tokens are never read
        rows = torch.arange(x.shape[0], device=device)[:, None]
        slots_k, slots_v = self._compress(k, v, first)
        last_k, last_v = k[rows, kept].to(before.last_k.dtype), v[rows, kept].to(before.last_v.dtype)
        new = State(append(before.k, slots_k, first), append(before.v, slots_v, first), last_k, last_v, position)
        if state is None and not symbolic(size):
            whole = size // stride
            return self._merge(self._attend_causally(q, slots_k[:, :whole], slots_v[:, :whole])), new
        return self._merge(self._attend_first(q, new.k, new.v, (at + 1) // stride)), new

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self._dropout():
            return super()._step_inplace(x, state) if inplace else super()._step(x, state)
        q, k, v = (t[:, 0] for t in self.heads.split(x[:, None]))  # [B, H, K]
        new = self._with_room(state)
        if not inplace:
            new = State(*(t.clone() if t is old else t for t, old in zip(new, state, strict=True)))
        return self._merge(self._attend_to_slots(q, k, v, new, moves=True)), new

    def _decodes(self, state: State) -> bool:
        return type(self) is Compressed and not self._dropout()

    def _decode(self, qkv: Tensor, state: State, turns: Turns | None) -> tuple[Tensor, State]:
        both, v = self.heads.cut(qkv)
        q, k = both.chunk(2, dim=1)
        state = self._with_room(state)
        return self._attend_to_slots(q, k, v, state, moves=False).flatten(1), state

    def _with_room(self, state: State) -> State:
        """The state, with a slot for the next token of each row."""
        used = readable_positions(state.k, state.position)
        used = None if used is None else [n // self.options.stride for n in used]
        k, v = (with_room_for(t, used, 1) for t in state[:2])
        return state if k is state.k else state._replace(k=k, v=v)

    def _attend_to_slots(self, q: Tensor, k: Tensor, v: Tensor, state: State, moves: bool) -> Tensor:
        """One token, [B, H, ·], in place."""
        key, value = (Convolution(conv.weight, conv.bias) for conv in (self.key, self.value))  # type: ignore[arg-type]
        parts = Slots(state.k, state.last_k), Slots(state.v, state.last_v)
        by = turns(state.position[:, None], self.width, wide_type(q)) if self.options.rotary else None
        q = q if by is None else turned(q[:, None], by)[:, 0]
        seen = slots_step(k, v, *parts, state.position, key, value, self.nothing, moves=moves, by=by)
        return cached_attention(q, state.k, state.v, seen)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x, state, inplace=True)

    def _compress(self, k: Tensor, v: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, N·stride, H, K] -> [B, N, H, K]; the first slot of a row has index `first` [B] (0 if None)."""
        stride = self.options.stride
        if k.shape[1] < stride:
            return k[:, :0], v[:, :0]
        k, v = self._convolve(k, self.key), self._convolve(v, self.value)
        index = torch.arange(k.shape[1], device=k.device)
        index = index if first is None else first[:, None] + index
        return self._turn(k, index * stride + stride - 1), v

    def _convolve(self, t: Tensor, conv: nn.Conv1d) -> Tensor:
        """conv of [B, N·stride, H, K] -> [B, N, H, K]"""
        stride = self.options.stride
        assert conv.bias is not None
        windows = t[:, : t.shape[1] // stride * stride].unflatten(1, (-1, stride))
        return convolved(windows, Convolution(conv.weight, conv.bias))

    def _turn(self, t: Tensor, positions: Tensor) -> Tensor:
        return rotate(t, positions) if self.options.rotary else t

    def _attend_first(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention of queries to the first `seen` [B or 1, T] slots."""
        o = counted_attention(q, k, v, seen.clamp(min=1), dropout=self._dropout())
        return o if self.nothing is None else torch.where(seen[..., None, None] > 0, o, self.nothing.to(o.dtype))

    def _attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q from position 0 on, in blocks of `stride`. Each place in a block is an ordinary causal attention over
        slots, without a mask: one slot more from block to block. Nothing is copied for it: q, k and v are views."""
        (batch, size), slots, stride = q.shape[:2], k.shape[1], self.options.stride
        blocks = -(-size // stride)
        q = F.pad(q, (0, 0, 0, 0, 0, blocks * stride - size)) if size % stride else q
        outputs = []
        for place, own in enumerate(q.unflatten(1, (blocks, stride)).unbind(2)):  # [B, N, H, K]
            own = own[:, :slots] if place == stride - 1 else own[:, 1:]  # the others do not see their own slot
            seen = own.shape[1]
            o = dense_attention(own, k[:, :seen], v[:, :seen], causal=True, dropout=self._dropout()) if seen else own
            if place < stride - 1:
                assert self.nothing is not None
                o = torch.cat((self.nothing.to(o.dtype).expand(batch, 1, -1, -1), o), 1)
            outputs.append(F.pad(o, (0, 0, 0, 0, 0, blocks - o.shape[1])) if o.shape[1] < blocks else o)
        return torch.stack(outputs, 2).flatten(1, 2)[:, :size]

    def _slots(self, t: Tensor, conv: nn.Conv1d) -> list[Tensor]:
        """The convolution by its definition: [B, T, H, K] -> N x [B, H, K]"""
        (_, size, heads, _), stride = t.shape, self.options.stride
        weight, bias = conv.weight.unflatten(0, (heads, -1)), conv.bias
        assert bias is not None
        slots = []
        for start in range(0, size - stride + 1 if self.options.causal else size, stride):
            slot = bias.unflatten(0, (heads, -1)).expand(len(t), -1, -1)
            for i in range(min(stride, size - start)):
                slot = slot + torch.einsum("hok,bhk->bho", weight[..., i], t[:, start + i])
            slots.append(slot)
        return slots

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Weights of the null value, visible only where there is no slot, and of the slots: [B, H, T, 1+N]"""
        keys = torch.stack([torch.zeros_like(k[:, 0]), *self._slots(k, self.key)], 1)
        ends = torch.arange(keys.shape[1], device=q.device) * self.options.stride - 1
        at = torch.arange(q.shape[1], device=q.device)
        q, keys = self._turn(q, at), self._turn(keys, ends)
        scores = torch.einsum("bthk,bnhk->bhtn", q, keys) / math.sqrt(q.shape[-1])
        visible = (ends <= at[:, None]) | (not self.options.causal)  # [T, 1+N]
        visible[:, 0] = ~visible[:, 1:].any(-1)
        return scores.masked_fill(~visible, -math.inf).softmax(-1)
