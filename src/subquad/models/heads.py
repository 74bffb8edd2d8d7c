"""Output layers."""

from torch import nn

from subquad.checks import refuse
from subquad.models.config import EmbeddingConfig


def make_head(dim: int, outputs: int) -> nn.Linear:
    """A linear layer that starts near uniform predictions."""
    head = nn.Linear(dim, outputs)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


def make_mlp(dim: int, hidden: int, outputs: int) -> nn.Sequential:
    """The same behind a hidden layer."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), make_head(hidden, outputs))


def check_tie(tie: bool, embedding: EmbeddingConfig, outputs: int | None = None) -> None:
    """Refuse tied weights where the embedding's cannot be those of the output."""
    if not tie:
        return
    if embedding.positions == "sinusoidal_concat":
        refuse("tie", True, 'False with positions="sinusoidal_concat": its token vectors are narrower than the model')
    if outputs not in (None, embedding.vocab):
        refuse("tie", True, f"False with outputs={outputs}, which is not vocab={embedding.vocab}")
