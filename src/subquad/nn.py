"""Mechanisms with the interface of torch.nn, for layers that other people wrote.

for n, layer in enumerate(encoder.layers):  # of a torch.nn.TransformerEncoder
    layer.self_attn = subquad.nn.MultiheadAttention(64, 4, mechanism="performer", layer=n, batch_first=True)
"""

from typing import Any, Never

import torch
from torch import Tensor, nn

from subquad.checks import at_least, check_plain, refuse
from subquad.mechanisms import build
from subquad.mechanisms.checking import check_tokens
from subquad.ops.lengths import require, shape_of

# the names of weights in torch.nn.MultiheadAttention, and their names here
FROM_TORCH = {
    "in_proj_weight": "mixer.heads.qkv.weight",
    "in_proj_bias": "mixer.heads.qkv.bias",
    "out_proj.weight": "mixer.heads.out.weight",
    "out_proj.bias": "mixer.heads.out.bias",
}


class NotWeights:
    """A placeholder where torch looks for the weights of softmax attention.

    In eval mode TransformerEncoderLayer and TransformerEncoder skip this module's forward and pass these weights to a
    fused softmax kernel, unless an argument has a __torch_function__.
    """

    requires_grad = False
    device = torch.device("cpu")
    weight = bias = property(lambda self: self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
        weights = "in_proj_weight or out_proj of subquad.nn.MultiheadAttention, whose weights are those of its mixer"
        raise NotImplementedError(f"{function.__name__} was called with {weights}")


class MultiheadAttention(nn.Module):
    """Any mechanism with the interface of torch.nn.MultiheadAttention: y, None = attention(x, x, x).

    It takes torch's arguments, then `mechanism`, `causal`, and the options of the mechanism, as in `subquad.build`. It
    raises for everything that the mechanism cannot do. The mechanism itself is `attention.mixer`.

    - There are no attention weights to return: need_weights is False by default, and the second result is None.
    - If query, key and value are one tensor, this is self-attention. If only key and value are, it is cross-attention,
      which some mechanisms have. Do not use one with `joint_queries` (nystrom, clustered) for the cross-attention of a
      causal decoder: there the result of a query depends on later queries.
    - key_padding_mask must be right padding. In self-attention the outputs at padded positions are zero.
    - For causal attention, build with causal=True; mechanisms that are causal only, such as gla, need it. attn_mask may
      then be the causal mask, which is checked. Leave it out to save a T x T tensor.
    - A state dict of torch.nn.MultiheadAttention loads if the mechanism has the same projections, as softmax has.
    """

    # These turn off the fast paths of torch's encoder: a layer checks the first of them, an encoder the weights.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = out_proj = NotWeights()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str = "linear",
        causal: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
        at_least(self, embed_dim=1, num_heads=1)
        if embed_dim % num_heads:
            refuse("num_heads", num_heads, f"a divisor of embed_dim={embed_dim}")
        check_plain("batch_first", batch_first, bool)
        for name, value, accepted in (
            ("bias", bias, "True"),
            ("add_bias_kv", add_bias_kv, "False"),
            ("add_zero_attn", add_zero_attn, "False"),
            ("kdim", embed_dim if kdim is None else kdim, str(embed_dim)),
            ("vdim", embed_dim if vdim is None else vdim, str(embed_dim)),
        ):
            if repr(value) != accepted:
                refuse(name, value, f"{accepted}: a mechanism has its own projections")
        for name, ours in (("dim", "embed_dim"), ("heads", "num_heads")):
            if name in options:
                raise TypeError(f"{name} is the same as {ours}: leave it out")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            refuse("dtype", dtype, "a floating point type of torch")
        mixer = build(mechanism, dim=embed_dim, heads=num_heads, causal=causal, dropout=dropout, **options)
        self.mixer = mixer.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_rename_weights)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002  # torch ignores it without weights
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """[B, T, D], or [T, B, D] with batch_first=False, or [T, D] of one sequence -> the same shape, None."""
        if need_weights is not False:
            refuse("need_weights", need_weights, "False; attention.mixer.pattern(x) shows who attends to whom")
        if key is not value:
            raise ValueError("key and value are different tensors: accepted is one tensor for both")
        own, batched = query is key, isinstance(query, Tensor) and query.ndim == 3
        x = self._rows(query, "query", batched)
        context = x if own else self._rows(key, "key", batched)
        check_tokens(self.mixer, x, "query")
        if not own:
            self._check_cross(x, context)
        self._check_causal(attn_mask, is_causal, x, own)
        lengths = None if key_padding_mask is None else _lengths(key_padding_mask, context, batched)
        y = self.mixer(x, lengths) if own else self.mixer(x, context=context, context_lengths=lengths)
        if batched:
            return y if self.batch_first else y.transpose(0, 1), None
        return y[0], None

    def _rows(self, x: Tensor, name: str, batched: bool) -> Tensor:
        """A query or key as [B, T, D]."""
        if not isinstance(x, Tensor) or x.ndim != (3 if batched else 2):
            layout = f"[B, T, {self.embed_dim}]" if self.batch_first else f"[T, B, {self.embed_dim}]"
            accepted = layout if batched else f"{layout}, or [T, {self.embed_dim}] of one sequence"
            raise ValueError(f"{name} has shape {shape_of(x)}: accepted is {accepted}")
        if x.is_nested:
            raise ValueError(
                f"{name} is a nested tensor: accepted is a padded one; a TransformerEncoder that mixes layers of torch "
                "and of subquad needs enable_nested_tensor=False, or use_nested_tensor = False once it is made"
            )
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _check_cross(self, x: Tensor, context: Tensor) -> None:
        if not self.mixer.traits.cross:
            name = type(self.mixer).__name__
            possible = type(self.mixer).traits.cross and self.mixer.options.causal
            why = "was built with causal=True" if possible else "has no cross-attention"
            raise ValueError(f"query and key are different tensors, but {name} {why}: accepted is one tensor for both")
        check_tokens(self.mixer, context, "key")
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"key has batch {context.shape[0]}: query has batch {x.shape[0]}")

    def _check_causal(self, mask: Tensor | None, is_causal: bool, x: Tensor, own: bool) -> None:
        """Refuse masks that would change what the mechanism computes."""
        causal = self.mixer.options.causal
        if is_causal is not False and (is_causal is not True or not causal):
            refuse("is_causal", is_causal, "a bool" if causal else "False: this module was built with causal=False")
        if mask is None:
            return
        if not causal or not own:
            where = "was built with causal=False" if own else "attends to another sequence"
            raise ValueError(f"attn_mask was given, but this module {where}: accepted is None")
        size = x.shape[1]
        accepted = f"the causal mask [{size}, {size}]: True, or -inf, above the diagonal, and False, or 0, elsewhere"
        shapes = ((size, size), (x.shape[0] * self.num_heads, size, size))
        hidden = _hidden(mask, "attn_mask", shapes, x, accepted)
        future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        require((hidden == future).all(), f"attn_mask cannot work: accepted is {accepted}")


