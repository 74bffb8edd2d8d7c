"""How all Triton kernels are started.

`kernel[grid](...)` inspects every argument of every call, which takes longer than a short kernel runs. The result
depends only on types, numbers and the alignment of tensors. So `launch` caches the compiled kernel, and from the second
call on passes the pointers to Triton's private launcher. Only the versions in KNOWN have that launcher in this form;
with other versions every call is `kernel[grid](...)`.
"""

import itertools
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

from subquad.ops.impl import shared_memory_of

INTERPRETED = triton.knobs.runtime.interpret
KNOWN = ("3.6",)
# whether kernels of a decoding step start while the one before still runs, and wait for it themselves
EARLY = not INTERPRETED and os.environ.get("SUBQUAD_EARLY", "1") == "1"
_is_known = ".".join(triton.__version__.split(".")[:2]) in KNOWN

if INTERPRETED and _is_known:
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """The interpreter's loop bounds are arrays of one element, which int() refuses since numpy 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor


Choice = TypeVar("Choice")


class Plan(NamedTuple):
    """How to start a kernel, apart from its tensors. Its parameters are tensors, numbers, constants, in this order."""

    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1
    registers: int = 255  # the most per thread; without a limit ptxas fails on large tiles
    early: bool = False  # start while the kernel before still runs: this one waits for it itself, by gdc_wait


_READY: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_numbers = itertools.count()


@lru_cache(maxsize=1024)
def number_of(kind: tuple[Any, ...]) -> int:  # noqa: ARG001
    """A number that stands for a kind of call: looking it up once is cheaper than hashing the kind for each kernel."""
    return next(_numbers)


def launch(kernel: Any, tensors: tuple[Tensor, ...], plan: Plan) -> None:
    """Start kernel(*tensors, *plan.numbers, **plan.constants)."""
    key = (*plan[:2], *plan.constants.values(), *plan[3:], *[x.dtype for x in tensors])
    launch_by_key(key, kernel, tensors, lambda: plan)


def launch_by_key(key: tuple[Any, ...], kernel: Any, tensors: tuple[Tensor, ...], plan: Callable[[], Plan]) -> None:
    """Start a kernel by `plan()`, which runs once for each key: calls with the same key must have the same plan.

    The key need not contain the device or the alignment of the tensors.
    """
    where = tensors[0].device.index
    if not INTERPRETED and where != torch.cuda.current_device():
        with torch.cuda.device(where):
            launch_by_key(key, kernel, tensors, plan)
        return
    if INTERPRETED or not _is_known:
        start_plainly(kernel, tensors, plan())
        return
    pointers = [x.data_ptr() for x in tensors]
    together = 0
    for pointer in pointers:
        together |= pointer
    aligned = 0 if together % 16 == 0 else tuple(pointer % 16 == 0 for pointer in pointers)
    key = (id(kernel), where, aligned, *key)
    ready = _READY.get(key)
    if ready is not None:
        run, grid, function, metadata, rest = ready
        stream = torch._C._cuda_getCurrentRawStream(where)
        run(*grid, stream, function, metadata, None, None, None, *pointers, *rest)
        return
    how = plan()
    compiled = start_plainly(kernel, tensors, how)
    if len(_READY) >= 4096:
        _READY.clear()
    rest = (*how.numbers, *[None] * len(how.constants))
    grid = (*how.grid, 1, 1)[:3]
    _READY[key] = compiled.run, grid, compiled.function, compiled.packed_metadata, rest


def start_plainly(kernel: Any, tensors: tuple[Tensor, ...], plan: Plan) -> Any:
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "maxnreg": plan.registers}
    if plan.early:
        options["launch_pdl"] = True
    return kernel[plan.grid](*tensors, *plan.numbers, **plan.constants, **({} if INTERPRETED else options))


def tile_of(width: int) -> int:
    """The least power of two, from 16 on, that holds `width` columns. (Triton's next_power_of_2 is slow.)"""
    return max(16, 1 << (width - 1).bit_length())


def blocks_of(size: int, block: int) -> int:
    """How many blocks cover the size. (Triton's cdiv is slow.)"""
    return -(-size // block)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program can take."""
    if INTERPRETED:
        return 2**20
    return shared_memory_of(device)


def fitting(choices: Iterable[Choice], needed: Callable[[Choice], int], room: int) -> Choice:
    """The first choice, the best first, of which a program needs at most so much shared memory; or the last one."""
    for choice in choices:
        if needed(choice) <= room:
            break
    return choice


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
