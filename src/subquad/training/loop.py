"""A run: its state, its updates, and everything it does between updates.

Updates do not wait for a GPU: losses stay on the device and are read every `log_every` steps, before evaluations and
before checkpoints. Losses that are not finite are noticed then and never saved. All randomness is seeded by (seed,
step, rank of the data), and the step gives the position in the data, so a resumed run gives the same results as an
uninterrupted one.
"""

import dataclasses
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.data.order import Order
from subquad.disk import write_sealed
from subquad.models.saving import tensors_of
from subquad.training import checkpoints
from subquad.training.capture import Captured, captured_gradients
from subquad.training.checkpoints import Checkpoint
from subquad.training.config import RunConfig
from subquad.training.distributed import Ranks, blocks_of, whole
from subquad.training.ema import Ema
from subquad.training.evaluate import Wired, evaluate
from subquad.training.feed import Feed, Part, pieces_of
from subquad.training.folder import RESULT, Folder, plain
from subquad.training.log import Log, Meter, duration, memory
from subquad.training.models import copy_of, damage_of, digest_in, load_encoder, load_weights, make_model, save_model
from subquad.training.optimisers import Optimiser, scale_and_clip
from subquad.training.precision import AtOnce, Precision
from subquad.training.schedules import Schedule
from subquad.training.signals import Interrupted, Signals
from subquad.training.task import SPLITS, Batch, Loss, Source, Split, Task

TENTHS = 10  # evaluations and checkpoints per run, by default


class Stopped(RuntimeError):
    """Training cannot continue; the last good checkpoint is kept."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run, as in result.json."""

    task: str
    metric: str
    test: dict[str, float]  # of the weights that were best on validation
    validation: dict[str, float]  # of the same weights
    best_step: int
    steps: int
    ended_by: str  # "steps", "minutes", or "leg" if it is not finished and must be resumed
    seconds: float
    examples_per_second: float  # over the whole run, including the time between updates
    tokens_per_second: float
    peak_bytes: int
    parameters: int
    ranks: int
    weights_sha256: str | None = None  # of the weights in model/; None in old runs, which have no digests


