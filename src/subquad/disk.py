"""Files: written whole or not at all, JSON whose errors name the file, and digests that detect damage."""

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
DEEPEST = 100  # most levels of nesting; files of this package have fewer than ten
logger = logging.getLogger("subquad")


def write_whole(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file whole or not at all; a private one is readable by its owner only."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600 if private else 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written, before the work starts. Errors name `option`."""
    first = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not first.is_dir():
        refuse(option, str(path), f"a folder, but {first} is a file")
    if not os.access(first, os.W_OK):
        refuse(option, str(path), f"a folder that can be written, but {first} cannot")


def check_file(option: str, path: Path, endings: tuple[str, ...]) -> None:
    """The same for a file whose name must have one of the `endings`."""
    accepted = f"a file whose name ends in {' or '.join(endings)}"
    if path.is_dir():
        refuse(option, str(path), f"{accepted}, but this is a folder")
    if path.suffix.lower() not in endings:
        refuse(option, str(path), accepted)
    check_folder(option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        refuse(option, str(path), f"{accepted} and can be written")


@contextlib.contextmanager
def lock_folder(folder: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a folder; ValueError if another process has it. `busy` says what that process does there.

    The operating system releases the lock when the process ends, even if it crashes.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use: {busy}") from None
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked (%s): make sure that no other process writes there", folder, error)
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> Any:
    """The content of a JSON file; ValueError if it is not UTF-8, not JSON or nested too deep."""
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, source: object) -> Any:
    """Parse JSON; errors name `source`."""
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
    """`read_json` for a file that must hold an object."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}: accepted is a JSON object")
    return data


@contextlib.contextmanager
def blaming(what: str, *also: type[Exception]) -> Iterator[None]:
    """Turn the errors of code that parses `what`, such as a file, into a ValueError that names it."""
    kinds: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, TypeError, *also)
    try:
        yield
    except kinds as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else "a value in it is not valid"
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start:,} is not UTF-8"
        raise ValueError(f"{what} is damaged, or not what subquad writes: {why}") from error


def write_sealed(path: Path, data: Mapping[str, Any], allow_nan: bool = False) -> None:
    """Write JSON with the digest of its content."""
    plain = json.loads(json.dumps(data, allow_nan=allow_nan))  # as it will be read: tuples are lists
    text = json.dumps({**plain, DIGEST: digest_of(plain)}, indent=1)
    write_whole(path, f"{text}\n".encode())


def read_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """What `write_sealed` wrote, and whether it had a digest: older files have none.

    ValueError if the content has changed since.
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
    """SHA-256 of the data as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to NAME.damaged, so that nothing reads it; replaces an older one of that name."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)  # a folder does not replace another
    return path.replace(aside)


def user_cache() -> Path:
    """This package's folder in the user's cache, for files that can be made again.

    On Linux that is $XDG_CACHE_HOME/subquad, by default ~/.cache/subquad.
    """
    import pooch

    return Path(pooch.os_cache("subquad")).expanduser()


def cache_folder() -> Path:
    """Where figures measured on this machine are kept: $SUBQUAD_CACHE, by default `user_cache`."""
    return Path(os.environ["SUBQUAD_CACHE"]) if "SUBQUAD_CACHE" in os.environ else user_cache()
