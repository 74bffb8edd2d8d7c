"""Lengths of right-padded rows, and how to work with sizes and values that cannot be read at once."""

import torch
from torch import Tensor

from subquad.checks import check_heads, check_strided
from subquad.ops.impl import exporting


def check_lengths(lengths: Tensor | None, x: Tensor, name: str = "lengths") -> Tensor | None:
    """Check lengths of the rows of x [B, T, ...] and return them as int64 on its device; None stays None."""
    if lengths is None:
        return None
    if isinstance(lengths, Tensor) and lengths.is_meta and not x.is_meta:
        raise ValueError(f"{name} is on meta and has no values: accepted are lengths on {x.device}")
    _check(name, lengths, *x.shape[:2])
    return lengths.to(x.device, torch.int64)


def check_op_lengths(name: str, lengths: Tensor | None, rows: int, most: int, device: torch.device) -> None:
    """Check lengths that an op passes to kernels as they are."""
    if lengths is None:
        return
    if lengths.device != device:
        raise ValueError(f"{name} is on {lengths.device}, q on {device}: accepted is one device")
    _check(name, lengths, rows, most)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Tensor | None, key_lengths: Tensor | None
) -> None:
    """Refuse q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] and lengths that do not fit together."""
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    (B, T, H, _), S = q.shape, k.shape[1]
    if k.shape[::2] != (B, H) or v.shape[:3] != k.shape[:3]:
        shapes = f"v has shape {tuple(v.shape)}, k has shape {tuple(k.shape)}, q {tuple(q.shape)}"
        raise ValueError(f"{shapes}: accepted is the same batch and heads for all, the same length for k and v")
    if causal and T != S:
        raise ValueError(f"causal=True with {T} queries and {S} keys: accepted is as many keys as queries")
    if key_lengths is not None and (causal or lengths is not None):
        raise ValueError("key_lengths with causal=True or lengths: accepted is key_lengths alone, with causal=False")
    check_op_lengths("lengths", lengths, B, S, q.device)
    check_op_lengths("key_lengths", key_lengths, B, S, q.device)


def _check(name: str, lengths: Tensor, rows: int, most: int) -> None:
    """Refuse what is not `rows` integers from 0 to `most`; values are only checked on the CPU."""
    if not isinstance(lengths, Tensor) or lengths.shape != (rows,):
        raise ValueError(f"{name} has shape {shape_of(lengths)}: accepted is one integer a row, [{rows}]")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {lengths.dtype}: accepted are integers")
    check_strided(name, lengths)
    if readable(lengths):
        low, high = (int(n) for n in torch.aminmax(lengths.long()))
        if low < 0 or high > most:
            raise ValueError(f"{name} ranges from {low} to {high}: accepted is 0 to {most}")


def keep(lengths: Tensor | None, size: int) -> Tensor | None:
    """True where a right-padded row has a token: [B] -> [B, size]; None without lengths."""
    if lengths is None:
        return None
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def visible_keys(lengths: Tensor | None, size: int) -> Tensor | None:
    """True for the keys that a query may see: [B] -> [B, 1, 1, size]; None without lengths.

    An empty row sees its first key, because a softmax over no keys is NaN.
    """
    mask = None if lengths is None else keep(lengths.clamp(min=1), size)
    return None if mask is None else mask[:, None, None]


def zero_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x [B, T, ...] with zeros in the padding."""
    mask = keep(lengths, x.shape[1])
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.ndim - 2)), 0)


def readable(x: Tensor) -> bool:
    """Whether values can be read at once: reading from a GPU waits, and a program being compiled has no values."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def symbolic(*sizes: int) -> bool:
    """Whether a size is symbolic, as in an exported program: then no branch may depend on it."""
    strict = exporting() and torch.compiler.is_dynamo_compiling()  # shows symbols as plain integers
    return strict or any(isinstance(size, torch.SymInt) for size in sizes)


def padding(size: int, block: int) -> int:
    """How many tokens to add to make whole blocks.

    In an exported program, one block or no padding would be special cases, so there it makes at least three blocks.
    """
    return more_blocks(size, block, 3) * block - size if symbolic(size) else -size % block


def more_blocks(size: int, block: int, more: int) -> int:
    """⌈size / block⌉ + more - 1, for a symbolic size.

    It is written so that torch cannot turn it into a sum: torch then sees that it divides its product with block. Torch
    also sees that it is at least `more` for sizes of at least 2, which `Dim("length")` means.
    """
    return (size + more * block - 1) // block


def first(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """The first `size` entries along a dimension.

    In an exported program a slice of all entries is a special case, and the program would refuse some sizes.
    """
    if symbolic(size):
        return x.index_select(dim, torch.arange(size, device=x.device))
    return x.narrow(dim, 0, size)


def at_most(limit: int, size: int) -> int:
    """The smaller of the two; the limit if the size is symbolic."""
    return limit if symbolic(size) else min(limit, size)


def require(holds: Tensor, error: str) -> None:
    """Raise ValueError if `holds` is false; if its value cannot be read now, the device raises an error later."""
    if not readable(holds):
        torch._assert_async(holds, error)
    elif not holds:
        raise ValueError(error)


def shape_of(x: object) -> object:
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
