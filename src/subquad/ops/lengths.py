"""Lengths of right-padded rows, and what may be asked of tensors without waiting for a GPU."""

import torch
from torch import Tensor

from subquad.checks import check_strided


def check_lengths(lengths: Tensor | None, x: Tensor, name: str = "lengths") -> Tensor | None:
    """Lengths of the rows of x [B, T, ...] as int64 on its device, or None; values are looked at on the CPU."""
    if lengths is None:
        return None
    batch, size = x.shape[:2]
    if not isinstance(lengths, Tensor) or lengths.shape != (batch,):
        raise ValueError(f"{name} has shape {shape_of(lengths)}: accepted is one integer a row, [{batch}]")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {lengths.dtype}: accepted are integers")
    if lengths.device.type == "meta" and x.device.type != "meta":
        raise ValueError(f"{name} is on meta and has no values: accepted are lengths on {x.device}")
    check_strided(name, lengths)
    if readable(lengths):
        low, high = (int(v) for v in torch.aminmax(lengths.long()))
        if low < 0 or high > size:
            raise ValueError(f"{name} ranges from {low} to {high}: accepted is 0 to T={size}")
    return lengths.to(x.device, torch.int64)


def check_op_lengths(name: str, lengths: Tensor, rows: int, most: int, device: torch.device) -> None:
    """Refuse lengths that an op could not hand to a kernel as they are."""
    if lengths.shape != (rows,) or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(
            f"{name} is {lengths.dtype} of shape {tuple(lengths.shape)}: accepted are integers of shape [B] = ({rows},)"
        )
    if lengths.device != device:
        raise ValueError(f"{name} is on {lengths.device}, q on {device}: accepted is one device")
    check_strided(name, lengths)
    if readable(lengths) and bool(((lengths < 0) | (lengths > most)).any()):
        raise ValueError(f"{name}={lengths.tolist()}: accepted are lengths from 0 to {most}")


def keep(lengths: Tensor | None, size: int) -> Tensor | None:
    """True where a right-padded row has a token: [B] -> [B, size]; None if no row is padded."""
    if lengths is None:
        return None
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def visible_keys(lengths: Tensor | None, size: int) -> Tensor | None:
    """True for the keys that a query may see: [B] -> [B, 1, 1, size]; None if no row is padded.

    A row without keys sees one, which is zero, so that no softmax is over nothing.
    """
    mask = None if lengths is None else keep(lengths.clamp(min=1), size)
    return None if mask is None else mask[:, None, None]


def zero_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x [B, T, ...] with zeros from each row's length on."""
    mask = keep(lengths, x.shape[1])
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.ndim - 2)), 0)


def readable(x: Tensor) -> bool:
    """Whether values may be looked at: a GPU would have to be waited for, a compiled program has none yet."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def symbolic(*sizes: int) -> bool:
    """Whether a size stands for any number: an exported program serves them all, so no branch may ask which it is."""
    strict = torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()  # hides which sizes are symbols
    return strict or any(isinstance(size, torch.SymInt) for size in sizes)


def padding(size: int, block: int) -> int:
    """How many more tokens make whole blocks.

    A program for any size has special cases for one block, and for no padding: there are always some and three of them.
    """
    return more_blocks(size, block, 3) * block - size if symbolic(size) else -size % block


def more_blocks(size: int, block: int, more: int) -> int:
    """⌈size / block⌉ + more - 1, for a size that stands for any number.

    In a form that torch cannot write as a sum: only then does it see that this number divides its product with block.
    That it is no less than `more` torch sees for sizes from 2 on, which is what `Dim("length")` means; with a larger
    `min=` it asks for `Dim.AUTO`.
    """
    return (size + more * block - 1) // block


def first(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """The first `size` of at least as many along a dimension.

    A slice would have special cases where that is all of them, and a program for any size then refuses some sizes.
    """
    if symbolic(size):
        return x.index_select(dim, torch.arange(size, device=x.device))
    return x.narrow(dim, 0, size)


def at_most(limit: int, size: int) -> int:
    """The smaller of the two; the limit, where the size stands for any number."""
    return limit if symbolic(size) else min(limit, size)


def require(holds: Tensor, error: str) -> None:
    """ValueError unless it holds; where the value cannot be read without waiting, the device itself fails."""
    if not readable(holds):
        torch._assert_async(holds, error)
    elif not holds:
        raise ValueError(error)


def shape_of(x: object) -> object:
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
