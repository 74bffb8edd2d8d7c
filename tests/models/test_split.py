"""Models over ranks that share the sequence: losses, gradients and states equal those of one rank."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from subquad import Classifier, LanguageModel, Matcher, ranks
from subquad.models import LSTM
from tests.together import together

SIZES = {2: ((11, 6), (16, 1)), 4: ((5, 2, 9, 1), (4, 4, 4, 5))}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
VOCAB, TOTAL = 11, 17
BASE: dict[str, Any] = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 4, "mechanism": "linear"}
STACK = ("linear", ("local", {"window": 3}), "gated_deltanet", ("strided", {"stride": 4}), "softmax", "mamba2")
DROPS = {"dropout": 0.3, "ff_dropout": 0.2, "embedding_dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"positions": "rotary", "tie": True, "activation": "swiglu"},
    "learned": {"positions": "learned", "max_length": TOTAL},
    "stack": {"mechanism": STACK, "depth": 6},
    "stack_checkpoint": {"mechanism": STACK, "depth": 6, "checkpoint": True},
    "stack_groups": {**DROPS, "mechanism": STACK, "depth": 6, "checkpoint": 3},
    "taps": {"taps": (1, 2, 7)},
    "dropout": {**DROPS, "mechanism": ("linear", "local")},
    "dropout_checkpoint": {**DROPS, "checkpoint": True},
    "dropout_chunks": {**DROPS, "ff_chunks": 3},
    "reversible": {**DROPS, "reversible": True, "taps": (2,)},
    "mixture": {"vocab": 256, "mixture": 3},
}


@functools.cache
def alone() -> Any:
    """A group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def assert_close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    tolerance = TOLERANCE[found.dtype]
    most = tolerance * float(wanted.detach().abs().max().clamp(min=1))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=most, msg=lambda m: f"{name}: {m}")


def assert_same_gradients(many: torch.nn.Module, one: torch.nn.Module, group: ranks.Group) -> None:
    group.sum_gradients(many)
    for (key, p), (_, other) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        assert_close(p.grad, torch.zeros_like(other) if other.grad is None else other.grad, key)


