"""Our patterns as an attention implementation of Hugging Face's models: `register` and what it registers.

Theirs has two tables, one of attention functions and one of mask functions. The mask function runs once in a forward
pass: it turns padding, packing, windows and caches into a `PatternMask`. The attention function runs in every layer,
and computes in one of three ways:

    from the start of a sequence    ops.sparse_attention, with its kernels
    a few tokens after a cache      a gather of the keys of each query
    anything else                   plain torch, in blocks of queries: many tokens after a cache, soft caps, biases of
                                    the scores, dropout, and windows that cut global or random parts of the pattern

The pattern is over the positions of tokens in their own sequence: padding does not count, wherever it is, and each
sequence that is packed into a row counts from 0. So a padded row gives what the row alone gives. What is outside a
sliding window of the config is hidden. Cross-attention, which has no common positions, stays dense.
"""

import inspect
from collections.abc import Callable
from dataclasses import astuple
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils import output_capturing

from subquad.checks import checked
from subquad.hf.masks import PatternMask, Window, back, make_mask, read, refuse
from subquad.ops.lengths import require
from subquad.ops.precision import wide
from subquad.ops.sparse import Block, Dense, Dilated, Local, Pattern, Random, Strided, sparse_attention

ROWS = 256  # queries in a block of plain torch
# what models pass along for others: for their own layers, for losses and for kernels of other implementations
FOR_OTHERS = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states", "return_dict",
        "output_router_logits", "sliding_window", "max_length_q", "max_length_k", "deterministic", "target_dtype",
        "position_embeddings", "is_causal", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx",
        "encoder_hidden_states", "encoder_attention_mask",
    }
)  # fmt: skip


@checked
def register(pattern: Pattern) -> str:
    """Make a pattern an attention implementation of transformers, and return its name there.

    name = subquad.hf.register(Local(4096) | Global(4))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
    """
    if not {"q_length", "q_offset"} <= set(inspect.signature(masking_utils.sdpa_mask).parameters):
        import transformers

        how = "accepted are versions whose mask functions take q_length and q_offset, such as 5.23"
        raise ImportError(f"transformers {transformers.__version__} makes masks in another way: {how}")
    atoms = ("_".join([type(a).__name__.lower(), *map(str, astuple(a))]) for a in pattern.atoms)  # type: ignore[call-overload]
    name = "_".join(("subquad", *atoms))
    registered = Registered(name, pattern)
    AttentionInterface.register(name, registered.attend)
    AttentionMaskInterface.register(name, registered.mask)
    return name


class Registered(NamedTuple):
    """One pattern, with the two functions that transformers calls."""

    name: str
    pattern: Pattern

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
        attention_mask: Any = None,
        **theirs: Any,
    ) -> PatternMask:
        """Called by the models, once for each kind of layer. `theirs` are hints for the making of dense masks."""
        if isinstance(attention_mask, PatternMask):  # made by `generate` before the forward pass
            return attention_mask
        if theirs.get("use_vmap"):
            refuse(self.name, "a mask of the model's or user's own (and_mask_function or or_mask_function)")
        form = read(self.name, mask_function)
        device = torch.device(theirs.get("device", "cpu"))
        shape = (batch_size, 1, q_length, kv_length)
        return make_mask(self.pattern, form, shape, q_offset, kv_offset, attention_mask, device)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **theirs: Any,
    ) -> tuple[Tensor, None]:
        """Called by the attention modules: query [B, H, T, D], key and value [B, Hkv, S, D] -> [B, T, H, D]."""
        mask = self._check(module, query, key, attention_mask, theirs)
        scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, position_bias, dropout)
        if mask.slots is not None or mask.runs:
            return gathered(query, key, value, mask, scores), None
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if is_cross(module):
            return cross(self.name, q, k, v, mask.real, scores), None
        k, v = k[:, : mask.used], v[:, : mask.used]
        within = inside(self.pattern, mask.window, k.shape[1], mask.causal)
        if within is None or mask.begin or softcap is not None or position_bias is not None or dropout:
            return in_blocks(q, k, v, self.pattern, mask, scores), None
        return from_the_start(q, k, v, within, mask, scores), None

    def _check(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, mask: Any, theirs: dict[str, Any]
    ) -> PatternMask:
        """The mask, after refusing everything that would otherwise be ignored."""
        for name, value in theirs.items():
            if name not in FOR_OTHERS and value is not None:
                refuse(self.name, f"the argument {name} of {type(module).__name__}")
        collector = None if torch.compiler.is_compiling() else output_capturing._active_collector.get()
        if theirs.get("output_attentions") or (collector and "attentions" in collector):
            refuse(self.name, "output_attentions", 'load the model with attn_implementation="eager" to see weights')
        if self.name not in AttentionMaskInterface._global_mapping:
            raise RuntimeError(
                f'"{self.name}" stands in AttentionInterface, but not in AttentionMaskInterface, so transformers drops '
                "every mask without a word: register patterns with subquad.hf.register"
            )
        (B, _, T, _), S, crosses = query.shape, key.shape[2], is_cross(module)
        if mask is None:
            causal = theirs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
            if crosses or (not causal and T == S):
                return PatternMask((B, 1, T, S), False, used=S)  # the model asked for no mask: all keys are tokens
        if not isinstance(mask, PatternMask):
            what = "no mask" if mask is None else f"a mask of its own, {type(mask).__name__} {list(mask.shape)},"
            refuse(
                self.name,
                f"{type(module).__name__} with {what}",
                "pass attention_mask [B, T] with 1 for tokens and 0 for padding, or none",
            )
        if mask.shape[2:] != (T, S):
            refuse(self.name, f"{T} queries and {S} keys with a mask for {mask.shape[2]} and {mask.shape[3]}")
        if crosses:
            if mask.causal or mask.window or mask.packed:
                refuse(self.name, "cross-attention with a causal, windowed or packed mask")
        elif not mask.causal and T != S:
            refuse(self.name, f"{T} queries and {S} keys in {type(module).__name__}, which is neither causal nor cross")
        elif theirs.get("sliding_window") is not None and mask.window is None:
            refuse(self.name, f"sliding_window={theirs['sliding_window']} and a mask without a window")
        ends, number = theirs.get("cu_seq_lens_q"), theirs.get("seq_idx")
        several = number is not None if ends is None else (B, ends.numel()) != (1, 2)  # a pack may be of one sequence
        if several and not mask.packed:
            refuse(
                self.name,
                "cu_seq_lens or seq_idx alone",
                "mark packed sequences by position_ids that start again at 0, without attention_mask and cache",
            )
        at, whole = theirs.get("position_ids"), mask.sequences is None and mask.slots is None and not mask.runs
        if at is not None and at.ndim == 2 and mask.causal and whole and not vars(module).get("layer_idx"):  # once
            instead = "pass neither attention_mask nor a cache"
            require((at.diff(dim=-1) > 0).all(), f"position_ids that start again mark packed sequences: {instead}")
        return mask


