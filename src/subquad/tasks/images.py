"""Images as sequences of bytes, measured in bits/dim over all pixels.

Paper     Katharopoulos et al. 2020, arXiv:2006.16236, §4.2: post-norm, ReLU, sinusoids beside the tokens, a mixture of
          ten discretised logistics, RAdam with each tensor's gradient clipped; MNIST 8 layers, CIFAR-10 16
          Child et al. 2019, arXiv:1904.10509, §7.1: SPARSE_CIFAR10 and SPARSE_IMAGENET64, over 256 logits
Departs   a start token, the last of the vocabulary, comes before the first pixel, which is predicted and counted too;
          the last `validation` training images choose the checkpoint that is tested
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from rich.console import Console
from torch import nn

from subquad.checks import at_least, one_of
from subquad.data.images import Images as Pictures
from subquad.data.images import Pixels, hold_out
from subquad.models import LanguageModel, logistic_mixture
from subquad.models.config import GRIDS
from subquad.models.loss import cross_entropy
from subquad.tasks.copy import PAPER_MODEL, PAPER_TRAINING
from subquad.tasks.write_images import write_png
from subquad.training.task import Batch, Loss, Source, Split, Task, WriteOptions, Written


class Set(NamedTuple):
    shape: tuple[int, ...]
    depth: int  # of the paper's model for it
    published: tuple[tuple[int, int], ...]  # pictures for training and testing, for each release of the set
    values: int = 256


SETS = {
    "mnist": Set((28, 28), 8, ((60_000, 10_000),)),
    "cifar10": Set((32, 32, 3), 16, ((50_000, 10_000),)),
    "imagenet64": Set((64, 64, 3), 16, ((1_281_149, 49_999), (1_281_167, 50_000))),
    "tiny_imagenet": Set((64, 64, 3), 16, ((100_000, 10_000),)),
    "digits": Set((8, 8), 2, ((1500, 297),), 17),
}
COMPONENTS = 10

# models of the Sparse Transformer's Table 1: pre-norm, GELU, learned vectors for each row, column and channel
_SPARSE: Mapping[str, Any] = {
    "positions": "grid",
    "norm_position": "pre",
    "activation": "gelu",
    "mixture": None,
    "ff_dropout": 0.0,
    "attention_dropout": 0.0,
}
SPARSE_CIFAR10 = {
    **_SPARSE, "mechanism": ["strided", {"stride": 96}], "dim": 256, "depth": 128, "heads": 2, "ff_dim": 512,
    "dropout": 0.25,
}  # fmt: skip
SPARSE_IMAGENET64 = {
    **_SPARSE, "mechanism": ["strided", {"stride": 128}], "dim": 512, "depth": 48, "heads": 16, "dropout": 0.01,
    "checkpoint": True,
}  # fmt: skip


@dataclass(frozen=True)
class Images(Task):
    set: str = "mnist"
    validation: int = 1000  # training images held out

    name: ClassVar[str] = "images"
    metric: ClassVar[str] = "bits/dim"
    model: ClassVar[Mapping[str, Any]] = {name: value for name, value in PAPER_MODEL.items() if name != "depth"}
    training: ClassVar[Any] = dataclasses.replace(PAPER_TRAINING, steps=10_000, batch=64)
    writes: ClassVar[str] = "images"
    write_options: ClassVar[tuple[str, ...]] = ("count", "out", "shape", "complete", "compile")

    def __post_init__(self) -> None:
        one_of(self, set=SETS)
        at_least(self, validation=1)

    @property
    def data_name(self) -> str:
        """The set's name, with the number of pictures if it is not the published one."""
        training, test = (len(part.labels) for part in load(self.set))
        whole = (training, test) in SETS[self.set].published
        return self.set if whole else f"{self.set}, only {training:,} + {test:,} pictures"

    def make_model(self, fields: Mapping[str, Any]) -> LanguageModel:
        """Depth, length and head follow from the set unless they are given; positions on a grid get the set's shape."""
        known = SETS[self.set]
        given: dict[str, Any] = {
            "vocab": known.values + 1,
            "max_length": math.prod(known.shape),
            "depth": known.depth,
            "mixture": COMPONENTS if known.values == logistic_mixture.VALUES else None,
            **fields,
        }
        if given.get("positions") in GRIDS:
            given.setdefault("shape", known.shape)
        return LanguageModel(**given)

    def source(self, split: Split) -> Source:
        training, test = load(self.set)
        if split == "test":
            return Pixels(test)
        return Pixels(hold_out(training, self.validation)[split == "validation"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        start = SETS[self.set].values
        pixels = batch["pixels"].long()
        outputs = model(nn.functional.pad(pixels[:, :-1], (1, 0), value=start))
        # outputs are one logit per token or the parameters of a mixture, which are fewer
        nats = cross_entropy if outputs.shape[-1] == start + 1 else logistic_mixture.loss
        return Loss(nats(outputs, pixels, reduction="sum"), torch.full((), pixels.numel(), device=pixels.device))

    @classmethod
    def write(cls, model: Any, data: Mapping[str, Any], options: WriteOptions, console: Console) -> Written:
        """Write a sheet of images as one PNG."""
        name = data.get("set")
        known = SETS.get(name) if isinstance(name, str) else None
        if "set" in data and known is None:
            raise ValueError(f"the card of this model does not name a known set of images ({name!r}): pass its shape")
        return write_png(model, options, console, None if known is None else known.shape)


@lru_cache(maxsize=1)  # evaluation calls this again and again
def load(name: str) -> tuple[Pictures, Pictures]:
    """(training, test) pictures of a set; the module in data/ has the set's name."""
    training, test = import_module(f"subquad.data.{name}").load()
    return training, test
