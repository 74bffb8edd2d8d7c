import dataclasses
import errno
import io
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from subquad import models
from subquad.data.order import Order
from subquad.disk import DIGEST, lock_folder, write_whole
from subquad.training import checkpoints
from subquad.training import loop as loop_module
from subquad.training.loop import Stopped
from subquad.training.task import Batch, Loss
from subquad.training.train import train
from tests.training.tiny import Tiny, Tokens, assert_close_run, assert_same_run, curve, run, weights

STILL = {"dropout": 0.0}  # to compare two ways of computing an update, without random numbers
EPS = 1e-3  # large, so that gradients that are only rounding errors cause small updates


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(out)
    return out


def test_a_run_learns_and_leaves_everything(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    losses = [line["loss"] for line in curve(whole) if line["split"] == "train"]
    assert losses[-1] < losses[0] - 0.2
    assert [line["step"] for line in curve(whole) if line["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in curve(whole) if line["split"] == "validation"] == [4, 8, 12]
    assert result["ended_by"] == "steps"
    assert result["steps"] == 12
    assert result["test"]["perplexity"] > 1
    config = json.loads((whole / "config.json").read_text())
    assert config["training"]["lr"] == 1e-2
    assert config["model"] == {"mechanism": "linear", "dropout": 0.1}
    assert {"subquad", "commit", "machine", "date"} <= config.keys()
    assert [path.name for path in checkpoints.names(whole / "checkpoints")] == ["step_000009", "step_000012"]
    assert not list(whole.rglob("*.part"))
    assert {path.name for path in whole.rglob(".*")} <= {".lock"}  # nothing half written


def test_the_saved_model_is_the_best_and_measures_as_reported(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    model = models.load(whole / "model")
    total, count = Tiny().loss(model, Tiny().source("test").batch(torch.arange(11).numpy(), 0))
    assert math.exp(total.item() / count.item()) == pytest.approx(result["test"]["perplexity"], rel=1e-5)
    best = min((line for line in curve(whole) if line["split"] == "validation"), key=lambda line: line["perplexity"])
    assert result["best_step"] == best["step"]
    assert result["validation"]["perplexity"] == best["perplexity"]


@pytest.mark.parametrize("clip_by", ["norm", "tensor"])
def test_an_update_is_the_usual_one_in_torch(tmp_path: Path, clip_by: str) -> None:
    """Compare with the usual loop: the mean loss, clipped gradients, AdamW, a learning rate for each step."""
    task = Tiny(ragged=True)
    run(tmp_path / "ours", STILL, task=task, steps=5, clip=0.05, clip_by=clip_by, warmup=2, schedule="linear", eps=EPS)
    torch.manual_seed(0)
    model = task.make_model({**task.model, **STILL})
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embedding" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embedding" in n]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, eps=EPS)
    source, order = task.source("train"), Order(50, 8, 0)
    for step, share in enumerate((0.5, 1.0, 1.0, 2 / 3, 1 / 3)):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * share
        total, count = task.loss(model, source.batch(*order.indices(step)))
        optimiser.zero_grad()
        (total / count).backward()
        for some in [list(model.parameters())] if clip_by == "norm" else [[p] for p in model.parameters()]:
            nn.utils.clip_grad_norm_(some, 0.05)
        optimiser.step()
    last = _last_weights(tmp_path / "ours", 5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(last[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_accumulation_makes_the_same_update_as_one_batch(tmp_path: Path, ragged: bool) -> None:
    task = Tiny(ragged=ragged)
    for micro in (None, 4, 3, 1):
        run(tmp_path / str(micro), STILL, task=task, micro_batch=micro, steps=3, evaluate_every=3, eps=EPS)
    for micro in (4, 3, 1):
        assert_close_run(tmp_path / str(micro), tmp_path / "None")


def test_rates_are_of_updates_after_the_first_ones_of_a_process(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 25, "log_every": 5, "evaluate_every": 10, "checkpoint_every": 10}
    run(tmp_path / "whole", **settings)
    _die_at(tmp_path / "cut", 17, **settings)
    run(tmp_path / "cut", resume=True, **settings)
    for name, cold in (("whole", [5, 10]), ("cut", [5, 10, 15, 20])):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for key in ("examples_per_second", "tokens_per_second"):
            rates = {line["step"]: line[key] for line in lines if line["split"] == "train"}
            assert [step for step, rate in rates.items() if rate is None] == cold
            assert all(rate > 0 for step, rate in rates.items() if step not in cold)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "kept", STILL, steps=3, eps=EPS)
    run(tmp_path / "again", {**STILL, "checkpoint": True}, steps=3, eps=EPS)
    assert_close_run(tmp_path / "again", tmp_path / "kept")


@pytest.mark.parametrize(("optimiser", "ema"), [("radam", None), ("adamw", 0.9), ("adam", None), ("muon", 0.9)])
def test_every_optimiser_learns_and_resumes_exactly(tmp_path: Path, optimiser: str, ema: float | None) -> None:
    settings = {"optimiser": optimiser, "ema": ema, "warmup": 2, "steps": 8}
    run(tmp_path / "whole", **settings)
    _die_at(tmp_path / "cut", 5, **settings)
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    losses = [line["loss"] for line in curve(tmp_path / "whole") if line["split"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mechanism", ["routing", "reformer", "transformer_xl"])
def test_mechanisms_with_buffers_of_their_own_resume_exactly(tmp_path: Path, mechanism: str) -> None:
    fields = {"mechanism": mechanism, "max_length": 16, "depth": 1}
    fields |= {"options": {"clusters": 2, "window": 4}} if mechanism == "routing" else {}
    run(tmp_path / "whole", fields, steps=6)
    _die_at(tmp_path / "cut", 4, model=fields, steps=6)
    run(tmp_path / "cut", fields, resume=True, steps=6)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_plateau_is_saved_and_resumed(tmp_path: Path) -> None:
    settings = {"schedule": "plateau", "patience": 1, "lr": 3.0, "clip": None, "evaluate_every": 2}
    run(tmp_path / "whole", **settings)
    rates = [line["lr"] for line in curve(tmp_path / "whole") if line["split"] == "train"]
    assert rates[-1] < rates[0]
    _die_at(tmp_path / "cut", 8, **settings)
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_averaged_weights_are_what_is_measured_and_saved(tmp_path: Path) -> None:
    run(tmp_path, ema=0.9, steps=6, evaluate_every=6)
    saved, raw = weights(tmp_path), _last_weights(tmp_path, 6)
    assert any(not torch.equal(saved[name], raw[name]) for name in saved)
    averaged = checkpoints.read_tensors(tmp_path / "checkpoints" / "step_000006" / checkpoints.TENSORS)
    for name, tensor in saved.items():
        assert torch.equal(tensor, averaged.get(f"ema/{name}", tensor))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_with_weights_in_single(tmp_path: Path, precision: str) -> None:
    run(tmp_path, precision=precision)
    losses = [line["loss"] for line in curve(tmp_path) if line["split"] == "train"]
    assert losses[-1] < losses[0] - 0.1
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path).values())


def test_minutes_end_a_run_that_still_anneals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _clocked(monkeypatch, update=1.0, evaluation=0.0)
    settings: dict[str, Any] = {"steps": 10**6, "minutes": 1.0, "log_every": 1, "checkpoint_every": None}
    result = run(tmp_path, **settings, evaluate_every=None)
    assert result.ended_by == "minutes"
    assert 60 <= result.seconds < 66
    rates = [line["lr"] for line in curve(tmp_path) if line["split"] == "train"]
    assert rates[0] == pytest.approx(1e-2, rel=0.02)
    assert rates[-1] < 2e-4
    assert rates == sorted(rates, reverse=True)
    assert 8 <= len([line for line in curve(tmp_path) if line["split"] == "validation"]) <= 10  # by tenths of the time
    assert checkpoints.newest(tmp_path / "checkpoints")[0] is not None


def test_legs_add_up_to_the_run(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("subquad.training.loop.time.perf_counter", lambda: float(next(clock)))
    legs = 0
    while True:
        result = run(tmp_path, resume=legs > 0, leg=0.2)
        if result.ended_by != "leg":
            break
        legs += 1
    assert legs > 1
    assert_same_run(tmp_path, whole)


def test_a_nan_loss_stops_and_keeps_the_last_good_state(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(
        Stopped, match=r"the loss is no longer a number between steps 7 and 8.*step_000006.*training\.lr"
    ):
        run(tmp_path, task=Poisoned(), log_every=2)
    found, damaged = checkpoints.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 6
    assert not damaged
    tensors = checkpoints.read_tensors(found.path / checkpoints.TENSORS)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, whole)


def test_a_full_disk_stops_and_keeps_the_last_good_state(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_whole

    def full(path: Path, data: bytes) -> None:
        if "step_000009" in str(path):
            path.write_bytes(data[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_whole", full)
        with pytest.raises(Stopped, match=r"the disk is full.*step_000006.*--resume"):
            run(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("damage", ["truncated", "changed", "lost", "no state", "half a state"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, whole: Path, damage: str) -> None:
    _die_at(tmp_path, 8)
    newest = checkpoints.names(tmp_path / "checkpoints")[-1]
    assert newest.name == "step_000006"
    tensors, state = newest / checkpoints.TENSORS, newest / checkpoints.STATE
    data = tensors.read_bytes()
    match damage:
        case "truncated":
            tensors.write_bytes(data[: len(data) // 2])
        case "changed":
            tensors.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        case "lost":
            tensors.unlink()
        case "no state":
            state.unlink()
        case "half a state":
            state.write_text(state.read_text()[:50])
    found, named = checkpoints.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 3
    assert list(named) == [newest]
    assert "step_000006 is damaged" in named[newest]
    _die_at(tmp_path, 5, resume=True, checkpoint_every=2, keep=1)
    assert [path.name for path in checkpoints.names(tmp_path / "checkpoints")] == ["step_000004"]
    assert (tmp_path / "checkpoints" / "step_000006.damaged").is_dir()
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, whole)


def test_a_damaged_older_checkpoint_does_not_matter(tmp_path: Path, whole: Path) -> None:
    _die_at(tmp_path, 8)
    (tmp_path / "checkpoints" / "step_000003" / checkpoints.STATE).unlink()
    run(tmp_path, resume=True, checkpoint_every=7, keep=5)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("damage", ["lost", "truncated"])
def test_without_the_best_weights_the_last_ones_are_tested(tmp_path: Path, damage: str) -> None:
    done = run(tmp_path)
    (tmp_path / "result.json").unlink()
    file = tmp_path / "best" / checkpoints.name_of(done.best_step) / "model.safetensors"
    file.unlink() if damage == "lost" else file.write_bytes(file.read_bytes()[:100])
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    again = train(Tiny(), out=tmp_path, resume=True, device="cpu", console=console)
    assert again.steps == again.best_step == done.steps
    assert f"{file} cannot be read" in console.export_text()


def test_a_run_continues_after_its_output_is_closed(tmp_path: Path, whole: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    train(Tiny(), out=tmp_path, device="cpu", console=Console(file=Gone()))
    assert_same_run(tmp_path, whole)


def test_the_peak_of_memory_is_that_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [100]
    measure = Tiny.measure

    def hungry(self: Tiny, model: nn.Module, batch: Batch) -> Any:
        used[0] = 900
        return measure(self, model, batch)

    monkeypatch.setattr(Tiny, "measure", hungry)
    monkeypatch.setattr(loop_module, "memory", lambda _: used[0])
    assert run(tmp_path).peak_bytes == 100


def test_the_best_weights_are_tested_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation gets worse after its first evaluation."""
    found = iter((1.0, 2.0, 3.0, 4.0))
    monkeypatch.setattr(Tiny, "summary", lambda _, __: {"perplexity": next(found)})
    result = run(tmp_path)
    assert (result.best_step, result.validation, result.steps) == (4, {"perplexity": 1.0}, 12)
    best = load_file(tmp_path / "best" / "step_000004" / "model.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in weights(tmp_path).items())


def _clocked(monkeypatch: pytest.MonkeyPatch, update: float, evaluation: float) -> None:
    """Replace the clock by one in which an update and an evaluation take these seconds."""
    now = [0.0]
    updating, measuring = loop_module.Run._update, loop_module.Run.measure

    def _update(self: Any, feed: Any, seconds: float) -> None:
        now[0] += update
        updating(self, feed, seconds)

    def _measure(self: Any, *given: Any) -> Any:
        now[0] += evaluation
        return measuring(self, *given)

    monkeypatch.setattr(loop_module.Run, "_update", _update)
    monkeypatch.setattr(loop_module.Run, "measure", _measure)
    monkeypatch.setattr("subquad.training.loop.time.perf_counter", lambda: now[0])


def test_with_minutes_evaluations_take_at_most_half_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _clocked(monkeypatch, update=1.0, evaluation=20.0)
    run(tmp_path, steps=1000, minutes=1.0, evaluate_every=None)
    steps = [line["step"] for line in curve(tmp_path) if line["split"] == "validation"]
    assert steps == [6, 28, 29]  # at a tenth; at the first tenth after 20 s more of training; at the end


def test_a_leg_takes_some_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leg=0: accepted is a positive number of minutes"):
        run(tmp_path, leg=0)


def test_validation_is_of_the_same_examples_in_micro_batches(tmp_path: Path) -> None:
    for name, micro in (("whole", None), ("micro", 3)):
        run(tmp_path / name, STILL, steps=4, micro_batch=micro, evaluate_batches=1, eps=EPS)
    assert_close_run(tmp_path / "micro", tmp_path / "whole")


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    _die_at(tmp_path, 4)
    (tmp_path / "checkpoints" / "step_000003" / checkpoints.TENSORS).write_bytes(b"")
    with pytest.raises(ValueError, match=r"step_000003 is damaged.*no checkpoint is left to resume from"):
        run(tmp_path, resume=True)


def test_a_folder_that_holds_a_run_is_not_overwritten(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"holds a run: --resume continues it"):
        run(whole)
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_other_settings_are_named_when_resuming(whole: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model.depth is new \(3\); training.steps is 13, was 12; training.lr is 1, was"
    ):
        run(whole, {"depth": 3}, resume=True, lr=1, steps=13)
    again = run(
        whole, resume=True, keep=5, log_every=7, micro_batch=2, compile=False
    )  # these do not affect the results
    assert again.steps == 12


def test_a_finished_run_returns_its_result_again(whole: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock")
    result = run(whole, resume=True)
    written = json.loads((whole / "result.json").read_text())
    assert {**dataclasses.asdict(result), DIGEST: written[DIGEST]} == written
    assert sorted(path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock") == before


def test_resuming_without_a_run_starts_one(tmp_path: Path, whole: Path) -> None:
    run(tmp_path / "new", resume=True)
    assert_same_run(tmp_path / "new", whole)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    _die_at(tmp_path, 4)
    with lock_folder(tmp_path, "here"), pytest.raises(ValueError, match="another process is training there"):
        run(tmp_path, resume=True)


def test_a_first_step_that_fails_leaves_the_folder_free(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(ValueError, match="accepted are ids from 0 to 1"):
        run(tmp_path, {"vocab": 2})
    run(tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'depth'"):
        run(tmp_path / "run", {"dept": 3})
    assert not (tmp_path / "run").exists()


def test_the_best_weights_of_every_kept_checkpoint_are_there(tmp_path: Path) -> None:
    run(tmp_path, steps=20, evaluate_every=2, keep=3)
    named = set()
    for path in checkpoints.names(tmp_path / "checkpoints"):
        named.add(checkpoints.name_of(checkpoints.read(path).facts["best"]["step"]))
    assert named <= {path.name for path in (tmp_path / "best").iterdir()}


def test_modules_that_are_not_ours_train_too(tmp_path: Path) -> None:
    result = run(tmp_path, {}, task=Recurrent())
    assert result.test["perplexity"] < 7
    assert "output.weight" in weights(tmp_path)


class Poisoned(Tiny):
    """Tiny, but its loss is NaN in the seventh update."""

    def source(self, split: Any) -> Any:
        return PoisonedTokens(7) if split == "train" else super().source(split)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * batch["poison"] if "poison" in batch else total, count)


class PoisonedTokens(Tokens):
    def __init__(self, at: int):
        super().__init__(50, 0, False)
        self.victim = Order(50, 8, 0).indices(at - 1)[0]

    def batch(self, indices: Any, epoch: int) -> Batch:
        poison = math.nan if list(indices) == list(self.victim) else 1.0
        return {**super().batch(indices, epoch), "poison": torch.tensor(poison)}


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layers = nn.GRU(8, 8, batch_first=True)
        self.output = nn.Linear(8, 7)

    def loss(self, tokens: torch.Tensor, lengths: Any, reduction: str) -> torch.Tensor:
        y = self.output(self.layers(self.embedding(tokens[:, :-1]))[0])
        return nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


class Recurrent(Tiny):
    model: ClassVar[Mapping[str, Any]] = {}

    def make_model(self, fields: Any) -> nn.Module:
        return Gru(**fields)


class _Death(Exception):
    """Simulates a killed process; tests with real ones are in test_kill.py."""


def _die_at(out: Path, step: int, model: Any = None, **training: Any) -> None:
    """A run that ends without a message before update number `step`."""

    class Mortal(loop_module.Run):
        def _update(self, feed: Any, seconds: float) -> None:
            if self.step == step:
                raise _Death
            super()._update(feed, seconds)

    from subquad.training import train as train_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "Run", Mortal)
        with pytest.raises(_Death):
            run(out, model, **training)


def _last_weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    found = checkpoints.read_tensors(out / "checkpoints" / checkpoints.name_of(step) / checkpoints.TENSORS)
    return {name.removeprefix("model/"): tensor for name, tensor in found.items() if name.startswith("model/")}


def test_capture_is_for_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.capture=true cannot work on cpu"):
        run(tmp_path / "run", steps=2, capture=True)
    assert not (tmp_path / "run").exists()


def test_a_result_that_cannot_be_read_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json is not the result of a run"):
        run(tmp_path / "run", resume=True)
    (tmp_path / "run" / "result.json").unlink()
    run(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)
