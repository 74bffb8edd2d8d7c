"""Checks of the public methods of a mechanism: they refuse tokens, contexts, states and options that do not fit."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import FLOATS, check_strided, check_tensor
from subquad.ops.lengths import check_lengths, shape_of, zero_padding
from subquad.ops.precision import autocasts

if TYPE_CHECKING:
    from subquad.mechanisms.base import Mixer, Options
    from subquad.ops.rotary import Turns

Shape = tuple[int | None, ...]  # None: any size


def check_options(cls: type[Mixer], options: Options) -> None:
    """Refuse base options that this mechanism does not use, and forms (causal or not) and widths that it lacks."""
    name = cls.__name__
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in cls.unused - {"heads", "dim"} and value != field.default:
            raise ValueError(f"{field.name}={value!r} has no meaning for {name}: leave it at {field.default!r}")
    if options.causal and not cls.traits.causal:
        raise ValueError(f"causal=True cannot work: {name} has no causal form ({cls._why_not_causal})")
    if not options.causal and not cls.traits.bidirectional:
        raise ValueError(f"causal=False cannot work: {name} is causal only; pass causal=True")
    if cls.traits.fixed_length and options.max_length is None:
        raise ValueError(f"max_length=None cannot work: {name} has parameters for each position; pass the longest T")
    if "heads" not in cls.unused and options.dim % options.heads:
        raise ValueError(f"heads={options.heads} cannot work: it must divide dim={options.dim}")
    if options.rotary and (options.dim // options.heads) % 2:
        raise ValueError(f"rotary=True cannot work: dim/heads={options.dim // options.heads} must be even")


def check_tokens(mix: Mixer, x: Tensor, name: str = "x") -> None:
    """Refuse anything but [B, T, D] of this module's width, type and device."""
    dim, like = mix.options.dim, mix._like
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name} has shape {shape_of(x)}: accepted is [batch, T, {dim}]")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} has shape {shape_of(x)}: at least one row and one token are needed")
    check_strided(name, x)
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: this module is on {like.device}")
    cast = autocasts(x.device) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    gathered = x.dtype != like.dtype and x.dtype in {p.dtype for p in mix.parameters()}  # by FSDP with mixed precision
    if x.dtype != like.dtype and not (cast or gathered):
        raise ValueError(f"{name} has dtype {x.dtype}: this module computes in {like.dtype}")
    limit = mix.options.max_length
    if limit is not None and mix.traits.fixed_length and (size := ranks.whole_length(x.shape[1])) > limit:
        raise ValueError(f"{name} has T={size}: this module was built with max_length={limit}")


