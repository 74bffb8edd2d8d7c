"""Input to vectors: tokens or frames, with their positions added or concatenated."""

import math

import torch
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.models.config import GRIDS, EmbeddingConfig
from subquad.models.inputs import clean_frames, clean_ids
from subquad.models.positions import Grid, Sinusoidal
from subquad.ops.lengths import keep, readable, shape_of


class Embedding(nn.Module):
    """Tokens [B, T] or frames [B, T, F] -> [B, T, D]. Tokens and positions both enter at unit size."""

    def __init__(self, config: EmbeddingConfig, dim: int, max_length: int | None = None):
        super().__init__()
        self.config = config
        self.concat = config.positions == "sinusoidal_concat"
        if self.concat and dim < 2:
            refuse("dim", dim, 'at least 2 with positions="sinusoidal_concat"')
        width = dim - dim // 2 if self.concat else dim
        self.positions = _positions(config, dim // 2 if self.concat else dim, max_length)
        self.scale = 1.0
        if config.vocab is not None:
            # Small weights and a scale (Vaswani et al. 2017, §3.4): they learn fast, and fit a tied output layer
            self.weight = nn.Parameter(torch.randn(config.vocab, width) / math.sqrt(width))
            self.scale = math.sqrt(width)
        else:
            assert config.features is not None
            self.frames = nn.Linear(config.features, width)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        position: Tensor | None = None,
        name: str = "tokens",
        lengths_name: str = "lengths",
    ) -> Tensor:
        """`position` [B]: where each row starts (0 if None). Padding may hold anything."""
        if self.config.vocab is not None:
            ids = clean_ids(inputs, self.weight, lengths, name, lengths_name)
            x = nn.functional.embedding(ids, self.weight) * self.scale
        else:
            x = self.frames(clean_frames(inputs, self.frames.weight, lengths, name, lengths_name))
        batch, size, _ = x.shape
        mask = keep(None if lengths is None else lengths.to(x.device), size)
        if self.positions is not None:
            at = torch.arange(size, device=inputs.device)  # [T]
            if position is not None:
                at = position[:, None] + at  # [B, T]
            if mask is not None:
                at = at * mask  # padding may lie beyond the last position
            self._check_positions(at, name)
            places = self.positions(at, x.dtype)
            x = torch.cat((x, places.expand(batch, size, -1)), dim=-1) if self.concat else x + places
        return self.dropout(x)

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """One token a row at the row's own position: [B] -> [B, D]."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 1:
            raise ValueError(f"tokens has shape {shape_of(tokens)}: step takes one token a row, [batch]")
        return self(tokens[:, None], position=position)[:, 0]

    def _check_positions(self, at: Tensor, name: str) -> None:
        limit = self.positions.limit if self.positions is not None else None
        if limit is None or not readable(at):  # on a GPU the lookup itself fails on a bad index
            return
        last = int(at.max()) + 1
        if last > limit:
            what = f"shape={self.config.shape}" if self.config.shape else f"max_length={limit}"
            raise ValueError(f"{name} reaches T={last}: this model was built with {what}, {limit} positions")


def _positions(config: EmbeddingConfig, width: int, max_length: int | None) -> Sinusoidal | Grid | None:
    if config.positions == "none":
        return None
    if config.positions == "learned":
        if max_length is None:
            refuse("max_length", None, 'the longest T you need with positions="learned"')
        assert max_length is not None
        return Grid((max_length,), width)
    if config.positions in GRIDS:
        assert config.shape is not None
        return Grid(config.shape, width, waves=config.positions == "waves")
    return Sinusoidal(width)
