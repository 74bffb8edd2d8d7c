"""Short training for quality: what a small model with each mechanism learns in the same few steps of the same data."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.mechanisms import mechanism
from subquad.models import Classifier, LanguageModel
from subquad.studies.settings import Settings
from subquad.training.short import short_run

DIM, DEPTH, HEADS, BATCH = 64, 2, 2, 32  # of every model here
CONTEXT = 256  # tokens of the user's own data in one sequence
CURVE = 50  # points kept of the loss
VALUES = 65536  # largest vocabulary of the user's own tokens
Model = LanguageModel | Classifier


@dataclass(frozen=True)
class Task:
    """A model for each mechanism, a loss of a random batch (in the unit of the curve), and the figure at the end."""

    name: str
    metric: str
    lower_is_better: bool
    make: Callable[[str], Model]
    loss: Callable[[Any, torch.Generator], Tensor]
    evaluate: Callable[[Any], float]


def quality(settings: Settings, name: str) -> dict[str, Any]:
    """The record of one mechanism, or the reason why there is none; nothing is raised."""
    record: dict[str, Any] = {"mechanism": name, "task": task_name(settings)}
    causal, traits = settings.is_causal(name), mechanism(name).traits
    if not (traits.causal if causal else traits.bidirectional):
        return {**record, "reason": f"has no {'causal' if causal else 'bidirectional'} form"}
    try:
        task = make_task(settings, causal)
        if task is None:
            return {**record, "reason": "has no causal form, which this task needs"}
        return {**record, **learn(task, name, settings)}
    except Exception as error:
        return {**record, "reason": f"{type(error).__name__}: {error}"}


def task_name(settings: Settings) -> str:
    return settings.task or Path(settings.data or "").name


def make_task(settings: Settings, causal: bool) -> Task | None:
    if settings.data is not None:
        return own_task(load_tokens(Path(settings.data)), Path(settings.data).name) if causal else None
    if settings.task == "copy":
        return copy_task() if causal else None
    if settings.task == "listops":
        return listops_task(causal)
    return digits_task(causal)


def learn(task: Task, name: str, settings: Settings) -> dict[str, Any]:
    """A short run, the same for all."""
    torch.manual_seed(0)
    model = task.make(name).to(settings.device)
    generator = torch.Generator().manual_seed(0)
    every = max(1, settings.steps // CURVE)
    curve, recent = [], []
    begun = time.perf_counter()
    losses = short_run(model, lambda: task.loss(model, generator), settings.steps, lr=2e-3, weight_decay=0.01)
    for step, loss in enumerate(losses, start=1):
        recent.append(loss)
        if step % every == 0:
            curve.append([step, float(torch.stack(recent).mean())])
            recent = []
    seconds = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        value = task.evaluate(model)
    return {
        "metric": task.metric,
        "value": value,
        "lower_is_better": task.lower_is_better,
        "steps": settings.steps,
        "seconds": seconds,
        "curve": curve,
    }


def _language_model(name: str, vocab: int, length: int) -> LanguageModel:
    return LanguageModel(vocab=vocab, dim=DIM, depth=DEPTH, heads=HEADS, mechanism=name, max_length=length)


def _classifier(name: str, vocab: int, length: int, causal: bool) -> Classifier:
    return Classifier(
        classes=10, vocab=vocab, dim=DIM, depth=DEPTH, heads=HEADS, mechanism=name, max_length=length, causal=causal
    )


def copy_task(symbols: int = 10, length: int = 128) -> Task:
    """Repeat a word after a separator: [w, 0, w, 0...], 32 to 62 symbols of 10 (arXiv:2006.16236, §4.1.1)."""

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        n = torch.randint(length // 4, (length - 1) // 2, (size, 1), generator=generator)
        word = torch.randint(1, symbols + 1, (size, length), generator=generator)
        at = torch.arange(length)
        again = word.gather(1, (at - n - 1).clamp(min=0))
        tokens = torch.where(at < n, word, torch.where((at > n) & (at <= 2 * n), again, 0))
        targets = torch.where((at[1:] > n) & (at[1:] <= 2 * n), tokens[:, 1:], -100)  # the second word only
        return tokens[:, :-1], targets

    def loss(model: LanguageModel, generator: torch.Generator, size: int = BATCH) -> Tensor:
        tokens, targets = (t.to(model.device) for t in batch(generator, size))
        return model.loss(tokens, targets=targets) / math.log(2)

    return Task(
        "copy",
        "bits/symbol",
        True,
        lambda name: _language_model(name, symbols + 1, length),
        loss,
        lambda model: float(loss(model, torch.Generator().manual_seed(1), 256)),
    )


def digits_task(causal: bool) -> Task:
    """The digits that ship with the package: pixel by pixel if causal, else which digit it is."""
    from subquad.data import digits
    from subquad.tasks.digits import PIXELS, bits_per_dim, with_start

    training, test = digits.load()

    def rows(generator: torch.Generator) -> Tensor:
        return torch.randint(len(training.labels), (BATCH,), generator=generator)

    if causal:
        return Task(
            "digits",
            "bits/dim",
            True,
            lambda name: _language_model(name, digits.SHADES + 1, PIXELS),
            lambda model, generator: (
                model.loss(with_start(training.images[rows(generator)]).to(model.device)) / math.log(2)
            ),
            lambda model: bits_per_dim(model, test.images.to(model.device)),
        )

    def loss(model: Classifier, generator: torch.Generator) -> Tensor:
        chosen = rows(generator)
        return model.loss(training.images[chosen].to(model.device), training.labels[chosen].to(model.device))

    return Task(
        "digits",
        "accuracy",
        False,
        lambda name: _classifier(name, digits.SHADES, PIXELS, causal),
        loss,
        lambda model: _accuracy(model, test.images, test.labels),
    )


def _accuracy(model: Classifier, tokens: Tensor, labels: Tensor, lengths: Tensor | None = None) -> float:
    lengths = None if lengths is None else lengths.to(model.device)
    return float((model(tokens.to(model.device), lengths).argmax(-1).cpu() == labels).float().mean())


OPERATORS = ("MIN", "MAX", "MED", "SM")
LISTOPS_TOKENS = 128  # of the longest expression in this short task
CLOSE, PADDING = 10 + len(OPERATORS), 0


def listops_task(causal: bool, training: int = 2000, test: int = 500) -> Task:
    """Nested lists of digits under MIN, MAX, MED and SM (sum modulo 10), up to 128 tokens: a short form of LRA's."""
    tokens, lengths, labels = expressions(training + test, seed=0)

    def loss(model: Classifier, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(training, (BATCH,), generator=generator)
        inputs, answers, sizes = (t[chosen].to(model.device) for t in (tokens, labels, lengths))
        return model.loss(inputs, answers, sizes)

    return Task(
        "listops",
        "accuracy",
        False,
        lambda name: _classifier(name, CLOSE + 1, LISTOPS_TOKENS, causal),
        loss,
        lambda model: _accuracy(model, tokens[training:], labels[training:], lengths[training:]),
    )


def expressions(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [N, 128], lengths [N], values [N]) of random expressions of 16 to 128 tokens."""
    random = np.random.default_rng(seed)
    tokens, lengths, values = np.full((count, LISTOPS_TOKENS), PADDING), np.zeros(count, int), np.zeros(count, int)
    made = 0
    while made < count:
        written, value = _expression(random, depth=3)
        if 16 <= len(written) <= LISTOPS_TOKENS:
            tokens[made, : len(written)], lengths[made], values[made] = written, len(written), value
            made += 1
    return torch.from_numpy(tokens), torch.from_numpy(lengths), torch.from_numpy(values)


def _expression(random: np.random.Generator, depth: int) -> tuple[list[int], int]:
    operator = int(random.integers(len(OPERATORS)))
    written, values = [10 + operator], []
    for _ in range(int(random.integers(2, 7))):
        if depth > 0 and random.random() < 0.3:
            inner, value = _expression(random, depth - 1)
            written += inner
        else:
            value = int(random.integers(10))
            written.append(value)
        values.append(value)
    return [*written, CLOSE], (min(values), max(values), int(np.median(values)), sum(values) % 10)[operator]


def load_tokens(path: Path) -> Tensor:
    """Tokens of a file: integers of an .npy array, [N] or [N, T] with a sequence a row; the bytes of any other."""
    if not path.is_file():
        raise ValueError(f"data={str(path)!r} cannot work: there is no such file")
    if path.suffix != ".npy":
        tokens = torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8).long()
    else:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # whose header may say more than the file holds
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"data={str(path)!r} cannot work: accepted is an .npy array of integers") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"data={str(path)!r} holds {array.dtype} of shape {list(array.shape)}: accepted are integer tokens, "
                "[N] or [N, T] with a sequence a row"
            )
        tokens = torch.from_numpy(array.astype(np.int64))
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < VALUES:
            raise ValueError(
                f"data={str(path)!r} holds tokens from {int(tokens.min())} to {int(tokens.max())}: accepted are 0 to "
                f"{VALUES - 1}"
            )
    least = 32
    if tokens.shape[0] < least or tokens.shape[-1] < 2:
        raise ValueError(
            f"data={str(path)!r} holds {list(tokens.shape)} tokens: accepted are at least {least}, or {least} sequences"
        )
    return tokens


def own_task(tokens: Tensor, name: str) -> Task:
    """Predict the user's tokens from those before; the last tenth is for testing."""
    cut = max(1, len(tokens) // 10)
    training, test = tokens[:-cut], tokens[-cut:]
    vocab = int(tokens.max()) + 1
    length = min(CONTEXT, (tokens.shape[1] if tokens.ndim == 2 else cut) - 1)

    def pieces(data: Tensor, size: int, generator: torch.Generator) -> Tensor:
        if data.ndim == 2:
            rows = data[torch.randint(len(data), (size,), generator=generator)]
            start = int(torch.randint(data.shape[1] - length, (1,), generator=generator))
            return rows[:, start : start + length + 1]
        starts = torch.randint(len(data) - length, (size, 1), generator=generator)
        return data[starts + torch.arange(length + 1)]

    return Task(
        name,
        "bits/token",
        True,
        lambda mechanism: _language_model(mechanism, vocab, length),
        lambda model, generator: model.loss(pieces(training, BATCH, generator).to(model.device)) / math.log(2),
        lambda model: (
            float(model.loss(pieces(test, 64, torch.Generator().manual_seed(1)).to(model.device))) / math.log(2)
        ),
    )
