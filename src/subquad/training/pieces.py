"""Operations on all tensors of a small model at once, in a CUDA graph.

A program of torch's such operations works through 65,536 numbers, so that of a small model a few programs run, and the
GPU waits for the one with the largest matrix. In smaller views many share the work. Making them takes longer than they
save, so that it pays only where it is recorded once.
"""

import torch
from torch import Tensor

from subquad.graphs import capturing

Tensors = tuple[Tensor, ...] | list[Tensor]

SIZE = 8192  # numbers in a view
MOST = 512  # views; larger models keep a GPU busy by themselves


def in_pieces(*lists: Tensors) -> tuple[Tensors, ...]:
    """Lists of tensors, with equal shapes from list to list, as lists of views; as they are where that is no gain."""
    first = lists[0]
    if not first or not capturing(first[0]) or len(first) > MOST or sum(t.numel() for t in first) > SIZE * MOST:
        return lists
    if not all(type(t) is Tensor and t.is_contiguous() for some in lists for t in some):
        return lists
    return tuple([piece for t in some for piece in torch.split(t.view(-1), SIZE)] for some in lists)


def pieces_of(t: Tensor) -> int:
    """How many views `in_pieces` makes of a tensor."""
    return max(1, -(-t.numel() // SIZE))
