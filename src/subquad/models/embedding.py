"""Input to vectors: tokens or frames, with their positions added or concatenated; and the output layers.

Positions are computed waves, learned tables, or sums over rows and columns. Every kind maps positions [T] or [B, T] to
vectors [..., width], so that a step at position p gets the same numbers as a whole sequence. Rotary positions are not
here but inside the mixers.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import refuse
from subquad.models.config import GRIDS, EmbeddingConfig
from subquad.models.dropout import Dropout
from subquad.models.inputs import clean_frames, clean_ids
from subquad.ops.impl import traced
from subquad.ops.lengths import keep, readable, shape_of, zero_padding
from subquad.ops.lookup import lookup


class Embedding(nn.Module):
    """Tokens [B, T] or frames [B, T, F] -> [B, T, D]. Vectors of tokens and of positions both start at unit size."""

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
            self.convolutions = nn.ModuleList(Convolution(width) for _ in range(config.convolutions or 0))
        self.dropout = Dropout(config.embedding_dropout)

    def forward(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        position: Tensor | None = None,
        name: str = "tokens",
        lengths_name: str = "lengths",
    ) -> Tensor:
        """`position` [B]: where each row starts (0 if None). Padding may hold anything."""
        first = None  # places that are added already
        if self.config.vocab is not None:
            ids = clean_ids(inputs, self.weight, lengths, name, lengths_name)
            if traced() or ids.numel() <= self.weight.shape[0]:
                x = F.embedding(ids, self.weight) * self.scale
            else:  # the table is the smaller one to scale; a compiler scales as it looks up
                first = self._first_places(ids.shape[1], position)
                x = lookup(ids, self.weight * self.scale, first, beside=self.concat)
        else:
            x = self.frames(clean_frames(inputs, self.frames.weight, lengths, name, lengths_name))
            for convolution in self.convolutions:
                x = convolution(x, lengths)
        if self.positions is not None and first is None:
            batch, size, _ = x.shape
            mask = keep(None if lengths is None else lengths.to(x.device), size)
            if position is not None and size == 1 and ranks.active() is None:
                at = position[:, None]  # a step: two operations less
            else:
                at = ranks.positions(size, inputs.device)  # [T]
                at = at if position is None else position[:, None] + at  # [B, T]
            if mask is not None:
                at = at * mask  # padding may lie beyond the last position
            limit = self.positions.limit
            # on a GPU the lookup itself fails on a bad index
            if limit is not None and readable(at) and (last := int(ranks.largest(at.max())) + 1) > limit:
                what = f"shape={self.config.shape}" if self.config.shape else f"max_length={limit}"
                raise ValueError(f"{name} reaches T={last}: this model was built with {what}, {limit} positions")
            places = self.positions(at, x.dtype)
            x = torch.cat((x, places.expand(batch, size, -1)), dim=-1) if self.concat else x + places
        return self.dropout(x)

    def _first_places(self, size: int, position: Tensor | None) -> Tensor | None:
        """The vectors [T, ·] of the first positions, if those are the positions of all rows."""
        places, dtype = self.positions, self.weight.dtype
        if places is None or position is not None or ranks.active() is not None:
            return None
        if isinstance(places, Grid):
            return places(size, dtype) if size <= math.prod(places.shape) else None
        return places(torch.arange(size, device=self.weight.device), dtype)

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """One token per row at the row's own position: [B] -> [B, D]."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 1:
            raise ValueError(f"tokens has shape {shape_of(tokens)}: step takes one token per row, [batch]")
        return self(tokens[:, None], position=position)[:, 0]


class Convolution(nn.Module):
    """xₜ + W·[relu(xₜ₋₁), relu(xₜ), relu(xₜ₊₁)] + b of vectors [B, T, D]; outside a row, and in its padding, x is 0."""

    def __init__(self, width: int):
        super().__init__()
        self.weigh = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = None if lengths is None else lengths.to(x.device)
        around = ranks.halo(zero_padding(x.relu(), lengths), 1, 1)
        return x + self.weigh(torch.cat((around[:, :-2], around[:, 1:-1], around[:, 2:]), dim=-1))


