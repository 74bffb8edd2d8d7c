"""Fill: predict hidden inputs of a task of the arena from those around them, without labels, before the task itself.

Paper     Amos et al. 2023, "Never Train from Scratch", arXiv:2310.02980; `subquad lra --pretrain` has its settings
Data      inputs of that task's training split only: its last examples are this task's validation and test
Hidden    each input by itself, with probability `hidden`: it is read as a learned vector and its position
Causal    models that read from left to right predict every next input instead, and nothing is hidden
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from subquad.checks import at_least, nearest, one_of, refuse
from subquad.models.classifier import PooledEncoder
from subquad.models.embedding import make_head
from subquad.models.loss import cross_entropy, shift
from subquad.ops.lengths import keep
from subquad.tasks.lra.image import Image
from subquad.tasks.lra.listops import ListOps
from subquad.tasks.lra.pathfinder import Pathfinder, PathX
from subquad.tasks.lra.retrieval import Retrieval
from subquad.tasks.lra.task import SMALL, Classification, Picture
from subquad.tasks.lra.text import Text
from subquad.training.config import TrainingConfig
from subquad.training.models import load_weights, make_model
from subquad.training.task import Batch, Loss, Source, Split, Sums, Task, means

ARENA: tuple[type[Classification], ...] = (ListOps, Text, Retrieval, Image, Pathfinder, PathX)
INNER = {task.name: task for task in ARENA}
HELD_OUT = 2_000  # examples each of validation and test, or a twentieth of the training split if that is less
NOT_A_TARGET = -100


class Filler(nn.Module):
    """The encoder of a classifier, with the same names of weights, and a prediction at every position."""

    def __init__(self, tower: PooledEncoder, outputs: int):
        super().__init__()
        self.tower = tower
        dim = tower.transformer.config.dim
        self.hidden = nn.Parameter(torch.randn(dim))
        self.head = make_head(dim, outputs)

    @property
    def causal(self) -> bool:
        return self.tower.transformer.config.causal

    def forward(self, inputs: Tensor, hidden: Tensor | None, lengths: Tensor | None = None) -> Tensor:
        """Predictions [B, T, outputs]; `hidden` [B, T] says which inputs are hidden."""
        x = self.tower.embedding(inputs, lengths)
        if hidden is not None:
            x = x + hidden[..., None].to(x.dtype) * self.hidden.to(x.dtype)
        y = self.tower.mix(x, lengths)
        return self.head(y if self.tower.cls is None else y[:, 1:])


@dataclass(frozen=True)
class Part:
    """The inputs of the examples from `first` on."""

    source: Source
    task: Classification
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        return self.task.unlabelled(self.source.batch(indices + self.first, epoch))


class Prediction(NamedTuple):
    outputs: Tensor  # [B, T, outputs]
    targets: Tensor  # [B, T]: a class, or a brightness from -1 to 1
    counted: Tensor  # [B, T]: the positions whose targets count


@dataclass(frozen=True)
class Fill(Task):
    of: str = "listops"  # the task whose inputs are filled in: listops, imdb, retrieval, image, pathfinder, pathx
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # its data.* options
    hidden: float = 0.15  # the share of inputs
    patch: int = 1  # the side of the squares that are hidden in pictures: 1 hides each pixel by itself
    # of pixels: one of `levels` of brightness by cross-entropy, or the brightness itself by its absolute error
    predict: Literal["levels", "brightness"] = "levels"
    levels: int = 16

    name: ClassVar[str] = "fill"
    metric: ClassVar[str] = "loss"
    model: ClassVar[Mapping[str, Any]] = SMALL
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=2000, batch=32, lr=1e-3, betas=(0.9, 0.98), warmup=200, evaluate_batch=250, evaluate_batches=8
    )

    def __post_init__(self) -> None:
        one_of(self, predict=("levels", "brightness"))
        if self.of not in INNER:
            raise ValueError(
                f"of={self.of!r} names no task of the arena{nearest(self.of, INNER)} Accepted: {', '.join(INNER)}"
            )
        if not 0 < self.hidden < 1:
            refuse("hidden", self.hidden, "a share of the inputs, above 0 and below 1")
        at_least(self, levels=2, patch=1)
        if self.levels > 256:
            refuse("levels", self.levels, "an integer of at most 256, the values of a pixel")
        if self.predict == "brightness" and not issubclass(INNER[self.of], Picture):
            refuse("predict", self.predict, f'"levels": {self.of} has no pixels')
        inner = self.inner  # wrong settings raise here
        if self.patch > 1 and not (isinstance(inner, Picture) and inner.side % self.patch == 0):
            refuse("patch", self.patch, f"1, or for pictures a divisor of their side; the task is {self.of}")

    @cached_property
    def inner(self) -> Classification:
        return INNER[self.of].from_options(self.settings)

    @property
    def outputs(self) -> int:
        """Numbers that are predicted at each position."""
        if not issubclass(INNER[self.of], Picture):
            return INNER[self.of].vocab
        return 1 if self.predict == "brightness" else self.levels

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        tower = self.inner.make_model(fields).tower
        assert isinstance(tower, PooledEncoder)
        config = tower.transformer.config
        if any(config.pool_of(layer) > 1 for layer in range(config.depth)):
            refuse("pool", config.pool, "1: inputs between which a layer took means cannot be filled in")
        return Filler(tower, self.outputs)

    def source(self, split: Split) -> Source:
        inner = self.inner
        source = inner.source("train")
        held = min(HELD_OUT, len(source) // 20)
        if not held:
            raise ValueError(
                f"{self.of} has {len(source)} training examples: accepted are 20 or more, to hold some out"
            )
        rest = len(source) - 2 * held
        first, size = {"train": (0, rest), "validation": (rest, held), "test": (rest + held, held)}[split]
        return Part(source, inner, first, size)

    def predictions(self, model: Filler, batch: Batch, generator: torch.Generator | None = None) -> Prediction:
        """Hide inputs at random and predict them, or the next input of each if the model is causal."""
        tokens, lengths = batch["tokens"], batch.get("lengths")
        if model.causal:
            tokens, targets, lengths = shift(tokens, lengths)
            outputs = model(self.inner.inputs(tokens), None, lengths)
            counted = torch.ones_like(targets, dtype=torch.bool)
        else:
            targets, counted = tokens, self.hide(tokens, generator)
            outputs = self.filled(model, tokens, counted, lengths)
        there = keep(lengths, targets.shape[1])
        return Prediction(outputs, self.wanted(targets), counted if there is None else counted & there)

    def hide(self, tokens: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Which of the tokens [B, T] to hide, at random."""
        inner, patch = self.inner, self.patch
        shape = tokens.shape
        if patch > 1:
            assert isinstance(inner, Picture)
            shape = torch.Size((len(tokens), inner.side // patch, inner.side // patch))
        hidden = torch.rand(shape, device=tokens.device, generator=generator) < self.hidden
        if patch > 1:
            hidden = hidden.repeat_interleave(patch, 1).repeat_interleave(patch, 2).flatten(1)
        return hidden

    def filled(self, model: Filler, tokens: Tensor, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Predictions [B, T, outputs] of a model that does not see the hidden ones of the tokens [B, T]."""
        outputs: Tensor = model(self.inner.inputs(tokens.masked_fill(hidden, 0)), hidden, lengths)
        return outputs

    def wanted(self, tokens: Tensor) -> Tensor:
        """The targets of tokens."""
        if self.predict == "brightness":
            return tokens.float() / 127.5 - 1
        return tokens.long() * self.levels // 256 if issubclass(INNER[self.of], Picture) else tokens.long()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, Filler)
        return self._loss(self.predictions(model, self.inner.augmented(batch)))

    def _loss(self, made: Prediction) -> Loss:
        if self.predict == "brightness":
            error = (made.outputs[..., 0].float() - made.targets).abs()
            return Loss((error * made.counted).sum(), made.counted.sum())
        targets = made.targets.masked_fill(~made.counted, NOT_A_TARGET)
        return Loss(cross_entropy(made.outputs, targets, None, NOT_A_TARGET, "sum"), made.counted.sum())

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        assert isinstance(model, Filler)
        generator = torch.Generator(batch["tokens"].device).manual_seed(0)  # every evaluation hides the same places
        made = self.predictions(model, batch, generator)
        loss = self._loss(made)
        if self.predict == "brightness":
            return {"loss": loss}
        return {"loss": loss, "right": (((made.outputs.argmax(-1) == made.targets) & made.counted).sum(), loss.count)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """loss: nats of a hidden input, or the absolute error of its brightness, which reaches from -1 to 1."""
        mean = means(sums)
        return {"loss": mean["loss"], **({"right": 100 * mean["right"]} if "right" in mean else {})}

    def way(self, causal: bool) -> str:
        """How a model of this task is pretrained, in words."""
        squares = f" in squares of {self.patch}" if self.patch > 1 else ""
        return "next input" if causal else f"{100 * self.hidden:g} % hidden{squares}"

    def brightness(self, outputs: Tensor) -> Tensor:
        """The expected brightness, 0 to 255, of predictions for pixels."""
        if self.predict == "brightness":
            return ((outputs[..., 0].float() + 1) * 127.5).clamp(0, 255)
        values = torch.linspace(0, 255, self.levels, device=outputs.device)
        return outputs.float().softmax(-1) @ values


def best_weights(run: Path) -> Path | None:
    """The folder of a run's best weights so far; None before the first evaluation."""
    if (run / "model").is_dir():
        return run / "model"
    made = sorted(run.glob("best/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return made[-1] if made else None


@torch.no_grad()
def look(run: Path, path: Path, count: int = 6, device: str = "cpu") -> None:
    """A PNG of held-out training pictures with hidden pixels and what the weights of a pretraining run fill in."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from subquad.training.folder import read_config

    config, weights = read_config(run), best_weights(run)
    if config.task != Fill.name or not issubclass(INNER[str(config.data.get("of"))], Picture):
        raise ValueError(f"{run} holds a run of {config.task!r}: accepted is pretraining on pictures")
    if weights is None:
        raise ValueError(f"{run} has no weights yet: accepted is a run after its first evaluation")
    task = Fill.from_options(config.data)
    model = make_model(task, config.model)
    assert isinstance(model, Filler)
    load_weights(model, weights)
    model.eval().to(device)
    source = task.source("validation")
    tokens = source.batch(np.arange(min(count, len(source))), 0)["tokens"].to(device)
    columns = _causal_columns(task, model, tokens) if model.causal else _hidden_columns(task, model, tokens)
    side = int(tokens.shape[1] ** 0.5)
    size = (2.3 * len(columns), 2.3 * len(tokens) + 0.3)
    figure, axes = plt.subplots(1, len(columns), figsize=size, layout="constrained")
    for axis, (title, pictures) in zip(axes, columns.items(), strict=True):
        tall = np.pad(pictures.reshape(-1, side, side, 3), ((0, 0), (1, 1), (0, 0), (0, 0)), constant_values=1)
        axis.imshow(tall.reshape(-1, side, 3).clip(0, 1), interpolation="nearest")
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


HIDDEN_COLOUR = (0.75, 0.25, 0.1)  # no grey


def _hidden_columns(task: Fill, model: Filler, tokens: Tensor) -> dict[str, np.ndarray]:
    """Pictures with pixels hidden as in training, and with a hidden square, where what leads in must be continued."""
    generator = torch.Generator(tokens.device).manual_seed(0)
    scattered = task.hide(tokens, generator)
    side = int(tokens.shape[1] ** 0.5)
    square = torch.zeros(side, side, dtype=torch.bool, device=tokens.device)
    square[side * 3 // 8 : side * 5 // 8, side * 3 // 8 : side * 5 // 8] = True
    columns = {"picture": _grey(tokens)}
    for name, hidden in ((task.way(False), scattered), ("a square hidden", square.flatten().expand_as(tokens))):
        said = task.brightness(task.filled(model, tokens, hidden))
        seen = _grey(tokens)
        seen[hidden.cpu().numpy()] = HIDDEN_COLOUR
        columns |= {name: seen, f"filled in ({name})": _grey(torch.where(hidden, said, tokens.float()))}
    return columns


def _causal_columns(task: Fill, model: Filler, tokens: Tensor) -> dict[str, np.ndarray]:
    said = task.brightness(model(task.inner.inputs(tokens[:, :-1]), None))
    said = torch.cat((tokens[:, :1].float(), said), 1)
    return {"picture": _grey(tokens), "each pixel from those before it": _grey(said)}


def _grey(values: Tensor) -> np.ndarray:
    """[B, T] from 0 to 255 as colours [B, T, 3] from 0 to 1."""
    return (values.float().cpu().numpy() / 255)[..., None].repeat(3, -1)
