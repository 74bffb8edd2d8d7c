"""Gradients written by hand, which have no second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of a torch.autograd.Function: differentiating its results again raises RuntimeError.

    With torch's decorator of this name `torch.autograd.grad` would leave out what is missing, without an error.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        ctx = _Context(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        if not sources:
            return results
        if isinstance(results, Tensor):
            return _Last.apply(results, *sources)
        return tuple(_Last.apply(t, *sources) if isinstance(t, Tensor) else t for t in results)

    return wrapper


class _Context:
    """A context whose saved tensors are read once, as checkpointing demands."""

    def __init__(self, ctx: Any):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Last(torch.autograd.Function):
    """A gradient that depends on `sources` in a way that nobody wrote down."""

    @staticmethod
    def forward(_: Any, x: Tensor, *sources: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        refuse_second()


def refuse_second(*_: Any) -> None:
    raise RuntimeError("a second derivative of an operation of subquad that has only a first one")