def sinusoid(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """sin and cos of p / 10000^(2j/width), interleaved: Vaswani et al. 2017, arXiv:1706.03762, §3.5."""
    # a 16-bit angle would be off by whole turns at a few thousand positions
    exact = torch.promote_types(dtype, torch.float32)
    rates = 10000 ** -(torch.arange(0, width, 2, device=positions.device, dtype=exact) / width)
    angle = positions.to(exact)[..., None] * rates
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :width].to(dtype)


class Sinusoidal(nn.Module):
    """Sine and cosine waves, for any length."""

    limit: int | None = None

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return sinusoid(positions, self.width, dtype)


class Grid(nn.Module):
    """The sum of one learned vector per axis: position p of a (rows, columns, channels) grid read in order.

    With one axis this is the usual learned position embedding. If it starts as waves, each axis in its own part of the
    vector, "one row up" is the same rotation everywhere and need not be learned for each place.
    """

    def __init__(self, shape: Sequence[int], width: int, waves: bool = False):
        super().__init__()
        self.shape = tuple(shape)
        self.limit: int | None = math.prod(self.shape)
        self.scale = math.sqrt(width)  # as for tokens: small weights, which learn fast, but unit-size vectors
        size = math.sqrt(len(self.shape))
        tables = _waves(self.shape, width) if waves else [torch.randn(n, width) / size for n in self.shape]
        self.tables = nn.ParameterList(nn.Parameter(table / self.scale) for table in tables)

    def forward(self, positions: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Of positions, or of so many first ones: by slices of the tables, whose gradient is faster than a lookup's."""
        rows, *others = self.tables
        if isinstance(positions, int):
            places: Tensor | None = None
            for table in reversed((_first(rows, -(-positions // math.prod(self.shape[1:]))), *others)):
                places = table if places is None else (places + table[:, None]).flatten(0, 1)
            assert places is not None
            return (_first(places, positions) * self.scale).to(dtype)
        at: Tensor = positions
        total: Tensor | float = 0.0
        for table in reversed(others):
            total = total + F.embedding(at % table.shape[0], table)
            at = at // table.shape[0]
        # what remains is the row; the lookup should fail beyond the last row
        return ((total + F.embedding(at, rows)) * self.scale).to(dtype)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


def _first(x: Tensor, size: int) -> Tensor:
    """Rows of x; all of them without a slice, whose gradient is a copy."""
    return x if size == len(x) else x[:size]


def _waves(shape: Sequence[int], width: int) -> list[Tensor]:
    """[size, width] for each axis: waves with periods from four places to twice the axis; zero in the other columns."""
    tables, pairs = [], width // (2 * len(shape))
    for axis, size in enumerate(shape):
        rates = math.pi / torch.logspace(1, math.log2(max(size, 2)), pairs, base=2)
        angle = torch.arange(size)[:, None] * rates
        table = torch.zeros(size, width)
        table[:, 2 * pairs * axis : 2 * pairs * (axis + 1)] = math.sqrt(2) * torch.cat((angle.sin(), angle.cos()), 1)
        tables.append(table)
    return tables


def _positions(config: EmbeddingConfig, width: int, max_length: int | None) -> Sinusoidal | Grid | None:
    if config.positions == "none":
        return None
    if config.positions == "learned":
        if max_length is None:
            refuse("max_length", None, 'the longest T you need with positions="learned"')
        return Grid((max_length,), width)
    if config.positions in GRIDS:
        assert config.shape is not None
        return Grid(config.shape, width, waves=config.positions == "waves")
    return Sinusoidal(width)


def make_head(dim: int, outputs: int) -> nn.Linear:
    """A linear layer whose first predictions are nearly uniform."""
    head = nn.Linear(dim, outputs)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


def make_mlp(dim: int, hidden: int, outputs: int) -> nn.Sequential:
    """Like `make_head`, after a hidden layer."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), make_head(hidden, outputs))


def check_tie(tie: bool, embedding: EmbeddingConfig, outputs: int | None = None) -> None:
    """Refuse tied weights if the embedding's cannot be used for the output."""
    if not tie:
        return
    if embedding.positions == "sinusoidal_concat":
        refuse("tie", True, 'False with positions="sinusoidal_concat": its token vectors are narrower than the model')
    if outputs not in (None, embedding.vocab):
        refuse("tie", True, f"False with outputs={outputs}, which is not vocab={embedding.vocab}")