def check_language_model(name: str, sizes: tuple[int, ...], how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = LanguageModel(**{**BASE, **MODELS[name]}).to(dtype)
    many = copy.deepcopy(one)
    tokens = torch.randint(VOCAB, (3, TOTAL))
    lengths = torch.tensor([TOTAL, 6, 1]) if how == "padded" else None
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if how == "targets":
        targets = torch.randint(VOCAB, (3, TOTAL)).masked_fill(torch.rand(3, TOTAL) < 0.5, -7)
        given = {"targets": targets, "ignore_index": -7, "reduction": "sum"}
        own = {**given, "targets": ranks.shard(targets, dist.group.WORLD, sizes=sizes)[0]}
    part, own_lengths, _ = ranks.shard(tokens, dist.group.WORLD, sizes=sizes, lengths=lengths)
    torch.manual_seed(5)
    if "dropout" in MODELS[name]:  # a group of one has the same numbers
        with ranks.sequence_parallel(alone()):
            expected = one.loss(tokens, lengths, **given)
    else:
        expected = one.loss(tokens, lengths, **given)
    expected.backward()
    torch.manual_seed(5)
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        found = many.loss(part, own_lengths, **own)
    found.backward()  # checkpoints run exchanges again, after the context
    if how == "targets":  # a sum is that of a rank's own part
        dist.all_reduce(found.detach())
    assert_close(found, expected)
    assert_same_gradients(many, one, group)


def check_classifier(pooling: str, sizes: tuple[int, ...], padded: bool) -> None:
    torch.manual_seed(0)
    fields = {**BASE, "mechanism": (("linear"), ("nystrom", {"landmarks": 4, "conv": 3})), "vocab": None}
    one = Classifier(classes=3, features=5, convolutions=2, pooling=pooling, **fields).double()
    many = copy.deepcopy(one)
    x, lengths = torch.randn(2, TOTAL, 5).double(), torch.tensor([TOTAL, 7]) if padded else None
    labels = torch.randint(3, (2, TOTAL) if pooling == "none" else (2,))
    part, own_lengths, _ = ranks.shard(x, dist.group.WORLD, sizes=sizes, lengths=lengths)
    own_labels = ranks.shard(labels, dist.group.WORLD, sizes=sizes)[0] if pooling == "none" else labels
    expected = one.loss(x, labels, lengths)
    expected.backward()
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        found = many.loss(part, own_labels, own_lengths)
        found.backward()
    assert_close(found, expected)
    assert_same_gradients(many, one, group)


def check_prompt(sizes: tuple[int, ...], padded: bool) -> None:
    """A prompt over ranks; each of them can then write on from the state."""
    torch.manual_seed(0)
    mechanism = ("linear", ("local", {"window": 3}), "gated_deltanet", "softmax")
    model = LanguageModel(**{**BASE, "depth": 4, "mechanism": mechanism, "taps": (1, 6)}).double().eval()
    tokens = torch.randint(VOCAB, (2, TOTAL))
    lengths = torch.tensor([TOTAL, 7]) if padded else None
    part, own_lengths, _ = ranks.shard(tokens, dist.group.WORLD, sizes=sizes, lengths=lengths)
    _, after = model.prefill(tokens, lengths)
    with ranks.sequence_parallel(dist.group.WORLD):
        _, state = model.prefill(part, own_lengths)
    last = torch.randint(VOCAB, (2, 1))
    written, wanted = (model.generate(last, 12, state=s, seed=3, logprobs=True, full=True) for s in (state, after))
    assert torch.equal(written.tokens, wanted.tokens)
    torch.testing.assert_close(written.logprobs, wanted.logprobs)


def check_errors() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (1, 4))

    def refused(model: Any, message: str, call: Any = None) -> None:
        with ranks.sequence_parallel(dist.group.WORLD), pytest.raises(ValueError, match=message):
            (call or model.loss)(tokens)

    model = LanguageModel(**BASE)
    sinkhorn = LanguageModel(**{**BASE, "mechanism": "sinkhorn"})
    refused(sinkhorn, "mechanism 'sinkhorn' cannot split .* accepted are softmax, linear")
    refused(model, "generation cannot work inside sequence_parallel", lambda t: model.generate(t, 2))
    refused(model, "step cannot work inside", lambda t: model.step(t[:, 0], model.init_state(1)))
    refused(LSTM(vocab=VOCAB, dim=8, depth=1), "an LSTM cannot work")
    encoder = {**BASE, "mechanism": "linear", "classes": 2}
    label = torch.tensor([0])
    cls, pooled = Classifier(**encoder, pooling="cls"), Classifier(**encoder, pool=2)
    refused(cls, r'pooling="cls" cannot work', lambda t: cls.loss(t, label))
    refused(pooled, r"pool=\(2,\) cannot work", lambda t: pooled.loss(t, label))
    matcher = Matcher(**BASE)
    refused(matcher, "a Matcher cannot work", lambda t: matcher.loss(t, t, label))
    dropped = LanguageModel(**{**BASE, "mechanism": "softmax", "attention_dropout": 0.1})
    refused(dropped, "dropout=0.1 of Softmax cannot work")
    short = LanguageModel(**{**BASE, "positions": "learned", "max_length": 5})
    refused(short, "reaches T=", lambda t: short(t))
    softmax = LanguageModel(**{**BASE, "mechanism": "additive"})
    refused(softmax, "mechanism 'additive' cannot split")


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_the_parts_is_that_of_the_whole(name: str, world: int) -> None:
    few, many = SIZES[world]
    together(world).run(check_language_model, name, few, "plain", torch.float64)
    together(world).run(check_language_model, name, many, "padded", torch.float64)
    if name == "plain":
        together(world).run(check_language_model, name, many, "targets", torch.float64)
    if name in ("plain", "stack", "dropout"):
        together(world).run(check_language_model, name, few, "padded", torch.float32)


@pytest.mark.parametrize("world", SIZES)
def test_a_classifier_reads_all_parts(world: int) -> None:
    for sizes in SIZES[world]:
        for pooling in ("mean", "none"):
            for padded in (False, True):
                together(world).run(check_classifier, pooling, sizes, padded)


@pytest.mark.parametrize("world", SIZES)
def test_a_prompt_over_ranks_is_continued_on_one(world: int) -> None:
    for sizes, padded in zip(SIZES[world], (False, True), strict=True):
        together(world).run(check_prompt, sizes, padded)


@pytest.mark.parametrize("world", SIZES)
def test_what_cannot_be_split_is_named(world: int) -> None:
    together(world).run(check_errors)
