import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.files import Broken
from subquad.data.speech import Speech as Data
from subquad.data.speech import Utterances
from subquad.models import LSTM, Classifier
from subquad.tasks import speech
from subquad.tasks.speech import Frames, Speech, ctc, decode, edits

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}
words = st.lists(st.integers(1, 3), max_size=7)


def utterances() -> Utterances:
    sizes, said = np.array([12, 9, 15]), np.array([2, 3, 1])
    random = np.random.default_rng(0)
    return Utterances(
        names=("a", "b", "c"),
        frames=random.normal(size=(36, 4)).astype(np.float32),
        starts=np.concatenate(([0], sizes.cumsum())),
        targets=random.integers(1, 5, 6),
        target_starts=np.concatenate(([0], said.cumsum())),
        mean=np.zeros(4, np.float32),
        deviation=np.ones(4, np.float32),
    )


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Data:
    made = Data("made up", utterances(), utterances(), utterances(), ("", "A", "B", "C", "D"))
    monkeypatch.setattr(speech, "_load", lambda *_: made)
    return made


def slow(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(words, words)
def test_edits_are_the_fewest(a: list[int], b: list[int]) -> None:
    assert edits(a, b) == slow(a, b)


def test_decoding_drops_blanks_and_repetitions_but_keeps_doubles() -> None:
    frames = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 0], [3, 3, 0, 0, 2, 2, 2, 2]])
    logits = torch.nn.functional.one_hot(frames, 4).float()
    assert decode(logits, torch.tensor([8, 4])) == [[1, 1, 2], [3]]


def test_the_loss_is_that_of_all_alignments_and_padding_is_not_there() -> None:
    torch.manual_seed(0)
    batch = {"targets": torch.tensor([[1, 0]]), "target_lengths": torch.tensor([1]), "lengths": torch.tensor([2])}
    logits = torch.randn(1, 3, 3)
    p = logits.softmax(-1)[0]
    wanted = -(p[0, 1] * p[1, 1] + p[0, 0] * p[1, 1] + p[0, 1] * p[1, 0]).log()
    loss = ctc(logits, batch)
    torch.testing.assert_close(loss.total, wanted)
    assert int(loss.count) == 1
    changed = logits.clone()
    changed[:, 2] = 7.0
    torch.testing.assert_close(ctc(changed, batch).total, wanted)


def test_measures_are_percent_of_the_phones_said(data: Data) -> None:
    task = Speech()
    batch = task.source("test").batch(np.arange(3), 0)

    class Oracle(torch.nn.Module):
        def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*frames.shape[:2], 5)
            logits[..., 0] = 9.0
            for row, n in enumerate(batch["target_lengths"].tolist()):
                for i in range(n):
                    logits[row, 2 * i + 1, batch["targets"][row, i]] = 20.0
            return logits

    sums = {name: (float(a), float(b)) for name, (a, b) in task.measure(Oracle(), batch).items()}
    assert sums["per"] == (0.0, 6.0)
    assert task.summary({"nats": (1.0, 1.0), "per": (3.0, 6.0)})["per"] == 50.0


def test_every_row_of_the_table_is_made_and_hears(data: Data) -> None:
    task = Speech()
    batch = task.source("train").batch(np.arange(3), 0)
    for mechanism in ("softmax", "linear", ["reformer", {"rounds": 4, "chunk": 32, "buckets": 64}]):
        model = task.make_model({**task.model, **SMALL, "mechanism": mechanism})
        assert isinstance(model, Classifier)
        assert float(task.loss(model.eval(), batch).total) > 0
    lstm = task.make_model({**task.model, "mechanism": "lstm", "dim": 8, "depth": 1})
    assert isinstance(lstm, LSTM)
    assert lstm.config.bidirectional
    assert float(task.loss(lstm.eval(), batch).total) > 0


MECHANISMS = ("softmax", "linear", ["reformer", {"rounds": 4, "chunk": 32, "buckets": 64}], "lstm")


