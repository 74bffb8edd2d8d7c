"""q, k and v side by side in one tensor, and their gradients side by side in another, so that none is copied."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops.impl import traced


def apart(qkv: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """[..., D] -> views [..., width], one for each width; their gradients are joined by `joined`."""
    if qkv.device.type != "cuda" or not qkv.requires_grad or not torch.is_grad_enabled() or traced():
        return qkv.split_with_sizes(widths, -1)
    parts: tuple[Tensor, ...] = Apart.apply(qkv, widths)
    return parts


def beside(*parts: Tensor) -> list[Tensor] | None:
    """Empty tensors of these shapes [B, T, H, ·] side by side, if these are; else None."""
    widths = [t.shape[2] * t.shape[3] for t in parts]
    if not _adjacent(parts, sum(widths)):
        return None
    whole = parts[0].new_empty((*parts[0].shape[:2], sum(widths)))
    return [piece.view(t.shape) for piece, t in zip(whole.split_with_sizes(widths, -1), parts, strict=True)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[B, T, width] each -> [B, T, D]: the tensor in which the parts lie side by side, else a copy."""
    width = sum(t.shape[-1] for t in parts)
    if parts[0].ndim != 3 or not _adjacent(parts, width):
        return torch.cat(list(parts), -1)
    batch, length, _ = parts[0].shape
    return parts[0].as_strided((batch, length, width), (length * width, width, 1))


def _adjacent(parts: Sequence[Tensor], width: int) -> bool:
    """Whether the parts [B, T, ...] fill rows of so many numbers, one after the other."""
    first = parts[0]
    rows, memory, place = (first.shape[1] * width, width), first.untyped_storage().data_ptr(), first.storage_offset()
    for t in parts:
        own, inside = t.stride(), 1
        for size, stride in zip(t.shape[:1:-1], own[:1:-1], strict=True):
            if stride != inside:
                return False
            inside *= size
        if own[:2] != rows or t.storage_offset() != place or t.dtype != first.dtype or t.shape[:2] != first.shape[:2]:
            return False
        if t.untyped_storage().data_ptr() != memory:
            return False
        place += inside
    return True


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:  # noqa: ARG004
        return qkv.split_with_sizes(widths, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        # a gradient that is differentiated itself must not be a view of one part
        return torch.cat(grads, -1) if torch.is_grad_enabled() else joined(grads), None
