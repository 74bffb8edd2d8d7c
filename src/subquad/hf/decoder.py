"""A decoder of transformers as `generate`, `Streams` and the server take a model.

`Decoder` walks the modules of a loaded model: embedding, then in each layer norm, attention, norm and feed-forward on
residuals, final norm, head. Its state is explicit, like that of our own models. A layer that `replace` or `linearise`
changed has the state of its mechanism; one with a sliding window becomes our exact window, which forgets; the others
keep their attention, over a cache of ours that holds the keys of each group of queries once.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from subquad import ranks
from subquad.checks import check_device, refuse
from subquad.disk import read_object
from subquad.hf.linearise.models import quiet
from subquad.hf.replace import Beside, Found, Replacement, Turn, attentions, kind_of, rotary_of
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Mixer, Traits
from subquad.mechanisms.softmax import State as Cached
from subquad.models import generation
from subquad.models.config import EmbeddingConfig, MixerConfig
from subquad.models.inputs import batch_size, check_position
from subquad.models.saving import CONFIG, Model, restore
from subquad.models.transformer import State, joint_state
from subquad.ops.cache import append, cached_attention
from subquad.ops.dense import counted_attention, dense_attention


class Names(NamedTuple):
    """What a family calls the parts of its stack, and of its layers. The feed-forward of all is `mlp`."""

    layers: str
    norm: str
    mixer_norm: str
    ff_norm: str


LLAMA = Names("layers", "norm", "input_layernorm", "post_attention_layernorm")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "gpt2": Names("h", "ln_f", "ln_1", "ln_2"),
}


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The sizes of the layers, by the names of TransformerConfig."""

    dim: int
    depth: int
    ff_width: int
    kv_width: int
    mechanism: tuple[MixerConfig, ...]  # of all layers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What generation asks of a model's config, by the names of LanguageModelConfig, and theirs."""

    embedding: EmbeddingConfig
    transformer: StackConfig
    outputs: int
    theirs: str  # as JSON
    mixture: None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "transformers": transformers.__version__}


