"""Parts of our models that FSDP has sharded, and that are read without a call of their forward.

FSDP gathers a module's weights when the module is called. A tied head reads the embedding's weights after that call,
and what reads a prompt or a token after a state calls the `prefill` and `step` of blocks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from subquad.checks import refuse


def keep_whole(module: nn.Module) -> None:
    """Keep the weights of a module gathered from its forward to the end of backward."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(False, recurse=False)


@contextmanager
def gathered(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """The weights of blocks as a whole, for methods other than forward."""
    sharded = [
        part
        for block in blocks
        if isinstance(block, FSDPModule)
        for part in block.modules()  # adapters, and what checkpointing wraps, have groups of their own
        if isinstance(part, FSDPModule)
    ]
    if sharded and torch.is_grad_enabled():  # backward would find them freed
        refuse("use_cache", True, "False where FSDP has sharded the model and gradients are computed")
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()
