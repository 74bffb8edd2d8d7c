"""An encoder that makes one vector of a sequence: embedding, transformer, pooling."""

import dataclasses

import torch
from torch import Tensor, nn

from subquad.checks import refuse
from subquad.models.config import EmbeddingConfig, TransformerConfig
from subquad.models.embedding import Embedding
from subquad.models.transformer import Transformer
from subquad.ops.lengths import check_lengths


class PooledEncoder(nn.Module):
    """Tokens or frames -> [B, D]: the mean over each row's own positions, or a learned first position ("cls").

    With pooling="none" the vectors of all positions, [B, T', D].
    """

    def __init__(self, embedding: EmbeddingConfig, transformer: TransformerConfig, pooling: str):
        super().__init__()
        self.pooling = pooling
        self.embedding = Embedding(embedding, transformer.dim, transformer.max_length)
        self.cls = None
        if pooling == "cls":
            # before the first token, without a position of its own, so that grids keep their shape
            self.cls = nn.Parameter(torch.zeros(transformer.dim))
            if transformer.max_length is not None:
                transformer = dataclasses.replace(transformer, max_length=transformer.max_length + 1)
        self.transformer = Transformer(transformer)

    def forward(
        self, inputs: Tensor, lengths: Tensor | None = None, name: str = "tokens", lengths_name: str = "lengths"
    ) -> Tensor:
        x = self.embedding(inputs, lengths, name=name, lengths_name=lengths_name)
        lengths = check_lengths(lengths, x)
        if self.cls is not None:
            x = torch.cat((self.cls.to(x.dtype).expand(x.shape[0], 1, -1), x), dim=1)
            lengths = None if lengths is None else lengths + 1
        y = self.transformer(x, lengths)
        if self.pooling == "none":
            return y
        if self.cls is not None:
            return y[:, 0]
        lengths = self.transformer.short_lengths(lengths)
        if lengths is None:
            return y.mean(1)
        return y.sum(1) / lengths.clamp(min=1)[:, None].to(y.dtype)  # padding is zeros already


def check_encoder(transformer: TransformerConfig, pooling: str) -> None:
    """Refuse what an encoder with this pooling cannot be."""
    if transformer.cross is not None:
        refuse("cross", transformer.cross, "None for an encoder: it has no memory")
    if transformer.causal and pooling == "cls":
        refuse("pooling", pooling, '"mean" with causal=True: a first position would see nothing but itself')
