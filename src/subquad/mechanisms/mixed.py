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
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.mechanisms import base
from subquad.mechanisms.base import Mixer, Traits
from subquad.ops.lengths import zero_padding

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
            refuse(
                "parts", self.parts, f"(mechanism, heads) or (mechanism, heads, options) for {self.heads} heads in all"
            )
        object.__setattr__(self, "parts", parts)


class Mixed(Mixer):
    traits = Traits(causal=True, bidirectional=True, cross=True, state="growing")
    family = "hybrid"
    exponent = 1.0
    unused = frozenset({"dropout"})  # each part's options say what it drops
    small = (
        {"parts": (("linear", 1), ("local", 3, {"window": 4}))},
        {"parts": (("linear", 2), ("softmax", 2))},
        {"parts": (("softmax", 2), ("synthesizer", 2, {"kind": "random"}))},
    )
    options: Options
    fields: list[list[str]] = []  # noqa: RUF012

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
        self.into = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)
        self.joint_queries = any(mix.joint_queries for mix in mixers)
        states = [mix.traits.state for mix in mixers]
        stateful = None not in states
        self.traits = self.traits._replace(
            cross=all(mix.traits.cross for mix in mixers),
            state=max((s for s in states if s), key=ORDER.index) if stateful else None,
            fixed_length=any(mix.traits.fixed_length for mix in mixers),
        )
        # one flat tuple: the parts' fields under numbered names, and the position or lengths they share
        if stateful:
            self.fields = [[f for f in _fields(mix.state_type) if f != "position"] for mix in mixers]
        self.memory_fields = [[f for f in _fields(mix.memory_type) if f != "lengths"] for mix in mixers]
        _ = self.state_type, self.memory_type  # made here, because a compiled program cannot make a class

    @property
    def state_type(self) -> type:  # type: ignore[override]
        return state_class(*_numbered(self.fields), "position")

    @property
    def memory_type(self) -> type[Any]:  # type: ignore[override]
        return state_class(*_numbered(self.memory_fields), "lengths")

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return self._join_outputs(mix(part, lengths) for mix, part in self._slices(x))

    def _cross(self, x: Tensor, lengths: Tensor | None, context: Tensor, context_lengths: Tensor | None) -> Tensor:
        contexts = [part for _, part in self._slices(context)]
        pairs = zip(self._slices(x), contexts, strict=True)
        return self._join_outputs(mix(part, lengths, other, context_lengths) for (mix, part), other in pairs)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        start, outputs = 0, []
        for mix in self.parts:
            own = slice(start, start + mix.options.dim)
            weight, bias = self.into.weight[own], self.into.bias[own]
            other = None if context is None else F.linear(context, weight, bias)
            outputs.append(mix.reference(F.linear(x, weight, bias), None, other))
            start = own.stop
        return self.out(torch.cat(outputs, dim=-1))

    def _pattern(self, x: Tensor) -> Tensor:
        return torch.cat([mix.pattern(part) for mix, part in self._slices(x)], dim=1)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        for mix in self.parts:
            mix.redraw(generator)

    def _init_state(self, batch: int, capacity: int | None) -> Any:
        return self._join([mix.init_state(batch, capacity) for mix in self.parts])

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        states = [None] * len(self.widths) if state is None else self._split(state)
        done = [mix.prefill(part, lengths, own) for (mix, part), own in zip(self._slices(x), states, strict=True)]
        return self._join_outputs(y for y, _ in done), self._join([new for _, new in done])

    def _step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        done = [mix.step(part, own) for (mix, part), own in zip(self._slices(x), self._split(state), strict=True)]
        return self._join_outputs(y for y, _ in done), self._join([new for _, new in done])

    def _remember(self, context: Tensor, lengths: Tensor) -> Any:
        slices = zero_padding(self.into(context), lengths).split(self.widths, dim=-1)
        memories = [mix._remember(part, lengths) for mix, part in zip(self.parts, slices, strict=True)]
        flat = [getattr(m, f) for m, fields in zip(memories, self.memory_fields, strict=True) for f in fields]
        return self.memory_type(*flat, lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Any) -> Tensor:
        outputs = []
        for n, (mix, part) in enumerate(self._slices(x)):
            fields = {f: getattr(memory, f"part{n}_{f}") for f in self.memory_fields[n]}
            outputs.append(mix(part, lengths, mix.memory_type(**fields, lengths=memory.lengths)))
        return self._join_outputs(outputs)

    def _slices(self, x: Tensor) -> list[tuple[Mixer, Tensor]]:
        """Each part with its heads' share of x W_in."""
        return list(zip(self.parts, self.into(x).split(self.widths, dim=-1), strict=True))

    def _join_outputs(self, outputs: Iterable[Tensor]) -> Tensor:
        return self.out(torch.cat(list(outputs), dim=-1))

    def _join(self, states: list[Any]) -> Any:
        flat = [getattr(state, f) for state, fields in zip(states, self.fields, strict=True) for f in fields]
        return self.state_type(*flat, states[0].position)

    def _split(self, state: Any) -> list[Any]:
        states = []
        for n, (mix, fields) in enumerate(zip(self.parts, self.fields, strict=True)):
            make: Any = mix.state_type
            states.append(make(**{f: getattr(state, f"part{n}_{f}") for f in fields}, position=state.position))
        return states


_classes: dict[tuple[str, ...], type] = {}  # torch.compile looks into a dict, and past an lru_cache


def state_class(*names: str) -> type:
    """The flat state of these fields: one class for all modules whose parts keep the same, and it can be pickled."""
    if names not in _classes:
        plain = namedtuple("State", names)  # type: ignore[misc]
        reduce = {"__reduce__": lambda self: (make_state, (names, tuple(self)))}
        _classes[names] = type("State", (plain,), {"__slots__": (), **reduce})
    return _classes[names]


def make_state(names: tuple[str, ...], values: tuple[Tensor, ...]) -> Any:
    return state_class(*names)(*values)


def _fields(kind: type | None) -> tuple[str, ...]:
    return tuple(kind._fields)  # type: ignore[union-attr]


def _numbered(fields: list[list[str]]) -> list[str]:
    return [f"part{n}_{f}" for n, names in enumerate(fields) for f in names]
