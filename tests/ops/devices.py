"""Devices that are not there: which kernels a call starts on one, and how much shared memory each takes.

A kernel is compiled as far as the allocation of shared memory, without LLVM and ptxas.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget

from subquad.ops import impl, launch
from subquad.ops.launch import Plan


@dataclass
class Device:
    """What Triton's driver and torch say of a GPU."""

    capability: int
    room: int  # bytes of shared memory for one program
    multi_processor_count: int
    started: list[tuple[Any, tuple[Tensor, ...], Plan]] = field(default_factory=list)

    @property
    def shared_memory_per_block_optin(self) -> int:
        return self.room

    @property
    def utils(self) -> "Device":
        return self

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self.room, "multiprocessor_count": self.multi_processor_count}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by this number

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def launcher_cls(self, _source: Any, _metadata: Any) -> Callable[..., None]:
        return lambda *_: None

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def start(self, kernel: Any, tensors: tuple[Tensor, ...], plan: Plan) -> None:
        self.started.append((kernel, tensors, plan))

    def shared(self, kernel: Any, tensors: tuple[Tensor, ...], plan: Plan) -> int:
        """The bytes of shared memory that a program takes."""
        options = {"num_warps": plan.warps, "num_stages": plan.stages, "maxnreg": plan.registers}
        built = kernel.run(*tensors, *plan.numbers, **plan.constants, grid=plan.grid, warmup=True, **options)
        return int(built.metadata.shared)


RTX_4090, H200 = (lambda: Device(89, 101376, 128)), (lambda: Device(90, 232448, 132))


def _allocated(_backend: Any, stages: dict[str, Any], _options: Any, _language: Any, capability: int) -> None:
    def allocate(module: Any, metadata: dict[str, Any]) -> str:
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, 86)
        manager.run(module, "allocate")
        metadata["shared"], metadata["name"] = module.get_int_attr("ttg.shared"), "kernel"
        return ""

    stages["llir"] = allocate
    stages["ptx"] = lambda _module, _metadata: ""
    stages["cubin"] = lambda _module, _metadata: b"none"


@contextmanager
def pretending(device: Device, cache: Path) -> Iterator[Device]:
    """Kernels are only noted, and tensors on the CPU take the Triton path as if they were on the device.

    What kernels would have written is zero.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", device)
        patch.setattr(triton.knobs.cache, "dir", str(cache))
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", _allocated)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(launch, "start_plainly", device.start)
        patch.setattr(launch, "_is_known", False)
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
        patch.setattr(Tensor, "new_empty", Tensor.new_zeros)
        choose = impl.choose
        for module in [m for name, m in sys.modules.items() if name.startswith("subquad")]:
            if getattr(module, "choose", None) is choose:
                patch.setattr(module, "choose", _choose)
        _forget()
        try:
            yield device
        finally:
            _forget()


def _forget() -> None:
    launch.shared_memory.cache_clear()
    launch.multiprocessors.cache_clear()


def _choose(impl: str, _op: str, _x: Tensor, unsupported: str | None = None) -> str:
    return "torch" if unsupported or impl == "torch" else "triton"
