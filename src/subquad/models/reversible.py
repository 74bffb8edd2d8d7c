"""Reversible residuals: backward reconstructs activations from the output, so depth takes no memory for them.

Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020 (Reformer), §3. Branch f maps (a, b) to (b, a + f(b)).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.gradients import once_differentiable
from subquad.models.blocks import Branch, Residual, Stream


class Coupling:
    """One branch: what it adds to the stream, its parameters, and whether it draws random numbers."""

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
        ctx.chain, ctx.rng_states = chain, []
        ctx.ranks = ranks.recomputing()
        device = a.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for coupling in chain:
            ctx.rng_states.append(_rng_states(a) if coupling.random else None)
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
        for coupling, rng_states in zip(reversed(ctx.chain), reversed(ctx.rng_states), strict=True):
            source = None if memory is None else memory.detach().requires_grad_(wants_memory)
            a = a.detach().requires_grad_()
            again = ctx.ranks["context_fn"]()[1] if ctx.ranks else nullcontext()
            same = _same_numbers(rng_states, a)
            with torch.enable_grad(), again, same, torch.autocast(device, dtype, enabled=enabled):
                y = coupling(a, source)
            inputs = [a, *([source] if wants_memory else []), *coupling.parameters]
            through, *others = torch.autograd.grad(y, inputs, grad_b.to(y.dtype), allow_unused=True)
            if wants_memory:
                more = others.pop(0)
                grad_memory = more if grad_memory is None else grad_memory if more is None else grad_memory + more
            grads.extend(reversed(others))
            with torch.no_grad():
                a, b = b - y, a
            grad_a, grad_b = grad_b, grad_a + through
        return None, grad_a, grad_b, grad_memory, *reversed(grads)


def _rng_states(x: Tensor) -> list[Tensor]:
    """The states of the random generators of the CPU and of x's device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]


@contextmanager
def _same_numbers(states: list[Tensor] | None, x: Tensor) -> Iterator[None]:
    """Draw the same random numbers as in forward, then restore the generators."""
    with torch.random.fork_rng([x.device] if x.is_cuda else [], enabled=states is not None):
        if states is not None:
            torch.set_rng_state(states[0])
            if x.is_cuda:
                torch.cuda.set_rng_state(states[1], x.device)
        yield
