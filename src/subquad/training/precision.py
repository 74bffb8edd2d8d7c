"""The precision of the arithmetic: autocast over float32 weights, and a scaled loss for float16."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from subquad.gradients import once_differentiable
from subquad.training.pieces import in_pieces

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HIGHEST = 2.0**16  # the first scale of a mean loss, as in torch's GradScaler
GROWTH_INTERVAL = 2000


class Precision:
    """name="auto": bf16 if the GPU has it, fp16 on other GPUs, fp32 on a CPU."""

    def __init__(self, name: str, device: torch.device):
        if name == "auto":
            name = "fp32"
            if device.type == "cuda":
                name = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        self.name, self.device, self.dtype = name, device, DTYPES[name]
        self.scaled = name == "fp16"
        # of the loss; a power of two, so that it does not change rounding
        self.scale: float | None = None if self.scaled else 1.0
        self.good = 0  # updates since the scale changed

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.name == "fp32" else torch.autocast(self.device.type, dtype=self.dtype)

    def begin(self, count: float) -> None:
        """Choose the first scale: losses are sums over `count` targets."""
        self.scale = HIGHEST / 2 ** round(math.log2(max(1.0, count)))

    def accept(self, norm: torch.Tensor) -> bool:
        """Whether to apply the update. If float16 gradients overflowed, skip it and lower the scale. Only fp16 waits
        for the GPU."""
        if not self.scaled:
            return True
        assert self.scale is not None
        if not bool(torch.isfinite(norm)):
            self.scale, self.good = self.scale / 2, 0
            return False
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.scale, self.good = self.scale * 2, 0
        return True

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good}

    def load(self, state: dict[str, Any]) -> None:
        if self.scaled:
            self.scale, self.good = state["scale"], state["good"]


class AtOnce:
    """A module under autocast, whose weights of products are cast at once, and their gradients too.

    Autocast casts every weight by itself: in a small model that is a third of all kernels. Numbers are the same.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        layers = [(path, layer) for path, layer in module.named_modules() if type(layer) is nn.Linear]
        parts = [(f"{path}.{name}", p) for path, layer in layers for name, p in layer.named_parameters()]
        self.cast = {name: p for name, p in parts if p.dtype == torch.float32}

    def __call__(self, *args: Any) -> Any:
        copies = _Cast.apply(self.dtype, *self.cast.values())
        return functional_call(self.module, dict(zip(self.cast, copies, strict=True)), args)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [t.dtype for t in tensors]
        return _cast(tensors, [dtype] * len(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(n, grad) for n, grad in enumerate(grads) if grad is not None]
        cast = iter(_cast(tuple(grad for _, grad in given), [ctx.dtypes[n] for n, _ in given]))
        return None, *(None if grad is None else next(cast) for grad in grads)


def _cast(tensors: tuple[Tensor, ...], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    made = tuple(torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True))
    written, read = in_pieces(made, [t.detach() for t in tensors])
    torch._foreach_copy_(written, read)
    return made