@pytest.mark.parametrize("near", [{}, {"convolutions": 2, "taps": [1, 2], "positions": "rotary"}], ids=["", "near"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda found: found if isinstance(found, str) else found[0])
def test_what_is_padded_changes_no_loss_no_gradient_and_no_error(
    data: Data, mechanism: Any, near: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    task = Speech(stack=2 if near else 1)
    if mechanism == "lstm":
        near = {name: value for name, value in near.items() if name == "convolutions"}
    still = {"dropout": 0.0, "ff_dropout": 0.0, "attention_dropout": 0.0} if mechanism != "lstm" else {"dropout": 0.0}
    fields = {"dim": 16, "depth": 2, **({} if mechanism == "lstm" else {"heads": 2}), "mechanism": mechanism}
    model = task.make_model({**task.model, **fields, **still, **near}).double()
    batch = task.source("train").batch(np.array([1, 0]), 0)
    batch["frames"] = batch["frames"].double()
    longest, said = (int(batch[name].max()) for name in ("lengths", "target_lengths"))
    tight = {**batch, "frames": batch["frames"][:, :longest], "targets": batch["targets"][:, :said]}
    wide = {**batch, "frames": F.pad(tight["frames"], (0, 0, 0, 23)), "targets": F.pad(tight["targets"], (0, 9))}
    found = []
    for made in (tight, batch, wide):
        with torch.enable_grad():
            loss = task.loss(model, made)
            gradients = torch.autograd.grad(loss.total, list(model.parameters()))
        measured = {name: tuple(map(float, pair)) for name, pair in task.measure(model.eval(), made).items()}
        found.append((loss, gradients, measured))
        model.train()
    (first, gradients, measured), *others = found
    for loss, other, sums in others:
        torch.testing.assert_close(loss.total, first.total)
        torch.testing.assert_close(other, gradients, rtol=1e-9, atol=1e-9)
        assert loss.count == first.count
        assert sums["per"] == measured["per"]


@pytest.mark.parametrize("options", [{}, {"augment": False}, {"stack": 3}], ids=str)
def test_batches_come_in_few_shapes(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    sizes = np.arange(69, 640, 7)
    many = dataclasses.replace(
        utterances(),
        names=tuple(map(str, sizes)),
        frames=np.ones((sizes.sum(), 4), np.float32),
        starts=np.concatenate(([0], sizes.cumsum())),
        targets=np.ones(sizes.sum() // 7, np.int64),
        target_starts=np.concatenate(([0], sizes.cumsum() // 7)),
    )
    monkeypatch.setattr(speech, "_load", lambda *_: Data("made up", many, many, many, ("", "A")))
    for split in ("train", "test"):
        source = Speech(**options).source(split)
        made = [source.batch(np.array([i, i // 2]), epoch) for i in range(0, len(source), 3) for epoch in (0, 1)]
        assert len({batch["frames"].shape[1] for batch in made}) <= 8
        assert len({batch["targets"].shape[1] for batch in made}) == 1
        for batch in made:
            assert int(batch["lengths"].max()) <= batch["frames"].shape[1]


def test_augmentation_repeats_itself_and_leaves_room_for_what_is_said() -> None:
    source = Frames(utterances(), augment=True)
    first, again, later = (source.batch(np.arange(3), epoch) for epoch in (1, 1, 2))
    assert torch.equal(first["frames"], again["frames"])
    assert first["frames"].shape != later["frames"].shape or not torch.equal(first["frames"], later["frames"])
    for epoch in range(5):
        made = source.batch(np.array([1, 0]), epoch)
        assert bool((made["lengths"] >= 2 * made["target_lengths"] + 1).all())
        assert not made["frames"][0, int(made["lengths"][0]) :].any()


def test_augmentation_masks_neighbouring_features_of_whole_utterances() -> None:
    source = Frames(utterances(), augment=True)
    masked = [[not row[:n].any(0)[i] for i in range(4)] for e in range(20) for row, n in _rows(source, e)]
    assert {sum(row) for row in masked} == {0, 1}  # a quarter of four features at most
    assert all(any(row[i] for row in masked) for i in range(4))


def _rows(source: Frames, epoch: int) -> list[tuple[torch.Tensor, int]]:
    made = source.batch(np.arange(3), epoch)
    return list(zip(made["frames"], made["lengths"].tolist(), strict=True))


def test_a_stack_that_leaves_too_few_frames_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(utterances(), targets=np.array([1, 1, 1, 2, 1, 4]))  # of 12, 9 and 15 frames
    assert few.fewest.tolist() == [3, 3, 1]  # a blank between 1 and 1
    made = Data("made up", few, few, few, ("", "A", "B", "C", "D"))
    monkeypatch.setattr(speech, "_load", lambda *_: made)
    for stack in (4, 5, 40):
        sizes, said = [-(-n // stack) for n in (12, 9, 15)], torch.tensor([[1, 1, 0], [1, 2, 1], [4, 0, 0]])
        losses = F.ctc_loss(torch.zeros(15, 3, 5).log_softmax(-1), said, sizes, (2, 3, 1), reduction="none")
        if losses.isfinite().all():
            Speech(stack=stack).source("train")
            assert stack == 4
            continue
        lost = 3 * int(losses.isinf().sum())
        with pytest.raises(ValueError, match=rf"stack=.* cannot work: accepted is 1 to 4 \({lost} of 9 utterances"):
            Speech(stack=stack).source("train")


def test_transcripts_of_other_sounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    long = dataclasses.replace(utterances(), targets=np.arange(60) % 4 + 1, target_starts=np.array([0, 20, 40, 60]))
    monkeypatch.setattr(speech, "_load", lambda *_: Data("made up", long, long, long, ("", "A", "B", "C", "D")))
    with pytest.raises(Broken, match="made up has fewer frames of 10 ms than symbols in 9 of 9 utterances"):
        Speech().source("train")
    one = dataclasses.replace(long, target_starts=np.array([0, 58, 59, 60]))  # one that is too short is accepted
    monkeypatch.setattr(speech, "_load", lambda *_: Data("made up", one, one, one, ("", "A", "B", "C", "D")))
    assert len(Speech().source("train")) == 3


def test_a_folder_needs_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path"):
        Speech(set="folder")
    with pytest.raises(ValueError, match="path"):
        Speech(path=str(tmp_path))
