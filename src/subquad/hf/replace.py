"""Mechanisms of ours in the place of attention modules of Hugging Face's models.

`replace` writes what it did into the config, as `config.subquad`. After `import subquad.hf`, transformers does it again
whenever it makes a model from such a config, so that `from_pretrained` finds a module for every saved tensor. Without
that import it makes the original modules, and reports their weights as missing.

The state of a mechanism lives in the model's cache object, in place of that layer's keys and values.
"""

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import output_capturing

from subquad.checks import check_count, checked, shown
from subquad.hf.cache import LayerState, in_words
from subquad.hf.masks import PatternMask, back, unpad
from subquad.mechanisms import build
from subquad.mechanisms import mechanism as class_of
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import Mixer
from subquad.ops.lengths import require
from subquad.ops.precision import wide_type

KNOWN = "those with q_proj, k_proj, v_proj and o_proj (Llama, Mistral, Qwen, SmolLM), of GPT-2 and of BERT"
FOR_OTHERS = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states", "return_dict",
        "output_router_logits", "position_embeddings", "output_attentions", "encoder_hidden_states",
        "encoder_attention_mask", "is_causal",
    }
)  # fmt: skip


@checked
def replace(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    mechanism: str = "linear",
    exact_window: int | None = None,
    **options: Any,
) -> dict[int, tuple[str, ...]]:
    """Replace attention modules of a loaded model by a mechanism of ours, in place; returns what was copied per layer.

    subquad.hf.replace(model, layers=[1, 2, 4, 5], mechanism="gated_deltanet", expand_v=1)

    `layers` are numbers of attention modules from 0 on; None means all. `options` are those of the mechanism, as in
    `subquad.build`; dim, causal and, unless given, heads come from the model. Projections of queries, keys, values and
    outputs are copied where their shapes fit; with grouped queries each key and value head is copied to all of its
    queries' heads. Norms of copied queries and keys are kept, and the model's own rotary positions by mechanisms with
    the option rotary, unless it is False; compressed, retnet and heads of another width turn by their own. All else
    begins as `build` draws it. `exact_window`: also compute the model's own attention over that many last tokens, and
    add the mechanism's output, which begins at zero.
    """
    found = dict(attentions(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention modules that are known here: known are {KNOWN}")
    if len({id(one.module.config) for one in found.values()}) > 1:  # each part makes its own layers again
        accepted = "one of them, such as model.encoder or model.language_model"
        raise ValueError(
            f"{type(model).__name__} has attention modules in parts with their own configs: accepted is {accepted}"
        )
    chosen = sorted(found) if layers is None else list(dict.fromkeys(layers))
    for n in chosen:
        check_count("layers", n, 0)
        if n not in found:
            raise ValueError(f"layers={list(chosen)} cannot work: {n} is not one of the layers 0 to {max(found)}")
        if isinstance(found[n].module, Replacement):
            raise ValueError(f"layers={list(chosen)} cannot work: layer {n} was replaced before; load the model again")
    done: dict[str, Any] = {"layers": chosen, "mechanism": mechanism, "options": options}
    if exact_window is not None:
        check_count("exact_window", exact_window)
        done["exact_window"] = exact_window
    try:
        record = json.loads(json.dumps(done))
    except TypeError as error:
        raise ValueError(
            f"options cannot be saved in a config ({error}): accepted are numbers, names and lists"
        ) from error
    made = {n: Replacement.of(found[n], model, record, n) for n in chosen}  # all, before the first is put in its place
    if not made:
        return {}
    first, *others = made.values()
    for other in others:
        other.mixer.share_with(first.mixer)
    if any(
        p is q for p, other in itertools.product(first.mixer.parameters(), others) for q in other.mixer.parameters()
    ):
        raise ValueError(f"{type(first.mixer).__name__} shares parameters between layers, which cannot be saved here")
    for n, new in made.items():
        found[n].put(new)
    config = first.config
    config.subquad = {"replaced": [*(getattr(config, "subquad", None) or {}).get("replaced", ()), record]}
    return {n: new.copied for n, new in made.items()}


# What is known of their modules


class Found(NamedTuple):
    """An attention module of theirs, and where it is."""

    parent: nn.Module
    name: str
    module: nn.Module

    def put(self, new: "Replacement") -> None:
        setattr(self.parent, self.name, new)
        if new.owns_output:  # BERT projects the outputs in the next module
            self.parent.output.dense = nn.Identity()  # type: ignore[union-attr]


class Projections(NamedTuple):
    """Their projections: weights [outputs, inputs] and biases of q, k, v and o."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor | None]


def attentions(model: nn.Module) -> Iterator[tuple[int, Found]]:
    """The self-attention modules of a model that are known here, replaced ones included, with their numbers."""
    n = 0
    for path, module in model.named_modules():
        parent_path, _, name = path.rpartition(".")
        if isinstance(module, Replacement) or kind_of(module) is not None:
            yield n, Found(model.get_submodule(parent_path), name, module)
            n += 1


def kind_of(module: nn.Module) -> str | None:
    """Which of the three known ways a module projects in; None for others and for cross-attention."""
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return None
    if all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in "qkvo"):
        return "separate"
    if isinstance(getattr(module, "c_attn", None), Conv1D) and isinstance(getattr(module, "c_proj", None), Conv1D):
        return "joint"
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("query", "key", "value")):
        return "bert" if hasattr(module, "attention_head_size") else None
    return None


def projections(found: Found) -> Projections:
    module: Any = found.module
    match kind_of(module):
        case "separate":
            parts = {name: getattr(module, f"{name}_proj") for name in "qkvo"}
        case "bert":
            dense = found.parent.output.dense  # type: ignore[union-attr]
            parts = {"q": module.query, "k": module.key, "v": module.value, "o": dense}
        case _:
            weights = dict(zip("qkv", module.c_attn.weight.T.chunk(3), strict=True)) | {"o": module.c_proj.weight.T}
            biases = dict(zip("qkv", module.c_attn.bias.chunk(3), strict=True)) | {"o": module.c_proj.bias}
            return Projections(weights, biases)
    return Projections({n: part.weight for n, part in parts.items()}, {n: part.bias for n, part in parts.items()})


class Turn(nn.Module):
    """Norms, rotary positions and scale of queries and keys as a model of theirs has them."""

    def __init__(
        self,
        norms: tuple[nn.Module | None, nn.Module | None] = (None, None),
        factor: float = 1.0,
        frequencies: tuple[float, ...] = (),
        scaling: float = 1.0,
    ):
        """`factor` is of queries, `frequencies` in radians a token, `scaling` of the rotated channels."""
        super().__init__()
        self.q_norm, self.k_norm = norms
        self.factor, self.frequencies, self.scaling = factor, frequencies, scaling
        self._tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # not a buffer: 16 bits would turn too far

    def forward(self, q: Tensor, k: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        """q and k [B, T, H, D]; rows start at `position` [B] (0 if None)."""
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q = q if self.factor == 1 else q * self.factor
        if not self.frequencies:
            return q, k
        key = (q.device, wide_type(q))
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(self.frequencies, device=key[0], dtype=key[1])
        at = torch.arange(q.shape[1], device=q.device)
        at = at if position is None else position[:, None] + at
        angle = at[..., None, None].to(key[1]) * self._tensors[key]  # [T, 1, D/2] or [B, T, 1, D/2]
        cos, sin = angle.cos() * self.scaling, angle.sin() * self.scaling
        return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first channels of x turned in pairs (j, j + half), as far as there are angles."""
    width = 2 * cos.shape[-1]
    turned, rest = x.split((width, x.shape[-1] - width), dim=-1)
    a, b = turned.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype), rest), -1)


