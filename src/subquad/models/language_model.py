"""A language model over any vocabulary: characters, bytes, words, pixel values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.models import generation, logistic_mixture
from subquad.models.config import Config, EmbeddingConfig, TransformerConfig, assemble
from subquad.models.embedding import Embedding, check_tie, make_head
from subquad.models.inputs import batch_size, length_of
from subquad.models.loss import Reduction, cross_entropy, head_cross_entropy, mean_over_ranks, shift, shift_part
from subquad.models.saving import Model
from subquad.models.transformer import State, Transformer
from subquad.ops.row_linear import MANY, norm_of, plain, row_linear


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(Config):
    embedding: EmbeddingConfig
    transformer: TransformerConfig
    tie: bool = False  # the output weights are the embedding's
    outputs: int | None = None  # numbers predicted per token; None: vocab, one logit per token
    mixture: int | None = None  # components of a mixture of discretised logistics over 256 values, instead of logits

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixture is not None:
            if self.outputs is not None:
                refuse("outputs", self.outputs, "None with mixture, which has three numbers per component")
            if (self.embedding.vocab or 0) < logistic_mixture.VALUES:
                refuse("mixture", self.mixture, f"None with vocab={self.embedding.vocab}: it predicts 256 values")
        if not self.transformer.causal:
            accepted = 'True for a language model; for outputs that see both sides, Classifier(pooling="none")'
            refuse("causal", False, accepted)
        if self.transformer.cross is not None:
            refuse("cross", self.transformer.cross, "None for a language model; Seq2Seq attends to a source")
        if self.embedding.vocab is None:
            refuse("vocab", None, "the number of tokens")
        check_tie(self.tie, self.embedding, self.outputs if self.mixture is None else self.width)

    @property
    def width(self) -> int:
        return 3 * self.mixture if self.mixture else self.outputs or self.embedding.vocab or 0


class LanguageModel(Model):
    """LanguageModel(vocab=256, dim=256, depth=6, heads=8, mechanism="linear"): tokens [B, T] -> logits [B, T, vocab].

    Logits at position t predict token t + 1. Keywords: the fields of LanguageModelConfig, EmbeddingConfig
    (positions="rotary" too) and TransformerConfig.
    """

    config_type = LanguageModelConfig
    architecture = "SubquadForCausalLM"
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(LanguageModelConfig, config, fields, causal=True)
        self.embedding = Embedding(config.embedding, config.transformer.dim, config.transformer.max_length)
        self.transformer = Transformer(config.transformer)
        self.head = None if config.tie else make_head(config.transformer.dim, config.width)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, head: bool = True) -> Tensor:
        """Logits [B, T, vocab]; beyond `lengths` those of a zero vector. head=False: what the head reads, [B, T, D]."""
        with ranks.laid_out(length_of(tokens)):
            y = self.transformer(tokens, lengths, embed=self.embedding, products=True)
        return self._logits(y) if head else y

    def loss(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        targets: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        pieces: int | None = None,
    ) -> Tensor:
        """Cross-entropy in nats, float32: of each token given those before it, or of `targets` [B, T] where given.

        Inside `sequence_parallel` the mean is over the tokens of all ranks, and each rank's backward gives its share of
        the gradients; "sum" and "none" are those of its own part.
        `pieces`: compute logits and loss for so many pieces of the tokens, one after the other, which saves memory.
        None: 8 pieces from 2^26 logits on, where all at once would be most of the memory, otherwise 1.
        """
        if self.config.mixture is None and self.config.width != self.config.embedding.vocab:
            raise ValueError(f"loss needs a logit per token: this model has outputs={self.config.outputs}; use forward")
        if targets is None:
            part = ranks.active() is not None
            tokens, targets, lengths = shift_part(tokens, lengths, ignore_index) if part else shift(tokens, lengths)
        over_all = ranks.active() is not None and reduction == "mean"
        own: Reduction = "sum" if over_all else reduction
        layer = None if self.config.mixture is not None else self._plain_head()
        if layer is not None:
            loss = head_cross_entropy(
                self(tokens, lengths, head=False), *layer, targets, lengths, ignore_index, own, pieces
            )
        elif pieces in (None, 1):
            criterion = cross_entropy if self.config.mixture is None else logistic_mixture.loss
            loss = criterion(self(tokens, lengths), targets, lengths, ignore_index, own)
        else:
            refuse("pieces", pieces, "None or 1 with a mixture, or with a head that was replaced or has hooks")
        return mean_over_ranks(loss, targets, lengths, ignore_index) if over_all else loss

    generate, stream = generation.generate, generation.stream

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token. `capacity`: positions growing states hold without reallocating."""
        return self.transformer.init_state(batch, capacity)

    def prefill(
        self, tokens: Tensor, lengths: Tensor | None = None, state: State | None = None, head: bool = True
    ) -> tuple[Tensor, State]:
        """Read a prompt [B, T] in parallel, after `state` if given: (logits [B, T, vocab], the state after it).

        head=False: what the head reads, [B, T, D], in place of the logits.
        """
        position = None if state is None else self.transformer.check_state(state, batch_size(tokens))[0]
        with ranks.laid_out(length_of(tokens)):
            y, state = self.transformer.prefill(self.embedding(tokens, lengths, position), lengths, state)
        return (self._logits(y) if head else y), state

    def step(self, tokens: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        """One token per row, [B] -> (logits [B, vocab], the new state); `inplace` overwrites the old one."""
        position, _ = self.transformer.check_state(state, batch_size(tokens))
        x = self.embedding.step(tokens, position)
        norm, layer = norm_of(self.transformer.norm, x.dtype), self._plain_head()
        fuses = inplace and norm is not None and layer is not None and len(x) <= MANY
        y, state = self.transformer.step(x, state, inplace=inplace, norm=not fuses)
        return (row_linear(y, *layer, norm=norm) if fuses and layer is not None else self._logits(y)), state

    def _plain_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the output layer; None if it was replaced or is watched."""
        if self.head is None:
            return self.embedding.weight, None
        return (self.head.weight, self.head.bias) if plain(self.head) else None

    def _logits(self, y: Tensor) -> Tensor:
        return nn.functional.linear(y, self.embedding.weight) if self.head is None else self.head(y)