def _rename_weights(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Rename the weights of torch.nn.MultiheadAttention, so that they can be loaded here."""
    for theirs, ours in FROM_TORCH.items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)


def _lengths(mask: Tensor, context: Tensor, batched: bool) -> Tensor:
    """Lengths [B] from a key_padding_mask [B, S], or [S] for one sequence."""
    batch, size = context.shape[:2]
    accepted = f"right padding [{batch}, {size}]" if batched else f"right padding [{size}]"
    accepted += ": False, or 0, for tokens, then True, or -inf, for padding"
    padding = _hidden(mask, "key_padding_mask", ((batch, size) if batched else (size,),), context, accepted)
    padding = padding.view(batch, size)
    once_padded_always_padded = (padding[:, 1:] >= padding[:, :-1]).all()
    require(once_padded_always_padded, f"key_padding_mask cannot work: accepted is {accepted}")
    return size - padding.sum(-1)


def _hidden(mask: Tensor, name: str, shapes: tuple[tuple[int, ...], ...], x: Tensor, accepted: str) -> Tensor:
    """True where a mask hides a key. The mask has bools, or floats to add to the scores."""
    if not isinstance(mask, Tensor) or mask.shape not in shapes:
        raise ValueError(f"{name} has shape {shape_of(mask)}: accepted is {accepted}")
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device}: query is on {x.device}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}: accepted are bools and floats")
    hidden = mask == -torch.inf
    require((hidden | (mask == 0)).all(), f"{name} cannot work: accepted is {accepted}")
    return hidden