def rotary_of(module: Any, model: nn.Module, instead: str = ": pass rotary=False to do without") -> Turn | None:
    """The rotary positions of a model, or None if it has none; refuses those that are not like Llama's."""
    rotary: list[Any] = [own for own in model.modules() if "rotary" in type(own).__name__.lower()]
    if not rotary:
        return None
    name, kind = type(rotary[0]).__name__, getattr(rotary[0], "rope_type", "default")
    if len(rotary) > 1 or kind in ("dynamic", "longrope"):
        raise ValueError(f"{name} of type {kind!r} depends on the layer or the length{instead}")
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    with torch.device("cpu"):
        q = torch.randn(1, 3, 2, module.head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        try:
            own = type(rotary[0])(rotary[0].config)  # again, because the model's may have no values yet
            turn = Turn((None, None), 1.0, tuple(own.inv_freq.tolist()), float(own.attention_scaling))
            cos, sin = own(q, torch.arange(3)[None])
            theirs = apply(q.transpose(1, 2), q.transpose(1, 2), cos, sin)[0].transpose(1, 2)  # type: ignore[misc]
            same = torch.allclose(theirs, turn(q, q, None)[0], atol=1e-4)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            same = False
    if not same:
        raise ValueError(f"{name} turns queries and keys in another way than Llama's{instead}")
    return turn


# The module that takes their place


class BothStates(NamedTuple):
    window: Any
    other: Any


class Beside(nn.Module):
    """An exact window over the last tokens, and another mechanism over all of them: the sum of their outputs.

    The other one's output projection begins at zero, so that at first the window alone is read.
    """

    def __init__(self, window: Mixer, other: Mixer):
        super().__init__()
        self.window, self.other, self.options = window, other, other.options
        self.traits = other.traits
        output = other._projections().get("o")
        if output is None:
            raise ValueError(f"exact_window cannot work with {type(other).__name__}, whose output is not projected")
        with torch.no_grad():
            for part in output:
                if part is not None and not part.is_meta:
                    part.zero_()

    def share_with(self, first: "Beside") -> None:
        self.other.share_with(first.other)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.window(x, lengths) + self.other(x, lengths)

    def init_state(self, batch: int, capacity: int | None = None) -> BothStates:
        return BothStates(self.window.init_state(batch, capacity), self.other.init_state(batch, capacity))

    def prefill(self, x: Tensor, lengths: Tensor | None, state: BothStates | None) -> tuple[Tensor, BothStates]:
        before = BothStates(None, None) if state is None else state
        y, window = self.window.prefill(x, lengths, before.window)
        z, other = self.other.prefill(x, lengths, before.other)
        return y + z, BothStates(window, other)

    def step(self, x: Tensor, state: BothStates, inplace: bool = False) -> tuple[Tensor, BothStates]:
        y, window = self.window.step(x, state.window, inplace)
        z, other = self.other.step(x, state.other, inplace)
        return y + z, BothStates(window, other)

    def defer(self, state: BothStates) -> BothStates:
        return BothStates(self.window.defer(state.window), self.other.defer(state.other))

    def settle(self, state: BothStates, steps: int) -> None:
        self.window.settle(state.window, steps)
        self.other.settle(state.other, steps)


class Replacement(nn.Module):
    """A mechanism of ours with the signature of their attention modules."""

    def __init__(self, mixer: Mixer | Beside, config: Any, layer: int, owns_output: bool, dropout: nn.Module | None):
        super().__init__()
        self.mixer: Any = mixer
        self.config, self.layer_idx = config, layer
        self.owns_output, self.dropout, self.is_causal = owns_output, dropout, mixer.options.causal
        self.copied: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Found, model: nn.Module, record: dict[str, Any], layer: int) -> "Replacement":
        """The replacement for a module, with what can be copied of its parameters."""
        module: Any = found.module
        mixer: Mixer | Beside
        mixer, copied = _begin(found, model, record["mechanism"], record["options"], layer)
        if "exact_window" in record:
            window, whole = _begin(found, model, "local", {"window": record["exact_window"] - 1}, layer)
            if not {"q", "k", "v", "o"} <= set(whole):
                name = type(module).__name__
                raise ValueError(f"exact_window cannot work with {name}: its projections are of another shape or kind")
            mixer = Beside(window, mixer)
        new = cls(mixer, module.config, layer, kind_of(module) == "bert", getattr(module, "resid_dropout", None))
        new.copied = copied
        new.train(module.training)
        weight = projections(found).weights["o"]
        return new if weight.device.type == "meta" else new.to(weight.device, weight.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **theirs: Any,
    ) -> tuple[Tensor, None]:
        self._check(hidden_states, attention_mask, theirs)
        batch, T, _ = hidden_states.shape
        layer = None if past_key_values is None else self._layer(past_key_values)
        seen = 0 if layer is None else layer.columns
        real = None if T == 1 and seen else self._real(attention_mask, batch, T, seen)
        sequences = None if real is None else unpad(real, 0, T, 0)
        x, lengths = hidden_states, None
        if sequences is not None:
            x, lengths = x[sequences.rows, sequences.slots.clamp(min=0)], sequences.lengths
        if layer is None or self.mixer.traits.state is None:
            if seen:
                name = type(self.mixer).__name__
                raise NotImplementedError(f"{name} has no recurrent form, so it keeps no cache: pass use_cache=False")
            y = self.mixer(x, lengths=lengths)
        elif T == 1 and layer.state is not None:
            y, layer.state = self.mixer.step(x[:, 0], layer.state)
            y = y[:, None]
        else:
            y, layer.state = self.mixer.prefill(x, lengths=lengths, state=layer.state)
        if layer is not None:
            layer.columns, layer.is_initialized = seen + T, True
        y = back(y, sequences, 0)
        return y if self.dropout is None else self.dropout(y), None

    def _layer(self, cache: Cache) -> "MixerLayer":
        """This layer's part of a cache of theirs, in place of its keys and values."""
        cache = getattr(cache, "self_attention_cache", cache)
        while len(cache.layers) <= self.layer_idx:
            if cache.layer_class_to_replicate is None:
                raise ValueError(f"past_key_values has {len(cache.layers)} layers, and none for layer {self.layer_idx}")
            cache.layers.append(cache.layer_class_to_replicate())
        layer = cache.layers[self.layer_idx]
        if isinstance(layer, MixerLayer):
            return layer
        if not isinstance(layer, DynamicLayer):
            kind = type(layer).__name__
            raise ValueError(f"past_key_values has a {kind} for layer {self.layer_idx}: accepted is a DynamicCache")
        if layer.get_seq_length():
            raise ValueError(
                f"past_key_values has keys for layer {self.layer_idx}, which was replaced since: start anew"
            )
        cache.layers[self.layer_idx] = new = MixerLayer(type(self.mixer).__name__, in_words(self.mixer), False)
        return new

    def _check(self, x: Tensor, mask: Any, theirs: dict[str, Any]) -> None:
        name = f"layer {self.layer_idx}, replaced by {type(self.mixer).__name__},"
        weight = next(self.mixer.parameters(), x)
        if weight.is_meta and not x.is_meta:
            accepted = "GPUs, or the CPU alone, in device_map"
            raise ValueError(f"{name} reads several weights at once, so none can be offloaded: accepted are {accepted}")
        for key, value in theirs.items():
            if key not in FOR_OTHERS and value is not None:
                raise ValueError(f"{name} cannot work with the argument {key}")
        collector = None if torch.compiler.is_compiling() else output_capturing._active_collector.get()
        if theirs.get("output_attentions") or (collector and "attentions" in collector):
            raise ValueError(f"{name} cannot work with output_attentions: it may compute no weights")
        if theirs.get("encoder_hidden_states") is not None and not self.is_causal:
            raise ValueError(f"{name} cannot work with encoder_hidden_states")
        if isinstance(mask, PatternMask) and mask.packed:
            raise ValueError(f"{name} cannot work with packed sequences: give each its own row")
        at = theirs.get("position_ids")
        if mask is None and at is not None and at.ndim == 2 and self.is_causal:
            instead = "give each sequence its own row"
            require((at.diff(dim=-1) > 0).all(), f"position_ids that start again mark packed sequences: {instead}")

    def _real(self, mask: Any, batch: int, T: int, seen: int) -> Tensor | None:
        """Which of the new tokens are not padding, [B, T]; None: all."""
        if mask is None:
            return None
        if isinstance(mask, PatternMask):
            return None if mask.real is None else mask.real[:, seen : seen + T]
        if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < T:
            accepted = 'ones and zeros [B, T], in a model with attn_implementation="sdpa", "eager" or a pattern'
            raise ValueError(f"attention_mask={shown(mask)} cannot work with a replaced layer: accepted are {accepted}")
        if mask.ndim == 2:
            return mask[:, -T:].bool().expand(batch, -1)
        visible = mask if mask.dtype == torch.bool else mask >= 0
        visible = visible[:, :, :, -T:].expand(batch, -1, T, -1)  # [B, 1 or H, T, T]
        refused = "a 4-D attention_mask that hides more than padding cannot work with a replaced layer"
        if not self.is_causal:
            real = visible[:, 0, 0]
            require((visible == real[:, None, None]).all(), refused)
            return real
        real = visible[:, 0].diagonal(dim1=1, dim2=2)
        wanted = (real[:, None] & torch.ones(T, T, dtype=torch.bool, device=real.device).tril())[:, None]
        window = getattr(self.config, "sliding_window", None)
        if window is not None:  # the mask of this layer may have one, which the mechanism takes the place of
            wanted = wanted.triu(1 - window)
            visible = visible.triu(1 - window)
        require(((visible == wanted) | ~real[:, None, :, None]).all(), refused)
        return real

    def extra_repr(self) -> str:
        return f"layer_idx={self.layer_idx}, copied={self.copied}"


