"""The Moore-Penrose inverse of small matrices without negative entries, by an iteration that only multiplies."""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.impl import Impl, choose, shared_memory

WIDEST = 64  # rows and columns of what one program holds
ROOM = 160 * 1024  # bytes of shared memory that it needs


def pseudo_inverse(a: Tensor, iterations: int, *, impl: Impl = "auto") -> Tensor:
    """Iterate towards the inverse of matrices in at least float32, [..., M, N] -> [..., N, M].

    Z ← ¼ Z (13 - AZ (15 - AZ (7 - AZ))), from Aᵀ / (‖A‖₁ ‖A‖_∞), each matrix by itself.
    """
    z = a.mT / (a.sum(-1).amax(-1) * a.sum(-2).amax(-1))[..., None, None]
    shape, a, z = z.shape, a.reshape(-1, *a.shape[-2:]), z.reshape(-1, *z.shape[-2:])
    exported = impl == "auto" and torch.compiler.is_exporting()
    if iterations and not exported and choose(impl, "pseudo_inverse", a, _unsupported(a)) == "triton":
        return torch.ops.subquad.pseudo_inverse(a.contiguous(), z.contiguous(), iterations)[0].view(shape)
    for _ in range(iterations):
        az = a @ z
        p = torch.baddbmm(az, az, az, beta=7, alpha=-1)  # AZ (7 - AZ)
        p = torch.baddbmm(az, az, p, beta=15, alpha=-1)  # AZ (15 - AZ (7 - AZ))
        z = torch.baddbmm(z, z, p, beta=13 / 4, alpha=-1 / 4)
    return z.view(shape)


def _unsupported(a: Tensor) -> str | None:
    if a.dtype != torch.float32 or a.shape[-1] != a.shape[-2] or a.shape[-1] > WIDEST or a.numel() == 0:
        return f"it takes square float32 matrices of at most {WIDEST} rows, not {list(a.shape)} in {a.dtype}"
    if shared_memory(a) < ROOM:
        return f"the GPU has {shared_memory(a)} bytes of shared memory for a program, which needs {ROOM}"
    return None


@torch.library.custom_op("subquad::pseudo_inverse", mutates_args=())
def _forward(a: Tensor, z: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The last Z, and the one before each iteration, [iterations, B, M, M]."""
    from subquad.ops import pseudo_inverse_triton

    return pseudo_inverse_triton.forward(a, z, iterations)


@torch.library.custom_op("subquad::pseudo_inverse_gradient", mutates_args=())
def _gradients(grad: Tensor, a: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of A and of the first Z."""
    from subquad.ops import pseudo_inverse_triton

    return pseudo_inverse_triton.backward(grad, a, steps)


@_forward.register_fake
def _(a: Tensor, z: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), a.new_empty((iterations, *z.shape))


@_gradients.register_fake
def _(grad: Tensor, a: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(a), torch.empty_like(a)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    a, steps = ctx.saved_tensors
    return *torch.ops.subquad.pseudo_inverse_gradient(grad.contiguous(), a, steps), None


_forward.register_autograd(_backward, setup_context=_setup)
