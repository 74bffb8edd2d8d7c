"""Models on top of the mechanisms: a stack of blocks, and what people put on it."""

from subquad.models.config import EmbeddingConfig, MixerConfig, TransformerConfig
from subquad.models.language_model import LanguageModel, LanguageModelConfig
from subquad.models.transformer import Transformer

__all__ = [
    "EmbeddingConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "MixerConfig",
    "Transformer",
    "TransformerConfig",
]
