"""Exact softmax over a pattern, at the cost of the pattern: patterns.py says which query may read which key."""

from subquad.ops.sparse import patterns
from subquad.ops.sparse.api import sparse_attention
from subquad.ops.sparse.cache import SparseCache, SparseState
from subquad.ops.sparse.patterns import *  # noqa: F403

__all__ = ["SparseCache", "SparseState", "sparse_attention"]
__all__ += patterns.__all__
