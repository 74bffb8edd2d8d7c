"""The torch path of the rules that multiply the state by a matrix."""

import itertools
from typing import Any

import torch
from torch import Tensor

from subquad.ops.linear.chunked import divisor_of, saturate
from subquad.ops.linear.rules import rule_step
from subquad.ops.linear.spec import RuleInputs
from subquad.ops.precision import uncast, wide_type

Outputs = tuple[Tensor, Tensor, Tensor]  # o, the last state, the states between segments


def outputs(x: RuleInputs, wide: bool, save: bool) -> Outputs:  # noqa: ARG001 (the gradients need all of them)
    """What `forward` fills."""
    (batch, length, heads, width), dtype = x.v.shape, wide_type(x.v)
    return (
        x.v.new_empty(batch, length, heads, width, dtype=dtype if wide else x.v.dtype),
        x.v.new_empty(x.sequences, heads, x.k.shape[-1], width, dtype=dtype),
        x.v.new_empty((0,), dtype=dtype),
    )


def forward(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    o, s, kept = outputs(x, wide, save)
    with uncast(x.q), torch.no_grad():
        found, last = _loop(x)
        o.copy_(found)
        s.copy_(last)
    return o, s, kept


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, done: Outputs) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    """The gradients of q, k, v, log_gate, beta and s0."""
    with uncast(x.q), torch.enable_grad():
        given: list[Any] = [
            None if t is None else t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.log_gate, x.beta, x.s0)
        ]
        again = RuleInputs(*given[:5], lengths=x.lengths, cu_seqlens=x.cu_seqlens, s0=given[5])  # type: ignore[misc]
        o, s = _loop(again)
        leaves = [t for t in given if t is not None]
        loss = (o * do).sum() if ds is None else (o * do).sum() + (s * ds).sum()
        grads = iter(torch.autograd.grad(loss, leaves, materialize_grads=True))
    return tuple(None if t is None else next(grads) for t in given)


def _loop(x: RuleInputs) -> tuple[Tensor, Tensor]:
    dtype = wide_type(x.v)
    q, k, v = (t.to(dtype) for t in x[:3])
    _, length, heads, width = v.shape
    s = x.s0 if x.s0 is not None else v.new_zeros(x.sequences, heads, k.shape[-1], width)
    ends = None if x.cu_seqlens is None else x.cu_seqlens.tolist()
    o = []
    if ends is not None:
        states = []
        for n, (a, b) in enumerate(itertools.pairwise(ends)):
            part: list[Any] = [None if t is None else t[:, a:b] for t in (q, k, v, x.log_gate, x.beta)]
            y, state = _loop(RuleInputs(*part, s0=s[n : n + 1]))  # type: ignore[misc]
            o.append(y)
            states.append(state)
        return torch.cat(o, 1), torch.cat(states)
    for t in range(length):
        g, beta = (None if y is None else y[:, t] for y in (x.log_gate, x.beta))
        y, new = rule_step(q[:, t], k[:, t], v[:, t], g, beta, s)
        if x.lengths is not None:
            inside = (t < x.lengths)[:, None, None]
            y, new = torch.where(inside, y, 0.0), torch.where(inside[..., None], new, s)
        s = new
        o.append(y)
    return (torch.stack(o, 1) if o else v[:, :0]), s


def step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor,
    normalize: bool, signed: bool, eps: float, inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token: q, k [B, H, K], v [B, H, V] -> o [B, H, V], s and z; z changes only if `normalize`."""
    dtype, (q, k, x) = v.dtype, (t.to(s.dtype) for t in (q, k, v))
    with uncast(q):
        o, new_s = rule_step(q, k, x, log_gate, beta, s)
        if normalize:
            d, new_z = rule_step(q, k, torch.ones_like(x[..., :1]), log_gate, beta, z[..., None])
            o, new_z = o / divisor_of(d, signed, eps), new_z[..., 0]
            z = z.copy_(new_z) if inplace else new_z
    return saturate(o, dtype).to(dtype), s.copy_(new_s) if inplace else new_s, z
