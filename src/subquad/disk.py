"""Files: written whole or not at all, JSON whose errors name the file, and digests that show damage."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from subquad.checks import refuse

DIGEST = "sha256"  # the key under which a JSON file keeps the digest of everything else in it
DEEPEST = 100  # levels of nesting; files of this package have fewer than ten
logger = logging.getLogger("subquad")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written, before the work rather than after it; `option` is what errors name."""
    first = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not first.is_dir():
        refuse(option, str(path), f"a folder, and {first} is a file")
    if not os.access(first, os.W_OK):
        refuse(option, str(path), f"a folder that can be written, and {first} cannot")


def check_file(option: str, path: Path, endings: tuple[str, ...]) -> None:
    """The same for a file; `endings` are the ones we can write."""
    accepted = f"a file whose name ends in {' or '.join(endings)}"
    if path.is_dir():
        refuse(option, str(path), f"{accepted}, and this is a folder")
    if path.suffix.lower() not in endings:
        refuse(option, str(path), accepted)
    check_folder(option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        refuse(option, str(path), f"{accepted} and can be written")


@contextlib.contextmanager
def lock_folder(folder: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a folder; ValueError if another process has it. `busy` tells what that process does there.

    The system releases the lock when its process ends, however it ends.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use: {busy}") from None
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked (%s): let no other process write there", folder, error)
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError names a file that is not UTF-8, not JSON or nested too deep."""
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, source: object) -> Any:
    """JSON from anywhere; `source` is what an error names."""
    try:
        data = json.loads(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ValueError(f"{source} holds {wrong:#04x} at byte {error.start:,}: accepted is JSON in UTF-8") from error
    except RecursionError:
        raise ValueError(f"{source} is nested too deep: accepted are {DEEPEST} levels") from None
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        raise ValueError(f"{source} is not JSON: {error}") from error
    level, depth = [data], 0
    while level:
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
        if depth > DEEPEST + 1:
            raise ValueError(f"{source} is nested too deep: accepted are {DEEPEST} levels")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The same, of a file that must hold an object with keys."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}: accepted is a JSON object")
    return data


@contextlib.contextmanager
def blaming(what: str, *also: type[Exception]) -> Iterator[None]:
    """Turn errors of code that takes a file's content apart into a sentence that names where it came from."""
    kinds: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, TypeError, *also)
    try:
        yield
    except kinds as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else "a value in it is of another kind"
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start:,} is not UTF-8"
        raise ValueError(f"{what} is damaged, or not what subquad writes: {why}") from error


def write_sealed(path: Path, data: Mapping[str, Any], allow_nan: bool = False) -> None:
    """Write JSON with the digest of its content."""
    plain = json.loads(json.dumps(data, allow_nan=allow_nan))  # as it will be read: tuples are lists
    text = json.dumps({**plain, DIGEST: digest_of(plain)}, indent=1)
    write_whole(path, f"{text}\n".encode())


def read_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """What `write_sealed` wrote, and whether there was a digest to check: files from before digests have none.

    ValueError if the content is not what was written.
    """
    data = read_object(path)
    written = data.pop(DIGEST, None)
    if written is None:
        key, last = next(reversed(data.items()), ("", None))
        if last == digest_of({name: value for name, value in data.items() if name != key}):
            raise ValueError(f'{path} is damaged: its digest is named {key!r} instead of "{DIGEST}"')
        return data, False
    if written != digest_of(data):
        raise ValueError(
            f"{path} is damaged: it is not what was written (SHA-256); "
            f'if it was edited on purpose, delete its "{DIGEST}" line'
        )
    return data, True


def digest_of(data: Any) -> str:
    """SHA-256 of what JSON says, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def set_aside(path: Path) -> Path:
    """Move a damaged file or folder to a name that no reader takes for it, in place of what has that name already."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)  # a folder does not replace another
    return path.replace(aside)


def user_cache() -> Path:
    """The folder that the operating system gives this package for files that can be made again.

    On Linux that is $XDG_CACHE_HOME/subquad, by default ~/.cache/subquad.
    """
    import pooch

    return Path(pooch.os_cache("subquad")).expanduser()


def cache_folder() -> Path:
    """Where this machine's figures are kept: $SUBQUAD_CACHE, by default the user's cache."""
    return Path(os.environ["SUBQUAD_CACHE"]) if "SUBQUAD_CACHE" in os.environ else user_cache()
