"""Speech: frames of features, and the spoken phones or letters.

an4      Carnegie Mellon's Census database of 1991: people spell and say names, numbers and dates,
         http://www.speech.cs.cmu.edu/databases/an4, free for any purpose; here as 13 mel cepstra, 100 frames a second:
         948 utterances of 74 people and 130 of ten others, 69 to 639 frames; 33 phones, by its dictionary. Every tenth
         person of the training part is used for validation instead
digits   Free Spoken Digit Dataset, Z. Jackson et al., https://github.com/Jakobovski/free-spoken-digit-dataset,
         CC BY-SA 4.0: 3,000 recordings of six people at 8 kHz, {digit}_{speaker}_{index}.wav, as 40 log-mel energies;
         indices 0 to 4 for testing as published, 5 to 9 for validation. The download is version 1.0.9 with 2,500
         recordings, the last version whose SHA-256 is public
folder   your own sound files and transcripts, as 40 log-mel energies

Symbol 0 is CTC's blank; targets are padded with it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.data import audio, files
from subquad.data.order import tenths
from subquad.data.padding import pad

CEPSTRA = 13
FILTERS = 40
AN4 = files.File(
    "an4", home="http://www.speech.cs.cmu.edu/databases/an4, the archive of mel cepstra with the folders etc and feat"
)
FSDD = files.File(
    "fsdd/recordings",
    home="https://github.com/Jakobovski/free-spoken-digit-dataset, its folder recordings",
    also=tuple(f"free-spoken-digit-dataset{end}/recordings" for end in ("", "-master", "-1.0.10", "-1.0.9")),
    url="https://github.com/Jakobovski/free-spoken-digit-dataset/archive/v1.0.9.tar.gz",
    sha256="8bc44cde129d505cbbb6b365c09f80c663f2aa77578afc634e6141a2f87100c0",
    unpack="tar",
)
DIGITS = {  # as in the CMU Pronouncing Dictionary
    "zero": "Z IH R OW",
    "one": "W AH N",
    "two": "T UW",
    "three": "TH R IY",
    "four": "F AO R",
    "five": "F AY V",
    "six": "S IH K S",
    "seven": "S EH V AH N",
    "eight": "EY T",
    "nine": "N AY N",
}
PARTS = {"train": ("train", "training"), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}


class Utterance(NamedTuple):
    """An utterance before its sound is read."""

    name: str
    sound: Path
    symbols: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Utterances:
    """A source: {"frames": [B, T, D] float32, "lengths": [B], "targets": [B, U] int64, "target_lengths": [B]}, padded
    with zeros. T takes few values, U is constant. Frames have mean 0 and deviation 1 over the training part."""

    names: tuple[str, ...]
    frames: np.ndarray  # [sum of T, D], not yet normalised; may be memory-mapped
    starts: np.ndarray  # [N + 1]
    targets: np.ndarray  # [sum of U]
    target_starts: np.ndarray  # [N + 1]
    mean: np.ndarray  # [D]
    deviation: np.ndarray  # [D]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def longest(self) -> int:
        return int(np.diff(self.starts).max())

    @cached_property
    def fewest(self) -> np.ndarray:
        """[N]: the fewest frames that CTC accepts: one for each symbol and one between two equal symbols."""
        again = np.zeros(len(self.targets) + 1, np.int64)
        again[1:-1] = self.targets[1:] == self.targets[:-1]
        again[self.target_starts] = 0  # the first symbol of an utterance
        before = np.concatenate(([0], again.cumsum()))[self.target_starts]
        return np.diff(self.target_starts) + np.diff(before)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        frames = [self.frames[self.starts[i] : self.starts[i + 1]] for i in indices]
        targets = [self.targets[self.target_starts[i] : self.target_starts[i + 1]] for i in indices]
        longest = int(np.diff(self.target_starts).max())
        return {
            "frames": pad([torch.from_numpy((part - self.mean) / self.deviation) for part in frames], self.longest),
            "lengths": torch.tensor([len(part) for part in frames]),
            "targets": pad([torch.from_numpy(target) for target in targets], longest, lengths=1),
            "target_lengths": torch.tensor([len(target) for target in targets]),
        }


class Speech(NamedTuple):
    name: str  # as results should call it
    train: Utterances
    validation: Utterances
    test: Utterances
    symbols: tuple[str, ...]  # symbols[0] is the blank


def an4() -> Speech:
    root = files.get(AN4)
    phones = ("", *(p for p in files.read_text(root / "etc/an4.phone").split() if p != "SIL"))
    words = an4_dictionary()
    training = _an4_part(root, "train", words)
    people = sorted({_speaker(utterance) for utterance in training})[9::10]
    parts = {
        "train": [utterance for utterance in training if _speaker(utterance) not in people],
        "validation": [utterance for utterance in training if _speaker(utterance) in people],
        "test": _an4_part(root, "test", words),
    }
    return _speech("AN4", parts, phones, lambda utterance: read_cepstra(utterance.sound), "cepstra")


def digits() -> Speech:
    folder, parts = files.get(FSDD), {part: list[Utterance]() for part in PARTS}
    words = tuple(DIGITS)
    for path in sorted(folder.glob("*.wav")):
        match = re.fullmatch(r"(\d)_(\w+)_(\d+)", path.stem)
        if match is None:
            raise files.Broken(f"{path} is not a spoken digit: recordings have names like 7_jackson_32.wav")
        part = "test" if int(match[3]) < 5 else "validation" if int(match[3]) < 10 else "train"
        parts[part].append(Utterance(path.stem, path, tuple(DIGITS[words[int(match[1])]].split())))
    if not all(parts.values()):
        raise files.Broken(f"{folder} does not hold the recordings of the Free Spoken Digit Dataset")
    phones = ("", *sorted({phone for word in DIGITS.values() for phone in word.split()}))
    count = sum(map(len, parts.values()))
    return _of_sounds(f"Free Spoken Digit Dataset, {count:,} recordings", parts, phones)


def folder(path: str | Path) -> Speech:
    """Sound files of one sample rate and their transcripts, in the folders train, validation and test under `path`, or
    all in one folder. In that case every tenth utterance is for validation and every tenth for testing.

    A transcript is a .txt file beside the sound file, or a line "name words" (in text, transcripts.txt, *.trans.txt)
    or "words (name)" (in *.transcription). If `path` holds a dictionary (lexicon.txt, *.dic, *.dict; lines
    "WORD PHONE PHONE"), targets are phones, else letters. If there is a Kaldi wav.scp, it lists the sound files.
    """
    root = Path(path).expanduser()
    root = root if root.is_dir() else files.folder() / root
    if not root.is_dir():
        accepted = "a folder of sound files such as WAV"
        raise files.Missing(f"{path} is not a folder here or in {files.folder()}: accepted is {accepted}")
    dictionaries = [p for name in ("lexicon.txt", "*.dic", "*.dict") for p in sorted(root.glob(name))]
    words = read_dictionary(dictionaries[0]) if dictionaries else None
    parts = {part: next((root / n for n in names if (root / n).is_dir()), None) for part, names in PARTS.items()}
    by_part = {part: _utterances(place, words) for part, place in parts.items() if place is not None}
    if len(by_part) < 3:
        if by_part:
            raise files.Broken(f"{root} holds only {', '.join(by_part)}: accepted are folders train, validation, test")
        everything = _utterances(root, words)
        if len(everything) < 10:
            raise files.Broken(f"{root} holds {len(everything)} utterances: accepted are ten or more, to be split")
        by_part = {part: list(utterances) for part, utterances in zip(PARTS, tenths(everything), strict=True)}
    symbols = ("", *sorted({symbol for part in by_part.values() for utterance in part for symbol in utterance.symbols}))
    return _of_sounds(root.name, by_part, symbols)


def an4_dictionary() -> dict[str, tuple[str, ...]]:
    """AN4's words and their phones."""
    words = read_dictionary(files.get(AN4) / "etc/an4.dic")
    words["A"] = words.get("A(2)", words["A"])  # the letter; the file has the article first
    return words


