"""Connectionist temporal classification: -log of the probability of all alignments of labels to frames (Graves 2006).

A frame says a label or nothing (the blank, symbol 0). Repeated labels count as one unless a blank is between them.
torch's own loss copies the lengths from the GPU, so it cannot be captured in a CUDA graph; this one can.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ops.impl import Impl, choose
from subquad.ops.precision import wide

MOST = 2047  # labels in a row of the kernel: it then needs eight warps, which always fit into the registers
NEVER = -1e30  # used instead of -inf, because -inf - -inf is NaN


def ctc_loss(
    logits: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Losses [B] of logits [B, T, symbols] for targets [B, L]; zero, without a gradient, if the labels do not fit.

    Only each row's first `lengths` [B] frames and `target_lengths` [B] labels count.
    """
    scores = wide(logits).log_softmax(-1)
    if choose(impl, "ctc_loss", scores, _unsupported(scores, targets)) == "torch":
        return F.ctc_loss(
            scores.transpose(0, 1), targets, lengths, target_lengths, reduction="none", zero_infinity=True
        )
    symbols = F.pad(targets.clamp(min=0), (1, 0))  # the blank, then the labels
    logp = scores.gather(-1, symbols[:, None].expand(-1, scores.shape[1], -1)).clamp(min=NEVER)
    loss: Tensor = _Ctc.apply(logp, symbols, lengths, target_lengths)
    return loss


def _unsupported(scores: Tensor, targets: Tensor) -> str | None:
    if scores.dtype != torch.float32:
        return f"it computes float32, not {scores.dtype}"
    if targets.shape[-1] > MOST:
        return f"{targets.shape[-1]} labels: at most {MOST} are accepted"
    return "no elements" if scores.numel() == 0 else None


class _Ctc(torch.autograd.Function):
    """The gradient for a log-probability is minus the share of alignments that use it."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, symbols: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        from subquad.ops import ctc_triton

        loss, share = ctc_triton.alignments(logp, symbols, lengths, target_lengths)
        ctx.save_for_backward(share)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (share,) = ctx.saved_tensors
        return -grad[:, None, None] * share, None, None, None
