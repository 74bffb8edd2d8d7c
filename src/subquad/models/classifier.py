"""Models that predict one label per sequence, per position, or per pair of sequences."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import one_of, refuse
from subquad.models.config import Config, EmbeddingConfig, TransformerConfig, assemble
from subquad.models.embedding import Embedding, make_head, make_mlp
from subquad.models.inputs import batch_size, length_of
from subquad.models.loss import Reduction, cross_entropy, mean_over_ranks
from subquad.models.saving import Model
from subquad.models.transformer import Transformer
from subquad.ops.lengths import check_lengths


class PooledEncoder(nn.Module):
    """Tokens or frames -> [B, D]: the mean over each row's own positions, or a learned first position ("cls").

    With pooling="none" the vectors of all positions, [B, T', D].
    """

    def __init__(self, config: "ClassifierConfig | MatcherConfig"):
        super().__init__()
        transformer, self.pooling = config.transformer, config.pooling
        self.embedding = Embedding(config.embedding, transformer.dim, transformer.max_length)
        self.cls = None
        if self.pooling == "cls":
            # before the first token; it has no position of its own, so that grids keep their shape
            self.cls = nn.Parameter(torch.zeros(transformer.dim))
            if transformer.max_length is not None:
                transformer = dataclasses.replace(transformer, max_length=transformer.max_length + 1)
        self.transformer = Transformer(transformer)

    def forward(
        self, inputs: Tensor, lengths: Tensor | None = None, name: str = "tokens", lengths_name: str = "lengths"
    ) -> Tensor:
        if self.cls is not None:
            ranks.refuse('pooling="cls"', 'accepted are "mean" and "none"')
        with ranks.laid_out(length_of(inputs)):
            return self._pooled(self.embedding(inputs, lengths, name=name, lengths_name=lengths_name), lengths)

    def mix(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The vectors of all positions of embedded inputs, [B, T', D]; the learned first position comes before them."""
        if self.cls is not None:
            x = torch.cat((self.cls.to(x.dtype).expand(x.shape[0], 1, -1), x), dim=1)
            lengths = None if lengths is None else lengths + 1
        y: Tensor = self.transformer(x, lengths)
        return y

    def _pooled(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        lengths = check_lengths(lengths, x)
        y = self.mix(x, lengths)
        if self.pooling == "none":
            return y
        if self.cls is not None:
            return y[:, 0]
        lengths = self.transformer.short_lengths(lengths)
        if ranks.active() is not None:
            whole = ranks.whole_lengths(lengths)
            lengths = y.new_full(y.shape[:1], ranks.whole_length(y.shape[1])) if whole is None else whole
        if lengths is None:
            return y.mean(1)
        return ranks.total(y.sum(1)) / lengths.clamp(min=1)[:, None].to(y.dtype)  # padding is zeros already


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Config):
    classes: int
    embedding: EmbeddingConfig
    transformer: TransformerConfig
    pooling: str = "mean"  # "cls": a learned first position; "none": a label at every position
    head_hidden: int | None = None  # width of a hidden layer before the classes; None: no hidden layer

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_encoder(self, "mean", "cls", "none")


class Classifier(Model):
    """Classifier(classes=10, vocab=256, dim=64, depth=2, heads=2, mechanism="nystrom"): tokens [B, T] -> [B, classes].

    `features=40` instead of `vocab` takes frames [B, T, 40]. Keywords: the fields of ClassifierConfig, EmbeddingConfig
    and TransformerConfig.
    """

    config_type = ClassifierConfig
    architecture = "SubquadForSequenceClassification"
    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(ClassifierConfig, config, fields)
        self.tower = PooledEncoder(config)  # saved weights use this name
        dim, hidden = config.transformer.dim, config.head_hidden
        head = make_head(dim, config.classes) if hidden is None else make_mlp(dim, hidden, config.classes)
        self.head: nn.Module = head

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
        """Cross-entropy in nats, float32, of labels [B], or [B, T] with pooling="none".

        Inside `sequence_parallel` the mean is over all ranks, and each rank's backward gives its share of the
        gradients; with pooling="none", "sum" and "none" are those of its own part.
        """
        logits = self(tokens, lengths)
        lengths = self.tower.transformer.short_lengths(lengths) if self.config.pooling == "none" else None
        if ranks.active() is None or (self.config.pooling == "none" and reduction != "mean"):
            return cross_entropy(logits, labels, lengths, ignore_index, reduction, name="labels")
        if self.config.pooling == "none":
            total = cross_entropy(logits, labels, lengths, ignore_index, "sum", name="labels")
            return mean_over_ranks(total, labels, lengths, ignore_index)
        # all ranks have the same logits
        return ranks.share(cross_entropy(logits, labels, lengths, ignore_index, reduction, name="labels"))


@dataclass(frozen=True, kw_only=True)
class MatcherConfig(Config):
    embedding: EmbeddingConfig
    transformer: TransformerConfig
    classes: int = 2
    pooling: str = "mean"  # or "cls": a learned first position
    head_hidden: int | None = None  # None: dim

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_encoder(self, "mean", "cls")


class Matcher(Model):
    """Matcher(vocab=256, dim=64, depth=2, heads=2, mechanism="linear"): (a [B, T], b [B, S]) -> [B, classes].

    The same encoder reads each sequence by itself; an MLP over [a, b, a·b, a - b] compares the two vectors.
    """

    config_type = MatcherConfig
    config: MatcherConfig

    def __init__(self, config: MatcherConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(MatcherConfig, config, fields)
        self.tower = PooledEncoder(config)  # saved weights use this name
        dim = config.transformer.dim
        self.head = make_mlp(4 * dim, config.head_hidden or dim, config.classes)

    def forward(self, a: Tensor, b: Tensor, a_lengths: Tensor | None = None, b_lengths: Tensor | None = None) -> Tensor:
        """Logits [B, classes] of pairs of rows."""
        ranks.refuse("a Matcher", "accepted are LanguageModel, Classifier and Transformer")
        rows_a, rows_b = batch_size(a), batch_size(b)
        if rows_a != rows_b:
            raise ValueError(f"b has batch {rows_b}: a has batch {rows_a}, and their rows are compared in pairs")
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


def _check_encoder(config: ClassifierConfig | MatcherConfig, *poolings: str) -> None:
    """Refuse settings that an encoder with this pooling cannot have."""
    one_of(config, pooling=poolings)
    if config.transformer.cross is not None:
        refuse("cross", config.transformer.cross, "None for an encoder: it has no memory")
    if config.transformer.causal and config.pooling == "cls":
        refuse("pooling", "cls", '"mean" with causal=True: a first position would only see itself')
    if config.transformer.causal and config.embedding.convolutions is not None:
        refuse("convolutions", config.embedding.convolutions, "None with causal=True: they show the next frames")
