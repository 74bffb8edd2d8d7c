"""A task that trains in a second, on repeating tokens, and processes that train it."""

import dataclasses
import json
import math
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from subquad.models import LanguageModel
from subquad.training.config import TrainingConfig
from subquad.training.loop import Result
from subquad.training.task import Batch, Loss, Split, Sums, Task
from subquad.training.train import train

VOCAB, LENGTH = 7, 10
QUIET = Console(quiet=True)
# values that differ from run to run, and the checksum over them
CLOCKED = ("seconds", "tokens_per_second", "examples_per_second", "memory_bytes", "check")
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.training.tiny"])


class Tokens:
    """Rows that count upwards from a random token, by 1 or 2; `ragged` rows have different lengths."""

    def __init__(self, count: int, seed: int, ragged: bool):
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCAB, (count, 1), generator=generator)
        pace = torch.randint(1, 3, (count, 1), generator=generator)
        self.tokens = (first + pace * torch.arange(LENGTH)) % VOCAB
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator) if ragged else None

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        rows = torch.from_numpy(indices.copy())
        lengths = {} if self.lengths is None else {"lengths": self.lengths[rows]}
        return {"tokens": self.tokens[rows], **lengths}


@dataclasses.dataclass(frozen=True)
class Tiny(Task):
    ragged: bool = False
    name: ClassVar[str] = "tiny"
    metric: ClassVar[str] = "perplexity"
    model: ClassVar[Mapping[str, Any]] = {"mechanism": "linear", "dropout": 0.1}
    training: ClassVar[TrainingConfig] = TrainingConfig(
        steps=12, batch=8, lr=1e-2, evaluate_every=4, checkpoint_every=3, log_every=2
    )

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        return LanguageModel(**{"vocab": VOCAB, "dim": 16, "depth": 1, "heads": 2, **fields})

    def source(self, split: Split) -> Tokens:
        size, seed = {"train": (50, 0), "validation": (13, 1), "test": (11, 2)}[split]
        return Tokens(size, seed, self.ragged)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens, lengths = batch["tokens"], batch.get("lengths")
        total = cast(LanguageModel, model).loss(tokens, lengths, reduction="sum")
        count = torch.tensor(tokens[:, 1:].numel()) if lengths is None else (lengths - 1).sum()
        return Loss(total, count)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        total, count = self.loss(model, batch)
        return {"nats": (total, count)}

    def summary(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        return {"perplexity": math.exp(sums["nats"][0] / sums["nats"][1])}


def run(
    out: Path,
    model: Mapping[str, Any] | None = None,
    resume: bool = False,
    task: Task | None = None,
    leg: float | None = None,
    **training: Any,
) -> Result:
    task = task or Tiny()
    config = dataclasses.replace(task.training, **training)
    return train(task, config, model, out, resume=resume, device="cpu", console=QUIET, leg=leg)


def curve(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without times and rates."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in lines]


def weights(out: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors")


def assert_same_run(out: Path, other: Path) -> None:
    """Losses, measures and weights are equal bit for bit."""
    assert curve(out) == curve(other)
    ours, theirs = weights(out), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close_run(out: Path, other: Path, rel: float = 1e-5) -> None:
    """Two ways of computing the same updates: losses and measures agree to `rel`, weights up to rounding."""
    ours, theirs = curve(out), curve(other)
    assert [(line["step"], line["split"]) for line in ours] == [(line["step"], line["split"]) for line in theirs]
    for line, like in zip(ours, theirs, strict=True):
        numbers = {key: value for key, value in like.items() if key != "split"}
        assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=rel)
    for name, tensor in weights(out).items():
        torch.testing.assert_close(tensor, weights(other)[name], rtol=1e-4, atol=1e-6)


def start(target: Any, *arguments: Any) -> BaseProcess:
    process = processes.Process(target=target, args=arguments)
    process.start()
    return process


def elsewhere(out: Path, resume: bool, training: dict[str, Any]) -> None:
    """Run training in another process, with the exit codes of the command line."""
    from subquad.training.signals import Interrupted

    torch.set_num_threads(1)
    try:
        run(out, resume=resume, **training)
    except Interrupted as interruption:
        os._exit(interruption.code)
