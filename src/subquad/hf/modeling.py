"""Our models as transformers' classes: the same modules and tensor names, so one folder serves both.

A wrapper holds the modules of one of our models, its `core`, and gives them the arguments, outputs and caches of
transformers: `wrap(model)`, `unwrap(wrapper)`, or AutoModelForCausalLM.from_pretrained(folder).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from subquad.checks import check_count, refuse
from subquad.hf.cache import LayerState, SubquadCache, check_cache, in_words
from subquad.hf.card import AUTO, TAGS
from subquad.hf.configuration import WRAPPED, SubquadConfig
from subquad.hf.padding import Layout, check_positions, last_padding, read_mask, real_columns, to_columns, tokens_first
from subquad.models import MODELS, Classifier, ClassifierConfig, LanguageModel, Model, logistic_mixture
from subquad.models.decoding import Mixture, Recompute, head_of, work_of
from subquad.models.embedding import Embedding
from subquad.models.footprint import Rooms
from subquad.models.loss import cross_entropy
from subquad.models.saving import CONFIG, WEIGHTS, describe, restore, seal, verify
from subquad.models.state import map_state
from subquad.models.threads import run_small
from subquad.ops.lengths import shape_of

IGNORED = -100  # the label that transformers does not count


class Reader:
    """A language model before its head: tokens to vectors, whole, after a state, or token by token."""

    def __init__(self, core: Any):
        self.core = core

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.core.device)

    def __call__(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.core.transformer(self.core.embedding(tokens, lengths), lengths))

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        return self.core.transformer.init_state(batch, capacity)

    def prefill(self, tokens: Tensor, lengths: Tensor | None = None, state: Any = None) -> tuple[Tensor, Any]:
        x = self.core.embedding(tokens, lengths, None if state is None else state.position)
        return cast(tuple[Tensor, Any], self.core.transformer.prefill(x, lengths, state))

    def step(self, tokens: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        x = self.core.embedding.step(tokens, state.position)
        return cast(tuple[Tensor, Any], self.core.transformer.step(x, state, inplace=inplace))


class SubquadPreTrainedModel(PreTrainedModel):
    """What the wrappers share: loading, saving, embeddings, checkpointing."""

    config_class = SubquadConfig
    config: SubquadConfig
    core: Any
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ["Block"]  # noqa: RUF012 -- transformers' own way to say it
    _holds: ClassVar[tuple[str, ...]] = WRAPPED  # the kinds of our models that this class can wrap

    def __init__(self, config: SubquadConfig, core: nn.Module | None = None):
        super().__init__(config)
        if config.model not in self._holds:
            name = f"{type(self).__name__} wraps a {' or a '.join(self._holds)}"
            raise ValueError(f"model={config.model!r} cannot work: {name}; use {AUTO[config.model]}")
        self._check_parsed(parsed := config.parsed())
        config.config = parsed.to_dict()
        core = self._make_core(parsed) if core is None else core
        # The core and the wrapper share one dictionary of modules. So the names in files are the core's own, and a
        # module that a program replaces here, as LoRA does, is replaced in the core too. The core is no child module
        self.__dict__.update(core=core, _modules=core._modules, _parameters=core._parameters)
        # {name: first name} of the parameters that layers share; a tied head has no parameter of its own
        first: dict[int, str] = {}
        named = [(name, first.setdefault(id(p), name)) for name, p in self.named_parameters(remove_duplicate=False)]
        self._tied_weights_keys = {name: one for name, one in named if name != one}
        self.add_model_tags(list(TAGS))
        if not any(p.is_meta for p in core.parameters()):
            for module in self.modules():
                module._is_hf_initialized = True  # our constructors drew the weights
        self.post_init()

    def _check_parsed(self, parsed: Any) -> None:
        """Refuse a model whose inputs or outputs this class cannot pass on."""
        if parsed.embedding.vocab is None:
            refuse("features", parsed.embedding.features, "None: transformers reads tokens here; use subquad.load")

    def _make_core(self, parsed: Any) -> nn.Module:
        return MODELS[self.config.model](parsed)

    @property
    def _tower(self) -> Any:
        """The module that has the embedding and the layers."""
        return self.core

    @property
    def _stack(self) -> Any:
        return self._tower.transformer

    def _replicate_for_data_parallel(self) -> Any:
        """torch's DataParallel fills the replica's dictionaries with the parts on another GPU."""
        replica, core = super()._replicate_for_data_parallel(), self.core._replicate_for_data_parallel()
        core.__dict__.update(_modules=replica._modules, _parameters=replica._parameters)
        replica.__dict__["core"] = core
        return replica

    # Loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, but missing, damaged and unknown tensors raise.

        ignore_mismatched_sizes=True accepts, and draws anew, a head with another number of labels.
        """
        given = kwargs.pop("output_loading_info", False)
        _check_folder(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        wrong = [name for name, *_ in info["mismatched_keys"] if not name.startswith("head.")]
        for what, names in (("lacks", [*info["missing_keys"], *wrong]), ("has unknown", info["unexpected_keys"])):
            if names:
                some = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise ValueError(f"{pretrained_model_name_or_path} does not fit its config: it {what} {some}")
        restore(model)
        return (model, info) if given else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """As transformers does it, with our digest. If the weights are one file, `subquad.load` can read it."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        whole = Path(save_directory) / WEIGHTS
        sharded = Path(save_directory) / f"{WEIGHTS}.index.json"
        if is_main_process and whole.is_file() and (Path(save_directory) / CONFIG).is_file() and not sharded.is_file():
            seal(save_directory)

    def _init_weights(self, module: nn.Module) -> None:
        """What transformers makes itself: a new head, and the rows that a vocabulary grows by."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:  # noqa: ARG002
        return dict(self._tied_weights_keys or {})

    # Embeddings

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self._tower.embedding)

    def set_input_embeddings(self, value: nn.Module) -> None:
        if not isinstance(value, Embedding):
            accepted = "an Embedding of subquad; copy other weights into model.get_input_embeddings().weight"
            refuse("value", value, accepted)
        self._tower.embedding = value

    def _get_resized_embeddings(self, old_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(old_embeddings, Embedding):
            table = nn.Embedding.from_pretrained(old_embeddings.weight, freeze=False)
            old_embeddings.weight = super()._get_resized_embeddings(table, *args, **kwargs).weight
            return old_embeddings
        return super()._get_resized_embeddings(old_embeddings, *args, **kwargs)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        parsed = self.config.parsed()
        if getattr(parsed, "mixture", None) or getattr(parsed, "outputs", None):
            refuse("new_num_tokens", new_num_tokens, "None: this model's outputs are not one logit for each token")
        if new_num_tokens is not None:
            check_count("new_num_tokens", new_num_tokens)
        table = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self._follow_config()
        return table

    def _follow_config(self) -> None:
        parsed = self.config.parsed()
        self.core.config, self._tower.embedding.config = parsed, parsed.embedding

    # Training

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        if enable and self._stack.config.reversible:
            raise ValueError("gradient checkpointing cannot work: reversible=True recomputes every block already")
        if every_n_layers != 1:
            refuse("every_n_layers", every_n_layers, "1: every block is recomputed")
        how = gradient_checkpointing_func or functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        if enable and getattr(how, "keywords", {}).get("use_reentrant", True):
            refuse("use_reentrant", True, 'False: gradient_checkpointing_kwargs={"use_reentrant": False}')
        self._stack.recompute = how if enable else None
        self.gradient_checkpointing = enable

    # Arguments

    def _read_arguments(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None,
        before: SubquadCache | None = None,
    ) -> tuple[Tensor, Any]:
        """Tokens first in each row, and the layout of the caller's columns."""
        if inputs_embeds is not None:
            refuse("inputs_embeds", inputs_embeds, "None: positions belong to our embedding, so pass input_ids")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            accepted = "False: most of our mechanisms never make them; a layer's pattern(x) does, for pictures"
            refuse("output_attentions", True, accepted)
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids has shape {shape_of(input_ids)}: accepted are token ids [batch, T]")
        rows, columns = input_ids.shape
        past = 0 if before is None else before.columns
        layout = None
        if attention_mask is not None:
            if isinstance(attention_mask, Tensor) and attention_mask.shape == (rows, past + columns):
                attention_mask = attention_mask[:, past:]
            elif past and isinstance(attention_mask, Tensor):
                accepted = f"[{rows}, {past + columns}]: the {past} columns in the cache, then those of input_ids"
                raise ValueError(f"attention_mask has shape {shape_of(attention_mask)}: accepted is {accepted}")
            layout = read_mask(attention_mask, rows, columns)
        seen = None if before is None else before.tokens
        check_positions(position_ids, seen, rows, columns if layout is None else layout)
        return tokens_first(input_ids, layout), layout

    @contextmanager
    def _recorded(self, wanted: bool | None) -> Iterator[list[Tensor] | None]:
        """The input of every block, then the output of the last, in a list; None if not wanted."""
        wanted = self.config.output_hidden_states if wanted is None else wanted
        if not wanted:
            yield None
            return
        if self._stack.config.reversible or any(block.pool > 1 for block in self._stack.blocks):
            refuse("output_hidden_states", True, "False for a model that is reversible or pools its sequence")
        seen: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])) for block in self._stack.blocks
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


