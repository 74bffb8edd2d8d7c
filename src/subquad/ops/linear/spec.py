"""A call of linear attention: its tensors, and what is fixed about it."""

from typing import Any, NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, S, H, K]
    v: Tensor  # [B, S, H, V]
    log_gate: Tensor | None = None  # [B, T, H]
    lengths: Tensor | None = None  # [B] right padding of keys, and of queries where there are as many
    cu_seqlens: Tensor | None = None  # [N+1]: B is 1 and holds N sequences
    s0: Tensor | None = None  # [B or N, H, K, V] the sums before the first token, contiguous, at least float32
    z0: Tensor | None = None  # [B or N, H, K]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


class Spec(NamedTuple):
    """What is known before any tensor is seen. Operators take its fields as arguments: torch passes plain types."""

    causal: bool = True
    feature_map: str = "elu+1"  # a fused one; "identity" where the caller's map was applied before
    signed: bool = False  # whether a denominator can be negative
    normalize: bool = True
    eps: float = 1e-6


class RuleInputs(NamedTuple):
    """A call of a rule that multiplies the state by a matrix (rules.py). Features are made before."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    log_gate: Tensor | None = None  # [B, T, H] or [B, T, H, K]
    beta: Tensor | None = None  # [B, T, H]
    lengths: Tensor | None = None  # [B]
    cu_seqlens: Tensor | None = None  # [N+1]: B is 1 and holds N sequences
    s0: Tensor | None = None  # [B or N, H, K, V] the state before the first token, contiguous, at least float32

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def arguments(fields: Any) -> str:
    """The tensors of such a tuple, as torch declares an operator's arguments."""
    return ", ".join(f"Tensor{'?' if name in fields._field_defaults else ''} {name}" for name in fields._fields)


# q, k, v and log_gate are also those of a single token, without T
INPUTS = arguments(Inputs)
SPEC = ", ".join(f"{kind.__name__} {name}" for name, kind in Spec.__annotations__.items())
