"""What our attention functions need to know of the masks and caches of Hugging Face's models.

Their mask functions are made of functions of two positions. `read` takes them apart; `make_mask` then finds, once in a
forward pass, where each row's tokens are and which keys a token after a cache reads.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from subquad.ops.lengths import require
from subquad.ops.sparse import Pattern

RUNS = 16  # most slices of a cache that are joined; more are gathered key by key
FEW = 8  # tokens after a cache whose keys are gathered for each token
Window = tuple[int, int] | None  # how many tokens before and after its own a query may read


class Sequences(NamedTuple):
    """How rows of theirs become sequences of ours, without padding in front: N sequences of at most L positions."""

    rows: Tensor  # [N, 1], the row of each sequence
    slots: Tensor  # [N, L], the key at each position; below 0 if there is none
    queries: Tensor  # [N, L], the query at each position; below 0 if there is none
    lengths: Tensor  # [N]
    sequence: Tensor  # [B, T], the sequence of each query
    place: Tensor  # [B, T], its position there; -1 for padding


@dataclass(frozen=True)
class PatternMask:
    """What the attention functions need to know of masks and caches. Models pass it on as they pass a 4-D mask."""

    shape: tuple[int, int, int, int]  # of the mask that this stands for, [B, 1, T, S]
    causal: bool
    window: Window = None
    used: int = 0  # the keys from there on are slots that a static cache has not filled yet
    begin: int = 0  # no query is at a position before this one
    packed: bool = False
    real: Tensor | None = None  # [B, slots], which slots from the first one on hold tokens; None: all
    sequences: Sequences | None = None  # None: each row is a sequence from its first slot on, all slots new
    slots: Tensor | None = None  # [B or 1, T, M], the keys of each query, -1 for none: for few tokens after a cache
    runs: tuple[tuple[int, int], ...] = ()  # in place of slots: the keys of one query, the same in all rows

    @property
    def ndim(self) -> int:
        return 4

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("a pattern cannot work with a model that computes its own attention, as T5 did up to 5.14")

    def contiguous(self) -> "PatternMask":
        return self

    def to(self, *args: Any, **kwargs: Any) -> "PatternMask":
        """On another device, when a model is spread over several."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(*args, **kwargs)

        sequences = None if self.sequences is None else Sequences(*(x.to(*args, **kwargs) for x in self.sequences))
        return replace(self, real=moved(self.real), slots=moved(self.slots), sequences=sequences)


def back(o: Tensor, sequences: Sequences | None, begin: int) -> Tensor:
    """The outputs of sequences, from position `begin` on, in the rows of the model: [B, T, ...], zero for padding."""
    if sequences is None:
        return o
    place = sequences.place - begin
    padding = (sequences.place < 0).view(*place.shape, *[1] * (o.ndim - 2))
    return o[sequences.sequence, place.clamp(min=0)].masked_fill(padding, 0)


def refuse(name: str, what: str, instead: str = "") -> NoReturn:
    raise ValueError(f'attn_implementation="{name}" cannot work with {what}' + (f": {instead}" if instead else ""))


class Form(NamedTuple):
    """What one of their mask functions says."""

    causal: bool = False
    window: Window = None
    segments: Tensor | None = None  # [B, T], the packed sequence of each token


