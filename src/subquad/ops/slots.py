"""Slots that a strided convolution makes of every few keys and values, one token at a time: a step of `compressed`."""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.impl import Impl, choose
from subquad.ops.rotary import Turns, turned


class Convolution(NamedTuple):
    """weight and bias of slot = bias + Σᵢ weight[..., i] x_i over the tokens of a slot, for each head."""

    weight: Tensor  # [H·K, K, stride]
    bias: Tensor  # [H·K]


class Slots(NamedTuple):
    """Finished slots, and the position mod stride tokens of the unfinished one."""

    slots: Tensor  # [B, C, H, K]
    last: Tensor  # [B, stride - 1, H, K]


def slots_step(
    k: Tensor,
    v: Tensor,
    keys: Slots,
    values: Slots,
    position: Tensor,
    key: Convolution,
    value: Convolution,
    nothing: Tensor | None = None,
    impl: Impl = "auto",
    moves: bool = True,
    by: Turns | None = None,
) -> Tensor:
    """One token k, v [B, H, K] of each row -> the number of slots that it may read, at least 1, [B].

    It writes the token or the slot that the token finishes and, if it `moves`, adds 1 to the position. While a row has
    no slot, its first one has zeros as the key and `nothing` [H, K] as the value. `by` turns the key of the slot: the
    turns of the position.
    """
    stride, width = key.weight.shape[2], k.shape[-1]
    reason = "float64" if k.dtype == torch.float64 else None
    reason = f"heads wider than 256: {width}" if width > 256 else reason
    fused = choose(impl, "slots_step", k, reason) == "triton"
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (k, v, *keys, *values, *key, *value))
    if fused and not gradients:  # the kernel has none
        tensors = (k, v, *keys, *values, position, *key, *value)
        run = torch.ops.subquad.slots_step if torch.compiler.is_compiling() else _fused
        return run(*tensors, nothing, moves, *(by or (None, None)))
    slot, rest = position // stride, position % stride
    done, rows = (rest == stride - 1)[:, None, None], torch.arange(len(k), device=k.device)
    finished = torch.where(done[:, 0, 0], slot + 1, slot)
    empty = (finished == 0)[:, None, None]
    absent = (None, None) if nothing is None else (torch.zeros_like(nothing), nothing)
    parts = zip((k, v), (keys, values), (key, value), absent, (by, None), strict=True)
    for new, cache, conv, other, turn in parts:
        window = torch.cat((cache.last.to(new.dtype), new[:, None]), 1)  # [B, stride, H, K], of a finished slot
        made = convolved(window[:, None], conv)
        made = (made if turn is None else turned(made, turn))[:, 0]
        made = torch.where(done, made, cache.slots[rows, slot].to(new.dtype))
        made = made if other is None else torch.where(empty, other.to(made.dtype), made)
        cache.slots.index_put_((rows, slot), made.to(cache.slots.dtype))
        if stride > 1:
            at = rest.clamp(max=stride - 2)
            cache.last.index_put_((rows, at), torch.where(done, cache.last[rows, at], new.to(cache.last.dtype)))
    if moves:
        position.add_(1)
    return finished.clamp(min=1)


def convolved(windows: Tensor, conv: Convolution) -> Tensor:
    """Slots of the tokens [B, N, stride, H, K] -> [B, N, H, K]. Windows do not overlap: one product for each head.

    torch's own convolution in bfloat16 gives wrong numbers on CPUs with AMX at some strides.
    """
    heads = windows.shape[3]
    slots = torch.einsum("bnshk,hoks->bnho", windows, conv.weight.unflatten(0, (heads, -1)))
    return slots + conv.bias.unflatten(0, (heads, -1)).to(slots.dtype)


def _fused(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    last_k: Tensor,
    values: Tensor,
    last_v: Tensor,
    position: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    value_weight: Tensor,
    value_bias: Tensor,
    nothing: Tensor | None,
    moves: bool,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    from subquad.ops.slots_triton import step_

    key, value = Convolution(key_weight, key_bias), Convolution(value_weight, value_bias)
    by = None if cos is None or sin is None else Turns(cos, sin)
    return step_(k, v, Slots(keys, last_k), Slots(values, last_v), position, key, value, nothing, moves, by)


_changed = ("keys", "last_k", "values", "last_v", "position")
_operator = torch.library.custom_op("subquad::slots_step", _fused, mutates_args=_changed)


@_operator.register_fake
def _(k: Tensor, v: Tensor, keys: Tensor, last_k: Tensor, values: Tensor, last_v: Tensor, position: Tensor,  # noqa: ARG001
      *others: object) -> Tensor:  # noqa: ARG001  # fmt: skip
    return position.new_empty(position.shape)