class MixerLayer(LayerState):
    """The state of a mechanism in a cache of theirs."""


def _begin(
    found: Found, model: nn.Module, mechanism: str, options: dict[str, Any], layer: int
) -> tuple[Mixer, tuple[str, ...]]:
    """A mechanism for the place of a module, and what was copied into it."""
    module: Any = found.module
    own = projections(found)
    weight = own.weights["o"]
    if not weight.is_floating_point():
        raise ValueError(f"{type(module).__name__} has quantized weights: accepted are floating point ones")
    width = module.head_dim if hasattr(module, "head_dim") else module.attention_head_size
    heads, dim = own.weights["q"].shape[0] // width, weight.shape[0]
    causal, kind = bool(module.is_causal), class_of(mechanism)
    options = {"heads": heads, "layer": layer, **options}
    for name in ("dim", "causal"):
        if name in options:
            raise ValueError(f"{name} cannot be given to replace: the model has dim={dim} and causal={causal}")
    rotary = rotary_of(module, model) if options.get("rotary", "rotary" not in kind.unused) else None
    options.setdefault("rotary", rotary is not None)
    with torch.device("cpu"):  # buffers need values, also while transformers makes a model without them
        mixer = build(mechanism, dim=dim, causal=causal, **options)
    _save_all_buffers(mixer)
    copied = list(_copy(own, mixer, width)) if heads == mixer.options.heads else []
    if isinstance(mixer, Attention) and mixer.may_turn:
        norms, factor = (None, None), 1.0
        if {"q", "k"} <= set(copied):
            norms = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
            factor = float(getattr(module, "scaling", width**-0.5)) * width**0.5
            copied += ["norms"] if norms != (None, None) else []
        positions: tuple[Any, ...] = ()
        if rotary is not None and mixer.width >= 2 * len(rotary.frequencies):
            positions = rotary.frequencies, rotary.scaling
            copied.append("rotary")
        if positions or not mixer.options.rotary:
            mixer.turn = Turn(norms, 1.0 if abs(factor - 1) < 1e-6 else factor, *positions)
    return mixer, tuple(copied)


