"""Exact softmax over a pattern, at the cost of the pattern.

api.py          sparse_attention: checks its arguments, and computes heads with equal patterns together
patterns.py     which query may read which key: atoms, and their union by `|`
operator.py     the operator of torch, so that programs compile and export
torch_path.py   the plain torch path, over the dense tiles that tiles.py cuts a pattern into
triton_path.py  the GPU path, which launches the Triton kernels of kernels.py
cache.py        decoding token by token
reads.py        what a token reads of a cache, for the kernel of cache_triton.py
"""

from subquad.ops.sparse.api import sparse_attention
from subquad.ops.sparse.cache import SparseCache, SparseState
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary

__all__ = [
    "Block",
    "Dense",
    "Dilated",
    "Global",
    "Local",
    "Pattern",
    "Random",
    "SparseCache",
    "SparseState",
    "Strided",
    "Summary",
    "sparse_attention",
]
