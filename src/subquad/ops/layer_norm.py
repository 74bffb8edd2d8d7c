"""The norm of each row, alone or with a residual: y = (x - mean) / √(variance + eps) · weight + bias.

torch's gradient of weight and bias is slow for narrow rows: at the widths of small models, 64 to 512, it takes longer
than the attention of the layer. Here one pass over x computes the gradients of x, weight and bias. Wider rows gain too
where the same pass adds a branch to the residual, and writes y in the type of the products that read it.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from subquad.gradients import once_differentiable
from subquad.ops.impl import Impl, choose, traced, watched
from subquad.ops.uniform import dropped

Norm = Literal["layer", "rms"]
WIDEST_ALONE = 512  # for wider rows torch's kernels are as fast
WIDEST = 4096


class Drop(NamedTuple):
    """Dropout, by numbers that follow from a seed, the row and the column."""

    share: float  # of the numbers that become 0
    seed: Tensor  # [1]

    def apply(self, x: Tensor) -> Tensor:
        """x [..., D]"""
        rows = torch.arange(x.numel() // x.shape[-1], device=x.device)
        return dropped(x, self.seed.expand(len(rows)), rows, self.share)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, impl: Impl = "auto") -> Tensor:
    """x [..., D], weight and bias [D] -> [..., D]; float32 under autocast, like torch's."""
    if traced() or (impl == "auto" and (x.device.type != "cuda" or x.shape[-1] > WIDEST_ALONE)):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if choose(impl, "layer_norm", x, _unsupported(x, weight)) == "torch":
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y: Tensor = _AddNorm.apply(x, None, weight, bias, eps, False, None, None)[1]
    return y


def add_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm: Norm = "layer",
    post: bool = False,
    out: torch.dtype | None = None,
    drop: Drop | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(the residual, what the next branch reads), both [..., D]: (x + added, norm(x + added)).

    added: None adds nothing; then only the gradients of both results are added in one pass
    post   the residual is norm(x + added) too
    out    the type of what the branch reads; None is that of torch's norm: float32 under autocast
    drop   dropout of what is added
    """
    plain = traced() or (impl == "auto" and x.device.type != "cuda")
    if plain or choose(impl, "add_norm", x, _unsupported(x, weight, added)) == "torch":
        total = x if added is None else x + (added if drop is None else drop.apply(added))
        if norm == "rms":
            y = nn.functional.rms_norm(total, total.shape[-1:], weight, eps)
        else:
            y = torch.layer_norm(total, total.shape[-1:], weight, bias, eps)
        return y if post else total, y if out is None else y.to(out)
    residual, y = _AddNorm.apply(x, added, weight, bias, eps, post, out, drop)
    return residual, residual if y is None else y


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over one axis."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def fuses(x: Tensor, norm: nn.Module) -> bool:
    """Whether `add_norm` with the weights of this module replaces it: it runs as a kernel, and nobody watches."""
    if x.device.type != "cuda" or type(norm) not in (LayerNorm, nn.RMSNorm) or traced() or watched(norm):
        return False
    return isinstance(norm.weight, Tensor) and choose("auto", "add_norm", x, _unsupported(x, norm.weight)) == "triton"


def _unsupported(x: Tensor, weight: Tensor, added: Tensor | None = None) -> str | None:
    if x.shape[-1] > WIDEST:
        return f"it takes rows of at most {WIDEST}, not {x.shape[-1]}"
    if added is not None and added.shape != x.shape:
        return f"it adds what has the shape of x, {list(x.shape)}, not {list(added.shape)}"
    kinds = [t.dtype for t in (x, weight, added) if t is not None]
    if not all(kind in (torch.float32, torch.bfloat16, torch.float16) for kind in kinds):
        return f"it computes float32, bfloat16 and float16, not {x.dtype} with weights in {weight.dtype}"
    return "no elements" if x.numel() == 0 else None


class _AddNorm(torch.autograd.Function):
    """(the residual, what the next branch reads if it is another tensor); without a bias, root mean square norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        post: bool,
        out: torch.dtype | None,
        drop: Drop | None,
    ) -> tuple[Tensor, Tensor | None]:
        from subquad.ops import layer_norm_triton

        total = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
        wide = bias is not None and torch.is_autocast_enabled(x.device.type)
        kind = torch.float32 if wide else total  # of torch's norm
        kinds = total, kind if post else out or kind, out if post and out not in (None, kind) else None
        s, y, h, mean, scale = layer_norm_triton.forward(x, added, weight, bias, eps, *kinds, drop)
        ctx.save_for_backward(s, weight, mean, scale)
        ctx.set_materialize_grads(False)
        ctx.post, ctx.rms, ctx.drop = post, bias is None, drop
        ctx.added = None if added is None else added.dtype
        if post:
            return y, h
        return x if added is None else s, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        from subquad.ops import layer_norm_triton

        of_norm = [grad.contiguous() for grad in ((first, second) if ctx.post else (second,)) if grad is not None]
        of_sum = None if ctx.post or first is None else first.contiguous()
        if not of_norm:
            if of_sum is None or ctx.added is None:
                return of_sum, *[None] * 7
            of_added = of_sum if ctx.drop is None else ctx.drop.apply(of_sum)
            return of_sum, of_added.to(ctx.added), *[None] * 6
        how = {"rms": ctx.rms, "added": ctx.added, "drop": ctx.drop}
        dx, da, dg, dc = layer_norm_triton.backward(of_sum, of_norm, *ctx.saved_tensors, **how)
        return dx, da, dg, dc, None, None, None, None
