"""Shared computations: functions of (q, k, v) on [B, T, H, D], usable in anybody's model."""

from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.similarity import similarity_attention
from subquad.ops.sparse import (
    Block,
    Dense,
    Dilated,
    Global,
    Local,
    Pattern,
    Random,
    SparseCache,
    SparseState,
    Strided,
    Summary,
    sparse_attention,
)

__all__ = [
    "Block",
    "Dense",
    "Dilated",
    "Global",
    "LinearState",
    "Local",
    "Pattern",
    "Random",
    "SparseCache",
    "SparseState",
    "Strided",
    "Summary",
    "linear_attention",
    "linear_attention_step",
    "similarity_attention",
    "sparse_attention",
]
