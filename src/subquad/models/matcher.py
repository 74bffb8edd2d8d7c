"""Do two sequences belong together? One encoder reads both, and a small network compares its two vectors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.checks import one_of
from subquad.models.config import Config, EmbeddingConfig, TransformerConfig, assemble
from subquad.models.heads import make_mlp
from subquad.models.inputs import batch_size
from subquad.models.loss import Reduction, cross_entropy
from subquad.models.model import Model
from subquad.models.pooled_encoder import PooledEncoder, check_encoder


@dataclass(frozen=True, kw_only=True)
class MatcherConfig(Config):
    embedding: EmbeddingConfig
    transformer: TransformerConfig
    classes: int = 2
    pooling: str = "mean"  # or "cls": a learned first position
    head_hidden: int | None = None  # None: dim

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, pooling=("mean", "cls"))
        check_encoder(self.transformer, self.pooling)


class Matcher(Model):
    """Matcher(vocab=256, dim=64, depth=2, heads=2, mechanism="linear"): (a [B, T], b [B, S]) -> [B, classes].

    The same encoder reads each sequence by itself; an MLP over [a, b, a·b, a - b] compares the two vectors.
    """

    config_type = MatcherConfig
    config: MatcherConfig

    def __init__(self, config: MatcherConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(MatcherConfig, config, fields)
        # saved weights know it as `tower`
        self.tower = PooledEncoder(config.embedding, config.transformer, config.pooling)
        dim = config.transformer.dim
        self.head = make_mlp(4 * dim, config.head_hidden or dim, config.classes)

    def forward(self, a: Tensor, b: Tensor, a_lengths: Tensor | None = None, b_lengths: Tensor | None = None) -> Tensor:
        """Logits [B, classes] of pairs of rows."""
        if batch_size(a) != batch_size(b):
            raise ValueError(
                f"b has batch {batch_size(b)}: a has batch {batch_size(a)}, and rows are compared in pairs"
            )
        left, right = self.tower(a, a_lengths, "a", "a_lengths"), self.tower(b, b_lengths, "b", "b_lengths")
        return self.head(torch.cat((left, right, left * right, left - right), dim=-1))

    def loss(
        self,
        a: Tensor,
        b: Tensor,
        labels: Tensor,
        a_lengths: Tensor | None = None,
        b_lengths: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Cross-entropy in nats, float32, of labels [B]."""
        return cross_entropy(self(a, b, a_lengths, b_lengths), labels, reduction=reduction, name="labels")
