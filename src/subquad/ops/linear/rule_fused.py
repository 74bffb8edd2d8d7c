"""The Triton path of the rules that multiply the state by a matrix. Nothing here imports triton or waits for a GPU."""

import torch
from torch import Tensor

from subquad.ops.impl import too_large
from subquad.ops.linear.spec import RuleInputs

CHUNK = 64
WIDEST = 131072  # bytes of shared memory that heads of 256 take in float32

Outputs = tuple[Tensor, Tensor, Tensor | None]  # o, the last state, the inverse T of each chunk for a delta rule


def unsupported(x: RuleInputs) -> str | None:
    """What the kernels cannot do with this call."""
    if x.q.dtype == torch.float64:
        return "float64"
    if max(x.q.shape[-1], x.v.shape[-1]) > 256:
        return f"{x.q.shape[-1]} features and values of width {x.v.shape[-1]}, where at most 256 fit"
    if x.q.dtype != torch.bfloat16 and x.q.shape[-1] > 128 and (reason := too_large(x.q, WIDEST)):
        return reason
    if x.beta is not None and x.log_gate is not None and x.log_gate.dim() == 4:
        return "a delta rule with a gate for each channel"
    return None


def outputs(x: RuleInputs, wide: bool, save: bool) -> Outputs:  # noqa: ARG001 (W and U are made of the inverses)
    """What `forward` fills; in a pack, outputs after the last sequence stay zero."""
    make = x.v.new_empty if x.cu_seqlens is None else x.v.new_zeros
    o = make(x.v.shape, dtype=torch.float32 if wide else x.v.dtype)
    shape = x.sequences, x.v.shape[2], x.k.shape[3], x.v.shape[3]
    dtype = torch.bfloat16 if x.q.dtype is torch.bfloat16 else torch.float32
    inverse = None if x.beta is None else x.q.new_empty((*x.q.shape[:3], CHUNK), dtype=dtype)
    return o, x.v.new_empty(shape, dtype=torch.float32), inverse


def forward(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    from subquad.ops.linear import rule_launches_triton

    o, s, inverse = outputs(x, wide, save)
    rule_launches_triton.forward(x, o, s, inverse)
    return o, s, inverse if save else None


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, done: Outputs) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, beta and s0."""
    from subquad.ops.linear import rule_launches_triton

    return rule_launches_triton.backward(do, ds, x, None if x.beta is None else done[2])
