"""Data files in `$SUBQUAD_DATA`, or else in the user's cache directory; missing files are downloaded.

Only public files of known SHA-256 are downloaded. A file appears under its name only when it is complete and checked,
so a broken connection leaves nothing behind. Without a network, or without a public file, the error says which file to
put where.
"""

import gzip
import hashlib
import importlib
import io
import lzma
import math
import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, TYPE_CHECKING, Literal, TypeVar

import numpy as np
from filelock import BaseFileLock, FileLock

from subquad.disk import user_cache

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
TIMEOUT = 20  # seconds without an answer from the host
# limits of an archive; the largest real ones are ImageNet's batches of 1.6 GB and Tiny ImageNet's 120,000 files
LARGEST = 16 * 2**30  # bytes
MOST = 1_000_000  # files and folders
IN_MEMORY = 2**30  # bytes of a file that is unpacked in memory; MNIST's largest has 47 MB


class Missing(FileNotFoundError):
    """Data that is missing and cannot be downloaded; the message says which file to put where."""


class Broken(ValueError):
    """A damaged or wrong file; the message names it."""


def extra(package: str, name: str, what: str) -> ModuleType:
    """A package that only `what` needs and that subquad[name] installs."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        advice = f"pip install 'subquad[{name}]'"
        raise ImportError(f"{what} need the package {package}, which is not installed: {advice}") from error


@dataclass(frozen=True)
class File:
    """A file or folder of a data set, by its path under the data folder."""

    path: str
    home: str = ""  # where users can get it, if not at `url`
    also: tuple[str, ...] = ()  # other paths at which it is often kept
    url: str | None = None  # None: there is no public file whose SHA-256 is known
    sha256: str | None = None  # of the file at `url`
    unpack: Literal["zip", "tar"] | None = None  # set if `url` is an archive that holds `path`

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home or self.url)


def folder() -> Path:
    """The data folder; it need not exist."""
    chosen = os.environ.get("SUBQUAD_DATA")
    return Path(chosen).expanduser() if chosen else user_cache()


def find(file: File) -> Path | None:
    """The path of the file, or None if it is missing."""
    paths = (folder() / name for name in (file.path, *file.also))
    return next((path for path in paths if path.exists()), None)


def get(file: File) -> Path:
    """The path of the file, which is downloaded if it is missing."""
    path = find(file)
    if path is not None:
        return path
    if file.url is None:
        raise Missing(_advice(file, "there is no public file of known SHA-256 to download"))
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with lock(folder()):
            if find(file) is None:  # another process may have downloaded it while this one waited
                _download(file, file.url)
    except (OSError, ImportError) as error:  # errors of requests are OSErrors
        raise Missing(_advice(file, f"downloading {file.url} failed: {_brief(error)}")) from error
    path = find(file)
    if path is None:
        raise Missing(_advice(file, f"{file.url} does not hold it"))
    return path


def prepared(name: str, make: Callable[[Path], None], *sources: Path) -> Path:
    """A file or folder that `make` writes once: beside the data, or in the user's cache if the data is read-only.

    It is made again when a source, or anything in a source folder, has changed."""
    base = folder() if os.access(folder(), os.W_OK) else user_cache()
    path = base / "prepared" / f"{mark(*sources)}-{name}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.parent):
            if not path.exists():
                for left in path.parent.glob(f".{path.name}.*"):  # left by a killed process
                    _remove(left)
                with atomic(path) as new:
                    make(new)
    return path


def mark(*sources: Path) -> str:
    """A hash for naming what is made from these files or folders; it changes when one of them changes."""
    try:
        facts = "\n".join(f"{p.resolve()} {p.stat().st_size} {p.stat().st_mtime_ns}{_inside(p)}" for p in sources)
    except OSError as error:
        raise Broken(f"{error.filename} cannot be read: {error.strerror}") from error
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _inside(path: Path) -> str:
    """The number of files in a folder, and the sums of their sizes and times. A million files take seconds."""
    if not path.is_dir():
        return ""
    count = size = times = 0
    for place, folders, names in os.walk(path):
        for entry in (os.path.join(place, name) for name in (*folders, *names)):
            info = os.stat(entry, follow_symlinks=os.path.exists(entry))  # a broken link counts as itself
            count, size, times = count + 1, size + info.st_size, times + info.st_mtime_ns
    return f" {count} {size} {times}"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A path for a new file or folder: it is renamed to `path` on success and removed on failure."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    _remove(new)
    try:
        yield new
        os.replace(new, path)
    finally:
        _remove(new)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def shown(items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on a terminal."""
    from rich.progress import track

    return track(items, label, total, transient=True, disable=not sys.stdout.isatty())


def read(path: Path) -> bytes:
    """The whole file; raises Broken if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Broken(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The whole text file; raises Broken if it is not text."""
    try:
        return read(path).decode(encoding)
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise Broken(f"{path} holds {wrong:#04x} at byte {error.start:,}: accepted is text in {encoding}") from error


