"""The recurrent baseline of the experiments: LSTM layers in place of a transformer.

By default it is a language model, which steps and generates. With bidirectional=True it labels every position, like the
Bi-LSTM of speech recognition.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import check_count, check_strided, refuse, shown
from subquad.mechanisms.base import Traits
from subquad.models import generation
from subquad.models.config import Config, EmbeddingConfig, assemble
from subquad.models.embedding import Embedding, make_head
from subquad.models.inputs import batch_size, check_position
from subquad.models.loss import Reduction, cross_entropy, shift
from subquad.models.saving import Model
from subquad.ops.lengths import check_lengths, shape_of, zero_padding


class State(NamedTuple):
    hidden: Tensor  # [B, depth, D]
    cell: Tensor  # [B, depth, D]
    position: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(Config):
    embedding: EmbeddingConfig
    dim: int = 256  # of a layer, in each direction
    depth: int = 3
    bidirectional: bool = False
    outputs: int | None = None  # numbers per position; None: vocab, one logit per token
    dropout: float = 0.0  # between layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs is None and self.embedding.vocab is None:
            refuse("outputs", None, "a number of outputs for frames, which have no vocab")

    @property
    def width(self) -> int:
        return self.outputs or self.embedding.vocab or 0

    @property
    def ff_width(self) -> int:
        return 4 * self.dim  # the gates


class Layers(nn.Module):
    """The LSTM layers, with the `traits` and the `config` that a generation loop reads."""

    def __init__(self, config: LSTMConfig):
        super().__init__()
        both = config.bidirectional
        self.traits = Traits(causal=not both, bidirectional=both, state=None if both else "constant")
        self.config = config
        dropout = config.dropout if config.depth > 1 else 0.0
        self.lstm = nn.LSTM(config.dim, config.dim, config.depth, batch_first=True, dropout=dropout, bidirectional=both)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(bias)
            if name.startswith("bias_ih"):
                bias.data[config.dim : 2 * config.dim] = 1.0  # remember by default (Jozefowicz et al. 2015, §3)

    def forward(self, x: Tensor, lengths: Tensor | None, state: State | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(y [B, T, D or 2·D], hidden [B, depth, D], cell) after each row's own length."""
        ranks.refuse("an LSTM", "accepted are LanguageModel, Classifier and Transformer")
        before = None if state is None else tuple(t.transpose(0, 1).contiguous() for t in state[:2])
        if lengths is None:
            y, (hidden, cell) = self.lstm(x, before)
        else:
            sizes = lengths.clamp(min=1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            out, (hidden, cell) = self.lstm(packed, before)
            y, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
            y = zero_padding(y, lengths)
        return y, hidden.transpose(0, 1), cell.transpose(0, 1)


class LSTM(Model):
    """LSTM(vocab=11, dim=256, depth=4): tokens [B, T] -> logits [B, T, vocab], from the tokens up to each position.

    LSTM(features=40, dim=320, depth=3, bidirectional=True, outputs=41): frames [B, T, 40] -> [B, T, 41].
    """

    config_type = LSTMConfig
    config: LSTMConfig

    def __init__(self, config: LSTMConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(LSTMConfig, config, fields, positions="none")
        self.embedding = Embedding(config.embedding, config.dim)
        self.decoder = Layers(config)
        self.head = make_head(config.dim * (2 if config.bidirectional else 1), config.width)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[B, T, outputs]; beyond `lengths` the output is the head of a zero vector."""
        x = self.embedding(tokens, lengths)
        used = check_lengths(lengths, x)
        # padding comes last, so from left to right it changes nothing before it
        y = self.decoder(x, used if self.config.bidirectional else None)[0]
        return self.head(zero_padding(y, used))

    def loss(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        targets: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Cross-entropy in nats, float32: of each token given those before it, or of `targets` [B, T] where given."""
        if targets is None:
            self._check_direction("loss without targets")
            tokens, targets, lengths = shift(tokens, lengths)
        return cross_entropy(self(tokens, lengths), targets, lengths, ignore_index, reduction)

    generate, stream = generation.generate, generation.stream

    def init_state(self, batch: int, capacity: int | None = None) -> State:  # noqa: ARG002 -- it never grows
        """The state before the first token."""
        self._check_direction("init_state")
        check_count("batch", batch)
        weight = self.head.weight
        zeros = weight.new_zeros(batch, self.config.depth, self.config.dim)
        return State(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.int64, device=weight.device))

    def prefill(
        self, tokens: Tensor, lengths: Tensor | None = None, state: State | None = None, head: bool = True
    ) -> tuple[Tensor, State]:
        """Read a prompt [B, T], after `state` if given: (logits [B, T, vocab], the state after it).

        head=False: what the head reads, [B, T, D], in place of the logits.
        """
        batch = batch_size(tokens)
        state = self._check_state(self.init_state(batch) if state is None else state, batch)
        x = self.embedding(tokens, lengths)
        used = check_lengths(lengths, x)
        y, hidden, cell = self.decoder(x, used, state)
        if used is not None:  # packing does not allow rows without tokens: they keep their state
            empty = (used == 0)[:, None, None]
            hidden, cell = torch.where(empty, state.hidden, hidden), torch.where(empty, state.cell, cell)
        seen = state.position + (x.shape[1] if used is None else used)
        return (self.head(y) if head else y), State(hidden.to(state.hidden.dtype), cell.to(state.cell.dtype), seen)

    def step(self, tokens: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        """One token per row, [B] -> (logits [B, vocab], the new state); `inplace` overwrites the old one."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 1:
            raise ValueError(f"tokens has shape {shape_of(tokens)}: step takes one token per row, [batch]")
        outputs, new = self.prefill(tokens[:, None], state=state)
        if inplace:
            for old, tensor in zip(state, new, strict=True):
                old.copy_(tensor)
            new = state
        return outputs[:, 0], new

    def _check_state(self, state: State, batch: int) -> State:
        self._check_direction("prefill")
        wanted = (batch, self.config.depth, self.config.dim)
        for name, part in (("hidden", state.hidden), ("cell", state.cell)):
            if not isinstance(part, Tensor) or part.shape != wanted or part.dtype != self.head.weight.dtype:
                raise ValueError(f"state.{name} is {shown(part)}: accepted is {self.head.weight.dtype} {list(wanted)}")
            if part.device != self.device:
                raise ValueError(f"state.{name} is on {part.device}: this model is on {self.device}")
            check_strided(f"state.{name}", part)
        check_position(state.position, batch, self.device)
        return state

    def _check_direction(self, method: str) -> None:
        if self.config.bidirectional:
            raise NotImplementedError(f"{method}: this model reads in both directions, so there is no state")
