"""Attention with any similarity: o_t = Σ_s sim(q_t, k_s) v_s / Σ_s sim(q_t, k_s), which the others specialise."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.checks import check_heads, checked, shown
from subquad.ops.lengths import check_op_lengths
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

    sim          takes q and k as they are, gives non-negative weights [B, H, T, S]; a row is divided by its sum + eps.
                 Softmax is lambda q, k: torch.exp(torch.einsum("bthk,bshk->bhts", q, k) / K**0.5)
    lengths      [B] right padding of q, k and v alike: padded keys have no weight, padded outputs are zero. Where T
                 differs from S it is taken as key_lengths
    key_lengths  [B] right padding of keys and values alone, for cross-attention
    """
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    if k.shape[0] != batch or k.shape[2] != heads or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}:"
            " accepted is the same batch and heads for all, the same length for k and v"
        )
    if causal and queries != keys:
        raise ValueError(f"causal=True with {queries} queries and {keys} keys: accepted is as many keys as queries")
    if eps < 0:
        raise ValueError(f"eps={eps}: accepted is a number of at least 0")
    if key_lengths is not None and (causal or lengths is not None):
        raise ValueError("key_lengths with causal=True or lengths: accepted is key_lengths alone, with causal=False")
    for name, n in (("lengths", lengths), ("key_lengths", key_lengths)):
        if n is not None:
            check_op_lengths(name, n, batch, keys, q.device)
    weight = sim(q, k)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.device != q.device:
        raise ValueError(f"sim gave {shown(weight)}: accepted are floating point weights [B, H, T, S] on {q.device}")
    if weight.shape != (batch, heads, queries, keys):
        raise ValueError(
            f"sim gave shape {tuple(weight.shape)}: accepted is [B, H, T, S] = {(batch, heads, queries, keys)}"
        )
    # waits for a GPU, which is nothing beside a dense matrix, and leaves a wrong sim an error that can be caught
    if not torch.compiler.is_compiling() and weight.device.type != "meta" and not bool((weight >= 0).all()):
        raise ValueError("sim gave negative weights or NaN: accepted are weights of at least 0")
    weight = wide(weight)
    if causal:
        weight = weight.tril()
    padded_keys = key_lengths if key_lengths is not None else lengths
    if padded_keys is not None:
        padded = torch.arange(keys, device=q.device) >= padded_keys[:, None]  # [B, S]
        weight = weight.masked_fill(padded[:, None, None], 0)
        v = v.masked_fill(padded[:, :, None, None], 0)
    total = weight.sum(-1, keepdim=True) + eps
    weight = weight / total.masked_fill(total == 0, 1)  # a query that no key resembles gets zeros, with eps=0 too
    o = torch.einsum("bhts,bshv->bthv", weight, v.to(weight.dtype)).to(v.dtype)
    if lengths is not None and queries == keys:
        o = o.masked_fill((torch.arange(queries, device=q.device) >= lengths[:, None])[:, :, None, None], 0)
    return o
