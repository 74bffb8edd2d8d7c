"""The training settings and all settings of a run, as frozen dataclasses that check themselves."""

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from subquad.checks import at_least, check_plain, nearest, refuse
from subquad.models.config import Config

# settings that may change on resume, because they do not affect what is learned
FREE_ON_RESUME = (
    "micro_batch", "compile", "capture", "parallel", "sequence", "keep", "checkpoint_every", "log_every",
    "evaluate_batch", "start",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """Training ends after `steps` updates or after `minutes`, whichever comes first."""

    steps: int = 1000
    batch: int = 32  # examples in an update, over all ranks and micro-batches
    micro_batch: int | None = None  # examples in one forward on one rank; None: batch / ranks
    shuffle: bool = True
    optimiser: Literal["radam", "adamw", "adam", "muon"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled; for matrices only, not for biases, norms and embeddings
    momentum: float = 0.95  # of muon
    clip: float | None = 1.0  # of the gradient's norm
    clip_by: Literal["norm", "tensor"] = "norm"  # all tensors together, or each separately
    warmup: int = 0  # steps
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau", "step"] = "cosine"
    final_lr: float = 0.0  # for cosine and linear: the share of lr at the end
    patience: int = 5  # for plateau: evaluations without improvement before lr falls
    factor: float = 0.5  # for plateau: lr is multiplied by this
    drop_at: int | None = None  # for step: lr drops at this step
    drop_to: float = 0.1  # for step: the share of lr after the drop
    ema: float | None = None  # decay of averaged weights, which are evaluated and saved instead
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool = False
    capture: bool = False  # updates as CUDA graphs: for small models on one GPU, with few shapes of batches
    evaluate_every: int | None = None  # steps; None: ten times per run
    evaluate_batches: int | None = None  # batches of each validation; None: the whole split
    evaluate_batch: int | None = None  # examples in a batch; None: as micro_batch
    checkpoint_every: int | None = None  # steps; None: as evaluate_every
    keep: int = 2  # number of checkpoints to keep
    log_every: int = 20  # steps
    minutes: float | None = None  # of training, over all legs; the schedule ends with them
    seed: int = 0
    start: str | None = None  # a run, or a folder of weights: the encoder begins from it, the head does not
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    sequence: int | None = None  # ranks that share each sequence; any number, 1 too, drops out the same positions

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas) if isinstance(self.betas, list) else self.betas)
        for name, hint in typing.get_type_hints(type(self)).items():
            check_plain(name, getattr(self, name), hint)
        at_least(self, steps=1, batch=1, warmup=0, patience=1, keep=1, log_every=1, seed=0)
        some = (
            "micro_batch", "drop_at", "evaluate_every", "evaluate_batches", "evaluate_batch", "checkpoint_every",
            "sequence",
        )  # fmt: skip
        at_least(self, **{name: 1 for name in some if getattr(self, name) is not None})
        if self.seed >= 2**40:
            refuse("seed", self.seed, "an integer below 2**40")
        for names, fits, accepted in (
            (("lr", "eps", "clip", "minutes"), lambda x: x > 0, "a positive number"),
            (("weight_decay",), lambda x: x >= 0, "a number of at least 0"),
            (("final_lr", "drop_to"), lambda x: 0 <= x <= 1, "a number in [0, 1]"),
            (("momentum",), lambda x: 0 <= x < 1, "a number in [0, 1)"),
            (("factor", "ema"), lambda x: 0 < x < 1, "a number in (0, 1)"),
            (("betas",), _two_shares, "two numbers in [0, 1), such as (0.9, 0.98)"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    refuse(name, value, accepted)
        if self.sequence is not None:
            for name in ("compile", "capture"):
                if getattr(self, name):
                    refuse(name, True, f"false with sequence={self.sequence}: exchanges between ranks are not compiled")
        if self.schedule == "step" and self.drop_at is None:
            refuse("drop_at", None, 'a step with schedule="step"')
        if self.schedule == "inverse_sqrt" and self.warmup < 1:
            refuse("warmup", self.warmup, 'at least 1 with schedule="inverse_sqrt", whose highest lr is at its end')
        if self.micro_batch is not None and self.micro_batch > self.batch:
            refuse("micro_batch", self.micro_batch, f"at most batch={self.batch}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """All settings of a run, as changed by `--set data.…`, `--set model.…` and `--set training.…`."""

    task: str
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        for name in ("data", "model"):
            if not isinstance(getattr(self, name), Mapping):
                refuse(name, getattr(self, name), "an object with keys")

    def override(self, settings: Iterable[str]) -> Self:
        """Apply settings such as "training.lr=3e-4"; a value that is not JSON is text.

        Unknown keys of training and data are refused here, unknown keys of the model when it is built.
        """
        parts = {"data": dict(self.data), "model": dict(self.model), "training": self.training.to_dict()}
        for setting in settings:
            path, value = parse(setting)
            part, *keys = path
            if part not in parts or not keys:
                raise ValueError(
                    f"--set {setting} names no setting{nearest(part, parts)} "
                    "Accepted: data.KEY=VALUE, model.KEY=VALUE and training.KEY=VALUE"
                )
            if part != "model" and keys[0] not in parts[part]:
                known = parts[part]
                listed = f"Accepted: {', '.join(known)}" if known else "It has no settings"
                raise ValueError(f"{part} has no setting {keys[0]!r}{nearest(keys[0], known)} {listed}")
            _place(parts[part], keys, value, setting)
        training = TrainingConfig.from_dict(parts["training"])
        return dataclasses.replace(self, data=parts["data"], model=parts["model"], training=training)


def parse(setting: str) -> tuple[list[str], Any]:
    """ "model.depth=16" -> (["model", "depth"], 16)"""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {setting} cannot be read: accepted is KEY=VALUE, such as model.depth=16")
    text = text.strip()
    python: dict[str, Any] = {"None": None, "True": True, "False": False}  # as well as JSON's null, true and false
    if text in python:
        return keys, python[text]
    try:
        return keys, json.loads(text)
    except json.JSONDecodeError:
        return keys, text
    except RecursionError:
        raise ValueError(f"--set {path}: its value is nested too deep") from None


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> list[str]:
    """Each setting that differs, as "training.lr is 0.1, was 0.2"."""
    lines = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        name = f"{path}{key}"
        if key not in ours or key not in theirs:
            lines.append(f"{name} is {'new' if key in ours else 'gone'} ({json.dumps({**theirs, **ours}[key])})")
        elif isinstance(ours[key], Mapping) and isinstance(theirs[key], Mapping):
            lines += differences(ours[key], theirs[key], f"{name}.")
        elif ours[key] != theirs[key]:
            lines.append(f"{name} is {json.dumps(ours[key])}, was {json.dumps(theirs[key])}")
    return lines


def _place(target: dict[str, Any], keys: list[str], value: Any, setting: str) -> None:
    *outer, last = keys
    for key in outer:
        inner = target.get(key, {})
        if not isinstance(inner, Mapping):
            raise ValueError(f"--set {setting} cannot work: {key}={inner!r} has no parts")
        target[key] = inner = dict(inner)
        target = inner
    target[last] = value


def _two_shares(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(share, int | float) and 0 <= share < 1 for share in value)
