"""The Triton path of the rules that multiply the state by a matrix. Nothing here imports triton or waits for a GPU."""

from torch import Tensor

from subquad.ops.linear.spec import RuleInputs

Outputs = tuple[Tensor, Tensor, Tensor | None]  # o, the last state, what is kept for the gradients


def unsupported(x: RuleInputs) -> str | None:  # noqa: ARG001
    """What the kernels cannot do with this call."""
    return "delta rules and gates for each channel"


def outputs(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    """What `forward` fills."""
    raise NotImplementedError


def forward(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    raise NotImplementedError


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, done: Outputs) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, beta and s0."""
    raise NotImplementedError
