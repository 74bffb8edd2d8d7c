"""The Triton path of the rules that multiply the state by a matrix. Nothing here imports triton or waits for a GPU."""

import torch
from torch import Tensor

from subquad.ops.linear.spec import RuleInputs

CHUNK = 64

Outputs = tuple[Tensor, Tensor, None]  # o, the last state, and what is kept for the gradients: nothing


def unsupported(x: RuleInputs) -> str | None:
    """What the kernels cannot do with this call."""
    if x.q.dtype == torch.float64:
        return "float64"
    if max(x.q.shape[-1], x.v.shape[-1]) > 256:
        return f"{x.q.shape[-1]} features and values of width {x.v.shape[-1]}, where at most 256 fit"
    if x.beta is not None and x.log_gate is not None and x.log_gate.dim() == 4:
        return "a delta rule with a gate for each channel"
    return None


def outputs(x: RuleInputs, wide: bool, save: bool) -> Outputs:  # noqa: ARG001
    """What `forward` fills; in a pack, tokens after the last sequence belong to nobody and stay zero."""
    make = x.v.new_empty if x.cu_seqlens is None else x.v.new_zeros
    o = make(x.v.shape, dtype=torch.float32 if wide else x.v.dtype)
    shape = x.sequences, x.v.shape[2], x.k.shape[3], x.v.shape[3]
    return o, x.v.new_empty(shape, dtype=torch.float32), None


def forward(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    from subquad.ops.linear import rule_launches_triton

    o, s, _ = outputs(x, wide, save)
    rule_launches_triton.forward(x, o, s)
    return o, s, None


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, done: Outputs) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    """The gradients of q, k, v, log_gate, beta and s0."""
    from subquad.ops.linear import rule_launches_triton

    return rule_launches_triton.backward(do, ds, x)
