"""Linformer: attention has almost low rank, so a few learned mixtures of the keys and values can replace all of them.

Paper       Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768, §4
Definition  O = softmax(Q (E K)ᵀ / √K) (F V) per head, with learned E, F of shape rank × max_length; a row of n keys
            uses their first n columns. share="none": an E and an F for each head; "heads": one E and one F for all;
            "keyvalue": E = F as well; "layer": the same E for all layers too, after `share_with`
Cost        train O(T·rank·D) time, O((T + rank)·D) memory, E and F rank·max_length each; no decoding
Departures  E and F start uniform in ±1/√rank; any T up to max_length is served; rotary turns q and k before E
Verified    tests/mechanisms/test_linformer.py: E = F = I is full attention, 1e-12; the PyPI package linformer 0.2.3
            with copied weights (full length, shorter, with context) agrees to 1e-12, its share_kv to 1e-7 in float32
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.mechanisms import base
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import AtLeast1, Mixer, Traits
from subquad.ops.lengths import first, zero_padding

Share = Literal["none", "heads", "keyvalue", "layer"]


class Memory(NamedTuple):
    k: Tensor  # [B, H, rank, K], E k
    v: Tensor  # [B, H, rank, V], F v
    lengths: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    rank: AtLeast1 = 128  # rows that keys and values are projected to
    share: Share = "heads"  # what the projections E and F are shared over


class Linformer(Attention):
    traits = Traits(cross=True, fixed_length=True)
    family, exponent = "fewer queries or keys", 1.0
    unused = Attention.unused - {"max_length"}
    small = (
        {"rank": 7},
        {"rank": 7, "share": "none"},
        {"rank": 60, "share": "keyvalue"},
        {"rank": 7, "share": "layer"},
    )
    approximates = True
    splits = True
    options: Options
    _why_not_causal = "E and F mix all positions before any query reads them"

    def __init__(self, options: Options):
        super().__init__(options)
        shape = (options.heads if options.share == "none" else 1, options.rank, options.max_length or 0)
        bound = 1 / math.sqrt(options.rank)
        self.key_rows = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))  # E
        separate = options.share in ("none", "heads")
        self.value_rows = nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) if separate else None  # F

    def share_with(self, first: Mixer) -> None:
        """share="layer": use the E of the first such layer from now on; models call it for every later layer."""
        if self.options.share != "layer" or not isinstance(first, Linformer) or first.options.share != "layer":
            return
        ours, theirs = tuple(self.key_rows.shape[1:]), tuple(first.key_rows.shape[1:])
        if ours != theirs:
            raise ValueError(f"first has rank and max_length {theirs}: this module has {ours}")
        self.key_rows = first.key_rows

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        return self._attend_few(q, *self._few(k, v, key_lengths))

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax(Q (E K)ᵀ / √K) F, [B, H, T, S]"""
        size = k.shape[1]
        few = torch.einsum("hrs,bshk->bhrk", self.key_rows[..., :size].expand(k.shape[2], -1, -1), k)
        scores = torch.einsum("bthk,bhrk->bhtr", q, few) / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ self._value_rows[..., :size]

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        return Memory(*self._few(*self.heads.keys(context), lengths), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q = self.heads.queries(x)
        return self._merge(self._attend_few(q, memory.k.to(q.dtype), memory.v.to(q.dtype)))

    def _few(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """E k and F v, [B, S, H, K] -> [B, H, rank, K]; zeros in k have the same effect as fewer columns of E."""
        k, v = (zero_padding(t, lengths).transpose(1, 2) for t in (k, v))
        return tuple(  # type: ignore[return-value]
            ranks.total(_columns(rows, t.shape[2]) @ t) for rows, t in ((self.key_rows, k), (self._value_rows, v))
        )

    def _attend_few(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, dropout_p=self._dropout())  # [B, H, T, V]
        return o.transpose(1, 2)

    @property
    def _value_rows(self) -> Tensor:
        return self.key_rows if self.value_rows is None else self.value_rows


def _columns(rows: Tensor, size: int) -> Tensor:
    """The columns of E or F for the first tokens, or for this rank's: [·, rank, size]."""
    cut = ranks.layout(size)
    return first(rows, size, -1) if cut is None else rows.narrow(-1, cut.offset, size)