class Run:
    """A run. Without a folder it only trains: no validation, no checkpoints, no saved model."""

    def __init__(self, task: Task, config: RunConfig, folder: Folder | None, ranks: Ranks):
        self.task, self.folder, self.ranks = task, folder, ranks
        self.training = training = config.training
        self.config = config
        device = ranks.device
        self.pieces = pieces_of(training.batch, training.micro_batch, ranks.data_world)
        self.sources = _sources(task, ranks)
        self.order = Order(len(self.sources["train"]), training.batch, training.seed, training.shuffle)
        torch.manual_seed(training.seed)
        self.model = make_model(task, config.model)
        if training.start is not None and not (folder is not None and checkpoints.names(folder.checkpoints)):
            load_encoder(self.model, Path(training.start))
        self.model.to(device)
        self.wired = Wired(task, self.model, ranks)
        ranks.shard(self.wired, blocks_of(self.model))
        if training.compile:
            self.wired.compile()
        self.wrapped: Any = ranks.wrap(self.wired)
        self.precision = Precision(training.precision, device)
        self.optimiser = Optimiser(training, self.model, self._may_capture())
        self.captured: Captured[Loss] | None = None  # the gradients of a micro-batch
        self.whole: Captured[bool] | None = None  # an update of one batch
        if training.capture and self.optimiser.capturable and self.pieces == 1:
            self.whole = Captured(lambda batch: self._take([batch]), self._changed)
            if self.precision.name == "bf16" and not training.compile:  # a compiler casts in the passes it makes anyway
                self.wrapped = AtOnce(self.wired, self.precision.dtype)
        elif training.capture:
            self.captured = captured_gradients(self._gradients, self.model)
        self.schedule = Schedule(training, task.higher_is_better)
        self.ema = None if training.ema is None else Ema(self.model, training.ema)
        self.step, self.earlier_seconds, self.lr = 0, 0.0, 0.0
        self.evaluated_step = self.saved_step = 0
        self.best: dict[str, Any] | None = None  # {"step": ..., "measures": {...}, "sha256": ...}
        # since the last log line: loss, targets, gradient norms, updates
        self.window = torch.zeros(4, dtype=torch.float64, device=device)
        self.totals = {"examples": 0.0, "tokens": 0.0}
        self.begun = time.perf_counter()
        self.peak, self.peak_is_of_training = 0, True  # bytes

    def go(self, log: Log, signals: Signals, leg: float | None = None) -> Result:
        training = self.training
        feed = Feed(self.sources["train"], self.order, self.pieces, self.ranks)
        self.begun = time.perf_counter()
        self.wired.train()
        parameters = sum(p.numel() for p in self.model.parameters())
        if self.step == 0:
            budget = f"{training.steps:,} steps of {training.batch}"
            budget += "" if training.minutes is None else f", at most {training.minutes:g} minutes"
            about = f"{parameters:,} parameters, {self.precision.name}, {self.ranks.device}"
            log.say(f"{self.task.name}: {about}; {budget}")
        else:
            log.say(f"{self.task.name}: resumed at step {self.step:,}")
        meter = Meter(self.step)
        tenth = int(TENTHS * self.schedule.progress(self.step, self.earlier_seconds))
        next_evaluation = 0.0  # train at least as long as the last evaluation took before the next one
        evaluation_began: float | None = None
        try:
            while True:
                seconds, stop = self.ranks.largest(self.seconds if self.ranks.first else 0.0, float(signals.number))
                if evaluation_began is not None:
                    next_evaluation, evaluation_began = 2 * seconds - evaluation_began, None
                progress = self.schedule.progress(self.step, seconds)
                done = progress >= 1
                now = int(TENTHS * progress)
                new_tenth, tenth = now > tenth, max(now, tenth)
                if self.step % training.log_every == 0 or done:
                    self._report(log, meter, progress, seconds)
                if self.step == meter.warm:
                    self._read_window()
                    meter.restart(self.step)
                if self.folder is not None:
                    if done or self._due(training.evaluate_every, new_tenth and seconds >= next_evaluation):
                        evaluation_began = seconds
                        with self._pause(meter):
                            self._evaluate(log, signals)
                        stop = self.ranks.largest(float(signals.number))[0]  # a signal may have come while evaluating
                    if done or self._due(training.checkpoint_every or training.evaluate_every, new_tenth):
                        with self._pause(meter):
                            self._save(log)
                    if stop or (signals.number and self.ranks.world == 1):
                        self._save(log)
                        number = int(stop) or signals.number
                        raise Interrupted(f"interrupted at step {self.step:,}, saved: --resume continues", 128 + number)
                if done:
                    break
                if leg is not None and seconds - self.earlier_seconds >= 60 * leg:
                    self._save(log)
                    log.say(f"step {self.step:,}, saved: the leg of {leg:g} minutes is over, --resume continues")
                    return self._result("leg", {}, seconds, parameters)
                self._update(feed, seconds)
                log.tick(self.step, progress)
        finally:
            feed.close()
        if self.folder is None:
            return self._result("steps", {}, seconds, parameters)
        return self._finish(self.folder, log, signals, seconds, parameters)

    @property
    def seconds(self) -> float:
        """Seconds of training, over all legs."""
        return self.earlier_seconds + time.perf_counter() - self.begun

    def _pause(self, meter: Meter) -> AbstractContextManager[None]:
        """Wait for the updates that the GPU still computes, then pause the meter."""
        self._read_window()
        return meter.paused()

    def _due(self, every: int | None, new_tenth: bool) -> bool:
        """Whether an evaluation or checkpoint is due: at its interval, or else ten times per run, by steps or time."""
        if self.step == 0:
            return False
        if every is not None:
            return self.step % every == 0
        if self.training.minutes is not None:
            return new_tenth
        return self.step % (self.training.evaluate_every or max(1, self.training.steps // TENTHS)) == 0

    def _update(self, feed: Feed, seconds: float) -> None:
        self.lr = self.training.lr * self.schedule.factor(self.step, seconds)
        self.optimiser.set_lr(self.lr)
        self._seed()
        batches = feed.update(self.step)
        accepted = self._take(batches) if self.whole is None else self.whole(batches[0])
        self.step += 1
        if self.ema is not None and accepted:
            self.ema.update(self.step)

    def _take(self, batches: list[Batch]) -> bool:
        """An update by the gradients of these batches; False if they overflowed."""
        training, precision, ranks = self.training, self.precision, self.ranks
        sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        for number, batch in enumerate(batches, start=1):
            with ranks.accumulating(self.wrapped, last=number == len(batches)):
                loss = self._gradients(batch) if self.captured is None else self.captured(batch)
            sums += torch.stack((loss.total.detach().double(), loss.count.detach().double()))
        ranks.sum(sums)
        # gradients are of sums and are averaged over ranks
        factor = (ranks.world / (sums[1].clamp(min=1) * (precision.scale or 1.0))).float()
        parameters = list(self.optimiser.named.values())
        norm = scale_and_clip(parameters, factor, training.clip, training.clip_by, ranks.sharded)
        accepted = precision.accept(norm)
        if accepted:
            self.optimiser.step()
        self.optimiser.zero_grad(keep=self.captured is not None)
        norm = norm.double() if accepted else torch.zeros_like(sums[0])
        self.window += torch.stack((*sums, norm, torch.ones_like(norm)))
        return accepted

    def _seed(self, *purpose: int) -> None:
        key = [self.training.seed, self.step, self.ranks.data_rank, *purpose]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        # torch.manual_seed also seeds devices that are not there, and notes the stack of each call
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.ranks.device.type != "cpu":
            torch.manual_seed(seed)

    def _gradients(self, batch: Batch) -> Loss:
        with self.precision.autocast():
            loss: Loss = self.wrapped(batch)
        if self.precision.scale is None:
            self.precision.begin(self.ranks.largest(float(loss.count))[0])
        scale = self.precision.scale or 1.0
        (loss.total if scale == 1 else loss.total * scale).backward()
        return loss

    def _may_capture(self) -> bool:
        """training.capture; raises if it cannot work here."""
        ranks, name = self.ranks, self.precision.name
        # fp16's scale changes
        if self.training.capture and (ranks.device.type != "cuda" or ranks.world > 1 or self.precision.scaled):
            run = f"on {ranks.device} in {name} with {ranks.world} process" + "es" * (ranks.world > 1)
            accepted = "accepted is false, or one process on a GPU in bf16 or fp32"
            raise ValueError(f"training.capture=true cannot work {run}: {accepted}")
        return self.training.capture

    def _changed(self) -> list[Tensor]:
        """The tensors that an update changes."""
        return [*self.model.parameters(), *self.model.buffers(), *self.optimiser.state(), self.window]

    def _read_window(self) -> list[float]:
        """Read the window, which waits for the device; raises if the loss or the gradient is not finite."""
        loss, _, norm, updates = window = self.window.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            last = "" if self.folder is None else f"{checkpoints.last(self.folder.checkpoints)}; "
            what = "the loss" if not math.isfinite(loss) else "the gradient"
            steps = f"steps {self.step - int(updates) + 1:,} and {self.step:,}"
            advice = "a lower training.lr, a longer training.warmup or a tighter training.clip usually helps"
            raise Stopped(f"{what} is no longer a number between {steps}: {last}in a new run (--out) {advice}")
        return window

    def _report(self, log: Log, meter: Meter, progress: float, seconds: float) -> None:
        loss, count, norm, updates = self._read_window()
        if not updates:
            return
        self.window.zero_()
        self.totals["examples"] += updates * self.training.batch
        self.totals["tokens"] += count
        rate = meter.read(self.step)
        rates = {"tokens_per_second": rate * count / updates, "examples_per_second": rate * self.training.batch}
        used = memory(self.ranks.device)
        values = {"loss": loss / max(1.0, count), "lr": self.lr, "grad_norm": norm / updates, **rates}
        logged = {**values, "seconds": seconds, "memory_bytes": used}
        log.write(self.step, "train", logged if meter.counts else {**logged, **dict.fromkeys(rates)})
        left = seconds * max(0.0, 1 / max(1e-9, progress) - 1)
        speed = f"{rates['tokens_per_second']:,.0f} tokens/s, {used / 2**30:.1f} GiB"
        log.show(self.step, f"loss {values['loss']:.4f}, {speed}, {duration(left)} left")

    def _evaluate(self, log: Log, signals: Signals) -> None:
        """Measure validation, and keep the weights if they are the best so far."""
        if self.evaluated_step == self.step:
            return
        assert self.folder is not None
        self._read_window()
        batches = self.training.evaluate_batches
        # the same examples for any number of ranks and micro-batches
        examples = None if batches is None else batches * (self.training.evaluate_batch or self.training.batch)
        measures = self.measure("validation", examples, signals)
        if measures is None:
            return
        value = measures[self.task.metric]
        log.write(self.step, "validation", {**measures, "seconds": self.seconds})
        sign = -1.0 if self.task.higher_is_better else 1.0
        best, mark = self.best, ""
        if math.isfinite(value) and (best is None or sign * value < sign * best["measures"][self.task.metric]):
            with self._averaged():
                digest = self._save_model(self.folder.best(self.step))
            self.best, mark = {"step": self.step, "measures": measures, "sha256": digest}, ", the best so far"
        log.say(f"step {self.step:,}: validation {value:.4f} {self.task.metric}{mark}")
        if self.schedule.evaluated(value):
            log.say(f"step {self.step:,}: lr falls to {self.training.lr * self.schedule.scale:.3g}")
        self.evaluated_step = self.step

    def measure(self, split: Split, examples: int | None, signals: Signals | None = None) -> dict[str, float] | None:
        """The measures of a split, or of its first `examples`; None if a signal came before the end."""
        training, ranks = self.training, self.ranks
        batch = training.evaluate_batch or training.micro_batch or max(1, training.batch // ranks.data_world)
        self._seed(1)
        self._note_peak()
        with self._averaged():
            measures = evaluate(self.wired, self.sources[split], ranks, self.precision, batch, examples, signals)
        # the peak of a GPU can be reset, that of a process cannot
        self.peak_is_of_training = self.ranks.device.type == "cuda"
        if self.peak_is_of_training:
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        return measures

    def _note_peak(self) -> None:
        """Note the peak memory of training, without evaluations, which have other batches and no gradients."""
        if self.peak_is_of_training:
            self.peak = max(self.peak, memory(self.ranks.device))

    def _averaged(self) -> AbstractContextManager[Any]:
        self.ranks.reshard(self.wired)
        return nullcontext() if self.ema is None else self.ema.in_place()

    def _tensors(self) -> dict[str, Tensor]:
        self.ranks.reshard(self.wired)
        tensors = {f"model/{name}": tensor for name, tensor in tensors_of(self.model).items()}
        tensors |= {f"ema/{name}": tensor for name, tensor in (self.ema.means if self.ema else {}).items()}
        return {**tensors, "window": self.window}

    def _save(self, log: Log) -> None:
        """Write a checkpoint, unless this step has one; raises if the loss is not finite."""
        if self.folder is None or self.saved_step == self.step:
            return
        self._read_window()
        files = log.sync()
        optimiser = {f"optimiser/{name}": tensor for name, tensor in self.optimiser.tensors().items()}
        facts = {
            "config": plain(self.config),
            "seconds": self.seconds,
            "evaluated": self.evaluated_step,
            "best": self.best,
            "schedule": self.schedule.state(),
            "precision": self.precision.state(),
            "totals": self.totals,
        }
        tensors = {**self._tensors(), **optimiser}
        checkpoints.write(self.folder.checkpoints, self.step, tensors, facts, self.ranks, files)
        if self.ranks.first:
            self.folder.prune(self.training.keep, None if self.best is None else self.best["step"])
        self.saved_step = self.step

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        facts = checkpoint.facts
        prefix = "optimiser/"
        shapes = {n.removeprefix(prefix): s for n, s in checkpoint.shapes().items() if n.startswith(prefix)}
        state = self.optimiser.empty_state(shapes)
        checkpoint.load_into({**self._tensors(), **{prefix + name: tensor for name, tensor in state.items()}})
        self.optimiser.load(state)
        self.schedule.load(facts["schedule"])
        self.precision.load(facts["precision"])
        self.step = self.saved_step = checkpoint.step
        self.earlier_seconds, self.evaluated_step, self.best = facts["seconds"], facts["evaluated"], facts["best"]
        self.totals = facts["totals"]

    def _save_model(self, path: Path) -> str:
        """Save the current weights as a model. Returns their digest, on every rank."""
        model = self.model
        if self.ranks.sharded:
            tensors = {name: whole(tensor).cpu() for name, tensor in tensors_of(self.model).items()}
            model = copy_of(self.task, self.config.model, tensors) if self.ranks.first else model

        def save() -> str:
            save_model(model, path)
            return digest_in(path)

        return self.ranks.decide(save)

    def _finish(self, folder: Folder, log: Log, signals: Signals, seconds: float, parameters: int) -> Result:
        """Test the weights that were best on validation."""
        if self.best is not None:
            self.ranks.barrier()
            self.ranks.reshard(self.wired)
            path, digest = folder.best(self.best["step"]), self.best.get("sha256")
            damage = self.ranks.decide(lambda: damage_of(path, digest))
            if damage:
                log.say(f"{damage}: testing the last weights instead of the best")
                self.best = None
            else:
                load_weights(self.model, path)
                self.ema = None  # the best weights are already averages
        log.say(f"step {self.step:,}: testing on {len(self.sources['test']):,} examples")
        measures = self.measure("test", None, signals)
        if measures is None:
            number = int(self.ranks.largest(float(signals.number))[0])
            raise Interrupted("interrupted before the test: --resume continues", 128 + number)
        log.write(self.step, "test", {**measures, "seconds": seconds})
        with self._averaged():
            digest = self._save_model(folder.model)
        ended = "steps" if self.step >= self.training.steps else "minutes"
        if self.step < self.training.warmup:
            short = f"all {self.step:,} steps were warm-up, which takes {self.training.warmup:,} steps"
            log.say(f"{short}: the learning rate did not reach training.lr; --set training.warmup=... shortens it")
        result = dataclasses.replace(self._result(ended, measures, seconds, parameters), weights_sha256=digest)
        if self.ranks.first:
            write_sealed(folder.path / RESULT, dataclasses.asdict(result))
        log.say(f"test {measures[self.task.metric]:.4f} {self.task.metric}, weights of step {result.best_step:,}")
        return result

    def _result(self, ended: str, test: dict[str, float], seconds: float, parameters: int) -> Result:
        best = self.best or {"step": self.step, "measures": {}}
        self._note_peak()
        return Result(
            task=self.task.name,
            metric=self.task.metric,
            test=test,
            validation=best["measures"],
            best_step=best["step"],
            steps=self.step,
            ended_by=ended,
            seconds=seconds,
            examples_per_second=self.totals["examples"] / max(1e-9, seconds),
            tokens_per_second=self.totals["tokens"] / max(1e-9, seconds),
            peak_bytes=self.peak,
            parameters=parameters,
            ranks=self.ranks.world,
        )


def _sources(task: Task, ranks: Ranks) -> dict[Split, Source]:
    """All splits, so that a missing test set is noticed before training. Rank 0 downloads."""
    sources: dict[Split, Source] = {}
    ranks.decide(lambda: sources.update({split: task.source(split) for split in SPLITS}))
    sources = sources or {split: task.source(split) for split in SPLITS}
    if ranks.sequence is None:
        return sources
    return {split: Part(source, task, ranks) for split, source in sources.items()}