def _copy(own: Projections, mixer: Mixer, width: int) -> Iterator[str]:
    """Copy projections whose shapes fit, and yield their names."""
    heads = mixer.options.heads
    with torch.no_grad():
        for name, (weight, bias) in mixer._projections().items():
            theirs, their_bias = own.weights[name], own.biases[name]
            share = heads * width // theirs.shape[0] if name in "kv" else 1
            theirs = _repeat(theirs, share, width)
            if weight.shape != theirs.shape or (bias is None and their_bias is not None):
                continue
            yield name
            if theirs.is_meta:  # a file has the values
                continue
            weight.copy_(theirs)
            if bias is not None:
                bias.copy_(_repeat(their_bias, share, width)) if their_bias is not None else bias.zero_()


def _repeat(x: Tensor, share: int, width: int) -> Tensor:
    """Rows for key heads -> rows for query heads."""
    return x if share == 1 else x.unflatten(0, (-1, width)).repeat_interleave(share, 0).flatten(0, 1)


def _save_all_buffers(mixer: Mixer) -> None:
    """transformers overwrites buffers that are not in a file with memory of any content, so save those with content."""
    for module in mixer.modules():
        for name in list(module._non_persistent_buffers_set):
            if (buffer := module._buffers[name]) is not None and buffer.numel():
                module._non_persistent_buffers_set.discard(name)


# Making replaced models from their configs


def _replace_again(model: PreTrainedModel) -> None:
    """Do what the config says was done to a model that transformers is making."""
    done = getattr(model.config, "subquad", None)
    if not isinstance(done, dict) or not done.get("replaced"):
        return
    found = dict(attentions(model))
    if any(isinstance(one.module, Replacement) for one in found.values()):
        return  # by the constructor of the model inside
    for record in done["replaced"]:
        for n in record["layers"]:
            if n in found:
                found[n].put(Replacement.of(found[n], model, record, n))


def _remember_to_replace() -> None:
    """Let every constructor of transformers' models end with `_replace_again`."""
    original = PreTrainedModel.post_init
    if hasattr(original, "replaces_again"):
        return

    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        _replace_again(self)
        original(self)

    post_init.replaces_again = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init


_remember_to_replace()
