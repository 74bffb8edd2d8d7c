"""Laws of torch.export and torch.compile: a program made from a mechanism gives the same numbers as eager."""

from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import tree_leaves

from subquad.mechanisms.base import Mixer
from tests.mechanisms.laws import DIM, Case, T, close, tokens


class Call(torch.nn.Module):
    """One way of calling a mechanism, as a module from tensors to tensors, for torch.export and torch.compile."""

    def __init__(self, mix: Mixer, form: str):
        super().__init__()
        self.mix, self.form = mix, form

    def forward(self, x: Tensor, other: Any = None) -> Any:
        if self.form == "plain":
            return self.mix(x)
        if self.form == "lengths":
            return self.mix(x, lengths=other)
        if self.form == "cross":
            return self.mix(x, context=other[0], context_lengths=other[1])
        if self.form == "prefill":
            return self.mix.prefill(x, lengths=other)
        if self.form == "continue":
            return self.mix.prefill(x, state=other)
        return self.mix.step(x[:, 0], other)

    def inputs(self, batch: int, size: int) -> tuple[Any, ...]:
        like = next(self.mix.buffers())
        x = tokens(batch, size, DIM, dtype=like.dtype)
        lengths = torch.tensor([size, *range(1, batch)])[:batch].clamp(max=size)
        if self.form == "plain":
            return (x,)
        if self.form in ("lengths", "prefill"):
            return x, lengths
        if self.form == "cross":
            context = tokens(batch, size // 2 + 3, DIM, seed=2, dtype=like.dtype)
            return x, (context, lengths.flip(0).clamp(max=context.shape[1]))
        with torch.no_grad():
            state = self.mix.init_state(batch, capacity=2 * T)
            return x, self.mix.prefill(tokens(batch, 6, DIM, seed=3, dtype=like.dtype), state=state)[1]


def forms(case: Case) -> list[str]:
    """The ways in which this case's module can be called."""
    traits = case.build().traits
    cross = ["cross"] if traits.cross else []
    return ["plain", "lengths", *cross, *(["prefill", "continue", "step"] if traits.state else [])]


def same_values(call: Call, program: torch.nn.Module, batch: int, size: int) -> None:
    got, want = (tree_leaves(run(*call.inputs(batch, size))) for run in (program, call))
    for a, b in zip(got, want, strict=True):
        close(a, b)


def same_gradients(call: Call, program: torch.nn.Module, batch: int, size: int, tolerance: float = 1e-7) -> None:
    """All outputs, and the gradients of x and of each parameter."""
    results = []
    for run in (program, call):
        x, *other = call.inputs(batch, size)
        x.requires_grad_()
        run.zero_grad()
        out = tree_leaves(run(x, *other))
        (out[0] * tokens(*out[0].shape, seed=9, dtype=out[0].dtype)).sum().backward()
        grads = [p.grad for _, p in sorted(run.named_parameters())]
        results.append([None if t is None else t.detach() for t in (*out, x.grad, *grads)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None), "a gradient is missing"
        if a is not None:
            close(a, b, tolerance)


def export(call: Call, inputs: tuple[Any, ...], **how: Any) -> torch.nn.Module:
    """The exported program. Without stack traces, and without a cache of fake tensors: it costs more than it saves."""
    with (
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        patch("torch.fx.config.do_not_emit_stack_traces", True),
    ):
        return torch.export.export(call, inputs, **how).module()


def export_keeps_numbers(case: Case, form: str, grad: bool = True, size: int = T, **how: Any) -> None:
    """A program exported for one batch and length gives eager's values, and its gradients if it needs gradients."""
    call = Call(case.build(), form)
    with torch.set_grad_enabled(grad):
        program = export(call, call.inputs(3, size), **how)
    if grad:
        same_gradients(call, program, 3, size)
    else:
        same_values(call, program, 3, size)
    with torch.no_grad():
        same_values(call, program, 3, size)


def export_serves_any_size(case: Case, form: str, **how: Any) -> None:
    """One program for any batch and any length, shorter or longer than the blocks, gives eager's values."""
    call = Call(case.build(), form)
    # named sizes, as users write them: export fails where a size turns out to be a constant or must fit a formula
    longest = (call.mix.traits.fixed_length and call.mix.options.max_length) or 4096
    batch, length, keys = (torch.export.Dim(name, max=longest) for name in ("batch", "length", "keys"))
    if form == "prefill":  # a prompt shorter than the stride of `compressed` gives a state of another shape
        length = torch.export.Dim.DYNAMIC
    row, both, context = {0: batch}, {0: batch, 1: length}, {0: batch, 1: keys}
    others: dict[str, Any] = {"plain": (), "lengths": (row,), "prefill": (row,), "cross": ((context, row),)}
    shapes = dict(zip(("x", "other"), (both, *others[form]), strict=False))
    program = export(call, call.inputs(3, T), dynamic_shapes=shapes, **how)
    same_gradients(call, program, 3, T)
    sizes = [(3, 10), (5, 16), (2, 40), (1, 46)]
    if form != "prefill":
        sizes += [(2, 2), (4, 3), (1, 7), (2, 8)]
    sizes += [(2, longest)] if call.mix.traits.fixed_length else [(2, 131), (2, 192)]
    with torch.no_grad():
        for rows, size in sizes:
            same_values(call, program, rows, size)


def compile_keeps_numbers(
    case: Case, form: str, backend: str, dynamic: bool | None = None, dtype: torch.dtype = torch.float64, size: int = T
) -> None:
    """A program compiled without graph breaks gives eager's values and gradients; `dynamic`: at several sizes."""
    torch.compiler.reset()
    call = Call(case.build(dtype), form)
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch, length in ((3, size), (2, 7), (5, 46)) if dynamic else ((3, size),):
        same_gradients(call, compiled, batch, length, 1e-7 if dtype == torch.float64 else 1e-3)
