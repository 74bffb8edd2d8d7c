"""Which implementation of an op runs: the torch path, everywhere, or the Triton path, on a GPU."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor, nn

Impl = Literal["auto", "torch", "triton"]
KERNELS = os.environ.get("SUBQUAD_KERNELS", "1") != "0"  # whether "auto" may take the Triton path
HAS_TRITON = importlib.util.find_spec("triton") is not None  # found once: torch.compile cannot trace the search


def choose(impl: str, op: str, x: Tensor, unsupported: str | None = None) -> Literal["torch", "triton"]:
    """Resolve `impl` for tensors like `x`; `unsupported` says what the Triton path of `op` cannot do with this call.

    `auto` takes what works. An explicit choice is honoured or refused, never replaced.
    """
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f'impl={impl!r} for {op}: accepted are "auto", "torch", "triton"')
    # the interpreter is for tests, so only impl="triton" uses it
    if impl == "torch" or (impl == "auto" and (x.device.type != "cuda" or not KERNELS or transformed())):
        return "torch"
    reason = unsupported
    if not HAS_TRITON:
        reason = "triton is not installed"
    elif x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"the tensors are on {x.device.type}, and Triton runs on cuda (on a CPU only with TRITON_INTERPRET=1)"
    if reason is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f'impl="triton" for {op}: {reason}; use impl="auto" or "torch"')
    return "torch"


def too_large(x: Tensor, needed: int) -> str | None:
    """What stands against kernels for tensors like `x` whose programs take so many bytes of shared memory."""
    if x.device.type != "cuda":
        return None
    room = shared_memory_of(x.device)
    return None if needed <= room else f"it takes {needed} bytes of shared memory, and this GPU has {room}"


def shared_memory_of(device: torch.device) -> int:
    """The bytes that a program can take on a GPU."""
    room: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return room


def traced() -> bool:
    """A compiler fuses plain expressions, and torch.func and exported programs can only differentiate those."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether a transform of torch.func is at work, which sees through plain expressions only."""
    return torch._C._are_functorch_transforms_active()


def watched(module: nn.Module) -> bool:
    """Whether a call of a module runs what somebody added: hooks, or a function in place of its own `forward`."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def exporting() -> bool:
    """Whether a program is being exported. torch 2.11's own function is also true while one is compiled (#176347)."""
    return torch.compiler._is_exporting_flag
