"""The files of a prefix cache: one safetensors file per state, which only the cache's owner can read.

    FOLDER/key                              32 random bytes; names of owners are hashed with them
    FOLDER/MODEL/OWNER/NAME.safetensors     MODEL: a hash of its fingerprint and of where borders lie; OWNER: a keyed
                                            hash of whose state it is; NAME: a hash of the tokens before it

A file says which model its state is of and which tokens came before it, under the digest that `load_state` checks. One
that is damaged or half written is removed with a line in the log: a cache can be filled again. States of other models
stay, but the least recently used file of all leaves first.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import refuse
from subquad.disk import check_folder, lock_folder, logger, write_whole
from subquad.models.state import State, load_state, map_state, save_state, size
from subquad.serve.borders import is_border

KEY, ENDING = "key", ".safetensors"
HASH = re.compile(r"[0-9a-f]{32}")
HEADER = 1 << 14  # bytes that a file may have besides its tensors, about; its own size counts once it is written


class Stored(NamedTuple):
    """What a file holds: a state is a nest of tuples of tensors, and so is this."""

    origin: Tensor  # [1, 32], hash of the model, the length of a piece and the owner
    tokens: Tensor  # [1, n] int32, all tokens before the state
    base: Tensor  # [1], how many of them are those of the state that this one continues; 0 if it is whole
    state: State


class Found(NamedTuple):
    """A file that was there when the cache began."""

    path: Path
    tokens: bytes  # none of a state of another model
    base: int
    size: int


class CacheFolder:
    """The folder of one cache, which no other process uses meanwhile."""

    def __init__(self, path: Path, fingerprint: str, every: int, early: tuple[int, ...], like: State):
        check_folder("folder", path)
        if path.is_dir() and not (path / KEY).is_file() and any(path.iterdir()):
            refuse("folder", str(path), "a new or empty folder, or one of an earlier cache")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            path.chmod(0o700)
        except OSError as error:
            refuse("folder", str(path), f"a folder of your own, which others cannot read ({error})")
        self.path, self.about = path, json.dumps([fingerprint, every, early])
        self.like = map_state(lambda tensor: torch.empty_like(tensor, device="cpu"), like)
        self.every, self.early = every, early
        self.own = path / hashlib.sha256(self.about.encode()).hexdigest()[:32]
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(lock_folder(path, "another server keeps its states there"))
        try:
            if not (path / KEY).is_file():
                write_whole(path / KEY, secrets.token_bytes(32), private=True)
            self.key = (path / KEY).read_bytes()
            if len(self.key) != 32:
                raise ValueError(f"{path / KEY} is damaged: accepted are 32 bytes; delete {path} to begin anew")
        except BaseException:
            self.lock.close()
            raise

    def close(self) -> None:
        """Let another process use the folder."""
        self.lock.close()

    def scan(self) -> Iterator[tuple[str, Found]]:
        """(owner, file) of every state in the folder, the least recently used first; all other files are removed."""
        found = []
        folders = [folder for model in _folders(self.path) for folder in _folders(model)]
        for folder in folders:
            for path in sorted(folder.iterdir()):
                if path.name.startswith("."):
                    logger.warning("%s is removed: it is half written", path)
                    self.remove(path)
                    continue
                try:
                    file = (
                        self._describe(path) if folder.parent == self.own else Found(path, b"", 0, path.stat().st_size)
                    )
                    found.append((path.stat().st_mtime_ns, folder.name, file))
                except Exception as error:  # whatever is wrong with the file, the server works without it
                    logger.warning("%s is removed: %s", path, error)
                    self.remove(path)
        for folder in (*folders, *_folders(self.path)):
            with contextlib.suppress(OSError):  # it holds files
                folder.rmdir()
        for _, owner, file in sorted(found, key=lambda entry: entry[0]):
            yield owner, file

    def hash_owner(self, owner: str) -> str:
        """The name of an owner's folder, which does not tell the owner."""
        return hash_owner(owner, self.key)

    def path_of(self, owner: str, tokens: bytes) -> Path:
        """Where the state after these tokens is kept; `owner` is a hash."""
        return self.own / owner / (hashlib.sha256(self._origin(owner) + tokens).hexdigest() + ENDING)

    def bytes_of(self, state: State, tokens: bytes) -> int:
        """About the size of the file."""
        return size(state) + len(tokens) + HEADER

    def write(self, path: Path, tokens: bytes, base: int, state: State) -> int:
        """Write a state; its size. OSError if the disk is full."""
        self.own.mkdir(mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        origin = torch.frombuffer(bytearray(self._origin(path.parent.name)), dtype=torch.uint8)[None]
        read = torch.frombuffer(bytearray(tokens), dtype=torch.int32)[None]
        save_state(Stored(origin, read, torch.tensor([base]), state), path, private=True)
        return path.stat().st_size

    def read(self, path: Path, tokens: bytes) -> State | None:
        """The state of a file on the CPU, as it was written; None if it is damaged, and then it is removed."""
        empty = torch.empty(1, 0, dtype=torch.int32)
        like = Stored(empty.new_empty(1, 32, dtype=torch.uint8), empty, torch.empty(1, dtype=torch.int64), self.like)
        try:
            stored = load_state(path, like)
            if stored.tokens.numpy().tobytes() != tokens:
                raise ValueError("it is the state of other tokens")
            return stored.state
        except Exception as error:  # such as a bad sector: the server works without it
            logger.warning("%s is removed: %s", path, error)
            self.remove(path)
            return None

    def touch(self, path: Path) -> None:
        """Remember that the state was used, so that the next server knows which ones to drop first."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there and the system lets us."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)

    def _origin(self, owner: str) -> bytes:
        return hashlib.sha256(f"{self.about} {owner}".encode()).digest()

    def _describe(self, path: Path) -> Found:
        """What a file says about itself, without reading its state, which is checked when it is used."""
        from safetensors import safe_open

        if path.is_symlink() or not path.is_file():
            raise ValueError("it is not a file of a cache")
        with safe_open(path, framework="pt") as file:
            parts = [file.get_tensor(name) for name in ("origin", "tokens", "base")]
        origin, read, base = (part.numpy().tobytes() for part in parts)
        if origin != self._origin(path.parent.name):
            raise ValueError("it is of another model, or of another cache")
        start, count = int.from_bytes(base, "little"), len(read) // 4
        begins = start == 0 or (start < count and is_border(start, self.every, self.early))
        if not begins or not is_border(count, self.every, self.early) or path != self.path_of(path.parent.name, read):
            raise ValueError("it is damaged: its name is not that of its tokens")
        return Found(path, read, start, path.stat().st_size)


def _folders(path: Path) -> list[Path]:
    """Those that a cache has made in a folder."""
    return [one for one in sorted(path.iterdir()) if HASH.fullmatch(one.name) and one.is_dir() and not one.is_symlink()]


def hash_owner(owner: str, key: bytes) -> str:
    return hmac.new(key, owner.encode(), "sha256").hexdigest()[:32]