class SubquadModel(SubquadPreTrainedModel):
    """The layers without a head: tokens [B, T] -> last_hidden_state [B, T, D]."""

    base_model_prefix = "tower"  # of the tensors in a classifier's folder
    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    def _make_core(self, parsed: Any) -> nn.Module:
        whole: Any = super()._make_core(parsed)
        core: nn.Module = whole.tower if self.config.model == "Classifier" else whole
        core._modules.pop("head", None)
        return core

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """A padded column repeats the vector of the token before it."""
        if any(block.pool > 1 for block in self._stack.blocks):
            raise ValueError("input_ids: this model pools its sequence, so it has no vector for each token")
        ids, layout = self._read_arguments(input_ids, attention_mask, position_ids, inputs_embeds, output_attentions)
        lengths = None if layout is None else layout.lengths
        x = self.core.embedding(ids, lengths)
        cls = getattr(self.core, "cls", None)  # a learned first position
        if cls is not None:
            x = torch.cat((cls.to(x.dtype).expand(x.shape[0], 1, -1), x), dim=1)
            lengths = None if lengths is None else lengths + 1
        with self._recorded(output_hidden_states) as seen:
            y = self.core.transformer(x, lengths)
        states = None if seen is None else (*seen, y)
        front = 0 if cls is None else 1
        output = BaseModelOutput(
            last_hidden_state=to_columns(y[:, front:], layout),
            hidden_states=None if states is None else tuple(to_columns(h[:, front:], layout) for h in states),
        )
        return output if _wants_dict(self, return_dict) else output.to_tuple()


