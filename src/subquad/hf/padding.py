"""transformers pads on either side and says so by a mask; our models take rows that begin with their tokens.

The only place that turns one into the other. A mask may have its zeros anywhere: tokens keep their order, and the
positions of a row count its tokens only, as transformers counts them too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import INTEGERS, check_strided, shown


class Layout(NamedTuple):
    """Where the tokens of each row are among the caller's columns."""

    order: Tensor  # [B, T]: the columns of the tokens, in order, then those of the padding
    rank: Tensor  # [B, T]: for each column, which token was the last one there or before; -1 if there was none
    lengths: Tensor  # [B]


def read_mask(mask: Tensor, rows: int, columns: int) -> Layout | None:
    """The layout of a mask [B, T] of ones and zeros; None if nothing is padding."""
    if not isinstance(mask, Tensor) or mask.shape != (rows, columns) or mask.dtype not in (*INTEGERS, torch.bool):
        why = "a 4-D mask, or one of floats, could hide tokens from some queries only, which our models cannot do"
        raise ValueError(f"attention_mask is {shown(mask)}: accepted are ones and zeros, [{rows}, {columns}]; {why}")
    check_strided("attention_mask", mask)
    low, high = torch.stack(torch.aminmax(mask.long())).tolist()  # the one place that waits for a GPU
    if low < 0 or high > 1:
        raise ValueError(
            f"attention_mask ranges from {low} to {high}: accepted are ones and zeros; several sequences packed into a "
            "row would read each other, so give each its own row"
        )
    if low == 1:
        return None
    real = mask.bool()
    rank = real.cumsum(1) - 1
    return Layout(torch.argsort(~real, dim=1, stable=True), rank, rank[:, -1] + 1)


def tokens_first(x: Tensor, layout: Layout | None) -> Tensor:
    """x [B, T, ...] in the caller's columns -> each row's tokens first, its padding behind them."""
    return x if layout is None else _take(x, layout.order)


def to_columns(x: Tensor, layout: Layout | None, before: Tensor | None = None) -> Tensor:
    """The other way. A padded column repeats the token before it, so that the last column always holds the last token.

    Columns before a row's first token hold `before` [B, ...], what an earlier part of the row ended with, or zeros.
    """
    if layout is None:
        return x
    first = (layout.rank < 0).view(*layout.rank.shape, *[1] * (x.ndim - 2))
    y = _take(x, layout.rank.clamp(min=0))
    return y.masked_fill(first, 0) if before is None else torch.where(first, before[:, None].to(y.dtype), y)


def last_padding(layout: Layout | None) -> Tensor | int:
    """The columns up to the last one that is padding in any row."""
    if layout is None:
        return 0
    padding = ~real_columns(layout)
    return (padding.any(0) * torch.arange(1, padding.shape[1] + 1, device=padding.device)).max()


def real_columns(layout: Layout) -> Tensor:
    """Whether each column [B, T] holds a token."""
    return layout.rank.diff(dim=1, prepend=layout.rank.new_full((len(layout.rank), 1), -1)) > 0


def check_positions(positions: Tensor | None, before: Tensor | None, rows: int, layout: Layout | int) -> None:
    """Refuse positions [B or 1, T] other than those that the models count themselves: a row's tokens, from `before` on.

    `layout`: of the columns, or their number if nothing is padding.
    """
    if positions is None:
        return
    if isinstance(layout, int):
        wanted, real = torch.arange(layout, device=positions.device).expand(rows, -1), None
    else:
        wanted, real = layout.rank.to(positions.device), real_columns(layout).to(positions.device)
    wanted = wanted if before is None else wanted + before.to(positions.device)[:, None]
    fits = positions.ndim == 2 and positions.shape[0] in (1, rows) and positions.shape[1] == wanted.shape[1]
    if fits:
        same = positions.expand_as(wanted) == wanted
        fits = bool((same if real is None else same | ~real).all())
    if not fits:
        raise ValueError(
            f"position_ids is {shown(positions)} and does not count each row's tokens one by one: our models count "
            "themselves, so leave it out; sequences packed into one row need a row each"
        )


def _take(x: Tensor, at: Tensor) -> Tensor:
    at = at.view(*at.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, at)
