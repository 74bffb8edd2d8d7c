"""One label a sequence, or one a position."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from subquad.checks import one_of
from subquad.models.config import POOLINGS, Config, EmbeddingConfig, TransformerConfig, assemble
from subquad.models.heads import make_head, make_mlp
from subquad.models.loss import Reduction, cross_entropy
from subquad.models.model import Model
from subquad.models.pooled_encoder import PooledEncoder, check_encoder


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Config):
    classes: int
    embedding: EmbeddingConfig
    transformer: TransformerConfig
    pooling: str = "mean"  # "cls": a learned first position; "none": a label at every position
    head_hidden: int | None = None  # width of a hidden layer before the classes; None: no hidden layer

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, pooling=POOLINGS)
        check_encoder(self.transformer, self.pooling)


class Classifier(Model):
    """Classifier(classes=10, vocab=256, dim=64, depth=2, heads=2, mechanism="nystrom"): tokens [B, T] -> [B, classes].

    `features=40` instead of `vocab` takes frames [B, T, 40]. Keywords: the fields of ClassifierConfig, EmbeddingConfig
    and TransformerConfig.
    """

    config_type = ClassifierConfig
    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(ClassifierConfig, config, fields)
        # saved weights know it as `tower`
        self.tower = PooledEncoder(config.embedding, config.transformer, config.pooling)
        dim = config.transformer.dim
        self.head: nn.Module = (
            make_head(dim, config.classes)
            if config.head_hidden is None
            else make_mlp(dim, config.head_hidden, config.classes)
        )

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits [B, classes], or [B, T, classes] with pooling="none" (T shorter where layers pool)."""
        return self.head(self.tower(tokens, lengths))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        lengths: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Cross-entropy in nats, float32, of labels [B], or [B, T] with pooling="none"."""
        logits = self(tokens, lengths)
        lengths = self.tower.transformer.short_lengths(lengths) if self.config.pooling == "none" else None
        return cross_entropy(logits, labels, lengths, ignore_index, reduction, name="labels")
