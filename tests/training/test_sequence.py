"""Runs whose ranks share each sequence: the same curves as on one rank, alone or beside DDP and FSDP on a 2-D mesh."""

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from subquad import ranks
from subquad.models.loss import cross_entropy
from subquad.tasks.copy import Copy
from subquad.tasks.music import Music
from subquad.tasks.pairs import Pairs
from subquad.tasks.text import Text
from subquad.training import loop as loop_module
from subquad.training.distributed import join
from subquad.training.task import Batch, Loss
from tests.together import together
from tests.training.test_distributed import _dying
from tests.training.tiny import Tiny, assert_close_run, run, start

MODEL: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "mechanism": "linear, local", "options": {}, "dropout": 0.0}
DROPS = {**MODEL, "dropout": 0.2, "taps": [1, 2], "checkpoint": True, "mechanism": "gated_deltanet"}
GROUPS = {**MODEL, "depth": 3, "checkpoint": 2}
BASE: dict[str, Any] = {
    "steps": 6, "batch": 5, "log_every": 1, "evaluate_every": 3, "evaluate_batches": 2, "eps": 1e-3, "warmup": 0,
    "clip": 0.1, "lr": 1e-2,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "ddp_2": {"parallel": "ddp", "sequence": 2},
    "fsdp_2": {"parallel": "fsdp", "sequence": 2, "micro_batch": 2},
    "ddp_4": {"parallel": "ddp", "sequence": 2},  # two shares of the examples
    "fsdp_4": {"parallel": "fsdp", "sequence": 4},
    "fsdp_shares_4": {"parallel": "fsdp", "sequence": 2},
}


@dataclasses.dataclass(frozen=True)
class Ragged(Tiny):
    """Rows of unequal lengths, which end on different ranks."""

    name: ClassVar[str] = "ragged"

    def part(self, batch: Batch, rank: int, world: int) -> Batch:
        sizes = ranks.even_sizes(batch["tokens"].shape[1] - 1, world)
        first, size = sum(sizes[:rank]), sizes[rank]
        own = (batch["lengths"] - 1 - first).clamp(0, size) + 1
        return {"tokens": batch["tokens"][:, first : first + size + 1], "lengths": own}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens, lengths = batch["tokens"], batch["lengths"] - 1
        total = cross_entropy(model(tokens[:, :-1], lengths), tokens[:, 1:], lengths, reduction="sum")
        return Loss(total, lengths.sum())


def _text(folder: Path) -> Text:
    return Text(set=str(folder / "some.txt"), length=13)


def _work(folder: Path, jobs: list[tuple[str, str, dict[str, Any]]]) -> None:
    for name, kind, settings in jobs:
        settings, update = dict(settings), loop_module.Run._update
        dies = settings.pop("dies", False)
        if dies:
            loop_module.Run._update = _dying(update)  # type: ignore[method-assign]
        try:
            _run(folder, name, kind, settings)
        except EOFError:
            assert dies
        loop_module.Run._update = update  # type: ignore[method-assign]


