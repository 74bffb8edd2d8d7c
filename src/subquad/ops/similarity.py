"""Attention with any similarity: o_t = Σ_s sim(q_t, k_s) v_s / Σ_s sim(q_t, k_s), the general form of the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import checked, shown
from subquad.ops.lengths import check_attention, keep, zero_padding
from subquad.ops.precision import wide


@checked
def similarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sim: Callable[[Tensor, Tensor], Tensor],
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> o [B, T, H, V] in v's type. Dense: O(T·S) time and memory.

    sim          computes weights [B, H, T, S] >= 0 from q and k; a row is divided by its sum + eps.
                 Softmax is lambda q, k: torch.exp(torch.einsum("bthk,bshk->bhts", q, k) / K**0.5)
    lengths      [B] right padding of q, k and v: padded keys have no weight, padded outputs are zero. If T differs
                 from S, it means key_lengths
    key_lengths  [B] right padding of keys and values only, for cross-attention
    """
    ranks.refuse("similarity_attention", "accepted are linear_attention and sparse_attention")
    check_attention(q, k, v, causal, lengths, key_lengths)
    (B, T, H, _), S = q.shape, k.shape[1]
    if eps < 0:
        raise ValueError(f"eps={eps}: accepted is a number of at least 0")
    weight = sim(q, k)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.device != q.device:
        raise ValueError(f"sim gave {shown(weight)}: accepted are floating point weights [B, H, T, S] on {q.device}")
    if weight.shape != (B, H, T, S):
        raise ValueError(f"sim gave shape {tuple(weight.shape)}: accepted is [B, H, T, S] = {(B, H, T, S)}")
    # waits for a GPU, but that takes little time beside a dense matrix, and a wrong sim raises here
    if not torch.compiler.is_compiling() and weight.device.type != "meta" and not bool((weight >= 0).all()):
        raise ValueError("sim gave negative weights or NaN: accepted are weights of at least 0")
    weight = wide(weight.tril() if causal else weight)
    key_lengths = key_lengths if key_lengths is not None else lengths
    present = keep(key_lengths, S)  # [B, S]
    if present is not None:
        weight, v = weight.masked_fill(~present[:, None, None], 0), zero_padding(v, key_lengths)
    total = weight.sum(-1, keepdim=True) + eps
    weight = weight / total.masked_fill(total == 0, 1)  # with eps=0, a query without weights gives zeros
    o = torch.einsum("bhts,bshv->bthv", weight, v.to(weight.dtype)).to(v.dtype)
    return zero_padding(o, lengths) if T == S else o
