"""Work on a batch as a CUDA graph: one launch instead of hundreds, whose cost dominates in small models."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from subquad.graphs import recording
from subquad.training.task import Batch, Loss

WARMUP = 3  # runs before the capture, to compile and choose kernels and make workspaces
MOST = 8  # graphs, one per shape of batch; batches of other shapes are computed without a graph

Key = tuple[tuple[str, torch.Size, torch.dtype], ...]
T = TypeVar("T")


class Captured(Generic[T]):
    """Like compute(batch), but with a graph for each shape of batch.

    `state` lists the tensors that compute changes, and that warming up must not: they must keep their memory. Those
    that warming up makes are zeros afterwards. Random numbers come from the generator's seed at the time of the call.
    The next call overwrites what this one returned.
    """

    def __init__(self, compute: Callable[[Batch], T], state: Callable[[], list[Tensor]]):
        self.compute, self.state = compute, state
        self.graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Batch, T]] = {}

    def __call__(self, batch: Batch) -> T:
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.items()))
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                return self.compute(batch)
            self.graphs[key] = self._capture(batch)
        graph, inputs, result = self.graphs[key]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return result

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, T]:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        before = [(tensor, tensor.detach().clone()) for tensor in self.state()]
        seed = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self.compute(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph):
                result = self.compute(inputs)
        except RuntimeError as error:
            raise ValueError(
                "training.capture=true cannot work with this model: something in it waits for the GPU "
                f"({str(error).strip().splitlines()[0]}); accepted is false"
            ) from error
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
            known = {id(tensor) for tensor, _ in before}
            for tensor in self.state():
                if id(tensor) not in known:
                    tensor.zero_()
        torch.cuda.set_rng_state(seed)
        return graph, inputs, result


def captured_gradients(compute: Callable[[Batch], Loss], model: nn.Module) -> Captured[Loss]:
    """compute(batch), which adds to the gradients and returns the loss, as graphs. Zero gradients, do not delete them:
    they must keep their memory."""

    def detached(batch: Batch) -> Loss:
        loss = compute(batch)
        return Loss(loss.total.detach(), loss.count.detach())

    def state() -> list[Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return [*(p.grad for p in parameters if p.grad is not None), *model.buffers()]

    return Captured(detached, state)
