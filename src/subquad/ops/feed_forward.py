"""The feed-forward of a block with its residual and its norm, in one pass: y = norm(x + W₂ act(W₁x + b₁) + b₂).

When decoding, with one token per row, writing and reading the inner vectors takes as long as the matrix products. Here
they never leave a multiprocessor. The same pass may begin with what comes before: the output layer of the mixer.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.impl import Impl, choose
from subquad.ops.layer_norm import Norm

Activation = Literal["relu", "gelu"]
ROWS = 4096  # with fewer rows separate operations are faster: a program takes 64 rows, so most of a GPU would be idle


class Mixed(NamedTuple):
    """The last part of a mixer on its residual: x becomes norm(x + W o + b)."""

    o: Tensor  # [B, D]
    weight: Tensor  # [D, D]
    bias: Tensor  # [D]
    norm_weight: Tensor | None  # [D]; None: no norm follows
    norm_bias: Tensor | None


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    *,
    eps: float,
    activation: Activation = "relu",
    norm: Norm = "layer",
    pre: bool = False,
    mixed: Mixed | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """x [B, D], w_in [F, D], w_out [D, F] -> [B, D]; pre: y = x + W₂ act(W₁ norm(x) + b₁) + b₂. Without gradients."""
    if choose(impl, "feed_forward", x, _unsupported(x, w_in)) == "torch":
        if mixed is not None:
            x = x + F.linear(mixed.o, mixed.weight, mixed.bias)
            if mixed.norm_weight is not None:
                x = _norm(x, mixed.norm_weight, mixed.norm_bias, eps, norm)
        h = _norm(x, norm_weight, norm_bias, eps, norm) if pre else x
        h = F.linear(h, w_in, b_in)
        y = x + F.linear(F.relu(h) if activation == "relu" else F.gelu(h), w_out, b_out)
        return y if pre else _norm(y, norm_weight, norm_bias, eps, norm)
    return torch.ops.subquad.feed_forward(
        x.contiguous(), w_in, b_in, w_out, b_out, norm_weight, norm_bias, *(mixed or [None] * 5), eps, activation, norm,
        pre,
    )  # fmt: skip


def pays(x: Tensor, w_in: Tensor) -> bool:
    """Whether the fused pass supports this call and is faster than separate operations."""
    wanted = x.is_cuda and x.ndim == 2 and x.shape[0] >= ROWS and not torch.is_grad_enabled()
    return wanted and choose("auto", "feed_forward", x, _unsupported(x, w_in)) == "triton"


def _unsupported(x: Tensor, w_in: Tensor) -> str | None:
    inner, width = w_in.shape
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != w_in.dtype:
        return f"it computes 16-bit types, not {x.dtype} with weights in {w_in.dtype}"
    if width not in (64, 128, 256) or inner % 64:
        return f"widths {width} and {inner}: accepted are 64, 128 or 256, and a multiple of 64"
    return None


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: Norm) -> Tensor:
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


torch.library.define(
    "subquad::feed_forward",
    "(Tensor x, Tensor w_in, Tensor b_in, Tensor w_out, Tensor b_out, Tensor weight, Tensor? bias, Tensor? o,"
    " Tensor? w_mix, Tensor? b_mix, Tensor? mix_weight, Tensor? mix_bias, float eps, str activation, str norm,"
    " bool pre) -> Tensor",
)


@torch.library.impl("subquad::feed_forward", "CompositeExplicitAutograd")
def _(*args: Any) -> Tensor:
    from subquad.ops import feed_forward_triton

    return feed_forward_triton.feed_forward(*args)


@torch.library.register_fake("subquad::feed_forward")
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)
