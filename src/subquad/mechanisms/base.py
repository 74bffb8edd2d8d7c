"""The contract of a mechanism: what goes in, what comes out, what raises.

Legend for shapes, here and in every mechanism:
    B batch, T queries, S keys, H heads, K key width, V value width, D model width, M features, C chunk or capacity,
    N blocks. Tensors for heads are [B, T, H, ·].

A mechanism is a token mixer with its own projections. It subclasses `Mixer` and writes the underscored methods, which
receive checked arguments with padding already set to zero; `Mixer` holds everything that is the same for all of them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from subquad.checks import (
    FLOATS,
    at_least,
    check_count,
    check_methods,
    check_plain,
    check_strided,
    check_tensor,
    refuse,
)
from subquad.ops.autocast import autocasts
from subquad.ops.lengths import check_lengths, shape_of
from subquad.ops.rotary import rotate

StateKind = Literal["constant", "window", "growing"]
State = Any  # a NamedTuple of tensors, batch first, one of them `position` [B]; each mechanism has its own


class Memory(NamedTuple):
    """A context as it came. Mechanisms that can prepare something of it have a memory of their own, `lengths` last."""

    context: Tensor  # [B, S, D]
    lengths: Tensor  # [B]


class Traits(NamedTuple):
    """What a mechanism can do (on the class) or does (on an instance)."""

    causal: bool = False
    bidirectional: bool = True
    cross: bool = False
    state: StateKind | None = None
    fixed_length: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base options; a mechanism adds its own in a frozen subclass."""

    dim: int  # width of the model
    heads: int = 1  # of the attention; dim is split over them
    causal: bool = False  # a position sees itself and what came before
    dropout: float = 0.0  # of attention weights, in training
    rotary: bool = False  # rotate queries and keys by their position
    layer: int = 0  # index in the stack, for interleaving and sharing
    seed: int = 0  # of everything drawn at random when the module is made
    max_length: int | None = None  # the longest sequence, where something learned has that size

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            check_plain(name, getattr(self, name), hint)
        at_least(self, dim=1, heads=1, layer=0, seed=0)
        if self.seed >= 2**40:
            refuse("seed", self.seed, "an integer below 2**40")
        if self.max_length is not None:
            at_least(self, max_length=1)
        if not 0 <= self.dropout < 1:
            refuse("dropout", self.dropout, "a probability in [0, 1)")


def keep(lengths: Tensor | None, size: int) -> Tensor | None:
    """True where a right-padded row has a token: [B] -> [B, size]."""
    if lengths is None:
        return None
    return torch.arange(size, device=lengths.device) < lengths[:, None]


