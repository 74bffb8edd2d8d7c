"""A linear layer of a decoding step with what stands around it: y = residual + act(W norm(x) + b), for a row a stream.

With one token per row such a layer waits for its weights, and each kernel beside it, for the norm, the activation or
the sum, takes as long as reading a few megabytes of them. Here they are parts of the same kernel.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.ops.impl import Impl, choose, watched
from subquad.ops.layer_norm import LayerNorm, layer_norm

Activation = Literal["none", "relu", "gelu"]
ROWS = 512  # at most
MANY = 64  # from more rows on, a library's matrix product and separate operations are faster
FEW = 8  # rows that one pass over the weights serves by plain sums; more take matrix units
WIDEST = 16384  # of a row that a program holds


class Norm(NamedTuple):
    """The norm that a layer's input passes."""

    weight: Tensor  # [K]
    bias: Tensor | None  # [K]
    eps: float
    kind: Literal["layer", "rms"]


def norm_of(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """What a norm does to rows of that type; None if it is not one that is known, or somebody watches it."""
    if type(module) not in (LayerNorm, nn.LayerNorm, nn.RMSNorm):
        return None
    known: Any = module
    if known.weight is None or len(known.normalized_shape) != 1 or watched(module):
        return None
    if type(module) is nn.RMSNorm:
        return Norm(known.weight, None, known.eps or torch.finfo(dtype).eps, "rms")
    return Norm(known.weight, known.bias, known.eps, "layer")


def plain(linear: nn.Module) -> bool:
    """Whether a layer is torch's own linear layer: LoRA, for example, replaces it, and others watch it."""
    return type(linear) is nn.Linear and not watched(linear)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """x [B, K], weight [N, K], bias [N], residual [B, N] -> [B, N]. The fused path has no gradients."""
    # reasons are looked for on a GPU only: there are as many calls as layers of the model, for each token
    apart = impl == "auto" and (x.device.type != "cuda" or x.shape[0] > MANY)
    if apart or choose(impl, "row_linear", x, _unsupported(x, weight, residual)) == "torch":
        h = F.linear(x if norm is None else normalise(x, norm), weight, bias)
        if activation != "none":
            h = F.relu(h) if activation == "relu" else F.gelu(h)
        return h if residual is None else residual + h
    gain, shift, eps, kind = norm or (None, None, 0.0, "none")
    x = x if x.stride(-1) == 1 else x.contiguous()
    return torch.ops.subquad.row_linear(x, weight, bias, gain, shift, eps, kind, activation, residual)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """The norm alone."""
    if norm.kind == "rms":
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    if norm.bias is None:
        return F.layer_norm(x, x.shape[-1:], norm.weight, None, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def _unsupported(x: Tensor, weight: Tensor, residual: Tensor | None) -> str | None:
    kinds = (torch.bfloat16, torch.float16, *((torch.float32,) if x.shape[0] <= FEW else ()))
    if x.dtype not in kinds or weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
        return f"it computes {', '.join(map(str, kinds))} for {x.shape[0]} rows, not {x.dtype} with {weight.dtype}"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual)):
        return "it has no gradients"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses other types"
    if not weight.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return "weight and residual must be contiguous"
    if not 0 < x.shape[0] <= ROWS or weight.shape[1] > WIDEST:
        return f"{x.shape[0]} rows of {weight.shape[1]}: accepted are 1 to {ROWS}, of at most {WIDEST}"
    return None


torch.library.define(
    "subquad::row_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? gain, Tensor? shift, float eps, str norm, str activation,"
    " Tensor? residual) -> Tensor",
)


@torch.library.impl("subquad::row_linear", "CompositeExplicitAutograd")
def _(*args: Any) -> Tensor:
    from subquad.ops import row_linear_triton

    return row_linear_triton.row_linear(*args)


@torch.library.register_fake("subquad::row_linear")
def _(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
