"""Sequence to sequence: an encoder reads the source; a decoder attends to it and writes the target."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.models import generation
from subquad.models.config import Config, EmbeddingConfig, TransformerConfig, assemble
from subquad.models.embedding import Embedding, check_tie, make_head
from subquad.models.inputs import batch_size
from subquad.models.loss import Reduction, cross_entropy, shift
from subquad.models.saving import Model
from subquad.models.transformer import State as DecoderState
from subquad.models.transformer import Transformer
from subquad.ops.lengths import check_lengths

# keywords that belong to one side; causal is only accepted with a prefix, which names the side
HOMES = {"pool": ("encoder",), **dict.fromkeys(("taps", "cross", "memory_length"), ("decoder",)), "causal": ()}


class State(NamedTuple):
    """What a decoder needs to continue: its own state, and what each layer remembers of the source."""

    decoder: DecoderState
    memory: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Config):
    source: EmbeddingConfig
    target: EmbeddingConfig
    encoder: TransformerConfig
    decoder: TransformerConfig
    share: bool = False  # source and target share a vocabulary and a table of token vectors
    tie: bool = False  # the output weights are the target embedding's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder.dim != self.decoder.dim:
            refuse("decoder.dim", self.decoder.dim, f"the encoder's dim={self.encoder.dim}")
        if self.encoder.cross is not None:
            refuse("encoder.cross", self.encoder.cross, "None: an encoder has no memory")
        if not self.decoder.causal:
            refuse("decoder.causal", False, "True: a decoder writes from left to right")
        if self.decoder.cross is None:
            refuse("decoder.cross", None, 'a mechanism with cross-attention, such as "softmax", "additive" or "linear"')
        if self.target.vocab is None:
            refuse("target.vocab", None, "the number of target tokens")
        concat = [part.positions == "sinusoidal_concat" for part in (self.source, self.target)]
        if self.share and (self.source.vocab != self.target.vocab or concat[0] != concat[1]):
            refuse("share", True, "False unless source and target have the same vocab and vectors of the same width")
        check_tie(self.tie, self.target)


class Seq2Seq(Model):
    """Seq2Seq(vocab=1000, dim=256, depth=4, heads=8, mechanism="linear", cross="additive").

    Keywords apply to both sides; with a prefix encoder_, decoder_, source_ or target_ they apply to that part:
    source_features=40, target_vocab=50, decoder_depth=2. `pool` is for the encoder, `cross` for the decoder.
    """

    config_type = Seq2SeqConfig
    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig | None = None, **fields: Any):
        super().__init__()
        longest = fields.get("encoder_max_length", fields.get("max_length"))
        self.config = config = assemble(
            Seq2SeqConfig, config, fields, HOMES, cross="softmax", decoder_causal=True, memory_length=longest
        )
        dim = config.encoder.dim
        self.source = Embedding(config.source, dim, config.encoder.max_length)
        self.encoder = Transformer(config.encoder)
        self.target = Embedding(config.target, dim, config.decoder.max_length)
        if config.share:
            self.target.weight = self.source.weight
        self.decoder = Transformer(config.decoder)
        assert config.target.vocab is not None
        self.head = None if config.tie else make_head(dim, config.target.vocab)

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None, target_lengths: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: logits [B, T, vocab] of the token after each target token, given the source."""
        ranks.refuse("a Seq2Seq", "accepted are LanguageModel, Classifier and Transformer")
        memory, memory_lengths = self._encode(source, source_lengths, "source_lengths")
        if batch_size(target) != len(memory):
            raise ValueError(f"target has batch {batch_size(target)}: source has batch {len(memory)}")
        x = self.target(target, target_lengths, name="target", lengths_name="target_lengths")
        return self._logits(self.decoder(x, target_lengths, memory, memory_lengths))

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Cross-entropy in nats, float32, of each target token given the source and the target tokens before it.

        The target must begin with a start token, which is not predicted.
        """
        inputs, labels, lengths = shift(target, target_lengths, "target", "target_lengths")
        logits = self(source, inputs, source_lengths, lengths)
        return cross_entropy(logits, labels, lengths, ignore_index, reduction, name="target")

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The memory [B, S, D] and its lengths; shorter than the source if layers pool."""
        ranks.refuse("a Seq2Seq", "accepted are LanguageModel, Classifier and Transformer")
        return self._encode(source, lengths, "lengths")

    def _encode(self, source: Tensor, lengths: Tensor | None, name: str) -> tuple[Tensor, Tensor | None]:
        memory = self.encoder(self.source(source, lengths, name="source", lengths_name=name), lengths)
        return memory, self.encoder.short_lengths(check_lengths(lengths, source))

    def init_state(self, memory: Tensor, memory_lengths: Tensor | None = None, capacity: int | None = None) -> State:
        """The state before the first target token, from the memory that `encode` returned."""
        remembered = self.decoder.remember(memory, memory_lengths)
        return State(self.decoder.init_state(len(memory), capacity), remembered)

    def prefill(
        self, target: Tensor, state: State, lengths: Tensor | None = None, head: bool = True
    ) -> tuple[Tensor, State]:
        """Read target tokens [B, T] in parallel, after `state`: (logits [B, T, vocab], the state after them).

        head=False: what the head reads, [B, T, D], in place of the logits.
        """
        x = self.target(target, lengths, self._positions(state, target), name="target")
        y, decoder = self.decoder.prefill(x, lengths, state.decoder, state.memory)
        return (self._logits(y) if head else y), state._replace(decoder=decoder)

    def step(self, tokens: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        """One target token per row, [B] -> (logits [B, vocab], the new state); `inplace` overwrites the old one."""
        x = self.target.step(tokens, self._positions(state, tokens))
        y, decoder = self.decoder.step(x, state.decoder, state.memory, inplace=inplace)
        return self._logits(y), state._replace(decoder=decoder)

    generate, stream = generation.generate, generation.stream  # state=model.init_state(*model.encode(source))

    def _positions(self, state: State, tokens: Tensor) -> Tensor:
        if not isinstance(state.memory, tuple):
            raise ValueError(f"state.memory is a {type(state.memory).__name__}: accepted is a state from init_state")
        return self.decoder.check_state(state.decoder, batch_size(tokens))[0]

    def _logits(self, y: Tensor) -> Tensor:
        return nn.functional.linear(y, self.target.weight) if self.head is None else self.head(y)