class SubquadForCausalLM(SubquadPreTrainedModel, GenerationMixin):
    """A LanguageModel: tokens [B, T] -> logits [B, T, vocab], with generate()."""

    accepts_loss_kwargs = True  # num_items_in_batch, for gradient accumulation
    _holds = ("LanguageModel",)
    core: LanguageModel

    def _check_parsed(self, parsed: Any) -> None:
        super()._check_parsed(parsed)
        if parsed.outputs not in (None, parsed.embedding.vocab):
            refuse("outputs", parsed.outputs, "None: one logit for each token, or mixture=10")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As a decoder of transformers; the loss is of each token given those before it, without padding.

        attention_mask   ones and zeros, with padding on either side; with a cache, of its columns too
        past_key_values  a cache that `make_cache` made; it is advanced
        use_cache        None: if not training and without labels
        logits           of the last column, even if it is padding: those after the row's last token
        """
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training and labels is None
        cache = past_key_values
        if cache is None and use_cache:
            cache = self.make_cache()
        if cache is not None and isinstance(input_ids, Tensor):
            check_cache(cache, self._cached_layers, len(input_ids), self.device)
        ids, layout = self._read_arguments(
            input_ids, attention_mask, position_ids, inputs_embeds, output_attentions, cache
        )
        with self._recorded(output_hidden_states) as seen:
            if seen is not None and cache is not None and cache.columns:
                refuse("output_hidden_states", True, "False with a cache; or use_cache=False")
            y = self._advance(ids, layout, cache, seen is not None)
        vectors = to_columns(y, layout, None if cache is None else cache.last)
        if cache is not None:
            cache.last = vectors[:, -1].detach().clone()  # a view would keep the vectors of a whole prompt
        kept = vectors[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else vectors[:, logits_to_keep]
        logits = self._logits(kept)
        loss = None
        if labels is not None:
            if not isinstance(logits_to_keep, int) or logits_to_keep:
                refuse("logits_to_keep", logits_to_keep, "0 with labels")
            loss = self._loss(logits, labels, layout, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache or past_key_values is not None else None,
            hidden_states=None if seen is None else tuple(to_columns(h, layout) for h in (*seen, y)),
        )
        return output if _wants_dict(self, return_dict) else output.to_tuple()

    def make_cache(self, capacity: int | None = None) -> SubquadCache:
        """An empty cache; states that grow have room for `capacity` columns from the start."""
        blocks = list(self._stack.blocks)
        if self._recomputes:
            return SubquadCache([LayerState("the model", "the tokens so far, which it reads again", True)], capacity)
        layers = []
        for block in blocks:
            rewinds = block.mixer.rewinds and block.taps is None
            layers.append(LayerState(block.name, in_words(block.mixer), rewinds))
        return SubquadCache(layers, capacity)

    @property
    def _recomputes(self) -> bool:
        return any(block.mixer.traits.state is None for block in self._stack.blocks)

    @property
    def _cached_layers(self) -> int:
        return 1 if self._recomputes else len(self._stack.blocks)

    def _advance(self, ids: Tensor, layout: Layout | None, cache: SubquadCache | None, whole: bool) -> Tensor:
        """Vectors [B, T, D] of the tokens; the cache has read them then. `whole`: run the blocks as in training."""
        reader: Any = Reader(self.core)
        lengths = None if layout is None else layout.lengths
        if cache is None or whole:
            y = reader(ids, lengths)
            if cache is None:
                return cast(Tensor, y)
        if len(set(getattr(self, "hf_device_map", {0: 0}).values())) > 1:
            refuse("device_map", self.hf_device_map, "one device to generate with a cache; or use_cache=False")
        decoder = Recompute(reader) if self._recomputes else reader
        state, change = cache.state, not torch.is_grad_enabled()
        single = state is not None and ids.shape[1] == 1 and lengths is None
        read: Callable[[], tuple[Tensor, Any]]
        if single:
            read = functools.partial(decoder.step, ids[:, 0], state, inplace=change)
        else:
            read = functools.partial(decoder.prefill, ids, lengths=lengths, state=state)
        work = work_of(self.core, () if state is None else state, ids.numel())
        vectors, after = run_small(work, read) if change else read()
        if single:
            vectors = vectors[:, None]
        elif change:
            if cache.capacity is not None and cache.capacity > cache.columns:
                after = Rooms(decoder).fit(after, cache.capacity)
            after = map_state(lambda tensor: tensor.contiguous(), after)
        cache.advance(after, ids.shape[1], last_padding(layout))
        return y if whole else vectors

    def _logits(self, y: Tensor) -> Tensor:
        outputs = self.core._logits(y)
        return logistic_mixture.log_probs(outputs) if isinstance(head_of(self.core), Mixture) else outputs

    def _loss(self, logits: Tensor, labels: Tensor, layout: Any, items: Tensor | int | None) -> Tensor:
        if not isinstance(labels, Tensor) or labels.shape != logits.shape[:2] or labels.shape[1] < 2:
            raise ValueError(f"labels has shape {shape_of(labels)}: accepted is {list(logits.shape[:2])}, T at least 2")
        targets = labels[:, 1:].to(logits.device)
        if layout is not None:  # a target is a token, and has a token before it
            predicted = real_columns(layout)[:, 1:] & (layout.rank[:, :-1] >= 0)
            targets = targets.masked_fill(~predicted, IGNORED)
        if items is None:
            return cross_entropy(logits[:, :-1], targets, ignore_index=IGNORED, name="labels")
        total = cross_entropy(logits[:, :-1], targets, ignore_index=IGNORED, reduction="sum", name="labels")
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None if it is the embedding, or does not give one logit for each token."""
        parsed = self.core.config
        return self.core.head if parsed.width == parsed.embedding.vocab else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.core.head is None:
            refuse("new_embeddings", new_embeddings, "none: this model's head is its embedding (tie=True)")
        self.core.head = new_embeddings  # type: ignore[assignment]

    # Generation

    @property
    def _is_stateful(self) -> bool:
        """Whether tokens cannot be taken back: then transformers refuses assisted generation."""
        return not self.make_cache().is_croppable

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *more: Any) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            accepted = "None: our models bring a cache of their own"
            refuse("cache_implementation", generation_config.cache_implementation, accepted)
        given = model_kwargs.get("past_key_values")
        if given is not None:
            check_cache(given, self._cached_layers, None, self.device)
            given._is_user_defined = True
        elif generation_config.use_cache:
            _, _, longest, *_ = more  # after the mode and the batch
            model_kwargs["past_key_values"] = self.make_cache(longest)

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """None: our models count positions themselves."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: SubquadCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                "input_ids holds nothing that the cache has not read: to continue, pass the text with its next token, "
                "or a cache from before the last token"
            )
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        theirs = ("tokenizer", "assistant_tokenizer")  # of stopping criteria; generate passes them on to the model
        inputs = {name: value for name, value in kwargs.items() if name not in theirs and value is not None}
        inputs |= {"input_ids": new.to(self.device), "past_key_values": past_key_values}
        # a token that generate has just drawn is no padding: no mask, so that nothing waits for a GPU
        drawn = next_sequence_length == 1 and not is_first_iteration and past_key_values is not None
        if attention_mask is not None and not drawn:
            inputs["attention_mask"] = attention_mask.to(self.device)
        return inputs


class SubquadForSequenceClassification(SubquadPreTrainedModel):
    """A Classifier: tokens [B, T] -> logits [B, classes].

    from_pretrained also takes the folder of a LanguageModel: its layers under a new head, over the mean of the tokens.
    """

    base_model_prefix = "tower"
    _holds = ("Classifier",)
    _new_pooling = "mean"  # over the layers of a LanguageModel
    core: Classifier

    @property
    def _tower(self) -> Any:
        return self.core.tower

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if not isinstance(config, SubquadConfig):
            names = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
            where = {name: kwargs[name] for name in names if name in kwargs}
            config = SubquadConfig.from_pretrained(pretrained_model_name_or_path, **where)
        if config.model != "LanguageModel":
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = SubquadForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        told = model[1] if isinstance(model, tuple) else None
        model = model[0] if isinstance(model, tuple) else model
        parsed, theirs = model.config.parsed(), model.config.to_dict()
        new = ClassifierConfig(
            classes=model.config.num_labels,
            embedding=parsed.embedding,
            transformer=parsed.transformer,
            pooling=cls._new_pooling,
        )
        labels = {key: theirs[key] for key in ("id2label", "label2id", "problem_type") if theirs.get(key)}
        core = Classifier(new).to(model.device, model.dtype)
        core.tower.embedding, core.tower.transformer = model.core.embedding, model.core.transformer
        made = cls(SubquadConfig.of(new, dtype=model.dtype, pad_token_id=model.config.pad_token_id, **labels), core)
        made.name_or_path = model.name_or_path
        return made.eval() if told is None else (made.eval(), {**told, "missing_keys": {"head.weight", "head.bias"}})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """With pooling="none", logits [B, T, classes] and labels [B, T], as AutoModelForTokenClassification."""
        each = self.core.config.pooling == "none"
        if each and any(block.pool > 1 for block in self._stack.blocks):
            raise ValueError("input_ids: this model pools its sequence, so it has no label for each token")
        ids, layout = self._read_arguments(input_ids, attention_mask, position_ids, inputs_embeds, output_attentions)
        with self._recorded(output_hidden_states) as seen:
            logits = self.core(ids, None if layout is None else layout.lengths)
        if each:
            logits = to_columns(logits, layout)
        loss = None
        if labels is not None and each:
            if layout is not None:
                labels = labels.masked_fill(~real_columns(layout), IGNORED)
            loss = cross_entropy(logits, labels, ignore_index=IGNORED, name="labels")
        elif labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        first = 1 if self._tower.cls is not None else 0
        states = None if seen is None else tuple(to_columns(h[:, first:], layout) for h in seen)
        kind = TokenClassifierOutput if each else SequenceClassifierOutput
        output = kind(loss=loss, logits=logits, hidden_states=states)
        return output if _wants_dict(self, return_dict) else output.to_tuple()


class SubquadForTokenClassification(SubquadForSequenceClassification):
    """A Classifier with pooling="none": tokens [B, T] -> logits [B, T, classes]."""

    _new_pooling = "none"

    def _check_parsed(self, parsed: Any) -> None:
        super()._check_parsed(parsed)
        if parsed.pooling != "none":
            accepted = f'"none" for a label at every token; with "{parsed.pooling}" use sequence classification'
            refuse("pooling", parsed.pooling, accepted)


WRAPPERS: dict[str, type[SubquadPreTrainedModel]] = {
    "LanguageModel": SubquadForCausalLM,
    "Classifier": SubquadForSequenceClassification,
}


def wrap(model: Model) -> Any:
    """A model of ours as one of transformers' classes, with the same modules: what one learns, the other knows."""
    name = type(model).__name__
    if name not in WRAPPERS:
        refuse("model", model, f"a {' or a '.join(WRAPPERS)}")
    wrapper: Any = WRAPPERS[name]
    made = wrapper(SubquadConfig.of(model.config, dtype=model.dtype), model)
    return made.train(model.training)


def unwrap(model: Any) -> Model:
    """The model of ours inside one of transformers' classes, with the same modules."""
    if not isinstance(model, tuple(WRAPPERS.values())):
        name = type(model).__name__
        refuse("model", name, "a model that `wrap` or from_pretrained made; merge adapters first (merge_and_unload)")
    wrapper: Any = model
    core: Model = wrapper.core
    return core.train(wrapper.training)


def _wants_dict(model: SubquadPreTrainedModel, given: bool | None) -> bool:
    return bool(model.config.return_dict if given is None else given)


def _check_folder(name: Any, subfolder: str) -> None:
    """Refuse a local folder of ours whose weights or config are not what was saved."""
    if not isinstance(name, str | Path) or not (folder := Path(name) / subfolder).is_dir():
        return
    if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
        describe(folder / WEIGHTS)
        verify(folder)
