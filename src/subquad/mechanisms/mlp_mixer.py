"""MLP-Mixer: the same small network over positions, for every channel.

Paper       Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision", arXiv:2105.01601, §2, eq. 1
Definition  Y[:, c] = W₂ GELU(W₁ X[:, c] + b₁) + b₂, with W₁ [hidden, max_length], W₂ [max_length, hidden]
            a row of n tokens uses the first n columns of W₁ and the first n rows of W₂ and b₂
Cost        train O(T·hidden·D) time, O((T + hidden)·D) memory; parameters 2·hidden·max_length; no decoding
Departures  the norm before it and the channel network after it belong to the block around every mechanism
Verified    tests/mechanisms/test_mlp_mixer.py: against torch.nn.Linear and GELU on the transposed input, 1e-12
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.mechanisms import base
from subquad.mechanisms.base import AtLeast1, Mixer, Traits
from subquad.ops.lengths import first


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    hidden: AtLeast1 = 256  # width of the network over positions


class MLPMixer(Mixer):
    traits = Traits(causal=False, bidirectional=True, fixed_length=True)
    family, exponent = "attention-free", 1.0
    unused = frozenset({"heads", "dropout", "rotary"})
    small = ({"hidden": 12},)
    options: Options
    _why_not_causal = "its hidden units see every position"

    def __init__(self, options: Options):
        super().__init__(options)
        length, hidden = options.max_length or 0, options.hidden
        self.w1 = nn.Parameter(torch.empty(hidden, length).uniform_(-1, 1) / math.sqrt(length))
        self.b1 = nn.Parameter(torch.zeros(hidden))
        self.w2 = nn.Parameter(torch.empty(length, hidden).uniform_(-1, 1) / math.sqrt(hidden))
        self.b2 = nn.Parameter(torch.zeros(length))

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        size = x.shape[1]  # padded tokens are zero, so they add nothing to the hidden units
        hidden = F.gelu(torch.einsum("nt,btd->bnd", first(self.w1, size), x) + self.b1[:, None])
        return torch.einsum("tn,bnd->btd", first(self.w2, size, 0), hidden) + first(self.b2, size, 0)[:, None]

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        n = x.shape[1]
        hidden = [F.gelu(x[..., c] @ self.w1[:, :n].T + self.b1) for c in range(x.shape[2])]
        return torch.stack([h @ self.w2[:n].T + self.b2[:n] for h in hidden], dim=-1)

    def _pattern(self, x: Tensor) -> Tensor:
        """How strongly each position can affect another: |W₂| |W₁|, the same for every input and channel."""
        size = x.shape[1]
        return (self.w2[:size].abs() @ self.w1[:, :size].abs()).expand(x.shape[0], 1, -1, -1)
