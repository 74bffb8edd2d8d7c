"""What the training loop needs to know about an experiment: options, data, model, loss and measures; and what its
models generate."""

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from rich.console import Console
from torch import Tensor, nn

from subquad.checks import check_plain, nearest
from subquad.models.sampling import Sampling
from subquad.training.config import TrainingConfig

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = typing.get_args(Split)
Batch = dict[str, Tensor]  # made on the CPU; the loop moves it to the device
Sums = dict[str, tuple[Tensor, Tensor]]  # a numerator and a denominator for each measure; both add up over batches


class Loss(NamedTuple):
    """A sum, so that batches and ranks with more targets have more weight; the mean is total / count."""

    total: Tensor  # nats, float32
    count: Tensor  # type: ignore[assignment]  # of targets; hides tuple.count, which is not used here


class Source(Protocol):
    """Examples by index. The same indices and epoch give the same batch: all randomness is seeded by them."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, epoch: int) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options of `subquad generate`; None if the user did not set one."""

    count: int | None = None
    out: Path | None = None
    shape: str | None = None
    complete: Path | None = None
    prompt: str | None = None
    steps: int | None = None
    compile: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


class Written(NamedTuple):
    files: list[Path]
    per_second: float | None = None


class Trial(NamedTuple):
    """The forms of a task on which small models learn something in a few steps; None: it has no such form."""

    causal: "Task | None" = None
    bidirectional: "Task | None" = None
    examples: int | None = None  # of the test set that are enough; None: all

    def form(self, causal: bool) -> "Task | None":
        return self.causal if causal else self.bidirectional


class Task(ABC):
    """An experiment. A subclass is a frozen dataclass; its fields are its `data.*` options.

    `model` holds the keywords of its model, as in `--set model.depth=16`, and `training` the default training settings.
    The user's settings are merged into both before make_model is called.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the measure that decides which checkpoint is best: "bits/dim"
    higher_is_better: ClassVar[bool] = False
    decodes: ClassVar[bool] = False  # whether `measure` generates token by token; each rank then needs the whole model
    model: ClassVar[Mapping[str, Any]]
    training: ClassVar[TrainingConfig]
    writes: ClassVar[str] = ""  # what its models generate: "images"; "": nothing
    write_options: ClassVar[tuple[str, ...]] = ()  # the fields of WriteOptions it uses, other than sampling and seed

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The `data.*` options with their defaults; None where the user must give a value."""
        values: dict[str, Any] = {}
        options: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        for option in options:
            default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
            values[option.name] = None if default is dataclasses.MISSING else default
        return values

    @classmethod
    def from_options(cls, data: Mapping[str, Any]) -> Self:
        """The task with these `data.*` options, as read from JSON; unknown names and wrong types raise ValueError."""
        hints, known = typing.get_type_hints(cls), cls.defaults()
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"data has no setting {key!r}{nearest(key, known)}")
            check_plain(f"data.{key}", value, hints[key])
        return cls(**values)

    def options(self) -> dict[str, Any]:
        """The `data.*` options of this task."""
        return {name: getattr(self, name) for name in self.defaults()}

    @property
    def data_name(self) -> str:
        """The name of the data, shown with a result."""
        return self.name

    @classmethod
    def trial(cls) -> Trial | None:
        """What `subquad compare` trains for this task; None: it does not offer the task."""
        return None

    @abstractmethod
    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        """A model from these keywords; unknown or impossible ones raise. Weights use torch's global generator."""

    @abstractmethod
    def source(self, split: Split) -> Source: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss: ...

    def part(self, batch: Batch, rank: int, world: int) -> Batch:  # noqa: ARG002
        """What the loss needs of a batch on a rank that holds a part of every sequence, of `world` ranks."""
        accepted = "none: the task does not say how to cut its sequences; text, tokens, copy and music of sound do"
        raise ValueError(f"training.sequence={world} cannot work with the task {self.name!r}: accepted is {accepted}")

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """What a batch adds to each measure; called without gradients, in eval mode."""
        return {"nats": self.loss(model, batch)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The measures to report, including `metric`, which is the loss in bits unless a task overrides this."""
        return {self.metric: means(sums)["nats"] / math.log(2)}

    @classmethod
    def write(cls, model: Any, data: Mapping[str, Any], options: WriteOptions, console: Console) -> Written:
        """Let a model of this task generate. `data` are the task's options from the model's card, or {}."""
        raise NotImplementedError(f"{cls.name} cannot generate anything")


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / max(count, 1) for name, (total, count) in sums.items()}