def read_dictionary(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines of a word and its phones; other pronunciations of WORD are named WORD(2), WORD(3), .."""
    words: dict[str, tuple[str, ...]] = {}
    for line in map(str.split, files.read_text(path).splitlines()):
        if line and not line[0].startswith(";;;"):
            words.setdefault(line[0], tuple(line[1:]))
    return words


def read_cepstra(path: Path, width: int = CEPSTRA) -> np.ndarray:
    """[T, width] float32 of a Sphinx .mfc file: the number of values as int32, then the values, in any byte order."""
    data = files.read(path)
    for order in "><":
        whole = len(data) > 4 and (len(data) - 4) % (4 * width) == 0
        if whole and 4 * int(np.frombuffer(data, f"{order}i4", 1)[0]) == len(data) - 4:
            return np.frombuffer(data, f"{order}f4", offset=4).reshape(-1, width).astype(np.float32)
    raise files.Broken(f"{path} is not a whole file of {width} mel cepstra a frame: it holds {len(data):,} bytes")


def _an4_part(root: Path, part: str, words: Mapping[str, Sequence[str]]) -> list[Utterance]:
    lists, path = (root / f"etc/an4_{part}.{kind}" for kind in ("fileids", "transcription"))
    spoken = _transcripts(path)
    utterances = []
    for sound in files.read_text(lists).split():
        name = sound.rpartition("/")[2]
        if name not in spoken:
            raise files.Broken(f"{path} has no line for {name}")
        features = files.inside(root / "feat", f"{sound}.mfc", lists)
        utterances.append(Utterance(sound, features, _phones(spoken[name], words, path)))
    return utterances


def _speaker(utterance: Utterance) -> str:
    return utterance.sound.parent.name


def _utterances(place: Path, words: Mapping[str, Sequence[str]] | None) -> list[Utterance]:
    """The utterances of a folder, by name; two sound files of the same name need a transcript each."""
    lists = [p for name in ("text", "transcripts.txt", "*.trans.txt", "*.transcription") for p in place.rglob(name)]
    spoken: dict[str, dict[Path, str]] = {}
    for path in lists:
        for name, line in _transcripts(path).items():
            spoken.setdefault(name, {})[path] = line
    scp = place / "wav.scp"
    sounds = _wav_scp(scp) if scp.exists() else [(path.stem, path) for path in audio.sound_files(place)]
    often = Counter(name for name, _ in sounds)
    utterances, used = [], dict[tuple[str, Path], Path]()
    for name, sound in sorted(sounds):
        own = next((p for end in (".txt", ".TXT") if (p := sound.with_suffix(end)).exists()), None)
        if own is not None and (name not in spoken or often[name] > 1):
            line, path = files.read_text(own), own
        elif name in spoken:
            path = _nearest(sound, spoken[name])
            line, other = spoken[name][path], used.setdefault((name, path), sound)
            if other != sound:
                both = f"both {other} and {sound}"
                raise files.Broken(f"{path} has one line for {name}, which names {both}: accepted is one line each")
        else:
            text = sound.with_suffix(".txt").name
            raise files.Broken(f"{sound} has no transcript: neither {text} nor a line for {name} in {place}")
        letters = tuple(" ".join(line.split()).lower())
        utterances.append(Utterance(name, sound, letters if words is None else _phones(line, words, path)))
    if not utterances:
        raise files.Broken(f"{place} holds no sound files such as WAV")
    return utterances


def _nearest(sound: Path, lists: Iterable[Path]) -> Path:
    """The list in the sound's folder or the nearest folder above: each speaker's folder may have its own 1.wav."""
    return max(lists, key=lambda path: len(path.parts) if sound.is_relative_to(path.parent) else 0)


def _transcripts(path: Path) -> dict[str, str]:
    """Read lines "name words", or "words (name)" in a .transcription file of Sphinx."""
    lines = [line.strip() for line in files.read_text(path).splitlines() if line.strip()]
    if path.suffix != ".transcription":
        return {name: " ".join(words) for name, *words in map(str.split, lines)}
    transcripts = {}
    for line in lines:
        match = re.fullmatch(r"(.*)\((\S+)\)", line)
        if match is None:
            raise files.Broken(f"{path} holds a line that does not end in (name): {line}")
        transcripts[match[2]] = match[1]
    return transcripts


def _wav_scp(path: Path) -> list[tuple[str, Path]]:
    sounds = []
    for line in files.read_text(path).splitlines():
        name, *sound = line.split(maxsplit=1) or [""]
        if not name:
            continue
        if not sound:
            raise files.Broken(f"{path} has no path for {name}: accepted are lines of a name and a path")
        if sound[0].rstrip().endswith("|"):
            raise files.Broken(f"{path} gives a command for the sound of {name}: accepted are paths of WAV files")
        sounds.append((name, path.parent / sound[0].rstrip()))
    return sounds


def _phones(line: str, words: Mapping[str, Sequence[str]], path: Path) -> tuple[str, ...]:
    phones: list[str] = []
    for word in line.split():
        if word not in ("<s>", "</s>", "<sil>"):
            known = next((form for form in (word, word.upper(), word.lower()) if form in words), None)
            if known is None:
                raise files.Broken(f"{path} holds the word {word!r}, which is not in the dictionary")
            phones.extend(words[known])
    return tuple(phones)


def _of_sounds(name: str, parts: Mapping[str, Sequence[Utterance]], symbols: tuple[str, ...]) -> Speech:
    """Log-mel energies of sound files. All need the same sample rate, because the frequency bands depend on it."""
    first = parts["train"][0].sound
    rate = audio.read_sound(first)[1]
    if rate < audio.SLOWEST:
        raise files.Broken(f"{first} has a sample rate of {rate} Hz: accepted is {audio.SLOWEST} Hz or more")

    def log_mel(utterance: Utterance) -> np.ndarray:
        samples, own_rate = audio.read_sound(utterance.sound)
        if own_rate != rate:
            differ = f"{utterance.sound} has a sample rate of {own_rate:,} Hz, but {first} has {rate:,} Hz"
            raise files.Broken(f"{differ}: accepted is the same rate for all")
        return audio.log_mel(samples, rate, FILTERS).numpy()

    return _speech(name, parts, symbols, log_mel, f"{rate}.frames")


def _speech(
    name: str,
    parts: Mapping[str, Sequence[Utterance]],
    symbols: tuple[str, ...],
    features: Callable[[Utterance], np.ndarray],
    kind: str,
) -> Speech:
    """`kind` is part of the name of the folder in which features are cached."""
    number = {symbol: n for n, symbol in enumerate(symbols)}
    sounds = {}
    for part, utterances in parts.items():
        paths = [utterance.sound for utterance in utterances]
        place = files.prepared(f"{name}.{part}.{kind}", partial(_write_frames, utterances, features), *paths)
        starts = np.load(place / "starts.npy")
        sounds[part] = (np.memmap(place / "frames.f32", np.float32, mode="r").reshape(starts[-1], -1), starts)
    moments = _moments(sounds["train"][0])
    made = {}
    for part, utterances in parts.items():
        targets = np.array([number[symbol] for utterance in utterances for symbol in utterance.symbols], np.int64)
        target_starts = np.cumsum([0, *(len(utterance.symbols) for utterance in utterances)])
        names = tuple(utterance.name for utterance in utterances)
        made[part] = Utterances(names, *sounds[part], targets, target_starts, *moments)
    return Speech(name, made["train"], made["validation"], made["test"], symbols)


def _write_frames(utterances: Sequence[Utterance], features: Callable[[Utterance], np.ndarray], new: Path) -> None:
    new.mkdir()
    starts = [0]
    with (new / "frames.f32").open("wb") as file:
        for utterance in files.shown(utterances, "converting sounds to frames"):
            frames = features(utterance)
            starts.append(starts[-1] + len(frames))
            file.write(frames.astype(np.float32).tobytes())
    np.save(new / "starts.npy", starts)


def _moments(frames: np.ndarray, piece: int = 1 << 20) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every feature, computed in pieces that fit into memory."""
    total, squares = np.zeros(frames.shape[1]), np.zeros(frames.shape[1])
    for start in range(0, len(frames), piece):
        part = np.asarray(frames[start : start + piece], np.float64)
        total, squares = total + part.sum(0), squares + (part**2).sum(0)
    mean = total / len(frames)
    deviation = np.sqrt(np.maximum(squares / len(frames) - mean**2, 1e-10))
    return mean.astype(np.float32), deviation.astype(np.float32)
