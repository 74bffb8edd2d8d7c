"""A run's folder: its settings, its measurements, its checkpoints and its best weights.

config.json, metrics.jsonl, tensorboard/, checkpoints/step_000100/, best/step_000100/, model/, result.json

All but tensorboard/ are protected by checksums, in the files themselves or in a checkpoint.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.disk import lock_folder, parse_json, read_sealed, set_aside, write_sealed
from subquad.machine import origin
from subquad.models import saving
from subquad.training import checkpoints, history
from subquad.training.checkpoints import Checkpoint
from subquad.training.config import FREE_ON_RESUME, RunConfig, differences
from subquad.training.models import damage_of

CONFIG, RESULT = "config.json", "result.json"


@dataclasses.dataclass
class Opened:
    """What can be resumed: nothing, a checkpoint, or a finished run's result; notes are for the user."""

    checkpoint: Checkpoint | None
    notes: list[str]
    result: dict[str, Any] | None = None


class Folder:
    def __init__(self, path: Path):
        self.path, self.checkpoints, self.model = path, path / "checkpoints", path / "model"
        self.lock = contextlib.ExitStack()

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run: a config.json or checkpoints."""
        return (self.path / CONFIG).exists() or bool(checkpoints.names(self.checkpoints))

    def best(self, step: int) -> Path:
        return self.path / "best" / checkpoints.name_of(step)

    def check(self, config: RunConfig, resume: bool, defaults: Mapping[str, Any] | None = None) -> None:
        """ValueError if a run with this config must not be written here; writes nothing.

        `defaults` of the task's data fill in options that did not exist when an older run began.
        """
        if not self.begun:
            return
        if not resume:
            raise ValueError(f"{self.path} holds a run: --resume continues it, --out chooses another folder")
        for before in filter(None, (read_config(self.path), _config_of_checkpoint(self.path))):
            before = dataclasses.replace(before, data={**(defaults or {}), **before.data})
            changed = "; ".join(differences(_fixed(config), _fixed(before)))
            if changed:
                raise ValueError(f"{self.path} was started with other settings: {changed}; --out sets another folder")

    def open(self, config: RunConfig, resume: bool, device: str) -> Opened:
        """Start or resume a run; only rank 0 calls it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock.enter_context(lock_folder(self.path, "another process is training there"))
        if not self.begun:
            notes = [f"{self.path} holds no run yet: starting from the beginning"] if resume else []
            self._write_config(config, device)
            return Opened(None, notes)
        notes = self._repair_config(config, device)
        if (self.path / RESULT).exists():
            result = read_result(self.path)
            damage = self._damage(result)
            if not damage or checkpoints.newest(self.checkpoints)[0] is None:
                return Opened(None, notes + damage, result)
            notes += [f"{sentence}; the test is repeated from the last checkpoint" for sentence in damage]
            (self.path / RESULT).unlink()
        checkpoint, damaged = checkpoints.newest(self.checkpoints)
        if checkpoint is None and damaged:
            reasons = "; ".join(damaged.values())
            raise ValueError(f"{reasons}: no checkpoint is left to resume from; --out starts again in another folder")
        notes += [f"{sentence}; resuming from the checkpoint before it" for sentence in damaged.values()]
        for path in damaged:
            set_aside(path)
        if checkpoint is None:
            return Opened(None, [*notes, "no checkpoint yet: starting from the beginning"])
        checkpoint, damage = self._before_damaged_best(checkpoint)
        notes += damage
        if not checkpoint.sealed:
            unchecked = f"its {checkpoints.STATE} cannot be checked"
            notes.append(f"{checkpoint.path} was written by a version without digests: {unchecked}")
        return Opened(checkpoint, notes)

    def _write_config(self, config: RunConfig, device: str) -> None:
        write_sealed(self.path / CONFIG, {**config.to_dict(), **origin(device)})

    def _before_damaged_best(self, newest: Checkpoint) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint whose best weights are intact: resuming from it makes the damaged ones again.

        If there is none, the newest one: the test then uses the last weights, and says so.
        """
        damage = self._damage_of_best(newest)
        if not damage:
            return newest, []
        newer = [newest.path]
        for path in reversed(checkpoints.names(self.checkpoints)[:-1]):
            with contextlib.suppress(ValueError):  # a damaged one
                older = checkpoints.read(path)
                if not self._damage_of_best(older):
                    for later in newer:
                        set_aside(later)
                    return older, [f"{damage}; training resumes from {path.name} and makes these weights again"]
            newer.append(path)
        return newest, []

    def _damage_of_best(self, checkpoint: Checkpoint) -> str:
        best = checkpoint.facts["best"]
        return "" if best is None else damage_of(self.best(best["step"]), best.get("sha256"))

    def _repair_config(self, config: RunConfig, device: str) -> list[str]:
        """Rewrite a lost or damaged config.json; `check` has compared the settings with those of a checkpoint."""
        file = self.path / CONFIG
        try:
            _config_in(file)
            return []
        except ValueError as error:
            aside = f"; it was renamed to {set_aside(file).name}" if file.exists() else ""
            self._write_config(config, device)
            return [f"{error}{aside}; a new one was written from the settings in the checkpoints"]

    def _damage(self, result: Mapping[str, Any]) -> list[str]:
        """A sentence for each damaged file of a finished run, other than result.json."""
        file = self.path / history.METRICS
        metrics = history.read(file).damage
        sentences = [f"{file} is damaged: {metrics}"] if metrics else []
        if (digest := result.get("weights_sha256")) is not None:
            model = damage_of(self.model, digest)
            if not model and (self.model / saving.CONFIG).is_file():
                try:
                    saving.verify(self.model)
                except ValueError as error:
                    model = str(error)
            sentences += [model] if model else []
        return sentences

    def prune(self, keep: int, best: int | None) -> None:
        """Delete old checkpoints, and best weights that neither the kept ones nor the run refer to."""
        checkpoints.prune(self.checkpoints, keep)
        named = {best}
        for path in checkpoints.names(self.checkpoints):
            with contextlib.suppress(ValueError):  # a damaged one
                named.add((checkpoints.read_state(path)[0]["facts"]["best"] or {}).get("step"))
        needed = {self.best(step).name for step in named if step is not None}
        for path in self.path.glob("best/step_*"):
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


def read_config(path: Path) -> RunConfig:
    """The config of a run; if config.json is lost or damaged, that of the newest readable checkpoint."""
    try:
        return _config_in(path / CONFIG)
    except ValueError:
        config = _config_of_checkpoint(path)
        if config is None:
            raise
        return config


def _config_of_checkpoint(path: Path) -> RunConfig | None:
    """The config in the newest checkpoint that can be read; a config.json without a digest may have been edited."""
    for checkpoint in reversed(checkpoints.names(path / "checkpoints")):
        with contextlib.suppress(ValueError):
            return RunConfig.from_dict(checkpoints.read_state(checkpoint)[0]["facts"]["config"])
    return None


def _config_in(file: Path) -> RunConfig:
    try:
        data, _ = read_sealed(file)
        return RunConfig.from_dict({key: data[key] for key in ("task", "data", "model", "training")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file} is not the config of a run ({why})") from error


def read_result(path: Path) -> dict[str, Any]:
    """The result of a finished run."""
    file = path / RESULT
    try:
        return read_sealed(file)[0]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not the result of a run ({error}): delete it to continue") from error


def plain(config: RunConfig) -> dict[str, Any]:
    """The config as plain JSON values; tuples become lists."""
    return parse_json(config.to_json(), "config")


def _fixed(config: RunConfig) -> dict[str, Any]:
    """The settings that must stay the same on resume."""
    settings = plain(config)
    for name in FREE_ON_RESUME:
        del settings["training"][name]
    return settings
