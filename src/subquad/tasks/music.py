"""Music as tokens: chorales as notes of four voices, sound as µ-law samples. Its models write files that you can play.

Paper     Child et al. 2019, arXiv:1904.10509, §7.4: raw audio, strided attention
chorales  the four voices of a sixteenth note, then of the next. Training pieces are transposed anew in each epoch. In
          other pieces every note is measured; pieces longer than the longest chorale are split
audio     the samples of one WAV file, or of all files of a folder one after the other
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from subquad.checks import at_least, check_count, counts, one_of, refuse
from subquad.data import audio, music
from subquad.data.midi import require_mido
from subquad.data.text import Windows
from subquad.disk import check_folder
from subquad.machine import free_bytes
from subquad.models import LanguageModel
from subquad.models.config import GRIDS
from subquad.models.footprint import largest_batch
from subquad.models.loss import cross_entropy
from subquad.models.sampling import Sampling
from subquad.tasks.text import COLUMNS, IGNORED, Text, part_of_windows, window_loss
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split, Task, WriteOptions, Written

SETS = ("chorales", "audio")
START = music.VOCAB  # start token of chorales, the last of the vocabulary; sound starts with silence instead
LONGEST = 2560  # tokens of the longest chorale


@dataclass(frozen=True)
class Music(Task):
    set: str = "chorales"
    path: str | None = None  # a folder of MIDI files, or WAV files; None: Bach's chorales, the Free Spoken Digits
    length: int | None = None  # tokens a window holds; None: 1,024 of chorales, 8,192 of audio
    rate: int = 8000  # of audio: samples a second
    transpose: int = 5  # of chorales: semitones up or down in training

    name: ClassVar[str] = "music"
    metric: ClassVar[str] = "bits/token"
    model: ClassVar[Mapping[str, Any]] = {**Text.model, "mechanism": ["strided", {"stride": 64}]}
    training: ClassVar[TrainingConfig] = dataclasses.replace(Text.training, steps=5000, batch=16)
    writes: ClassVar[str] = "music"
    write_options: ClassVar[tuple[str, ...]] = ("count", "out", "steps")

    def __post_init__(self) -> None:
        one_of(self, set=SETS)
        at_least(self, rate=100, transpose=0)
        if self.length is not None:
            at_least(self, length=8)

    @property
    def data_name(self) -> str:
        if self.set == "audio":
            return _sound(self.path, self.rate).name
        return "JSB chorales" if self.path is None else Path(self.path).name

    @property
    def window(self) -> int:
        return self.length or (1024 if self.set == "chorales" else 8192)

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        """By default chorales have a grid of positions: the sixteenth note and the voice."""
        given: dict[str, Any]
        if self.set == "chorales":
            given, columns = {"vocab": START + 1, "positions": "grid", "max_length": LONGEST}, music.VOICES
        else:
            given, columns = {"vocab": audio.LEVELS, "max_length": self.window}, COLUMNS
        shape = (-(-given["max_length"] // columns), columns)
        given |= fields
        if given.get("positions") in GRIDS:
            given.setdefault("shape", shape)
        return LanguageModel(**given)

    def source(self, split: Split) -> Source:
        training = split == "train"
        if self.set == "audio":
            return Windows(getattr(_sound(self.path, self.rate), split), self.window, shifted=training)
        pieces = getattr(_grids(self.path), split)
        if training:
            return music.Pieces(pieces, self.window, self.transpose)
        return music.Pieces(music.in_parts(pieces, LONGEST), LONGEST)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if self.set == "audio":  # a window may start anywhere, so its first sample is given, not predicted
            return window_loss(model, batch)
        tokens = batch["tokens"].long()
        inputs = nn.functional.pad(tokens[:, :-1], (1, 0), value=START)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        targets = tokens.masked_fill(at >= batch["lengths"][:, None], IGNORED)
        total = cross_entropy(model(inputs), targets, ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum())

    def part(self, batch: Batch, rank: int, world: int) -> Batch:
        return part_of_windows(batch, rank, world) if self.set == "audio" else super().part(batch, rank, world)

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        bits = super().summary(sums)
        nats = {"nats/sixteenth": 4 * bits[self.metric] * math.log(2)}
        return bits | nats if self.set == "chorales" else bits

    @classmethod
    def write(cls, model: Any, data: Mapping[str, Any], options: WriteOptions, console: Console) -> Written:
        """Write a file for each piece: MIDI from a model of chorales, WAV from a model of sound."""
        rate = data.get("rate", cls.rate)
        if not counts([rate]):
            raise ValueError(f"the card of this model has rate={rate!r}: accepted is an integer of at least 1")
        written = write_pieces(model, options, rate)
        for path in written:
            console.print(escape(f"piece: {path}"), soft_wrap=True)
        return Written(written)


_sound = lru_cache(maxsize=1)(music.sound)


@lru_cache(maxsize=1)
def _grids(path: str | None) -> music.Grids:
    return music.chorales() if path is None else music.midi_files(Path(path))


def write_pieces(model: LanguageModel, options: WriteOptions, rate: int = Music.rate) -> list[Path]:
    """Write options.count pieces (default 4) to out_1.mid, out_2.mid, .. or .wav. By default a piece has 32 quarter
    notes of a chorale, or a window of sound."""
    out, count = options.out or Path("generated"), 4 if options.count is None else options.count
    steps, sampling = options.steps, options.sampling
    check_folder("out", out.parent)
    vocab = model.config.embedding.vocab
    if vocab not in (START + 1, audio.LEVELS):
        accepted = f"{START + 1} (notes), {audio.LEVELS} (sound)"
        raise ValueError(f"vocab={vocab} is not a model of music: accepted are {accepted}")
    notes = vocab == START + 1
    check_count("count", count)
    check_count("steps", 1 if steps is None else steps)
    ending = ".mid" if notes else ".wav"
    if not out.name or out.suffix.lower() not in ("", ending):
        refuse("out", str(out), f"the beginning of names, such as pieces, with or without {ending}")
    longest = model.config.transformer.max_length or 8192
    if steps is not None and steps > longest:
        refuse("steps", steps, f"at most {longest:,}, the longest that this model can write")
    steps = min(512 if notes else longest, longest) if steps is None else steps
    if 16 * count * steps > free_bytes("cpu"):
        refuse("count", count, f"at most {free_bytes('cpu') // (16 * steps):,}: more do not fit into memory")
    batch = max(1, largest_batch(model, steps))
    if notes:
        require_mido()  # fail before generating, not after
        sampling = Sampling(**{**vars(sampling), "exclude": (START,)})
    parts = []
    for begin in range(0, count, batch):
        prompt = torch.full((min(batch, count - begin), 1), START if notes else audio.LEVELS // 2)
        parts.append(model.generate(prompt, steps, sampling=sampling, seed=options.seed + begin).cpu())
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(f"{out.stem}_{n}{ending}") for n in range(1, count + 1)]
    for piece, path in zip(torch.cat(parts), paths, strict=True):
        if notes:
            music.save_midi(piece, path)
        else:
            audio.write_wav(path, audio.from_mu_law(piece.numpy()), rate)
    return paths
