"""The contract of a mechanism: what goes in, what comes out, what raises.

Legend for shapes, here and in every mechanism:
    B batch, T queries, S keys, H heads, K key width, V value width, D model width, M features, C chunk or capacity,
    N blocks. Tensors for heads are [B, T, H, ·].

A mechanism is a token mixer with its own projections. It subclasses `Mixer`, or `Attention` (attention.py) if it
multiplies values by weights, and writes methods with an underscore: they get checked arguments whose padding is zero.
"""

import dataclasses
import inspect
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import check_count, check_methods, check_plain, refuse
from subquad.mechanisms import checking
from subquad.ops.impl import Impl
from subquad.ops.lengths import shape_of, zero_padding
from subquad.ops.rotary import Turns

StateKind = Literal["constant", "window", "growing"]
State = Any  # a NamedTuple of tensors, batch first, the last one `position` [B]; each mechanism has its own
AtLeast0 = Annotated[int, 0]  # an option that is an integer of at least 0
AtLeast1 = Annotated[int, 1]


class Memory(NamedTuple):
    """An unchanged context. A mechanism that can precompute more has its own memory type, with `lengths` last."""

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
    """The base options; a mechanism adds its own in a frozen subclass. Types and minimum values are checked."""

    dim: AtLeast1  # width of the model
    heads: AtLeast1 = 1  # of the attention; dim is split over them
    causal: bool = False  # a position sees itself and what came before
    dropout: float = 0.0  # of attention weights, in training
    rotary: bool = False  # rotate queries and keys by their position
    layer: AtLeast0 = 0  # index in the stack, for interleaving and sharing
    seed: AtLeast0 = 0  # of everything drawn at random when the module is made
    max_length: AtLeast1 | None = None  # the longest sequence, where something learned has that size

    def __post_init__(self) -> None:
        plain = typing.get_type_hints(type(self))
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            check_plain(name, value, plain[name])
            for part in (hint, *typing.get_args(hint)):  # the hint itself, or what it allows besides None
                if typing.get_origin(part) is Annotated and value is not None:
                    check_count(name, value, *part.__metadata__)
        if self.seed >= 2**40:
            refuse("seed", self.seed, "an integer below 2**40")
        if not 0 <= self.dropout < 1:
            refuse("dropout", self.dropout, "a probability in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class KernelOptions(Options):
    """The options of a mechanism whose op has a Triton kernel."""

    impl: Impl = "auto"  # "auto", "torch" or "triton"


class _Given(threading.local):
    """What a public method was given for the methods with an underscore that it calls."""

    def __init__(self) -> None:  # runs in each thread
        self.turns: Turns | None = None


_given = _Given()


@check_methods
class Mixer(nn.Module):
    """Base of all mechanisms. Public methods check their arguments (checking.py) and call what a mechanism writes."""

    # What a mechanism says about itself
    options_type: ClassVar[type[Options]] = Options  # set from the annotation `options: Options` of a subclass
    state_type: type | None = None  # set from the return annotation of `_init_state`
    memory_type: type[Any] = Memory  # set from the return annotation of `_remember`
    traits: Traits = Traits()
    family: ClassVar[str]  # as in the lecture notes
    exponent: ClassVar[float]  # training time grows as T to this power
    memory: ClassVar[float] = 1.0  # and training memory as T to this one
    equivariant: bool = False  # bidirectional, without positions: permuting the tokens permutes the output
    reads_products: bool = False  # only products with weights read x, so under autocast x may come in its type
    turn_width: int | None = None  # of the channels that rotary positions turn; None: it takes no `turns`
    rewinds: bool = False  # a state with a lower position is the state before the last tokens: nothing else changed
    splits: ClassVar[bool] = False  # over ranks that share a sequence (subquad.ranks)
    joint_queries: bool = False  # in cross-attention one query's result depends on the others: not for decoders
    unused: ClassVar[frozenset[str]] = frozenset({"max_length"})  # base options that have no effect
    small: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # options for tests and pictures with about forty tokens
    _why_not_causal: ClassVar[str] = "its paper defines none"

    # What a mechanism writes: the first three, the next three if traits.state, the next one if traits.cross

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The fast path. Outputs beyond `lengths` may be anything: `forward` sets them to zero."""
        raise NotImplementedError

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The definition, dense, for rows without padding; shares only parameters and projections with `_forward`."""
        raise NotImplementedError

    def _pattern(self, x: Tensor) -> Tensor:
        """Who attends to whom, [B, H, T, T]."""
        raise NotImplementedError

    def _init_state(self, batch: int, capacity: int | None) -> State:
        raise NotImplementedError

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """The prompt in parallel; `state` is None at the start of a sequence."""
        raise NotImplementedError

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One token, [B, D]: a prompt of length 1, unless the mechanism has a faster way."""
        y, state = self._prefill(x[:, None], None, state)
        return y[:, 0], state

    def _cross(self, x: Tensor, lengths: Tensor | None, context: Tensor, context_lengths: Tensor | None) -> Tensor:
        """The fast path with keys and values from a context."""
        raise NotImplementedError

    # What a mechanism may write as well

    def _step_inplace(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """`_step` that writes the new state over the old one."""
        y, new = self._step(x, state)
        return y, type(state)(*(o.copy_(n) if o.shape == n.shape else n for o, n in zip(state, new, strict=True)))

    def _remember(self, context: Tensor, lengths: Tensor) -> Any:
        """The part of cross-attention to a context that needs no query, with `lengths` as its last field."""
        return Memory(context, lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Any) -> Tensor:
        """`_cross` with a memory in place of the context."""
        return self._cross(x, lengths, memory.context, memory.lengths)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """q, k, v [B, T, H, ·] of the exact attention softmax(q·k/√K) v that this approximates, if there is one."""
        return None

    def _projections(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Weights [H·width, D] and biases that make q, k, v, and o, the output, as views of the parameters.

        Other people's weights can be copied into them. A mechanism that projects in another way leaves out names.
        """
        return {}

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, hashes or blocks, from `seed` without a generator; by default nothing is random."""

    def restore(self) -> None:
        """Recompute what is not saved from what is, after a program loaded tensors into this module one by one."""

    def share_with(self, first: "Mixer") -> None:
        """Share parameters with the first layer of this kind in a stack; by default nothing is shared."""

    def _decodes(self, state: State) -> bool:
        """Whether `decode` can take a token from this state. A subclass that changes a step does not inherit it."""
        return False

    def _decode(self, qkv: Tensor, state: State, turns: Turns | None) -> tuple[Tensor, State]:
        """The part of a step in place that is between the projections of `Heads`: qkv [B, ·] of one token -> [B, D].

        q and k are not turned yet. `position` is not moved: the caller does that, for all layers at once.
        """
        raise NotImplementedError

    def defer(self, state: State) -> State:
        """A state for a fixed group of steps that may write late, until `settle`; by default the same state."""
        return state

    def settle(self, state: State, steps: int) -> None:
        """Write what the state of `defer` has not written after its steps, into the state that `defer` was given."""

    # The public methods

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        context: Tensor | tuple[Tensor, ...] | None = None,
        context_lengths: Tensor | None = None,
        turns: Turns | None = None,
    ) -> Tensor:
        """Mix the tokens of x [B, T, D]. `lengths` [B]: right padding. `context` [B, S, D]: attend to it, not to x.

        `context` may also be a memory that `remember` returned. `turns`: those of the positions of x, for rotary, if
        the caller has made them, with ops.rotary.turns(positions, mix.turn_width); without them x starts at 0.
        """
        if context is not None:
            ranks.refuse("context", "accepted is self-attention: a context is not split")
        with checking.split_over(self, x):
            x, lengths = checking.check_padded(self, x, lengths)
            checking.check_turns(self, turns, x, context)
            if isinstance(context, tuple):
                memory: Any = context
                checking.check_memory(self, memory, context_lengths, x.shape[0])
                y, context_lengths = self._recall(x, lengths, memory), memory.lengths
            else:
                context, context_lengths = checking.check_context(self, x, context, context_lengths)
                if context is None:
                    y = self._with(turns, self._forward, x, lengths)
                else:
                    y = self._cross(x, lengths, context, context_lengths)
        y = zero_padding(y, lengths)
        # a row with an empty context is zero, like a row of length 0
        return y if context_lengths is None else y.masked_fill((context_lengths == 0)[:, None, None], 0)

    def reference(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        """The paper's definition, which `forward` must equal: dense and slow, for each row without its padding."""
        ranks.refuse("reference", "the definition is for whole sequences; accepted is forward")
        x, lengths = checking.check_padded(self, x, lengths)
        context, context_lengths = checking.check_context(self, x, context, context_lengths)
        if lengths is None and context_lengths is None:
            return self._reference(x, context)
        rows = []
        for b, row in enumerate(x.split(1)):
            row = row if lengths is None else row[:, : lengths[b]]
            other = None if context is None else context[b : b + 1]
            other = other if other is None or context_lengths is None else other[:, : context_lengths[b]]
            empty = row.shape[1] == 0 or (other is not None and other.shape[1] == 0)
            y = row[:, :0] if empty else self._reference(row, other)
            rows.append(F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1])))
        return torch.cat(rows)

    def pattern(self, x: Tensor) -> Tensor:
        """Weights of who attends to whom, [B, H, T, T], for pictures."""
        ranks.refuse("pattern", "a picture is of whole sequences; accepted is forward")
        checking.check_tokens(self, x)
        return self._pattern(x)

    def remember(self, context: Tensor, context_lengths: Tensor | None = None) -> Any:
        """Prepare a context [B, S, D] for many calls, such as a decoder's steps: mix(x, context=memory).

        Returns a NamedTuple of tensors, batch first, which can be saved, stacked and indexed like a state. It is valid
        until the parameters or random draws change. Gradients flow through it.
        """
        context, lengths = checking.check_keys(self, context, context_lengths)
        if lengths is None:
            lengths = torch.full(context.shape[:1], context.shape[1], device=context.device)
        if not torch.compiler.is_compiling():
            checking.field_shapes(self, "memory")  # computed and cached now, so that no step has to
        return self._remember(context, lengths)

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token. `capacity`: positions a growing state holds without reallocating."""
        checking.check_stateful(self, "init_state")
        check_count("batch", batch)
        if capacity is not None:
            check_count("capacity", capacity)
        return self._init_state(batch, capacity)

    def prefill(
        self, x: Tensor, lengths: Tensor | None = None, state: State | None = None, turns: Turns | None = None
    ) -> tuple[Tensor, State]:
        """A prompt in parallel, from the start or from a state: y, and the state after the last token of each row.

        `turns` as in `forward`; without them x starts at the state's position.
        """
        checking.check_stateful(self, "prefill")
        with checking.split_over(self, x):
            x, lengths = checking.check_padded(self, x, lengths)
            if state is not None:
                checking.check_state(self, state, x.shape[0])
            checking.check_turns(self, turns, x)
            y, state = self._with(turns, self._prefill, x, lengths, state)
        return zero_padding(y, lengths), state

    def step(self, x: Tensor, state: State, inplace: bool = False, turns: Turns | None = None) -> tuple[Tensor, State]:
        """One token, x [B, D] -> y [B, D], and the new state; the old one is left alone unless `inplace`.

        Use the returned state even with `inplace`: a state that must grow is replaced. `turns` as in `prefill`.
        """
        checking.check_stateful(self, "step")
        ranks.refuse("step", "one token cannot be split; accepted is a step after the context")
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise ValueError(f"x has shape {shape_of(x)}: step takes one token, [B, {self.options.dim}]")
        checking.check_tokens(self, x[:, None])
        checking.check_state(self, state, x.shape[0])
        checking.check_turns(self, turns, x[:, None])
        return self._with(turns, self._step_inplace if inplace else self._step, x, state)

    # What a mechanism may use

    @property
    def _turns(self) -> Turns | None:
        """The turns that the call of a public method was given."""
        return _given.turns

    def _advance(self, position: Tensor, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The positions after a prompt x [B, T, D]."""
        return position + ranks.tokens_read(x.shape[1], lengths)

    def _generator(self) -> torch.Generator:
        """The generator for this layer's random draws: reproducible from `seed`, different in each layer."""
        return torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.options.layer)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros on this module's device, by default of its type."""
        return self._like.new_zeros(shape, dtype=dtype)

    # The same for all mechanisms

    def _with(self, turns: Turns | None, method: Callable[..., Any], *args: Any) -> Any:
        """method(*args), in which `_turns` are these."""
        before = _given.turns
        if turns is before:
            return method(*args)
        _given.turns = turns
        try:
            return method(*args)
        finally:
            _given.turns = before

    _like: Tensor  # of this module's type and on its device, even without parameters

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "options" in cls.__annotations__:
            cls.options_type = inspect.get_annotations(cls, eval_str=True)["options"]
        for kind, method in (("state_type", "_init_state"), ("memory_type", "_remember")):
            made = inspect.get_annotations(vars(cls).get(method, cls), eval_str=True).get("return")
            if kind not in vars(cls) and isinstance(made, type) and issubclass(made, tuple):
                setattr(cls, kind, made)
        check_methods(cls)

    def __init__(self, options: Options):
        super().__init__()
        checking.check_options(type(self), options)
        self.options = options
        possible, causal = type(self).traits, options.causal
        self.traits = possible._replace(
            causal=causal,
            bidirectional=not causal,
            cross=possible.cross and not causal,
            state=possible.state if causal else None,
        )
        self._shapes: dict[tuple[str, torch.dtype], list[tuple[torch.dtype, checking.Shape]]] = {}
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        fields = ((field, getattr(self.options, field.name)) for field in dataclasses.fields(self.options))
        return ", ".join(f"{field.name}={value!r}" for field, value in fields if value != field.default)


def own_type(cls: type[Mixer], kind: str, shared: type) -> None:
    """Make a state_type or memory_type for this class alone, so that no mechanism accepts the state of another."""
    names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{kind}"}  # where pickle finds it
    setattr(cls, kind, type(shared.__name__, (shared,), names))