def is_cross(module: torch.nn.Module) -> bool:
    """Whether an attention module reads another sequence; theirs mark this in three ways."""
    own = vars(module)  # faster than getattr, which searches parameters too
    if "Cross" in type(module).__name__ or own.get("is_cross_attention"):
        return True
    return bool(own.get("is_decoder")) and not getattr(module, "is_causal", True)


def inside(pattern: Pattern, window: Window, size: int, causal: bool) -> Pattern | None:
    """The part of a pattern inside a window, for `size` tokens; None if atoms cannot express it."""
    if window is None or size <= min(window) + 1:
        return pattern
    before, after = window
    parts: list[Pattern] = []
    for atom in pattern.atoms:
        match atom:
            case Local():
                parts.append(Local(min(atom.before, before), min(atom.after, after)))
            case Dense():
                parts.append(Local(before, after))
            case Dilated():
                parts.append(Dilated(min(atom.window, min(window) // atom.gap), atom.gap))
            case Strided():
                parts.append(Dilated(min(window) // atom.l, atom.l))
            case Block() if (atom.before + 1) * atom.l <= before + 1 and (
                causal or (atom.after + 1) * atom.l <= after + 1
            ):
                parts.append(atom)
            case _:
                return None
    return reduce(or_, parts)


# The three ways of computing


class Scores(NamedTuple):
    """How scores become weights."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [H], the logit of a key without a value
    bias: Tensor | None  # [1 or B, H, T, S]
    dropout: float

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.bias is None and not self.dropout

    def weights(self, scores: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        """Scores [B, H, T, S] before scaling -> weights, zero where nothing is visible."""
        scores = wide(scores) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        some = visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~visible & some, -torch.inf).masked_fill(~some, 0)
        if self.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        weights = weights.masked_fill(~some, 0)
        return F.dropout(weights, self.dropout) if self.dropout else weights


def from_the_start(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: PatternMask, scores: Scores) -> Tensor:
    """Whole sequences, by the op and its kernels."""
    s, lengths = mask.sequences, None
    if s is not None:
        at = s.slots.clamp(min=0)
        q, k, v, lengths = q[s.rows, s.queries.clamp(min=0)], k[s.rows, at], v[s.rows, at], s.lengths
    how: dict[str, Any] = {"causal": mask.causal, "lengths": lengths, "scale": scores.scale}
    if scores.sinks is None:
        o = sparse_attention(q, k, v, pattern, **how)
    else:
        o, lse = sparse_attention(q, k, v, pattern, return_lse=True, **how)
        o = o * torch.sigmoid(lse - scores.sinks.to(lse.dtype))[..., None].to(o.dtype)
    return back(o, s, 0)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: PatternMask, scores: Scores) -> Tensor:
    """Dense attention of each block of queries to the keys that any of them reads."""
    s = mask.sequences
    size = k.shape[1] if s is None else s.slots.shape[1]
    H, Hkv = q.shape[2], k.shape[2]
    lengths = None if s is None else s.lengths[:, None, None]
    begin, outputs = mask.begin // ROWS * ROWS, []
    for start in range(begin, size, ROWS):
        stop = min(start + ROWS, size)
        columns = union(pattern, mask.window, mask.causal, start, stop, size, q.device)
        i, j = torch.arange(start, stop, device=q.device)[:, None], columns[None]
        if s is None:
            qs, ks, vs = q[:, start:stop], k[:, columns], v[:, columns]
            bias = None if scores.bias is None else scores.bias[:, :, start:stop][..., columns]
            length: Any = size
        else:
            rows, at, queries = s.rows, s.slots[:, columns], s.queries[:, start:stop].clamp(min=0)
            present = (at >= 0) & (columns < s.lengths[:, None])
            at, length = at.clamp(min=0), lengths
            qs, ks = q[rows, queries], k[rows, at]
            vs = v[rows, at].masked_fill(~present[..., None, None], 0)
            bias = scores.bias
            if bias is not None:
                bias = bias.expand(len(q), -1, -1, -1).movedim(1, -1)[rows[..., None], queries[..., None], at[:, None]]
                bias = bias.movedim(-1, 1)
        visible = pattern._allowed(i, j, mask.causal, length)
        if mask.window is not None:
            visible = visible & (i - j <= mask.window[0]) & (j - i <= mask.window[1])
        visible = visible.expand(torch.broadcast_shapes(visible.shape, (stop - start, len(columns))))
        if s is not None:
            visible = (visible & present[:, None])[:, None]  # [N, 1, C, U]
        raw = torch.einsum("bcgrk,bugk->bgrcu", qs.unflatten(2, (Hkv, H // Hkv)), ks).flatten(1, 2)
        weights = scores.weights(raw, visible, bias).to(vs.dtype).unflatten(1, (Hkv, H // Hkv))
        outputs.append(torch.einsum("bgrcu,bugv->bcgrv", weights, vs).flatten(2, 3))
    return back(torch.cat(outputs, 1), s, begin)


def gathered(q: Tensor, k: Tensor, v: Tensor, mask: PatternMask, scores: Scores) -> Tensor:
    """A few queries [B, H, T, D], each with its own keys -> [B, T, H, D]."""
    (B, H, T, _), Hkv = q.shape, k.shape[1]
    outputs = []
    for t in range(T):
        slots = None if mask.slots is None else mask.slots[:, t]  # [B or 1, M]
        visible = None if slots is None else (slots >= 0)[:, None, None]
        ks, vs = (_columns(x, slots, mask.runs) for x in (k, v))  # [B, Hkv, M, D]
        if visible is not None:
            vs = vs.masked_fill(~visible.mT, 0)
        one = q[:, :, t].unflatten(1, (Hkv, H // Hkv))  # [B, Hkv, H/Hkv, D]
        if scores.plain:
            o = F.scaled_dot_product_attention(one, ks, vs, visible, scale=scores.scale)
            if visible is not None:
                o = o.masked_fill(~visible.any(-1, keepdim=True), 0)
        else:
            raw = (one @ ks.mT).flatten(1, 2)[:, :, None]  # [B, H, 1, M]
            bias = scores.bias
            if bias is not None:
                bias = _columns(bias[:, :, t, :, None].expand(B, -1, -1, -1), slots, mask.runs).mT
            seen = torch.ones_like(raw, dtype=torch.bool) if visible is None else visible
            o = scores.weights(raw, seen, bias)[:, :, 0].to(vs.dtype).unflatten(1, (Hkv, H // Hkv)) @ vs
        outputs.append(o.flatten(1, 2))
    return torch.stack(outputs, 1)


def _columns(x: Tensor, slots: Tensor | None, runs: tuple[tuple[int, int], ...]) -> Tensor:
    """x [B, Hkv, S, D] at slots [B or 1, M], or at those of some runs -> [B, Hkv, M, D]"""
    if slots is None:
        parts = [x[:, :, start:stop] for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    slots = slots.clamp(min=0)
    if len(slots) == 1:
        return x.index_select(2, slots[0])
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def cross(name: str, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scores: Scores) -> Tensor:
    """Dense attention to another sequence, of which `real` [B, S] are tokens."""
    if scores.softcap is not None or scores.sinks is not None:
        refuse(name, "softcap or sinks in cross-attention")
    mask = None if real is None else real[:, None, None]
    if scores.bias is not None:
        mask = scores.bias if mask is None else scores.bias.masked_fill(~mask, torch.finfo(scores.bias.dtype).min)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    how: dict[str, Any] = {"attn_mask": mask, "dropout_p": scores.dropout, "scale": scores.scale}
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how).transpose(1, 2)


@lru_cache(maxsize=256)
def union(
    pattern: Pattern, window: Window, causal: bool, start: int, stop: int, size: int, device: torch.device
) -> Tensor:
    """The keys below `size` that any query from `start` to `stop` reads, in ascending order."""
    drawn = not causal and any(isinstance(atom, Random) for atom in pattern.atoms)  # among the blocks of each row
    hit = torch.full((size + 1,), drawn)
    if not drawn:
        hit[pattern.keys(torch.arange(start, stop), size, causal=causal).flatten()] = True  # -1 is the last one
    columns = hit[:size].nonzero()[:, 0]
    if window is not None:
        columns = columns[(columns >= start - window[0]) & (columns < stop + window[1])]
    return columns.to(device)
