"""What a student learns by: each layer's output, the cost of replacing each layer alone, and the teacher's logits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.hf.linearise.models import Teacher
from subquad.hf.replace import Replacement, attentions
from subquad.training.precision import Precision

TOKENS = 1024  # whose logits are compared at once


@contextmanager
def recorded(model: nn.Module, layers: Mapping[int, Any]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Inputs and outputs [B, T, D] of a model's attention modules, during each forward pass."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(n: int) -> Any:
        def hook(_module: nn.Module, args: Any, named: Any, output: Any) -> None:
            hidden = named["hidden_states"] if "hidden_states" in named else args[0]
            seen[n] = hidden, output[0] if isinstance(output, tuple) else output

        return hook

    found = dict(attentions(model))
    hooks = [found[n].module.register_forward_hook(keep(n), with_kwargs=True) for n in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def align(teacher: Teacher, layers: Mapping[int, Replacement], x: Tensor, precision: Precision) -> dict[int, Tensor]:
    """Adds the gradients of each layer's error to its parameters: |own - teacher's|² / |teacher's|², all from one pass
    of the teacher. Returns the errors."""
    with recorded(teacher.model, layers) as seen, torch.no_grad(), precision.autocast():
        trunk(teacher.model)(x, use_cache=False)
    errors = {}
    for n, layer in layers.items():
        hidden, wanted = seen.pop(n)
        with precision.autocast():
            own, _ = layer(hidden.detach())
        wanted = wanted.detach().float()
        error = (own.float() - wanted).square().sum() / wanted.square().sum().clamp(min=1e-12)
        error.backward()
        errors[n] = error.detach()
    return errors


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over tokens of KL(teacher ‖ student), in nats, from logits [B, T, vocab]."""
    a, b = student.flatten(0, -2), teacher.flatten(0, -2)
    total = a.new_zeros((), dtype=torch.float32)
    for own, wanted in zip(a.split(TOKENS), b.split(TOKENS), strict=True):
        p = F.log_softmax(wanted.float(), -1)
        total = total + F.kl_div(F.log_softmax(own.float(), -1), p, log_target=True, reduction="sum")
    return total / len(a)


def distil(teacher: Teacher, student: Any, x: Tensor, precision: Precision) -> Tensor:
    """Adds the gradients of the divergence from the teacher's logits; returns it."""
    with torch.no_grad(), precision.autocast():
        wanted = teacher.model(x, use_cache=False).logits
    with precision.autocast():
        own = student(x, use_cache=False).logits
    loss = divergence(own, wanted)
    loss.backward()
    return loss.detach()


class Cost(NamedTuple):
    """Of replacing one layer alone."""

    kl: float  # nats a token, from the teacher
    perplexity: float


@torch.no_grad()
def sweep(
    teacher: Teacher, layers: Mapping[int, Replacement], x: Tensor, precision: Precision, rows: int
) -> tuple[float, dict[int, Cost]]:
    """The teacher's perplexity on rows x [N, T], and the cost of each aligned layer alone in the teacher's place."""
    found = dict(attentions(teacher.model))
    kl, nll, own_nll = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0), 0.0
    for part in x.split(rows):
        with precision.autocast():
            wanted = teacher.model(part, use_cache=False).logits
        own_nll += float(surprise(wanted, part)) * len(part) / len(x)
        for n, layer in layers.items():
            try:
                found[n].put(layer)
                with precision.autocast():
                    own = teacher.model(part, use_cache=False).logits
            finally:
                setattr(found[n].parent, found[n].name, found[n].module)
            kl[n] += float(divergence(own, wanted)) * len(part) / len(x)
            nll[n] += float(surprise(own, part)) * len(part) / len(x)
    return _exp(own_nll), {n: Cost(kl[n], _exp(nll[n])) for n in layers}


@torch.no_grad()
def perplexity(model: Any, x: Tensor, precision: Precision, rows: int) -> float:
    """Of rows x [N, T], each read from its start."""
    nll = 0.0
    for part in x.split(rows):
        with precision.autocast():
            logits = model(part, use_cache=False).logits
        nll += float(surprise(logits, part)) * len(part) / len(x)
    return _exp(nll)


def surprise(logits: Tensor, x: Tensor) -> Tensor:
    """The mean of -log p of each next token."""
    guesses, following = logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()
    pairs = zip(guesses.split(TOKENS), following.split(TOKENS), strict=True)
    total = sum(F.cross_entropy(a.float(), b, reduction="sum") for a, b in pairs)
    return torch.as_tensor(total) / len(following)


@contextmanager
def switched_off(layers: Mapping[int, Replacement]) -> Iterator[None]:
    """With zeros in the place of what the linear parts of these layers give."""
    parts = [getattr(layer.mixer, "other", layer.mixer) for layer in layers.values()]
    hooks = [part.register_forward_hook(lambda _m, _a, y: torch.zeros_like(y)) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def trunk(model: Any) -> Any:
    """The model without its head."""
    return model.base_model if model.base_model is not model else model


def _exp(nll: float) -> float:
    return float(torch.tensor(nll, dtype=torch.float64).exp())
