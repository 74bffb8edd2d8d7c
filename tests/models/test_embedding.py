from typing import Any

import pytest
import torch
import torch.nn.functional as F

from subquad.models import EmbeddingConfig
from subquad.models.embedding import Convolution, Embedding, Grid, sinusoid


def embed(positions: str, dim: int = 12, max_length: int | None = 10, **fields: Any) -> Embedding:
    return Embedding(EmbeddingConfig(vocab=7, positions=positions, **fields), dim, max_length)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("sinusoidal", {}),
    ("sinusoidal_concat", {}),
    ("learned", {}),
    ("grid", {"shape": (2, 5)}),
    ("waves", {"shape": (2, 5)}),
    ("none", {}),
]


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_a_row_that_starts_later_gets_later_positions(kind: str, fields: dict[str, Any]) -> None:
    embedding = embed(kind, **fields)
    tokens = torch.randint(7, (2, 10))
    whole = embedding(tokens)
    assert whole.shape == (2, 10, 12)
    start = torch.tensor([2, 5])
    later = embedding(torch.stack((tokens[0, 2:6], tokens[1, 5:9])), position=start)
    torch.testing.assert_close(later[0], whole[0, 2:6])
    torch.testing.assert_close(later[1], whole[1, 5:9])


@pytest.mark.parametrize("shape", [(10,), (2, 5), (2, 3, 2)])
def test_the_first_positions_are_those_that_are_looked_up(shape: tuple[int, ...]) -> None:
    grid = Grid(shape, 8)
    tables = list(grid.parameters())
    for size in (1, 4, grid.limit or 0):
        first, found = grid(size, torch.float32), grid(torch.arange(size), torch.float32)
        assert torch.equal(first, found)
        weights = torch.randn(size, 8)
        got, want = (torch.autograd.grad(places, tables, weights) for places in (first, found))
        torch.testing.assert_close(got, want)


def test_concatenation_leaves_tokens_and_positions_apart() -> None:
    embedding = embed("sinusoidal_concat")
    x = embedding(torch.tensor([[3, 3, 4]]))
    assert embedding.weight.shape == (7, 6)
    torch.testing.assert_close(x[0, 0, :6], x[0, 1, :6])
    torch.testing.assert_close(x[0, :, 6:], sinusoid(torch.arange(3), 6, torch.float32))
    assert embed("sinusoidal_concat", dim=7)(torch.tensor([[3]])).shape == (1, 1, 7)


@pytest.mark.parametrize(("kind", "fields"), [k for k in KINDS if k[0] != "none"])
def test_tokens_and_positions_start_at_similar_size(kind: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    embedding = Embedding(EmbeddingConfig(vocab=50, positions=kind, **fields), 256, 10)
    tokens = torch.nn.functional.embedding(torch.arange(50), embedding.weight) * embedding.scale
    assert embedding.positions is not None
    places = embedding.positions(torch.arange(10), torch.float32)
    assert 0.9 < tokens.square().mean().sqrt() < 1.1
    assert 0.6 < places.square().mean().sqrt() < 1.1


@pytest.mark.parametrize(
    ("kind", "fields", "what"), [("learned", {}, "max_length=10"), ("grid", {"shape": (2, 5)}, "shape=")]
)
def test_beyond_the_last_position(kind: str, fields: dict[str, Any], what: str) -> None:
    embedding = embed(kind, **fields)
    with pytest.raises(ValueError, match=f"tokens reaches T=11: this model was built with {what}"):
        embedding(torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens reaches T=11"):
        embedding(torch.zeros(2, 1, dtype=torch.int64), position=torch.tensor([3, 10]))
    # padding has no position
    assert embedding(torch.zeros(2, 11, dtype=torch.int64), lengths=torch.tensor([10, 3])).shape == (2, 11, 12)


def test_learned_positions_need_a_length() -> None:
    with pytest.raises(ValueError, match="max_length=None cannot work"):
        embed("learned", max_length=None)


def test_frames() -> None:
    embedding = Embedding(EmbeddingConfig(features=4), 8)
    frames = torch.randn(2, 5, 4)
    assert embedding(frames).shape == (2, 5, 8)
    frames[1, 3:] = torch.nan
    assert embedding(frames, torch.tensor([5, 3])).isfinite().all()
    for bad in (torch.randn(2, 5, 3), torch.randn(2, 5), torch.zeros(2, 0, 4)):
        with pytest.raises(ValueError, match=r"tokens has shape .*: accepted is \[batch, T, 4\]"):
            embedding(bad)
    with pytest.raises(ValueError, match=r"tokens has dtype torch.int64: this model computes in torch.float32"):
        embedding(torch.zeros(2, 5, 4, dtype=torch.int64))


def test_ids() -> None:
    embedding = embed("sinusoidal")
    for bad in (torch.tensor([[0, 7]]), torch.tensor([[-1, 0]])):
        with pytest.raises(ValueError, match=r"tokens ranges from .*: accepted are ids from 0 to 6"):
            embedding(bad)
    with pytest.raises(ValueError, match=r"dtype torch.float32: accepted are integers"):
        embedding(torch.zeros(1, 3))
    no_ids: tuple[Any, ...] = (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), [1, 2])
    for bad in no_ids:
        with pytest.raises(ValueError, match=r"tokens has shape .*: accepted are token ids \[batch, T\]"):
            embedding(bad)
    # padding may hold anything, even invalid ids
    padded = torch.tensor([[1, 2, -100], [3, 999, 7]], dtype=torch.int32)
    expected = embedding(torch.tensor([[1, 2], [3, 0]]))
    torch.testing.assert_close(embedding(padded, torch.tensor([2, 1]))[:, 0], expected[:, 0])


def test_convolutions_read_the_frames_beside_and_no_padding() -> None:
    torch.manual_seed(0)
    embedding = Embedding(EmbeddingConfig(features=4, convolutions=2, positions="none"), 6).double()
    frames = torch.randn(2, 7, 4, dtype=torch.float64)
    lengths = torch.tensor([7, 3])
    x = embedding.frames(frames)
    for layer in embedding.convolutions:
        assert isinstance(layer, Convolution)
        weight = layer.weigh.weight.unflatten(1, (3, 6)).transpose(1, 2)  # [D, D, 3]
        rows = [
            F.conv1d(x[i, :n].relu().T[None], weight, layer.weigh.bias, padding=1)[0].T for i, n in ((0, 7), (1, 3))
        ]
        x = torch.stack([x[i] + F.pad(row, (0, 0, 0, 7 - len(row))) for i, row in enumerate(rows)])
    frames[1, 3:] = torch.nan
    found = embedding(frames, lengths)
    torch.testing.assert_close(found[0], x[0])
    torch.testing.assert_close(found[1, :3], x[1, :3])
    torch.testing.assert_close(embedding(frames[1:, :3]), x[1:, :3])  # as a row alone
