"""2 and 4 processes on the CPU give the same losses as one, for every way of distributing the work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subquad.tasks.pairs import Pairs
from subquad.training import checkpoints
from subquad.training import loop as loop_module
from subquad.training.distributed import Ranks, blocks_of, join, place_of
from subquad.training.feed import pieces_of
from tests.training.tiny import Tiny, assert_close_run, run, start

STILL = {"dropout": 0.0, "depth": 2}
BASE: dict[str, Any] = {"steps": 6, "batch": 9, "log_every": 1, "evaluate_every": 3, "ema": 0.9, "eps": 1e-3}
# batches that neither 2 nor 4 divides, rows of unequal lengths, one or two micro-batches on each rank
JOBS: dict[str, dict[str, Any]] = {
    "ddp_2": {"parallel": "ddp"},
    "ddp_4": {"parallel": "ddp", "micro_batch": 2},
    "fsdp_2": {"parallel": "fsdp", "micro_batch": 2},
    "fsdp_4": {"parallel": "fsdp"},
}
TENSOR = {"clip_by": "tensor", "clip": 0.01, "optimiser": "radam"}


def _work(rank: int, world: int, folder: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet_{world}", rank=rank, world_size=world)
    for name, settings in jobs:
        settings = dict(settings)
        dies = settings.pop("dies", False)
        if dies:
            loop_module.Run._update = _dying(loop_module.Run._update)  # type: ignore[method-assign]
        try:
            run(folder / name, STILL, task=Tiny(ragged=True), **{**BASE, **settings})
        except EOFError:
            assert dies
    dist.destroy_process_group()


def _dying(update: Any) -> Any:
    def die(self: Any, feed: Any, seconds: float) -> None:
        if self.step == 4:
            raise EOFError
        update(self, feed, seconds)

    return die


def _together(world: int, folder: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    ranks = [start(_work, rank, world, folder, jobs) for rank in range(world)]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each job once: on one process, on two ranks (where a sharded run stops halfway), on four (where it resumes)."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "alone", STILL, task=Tiny(ragged=True), **BASE)
    run(folder / "alone_tensor", STILL, task=Tiny(ragged=True), **{**BASE, **TENSOR})
    cut: dict[str, Any] = {"parallel": "fsdp", "checkpoint_every": 2}
    two = [(name, job) for name, job in JOBS.items() if name.endswith("2")]
    two += [("tensor_2", {"parallel": "fsdp", **TENSOR}), ("cut_1", {**cut, "dies": True})]
    _together(2, folder, two)
    shutil.copytree(folder / "cut_1", folder / "cut_4")
    four = [(name, job) for name, job in JOBS.items() if name.endswith("4")]
    _together(4, folder, [*four, ("cut_4", {**cut, "resume": True})])
    return folder


def _decode(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    run(folder / "two", SMALL, task=Pairs(), **PAIRS, parallel="fsdp")
    dist.destroy_process_group()


SMALL = {"dim": 8, "depth": 1, "heads": 2, "dropout": 0.0}
PAIRS: dict[str, Any] = {
    "steps": 4,
    "batch": 5,
    "evaluate_every": 2,
    "evaluate_batch": 250,
    "log_every": 1,
    "eps": 1e-3,
    "warmup": 0,
}


def test_generated_tokens_are_measured_over_shards_too(
    tmp_path: Path,
) -> None:
    ranks = [start(_decode, rank, tmp_path) for rank in range(2)]
    run(tmp_path / "one", SMALL, task=Pairs(), **PAIRS)
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert_close_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("job", JOBS)
def test_ranks_make_the_same_losses_as_one_process(folder: Path, job: str) -> None:
    assert_close_run(folder / job, folder / "alone")


def test_shards_are_clipped_like_whole_tensors(folder: Path) -> None:
    assert_close_run(folder / "tensor_2", folder / "alone_tensor")


def test_a_sharded_checkpoint_resumes_on_another_number_of_ranks(folder: Path) -> None:
    found = checkpoints.names(folder / "cut_1" / "checkpoints")[-1]
    assert found.name == "step_000004"
    assert len(list(found.glob("*.distcp"))) == 2
    assert not (found / checkpoints.TENSORS).exists()
    run(folder / "cut_1", STILL, task=Tiny(ragged=True), resume=True, **{**BASE, "checkpoint_every": 2})
    assert_close_run(folder / "cut_1", folder / "alone")
    assert_close_run(folder / "cut_4", folder / "alone")


def test_gradients_are_sent_once_per_update(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ranks, sent = Ranks(torch.device("cpu"), "ddp"), []
        module = ranks.wrap(torch.nn.Linear(3, 1))
        assert isinstance(module, torch.nn.parallel.DistributedDataParallel)

        def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
            sent.append(bucket.buffer().clone())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        module.register_comm_hook(None, hook)
        for number in (1, 2, 3):
            with ranks.accumulating(module, last=number == 3):
                module(torch.ones(2, 3)).sum().backward()
        assert len(sent) == 1
        assert sent[0].sum().item() == pytest.approx(3 * (2 * 3 + 2))  # of all three together
    finally:
        dist.destroy_process_group()


def test_blocks_are_sharded_one_by_one_if_possible() -> None:
    make = Tiny().make_model
    assert len(blocks_of(make({"depth": 3}))) == 3
    assert blocks_of(make({"depth": 2, "reversible": True})) == []
    assert blocks_of(torch.nn.Linear(2, 2)) == []


def test_one_process_needs_no_group() -> None:
    assert join("fsdp", "cpu") == Ranks(torch.device("cpu"))


def test_a_gpu_is_one_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [str(place_of(name)) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


def test_impossible_numbers_of_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match='parallel="none" cannot work in 4 processes'):
        join("none", "cpu")
    with pytest.raises(ValueError, match="batch=3 cannot work on 4 ranks"):
        pieces_of(3, None, 4)
    with pytest.raises(ValueError, match="batch=5 on 4 ranks is not enough for 2 micro-batches of 1"):
        pieces_of(5, 1, 4)
    assert pieces_of(16, 2, 4) == 2
    assert pieces_of(10, None, 4) == 1


def test_torchrun_restarts_and_the_run_resumes_by_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two workers dies once at step 4; --resume is not passed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["-m", "tests.training.test_distributed", str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "died").exists()
    assert_close_run(tmp_path / "run", folder / "alone")
    for attempt in ("0", "1"):  # an existing run of another process is refused in every restart
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)  # as torchrun sets it
        with pytest.raises(ValueError, match="holds a run"):
            _run_as_worker(tmp_path / "run")


def _run_as_worker(out: Path) -> None:
    run(out, STILL, task=Tiny(ragged=True), **{**BASE, "checkpoint_every": 2})


def _mortal_worker(out: Path) -> None:
    """The worker that torchrun starts."""
    torch.set_num_threads(1)
    update = loop_module.Run._update

    def die_once(self: Any, feed: Any, seconds: float) -> None:
        if self.step == 4 and self.ranks.rank == 1 and not (out / "died").exists():
            (out / "died").touch()
            os._exit(9)
        update(self, feed, seconds)

    loop_module.Run._update = die_once  # type: ignore[method-assign]
    _run_as_worker(out)


if __name__ == "__main__":
    _mortal_worker(Path(sys.argv[1]))
