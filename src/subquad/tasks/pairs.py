"""Sequence to sequence on short pairs of text, byte by byte: tests the encoder-decoder and its cross-attention.

dates    generated: a date as people write it -> ISO 8601; evaluated on days that training never saw
spaces   real text without its spaces -> the same text with spaces
phones   words of AN4's dictionary -> their phones; a model can fit its few hundred words, but not generalise

The metric is the share of pairs written without a single error, by greedy decoding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from subquad.checks import at_least, one_of
from subquad.data import files, speech, text
from subquad.data.padding import pad
from subquad.models import Seq2Seq
from subquad.models.loss import cross_entropy, shift
from subquad.models.sampling import Sampling
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split, Sums, Task, means

START, END = 256, 257  # beside the 256 bytes
SETS = ("dates", "spaces", "phones")
FIRST, LAST = np.datetime64("1900-01-01"), np.datetime64("2100-01-01")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
WEEKDAYS = ("Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday")  # 1970-01-01 was a Thursday
WRITTEN = (  # y, m and d are numbers, M the month's name, w the day of the week, th what follows the day's number
    "{d} {M} {y}", "{M} {d}, {y}", "{d} {M:.3} {y}", "{w}, {d}{th} of {M} {y}", "{M} {d}{th}, {y}", "{d}.{m}.{y}",
    "{w:.3} {M:.3} {d} {y}", "{y}/{m:02}/{d:02}", "the {d}{th} of {M} in {y}", "{y} {M} {d}",
)  # fmt: skip
LONGEST = (len("Wednesday, 30th of September 2099"), len("2099-09-30"))

MODEL = {"mechanism": "softmax", "cross": "softmax", "dim": 128, "depth": 2, "heads": 4, "dropout": 0.1}


def date_pair(day: int, form: int) -> tuple[str, str]:
    """A day (counted from FIRST) in one of the ways to write it, and as ISO 8601."""
    date = FIRST + np.timedelta64(day, "D")
    y, m, d = (int(part) for part in str(date).split("-"))
    th = {1: "st", 2: "nd", 3: "rd"}.get(d % 10 if d not in (11, 12, 13) else 0, "th")
    weekday = WEEKDAYS[int(date.astype("datetime64[D]").astype(int)) % 7]
    return WRITTEN[form].format(y=y, m=m, d=d, M=MONTHS[m - 1], w=weekday, th=th), str(date)


@dataclass(frozen=True)
class Dates:
    days: np.ndarray

    def __len__(self) -> int:
        return len(self.days)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        forms = [int(np.random.default_rng([epoch, int(i)]).integers(len(WRITTEN))) for i in indices]
        return collate([date_pair(int(self.days[i]), form) for i, form in zip(indices, forms, strict=True)], LONGEST)


@dataclass(frozen=True)
class Fixed:
    """Pairs that are the same in every epoch."""

    pairs: Sequence[tuple[str, str]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def longest(self) -> tuple[int, int]:
        return max(len(a.encode()) for a, _ in self.pairs), max(len(b.encode()) for _, b in self.pairs)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:  # noqa: ARG002 -- the same in every epoch
        return collate([self.pairs[int(i)] for i in indices], self.longest)


def collate(pairs: Sequence[tuple[str, str]], longest: tuple[int, int]) -> Batch:
    """source [B, S] and target [B, T] with START and END, padded on the right, and their lengths. `longest`: the
    largest number of bytes in a source and in a target of any batch."""
    sources = [torch.tensor(list(a.encode())) for a, _ in pairs]
    targets = [torch.tensor([START, *b.encode(), END]) for _, b in pairs]
    return {
        "source": pad(sources, longest[0]),
        "source_lengths": torch.tensor([len(row) for row in sources]),
        "target": pad(targets, longest[1] + 2),
        "target_lengths": torch.tensor([len(row) for row in targets]),
    }


@dataclass(frozen=True)
class Pairs(Task):
    set: str = "dates"
    text: str = "text8.first12.5MB"  # of set="spaces": a corpus of words, such as text8, or a file in UTF-8
    words: int = 5  # of set="spaces": in one pair
    count: int = 50_000  # of set="spaces": pairs for training

    name: ClassVar[str] = "pairs"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    model: ClassVar[Mapping[str, Any]] = MODEL
    training: ClassVar[TrainingConfig] = TrainingConfig(steps=3000, batch=64, lr=1e-3, betas=(0.9, 0.98), warmup=200)

    def __post_init__(self) -> None:
        one_of(self, set=SETS)
        at_least(self, words=1, count=100)

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        return Seq2Seq(**{"vocab": END + 1, **fields})

    def source(self, split: Split) -> Source:
        if self.set == "dates":
            days = np.random.default_rng(0).permutation(int((LAST - FIRST).astype(int)))
            return Dates(days[_part(1000, split)])
        if self.set == "spaces":
            return Fixed(self._spaces(split))
        pairs = phone_pairs()
        return Fixed(pairs[_part(len(pairs) // 10, split)])

    def _spaces(self, split: Split) -> list[tuple[str, str]]:
        count = self.count if split == "train" else 1000
        data = getattr(text.load(self.text), split)[: 12 * self.words * count]
        parts = bytes(np.asarray(data)).replace(b"\0", b" ").split()[1:-1]  # the first and last word may be cut
        try:
            words = [part.decode("utf-8") for part in parts]
        except UnicodeDecodeError as error:
            raise files.Broken(f"{self.text} holds {error.object!r}: accepted is text in UTF-8") from error
        lines = [words[at : at + self.words] for at in range(0, len(words) - self.words + 1, self.words)]
        if not lines:
            raise files.Broken(f"{self.text} has {len(words)} whole words ({split}): accepted are {self.words} or more")
        return [("".join(line), " ".join(line)) for line in lines[:count]]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        inputs, labels, lengths = shift(batch["target"], batch["target_lengths"], "target")
        assert lengths is not None
        logits = model(batch["source"], inputs, batch["source_lengths"], lengths)
        return Loss(cross_entropy(logits, labels, lengths, reduction="sum"), lengths.sum())

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        loss = self.loss(model, batch)
        target, size = batch["target"], batch["target_lengths"]
        with torch.autocast(target.device.type, enabled=False):  # else a state would change its type between steps
            written = translate(model, batch["source"], batch["source_lengths"], target.shape[1] - 1)
        there = torch.arange(target.shape[1] - 1, device=target.device) < size[:, None] - 1
        exact = ((written == target[:, 1:]) | ~there).all(1)
        return {"nats": loss, "accuracy": (exact.sum(), torch.full((), len(exact), device=exact.device))}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        mean = means(sums)
        return {"accuracy": mean["accuracy"], "bits/byte": mean["nats"] / math.log(2)}


def _part(held: int, split: Split) -> slice:
    """The first `held` pairs are for validation, the next `held` for testing, the rest for training."""
    return {"train": slice(2 * held, None), "validation": slice(held), "test": slice(held, 2 * held)}[split]


def translate(model: Any, source: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """Greedy decoding, [B, steps]: the most probable byte at each step, until every row has ended."""
    state = model.init_state(*model.encode(source, lengths), capacity=steps + 1)
    start = torch.full((len(source), 1), START, device=source.device)
    return model.generate(start, steps, state=state, sampling=Sampling(temperature=0), stop=END)


def phone_pairs() -> list[tuple[str, str]]:
    """(word, its phones with blanks between them), in a fixed random order; only the first pronunciation of a word."""
    dictionary = speech.read_dictionary(files.get(speech.AN4) / "etc/an4.dic")
    pairs = [(word, " ".join(phones)) for word, phones in sorted(dictionary.items()) if "(" not in word]
    return [pairs[int(i)] for i in np.random.default_rng(0).permutation(len(pairs))]
