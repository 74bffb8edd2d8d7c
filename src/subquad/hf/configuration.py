"""The config of our models in transformers: the keys of our config.json, and the names that transformers asks for."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from transformers import PreTrainedConfig

from subquad.checks import refuse
from subquad.disk import DIGEST
from subquad.models import MODELS
from subquad.models.config import EmbeddingConfig, TransformerConfig
from subquad.models.saving import FORMAT, MODEL_TYPE

WRAPPED = ("LanguageModel", "Classifier")  # the kinds of models that transformers has a place for


class SubquadConfig(PreTrainedConfig):
    """What config.json of a saved model says: the kind of model, its type and its config.

    SubquadConfig.of(model.config), or AutoConfig.from_pretrained(folder).
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embedding": "free_full_weight",
        "transformer.blocks.*": "free_full_weight",
    }

    format: int = FORMAT
    model: str = "LanguageModel"
    config: dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop(DIGEST, None)  # it is of the folder, not of what becomes of the model
        if self.format != FORMAT:
            refuse("format", self.format, f"{FORMAT}, which this version reads")
        if self.config is not None:
            self.config = self._parse().to_dict()  # a copy, complete and checked
            classes = self.config.get("classes")
            if classes and self.id2label is None and kwargs.get("num_labels") is None:
                kwargs["num_labels"] = classes
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: Any, **more: Any) -> "SubquadConfig":
        """The config of a model of ours: SubquadConfig.of(model.config)."""
        kinds = {MODELS[name].config_type: name for name in WRAPPED}
        if type(config) not in kinds:
            refuse("config", config, f"the config of a {' or a '.join(WRAPPED)}")
        return cls(model=kinds[type(config)], config=config.to_dict(), **more)

    def parsed(self) -> Any:
        """Our config, with the number of classes that transformers was asked for."""
        parsed = self._parse()
        if self.model == "Classifier" and self.num_labels != parsed.classes:
            return type(parsed).from_dict({**parsed.to_dict(), "classes": self.num_labels})
        return parsed

    def _parse(self) -> Any:
        if self.model not in MODELS:
            refuse("model", self.model, " or ".join(WRAPPED))
        if self.model not in WRAPPED:
            accepted = f"{' or '.join(WRAPPED)}; load a {self.model} with subquad.load"
            refuse("model", self.model, accepted)
        if not isinstance(self.config, Mapping):
            refuse("config", self.config, "the config of a model, as SubquadConfig.of(model.config) makes it")
        return MODELS[self.model].config_type.from_dict(copy.deepcopy(dict(self.config)))

    # What transformers, and programs for it, ask a config for

    @property
    def _embedding(self) -> EmbeddingConfig | None:
        return None if self.config is None else cast(EmbeddingConfig, self._parse().embedding)

    @property
    def _stack(self) -> TransformerConfig | None:
        return None if self.config is None else cast(TransformerConfig, self._parse().transformer)

    @property
    def vocab_size(self) -> int | None:
        return None if self._embedding is None else self._embedding.vocab

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        if self.config is not None:
            self.config["embedding"]["vocab"] = size
            self._parse()

    @property
    def hidden_size(self) -> int | None:
        return None if self._stack is None else self._stack.dim

    @property
    def num_hidden_layers(self) -> int | None:
        return None if self._stack is None else self._stack.depth

    @property
    def num_attention_heads(self) -> int | None:
        return None if self._stack is None else self._stack.heads

    @property
    def tie_word_embeddings(self) -> bool:
        return bool(self.config and self.config.get("tie"))
