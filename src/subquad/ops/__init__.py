"""Shared computations: functions of (q, k, v) on [B, T, H, D], usable in anybody's model."""

from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.similarity import similarity_attention
from subquad.ops.sparse import sparse_attention
from subquad.ops.sparse_cache import SparseCache, SparseState

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
