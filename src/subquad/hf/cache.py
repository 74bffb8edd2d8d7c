"""The states of our models as transformers handles them: one object that the steps of a generation share."""

import copy
from collections.abc import Callable
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.checks import refuse
from subquad.mechanisms.base import Mixer
from subquad.models.decoding import Prefix
from subquad.models.state import map_state
from subquad.models.transformer import State


class LayerState(CacheLayerMixin):
    """What one layer keeps: sums, a window, keys and values, or, for a model that recomputes, the tokens so far."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, name: str, kind: str, rewinds: bool):
        super().__init__()
        self.name, self.kind, self.rewinds = name, kind, rewinds
        self.state: Any = None
        self.columns = 0  # that it has read, padding included

    @property
    def is_croppable(self) -> bool:
        return self.rewinds

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no limit

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"update: {self.name} keeps a state ({self.kind}); the model itself advances it")

    lazy_initialization = update

    def offload(self) -> None:
        """The state stays on its device: it is small, or read at the next token."""

    prefetch = offload

    def reset(self) -> None:
        self.state, self.columns, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and not self.rewinds:
            raise NotImplementedError(
                f"crop({tokens_to_remove}) cannot work: {self.name} keeps a state ({self.kind}) from which tokens "
                "cannot be removed again; take copy.deepcopy(cache) before the tokens that may be dropped and continue "
                "from the copy, or read the shorter text from an empty cache"
            )
        if tokens_to_remove and self.state is not None:
            count = abs(tokens_to_remove)
            self.state = self.state._replace(position=self.state.position - count)
            self.columns -= count

    def _change(self, change: Any) -> None:
        if self.state is not None:
            self.state = map_state(change, self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda t: t[indices.to(t.device)])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(self.name, self.kind, self.rewinds)
        copied.state, copied.columns, copied.is_initialized = self.state, self.columns, self.is_initialized
        copied._change(_detached)  # not a part of a graph, which torch cannot copy
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.kind}, columns={self.columns})"


class SubquadCache(Cache):
    """The state of a model of ours: `model.make_cache()`, then `model(ids, past_key_values=cache)`.

    It counts the columns that each layer has read (`get_seq_length(layer)`, padding included) and the tokens of each
    row (`tokens`), and reorders, repeats and selects rows. A copy by `copy.deepcopy` continues on its own.
    """

    def __init__(self, layers: list[LayerState], capacity: int | None = None):
        super().__init__(layers=layers)
        self.capacity = capacity  # columns for which growing states have room from the start
        self.padded: Tensor | int = 0  # columns up to the last padding
        self.last: Tensor | None = None  # [B, D], the vector of each row's last token
        self._position: Tensor | None = None  # [B]

    @property
    def parts(self) -> list[LayerState]:
        return cast(list[LayerState], self.layers)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def tokens(self) -> Tensor | None:
        """[B]: the tokens that each row has read; None before the first."""
        first = self.parts[0].state
        return first.position if isinstance(first, Prefix) else self._position

    @property
    def state(self) -> Any:
        """The state as `prefill` and `step` take it; None before the first token."""
        first = self.parts[0].state
        if first is None or isinstance(first, Prefix):
            return first
        return State(tuple(layer.state for layer in self.parts), self._position)  # type: ignore[arg-type]

    def advance(self, state: Any, columns: int, padded: Tensor | int) -> None:
        """Keep the state after that many more columns; those up to `padded` hold padding."""
        start = self.columns
        states = (state,) if isinstance(state, Prefix) else state.layers
        for layer, own in zip(self.parts, states, strict=True):
            layer.state, layer.is_initialized = own, True
            layer.columns += columns
        self._position = None if isinstance(state, Prefix) else state.position
        self.padded = start + padded if isinstance(padded, Tensor) or padded else self.padded

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The columns that a layer has read."""
        if not -len(self.layers) <= layer_idx < len(self.layers):
            refuse("layer_idx", layer_idx, f"0 to {len(self.layers) - 1}")
        return self.parts[layer_idx].columns

    def has_previous_state(self, *_: Any) -> bool:
        return self.columns > 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.parts[0].update(*args, **kwargs)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens: crop(-3) forgets three. Only states that keep every token by itself can do that.

        crop(5) keeps the first five columns, as transformers 5.14 asks.
        """
        if isinstance(tokens_to_remove, Tensor):
            tokens_to_remove = int(tokens_to_remove)
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int):
            refuse("tokens_to_remove", tokens_to_remove, "a negative number, such as -3 to forget three tokens, or 0")
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.columns)
        if tokens_to_remove == 0:
            return
        fixed = next((layer for layer in self.parts if not layer.rewinds), None)
        if fixed is not None:
            fixed.crop(tokens_to_remove)  # raises, before any layer has changed
        if (least := int(self.padded) - self.columns) > tokens_to_remove:
            refuse("tokens_to_remove", tokens_to_remove, f"at least {least}: columns before that hold padding")
        for layer in self.parts:
            layer.crop(tokens_to_remove)
        self.last = None
        if self._position is not None:
            self._position = self._position + tokens_to_remove

    def reset(self) -> None:
        super().reset()
        self._position, self.last, self.padded = None, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def __deepcopy__(self, memo: dict[int, Any]) -> "SubquadCache":
        copied = SubquadCache([copy.deepcopy(layer, memo) for layer in self.parts], self.capacity)
        copied._position, copied.last, copied.padded = self._position, self.last, self.padded
        copied._change(_detached)
        return copied

    def _take(self, rows: Tensor) -> None:
        self._change(lambda tensor: tensor[rows.to(tensor.device)])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._position = None if self._position is None else change(self._position)
        self.last = None if self.last is None else change(self.last)

    @property
    def batch_size(self) -> int:
        return -1 if self.tokens is None else len(self.tokens)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can forget tokens."""
        return all(layer.rewinds for layer in self.parts)


def in_words(mixer: Mixer) -> str:
    """What the state of a mixer is, as messages say it."""
    return {"constant": "a running sum", "window": "the last tokens"}.get(mixer.traits.state or "", "growing")


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def check_cache(cache: object, layers: int, rows: int | None, device: torch.device) -> None:
    """Refuse the cache of another kind of model, of another batch (None: any), or on another device."""
    if not isinstance(cache, SubquadCache):
        kind = type(cache).__name__
        raise ValueError(f"past_key_values is a {kind}: accepted is model.make_cache(), which holds states of any kind")
    if len(cache) != layers:
        raise ValueError(f"past_key_values has {len(cache)} layers: this model has {layers}")
    tokens = cache.tokens
    if tokens is not None and (tokens.device != device or rows not in (None, len(tokens))):
        has = f"{len(tokens)} rows on {tokens.device}"
        raise ValueError(f"past_key_values has {has}: input_ids has {rows} on {device}")
