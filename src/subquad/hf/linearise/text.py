"""Text for a student: files, read, tokenised by the teacher's tokenizer, and split."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.checks import refuse
from subquad.data.text import read_tei

ENDINGS = (".txt", ".md", ".xml")  # .xml: TEI, such as the novels of ELTeC
MANY = 10  # files, from which on whole files are held out
PIECE = 50_000  # characters that are tokenised at once


class Tokens(NamedTuple):
    train: Tensor  # [n] int32
    choose: Tensor  # held out, for choosing layers
    test: Tensor  # held out, for the report


def text_files(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files, and those of folders, in order; refuses what is missing."""
    found: list[Path] = []
    for path in map(Path, [given] if isinstance(given, str | Path) else given):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
            if not inside:
                refuse("text", str(path), f"a folder with files that end in {', '.join(ENDINGS)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            refuse("text", str(path), "a file or folder that exists")
    if not found:
        refuse("text", given, "one file or folder at least")
    return found


def digest(files: Sequence[Path]) -> str:
    """SHA-256 of the content of all files."""
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def tokenise(files: Sequence[Path], tokenizer: Any, share: float, least: int) -> Tokens:
    """The tokens of all files, of which `share` is held out; each part must have `least` tokens.

    Of ten files or more every few are held out whole, of fewer the end of each. Half of what is held out is for
    choosing layers.
    """
    end = tokenizer.eos_token_id
    train: list[Tensor] = []
    held: list[Tensor] = []
    every = max(2, round(1 / share))
    for n, file in enumerate(files):
        tokens = torch.tensor([*_ids(read_file(file), tokenizer), *([] if end is None else [end])], dtype=torch.int32)
        if len(files) >= MANY:
            (held if n % min(every, len(files)) == 1 else train).append(tokens)
        else:
            cut = len(tokens) - round(share * len(tokens))
            train.append(tokens[:cut])
            held.append(tokens[cut:])
    whole, rest = torch.cat(train), torch.cat(held)
    half = len(rest) // 2
    parts = Tokens(whole, rest[:half], rest[half:])
    for name, part in zip(("train on", "choose layers by", "test on"), parts, strict=True):
        if len(part) < least:
            raise ValueError(
                f"text is too short: {len(files)} files have {len(whole) + len(rest):,} tokens, of which {len(part):,} "
                f"are left to {name}; accepted are {least:,} or more: give more text, a larger held_out or a shorter "
                "align_length and distil_length"
            )
    return parts


def rows(tokens: Tensor, length: int, most: int) -> Tensor:
    """The first rows [n, length] of tokens, at most `most`."""
    count = min(most, len(tokens) // length)
    return tokens[: count * length].view(count, length).long()


def batch(tokens: Tensor, size: int, length: int, seed: int, step: int) -> Tensor:
    """Rows [size, length] at random places, which depend on the seed and the step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - length + 1, (size,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)].long()


def read_file(file: Path) -> str:
    """The text of a file; of TEI without notes."""
    if file.suffix.lower() == ".xml":
        return read_tei(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text: byte {error.start:,} is not UTF-8") from error


def _ids(text: str, tokenizer: Any) -> list[int]:
    pieces = list(_pieces(text))
    if not pieces:
        return []
    found = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for piece in found for token in piece]


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end with a line where there is one."""
    start = 0
    while start < len(text):
        stop = len(text) if len(text) - start <= PIECE else text.rfind("\n", start, start + PIECE) + 1
        stop = stop if stop > start else start + PIECE
        yield text[start:stop]
        start = stop