def _run(folder: Path, name: str, kind: str, settings: dict[str, Any]) -> None:
    task = Ragged(ragged=True) if kind == "ragged" else _text(folder)
    run(folder / name, {"drops": DROPS, "groups": GROUPS}.get(kind, MODEL), task=task, **{**BASE, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "some.txt").write_text("The sea was grey and the ships lay still. " * 60)
    for name, kind, settings in (
        ("alone", "plain", {}),
        ("alone_drops", "drops", {"sequence": 1}),
        ("alone_ragged", "ragged", {}),
        ("alone_groups", "groups", {}),
    ):
        _run(folder, name, kind, settings)
    cut = {"parallel": "ddp", "checkpoint_every": 2}
    two = [(name, "plain", job) for name, job in JOBS.items() if name.endswith("2")]
    two += [("drops_2", "drops", JOBS["ddp_2"]), ("ragged_2", "ragged", JOBS["fsdp_2"])]
    two += [("groups_2", "groups", JOBS["fsdp_2"])]
    two += [("cut_1", "drops", {**cut, "sequence": 2, "dies": True})]
    together(2).run(_work, folder, two)
    shutil.copytree(folder / "cut_1", folder / "cut_4")
    four = [(name, "plain", job) for name, job in JOBS.items() if name.endswith("4")]
    four += [("ragged_4", "ragged", JOBS["fsdp_4"]), ("cut_4", "drops", {**cut, "sequence": 4, "resume": True})]
    together(4).run(_work, folder, four)
    return folder


@pytest.mark.parametrize("job", JOBS)
def test_ranks_that_share_sequences_make_the_same_curve(folder: Path, job: str) -> None:
    assert_close_run(folder / job, folder / "alone")


def test_shards_may_be_gathered_once_more_for_groups_of_blocks(folder: Path) -> None:
    assert_close_run(folder / "groups_2", folder / "alone_groups")


@pytest.mark.parametrize("job", ["ragged_2", "ragged_4"])
def test_rows_may_end_on_any_rank(folder: Path, job: str) -> None:
    assert_close_run(folder / job, folder / "alone_ragged")


def test_the_same_positions_drop_out(folder: Path) -> None:
    assert_close_run(folder / "drops_2", folder / "alone_drops")


def test_a_run_over_two_ranks_resumes_on_four_and_on_one(folder: Path) -> None:
    begun = (folder / "cut_1" / "metrics.jsonl").read_text()
    assert begun.count("\n") >= 4
    _run(folder, "cut_1", "drops", {"checkpoint_every": 2, "sequence": 1, "resume": True})
    for name in ("cut_1", "cut_4"):
        assert_close_run(folder / name, folder / "alone_drops")
        assert (folder / name / "metrics.jsonl").read_text().startswith(begun)  # with its times: nothing ran again


def test_what_cannot_be_split_is_named_before_a_folder_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"training\.sequence=1 cannot work with the task 'pairs': accepted is none"):
        run(tmp_path / "pairs", task=Pairs(), sequence=1)
    assert not (tmp_path / "pairs").exists()
    with pytest.raises(ValueError, match=r"training\.sequence=2 cannot work in 1 process:"):
        join("auto", "cpu", 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"training\.sequence=3 cannot work in 4 processes"):
        join("auto", "cpu", 3)
    with pytest.raises(ValueError, match="compile=True cannot work: accepted is false with sequence=2"):
        run(tmp_path / "compiled", sequence=2, compile=True)


def test_parts_of_every_task_are_the_whole() -> None:
    batch = Copy(length=9).source("train").batch(np.arange(3), 0)
    parts = [Copy(length=9).part(batch, rank, 4) for rank in range(4)]
    assert all(torch.equal(torch.cat([part[name] for part in parts], 1), batch[name]) for name in batch)
    windows = {"tokens": torch.arange(11)[None], "first": torch.tensor([4])}
    cut = [Music(set="audio", path=".").part(windows, rank, 3) for rank in range(3)]
    assert [part["tokens"][0].tolist() for part in cut] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9, 10]]
    assert [int(part["first"]) for part in cut] == [4, 1, 0]
    with pytest.raises(ValueError, match=r"training\.sequence=2 cannot work with the task 'music'"):
        Music().part({}, 0, 2)


def _die(out: Path) -> None:
    (out / "died").touch()
    os._exit(9)


def _survive(rank: int, out: Path) -> None:
    """Rank 1 dies in the middle of a backward; what becomes of the other is its exit code."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
    update = loop_module.Run._update

    def die_at_step_four(self: Any, feed: Any, seconds: float) -> None:
        if self.step == 4 and rank == 1:
            ranks.exchanges.Prefix.backward = staticmethod(lambda *_: _die(out))  # type: ignore[method-assign]
        update(self, feed, seconds)

    loop_module.Run._update = die_at_step_four  # type: ignore[method-assign]
    try:
        _run(out, "run", "drops", {"sequence": 2})
    except ranks.RankLost as error:
        os._exit(7 if "rank 0 of 2 lost another rank of its sequence" in str(error) else 1)


def test_a_rank_that_dies_ends_the_others(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "some.txt", tmp_path)
    members = [start(_survive, rank, tmp_path) for rank in range(2)]
    for process in members:
        process.join(120)
    assert [process.exitcode for process in members] == [7, 9]
    assert time.time() - (tmp_path / "died").stat().st_mtime < 30
