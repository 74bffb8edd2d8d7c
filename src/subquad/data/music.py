"""Music: Bach's chorales on a grid of sixteenth notes, and raw sound as µ-law tokens.

Chorales  C.-Z. A. Huang, https://github.com/czhuang/JSB-Chorales-dataset, Jsb16thSeparated.npz; licence none stated;
          229 + 76 + 77 chorales in the split of Boulanger-Lewandowski 2012, four voices (soprano, alto, tenor, bass),
          a pitch or silence for each sixteenth note; held and repeated notes look the same
Tokens    the four voices of a sixteenth, then of the next: 0 for silence, pitch - 35 for pitches 36 to 81
Sound     any sound file or folder of them, at a rate of your choice: 256 tokens of µ-law, split by files, or
          90 / 5 / 5 % of a single one
MIDI      any folder of files, converted to the same grid
"""

import io
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.data import audio, files, speech
from subquad.data.midi import Note, read_midi, write_midi
from subquad.data.order import tenths
from subquad.data.text import Corpus, any_file, made_corpus

VOICES = 4
LOWEST, HIGHEST = 36, 81  # pitches of the chorales
SILENCE = 0
VOCAB = HIGHEST - LOWEST + 2
STEP = 0.25  # quarter notes, for a row of the grid
CHORALES = files.File(
    "jsb16.npz",
    also=("Jsb16thSeparated.npz",),
    url="https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/"
    "Jsb16thSeparated.npz",
    sha256="2adcdf0d57880c3763f104555072285fe7f9e3d6049fcc4b9830557b8d4a7820",
)


class Grids(NamedTuple):
    train: list[np.ndarray]  # for each piece a grid [T, 4] int64 of pitches, 0 for silence
    validation: list[np.ndarray]
    test: list[np.ndarray]


def chorales() -> Grids:
    path = files.get(CHORALES)
    return Grids(*(_read_grids(path, part) for part in ("train", "valid", "test")))


def to_tokens(grid: np.ndarray) -> np.ndarray:
    """[T, 4] pitches -> [4 T] uint8"""
    if grid.size and not np.all((grid == 0) | ((grid >= LOWEST) & (grid <= HIGHEST))):
        given, accepted = f"pitches {grid.min()} to {grid.max()}", f"0 and {LOWEST} to {HIGHEST}"
        raise ValueError(f"{given} cannot be written: accepted are {accepted}")
    return np.where(grid == 0, SILENCE, grid - LOWEST + 1).astype(np.uint8).reshape(-1)


