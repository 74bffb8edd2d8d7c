"""Mixed: different mechanisms on different heads of one layer.

Paper       Child et al. 2019, arXiv:1904.10509, §4.3, and Roy et al. 2020, arXiv:2003.05997, §4.3, give different heads
            different patterns; here any mechanism may take any number of heads
Definition  [x₁ … xₚ] = x W_in by heads,  Y = [mix₁(x₁) … mixₚ(xₚ)] W_out
Cost        train O(Σ parts) time: each part costs what it costs at the width of its heads; decode and state likewise
Departures  a part mixes its own slice of x W_in, so that its queries, keys and values are one projection deeper
Verified    tests/mechanisms/test_mixed.py: one part over all heads with W_in = W_out = I is that part, exactly
"""

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import some_outputs
from subquad.mechanisms.base import Mixer, Traits
from subquad.ops.lengths import zero_padding
from subquad.ops.rotary import Turns

Part = tuple[Any, ...]  # (mechanism, heads) or (mechanism, heads, options)
ORDER = ("constant", "window", "growing")


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    parts: tuple[Part, ...] | None = None  # None: linear and local, half of the heads each

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts is None:
            if self.heads % 2:
                refuse("heads", self.heads, "an even number, half linear and half local, or parts that add up to it")
            object.__setattr__(self, "parts", (("linear", self.heads // 2), ("local", self.heads // 2)))
        try:
            parts: tuple[Part, ...] = tuple((str(part[0]), int(part[1]), dict(*part[2:])) for part in self.parts or ())
        except (TypeError, ValueError, IndexError):
            parts = ()
        if not parts or sum(part[1] for part in parts) != self.heads or min(part[1] for part in parts) < 1:
            refuse("parts", self.parts, f"(mechanism, heads) or (mechanism, heads, options), {self.heads} heads in all")
        object.__setattr__(self, "parts", parts)


class Mixed(Mixer):
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family = "hybrid"
    exponent = 1.0
    splits = True  # where its parts do
    unused = frozenset({"dropout"})  # each part has its own option
    small = (
        {"parts": (("linear", 1), ("local", 3, {"window": 4}))},
        {"parts": (("linear", 2), ("softmax", 2))},
        {"parts": (("softmax", 2), ("synthesizer", 2, {"kind": "random"}))},
    )
    options: Options

    def __init__(self, options: Options):
        from subquad.mechanisms import build, mechanism

        super().__init__(options)
        width = options.dim // options.heads
        shared = {"causal": options.causal, "rotary": options.rotary, "layer": options.layer}
        mixers = []
        for number, (name, heads, own) in enumerate(options.parts or ()):
            drawn = {"seed": options.seed + 1_000_003 * number}  # two parts of one kind draw different numbers
            fixed = {"max_length": options.max_length} if mechanism(name).traits.fixed_length else {}
            mixers.append(build(name, dim=heads * width, heads=heads, **{**shared, **drawn, **fixed, **own}))
        self.parts: Iterable[Mixer] = nn.ModuleList(mixers)  # type: ignore[assignment]
        self.widths = [mix.options.dim for mix in mixers]
        turn_widths = {mix.turn_width for mix in mixers} - {None}
        self.turn_width = turn_widths.pop() if len(turn_widths) == 1 else None
        self.into = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)
        self.joint_queries = any(mix.joint_queries for mix in mixers)
        self.rewinds = all(mix.rewinds for mix in mixers)
        states = [mix.traits.state for mix in mixers]
        self.traits = self.traits._replace(
            cross=all(mix.traits.cross for mix in mixers),
            state=None if None in states else max((s for s in states if s), key=ORDER.index),
            fixed_length=any(mix.traits.fixed_length for mix in mixers),
        )
        _ = self.memory_type, self.traits.state and self.state_type  # make these classes now: a compiled program cannot

    @property
    def state_type(self) -> type:  # type: ignore[override]
        return flat_type([mix.state_type for mix in self.parts])

    @property
    def memory_type(self) -> type[Any]:  # type: ignore[override]
        return flat_type([mix.memory_type for mix in self.parts])

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return self._join([mix(part, lengths, turns=self._turns_of(mix)) for mix, part in self._slices(x)])

    def _cross(self, x: Tensor, lengths: Tensor | None, context: Tensor, context_lengths: Tensor | None) -> Tensor:
        contexts = [part for _, part in self._slices(context)]
        pairs = zip(self._slices(x), contexts, strict=True)
        return self._join([mix(part, lengths, other, context_lengths) for (mix, part), other in pairs])

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        start, outputs = 0, []
        for mix in self.parts:
            own = slice(start, start + mix.options.dim)
            other = None if context is None else some_outputs(self.into, context, own)
            outputs.append(mix.reference(some_outputs(self.into, x, own), None, other))
            start = own.stop
        return self.out(torch.cat(outputs, dim=-1))

    def _pattern(self, x: Tensor) -> Tensor:
        return torch.cat([mix.pattern(part) for mix, part in self._slices(x)], dim=1)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        for mix in self.parts:
            mix.redraw(generator)

    def _init_state(self, batch: int, capacity: int | None) -> Any:
        return flatten(self.state_type, [mix.init_state(batch, capacity) for mix in self.parts])

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        states = [None] * len(self.widths) if state is None else self._states(state)
        slices = zip(self._slices(x), states, strict=True)
        done = [mix.prefill(part, lengths, own, self._turns_of(mix)) for (mix, part), own in slices]
        return self._join([y for y, _ in done]), flatten(self.state_type, [new for _, new in done])

    def _step(self, x: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        first, *others = self._states(state)
        if inplace:  # each part moves its position
            others = [own._replace(position=own.position.clone()) for own in others]
        slices = zip(self._slices(x), (first, *others), strict=True)
        done = [mix.step(part, own, inplace, self._turns_of(mix)) for (mix, part), own in slices]
        return self._join([y for y, _ in done]), flatten(self.state_type, [new for _, new in done])

    def _step_inplace(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._step(x, state, inplace=True)

    def _turns_of(self, mix: Mixer) -> Turns | None:
        """The turns given to this layer, for a part that takes them."""
        return None if mix.turn_width is None else self._turns

    def _states(self, state: Any) -> list[Any]:
        return split([mix.state_type for mix in self.parts], state)

    def _remember(self, context: Tensor, lengths: Tensor) -> Any:
        slices = zero_padding(self.into(context), lengths).split(self.widths, dim=-1)
        memories = [mix._remember(part, lengths) for mix, part in zip(self.parts, slices, strict=True)]
        return flatten(self.memory_type, memories)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Any) -> Tensor:
        memories = split([mix.memory_type for mix in self.parts], memory)
        slices = zip(self._slices(x), memories, strict=True)
        return self._join([mix(part, lengths, own) for (mix, part), own in slices])

    def _slices(self, x: Tensor) -> list[tuple[Mixer, Tensor]]:
        """Each part with its heads' share of x W_in."""
        return list(zip(self.parts, self.into(x).split(self.widths, dim=-1), strict=True))

    def _join(self, outputs: list[Tensor]) -> Tensor:
        return self.out(torch.cat(outputs, dim=-1))


def flatten(kind: type, parts: list[Any]) -> Any:
    """The states or memories of all parts as one flat tuple; the last field is the same in all of them."""
    return kind(*(tensor for part in parts for tensor in part[:-1]), parts[0][-1])


def split(kinds: list[Any], flat: Any) -> list[Any]:
    """Undo `flatten`: the states or memories of these kinds."""
    parts, start = [], 0
    for kind in kinds:
        stop = start + len(kind._fields) - 1
        parts.append(kind(*flat[start:stop], flat[-1]))
        start = stop
    return parts


def flat_type(kinds: list[Any]) -> type:
    """The type that `flatten` makes: the fields of each part under numbered names, then the one they share."""
    names = [f"part{n}_{field}" for n, kind in enumerate(kinds) for field in kind._fields[:-1]]
    return state_class(*names, kinds[0]._fields[-1])


_classes: dict[tuple[str, ...], type] = {}  # torch.compile can read a dict, but ignores an lru_cache


def state_class(*names: str) -> type:
    """The class of flat states with these fields. It can be pickled, and all modules with these fields share it."""
    if names not in _classes:
        plain = namedtuple("State", names)  # type: ignore[misc]
        reduce = {"__reduce__": lambda self: (make_state, (names, tuple(self)))}
        _classes[names] = type("State", (plain,), {"__slots__": (), **reduce})
    return _classes[names]


def make_state(names: tuple[str, ...], values: tuple[Tensor, ...]) -> Any:
    return state_class(*names)(*values)
