"""A run's folder: everything to run it again, what it measured, and the weights that measured best.

config.json, metrics.jsonl, tensorboard/, checkpoints/step_000100/, best/step_000100/, model/, result.json
"""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from subquad.bench.provenance import origin
from subquad.disk import read_object
from subquad.models.store import write_whole
from subquad.training import checkpoints
from subquad.training.checkpoints import Checkpoint
from subquad.training.config import FREE_ON_RESUME, RunConfig, differences

CONFIG, RESULT = "config.json", "result.json"


@dataclasses.dataclass
class Opened:
    """What rank 0 found."""

    checkpoint: Checkpoint | None
    notes: list[str]
    result: dict[str, Any] | None = None  # of a run that is done


class Folder:
    def __init__(self, path: Path):
        self.path = path
        self.lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def best(self, step: int) -> Path:
        return self.path / "best" / checkpoints.name_of(step)

    def check(self, config: RunConfig, resume: bool, defaults: Mapping[str, Any] | None = None) -> None:
        """ValueError if this run must not be written here; writes nothing.

        `defaults` are those of the task's data: an older run knows nothing of settings that came after it.
        """
        if not (self.path / CONFIG).exists():
            return
        if not resume:
            raise ValueError(f"{self.path} holds a run: --resume goes on with it, --out chooses another folder")
        before = read_config(self.path)
        before = dataclasses.replace(before, data={**(defaults or {}), **before.data})
        changed = _changes(config, before)
        if changed:
            said = "; ".join(changed)
            raise ValueError(f"{self.path} was begun with other settings: {said}; --out chooses another folder")

    def open(self, config: RunConfig, resume: bool, device: str) -> Opened:
        """Begin or go on. Rank 0 calls it."""
        self.path.mkdir(parents=True, exist_ok=True)
        written = self.path / CONFIG
        self.lock = take(self.path, "another process is training there")
        if not written.exists():
            notes = [f"{self.path} holds no run yet: starting from the beginning"] if resume else []
            write_json(written, {**config.to_dict(), **origin(device)})
            return Opened(None, notes)
        if (self.path / RESULT).exists():
            return Opened(None, [], read_result(self.path))
        found, damaged = checkpoints.newest(self.checkpoints)
        if found is None and damaged:
            said = "; ".join(damaged.values())
            raise ValueError(f"{said}: no checkpoint is left to go on from; --out begins anew elsewhere")
        notes = [f"{said}; the one before it is used" for said in damaged.values()]
        for path in damaged:
            checkpoints.set_aside(path)
        if found is None:
            notes.append("no checkpoint yet: starting from the beginning")
        return Opened(found, notes)

    def prune(self, keep: int, best: int | None) -> None:
        """Keep the last checkpoints, and of the best weights those that they or the run name."""
        checkpoints.prune(self.checkpoints, keep)
        named = {best}
        for path in checkpoints.names(self.checkpoints):
            with contextlib.suppress(OSError, ValueError, KeyError):  # one that was damaged meanwhile names nothing
                facts = json.loads((path / checkpoints.STATE).read_text())["facts"]
                named.add((facts.get("best") or {}).get("step"))
        kept = {self.best(step).name for step in named if step is not None}
        for path in self.path.glob("best/step_*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def forget(self) -> None:
        """Let the folder be begun anew."""
        (self.path / CONFIG).unlink(missing_ok=True)

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.path / RESULT, result)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def take(folder: Path, busy: str) -> IO[str]:
    """Two processes in one folder would ruin each other's files; a lock ends with its process, however it ends."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{folder} is in use: {busy}") from None
    except OSError:
        pass  # a file system without locks
    return lock


def read_config(path: Path) -> RunConfig:
    """What a run folder was begun with."""
    file = path / CONFIG
    try:
        found = read_object(file)
        return RunConfig.from_dict({key: found[key] for key in ("task", "data", "model", "training")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the config of a run ({error!r})") from error


def read_result(path: Path) -> dict[str, Any]:
    """What a finished run came to."""
    file = path / RESULT
    try:
        return read_object(file)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is not the result of a run ({error}): remove it to go on") from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    write_whole(path, f"{json.dumps(data, indent=2, allow_nan=False)}\n".encode())


def plain(config: RunConfig) -> dict[str, Any]:
    """As it is read back from JSON, where tuples are lists."""
    return json.loads(config.to_json())


def _changes(ours: RunConfig, theirs: RunConfig) -> list[str]:
    before, now = (_without(plain(config), FREE_ON_RESUME) for config in (theirs, ours))
    return differences(now, before)


def _without(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    training = {key: value for key, value in config["training"].items() if key not in names}
    return {**config, "training": training}
