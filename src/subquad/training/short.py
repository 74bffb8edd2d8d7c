"""A short run in memory, for a demonstration or a comparison: one update rule for all, and nothing is written."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def short_run(
    model: nn.Module, loss: Callable[[], Tensor], steps: int, *, lr: float, weight_decay: float
) -> Iterator[Tensor]:
    """AdamW with warm-up over a twentieth of the steps, cosine decay, gradients clipped to norm 1.

    `loss` draws its batch; that of each update comes back, detached, once the update is done.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.98))
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / warmup, 0.5 * (1 + math.cos(math.pi * n / steps)))
    )
    model.train()
    for _ in range(steps):
        value = loss()
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        yield value.detach()
