"""Layer normalisation of narrow rows: y = (x - mean) / √(variance + eps) · weight + bias, over the last axis.

torch's gradient of weight and bias is slow for narrow rows: at the widths of small models, 64 to 512, it takes longer
than the attention of the layer. Here one pass over x computes the gradients of x, weight and bias.
"""

from typing import Any

import torch
from torch import Tensor, nn

from subquad.ops.impl import Impl, choose

WIDEST = 512  # for wider rows torch's kernels are fast


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, impl: Impl = "auto") -> Tensor:
    """x [..., D], weight and bias [D] -> [..., D]; float32 under autocast, like torch's."""
    # a compiler fuses torch's norm with the operations around it, and torch.func can only differentiate torch's
    elsewhere = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    elsewhere = elsewhere or (impl == "auto" and x.device.type != "cuda")
    if elsewhere or choose(impl, "layer_norm", x, _unsupported(x, weight)) == "torch":
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    out = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, out)
    return y


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over one axis."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def _unsupported(x: Tensor, weight: Tensor) -> str | None:
    if x.shape[-1] > WIDEST:
        return f"it takes rows of at most {WIDEST}, not {x.shape[-1]}"
    if not all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (x, weight)):
        return f"it computes float32, bfloat16 and float16, not {x.dtype} with weights in {weight.dtype}"
    return "no elements" if x.numel() == 0 else None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: torch.dtype) -> Tensor:
        from subquad.ops import layer_norm_triton

        x = x.contiguous()
        y, mean, scale = layer_norm_triton.forward(x, weight, bias, eps, out)
        ctx.save_for_backward(x, weight, mean, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from subquad.ops import layer_norm_triton

        return (*layer_norm_triton.backward(grad.contiguous(), *ctx.saved_tensors), None, None)