def lock(directory: Path) -> BaseFileLock:
    """A lock for one process and thread at a time. It is released when its process ends, even if that is killed."""
    return FileLock(directory / ".lock", thread_local=False)


def _download(file: File, url: str) -> None:
    import pooch
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    pooch.get_logger().setLevel("WARNING")  # the progress bar is enough
    place = folder() / ".download"
    shutil.rmtree(place, ignore_errors=True)  # left by a killed process
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), transient=True) as progress:
            name = url.rsplit("/", 1)[-1]
            loader = pooch.HTTPDownloader(progressbar=_Bar(progress, name), timeout=TIMEOUT)
            try:
                got = Path(pooch.retrieve(url, f"sha256:{file.sha256}", name, place, downloader=loader))
            except ValueError as error:  # pooch: the hash differs
                raise Broken(
                    f"{url} is not the file that subquad knows and was not kept: its SHA-256 is not {file.sha256}. "
                    f"Try again later, or put {file.path} into {folder()} yourself ({file.home})"
                ) from error
        if file.unpack is None:
            path = folder() / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(got, path)
        else:
            _unpack(got, place / "unpacked")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _unpack(archive: Path, place: Path) -> None:
    """Unpack an archive, then move its content into the data folder."""
    try:
        budget = _Budget(archive)
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for info in packed.infolist():
                    budget.take(info.filename, info.file_size)
                packed.extractall(place)  # reads at most the size of the entry
        else:
            with tarfile.open(archive) as tar:
                for member in tar:  # one by one, because finding the next member means unpacking this one
                    budget.take(member.name, member.size)
                    tar.extract(member, place, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise Broken(f"{archive.name} cannot be unpacked: {error}") from error
    for entry in place.iterdir():
        if not (folder() / entry.name).exists():
            os.replace(entry, folder() / entry.name)


class _Budget:
    """Limits on what an archive unpacks to: its size, the number of its files, and their paths."""

    def __init__(self, archive: Path):
        self.name, self.size, self.count = archive.name, 0, 0

    def take(self, path: str, size: int) -> None:
        self.size, self.count = self.size + size, self.count + 1
        if self.size > LARGEST:
            raise Broken(f"{self.name} unpacks to more than {LARGEST:,} bytes: accepted are archives of at most that")
        if self.count > MOST:
            raise Broken(f"{self.name} holds more than {MOST:,} files: accepted are archives of at most that many")
        if not _stays(path):
            raise Broken(f"{self.name} holds {path!r}, which lies outside: accepted are paths inside the archive")


def inside(folder: Path, name: str, source: Path) -> Path:
    """folder / name, where the name was read from the file `source`; fails if it leads out of the folder."""
    if not _stays(name):
        raise Broken(f"{source} names {name!r}, which lies outside {folder}: accepted are paths inside it")
    return folder / name


def _stays(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts and not re.match(r"[A-Za-z]:", name)


def unpacked(path: Path, kind: Literal["gzip", "xz"], most: int = IN_MEMORY) -> bytes:
    """The content of a compressed file; raises Broken if that is more than `most` bytes or the file is damaged."""
    opener = gzip.open if kind == "gzip" else lzma.open
    try:
        with opener(path, "rb") as stream:
            data = stream.read(most + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise Broken(f"{path} is not a whole {kind} file: {error}") from error
    if len(data) > most:
        raise Broken(f"{path} unpacks to more than {most:,} bytes: accepted is at most that")
    return data


def arrays(path: Path, data: bytes | None = None, what: str = "npz file") -> dict[str, np.ndarray]:
    """The arrays of an npz file, or of its content `data`.

    Sizes are checked before any array is read, because a header of a few bytes can claim a petabyte.
    """
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

    def stream() -> IO[bytes]:
        return path.open("rb") if data is None else io.BytesIO(data)

    try:
        with stream() as file, zipfile.ZipFile(file) as packed:
            budget = _Budget(path)
            for info in packed.infolist():
                budget.take(info.filename, info.file_size)
                with packed.open(info) as entry:
                    shape, _, kind = headers[np.lib.format.read_magic(entry)](entry)
                if math.prod(shape) * kind.itemsize > info.file_size:
                    raise ValueError(f"{info.filename} should hold {kind} {shape} and holds {info.file_size:,} bytes")
        with stream() as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Broken(f"{path} is not a whole {what}: {error}") from error


class _Bar:
    """pooch's progress bar, shown by rich."""

    def __init__(self, progress: "Progress", name: str):
        self.progress, self.task, self.total = progress, progress.add_task(name, total=None), 0

    def update(self, count: int) -> None:
        self.progress.update(self.task, advance=count, total=self.total or None)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        self.progress.stop()


def _advice(file: File, reason: str) -> str:
    put = f"Put it there (from {file.home}), or set SUBQUAD_DATA to the folder that holds it"
    return f"{file.path} is not in {folder()}, and {reason}. {put}"


def _brief(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "the package pooch is not installed"
    if "Connect" in type(error).__name__:  # requests' own text is a page long
        return "the host cannot be reached"
    return str(error).split("\n")[0][:200] or type(error).__name__
