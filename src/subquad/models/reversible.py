"""Reversible residuals: backward reconstructs every activation from the output, so depth costs no memory.

Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020 (Reformer), §3. Branch f maps (a, b) to (b, a + f(b)).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from subquad.models.blocks import Branch, Residual, Stream


class Coupling:
    """One branch: what it adds, its parameters, and the dice it threw."""

    def __init__(self, residual: Residual, module: nn.Module, branch: Branch):
        self.residual, self.branch = residual, branch
        self.random = residual.training
        self.parameters = [p for m in (residual, module) for p in m.parameters() if p.requires_grad]

    def __call__(self, b: Tensor, memory: Tensor | None) -> Tensor:
        return self.residual.dropout(self.branch(self.residual.read((b, b)), memory))


def run(couplings: Iterable[tuple[Residual, nn.Module, Branch]], stream: Stream, memory: Tensor | None) -> Stream:
    """The stream after all branches, keeping only the last pair for backward."""
    chain = [Coupling(*parts) for parts in couplings]
    parameters = [p for coupling in chain for p in coupling.parameters]
    return _Reversible.apply(chain, *stream, memory, *parameters)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Sequence[Coupling], a: Tensor, b: Tensor, memory: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.chain, ctx.dice = chain, []
        device = a.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for coupling in chain:
            ctx.dice.append(_dice(a) if coupling.random else None)
            a, b = b, a + coupling(b, memory)
        ctx.save_for_backward(a, b, memory)
        return a, b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor | None, ...]:
        a, b, memory = ctx.saved_tensors
        wants_memory = ctx.needs_input_grad[3]
        grad_memory: Tensor | None = None
        device, dtype, enabled = ctx.autocast
        grads: list[Tensor | None] = []  # of the parameters, last first
        for coupling, dice in zip(reversed(ctx.chain), reversed(ctx.dice), strict=True):
            source = None if memory is None else memory.detach().requires_grad_(wants_memory)
            a = a.detach().requires_grad_()
            with torch.enable_grad(), _Rethrown(dice, a), torch.autocast(device, dtype, enabled=enabled):
                y = coupling(a, source)
            inputs = [a, *([source] if wants_memory else []), *coupling.parameters]
            through, *found = torch.autograd.grad(y, inputs, grad_b.to(y.dtype), allow_unused=True)
            if wants_memory:
                grad_memory = _sum(grad_memory, found.pop(0))
            grads.extend(reversed(found))
            with torch.no_grad():
                a, b = b - y, a
            grad_a, grad_b = grad_b, grad_a + through
        return None, grad_a, grad_b, grad_memory, *reversed(grads)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _dice(x: Tensor) -> list[Tensor]:
    """The random generators' states, the CPU's and that of x's device."""
    states = [torch.get_rng_state()]
    if x.is_cuda:
        states.append(torch.cuda.get_rng_state(x.device))
    return states


class _Rethrown:
    """Inside, the dice fall as they did in forward; afterwards they are where they were."""

    def __init__(self, dice: list[Tensor] | None, x: Tensor):
        self.dice, self.x = dice, x

    def __enter__(self) -> None:
        if self.dice is not None:
            self.now = _dice(self.x)
            self._set(self.dice)

    def __exit__(self, *_: object) -> None:
        if self.dice is not None:
            self._set(self.now)

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.x.is_cuda:
            torch.cuda.set_rng_state(states[1], self.x.device)
