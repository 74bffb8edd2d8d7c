"""What our models' wrappers for transformers share: loading, saving, embeddings, checkpointing, arguments."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.checks import check_count, refuse
from subquad.hf.cache import SubquadCache
from subquad.hf.card import AUTO, TAGS
from subquad.hf.configuration import WRAPPED, SubquadConfig
from subquad.hf.padding import check_positions, read_mask, tokens_first
from subquad.models import MODELS
from subquad.models.blocks import settled
from subquad.models.embedding import Embedding
from subquad.models.saving import CONFIG, WEIGHTS, describe, restore, seal, verify
from subquad.ops.lengths import shape_of
from subquad.training.distributed import blocks_of


class SubquadPreTrainedModel(PreTrainedModel):
    """The base of the wrappers."""

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
        self._plan_shards()

    def _plan_shards(self) -> None:
        """Which modules FSDP gathers one by one."""
        plan = dict(self.fsdp_plan or {})
        if not blocks_of(self.core):
            self._no_split_modules = []
            plan = {name: how for name, how in plan.items() if not name.endswith("blocks.*")}
        if self.config.tie_word_embeddings:  # the head reads it too, so it belongs to the model's own group
            plan.pop("embedding", None)
        self._fsdp_plan = plan

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
        places = set(getattr(model, "hf_device_map", {}).values())
        if "disk" in places or ("cpu" in places and len(places) > 1):
            accepted = "GPUs, or the CPU alone: layers read several weights at once, so none can be offloaded"
            refuse("device_map", model.hf_device_map, accepted)
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
        """The input of every block, then the output of all, in a list, of the first pass only; None if not wanted."""
        wanted = self.config.output_hidden_states if wanted is None else wanted
        if not wanted:
            yield None
            return
        if self._stack.config.reversible or any(block.pool > 1 for block in self._stack.blocks):
            refuse("output_hidden_states", True, "False for a model that is reversible or pools its sequence")
        seen: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args: seen.append(settled(args[0])[0]))
            for block in self._stack.blocks
        ]

        def end(_stack: nn.Module, _given: Any, output: Tensor) -> None:
            seen.append(output)  # blocks that run again to fill a cache are not recorded
            for hook in hooks:
                hook.remove()

        hooks.append(self._stack.register_forward_hook(end))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _as_wanted(self, output: Any, return_dict: bool | None) -> Any:
        """An output as the caller or the config wants it: with names, or as a tuple."""
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()


def _check_folder(name: Any, subfolder: str) -> None:
    """Refuse a local folder of ours whose weights or config are not what was saved."""
    if not isinstance(name, str | Path) or not (folder := Path(name) / subfolder).is_dir():
        return
    if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
        describe(folder / WEIGHTS)
        verify(folder)