def to_grid(tokens: np.ndarray | Tensor) -> np.ndarray:
    """[4 T] tokens -> [T, 4] pitches; an incomplete sixteenth at the end is dropped."""
    tokens = np.asarray(tokens, dtype=np.int64)
    rows = tokens[: len(tokens) // VOICES * VOICES].reshape(-1, VOICES)
    return np.where(rows == SILENCE, 0, rows + LOWEST - 1)


def to_notes(grid: np.ndarray) -> list[Note]:
    """The notes of a grid: equal pitches in a row are one note. Each voice has its own channel."""
    notes = []
    for voice in range(grid.shape[1]):
        pitches = grid[:, voice]
        edges = np.flatnonzero(np.diff(pitches, prepend=-1, append=-1))
        for start, end in pairwise(edges.tolist()):
            if pitches[start]:
                notes.append(Note(start * STEP, end * STEP, int(pitches[start]), channel=voice))
    return notes


def from_notes(notes: Sequence[Note], voices: int = VOICES) -> np.ndarray:
    """The grid [T, voices] of a MIDI file. With 2 to `voices` channels, each channel is a voice, in order; else
    the voices are the highest notes that sound at each sixteenth. Notes out of range are moved by octaves."""
    starts = [round(note.start / STEP) for note in notes]
    ends = [max(round(note.end / STEP), start + 1) for note, start in zip(notes, starts, strict=True)]
    rows = max(ends, default=0)
    channels = sorted({note.channel for note in notes})
    grid = np.zeros((rows, voices), np.int64)
    sounding: list[set[int]] = [set() for _ in range(rows)]
    for note, start, end in zip(notes, starts, ends, strict=True):  # sorted: lower notes come first
        pitch = note.pitch + 12 * (max(0, -(-(LOWEST - note.pitch) // 12)) - max(0, -(-(note.pitch - HIGHEST) // 12)))
        if 1 < len(channels) <= voices:
            grid[start:end, channels.index(note.channel)] = pitch
        else:
            for held in sounding[start:end]:
                held.add(pitch)
    for row, pitches in enumerate(sounding):
        if pitches:
            highest = sorted(pitches, reverse=True)[:voices]
            grid[row, : len(highest)] = highest
    return grid


def midi_files(folder: Path) -> Grids:
    """All .mid and .midi files of a folder: every tenth for validation and every tenth for testing."""
    paths = sorted(path for path in Path(folder).expanduser().rglob("*") if path.suffix.lower() in (".mid", ".midi"))
    if len(paths) < 10:
        raise files.Missing(f"{folder} holds {len(paths)} MIDI files: accepted are ten or more, which can be split")
    grids = [from_notes(read_midi(path)) for path in files.shown(paths, "converting MIDI files")]
    silent = [path for path, grid in zip(paths, grids, strict=True) if not len(grid)]
    if silent:
        raise files.Broken(f"{silent[0]} holds no notes, like {len(silent)} of {len(paths)} files: remove them")
    return Grids(*map(list, tenths(grids)))


def save_midi(tokens: np.ndarray | Tensor, path: Path, tempo: float = 80.0) -> None:
    """Write the tokens of a piece as a MIDI file, sung by four choirs."""
    write_midi(path, to_notes(to_grid(tokens)), tempo, programs=(52,) * VOICES)


def in_parts(pieces: Sequence[np.ndarray], length: int) -> list[np.ndarray]:
    """The pieces in order; pieces of more than `length` tokens are cut into several."""
    rows = length // VOICES
    return [piece[start : start + rows] for piece in pieces for start in range(0, len(piece), rows)]


@dataclass(frozen=True, eq=False)
class Pieces:
    """A source of pieces or parts of `length` tokens: {"tokens": [B, T] uint8, "lengths": [B]}, padded with silence.

    In training a part begins at another sixteenth in each epoch and is transposed by up to `transpose` semitones within
    the range of pitches; both are random numbers that depend only on the index and the epoch.
    """

    pieces: Sequence[np.ndarray]
    length: int | None = None
    transpose: int = 0

    def __len__(self) -> int:
        return len(self.pieces)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        parts = [self._part(int(i), epoch) for i in indices]
        lengths = torch.tensor([len(part) for part in parts])
        tokens = torch.zeros(len(parts), self.length or int(lengths.max()), dtype=torch.uint8)
        for row, part in zip(tokens, parts, strict=True):
            row[: len(part)] = torch.from_numpy(part)
        return {"tokens": tokens, "lengths": lengths}

    def _part(self, index: int, epoch: int) -> np.ndarray:
        grid = self.pieces[index]
        draw = np.random.default_rng([0, epoch, index])
        if self.length is not None and len(grid) * VOICES > self.length:
            rows = -(-self.length // VOICES)
            start = int(draw.integers(len(grid) - rows + 1))
            grid = grid[start : start + rows]
        if self.transpose and grid.any():
            sung = grid[grid > 0]
            low, high = max(-self.transpose, LOWEST - sung.min()), min(self.transpose, HIGHEST - sung.max())
            grid = np.where(grid > 0, grid + draw.integers(low, high + 1), 0)
        return to_tokens(grid)[: self.length]


def sound(path: str | Path | None = None, rate: int = 8000) -> Corpus:
    """µ-law tokens of a sound file or of all files of a folder; a relative path may be relative to the data folder.
    None: the Free Spoken Digit Dataset, which `speech.digits` also uses.

    A folder needs ten files or more: every tenth is for validation, every tenth for testing."""
    path = files.get(speech.FSDD) if path is None else Path(path).expanduser()
    path = path if path.exists() else files.folder() / path
    if not path.exists():
        accepted = f"a WAV or other sound file, or a folder of them, here or in {files.folder()}"
        raise files.Missing(f"{path} does not exist: accepted is {accepted}")
    name = f"{path.parent.name}/{path.name} at {rate:,} Hz"
    if path.is_file():
        tokens = files.prepared(f"{path.stem}.{rate}.mulaw", partial(_encode, rate, [path]), path)
        try:
            return any_file(tokens, name)
        except files.Broken as error:  # it names the cached tokens, but the user has to change the sound file
            count = tokens.stat().st_size
            raise files.Broken(f"{path} has {count} samples at {rate:,} Hz, too few to split") from error
    sounds = audio.sound_files(path)
    if len(sounds) < 10:
        accepted = "one file, or ten or more, which can be split"
        raise files.Broken(f"{path} holds {len(sounds)} sound files such as WAV: accepted are {accepted}")
    parts = dict(zip(("train", "validation", "test"), tenths(sounds), strict=True))
    return made_corpus(name, f"{path.name}.{rate}.{{}}.mulaw", parts, partial(_encode, rate))


def _encode(rate: int, sources: Sequence[Path], new: Path) -> None:
    with new.open("wb") as file:
        for source in files.shown(sources, "converting sounds to tokens"):
            file.write(audio.mu_law(audio.resample(*audio.read_sound(source), rate)).tobytes())


class _Arrays(pickle.Unpickler):
    """The file holds arrays of arrays, which NumPy stores as pickles: only what builds arrays may be loaded."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of chorales")


def _read_grids(path: Path, part: str) -> list[np.ndarray]:
    try:
        with zipfile.ZipFile(path) as packed:
            entry = packed.getinfo(f"{part}.npy")
            if entry.file_size > files.IN_MEMORY:
                raise ValueError(f"{entry.filename} unpacks to {entry.file_size:,} bytes")
            data = io.BytesIO(packed.read(entry))
        np.lib.format.read_magic(data)
        np.lib.format.read_array_header_1_0(data)
        pieces = list(_Arrays(data, encoding="latin1").load())
        return [np.nan_to_num(np.asarray(piece, np.float64)).astype(np.int64).reshape(-1, VOICES) for piece in pieces]
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise files.Broken(f"{path} is not a whole file of chorales: {error}") from error
