"""A convolution of values along positions, with one kernel for each head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.impl import Impl, choose, exporting
from subquad.ops.lengths import first, padding

BLOCK = 64  # tokens that the torch path computes at once


def convolve(v: Tensor, kernel: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Σ_j kernel_j v_{t+j-half} for each head: v [B, T, H, V], kernel [H, width], an odd width -> [B, T, H, V]."""
    if impl == "auto" and exporting():
        return _convolve(v, kernel)
    if choose(impl, "convolve", v, _unsupported(v, kernel)) == "torch":
        return _convolve(v, kernel)
    v = v if v.stride(-1) == 1 else v.contiguous()
    o: Tensor = torch.ops.subquad.convolve(v, kernel.contiguous())
    return o


def _unsupported(v: Tensor, kernel: Tensor) -> str | None:
    if v.dtype == torch.float64 or v.dtype != kernel.dtype:
        return f"values in {v.dtype} and kernels in {kernel.dtype}, where it takes one type of at most 32 bits"
    return "no elements" if v.numel() == 0 else None


def _convolve(v: Tensor, kernel: Tensor) -> Tensor:
    """A block of tokens is one product of a banded matrix with the tokens around it, so that both gradients are matrix
    products too; those of a grouped convolution take many times as long, on a GPU and on a CPU."""
    length, width = v.shape[1], kernel.shape[1]
    around = BLOCK + width - 1
    # rows of one element more than the matrix has columns: each row starts one column later
    rows = F.pad(kernel[:, None].expand(-1, BLOCK, -1), (0, BLOCK))  # [H, BLOCK, around + 1]
    band = rows.flatten(1)[:, : BLOCK * around].unflatten(1, (BLOCK, around))
    padded = F.pad(v, (0, 0, 0, 0, width // 2, width // 2 + padding(length, BLOCK)))
    windows = padded.unfold(1, around, BLOCK)  # [B, N, H, V, around]
    return first(torch.einsum("hca,bnhva->bnchv", band, windows).flatten(1, 2), length)


@torch.library.custom_op("subquad::convolve", mutates_args=())
def _forward(v: Tensor, kernel: Tensor) -> Tensor:
    from subquad.ops import convolve_triton

    return convolve_triton.convolve(v, kernel)


@torch.library.custom_op("subquad::convolve_gradient", mutates_args=())
def _gradient_of_kernel(grad: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    from subquad.ops import convolve_triton

    return convolve_triton.gradient(grad, v, kernel.shape[1]).to(kernel.dtype)


@_forward.register_fake
def _(v: Tensor, kernel: Tensor) -> Tensor:  # noqa: ARG001
    return v.new_empty(v.shape)


@_gradient_of_kernel.register_fake
def _(grad: Tensor, v: Tensor, kernel: Tensor) -> Tensor:  # noqa: ARG001
    return kernel.new_empty(kernel.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    v, kernel = ctx.saved_tensors
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dv = torch.ops.subquad.convolve(grad, kernel.flip(1).contiguous()) if ctx.needs_input_grad[0] else None
    dk = torch.ops.subquad.convolve_gradient(grad, v, kernel) if ctx.needs_input_grad[1] else None
    return dv, dk


_forward.register_autograd(_backward, setup_context=_setup)
