from typing import Any

import pytest
import torch

from subquad.models import Classifier


def make(**fields: Any) -> Classifier:
    return Classifier(**{"classes": 3, "vocab": 11, "dim": 16, "heads": 4, "depth": 2, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling": "mean"},
        {"pooling": "cls"},
        {"pooling": "mean", "pool": (1, 2)},
        {"pooling": "cls", "pool": (1, 2), "mechanism": "nystrom"},
        {"pooling": "cls", "positions": "grid", "shape": (3, 3), "mechanism": "linformer", "max_length": 9},
        {"pooling": "mean", "head_hidden": 8, "mechanism": "linear", "causal": True},
        {"pooling": "none", "pool": (1, 2)},
    ],
    ids=str,
)
def test_padding_is_invisible(fields: dict[str, Any]) -> None:
    model = make(**fields).double().eval()
    tokens, lengths = torch.randint(11, (3, 9)), torch.tensor([9, 4, 0])
    logits = model(tokens, lengths)
    each = fields["pooling"] == "none"
    assert logits.shape == ((3, 5, 3) if each else (3, 3))
    assert logits.isfinite().all()
    garbage = tokens.clone()
    garbage[1, 4:] = garbage[2] = 99
    assert torch.equal(model(garbage, lengths), logits)
    alone = model(tokens[1:2, :4])
    torch.testing.assert_close(logits[1:2, :2] if each else logits[1:2], alone)


def test_mean_is_over_a_rows_own_positions() -> None:
    model = make().double().eval()
    tokens, lengths = torch.randint(11, (2, 6)), torch.tensor([6, 2])
    vectors = model.tower.transformer(model.tower.embedding(tokens), lengths)
    expected = torch.stack((vectors[0].mean(0), vectors[1, :2].mean(0)))
    torch.testing.assert_close(model(tokens, lengths), model.head(expected))


def test_cls_reads_every_position() -> None:
    model = make(pooling="cls").double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    assert model.tower.cls is not None
    whole = torch.cat((model.tower.cls.expand(1, 1, -1), x), 1)
    (grad,) = torch.autograd.grad(model.tower.transformer(whole)[0, 0, :5].sum(), x)
    assert (grad.abs().sum(-1) > 0).all()
    model.loss(torch.randint(11, (2, 6)), torch.tensor([0, 2])).backward()
    assert model.tower.cls.grad is not None
    assert model.tower.cls.grad.abs().sum() > 0


def test_frames_and_labels_at_every_position() -> None:
    model = make(vocab=None, features=5, pooling="none", mechanism="linear")
    frames, lengths = torch.randn(2, 7, 5), torch.tensor([7, 3])
    labels = torch.randint(3, (2, 7))
    labels[1, 3:] = 50  # beyond the row
    loss = model.loss(frames, labels, lengths)
    nats = -model(frames, lengths).log_softmax(-1)
    rows = [nats[b, t, labels[b, t]] for b, n in enumerate([7, 3]) for t in range(n)]
    torch.testing.assert_close(loss, torch.stack(rows).mean())


def test_it_learns_which_symbol_is_frequent() -> None:
    torch.manual_seed(0)
    model = make(vocab=3, positions="none", mechanism="linear")
    tokens, lengths = torch.randint(3, (64, 9)), torch.randint(5, 10, (64,))
    there = torch.arange(9) < lengths[:, None]
    labels = torch.stack([((tokens == k) & there).sum(1) for k in range(3)], 1).argmax(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = model.loss(tokens, labels, lengths)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert (model(tokens, lengths).argmax(-1) == labels).double().mean() > 0.9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": 0}, "classes=0 cannot work"),
        ({"pooling": "max"}, 'pooling=\'max\' cannot work: accepted is "mean" or "cls" or "none"'),
        ({"pooling": "cls", "causal": True}, "would only see itself"),
        ({"vocab": None, "features": 3, "convolutions": 1, "causal": True}, "they show the next frames"),
        ({"cross": "softmax"}, "it has no memory"),
        ({"head_hidden": 0}, "head_hidden=0 cannot work"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_bad_labels() -> None:
    model = make()
    tokens = torch.randint(11, (2, 6))
    with pytest.raises(ValueError, match="labels ranges from 0 to 3: accepted are ids from 0 to 2"):
        model.loss(tokens, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"labels has shape \[3\]: accepted is \[2\]"):
        model.loss(tokens, torch.tensor([0, 1, 2]))