class Decoder(Model):
    """Decoder(model): a Llama, Mistral, Qwen or GPT-2 of transformers with our `generate`, `stream` and states.

    streams = Streams(subquad.hf.Decoder(model), slots=64, capacity=2048)

    The modules are those of the model, not copies; layers with a sliding window are made anew. Dropout is left out:
    train the model itself, and save it with its own save_pretrained.
    """

    config: DecoderConfig
    generate, stream = generation.generate, generation.stream

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        names, mixers = _check(model), _mixers(model)
        self.config = _describe(model, mixers)
        inner = getattr(model, model.base_model_prefix)
        self.embedding = Embedding(model.get_input_embeddings(), getattr(inner, "wpe", None))
        self.transformer = Stack(inner, names, mixers, self.config.transformer)
        self.head: Any = model.get_output_embeddings()
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Self:
        """Load a folder that save_pretrained or `subquad linearise` wrote; dtype=None: as it was saved."""
        check_device("device", device, meta=False)
        if not (config := Path(directory) / CONFIG).is_file():
            refuse("directory", str(directory), f"a folder with {CONFIG}, which save_pretrained writes")
        _names(read_object(config).get("model_type"), str(directory))
        try:
            with quiet():
                model, report = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True,
                    trust_remote_code=False, local_files_only=True,
                )  # fmt: skip
        except (OSError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise ValueError(f"{directory} cannot be loaded: {error}") from error
        wrong = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
        if wrong:  # transformers would draw them
            raise ValueError(f"{directory} does not fit its config: it lacks {', '.join(sorted(wrong)[:5])}")
        restore(model)
        return cls(model.to(device).requires_grad_(False)).eval()

    def save(self, directory: str | Path) -> NoReturn:
        raise NotImplementedError(
            f"save({str(directory)!r}): the layers belong to a model of transformers; use its save_pretrained"
        )

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab]; beyond `lengths` they are those of anything."""
        _refuse_ranks()
        start = torch.zeros(batch_size(tokens), dtype=torch.int64, device=tokens.device)
        x = self.embedding(tokens, start)
        for block in self.transformer.blocks:
            x = block(x, lengths)
        return self._logits(x)

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token. `capacity`: positions growing states hold without reallocating."""
        layers = tuple(block.mixer.init_state(batch, capacity) for block in self.transformer.blocks)
        return State(layers, torch.zeros(batch, dtype=torch.int64, device=self.device))

    def prefill(
        self, tokens: Tensor, lengths: Tensor | None = None, state: State | None = None, head: bool = True
    ) -> tuple[Tensor, State]:
        """Read a prompt [B, T] in parallel, after `state` if given: (logits [B, T, vocab], the state after it).

        head=False: what the head reads, [B, T, D], in place of the logits.
        """
        _refuse_ranks()
        batch, size = tokens.shape
        position, states = self._open(state, batch)
        x, layers = self.embedding(tokens, position), []
        for block, before in zip(self.transformer.blocks, states, strict=True):
            x, after = block.prefill(x, lengths, before)
            layers.append(after)
        new = State(tuple(layers), position + (size if lengths is None else lengths))
        return (self._logits(x) if head else self.transformer.norm(x)), new

    def step(self, tokens: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        """One token per row, [B] -> (logits [B, vocab], the new state); `inplace` overwrites the old one."""
        position, states = self._open(state, batch_size(tokens))
        x, layers = self.embedding(tokens[:, None], position)[:, 0], []
        for block, before in zip(self.transformer.blocks, states, strict=True):
            x, after = block.step(x, before, inplace)
            layers.append(after)
        return self._logits(x), State(tuple(layers), position.add_(1) if inplace else position + 1)

    def _open(self, state: State | None, batch: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Where each row is, and the states of the layers."""
        depth = len(self.transformer.blocks)
        if state is None:
            return torch.zeros(batch, dtype=torch.int64, device=self.device), (None,) * depth
        if len(state.layers) != depth:
            raise ValueError(f"state is a state of {len(state.layers)} layers: this model has {depth}")
        check_position(state.position, batch, self.device)
        return state.position, state.layers

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.transformer.norm(x))
        return logits


class Embedding(nn.Module):
    """The vectors of tokens, with learned positions added where the model has them."""

    def __init__(self, tokens: nn.Module, positions: Any):
        super().__init__()
        self.tokens = tokens
        self.positions = None if positions is None else Positions(positions)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens [B, T], of which rows start at `position` [B] -> [B, T, D]"""
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(position, tokens.shape[1])


class Positions(nn.Module):
    """A table of learned positions."""

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.table, self.limit = table, table.num_embeddings

    def forward(self, position: Tensor, count: int) -> Tensor:
        at = position[:, None] + torch.arange(count, device=position.device)
        y: Tensor = self.table(at.clamp(max=self.limit - 1))  # padding may lie beyond the last one
        return y


class Stack(nn.Module):
    """The layers and the final norm."""

    def __init__(self, inner: nn.Module, names: Names, mixers: "list[AnyMixer]", config: StackConfig):
        super().__init__()
        self.config = config
        layers = getattr(inner, names.layers)
        self.blocks: Any = nn.ModuleList(
            Block(layer, names, mixer) for layer, mixer in zip(layers, mixers, strict=True)
        )
        self.norm = getattr(inner, names.norm)
        kinds = [mixer.traits.state for mixer in mixers]
        self.traits = Traits(causal=True, bidirectional=False, state=joint_state(kinds))


class Block(nn.Module):
    """A layer: the mixer and the feed-forward, each behind a norm and on a residual."""

    taps = None  # that blocks of ours may have

    def __init__(self, layer: Any, names: Names, mixer: nn.Module):
        super().__init__()
        self.norm = getattr(layer, names.mixer_norm)
        self.mixer: Any = mixer
        self.ff_norm, self.ff = getattr(layer, names.ff_norm), layer.mlp

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return self._feed(x + self.mixer(self.norm(x), lengths))

    def prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.prefill(self.norm(x), lengths, state)
        return self._feed(x + y), state

    def step(self, x: Tensor, state: Any, inplace: bool) -> tuple[Tensor, Any]:
        y, state = self.mixer.step(self.norm(x), state, inplace)
        return self._feed(x + y), state

    def _feed(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.ff(self.ff_norm(x))
        return y


class Kept(nn.Module):
    """Their softmax attention, with the methods of a mixer."""

    traits = Traits(causal=True, bidirectional=False, state="growing")
    options = None

    def __init__(self, module: Any, rotary: Turn | None):
        super().__init__()
        self.module, self.joint = module, kind_of(module) == "joint"
        self.width, self.scale = int(module.head_dim), float(module.scaling)
        self.groups: int = getattr(module, "num_key_value_groups", 1)  # heads of queries for each head of keys
        norms = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        self.turn = Turn(norms) if rotary is None else Turn(norms, 1.0, rotary.frequencies, rotary.scaling)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:  # noqa: ARG002 -- padding is in the future
        return self._merge(self._attend(*self._project(x, None)))

    def init_state(self, batch: int, capacity: int | None = None) -> Cached:
        out = self._out().weight
        heads = self.module.config.num_attention_heads // self.groups
        k, v = (out.new_zeros(batch, capacity or 64, heads, self.width) for _ in range(2))
        return Cached(k, v, out.new_zeros(batch, dtype=torch.int64))

    def prefill(self, x: Tensor, lengths: Tensor | None, state: Cached | None) -> tuple[Tensor, Cached]:
        batch, size, _ = x.shape
        k, v, start = self.init_state(batch, size) if state is None else state
        q, keys, values = self._project(x, start)
        after = start + (size if lengths is None else lengths)
        new = Cached(append(k, keys, start), append(v, values, start), after)
        if state is None:
            return self._merge(self._attend(q, keys, values)), new
        counts = start[:, None] + torch.arange(1, size + 1, device=x.device)  # [B, T]
        return self._merge(counted_attention(q, new.k, new.v, counts, scale=self.scale)), new

    def step(self, x: Tensor, state: Cached, inplace: bool = False) -> tuple[Tensor, Cached]:
        k, v, position = state
        q, key, value = self._project(x[:, None], position)
        k, v = append(k, key, position, inplace), append(v, value, position, inplace)
        position = position.add_(1) if inplace else position + 1
        o = cached_attention(q[:, 0], k, v, position, scale=self.scale)
        return self._merge(o), Cached(k, v, position)

    def defer(self, state: Cached) -> Cached:
        return state

    def settle(self, state: Cached, steps: int) -> None:
        """Every step has written what it made."""

    def _project(self, x: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D], of which rows start at `position` -> q [B, T, H, K], k and v [B, T, G, K]"""
        module = self.module
        parts = module.c_attn(x).chunk(3, -1) if self.joint else (module.q_proj(x), module.k_proj(x), module.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.width)) for part in parts)
        q, k = self.turn(q, k, position)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.groups > 1:
            k, v = (part.repeat_interleave(self.groups, 2) for part in (k, v))
        return dense_attention(q, k, v, causal=True, scale=self.scale)

    def _merge(self, o: Tensor) -> Tensor:
        y: Tensor = self._out()(o.flatten(-2))
        return y

    def _out(self) -> Any:
        return self.module.c_proj if self.joint else self.module.o_proj


AnyMixer = Mixer | Beside | Kept

# Which models, and what they are made of


def _check(model: PreTrainedModel) -> Names:
    """The names of the model's family; refuses what would not compute what the model does."""
    name = type(model).__name__
    names = _names(model.config.model_type, name)
    if getattr(model, "hf_quantizer", None) is not None or not all(p.is_floating_point() for p in model.parameters()):
        refuse("model", name, "one of floating point weights, but these are quantized")
    if model.get_output_embeddings() is None:
        refuse("model", name, "one with a head over its tokens, such as AutoModelForCausalLM makes")
    if (how := model.config._attn_implementation or "").startswith("subquad_"):
        refuse("attn_implementation", how, "one of transformers' own: patterns have no state here")
    if getattr(model.config, "add_cross_attention", False):
        refuse("add_cross_attention", True, "False")
    return names


def _names(family: Any, name: str) -> Names:
    if family not in FAMILIES:
        raise ValueError(f"{name} is a model of the family {family!r}: accepted are decoders of {', '.join(FAMILIES)}")
    return FAMILIES[family]


def _describe(model: PreTrainedModel, mixers: list[AnyMixer]) -> DecoderConfig:
    config = model.config
    dim, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or dim // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * dim
    used = tuple(MixerConfig(name=name) for mixer in mixers for name in _mechanisms(mixer))
    stack = StackConfig(
        dim=dim, depth=len(mixers), ff_width=inner, mechanism=used,
        kv_width=width * (getattr(config, "num_key_value_heads", None) or heads),
    )  # fmt: skip
    return DecoderConfig(
        embedding=EmbeddingConfig(vocab=model.get_input_embeddings().num_embeddings, positions="none"),
        transformer=stack, outputs=model.get_output_embeddings().weight.shape[0],
        theirs=config.to_json_string(),
    )  # fmt: skip


def _mechanisms(mixer: AnyMixer) -> list[str]:
    """The names of what mixes the tokens in a layer."""
    if isinstance(mixer, Kept):
        return ["softmax"]
    parts = [mixer.other, mixer.window] if isinstance(mixer, Beside) else [mixer]
    return [name for part in parts for name, kind in MECHANISMS.items() if kind is type(part)]


def _mixers(model: PreTrainedModel) -> list[AnyMixer]:
    """What mixes the tokens in each layer."""
    found = dict(attentions(model))
    kept = [one.module for one in found.values() if not isinstance(one.module, Replacement)]
    rotary = rotary_of(kept[0], model, ": accepted here are fixed frequencies, as Llama has them") if kept else None
    return [_mixer(model, n, one, rotary) for n, one in found.items()]


def _mixer(model: PreTrainedModel, n: int, found: Found, rotary: Turn | None) -> AnyMixer:
    if isinstance(found.module, Replacement):
        mixer: AnyMixer = found.module.mixer
        return mixer
    if (window := _window(model.config, n)) is None:
        return Kept(found.module, rotary)
    new = Replacement.of(found, model, {"mechanism": "local", "options": {"window": window - 1}}, n)
    if not {"q", "k", "v", "o"} <= set(new.copied):
        accepted = "None with heads of another width than hidden_size / num_attention_heads"
        refuse("sliding_window", window, accepted)
    local: AnyMixer = new.mixer
    return local


def _window(config: Any, n: int) -> int | None:
    """The sliding window of a layer; None if it reads everything."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return None if kinds is not None and kinds[n] != "sliding_attention" else window


def _refuse_ranks() -> None:
    ranks.refuse("a model of transformers", "accepted are those of subquad")
