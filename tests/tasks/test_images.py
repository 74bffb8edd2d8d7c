import math

import numpy as np
import pytest
import torch

from subquad.data.images import Images as Pictures
from subquad.models import LanguageModel
from subquad.tasks import images
from subquad.tasks.images import SETS, SPARSE_CIFAR10, Images
from subquad.tasks.write_images import image_shape, write_images

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    torch.manual_seed(0)
    made = Pictures(torch.randint(256, (12, 784), dtype=torch.uint8), torch.zeros(12, dtype=torch.int64), (28, 28))
    monkeypatch.setattr(images, "load", lambda _: (made, made.part(slice(0, 3))))
    return made


def test_every_pixel_counts_the_first_one_too(pictures: Pictures) -> None:
    task = Images(validation=2)
    assert [len(task.source(split)) for split in ("train", "validation", "test")] == [10, 2, 3]
    batch = task.source("train").batch(np.arange(4), 0)
    model = task.make_model({**task.model, **SMALL}).eval()
    loss = task.loss(model, batch)
    assert int(loss.count) == 4 * 784
    changed = {**batch, "pixels": batch["pixels"].clone()}
    changed["pixels"][:, 0] = 255 - changed["pixels"][:, 0]
    assert not torch.equal(task.loss(model, changed).total, loss.total)


def test_a_pixel_is_predicted_from_those_before_it_alone() -> None:
    task = Images(set="digits")
    model = task.make_model({**task.model, **SMALL}).eval()
    batch = task.source("test").batch(np.arange(2), 0)
    whole = task.loss(model, batch)
    with torch.no_grad():
        shifted = torch.cat((torch.full((2, 1), 17), batch["pixels"][:, :-1].long()), 1)
        wanted = torch.nn.functional.cross_entropy(
            model(shifted).flatten(0, 1), batch["pixels"].long().flatten(), reduction="sum"
        )
    torch.testing.assert_close(whole.total.detach(), wanted)


@pytest.mark.parametrize("mixture", [10, None])
def test_untrained_models_guess_and_both_heads_are_scored(mixture: int | None, pictures: Pictures) -> None:
    task = Images()
    torch.manual_seed(0)
    model = task.make_model({**task.model, **SMALL, "mixture": mixture}).eval()
    sums = task.measure(model, task.source("test").batch(np.arange(3), 0))
    bits = task.summary({name: (float(a), float(b)) for name, (a, b) in sums.items()})["bits/dim"]
    assert 7 < bits < 14
    if mixture is None:
        assert bits == pytest.approx(math.log2(257), abs=0.5)


def test_models_follow_their_set_and_generate_images_of_its_shape() -> None:
    for name, known in SETS.items():
        model = Images(set=name).make_model({**Images.model, "dim": 16, "heads": 2})
        assert isinstance(model, LanguageModel)
        assert model.config.transformer.depth == known.depth
        assert model.config.transformer.norm_position == "post"
        assert model.config.embedding.vocab == known.values + 1
        assert model.config.mixture == (10 if known.values == 256 else None)
    digits = Images(set="digits").make_model({**Images.model, **SMALL, "positions": "grid"})
    assert image_shape(digits) == (8, 8, 1)
    assert write_images(digits, 2, (8, 8, 1)).max() < 17
    mnist = Images().make_model({**Images.model, **SMALL})
    assert image_shape(mnist) == (28, 28, 1)


def test_the_sparse_transformer_has_its_own_model() -> None:
    fields = {**Images.model, **SPARSE_CIFAR10, "dim": 16, "depth": 2, "ff_dim": 32}
    model = Images(set="cifar10").make_model(fields)
    assert isinstance(model, LanguageModel)
    assert model.config.embedding.shape == (32, 32, 3)
    assert model.config.mixture is None
    assert model.config.transformer.mixer_of(0).options == {"stride": 96}
    assert SPARSE_CIFAR10["depth"] == 128


def test_a_result_says_how_many_pictures_where_they_are_not_those_published(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Images().data_name == "mnist, only 12 + 3 pictures"
    monkeypatch.undo()
    assert Images(set="digits").data_name == "digits"


def test_a_wrong_set_raises() -> None:
    with pytest.raises(ValueError, match="mnist"):
        Images(set="mnits")