@torch.compiler.disable
def read(name: str, function: Callable[..., Any]) -> Form:
    """Their masks are functions inside functions; refuses those that are not made of parts known here."""
    if function is masking_utils.causal_mask_function:
        return Form(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Form()
    kind, values = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
    match kind:
        case "and_masks":
            parts = [read(name, part) for part in values["mask_functions"]]
            windows = [part.window for part in parts if part.window is not None]
            segments = [part.segments for part in parts if part.segments is not None]
            window = (min(w[0] for w in windows), min(w[1] for w in windows)) if windows else None
            return Form(any(part.causal for part in parts), window, segments[0] if segments else None)
        case "sliding_window_overlay":
            size = values["sliding_window"]
            return Form(window=(size - 1, size - 1))
        case "sliding_window_bidirectional_overlay":
            return Form(window=(values["sliding_window"],) * 2)
        case "packed_sequence_mask_function":
            return Form(segments=values["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return read(name, values["mask_function"])
    refuse(name, f"the mask {kind} of this model", "accepted are causal, bidirectional, windowed and packed masks")


@torch.compiler.disable
def make_mask(
    pattern: Pattern,
    form: Form,
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    device: torch.device,
) -> PatternMask:
    """The mask of T queries from `q_offset` on and S keys from `kv_offset` on, where slots are counted with padding."""
    batch, _, T, S = shape
    end = kv_offset + S
    real = attention_mask
    if real is not None:
        real = F.pad(real.bool(), (0, max(0, end - real.shape[1])))[:, :end]
    if not form.causal:
        padded = real is not None and not bool(real.all())
        mask = PatternMask(shape, False, form.window, used=S, real=real if padded else None)
        if real is None or not padded or T != S:
            return mask
        return replace(mask, sequences=unpad(real, 0, T, 0))
    if form.segments is not None and bool(form.segments.any()):  # else there is one in each row: nothing is packed
        sequences = unpack(form.segments.expand(batch, -1))
        return PatternMask(shape, True, form.window, used=S, packed=True, sequences=sequences)
    if T == 1 or (T <= FEW and int(q_offset) > 0):
        same = real is None and T == 1 and isinstance(q_offset, int)  # for all rows, and known here
        place = torch.device("cpu") if same else device
        slots = keys_after(pattern, form.window, real, T, q_offset, kv_offset, S, place)
        runs = runs_of(slots[slots >= 0].tolist()) if same else ()
        if 0 < len(runs) <= RUNS:
            return PatternMask(shape, True, form.window, used=S, runs=runs)
        return PatternMask(shape, True, form.window, used=S, real=real, slots=slots.to(device))
    first = int(q_offset)
    end = first + T
    mask = PatternMask(shape, True, form.window, used=end - kv_offset)
    padded = real is not None and not bool(real[:, :end].all())
    if not padded and first == 0:
        return mask
    real = torch.ones(batch, end, dtype=torch.bool, device=device) if real is None else real[:, :end]
    begin = int(real[:, :first].sum(1).min()) if first else 0
    return replace(mask, begin=begin, real=real, sequences=unpad(real, first, T, kv_offset))


def unpad(real: Tensor, first: int, T: int, kv_offset: int) -> Sequences:
    """The rows of a padding mask [B, slots] as sequences; the queries are in the T slots from `first` on."""
    batch, size = real.shape
    position = torch.where(real, real.cumsum(1) - 1, -1)
    slot_at = real.new_full((batch, size + 1), -1, dtype=torch.int64)
    slot_at.scatter_(1, torch.where(real, position, size), torch.arange(size, device=real.device).expand_as(real))
    slot_at = slot_at[:, :size]
    lengths = real.sum(1)
    rows = torch.arange(batch, device=real.device)[:, None]
    slots = (slot_at - kv_offset).clamp(min=-1)
    queries = (slot_at - first).clamp(min=-1)
    return Sequences(rows, slots, queries, lengths, rows.expand(-1, T), position[:, first : first + T])


def unpack(segments: Tensor) -> Sequences:
    """Packed rows [B, T] with the number of each token's sequence, which counts up from 0 in each row."""
    batch, T = segments.shape
    counts = segments[:, -1] + 1
    sequence = segments + (counts.cumsum(0) - counts)[:, None]
    lengths = torch.bincount(sequence.flatten())
    starts = (lengths.cumsum(0) - lengths)[sequence]  # in the tokens of all rows
    at = torch.arange(batch * T, device=segments.device).view(batch, T)
    place = at - starts
    slots = segments.new_full((len(lengths), int(lengths.max())), -1)
    slots[sequence, place] = at % T
    rows = (lengths.cumsum(0) - lengths) // T
    return Sequences(rows[:, None], slots, slots, lengths, sequence, place)


def runs_of(slots: list[int]) -> tuple[tuple[int, int], ...]:
    """Slots as slices: [7, 0, 1, 5, 6] -> ((0, 2), (5, 8))"""
    slots = sorted(slots)
    ends = [n for n in range(1, len(slots)) if slots[n] != slots[n - 1] + 1]
    return tuple((slots[a], slots[b - 1] + 1) for a, b in zip([0, *ends], [*ends, len(slots)], strict=True) if slots)


def keys_after(
    pattern: Pattern,
    window: Window,
    real: Tensor | None,
    T: int,
    q_offset: int | Tensor,
    kv_offset: int,
    S: int,
    device: torch.device,
) -> Tensor:
    """The slots in the cache that each of T causal queries reads, -1 where there is none: [B or 1, T, M]."""
    size = kv_offset + S
    new = q_offset + torch.arange(T, device=device).expand(1 if real is None else len(real), -1)  # slots of the queries
    position = new if real is None else (real.cumsum(1) - 1).gather(1, new)
    keys = pattern.keys(position.clamp(min=0).flatten(), size, causal=True).view(*new.shape, -1)
    read = keys >= 0
    if window is not None:
        read = read & (position[..., None] - keys <= window[0])
    if real is None:
        slots = keys - kv_offset
    else:
        read = read & real.gather(1, new)[..., None]
        slots = unpad(real, 0, size, kv_offset).slots.gather(1, keys.clamp(min=0).flatten(1)).view_as(keys)
    if kv_offset:
        dropped = "the cache has dropped keys that the pattern reads: pad on the left, or use a cache without a window"
        require(~(read & (slots < 0)).any(), dropped)
    return torch.where(read, slots, -1)
