"""The settings of `subquad compare` and of `subquad bench generation`, checked when they are made."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from subquad.checks import at_least, counts, one_of, refuse
from subquad.machine import available
from subquad.measure.cost import DTYPES, YARDSTICK, Shape
from subquad.mechanisms import MECHANISMS, mechanism

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CAUSAL = [name for name, cls in MECHANISMS.items() if cls.traits.causal]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fields with a help text are options of `subquad compare`."""

    lengths: tuple[int, ...] = LENGTHS
    mechanisms: tuple[str, ...] = tuple(MECHANISMS)
    dim: int = field(default=64, metadata={"help": "Width of the model."})
    heads: int = field(default=2, metadata={"help": "Heads."})
    batch: int = field(default=1, metadata={"help": "Sequences in a batch."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or float64."})
    causal: bool | None = None  # None: causal where a mechanism has a causal form, bidirectional where it has none
    repeats: int = field(default=4, metadata={"help": "At most this many pairs of samples."})
    seconds: float = 0.3  # stop sampling a mechanism at a length after this time
    # softmax may take twice as long as the limit
    limit: float = field(default=2.5, metadata={"help": "Skip a training step that would take more seconds."})
    decode_only: bool = False  # measure no training
    memory: int | None = None  # bytes that may be used; None: most of what is free
    task: str | None = field(
        default=None, metadata={"help": "Also measure quality: train shortly on copy, digits or listops."}
    )
    data: str | None = None  # a file: also measure quality on the user's own tokens
    steps: int = field(default=200, metadata={"help": "Training steps for quality."})
    threads: int = field(default_factory=torch.get_num_threads)

    def __post_init__(self) -> None:
        for name in ("lengths", "mechanisms"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.lengths or not counts(self.lengths):
            refuse("lengths", self.lengths, "one or more integers of at least 1")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        if not self.mechanisms:
            refuse("mechanisms", "", "names with commas between them, or all")
        for name in self.mechanisms:
            mechanism(name)  # an unknown name raises here
        if YARDSTICK not in self.mechanisms:  # softmax is always measured: everything is compared with it
            object.__setattr__(self, "mechanisms", (YARDSTICK, *self.mechanisms))
        at_least(self, dim=1, heads=1, batch=1, repeats=1, steps=1, threads=1)
        one_of(self, dtype=DTYPES)
        if self.dim % self.heads:
            refuse("heads", self.heads, f"a divisor of dim={self.dim}")
        for name in ("limit", "seconds", "memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                refuse(name, value, "a positive number")
        if self.task is not None:
            from subquad.tasks import TRIALS  # here, so that help does not load the tasks

            one_of(self, task=TRIALS)
            if self.data is not None:
                refuse("task", self.task, "None together with data: name one of the two")
            if self.causal is False and TRIALS[self.task].bidirectional is None:
                able = " or ".join(name for name, trial in TRIALS.items() if trial.bidirectional is not None)
                refuse("task", self.task, f"a task with a bidirectional form, with causal=False: {able}")
        if self.causal is False and self.data is not None:
            refuse("data", self.data, "None with causal=False: tokens are predicted from left to right")
        object.__setattr__(self, "device", available(self.device))

    def shape(self, length: int, causal: bool) -> Shape:
        same = {name: getattr(self, name) for name in ("dim", "heads", "batch", "device", "dtype")}
        return Shape(length=length, causal=causal, **same)

    def is_causal(self, name: str) -> bool:
        """Whether this mechanism is measured in its causal form."""
        return mechanism(name).traits.causal if self.causal is None else self.causal

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What `subquad bench generation` measures: each field is an option of the command."""

    mechanisms: str = field(default="all", metadata={"help": "Names with commas between them, or all."})
    lengths: str = field(default="256,1024,4096", metadata={"help": "Lengths with commas between them."})
    batches: str = field(default="1,16", metadata={"help": "Streams at once; the largest number that fits is added."})
    most: int = field(default=256, metadata={"help": "Largest number of streams to try."})
    dim: int = field(default=256, metadata={"help": "Width of the model."})
    depth: int = field(default=4, metadata={"help": "Layers."})
    heads: int = field(default=8, metadata={"help": "Heads."})
    steps: int = field(default=16, metadata={"help": "Steps timed at each of five positions."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float64."})
    compile: bool = field(default=False, metadata={"help": "Compile the step."})

    def __post_init__(self) -> None:
        for name in self.names():
            if name not in CAUSAL:
                raise ValueError(f"mechanisms has {name!r}: accepted are those with a causal form, {', '.join(CAUSAL)}")
        if self.dtype not in DTYPES or self.dtype == "float16":
            raise ValueError(f"dtype={self.dtype!r} cannot work: accepted are float32, bfloat16, float64")
        at_least(self, most=1, steps=1)
        object.__setattr__(self, "device", available(self.device))
        for name in ("lengths", "batches"):
            if not all(0 < len(part) < 16 and part.isdecimal() and int(part) for part in self.parts(name)):
                given = getattr(self, name)
                raise ValueError(f"{name}={given!r} cannot work: accepted are whole numbers with commas between them")

    def parts(self, name: str) -> list[str]:
        return [part.strip() for part in getattr(self, name).split(",")]

    def names(self) -> list[str]:
        return CAUSAL if self.mechanisms == "all" else self.parts("mechanisms")


def parse_mechanisms(text: str) -> tuple[str, ...]:
    """ "linear, local" or "all"."""
    given = MECHANISMS if text.strip() == "all" else text.split(",")
    return tuple(name.strip() for name in given if name.strip())


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "512, 4k, 1m": k is 1,024, and m 1,024 k."""
    lengths = []
    for part in text.lower().replace("_", "").split(","):
        word = part.strip()
        number = word[:-1] if word.endswith(("k", "m")) else word
        if not number.isdecimal() or len(number) > 15:
            refuse("lengths", text, "whole numbers with commas between them, such as 512,4096 or 4k,1m")
        lengths.append(int(number) * {"k": 1024, "m": 1024**2}.get(word[-1], 1))
    return tuple(lengths)


def parse_length(text: str) -> int:
    """ "16000", "16k" or "1m", as `parse_lengths` reads them."""
    try:
        (length,) = parse_lengths(text)
    except ValueError:
        refuse("length", text, "a whole number, such as 16000, 16k or 1m")
    return length
