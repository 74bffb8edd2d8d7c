"""Gradients of a micro-batch as a CUDA graph: one launch instead of hundreds, whose cost dominates in small models."""

from collections.abc import Callable

import torch
from torch import nn

from subquad.training.task import Batch, Loss

WARMUP = 3  # runs before the capture, to compile and choose kernels and make workspaces
MOST = 8  # graphs, one per shape of batch; batches of other shapes are computed without a graph

Key = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Captured:
    """Like compute(batch), which adds to the gradients and returns the loss, but with a graph for each shape of batch.

    The gradients must keep their memory: zero them, do not delete them. Random numbers come from the generator's seed
    at the time of the call. The next call overwrites the loss that this one returned.
    """

    def __init__(self, compute: Callable[[Batch], Loss], model: nn.Module):
        self.compute, self.model = compute, model
        self.graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Batch, Loss]] = {}

    def __call__(self, batch: Batch) -> Loss:
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.items()))
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                return self.compute(batch)
            self.graphs[key] = self._capture(batch)
        graph, inputs, loss = self.graphs[key]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, Loss]:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        # warming up must not change gradients, buffers that depend on the data, or the seed
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        seed = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self.compute(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # a failed capture leaves its stream current, and the generator waits for the capture to end
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        unused = generator.clone_state()
        try:
            # thread_local, because another thread makes the next batch at the same time
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                loss = self.compute(inputs)
        except RuntimeError as error:
            generator.graphsafe_set_state(unused)
            raise ValueError(
                "training.capture=true cannot work with this model: something in it waits for the GPU "
                f"({str(error).strip().splitlines()[0]}); accepted is false"
            ) from error
        with torch.no_grad():
            torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], gradients)
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        torch.cuda.set_rng_state(seed)
        return graph, inputs, Loss(loss.total.detach(), loss.count.detach())
