from pathlib import Path

import torch

from subquad.data import digits
from subquad.tasks.digits import PIXELS, START, bits_per_dim, generate, make_model, picture, train, with_start


def test_the_data_is_the_published_one() -> None:
    training, test = digits.load()
    assert len(training.labels) == 1500
    assert len(test.labels) == 297
    assert training.images.shape == (1500, 64)
    images = torch.cat((training.images, test.images))
    assert images.min() == 0
    assert images.max() == digits.SHADES - 1
    counts = torch.cat((training.labels, test.labels)).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(digits.load()[0].images, training.images)


def test_generation_as_an_rnn_has_the_probabilities_of_the_parallel_form() -> None:
    model = make_model().eval()
    images = digits.load()[1].images[:3]
    parallel = model(with_start(images)[:, :-1])
    state = model.init_state(3)
    for t in range(PIXELS):
        token = images[:, t - 1] if t else torch.full((3,), START)
        logits, state = model.step(token, state)
        torch.testing.assert_close(logits, parallel[:, t], rtol=1e-4, atol=1e-4)
    made = generate(model, 2)
    assert made.shape == (2, PIXELS)
    assert made.max() < digits.SHADES


def test_training_learns_and_tells_each_step() -> None:
    torch.manual_seed(0)
    model, told = make_model(dim=16, depth=1), []
    images = digits.load()[0].images
    curve = train(model, images, 12, lambda step, bits: told.append((step, bits)), batch=8)
    assert told == list(enumerate(curve, start=1))
    assert bits_per_dim(model, images[:50]) < curve[0]


def test_the_picture_shows_real_and_generated(tmp_path: Path) -> None:
    images = digits.load()[1].images[:32]
    picture(images, images, tmp_path / "digits.png", "generated")
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