def check_padded(mix: Mixer, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checked tokens with zeros for padding, and their lengths."""
    check_tokens(mix, x)
    lengths = check_lengths(lengths, x)
    return zero_padding(x, lengths), lengths


def check_turns(mix: Mixer, turns: Turns | None, x: Tensor, context: object = None) -> None:
    """Refuse turns that are not those of one position for each token of x."""
    if turns is None or torch.compiler.is_compiling():
        return
    if context is not None:
        raise ValueError("turns cannot work with a context, whose tokens have other positions: accepted is one of them")
    if mix.turn_width is None:
        why = "computes its own" if mix.options.rotary else "has no rotary positions"
        raise ValueError(f"turns was given, but this {type(mix).__name__} {why}: accepted is None")
    batch, size, width = *x.shape[:2], mix.turn_width // 2
    for name, t in zip(turns._fields, turns, strict=True):
        check_tensor(f"turns.{name}", t)
        if t.shape not in ((size, 1, width), (batch, size, 1, width)) or t.device != x.device:
            accepted = f"{[size, 1, width]} or {[batch, size, 1, width]} on {x.device}"
            raise ValueError(f"turns.{name} is {list(t.shape)} on {t.device}: accepted is {accepted}")


def split_over(mix: Mixer, x: Tensor) -> AbstractContextManager[Any]:
    """A context for a call on x, which may be a part of a sequence; refuse mechanisms that cannot be split."""
    if ranks.active() is None:
        return nullcontext()
    if not mix.splits:
        from subquad.mechanisms import MECHANISMS

        accepted = ", ".join(name for name, cls in MECHANISMS.items() if cls.splits)
        name = next((name for name, cls in MECHANISMS.items() if cls is type(mix)), type(mix).__name__)
        raise ValueError(f"mechanism {name!r} cannot split a sequence over ranks: accepted are {accepted}")
    if getattr(mix.options, "dropout", 0.0) and mix.training and "dropout" not in mix.unused:
        accepted = "0 inside sequence_parallel: weights are not dropped by position there"
        raise ValueError(f"dropout={mix.options.dropout} of {type(mix).__name__} cannot work: accepted is {accepted}")
    check_tokens(mix, x)
    return ranks.laid_out(x.shape[1])


def check_context(
    mix: Mixer, x: Tensor, context: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The context of x, checked, with zeros for padding, and its lengths; None if there is none."""
    if context is None:
        if lengths is not None:
            raise ValueError("context_lengths was given without context: pass both or neither")
        return None, None
    context, lengths = check_keys(mix, context, lengths)
    if context.shape[0] != x.shape[0]:
        raise ValueError(f"context has batch {context.shape[0]}: x has batch {x.shape[0]}")
    return context, lengths


def check_keys(mix: Mixer, context: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A checked context with zeros for padding, and its lengths."""
    if not type(mix).traits.cross:
        raise ValueError(f"context was given, but {type(mix).__name__} has no cross-attention")
    if mix.options.causal:
        raise ValueError("context was given to a causal module: cross-attention needs causal=False")
    if not mix.traits.cross:
        raise ValueError(f"context was given, but {type(mix).__name__} has no cross-attention")
    if mix.options.rotary:
        raise ValueError("context was given with rotary=True: distances from x to a context have no meaning")
    check_tokens(mix, context, "context")
    lengths = check_lengths(lengths, context, "context_lengths")
    return zero_padding(context, lengths), lengths


def check_memory(mix: Mixer, memory: Any, lengths: Tensor | None, batch: int) -> None:
    """Refuse a memory that was not made by `remember` of this module or of an equal one."""
    if lengths is not None:
        raise ValueError("context_lengths was given with a memory, which has its own lengths: leave it out")
    name, double = type(mix).__name__, torch.float64
    if not isinstance(memory, mix.memory_type):
        came = f"{type(memory).__module__}.{type(memory).__name__}"
        raise ValueError(f"context is a {came}: accepted is a tensor, or the memory that this {name}'s remember made")
    if torch.compiler.is_compiling():
        return
    for field, t, (_, shape) in zip(memory._fields, memory, field_shapes(mix, "memory"), strict=True):
        _check_batch(mix, f"context.{field}", t, batch, f"context.{field}")
        if field == "lengths" and t.dtype != torch.int64:
            raise ValueError(f"context.lengths has dtype {t.dtype}: accepted is int64")
        # with autocast it can have any type except float64
        if field != "lengths" and (t.dtype not in FLOATS or (t.dtype == double) != (mix._like.dtype == double)):
            raise ValueError(f"context.{field} has dtype {t.dtype}: this module computes in {mix._like.dtype}")
        if not _fits(t, shape):
            raise ValueError(f"context.{field} has shape {list(t.shape)}: this {name} remembers {_words(shape)}")


def check_stateful(mix: Mixer, method: str) -> None:
    if mix.traits.state is None:
        causal_only = type(mix).traits.state and not mix.options.causal
        why = "built with causal=False" if causal_only else "without a recurrent form"
        name = type(mix).__name__
        raise NotImplementedError(f"{method}: {name} is {why}, so there is no state; recompute with forward")


def check_state(mix: Mixer, state: Any, batch: int) -> None:
    """Refuse a state from a module with other options."""
    name = type(mix).__name__
    if mix.state_type is not None and not isinstance(state, mix.state_type):
        raise ValueError(f"state is a {type(state).__name__}: accepted is the {name} state of init_state or prefill")
    if torch.compiler.is_compiling():
        return
    device = mix._like.device
    for field, t, (dtype, shape) in zip(state._fields, state, field_shapes(mix, "state"), strict=True):
        # most states pass here at once: this runs for every layer and token
        if type(t) is Tensor and t.dtype is dtype and t.device == device and t.layout is torch.strided:
            sizes = t.shape
            if len(sizes) == len(shape) and sizes[0] == batch and (sizes[1:] == shape[1:] or _fits(t, shape)):
                continue
        _check_batch(mix, f"state.{field}", t, batch, "state")
        if not _fits(t, shape) or t.dtype != dtype:
            raise ValueError(
                f"state.{field} is {t.dtype} {list(t.shape)}: this {name} keeps {dtype} {_words(shape)}; "
                "pass a state of this module, or of one with the same options"
            )


def _check_batch(mix: Mixer, name: str, t: Any, batch: int, whole: str) -> None:
    """Refuse a field of a state or memory that is not a tensor with this batch on the module's device."""
    check_tensor(name, t)
    if t.shape[:1] != (batch,):
        raise ValueError(f"{whole} has batch {t.shape[0] if t.ndim else 'none'}: x has batch {batch}")
    if t.device != mix._like.device:
        raise ValueError(f"{name} is on {t.device}: this module is on {mix._like.device}")


def field_shapes(mix: Mixer, kind: str) -> list[tuple[torch.dtype, Shape]]:
    """Type and shape of each field of a "state" or "memory"; None for sizes that depend on the capacity or context."""
    key, most = (kind, mix._like.dtype), 1000 if kind == "state" else mix.options.max_length or 1000
    if key not in mix._shapes:
        mix._shapes[key] = [
            (a.dtype, tuple(n if n == m else None for n, m in zip(a.shape, b.shape, strict=True)))
            for a, b in zip(_example(mix, kind, 1), _example(mix, kind, most), strict=True)
        ]
    return mix._shapes[key]


def _example(mix: Mixer, kind: str, size: int) -> Any:
    if kind == "state":
        return mix._init_state(1, size)
    context = mix._like.new_zeros(1, size, mix.options.dim)
    with torch.no_grad():
        return mix._remember(context, torch.full((1,), size, device=context.device))


def _fits(t: Tensor, shape: Shape) -> bool:
    """Whether t has this shape; the first dimension is the batch, which may be anything."""
    return t.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape[1:], t.shape[1:], strict=True))


def _words(shape: Shape) -> list[int | str]:
    return ["batch", *("any" if n is None else n for n in shape[1:])]
