"""Speech recognition without alignments: frames of sound to phones by CTC, judged by the phone error rate.

Paper     Katharopoulos et al. 2020, arXiv:2006.16236, §4.3: Wall Street Journal, 9 layers, 6 heads, non-causal, beside
          a Bi-LSTM of 3 layers of 320 in each direction (`--mechanism lstm`)
CTC       Graves et al. 2006: the probability of all ways to spread the phones and blanks over the frames
Departs   the paper gives neither its width (192 here, heads of 32 as in its other models) nor any augmentation. AN4 has
          fifty minutes of speech instead of 80 hours, so utterances are stretched, and frames and features masked, anew
          in each epoch
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from subquad.checks import at_least, one_of, refuse
from subquad.data import files, speech
from subquad.data.padding import pad
from subquad.models import Classifier
from subquad.ops.ctc import ctc_loss
from subquad.tasks.copy import PAPER_MODEL, PAPER_TRAINING
from subquad.tasks.kinds import directed, make_kind
from subquad.training.task import Batch, Loss, Source, Split, Sums, Task, means

SETS = ("an4", "digits", "folder")
STRETCH = 0.1  # at most, an utterance becomes faster or slower by this share
MASKS, WIDEST = 2, 0.1  # how many parts of an utterance are silenced, and the largest share of one
FEATURES_WIDEST = 0.25  # the largest share of neighbouring features that are masked (Park et al. 2019, SpecAugment)


@dataclass(frozen=True, eq=False)
class Frames:
    """Utterances with augmented and then stacked frames. Augmentation is random, seeded by the epoch and the index."""

    source: speech.Utterances
    stack: int = 1  # neighbouring frames that are joined into one wider frame: [T, D] -> [ceil(T / stack), stack D]
    augment: bool = False

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        made = self.source.batch(indices, epoch)
        frames, lengths = made["frames"], made["lengths"]
        if self.augment:
            symbols = (self.stack * made["target_lengths"]).tolist()
            rows = [
                _augmented(row[:size], count, np.random.default_rng([epoch, int(index)]))
                for row, size, count, index in zip(frames, lengths.tolist(), symbols, indices, strict=True)
            ]
            frames = pad(rows, math.ceil(self.source.longest * (1 + STRETCH)))
            lengths = torch.tensor([len(row) for row in rows])
        if self.stack > 1:
            frames = nn.functional.pad(frames, (0, 0, 0, -frames.shape[1] % self.stack))
            frames, lengths = frames.unflatten(1, (-1, self.stack)).flatten(2), -(-lengths // self.stack)
        return {**made, "frames": frames, "lengths": lengths}


def _augmented(frames: Tensor, symbols: int, random: np.random.Generator) -> Tensor:
    """[T, D] -> [T', D], always long enough for its symbols with a blank between every two."""
    size = max(round(len(frames) * random.uniform(1 - STRETCH, 1 + STRETCH)), min(len(frames), 2 * symbols + 1))
    stretched = nn.functional.interpolate(frames.T[None], size=size, mode="linear", align_corners=False)[0].T
    changed = stretched.contiguous()
    for _ in range(MASKS):
        width = int(random.integers(0, max(1, int(size * WIDEST)) + 1))
        start = int(random.integers(0, size - width + 1))
        changed[start : start + width] = 0  # the mean over the training part
    width = int(random.integers(0, int(changed.shape[1] * FEATURES_WIDEST) + 1))
    start = int(random.integers(0, changed.shape[1] - width + 1))
    changed[:, start : start + width] = 0
    return changed


@dataclass(frozen=True)
class Speech(Task):
    set: str = "an4"
    path: str | None = None  # of set="folder": WAV files and transcripts
    augment: bool = True  # in training
    stack: int = 1  # how many frames are joined into one: 3 turns frames of 10 ms into 30 ms

    name: ClassVar[str] = "speech"
    metric: ClassVar[str] = "per"
    model: ClassVar[Mapping[str, Any]] = {**PAPER_MODEL, "dim": 192, "depth": 9, "heads": 6, "norm_position": "pre"}
    training: ClassVar[Any] = dataclasses.replace(
        PAPER_TRAINING, steps=6000, batch=16, lr=5e-4, betas=(0.9, 0.98), warmup=500, schedule="cosine"
    )

    def __post_init__(self) -> None:
        one_of(self, set=SETS)
        at_least(self, stack=1)
        if (self.path is not None) != (self.set == "folder"):
            refuse("path", self.path, 'a folder with set="folder", None with the others')

    @property
    def data_name(self) -> str:
        return _load(self.set, self.path).name

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        data = _load(self.set, self.path)
        features, classes = self.stack * data.train.frames.shape[1], len(data.symbols)
        given = {"features": features, "classes": classes, "pooling": "none"}
        lstm = {"features": features, "outputs": classes, "bidirectional": True}
        return make_kind(Classifier, directed(fields), self.model, given=given, lstm=lstm)

    def source(self, split: Split) -> Source:
        data = _load(self.set, self.path)
        check_fit(data, self.stack)
        return Frames(getattr(data, split), self.stack, self.augment and split == "train")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return ctc(model(batch["frames"], batch["lengths"]), batch)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        logits = model(batch["frames"], batch["lengths"])
        loss = ctc(logits, batch)
        decoded = decode(logits, batch["lengths"])
        sizes = batch["target_lengths"].tolist()
        targets = [row[:n].tolist() for row, n in zip(batch["targets"].cpu(), sizes, strict=True)]
        wrong = sum(edits(a, b) for a, b in zip(decoded, targets, strict=True))
        return {"nats": loss, "per": (torch.full((), wrong, device=loss.total.device), loss.count)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        mean = means(sums)
        return {"per": 100 * mean["per"], "bits/phone": mean["nats"] / math.log(2)}


def check_fit(data: speech.Speech, stack: int) -> None:
    """Raise if the data has too few frames for CTC to place the symbols: the loss would be zero, and nobody would
    notice that the model learns nothing. A few recordings may be too short, but stacking must not add more."""
    parts = (data.train, data.validation, data.test)
    frames = np.concatenate([np.diff(part.starts) for part in parts])
    fewest = np.concatenate([part.fewest for part in parts])
    widest = np.where(fewest > 1, (frames - 1) // np.maximum(fewest - 1, 1), stack)  # largest stack that works
    never, lost = widest < 1, widest < stack
    if never.sum() > len(never) / 2:
        raise files.Broken(
            f"{data.name} has fewer frames of 10 ms than symbols in {never.sum():,} of {len(never):,} utterances: its "
            "transcripts are not those of its sounds"
        )
    if lost.sum() > never.sum():
        room = f"{lost.sum():,} of {len(lost):,} utterances would have fewer frames than CTC needs for their symbols"
        refuse("stack", stack, f"1 to {widest[~never].min()} ({room})")


def ctc(logits: Tensor, batch: Batch) -> Loss:
    """-log P(phones) from logits [B, T, symbols]; symbol 0 is the blank."""
    losses = ctc_loss(logits, batch["targets"], batch["lengths"], batch["target_lengths"])
    return Loss(losses.sum(), batch["target_lengths"].sum())


def decode(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """Greedy CTC: the most probable symbol of each frame, with repetitions and blanks removed."""
    best = logits.argmax(-1).cpu()
    rows = [torch.unique_consecutive(row[:n]) for row, n in zip(best, lengths.tolist(), strict=True)]
    return [row[row != 0].tolist() for row in rows]


def edits(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The fewest insertions, deletions and substitutions from one to the other (Levenshtein distance)."""
    row = np.arange(len(theirs) + 1)
    other = np.asarray(theirs)
    for count, symbol in enumerate(ours, start=1):
        # first without insertions; then each place may also be reached from the left, at a cost of 1 per step
        kept = np.minimum(row[1:] + 1, row[:-1] + (other != symbol))
        best = np.concatenate(([count], kept))
        steps = np.arange(len(best))
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


@lru_cache(maxsize=1)
def _load(name: str, path: str | None) -> speech.Speech:
    if path is not None:
        return speech.folder(path)
    return speech.an4() if name == "an4" else speech.digits()
