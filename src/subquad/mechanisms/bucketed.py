"""What reformer and routing share: a query sees two chunks of one bucket of keys, and a state lists the newest of each.

`subquad.ops.buckets` lays out tokens by bucket. A mechanism computes the buckets of its tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from subquad.mechanisms.attention import QKV, Attention
from subquad.mechanisms.base import KernelOptions, Traits
from subquad.ops import ordered
from subquad.ops.buckets import Lists, admit, empty_lists, recall, slot_attention, step
from subquad.ops.cache import append, with_room
from subquad.ops.impl import choose


class State(NamedTuple):
    k: Tensor  # [B, C, H, K]
    v: Tensor  # [B, C, H, V]
    members: Tensor  # [B, H, buckets, 2·chunk], see ops.buckets.Lists; reformer's also have rounds, after H
    total: Tensor  # [B, H, buckets]
    position: Tensor  # [B]


class Tokens(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, S, H, K], the keys of a state included
    v: Tensor  # [B, S, H, V]
    asked: Tensor  # [B, H, T] or [B, H, rounds, T], the bucket that each query reads; -1 for padding
    bucket: Tensor  # the bucket that each key is in


class Bucketed(Attention):
    """Attention inside buckets. Each token chooses its bucket by itself, so buckets do not depend on the future."""

    traits = Traits(causal=True, bidirectional=True, state="growing")
    family, exponent = "clustering", 1.0
    options: KernelOptions
    out: nn.Linear
    apart: bool  # whether a token reads itself only if it sees nothing else
    scale: float = 1.0  # of the scores

    def __init__(self, options: KernelOptions, strict: bool, lists: tuple[int, ...], chunk: int):
        """`lists`: buckets, or rounds and buckets. Without `strict`, chunks depend on the future: there is no state."""
        super().__init__(options, heads=False)
        self.strict = options.causal and strict
        self.lists, self.size = lists, chunk
        if not self.strict:
            self.traits = self.traits._replace(state=None)

    # What a mechanism writes

    def _tokens(self, x: Tensor, lengths: Tensor | None, position: Tensor | None = None) -> Tokens:
        raise NotImplementedError

    def _attend_near(self, tokens: Tokens, lists: Lists | None = None, start: Tensor | None = None) -> Tensor:
        """[B, T, H, V] for a whole sequence, or for tokens from position `start` [B] on, after those in the lists."""
        raise NotImplementedError

    def _attend_ordered(self, tokens: Tokens) -> Tensor:
        """The same for a whole sequence, by the kernels of `subquad.ops.ordered`."""
        raise NotImplementedError

    def _seen(self, near: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """For a token at `position`: the keys it sees [B, H, 1, W], whether they exist, and a bias for the scores."""
        raise NotImplementedError

    # What follows

    def _fused(self, x: Tensor) -> bool:
        """Whether the kernels compute a whole sequence of x [B, T, H, K]."""
        reason = "it has no dropout" if self._dropout() else ordered.unsupported(x)
        return choose(self.options.impl, "ordered_attention", x, reason) == "triton"

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> QKV:
        return self._tokens(x, None, position)[:3]

    def _merge(self, o: Tensor) -> Tensor:
        return self.out(o.flatten(-2))

    def _qkv(self, x: Tensor) -> QKV:
        q, k, v = self._project(x)
        return q * (self.scale * q.shape[-1] ** 0.5), k, v

    def _init_state(self, batch: int, capacity: int | None) -> State:
        cache = self._zeros(batch, capacity or 64, self.options.heads, self.width)
        *rounds, buckets = self.lists
        lists = empty_lists((batch, self.options.heads, *rounds), buckets, self.size, cache.device)
        return State(cache, cache.clone(), *lists, self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        before = self._init_state(*x.shape[:2]) if state is None else state
        start, lists = before.position, Lists(before.members, before.total)
        tokens = self._tokens(x, lengths, start)
        keys, values = append(before.k, tokens.k, start), append(before.v, tokens.v, start)
        position = self._by_list(start) + torch.arange(x.shape[1], device=x.device)
        new = State(keys, values, *admit(lists, tokens.bucket, position), self._advance(start, x, lengths))
        if state is None:
            attend = self._attend_ordered if self._fused(tokens.q) else self._attend_near
            return self._merge(attend(tokens)), new
        tokens = tokens._replace(k=keys.to(tokens.q.dtype), v=values.to(tokens.v.dtype))
        return self._merge(self._attend_near(tokens, lists, start)), new

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if self._steps(x):
            copies = (t.clone(memory_format=torch.contiguous_format) for t in state)
            return self._step_by_kernel(x, type(state)(*copies))
        q, k, v, asked, bucket = self._tokens(x[:, None], None, state.position)
        keys, values = append(state.k, k, state.position), append(state.v, v, state.position)
        position = self._by_list(state.position)
        lists = admit(Lists(state.members, state.total), bucket, position)
        own = asked[..., None].expand(*asked.shape, lists.members.shape[-1])
        near = recall(Lists(lists.members.gather(-2, own), lists.total.gather(-1, asked)))  # [B, H, (rounds,) 1, 2C]
        near, visible, bias = self._seen(near, position)
        query, k, v = torch.zeros_like(near[..., :1]), keys.to(q.dtype), values.to(v.dtype)
        o, _ = slot_attention(
            q * self.scale, k, v, query, near, visible[..., None, :], bias, self._dropout()
        )  # [B, H, 1, 1, V]
        return self._merge(o[:, :, 0, 0]), State(keys, values, *lists, state.position + 1)

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        members, heads = state.members, self.options.heads
        dense = all(t.is_contiguous() for t in (state.k, state.v, state.total, state.position))
        dense = dense and members.stride(0) == heads * members.stride(1) and members.stride()[-2:] == (2 * self.size, 1)
        if not (dense and self._steps(x)):
            return super()._step_inplace(x, state)
        y, new = self._step_by_kernel(x, state)
        return y, new._replace(position=state.position.copy_(new.position))

    def _steps(self, x: Tensor) -> bool:
        """Whether a kernel makes steps: without gradients."""
        heads = x.view(len(x), 1, self.options.heads, -1)
        return not torch.is_grad_enabled() and self._fused(heads)

    def _step_by_kernel(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """A step that changes the state, except for its position."""
        tokens = self._tokens(x[:, None], None, state.position)
        q, k, v = (t[:, 0] for t in tokens[:3])
        keys, values = (with_room(cache, state.position, 1) for cache in (state.k, state.v))
        asked, bucket = (t.view(*q.shape[:2], -1) for t in (tokens.asked, tokens.bucket))
        lists = (t.view(*bucket.shape, *t.shape[-n:]) for t, n in ((state.members, 2), (state.total, 1)))
        o = step(q, k, v, keys, values, *lists, asked, bucket, state.position, self.scale, self.apart)
        return self._merge(o), State(keys, values, state.members, state.total, state.position + 1)

    def _by_list(self, position: Tensor) -> Tensor:
        """[B] with a dimension of 1 for heads, for rounds if there are any, and for tokens."""
        return position.view(-1, 1, *[1] * len(self.lists))
