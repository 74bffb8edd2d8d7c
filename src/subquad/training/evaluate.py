"""Evaluation over a whole split."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from subquad.training.distributed import Ranks
from subquad.training.feed import in_order
from subquad.training.precision import Precision
from subquad.training.signals import Signals
from subquad.training.task import Batch, Loss, Source, Sums, Task


class Wired(nn.Module):
    """A task's loss and measures as the forward of one module, which DDP, FSDP and torch.compile can wrap."""

    def __init__(self, task: Task, model: nn.Module, ranks: Ranks | None = None):
        super().__init__()
        self.task, self.model, self.ranks = task, model, ranks

    def forward(self, batch: Batch, measure: bool = False) -> Loss | Sums:
        with nullcontext() if self.ranks is None else self.ranks.sharing():
            if not measure:
                return self.task.loss(self.model, batch)
            if self.task.decodes and self.ranks is not None:
                self.ranks.gather(self)
            return self.task.measure(self.model, batch)


@torch.no_grad()
def evaluate(
    wired: Wired,
    source: Source,
    ranks: Ranks,
    precision: Precision,
    batch: int,
    examples: int | None = None,
    signals: Signals | None = None,
) -> dict[str, float] | None:
    """The task's summary over a split, or its first examples; None if any rank gets a signal before the end."""
    training = wired.training
    wired.eval()
    sums: dict[str, Tensor] = {}
    try:
        for made, counts in in_order(source, batch, examples, ranks):
            if ranks.largest(0.0 if signals is None else float(signals.number))[0]:
                return None
            # compiling for another mode and batch size would take longer than the evaluation
            compiled = wired._compiled_call_impl is not None
            with precision.autocast(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                measures = wired(made, measure=True)
            for name, parts in measures.items():
                both = torch.stack([part.detach().double() for part in parts]) * counts
                sums[name] = sums[name] + both if name in sums else both
    finally:
        wired.train(training)
        ranks.reshard(wired)
    for name in sorted(sums):
        ranks.sum(sums[name])
    read = torch.stack(list(sums.values())).tolist()  # one wait for the GPU
    return wired.task.summary({name: (top, bottom) for name, (top, bottom) in zip(sums, read, strict=True)})
