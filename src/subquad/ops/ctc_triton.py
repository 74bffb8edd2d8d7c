"""The kernel of `ctc_loss`: a program goes through the frames of one row forwards, then backwards.

Legend: T frames, N labels and the blank before them, W the next power of two; at place j, j labels are done:
    blank[j]  log-probability of all alignments so far that end in a blank after label j
    label[j]  the same for those that end in label j; nothing for j = 0
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops import ctc
from subquad.ops.launch import Plan, launch

PLACES = 256  # places of a warp: with more, a gather within the warp needs more and more shuffles
NEVER = tl.constexpr(ctc.NEVER)


@triton.jit
def either(a, b):
    """log(exp a + exp b); NaN if one of them is NaN."""
    most = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return most + tl.log(1.0 + tl.exp(tl.minimum(a, b) - most))


@triton.jit
def both_ways(logp, symbols, lengths, target_lengths, loss, share, T, N: tl.constexpr, W: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    frames, labels = tl.minimum(tl.load(lengths + b), T), tl.minimum(tl.load(target_lengths + b), N - 1)
    j = tl.arange(0, W)
    before, after = tl.maximum(j - 1, 0), tl.minimum(j + 1, W - 1)
    label_there = (j > 0) & (j <= labels)
    own = tl.load(symbols + b * N + j, mask=j < N, other=0)
    # a label may directly follow another, unless it is the same
    from_label = label_there & (j > 1) & (own != tl.gather(own, before, 0))
    to_label = tl.gather(from_label.to(tl.int32), after, 0) > 0
    to_label = to_label & (j < labels)
    logp += b * T * N
    share += b * T * N

    silent = tl.load(logp)
    spoken = tl.load(logp + j, mask=label_there, other=0.0)
    blank = tl.where(j == 0, silent, NEVER)
    label = tl.where(label_there & (j == 1), spoken, NEVER)
    tl.store(share + j, label, mask=(j < N) & (frames > 0))
    for t in range(1, frames):
        silent = tl.load(logp + t * N)
        spoken = tl.load(logp + t * N + j, mask=label_there, other=0.0)
        any = either(blank, label)
        came = tl.where(from_label, tl.gather(any, before, 0), tl.gather(blank, before, 0))
        label = tl.where(label_there, either(label, came) + spoken, NEVER)
        blank = tl.where(j <= labels, any + silent, NEVER)
        tl.store(share + t * N + j, label, mask=j < N)
    total = tl.sum(tl.where(j == labels, either(blank, label), 0.0), 0)
    fits = (frames > 0) & ~(total <= NEVER / 2)  # NaN stays NaN
    tl.store(loss + b, tl.where(fits, -total, 0.0))

    # backwards: the log-probability of all that can follow a frame, from each place
    tl.debug_barrier()
    blank = tl.where(j == labels, 0.0, NEVER)
    label = tl.where(label_there & (j == labels), 0.0, NEVER)
    for back in range(frames):
        t = frames - 1 - back
        at = share + t * N + j
        part = tl.exp(tl.load(at, mask=j < N, other=NEVER) + label - total)
        part = tl.where(label_there & fits, part, 0.0)
        rest = tl.where(fits, 1.0 - tl.sum(part, 0), 0.0)
        tl.store(at, tl.where(j == 0, rest, part), mask=j < N)
        silent = tl.load(logp + t * N)
        spoken = tl.load(logp + t * N + j, mask=label_there, other=0.0)
        blank += silent
        label = tl.where(label_there, label + spoken, NEVER)
        next_label = tl.where(j < labels, tl.gather(label, after, 0), NEVER)
        stay = either(label, blank)
        label = tl.where(label_there, tl.where(to_label, either(stay, next_label), stay), NEVER)
        blank = either(blank, next_label)


def warps(width: int) -> int:
    return max(1, width // PLACES)


def alignments(logp: Tensor, symbols: Tensor, lengths: Tensor, target_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [B], and for each frame the share of alignments in the blank (0) or in label j: [B, T, N].

    logp [B, T, N] holds the log-probabilities of the symbols [B, N], the blank first.
    """
    rows, frames, places = logp.shape
    logp, symbols, lengths, target_lengths = (x.contiguous() for x in (logp, symbols, lengths, target_lengths))
    loss, share = logp.new_empty(rows), torch.zeros_like(logp)
    width = triton.next_power_of_2(places)
    plan = Plan((rows,), (frames,), {"N": places, "W": width}, warps=warps(width))
    launch(both_ways, (logp, symbols, lengths, target_lengths, loss, share), plan)
    return loss, share
