"""Ranks on the CPU that stay alive over many tests: `together(world).run(function, ...)` calls it on all of them."""

import atexit
import functools
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.training.tiny import processes

LONGEST = 120  # seconds to wait for an answer


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "a rank ended"


class Together:
    def __init__(self, world: int):
        self.world, self.folder = world, tempfile.TemporaryDirectory()
        pairs = [processes.Pipe() for _ in range(world)]
        self.pipes = [ours for ours, _ in pairs]
        self.members = [
            processes.Process(target=_serve, args=(rank, world, self.folder.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.members:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of all ranks; the error of the first that fails."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results: dict[Connection, Any] = {}
        while len(results) < self.world:
            ready = wait([pipe for pipe in self.pipes if pipe not in results], LONGEST)
            answers = [(pipe, *_answer(pipe)) for pipe in ready if isinstance(pipe, Connection)]
            errors = [error for _, good, error in answers if not good]
            if errors or not answers:  # the others may wait in a collective
                self.close()
                raise AssertionError("\n".join(errors) or f"no answer after {LONGEST} seconds")
            results |= {pipe: result for pipe, _, result in answers}
        return [results[pipe] for pipe in self.pipes]

    def close(self) -> None:
        together.cache_clear()
        for process in self.members:
            process.terminate()
            process.join(5)
        self.folder.cleanup()


@functools.cache
def together(world: int) -> Together:
    made = Together(world)
    atexit.register(made.close)
    return made
