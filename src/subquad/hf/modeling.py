"""Our models as transformers' classes: the same modules and tensor names, so one folder serves both.

A wrapper holds the modules of one of our models, its `core`, and gives them the arguments, outputs and caches of
transformers: `wrap(model)`, `unwrap(wrapper)`, or AutoModelForCausalLM.from_pretrained(folder).
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from subquad.checks import refuse
from subquad.hf.cache import LayerState, SubquadCache, check_cache, in_words
from subquad.hf.configuration import SubquadConfig
from subquad.hf.padding import Layout, last_padding, real_columns, to_columns
from subquad.hf.pretrained import SubquadPreTrainedModel
from subquad.hf.sharding import gathered, keep_whole
from subquad.models import Classifier, ClassifierConfig, LanguageModel, Model, logistic_mixture
from subquad.models.decoding import Mixture, Recompute, head_of, work_of
from subquad.models.footprint import Rooms
from subquad.models.loss import cross_entropy
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
        front = 0 if cls is None else 1
        output = BaseModelOutput(
            last_hidden_state=to_columns(y[:, front:], layout),
            hidden_states=None if seen is None else tuple(to_columns(h[:, front:], layout) for h in seen),
        )
        return self._as_wanted(output, return_dict)


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
        use_cache        None: if not training, without labels, on one device
        logits           of the last column, even if it is padding: those after the row's last token
        """
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training and labels is None and not self._divided
        cache = past_key_values
        if cache is None and use_cache:
            cache = self.make_cache()
        if cache is not None and isinstance(input_ids, Tensor):
            check_cache(cache, self._cached_layers, len(input_ids), self.device)
        ids, layout = self._read_arguments(
            input_ids, attention_mask, position_ids, inputs_embeds, output_attentions, cache
        )
        if self.core.head is None:
            keep_whole(self.core.embedding)
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
            hidden_states=None if seen is None else tuple(to_columns(h, layout) for h in seen),
        )
        return self._as_wanted(output, return_dict)

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
    def _spread(self) -> bool:
        """Whether the model is on several devices: then accelerate moves the input of a block when it is called."""
        return len(set(vars(self).get("hf_device_map", {}).values())) > 1

    @property
    def _divided(self) -> bool:
        """Whether the blocks are where only their forward finds them."""
        sharded = isinstance(self._stack.blocks[0], FSDPModule) and torch.is_grad_enabled()
        return sharded or self._spread

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
        if self._spread:
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
        with gathered(self._stack.blocks):
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
        if self.core.head is None and self._spread:
            y = y.to(self.core.embedding.weight.device)
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
        return self._as_wanted(output, return_dict)


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
