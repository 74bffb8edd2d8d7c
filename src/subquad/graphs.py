"""Recording of CUDA graphs, by one thread at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_turn = threading.RLock()


def capturing(x: Tensor) -> bool:
    """Whether operations on x are recorded for a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """What is launched inside becomes the graph. Other threads may use the GPU meanwhile.

    torch records on one stream, which all threads share: they wait here for each other. After a failure the thread's
    stream and its random numbers are what they were; torch would leave the recording stream current, and a generator
    that waits for the recording to end.
    """
    with _turn:  # first of all: while another thread records, the generator's state is that of a recording
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        unused = generator.clone_state()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                yield
        except BaseException:
            generator.graphsafe_set_state(unused)
            raise
