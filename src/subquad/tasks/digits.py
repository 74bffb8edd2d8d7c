"""The handwritten digits that ship with the package: written pixel by pixel, or recognised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console

from subquad.data import digits
from subquad.models import LanguageModel
from subquad.tasks.images import Images
from subquad.tasks.lra.task import Classification, Labelled
from subquad.training.config import TrainingConfig
from subquad.training.task import Source, Split, Trial, WriteOptions, Written

MODEL = {"mechanism": "linear", "dim": 64, "depth": 3, "heads": 4, "positions": "grid", "dropout": 0.1}


@dataclass(frozen=True)
class Digits(Images):
    """Digits pixel by pixel, with a model that a CPU trains in a minute. Needs no download."""

    set: ClassVar[str] = "digits"  # type: ignore[misc]  # no options of its own: the set is fixed
    validation: ClassVar[int] = 150  # type: ignore[misc]
    name: ClassVar[str] = "digits"
    model: ClassVar[Mapping[str, Any]] = {"mechanism": "linear"}
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=700, batch=32, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05, warmup=35
    )

    def make_model(self, fields: Mapping[str, Any]) -> LanguageModel:
        return super().make_model({**MODEL, **fields})

    @classmethod
    def trial(cls) -> Trial:
        return Trial(causal=Images(cls.set, validation=1), bidirectional=DigitClasses())

    @classmethod
    def write(cls, model: Any, data: Mapping[str, Any], options: WriteOptions, console: Console) -> Written:  # noqa: ARG003
        return super().write(model, {"set": cls.set}, options, console)


@dataclass(frozen=True)
class DigitClasses(Classification):
    """Which digit is it? `subquad compare` uses this task for mechanisms without a causal form."""

    name: ClassVar[str] = "digit_classes"
    vocab: ClassVar[int] = digits.SHADES
    classes: ClassVar[int] = 10

    def positions(self) -> int:
        return digits.SIDE**2

    def source(self, split: Split) -> Source:
        """Validation uses the test part too, because it chooses nothing here."""
        part = digits.load()[split != "train"]
        return Labelled(part.pixels.numpy(), part.labels.numpy())
