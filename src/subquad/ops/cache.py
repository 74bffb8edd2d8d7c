"""A cache of rows that grow at their own pace: [B, C, ...] with `position` [B] entries in use."""

import torch
from torch import Tensor


def with_room(cache: Tensor, position: Tensor, more: int) -> Tensor:
    """The cache, with slots for `more` entries in every row; it at least doubles when it grows, so that growth is rare.

    A compiled or captured program cannot read `position`: there the caller has preallocated what the program will use.
    """
    if torch.compiler.is_compiling() or (cache.is_cuda and torch.cuda.is_current_stream_capturing()):
        return cache
    size = cache.shape[1]
    needed = int(position.max()) + more
    if needed <= size:
        return cache
    grown = cache.new_zeros(cache.shape[0], max(needed, 2 * size) - size, *cache.shape[2:])
    return torch.cat((cache, grown), dim=1)


def append(cache: Tensor, new: Tensor, position: Tensor, inplace: bool = False) -> Tensor:
    """Write new [B, T, ...] behind each row's `position` entries; the old cache is left alone unless `inplace`.

    Padding of a ragged `new` is written as well: it lies beyond the row's new position, so nothing reads it and the
    next append covers it.
    """
    cache = with_room(cache, position, new.shape[1])
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]  # [B, 1]
    slots = position[:, None] + torch.arange(new.shape[1], device=cache.device)  # [B, T]
    write = cache.index_put_ if inplace else cache.index_put
    return write((rows, slots), new.to(cache.dtype))
