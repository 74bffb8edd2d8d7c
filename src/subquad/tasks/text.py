"""Text of any file, byte by byte: bits/byte, time of an iteration at long context, what a longer context improves.

Paper     Child et al. 2019, arXiv:1904.10509, §7.2: enwik8 at a context of 12,288; Table 3, the least context during
          evaluation, is measured by `measure_context`
"""

import codecs
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from torch import nn

from subquad.checks import at_least, check_count, refuse
from subquad.data import text
from subquad.models import LanguageModel
from subquad.models.config import GRIDS
from subquad.models.loss import cross_entropy
from subquad.ranks import even_sizes
from subquad.tasks.kinds import make_kind, positions_of
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split, Task, WriteOptions, Written, means

IGNORED = -100
BYTES = 256
COLUMNS = 128  # of a grid of positions: the paper's stride


@dataclass(frozen=True)
class Text(Task):
    set: str = "text8.first12.5MB"  # one of data.text.SETS, or the path of any file
    length: int = 1024  # bytes a window holds
    context: int = 0  # in evaluation: the least number of bytes before a predicted byte, except in the first window

    name: ClassVar[str] = "text"
    metric: ClassVar[str] = "bits/byte"
    model: ClassVar[Mapping[str, Any]] = {"mechanism": "softmax", "dim": 256, "depth": 6, "heads": 8, "dropout": 0.1}
    training: ClassVar[TrainingConfig] = TrainingConfig(steps=10_000, batch=32, lr=1e-3, betas=(0.9, 0.95), warmup=200)
    writes: ClassVar[str] = "text"
    write_options: ClassVar[tuple[str, ...]] = ("prompt", "steps")

    def __post_init__(self) -> None:
        at_least(self, length=1, context=0)
        if self.context >= self.length:
            refuse("context", self.context, f"less than length={self.length}")

    @property
    def data_name(self) -> str:
        return text.load(self.set).name

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        given: dict[str, Any] = {"vocab": text.VOCAB, "max_length": self.length}
        if fields.get("positions") in GRIDS:
            given["shape"] = (-(-self.length // COLUMNS), COLUMNS)
        return make_kind(LanguageModel, fields, self.model, given=given, lstm={"vocab": text.VOCAB})

    def source(self, split: Split) -> Source:
        corpus = text.load(self.set)
        smallest = min(len(part) for part in (corpus.train, corpus.validation, corpus.test))
        if self.length >= smallest:
            refuse("data.length", self.length, f"1 to {smallest - 1:,}: a part of {corpus.name} has {smallest:,} bytes")
        if split == "train":
            return text.Windows(corpus.train, self.length, shifted=True)
        return text.Windows(getattr(corpus, split), self.length, self.context)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return window_loss(model, batch)

    def part(self, batch: Batch, rank: int, world: int) -> Batch:
        return part_of_windows(batch, rank, world)

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        return {**super().summary(sums), "perplexity": math.exp(min(means(sums)["nats"], 50.0))}

    @classmethod
    def write(cls, model: Any, data: Mapping[str, Any], options: WriteOptions, console: Console) -> Written:  # noqa: ARG003
        """Print what the model writes as it comes: bytes as text, other tokens as numbers."""
        prompt, steps = options.prompt or "", 500 if options.steps is None else options.steps
        vocab = model.config.embedding.vocab or 0
        check_count("steps", steps)
        tokens = prompt_tokens(prompt, vocab)
        longest = positions_of(model)
        if longest is not None and len(tokens) + steps - 1 > longest:
            accepted = f"at most {longest:,} with the prompt's {len(tokens):,}, the positions of this model"
            refuse("steps", steps, accepted)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        console.print(prompt, end="", markup=False, highlight=False, soft_wrap=True)
        for token in model.stream(tokens, steps, sampling=options.sampling, seed=options.seed):
            part = f" {token}" if vocab < BYTES else decoder.decode(bytes([token])) if token < BYTES else ""
            console.print(part, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
        return Written([])


def prompt_tokens(prompt: str, vocab: int) -> list[int]:
    """The bytes of a prompt, or its numbers if the model has fewer than 256 tokens; never empty."""
    if vocab < BYTES:
        return number_tokens(prompt, vocab) or [vocab - 1]
    try:
        return list(prompt.encode()) or [vocab - 1 if vocab > BYTES else ord("\n")]
    except UnicodeEncodeError:
        refuse("prompt", prompt, "text in UTF-8")


def number_tokens(prompt: str, vocab: int) -> list[int]:
    """Tokens that are written as numbers with spaces between them."""
    if not all(part.isdecimal() and len(part) < 10 for part in prompt.split()):
        raise ValueError(f"prompt={prompt!r} cannot work: this model has {vocab} tokens; give their numbers, as 3 1 4")
    tokens = [int(part) for part in prompt.split()]
    if max(tokens, default=0) >= vocab:
        refuse("prompt", prompt, f"tokens from 0 to {vocab - 1}")
    return tokens


def part_of_windows(batch: Batch, rank: int, world: int) -> Batch:
    """The part of windows [B, T + 1] that predicts this rank's share of the T targets."""
    if batch.keys() != {"tokens", "first"}:
        names = ", ".join(batch)
        accepted = "windows of tokens, with what comes first in them"
        raise ValueError(f"training.sequence={world} cannot work with batches of {names}: accepted are {accepted}")
    size = batch["tokens"].shape[1] - 1
    sizes = even_sizes(size, world)
    start = sum(sizes[:rank])
    tokens = batch["tokens"][:, start : start + sizes[rank] + 1]
    return {"tokens": tokens, "first": (batch["first"] - start).clamp(min=0)}


def window_loss(model: nn.Module, batch: Batch) -> Loss:
    """The loss on windows [B, T + 1]; their first `first` tokens only give context and are not predicted."""
    tokens, first = batch["tokens"].long(), batch["first"]
    at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    targets = tokens[:, 1:].masked_fill(at < first[:, None], IGNORED)
    how: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}
    if isinstance(model, LanguageModel):  # it can leave out the logits of a large vocabulary
        total = model.loss(tokens[:, :-1], targets=targets, **how)
    else:
        total = cross_entropy(model(tokens[:, :-1]), targets, **how)
    return Loss(total, (targets != IGNORED).sum())


@torch.no_grad()
def measure_context(
    model: LanguageModel, tokens: np.ndarray, length: int, context: int, batch: int, precision: torch.dtype | None
) -> tuple[float, int]:
    """(bits/byte with at least `context` bytes before each predicted byte, how many bytes were predicted). For every
    context these are all bytes after the first window."""
    model.eval()
    windows = text.Windows(tokens, length, context)
    if len(windows) < 2:
        raise ValueError(f"tokens holds {len(tokens):,}: accepted are more than one window of {length:,}")
    total = count = torch.zeros((), dtype=torch.float64, device=model.device)
    for start in range(1, len(windows), batch):
        made = windows.batch(np.arange(start, min(start + batch, len(windows))))
        made = {name: tensor.to(model.device) for name, tensor in made.items()}
        with torch.autocast(model.device.type, precision, enabled=precision is not None):
            loss = window_loss(model, made)
        total, count = total + loss.total, count + loss.count
    return float(total / count / math.log(2)), int(count)
