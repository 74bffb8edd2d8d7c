"""What an experiment is to the training loop: data, a model, a loss, and what is measured."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from subquad.training.config import TrainingConfig

Split = Literal["train", "validation", "test"]
Batch = dict[str, Tensor]  # on the CPU when made; the loop moves it
Sums = dict[str, tuple[Tensor, Tensor]]  # of each measure a numerator and a denominator, which add up over batches


class Loss(NamedTuple):
    """Summed, so that batches and ranks with unequal numbers of targets weigh by them: the mean is total / count."""

    total: Tensor  # nats, float32
    count: Tensor  # type: ignore[assignment]  # targets; nobody counts entries of this tuple


class Source(Protocol):
    """Examples by index. The same indices and epoch give the same batch: what is drawn at random is drawn from them."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, epoch: int) -> Batch: ...


class Task(ABC):
    """An experiment. A subclass is a frozen dataclass whose fields are its `data.*` options.

    `model` are keywords of the model, as in `--set model.depth=16`; `training` says how it is trained unless told
    otherwise. Both are merged with the user's before make_model is called.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the measure that decides which checkpoint is best: "bits/dim"
    higher_is_better: ClassVar[bool] = False
    decodes: ClassVar[bool] = False  # measure writes token by token: each rank then needs the whole model
    model: ClassVar[Mapping[str, Any]]
    training: ClassVar[TrainingConfig]

    @abstractmethod
    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        """A model of these keywords; unknown and impossible ones raise. Weights come from torch's global generator."""

    @abstractmethod
    def source(self, split: Split) -> Source: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss: ...

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """What a batch adds to each measure; called without gradients, in eval mode."""

    @abstractmethod
    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The measures as people read them; holds `metric`."""
