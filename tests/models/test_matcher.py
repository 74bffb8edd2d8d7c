import pytest
import torch

from subquad.models import Matcher


def test_two_towers_one_encoder() -> None:
    model = Matcher(vocab=11, dim=16, heads=4, depth=2, mechanism="linear", pooling="cls").double().eval()
    a, b = torch.randint(11, (2, 6)), torch.randint(11, (2, 9))
    a_lengths, b_lengths = torch.tensor([6, 3]), torch.tensor([9, 5])
    left, right = model.tower(a, a_lengths), model.tower(b, b_lengths)
    expected = model.head(torch.cat((left, right, left * right, left - right), -1))
    logits = model(a, b, a_lengths, b_lengths)
    assert logits.shape == (2, 2)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(logits[1:], model(a[1:, :3], b[1:, :5]))
    torch.testing.assert_close(
        model.loss(a, b, torch.tensor([0, 1]), a_lengths, b_lengths),
        torch.nn.functional.cross_entropy(expected, torch.tensor([0, 1])),
    )


def test_it_learns_whether_two_sequences_are_of_one_kind() -> None:
    torch.manual_seed(0)
    model = Matcher(vocab=4, dim=16, heads=4, depth=1, positions="none", mechanism="linear")
    kinds = torch.randint(2, (2, 64, 1))
    a, b = (torch.randint(2, (64, 6)) + 2 * kind for kind in kinds)
    labels = (kinds[0] == kinds[1]).long()[:, 0]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model.loss(a, b, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert (model(a, b).argmax(-1) == labels).all()


def test_bad_input() -> None:
    model = Matcher(vocab=11, dim=16, heads=4, depth=1)
    a = torch.randint(11, (2, 6))
    with pytest.raises(ValueError, match="b has batch 3: a has batch 2"):
        model(a, torch.randint(11, (3, 6)))
    with pytest.raises(ValueError, match="b ranges from 11 to 11"):
        model(a, torch.full((2, 6), 11))
    with pytest.raises(ValueError, match="pooling='none' cannot work"):
        Matcher(vocab=11, dim=16, pooling="none")
