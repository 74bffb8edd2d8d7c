"""Cross-entropy over targets, without padding and ignored ones."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import INTEGERS, check_count, check_plain, check_strided, refuse
from subquad.models.inputs import check_ids
from subquad.ops.cross_entropy import summed_cross_entropy
from subquad.ops.lengths import check_lengths, keep, shape_of
from subquad.ops.precision import autocasts, wide

Reduction = Literal["mean", "sum", "none"]
LARGE = 2**26  # logits from which a loss in pieces pays: 256 MiB in float32, of which plain torch holds several
PIECES = 8  # so that a piece still keeps a GPU busy


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


def head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lengths: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    pieces: int | None = None,
    name: str = "targets",
) -> Tensor:
    """`cross_entropy` of the logits x W^T + b; x [B, T, D], weight [V, D], bias [V].

    `pieces`: compute it for so many pieces of the tokens, one after the other, so that all logits never exist at once.
    None: `pieces_of` decides. With reduction="none" there is one piece.
    """
    if pieces is not None:
        check_count("pieces", pieces)
        if pieces > 1 and reduction == "none":
            refuse("pieces", pieces, 'None or 1 with reduction="none"')
    pieces = pieces_of(x, weight) if pieces is None else pieces
    if reduction == "none" or pieces == 1:
        logits = nn.functional.linear(x, weight, bias)
        return cross_entropy(logits, targets, lengths, ignore_index, reduction, name)
    ids, counted = check_targets(x, weight.shape[0], targets, lengths, ignore_index, reduction, name)
    flat = x.flatten(0, -2), weight, bias, ids.flatten(), counted.flatten()
    return reduced(summed_cross_entropy(*flat, pieces), counted, reduction)


def pieces_of(x: Tensor, weight: Tensor) -> int:
    """How many pieces pay for these tokens and vocabulary: 8 from 2^26 logits on, otherwise 1.

    One in float16, whose gradients are too small until the loss is scaled, after the pieces have made theirs.
    """
    kind = torch.get_autocast_dtype(x.device.type) if autocasts(x.device) else x.dtype
    tokens = x.shape[:-1].numel()
    return PIECES if tokens * weight.shape[0] >= LARGE and kind != torch.float16 else 1


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
    ids, counted = check_targets(outputs, values, targets, lengths, ignore_index, reduction, name)
    losses = losses_of(ids).masked_fill(~counted, 0)
    return losses if reduction == "none" else reduced(losses.sum(), counted, reduction)


def reduced(total: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The sum or the mean over the targets that are counted, from their sum."""
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


def check_targets(
    outputs: Tensor,
    values: int,
    targets: Tensor,
    lengths: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    name: str,
) -> tuple[Tensor, Tensor]:
    """(checked targets with 0 for those that do not count, whether each counts)."""
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
    ids = targets.long().masked_fill(~counted, 0)
    check_ids(name, ids, values)
    return ids, counted
