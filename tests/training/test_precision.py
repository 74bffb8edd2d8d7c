import torch

from subquad import Classifier
from subquad.models.loss import cross_entropy
from subquad.training.precision import GROWTH_INTERVAL, HIGHEST, AtOnce, Precision

CPU = torch.device("cpu")


def test_auto_is_single_precision_on_a_cpu() -> None:
    precision = Precision("auto", CPU)
    assert precision.name == "fp32"
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_computes_in_the_type_that_is_named() -> None:
    with Precision("bf16", CPU).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_only_float16_is_scaled() -> None:
    assert Precision("bf16", CPU).scale == 1
    assert Precision("bf16", CPU).accept(torch.tensor(float("inf")))
    assert Precision("fp16", CPU).scale is None


def test_overflow_halves_the_scale_and_skips_the_update() -> None:
    precision = Precision("fp16", CPU)
    precision.begin(1000.0)
    assert precision.scale == HIGHEST / 1024  # a power of two: nothing is rounded
    assert not precision.accept(torch.tensor(float("inf")))
    assert not precision.accept(torch.tensor(float("nan")))
    assert precision.scale == HIGHEST / 4096
    for _ in range(GROWTH_INTERVAL):
        assert precision.accept(torch.tensor(1.0))
    assert precision.scale == HIGHEST / 2048
    again = Precision("fp16", CPU)
    again.load(precision.state())
    assert again.state() == precision.state()


def test_weights_that_are_cast_at_once_give_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = Classifier(vocab=9, classes=3, dim=8, depth=2, heads=2, mechanism=("softmax", "linear"), head_hidden=5)
    tokens, labels = torch.randint(9, (4, 7)), torch.arange(4) % 3
    results = []
    for run in (model, AtOnce(model, torch.bfloat16)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(run(tokens), labels)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(results[0]) > 20
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert torch.equal(got, want)
