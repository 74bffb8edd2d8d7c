"""Shared computations: functions of (q, k, v) on [B, T, H, D], usable in anybody's model."""

from subquad.ops import sparse
from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.similarity import similarity_attention
from subquad.ops.sparse import *  # noqa: F403

__all__ = ["LinearState", "linear_attention", "linear_attention_step", "similarity_attention"]
__all__ += sparse.__all__
