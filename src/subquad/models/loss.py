"""Cross-entropy over targets, without padding and ignored ones."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import INTEGERS, check_plain, check_strided
from subquad.models.inputs import check_ids
from subquad.ops.lengths import check_lengths, keep, shape_of
from subquad.ops.precision import wide

Reduction = Literal["mean", "sum", "none"]


def shift(
    tokens: Tensor, lengths: Tensor | None, name: str = "tokens", lengths_name: str = "lengths"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(inputs, targets, their lengths) of predicting each token from those before it."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"{name} has shape {shape_of(tokens)}: accepted is [B, T >= 2], to predict the next token")
    check_strided(name, tokens)
    lengths = check_lengths(lengths, tokens, lengths_name)
    return tokens[:, :-1], tokens[:, 1:], None if lengths is None else (lengths - 1).clamp(min=0)


def shift_part(tokens: Tensor, lengths: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """`shift` of a rank's part of a split sequence: the target of its last token is the first of the next rank."""
    check_strided("tokens", tokens)
    lengths = check_lengths(lengths, tokens)
    size = tokens.shape[1]
    with ranks.laid_out(size):
        cut = ranks.layout(size)
        assert cut is not None
        if cut.total < 2:
            raise ValueError(
                f"tokens has T={cut.total} over all ranks: accepted is at least 2, to predict the next one"
            )
        there = keep(lengths, size)
        real = tokens.new_ones(tokens.shape) if there is None else there.to(tokens.dtype)
        both = ranks.halo(torch.stack((tokens, real), -1), 0, 1)[:, 1:]
    targets = both[..., 0].masked_fill(both[..., 1] == 0, ignore_index)
    last = size - 1 if cut.rank == len(cut.sizes) - 1 and size > 1 else size  # nothing follows the last token of all
    return tokens[:, :last], targets[:, :last], None if lengths is None else lengths.clamp(max=last)


def mean_over_ranks(total: Tensor, targets: Tensor, lengths: Tensor | None, ignore_index: int) -> Tensor:
    """The mean over the targets of all ranks, given the sum over those of this one."""
    counted = targets != ignore_index
    mask = keep(lengths, targets.shape[1])
    count = (counted if mask is None else counted & mask).sum()
    return ranks.result(total) / ranks.result(count).clamp(min=1)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    lengths: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    name: str = "targets",
) -> Tensor:
    """float32 cross-entropy of logits [B, T, V] or [B, V], ignoring `ignore_index` and targets beyond `lengths`.

    "mean" over the other targets (0 if there are none), "sum", or "none": [B, T] with zeros for ignored targets.
    """
    exact = wide(logits)

    def losses(ids: Tensor) -> Tensor:
        flat = nn.functional.cross_entropy(exact.flatten(0, -2), ids.flatten(), reduction="none")
        return flat.view(ids.shape)

    return over_targets(losses, logits, logits.shape[-1], targets, lengths, ignore_index, reduction, name)


def over_targets(
    losses_of: Callable[[Tensor], Tensor],
    outputs: Tensor,
    values: int,
    targets: Tensor,
    lengths: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    name: str = "targets",
) -> Tensor:
    """Reduce any loss of integer targets from 0 to `values`, exclusive; one target for each vector of outputs."""
    shape = outputs.shape[:-1]
    check_plain("reduction", reduction, Reduction)
    if not isinstance(targets, Tensor) or targets.shape != shape:
        raise ValueError(f"{name} has shape {shape_of(targets)}: accepted is {list(shape)}")
    if targets.dtype not in INTEGERS:
        raise ValueError(f"{name} has dtype {targets.dtype}: accepted are integers")
    check_strided(name, targets)
    if targets.device != outputs.device:
        raise ValueError(f"{name} is on {targets.device}: accepted is {outputs.device}, where the outputs are")
    counted = targets != ignore_index
    mask = None if lengths is None else keep(check_lengths(lengths, targets), targets.shape[1])
    if mask is not None:
        counted = counted & mask
    safe = targets.long().masked_fill(~counted, 0)
    check_ids(name, safe, values)
    losses = losses_of(safe).masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum().clamp(min=1)