class Heads(nn.Module):
    """The projections of multi-head attention: x -> q, k, v per head, and back."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)  # one product instead of three
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q from x, k and v from the context (x itself if there is none): [B, T, D] -> 3 x [B, T, H, D/H]."""
        if context is not None:
            return self.queries(x), *self.keys(context)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        return q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, D] -> q [B, T, H, D/H]"""
        q = nn.functional.linear(x, self.qkv.weight[: self.dim], self.qkv.bias[: self.dim])
        return q.unflatten(-1, (self.heads, -1))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> k and v [B, S, H, D/H]"""
        both = nn.functional.linear(context, self.qkv.weight[self.dim :], self.qkv.bias[self.dim :])
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in both.chunk(2, dim=-1))
        return k, v

    def merge(self, o: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]"""
        return self.out(o.flatten(-2))


@check_methods
class Mixer(nn.Module):
    """Base of all mechanisms: `forward`, `prefill`, `step`, `reference`, `pattern` over checked input."""

    options_type: ClassVar[type[Options]] = Options
    state_type: type | None = None
    memory_type: type[Any] = Memory
    traits: Traits = Traits()
    family: ClassVar[str]  # as the lecture notes sort them
    exponent: ClassVar[float]  # training time grows as T to this power
    memory: ClassVar[float] = 1.0  # and training memory as T to this one
    equivariant: ClassVar[bool] = False  # bidirectional, without positions: permuting the tokens permutes the output
    joint_queries: bool = False  # in cross-attention one query's result depends on the others: not for decoders
    unused: ClassVar[frozenset[str]] = frozenset({"max_length"})  # base options without meaning here
    small: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # options at which forty tokens already show it at work

    _like: Tensor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_methods(cls)

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self._refuse_impossible()
        possible = type(self).traits
        causal = options.causal
        self.traits = possible._replace(
            causal=causal,
            bidirectional=not causal,
            cross=possible.cross and not causal,
            state=possible.state if causal else None,
        )
        self._shape_memo: tuple[torch.dtype, list[tuple[torch.dtype, tuple[int | None, ...]]]] | None = None
        self._memory_memo: list[tuple[int | None, ...]] | None = None
        # parameter-free mechanisms follow .to() as well, and their states are made where they are
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def _refuse_impossible(self) -> None:
        options, cls = self.options, type(self)
        name = cls.__name__
        for field in dataclasses.fields(Options):
            if field.name in cls.unused - {"heads", "dim"} and getattr(options, field.name) != field.default:
                value = getattr(options, field.name)
                raise ValueError(f"{field.name}={value!r} has no meaning for {name}: leave it at {field.default!r}")
        if options.causal and not cls.traits.causal:
            raise ValueError(f"causal=True cannot work: {name} has no causal form ({cls._why_not_causal})")
        if not options.causal and not cls.traits.bidirectional:
            raise ValueError(f"causal=False cannot work: {name} is causal only; pass causal=True")
        if cls.traits.fixed_length and options.max_length is None:
            raise ValueError(
                f"max_length=None cannot work: {name} has parameters for each position; pass the longest T you need"
            )
        if "heads" not in cls.unused and options.dim % options.heads:
            raise ValueError(f"heads={options.heads} cannot work: it must divide dim={options.dim}")
        if options.rotary and (options.dim // options.heads) % 2:
            raise ValueError(f"rotary=True cannot work: dim/heads={options.dim // options.heads} must be even")

    _why_not_causal: ClassVar[str] = "its paper defines none"

    # What a mechanism writes

    def _forward(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        """The fast path. Rows beyond `lengths` may hold anything: `forward` sets them to zero."""
        raise NotImplementedError

    def _reference(
        self, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        """The definition, dense; shares parameters and projections with the fast path and nothing else."""
        raise NotImplementedError

    def _pattern(self, x: Tensor) -> Tensor:
        """Who attends to whom, [B, H, T, T]."""
        raise NotImplementedError

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """q, k, v [B, T, H, ·] of the exact attention softmax(q·k/√K) v that this approximates, if there is one."""
        return None

    def _init_state(self, batch: int, capacity: int | None) -> State:
        raise NotImplementedError

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """The prompt in parallel; `state` is None at the start of a sequence."""
        raise NotImplementedError

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One token, [B, D]. A prompt of length 1, unless the mechanism knows better."""
        y, state = self._prefill(x[:, None], None, state)
        return y[:, 0], state

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """`_step` that writes the new state over the old one; by a copy, unless the mechanism knows better."""
        y, new = self._step(x, state)
        return y, type(state)(*(o.copy_(n) if o.shape == n.shape else n for o, n in zip(state, new, strict=True)))

    def _remember(self, context: Tensor, lengths: Tensor) -> Any:
        """The memory of a context: what of cross-attention to it needs no query. `lengths` is its last field."""
        return Memory(context, lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Any) -> Tensor:
        """`_forward` with a memory in place of the context it was made of."""
        return self._forward(x, lengths, memory.context, memory.lengths)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw random features, hashes or blocks anew, from `seed` if no generator is given; here nothing is random."""

    def share_with(self, first: Mixer) -> None:
        """Take what all layers of a stack share from the first layer of this kind; here nothing is shared."""

    # What everybody calls

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        context: Tensor | tuple[Tensor, ...] | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of x [B, T, D]. `lengths` [B]: right padding. `context` [B, S, D]: attend to it, not to x.

        `context` may also be what `remember` made of one.
        """
        if isinstance(context, tuple):
            return self._recalled(x, lengths, context, context_lengths)
        return self._padded(self._forward, x, lengths, context, context_lengths)

    def remember(self, context: Tensor, context_lengths: Tensor | None = None) -> Any:
        """A context [B, S, D] prepared for many calls, such as a decoder's steps: mix(x, context=memory).

        A NamedTuple of tensors, batch first, to be saved, stacked and indexed like a state. It holds for the parameters
        and random draws that it was made with, and gradients go through it.
        """
        context, lengths = self._check_context(context, context_lengths)
        if lengths is None:
            lengths = torch.full(context.shape[:1], context.shape[1], device=context.device)
        if not torch.compiler.is_compiling():
            self._memory_shape()  # so that no step has to find it out
        return self._remember(context, lengths)

    def reference(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        """What `forward` must equal: the paper's definition, dense and slow."""
        return self._padded(self._reference, x, lengths, context, context_lengths)

    def pattern(self, x: Tensor) -> Tensor:
        """Weights of who attends to whom, [B, H, T, T], for pictures."""
        self._check_tokens(x, "x")
        return self._pattern(x)

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token. `capacity`: positions a growing state holds without reallocating."""
        self._check_stateful("init_state")
        check_count("batch", batch)
        if capacity is not None:
            check_count("capacity", capacity)
        return self._init_state(batch, capacity)

    def prefill(self, x: Tensor, lengths: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """A prompt in parallel, ragged or not, from nothing or from a state: y, and the state after each row's end."""
        self._check_stateful("prefill")
        self._check_tokens(x, "x")
        lengths = check_lengths(lengths, x, "lengths")
        if state is not None:
            self._check_state(state, x.shape[0])
        mask = keep(lengths, x.shape[1])
        y, state = self._prefill(_zero_padding(x, mask), lengths, state)
        return _zero_padding(y, mask), state

    def step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        """One token, x [B, D] -> y [B, D], and the new state; the old one is left alone unless `inplace`.

        In place a state that must grow is replaced all the same: use what is returned.
        """
        self._check_stateful("step")
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise ValueError(f"x has shape {shape_of(x)}: step takes one token, [B, {self.options.dim}]")
        self._check_tokens(x[:, None], "x")
        self._check_state(state, x.shape[0])
        return self._step_inplace(x, state) if inplace else self._step(x, state)

    # Shared by mechanisms

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotary positions on q and k if asked for; rows start at `position` [B] (0 if None)."""
        if not self.options.rotary:
            return q, k
        positions = torch.arange(q.shape[1], device=q.device)
        if position is not None:
            positions = position[:, None] + positions
        return rotate(q, positions), rotate(k, positions)

    def _generator(self) -> torch.Generator:
        """The generator of this layer's draws: reproducible from `seed`, different in each layer."""
        return torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.options.layer)

    def _advance(self, position: Tensor, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The positions after a prompt x [B, T, D]."""
        return position + (x.shape[1] if lengths is None else lengths)

    def extra_repr(self) -> str:
        changed = (
            f"{field.name}={getattr(self.options, field.name)!r}"
            for field in dataclasses.fields(self.options)
            if getattr(self.options, field.name) != field.default
        )
        return ", ".join(changed)

    # Checks

    def _padded(
        self, mix: Any, x: Tensor, lengths: Tensor | None, context: Tensor | None, context_lengths: Tensor | None
    ) -> Tensor:
        self._check_tokens(x, "x")
        lengths = check_lengths(lengths, x, "lengths")
        if context is None:
            if context_lengths is not None:
                raise ValueError("context_lengths came without context: pass both or neither")
        else:
            context, context_lengths = self._check_context(context, context_lengths)
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"context has batch {context.shape[0]}: x has batch {x.shape[0]}")
        mask = keep(lengths, x.shape[1])
        y = _zero_padding(mix(_zero_padding(x, mask), lengths, context, context_lengths), mask)
        if context_lengths is not None:  # nothing to attend to: zeros, as for a row of length 0
            y = y.masked_fill((context_lengths == 0)[:, None, None], 0)
        return y

    def _check_tokens(self, x: Tensor, name: str) -> None:
        dim = self.options.dim
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != dim:
            raise ValueError(f"{name} has shape {shape_of(x)}: accepted is [batch, T, {dim}]")
        if x.shape[0] == 0 or x.shape[1] == 0:
            raise ValueError(f"{name} has shape {shape_of(x)}: at least one row and one token are needed")
        check_strided(name, x)
        if x.device != self._like.device:
            raise ValueError(f"{name} is on {x.device}: this module is on {self._like.device}")
        cast = autocasts(x.device) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if x.dtype != self._like.dtype and not cast:
            raise ValueError(f"{name} has dtype {x.dtype}: this module computes in {self._like.dtype}")
        limit = self.options.max_length
        if limit is not None and self.traits.fixed_length and x.shape[1] > limit:
            raise ValueError(f"{name} has T={x.shape[1]}: this module was built with max_length={limit}")

    def _recalled(self, x: Tensor, lengths: Tensor | None, memory: Any, context_lengths: Tensor | None) -> Tensor:
        self._check_tokens(x, "x")
        lengths = check_lengths(lengths, x, "lengths")
        if context_lengths is not None:
            raise ValueError("context_lengths came with a memory, which knows its own: leave them out")
        self._check_memory(memory, x.shape[0])
        mask = keep(lengths, x.shape[1])
        y = _zero_padding(self._recall(_zero_padding(x, mask), lengths, memory), mask)
        return y.masked_fill((memory.lengths == 0)[:, None, None], 0)

    def _check_context(self, context: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.options.causal:
            raise ValueError("context was given to a causal module: cross-attention needs causal=False")
        if not self.traits.cross:
            raise ValueError(f"context was given, but {type(self).__name__} has no cross-attention")
        if self.options.rotary:
            raise ValueError("context was given with rotary=True: positions of x and of a context are not on one axis")
        self._check_tokens(context, "context")
        lengths = check_lengths(lengths, context, "context_lengths")
        return _zero_padding(context, keep(lengths, context.shape[1])), lengths

    def _check_memory(self, memory: Any, batch: int) -> None:
        name = type(self).__name__
        if not isinstance(memory, self.memory_type):
            came = f"{type(memory).__module__}.{type(memory).__name__}"
            raise ValueError(
                f"context is a {came}: accepted is a tensor, or the memory that this {name}'s remember made"
            )
        if torch.compiler.is_compiling():
            return
        for field, t, shape in zip(memory._fields, memory, self._memory_shape(), strict=True):
            check_tensor(f"context.{field}", t)
            double = torch.float64  # autocast makes the others
            if field != "lengths" and (t.dtype not in FLOATS or (t.dtype == double) != (self._like.dtype == double)):
                raise ValueError(f"context.{field} has dtype {t.dtype}: this module computes in {self._like.dtype}")
            if field == "lengths" and t.dtype != torch.int64:
                raise ValueError(f"context.lengths has dtype {t.dtype}: accepted is int64")
            if t.shape[:1] != (batch,):
                raise ValueError(f"context.{field} has batch {t.shape[0] if t.ndim else 'none'}: x has batch {batch}")
            if t.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape[1:], t.shape[1:], strict=True)):
                wanted = ["batch", *("any" if n is None else n for n in shape[1:])]
                raise ValueError(f"context.{field} has shape {list(t.shape)}: this {name} remembers {wanted}")
            if t.device != self._like.device:
                raise ValueError(f"context.{field} is on {t.device}: this module is on {self._like.device}")

    def _memory_shape(self) -> list[tuple[int | None, ...]]:
        """The shape of each field of a memory; None where it follows the context's length."""
        if self._memory_memo is None:
            made = []
            for size in (1, self.options.max_length or 1000):
                context = self._like.new_zeros(1, size, self.options.dim)
                with torch.no_grad():
                    made.append(self._remember(context, torch.full((1,), size, device=context.device)))
            self._memory_memo = [
                tuple(n if n == m else None for n, m in zip(a.shape, b.shape, strict=True))
                for a, b in zip(*made, strict=True)
            ]
        return self._memory_memo

    def _check_stateful(self, method: str) -> None:
        if self.traits.state is None:
            name = type(self).__name__
            why = (
                "built with causal=False"
                if type(self).traits.state and not self.options.causal
                else "without a recurrent form"
            )
            raise NotImplementedError(f"{method}: {name} is {why}, so there is no state; recompute with forward")

    def _check_state(self, state: State, batch: int) -> None:
        name = type(self).__name__
        if self.state_type is not None and not isinstance(state, self.state_type):
            raise ValueError(
                f"state is a {type(state).__name__}: accepted is the {name} state of init_state or prefill"
            )
        if torch.compiler.is_compiling():
            return
        for field, t, (dtype, shape) in zip(state._fields, state, self._state_shape(), strict=True):
            check_tensor(f"state.{field}", t)
            if t.shape[:1] != (batch,):
                raise ValueError(f"state has batch {t.shape[0] if t.ndim else 'none'}: x has batch {batch}")
            fits = t.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape[1:], t.shape[1:], strict=True))
            if not fits or t.dtype != dtype:
                wanted = ["batch", *("any" if n is None else n for n in shape[1:])]
                raise ValueError(
                    f"state.{field} is {t.dtype} {list(t.shape)}: this {name} keeps {dtype} {wanted}; "
                    "a state goes with the module, or the options, it came from"
                )
            if t.device != self._like.device:
                raise ValueError(f"state.{field} is on {t.device}: this module is on {self._like.device}")

    def _state_shape(self) -> list[tuple[torch.dtype, tuple[int | None, ...]]]:
        """Type and shape of each field of a state; None where it follows the capacity."""
        if self._shape_memo is None or self._shape_memo[0] != self._like.dtype:
            small, large = (self._init_state(1, capacity) for capacity in (1, 1000))
            shapes = [
                (a.dtype, tuple(n if n == m else None for n, m in zip(a.shape, b.shape, strict=True)))
                for a, b in zip(small, large, strict=True)
            ]
            self._shape_memo = (self._like.dtype, shapes)
        return self._shape_memo[1]


def _zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
