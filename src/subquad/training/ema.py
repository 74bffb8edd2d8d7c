"""Averaged weights: a running mean of the parameters, which usually scores better than the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from subquad.training.optimisers import local


class Ema:
    """mean ← decay·mean + (1 - decay)·parameters after every update. The decay is lower at first, so that the random
    initial weights are soon forgotten."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        self.means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call this after update number `step`, counted from 1."""
        decay = min(self.decay, step / (step + 9))
        torch._foreach_lerp_(self._locals(self.means), self._locals(self.parameters), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averaged weights."""
        means, parameters = self._locals(self.means), self._locals(self.parameters)
        with torch.no_grad():
            saved = [p.clone() for p in parameters]
            torch._foreach_copy_(parameters, means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, saved)

    @staticmethod
    def _locals(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> list[Tensor]:
        return [local(tensor.detach()) for tensor in tensors.values()]
