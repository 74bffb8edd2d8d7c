"""Refuses a run that does not fit into memory, before its folder is written and its first step begins."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from subquad.checks import refuse
from subquad.machine import allocation_peak, free_bytes, readable
from subquad.training.models import make_model
from subquad.training.task import Batch, Source, Task

DEEP = 64  # layers; for deeper models, memory is estimated before they are built
SUSPICIOUS = 1 / 2000  # share of free memory; if the data of a batch takes more, measure one example


def check_model(task: Task, fields: Mapping[str, Any], device: torch.device, sharded: bool = False) -> None:
    """Refuse a depth whose weights and gradients do not fit, because building so many layers would take minutes.

    `sharded`: every rank builds all weights but keeps only its part of the gradients, which is not counted.
    """
    depth = fields.get("depth")
    if not isinstance(depth, int) or isinstance(depth, bool) or depth <= DEEP:
        return
    one, two = (_bytes(make_model(task, {**fields, "depth": layers})) for layers in (1, 2))
    weights, free = one + (depth - 1) * (two - one), free_bytes(device)
    needed = weights if sharded else 2 * weights
    if needed > free:
        refuse("model.depth", depth, f"fewer layers: these take {readable(needed)}, {readable(free)} are free")


def check_batch(task: Task, model: nn.Module, source: Source, batch: int, pieces: int) -> None:
    """Refuse a batch in `pieces` micro-batches that does not fit into the memory of a CPU.

    A GPU reports an error if its memory is full; a process on a CPU would run for minutes and then be killed.
    """
    if not len(source):
        return
    example, free = source.batch(np.zeros(1, dtype=np.int64), 0), free_bytes("cpu")
    data = batch * sum(tensor.numel() * tensor.element_size() for tensor in example.values())
    needed, share = data, -(-batch // pieces)
    if data > SUSPICIOUS * free:
        needed += share * _activations(task, model, example)
    if needed > free:
        most = max(1, int(batch * free / needed))
        raise ValueError(
            f"training.batch={batch} in {pieces:,} micro-batches cannot work: it takes {readable(needed)} of memory, "
            f"{readable(free)} are free; accepted is about {most:,}, or more with a smaller training.micro_batch"
        )


def _activations(task: Task, model: nn.Module, example: Batch) -> int:
    """Bytes that the loss and the gradients of one example take, measured on a copy of the model."""
    trial, state = copy.deepcopy(model), torch.get_rng_state()
    try:
        return allocation_peak(lambda: task.loss(trial, example).total.backward()) - _bytes(trial)
    finally:
        torch.set_rng_state(state)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
