"""A run: its state, an update, and everything between two updates.

Nothing in an update waits for a GPU: losses stay on the device and are read every `log_every` steps, before an
evaluation and before a checkpoint; what is not a number is found then, and never saved. Everything random in an update
is seeded by (seed, step, rank), and the data's position is the step, so a run that goes on from a checkpoint does
what it would have done.
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
from subquad.models.saving import tensors_of
from subquad.training import checkpoints
from subquad.training.capture import Captured
from subquad.training.checkpoints import Checkpoint
from subquad.training.config import RunConfig
from subquad.training.distributed import Ranks, blocks_of, whole
from subquad.training.ema import Ema
from subquad.training.evaluate import Wired, evaluate
from subquad.training.feed import Feed, pieces_of
from subquad.training.folder import Folder, plain
from subquad.training.log import Log, Meter, duration, memory
from subquad.training.models import copy_of, damage_of, digest_in, load_weights, make_model, save_model
from subquad.training.optimisers import Optimiser, scale_and_clip
from subquad.training.precision import Precision
from subquad.training.schedules import Schedule
from subquad.training.signals import Interrupted, Signals
from subquad.training.task import Batch, Loss, Source, Split, Task

TENTHS = 10  # of a run: evaluations and checkpoints, where nothing else is said


class Stopped(RuntimeError):
    """Training cannot go on; the last good checkpoint is there."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to; result.json holds it."""

    task: str
    metric: str
    test: dict[str, float]  # with the weights that were best on validation
    validation: dict[str, float]  # of those weights
    best_step: int
    steps: int
    ended_by: str  # "steps", "minutes", or "leg": not finished, --resume goes on
    seconds: float
    examples_per_second: float  # of updates, over the whole run with everything that came between them
    tokens_per_second: float
    peak_bytes: int
    parameters: int
    ranks: int
    weights_sha256: str | None = None  # of the weights in model/; runs from before digests have none


class Run:
    """The state of a run, and what is done with it."""

    def __init__(self, task: Task, config: RunConfig, folder: Folder, ranks: Ranks):
        self.task, self.folder, self.ranks = task, folder, ranks
        self.training = training = config.training
        self.config = config
        device = ranks.device
        self.pieces = pieces_of(training.batch, training.micro_batch, ranks.world)
        self.sources = _sources(task, ranks)
        self.order = Order(len(self.sources["train"]), training.batch, training.seed, training.shuffle)
        torch.manual_seed(training.seed)
        self.model = make_model(task, config.model).to(device)
        self.wired = Wired(task, self.model, ranks)
        ranks.shard(self.wired, blocks_of(self.model))
        if training.compile:
            self.wired.compile()
        self.wrapped = ranks.wrap(self.wired)
        self.precision = Precision(training.precision, device)
        self.captured = self._capture() if training.capture else None
        self.optimiser = Optimiser(training, self.model)
        self.schedule = Schedule(training, task.higher_is_better)
        self.ema = None if training.ema is None else Ema(self.model, training.ema)
        self.step, self.carried, self.lr = 0, 0.0, 0.0
        self.evaluated = self.saved = 0
        self.best: dict[str, Any] | None = None  # {"step": ..., "measures": {...}, "sha256": ...}
        # since the last log line: loss, targets, gradient norms, updates
        self.window = torch.zeros(4, dtype=torch.float64, device=device)
        self.totals = {"examples": 0.0, "tokens": 0.0}
        self.begun = time.perf_counter()
        self.peak, self.untouched = 0, True  # bytes of training, and whether nothing else was measured in them yet

    def go(self, log: Log, signals: Signals, leg: float | None) -> Result:
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
            log.say(f"{self.task.name}: on from step {self.step:,}")
        meter = Meter(self.step)
        tenth = int(TENTHS * self.schedule.progress(self.step, self.carried))
        rested = 0.0  # when as much time has been trained again as the last evaluation took
        evaluating: float | None = None  # since when
        try:
            while True:
                seconds, stop = self.ranks.largest(self.seconds if self.ranks.first else 0.0, float(signals.number))
                if evaluating is not None:
                    rested, evaluating = 2 * seconds - evaluating, None
                progress = self.schedule.progress(self.step, seconds)
                done = progress >= 1
                now = int(TENTHS * progress)
                fresh, tenth = now > tenth, max(now, tenth)
                if self.step % training.log_every == 0 or done:
                    self._report(log, meter, progress, seconds)
                if self.step == meter.warm:
                    self._read_window()
                    meter.restart(self.step)
                if done or self._due(training.evaluate_every, fresh and seconds >= rested):
                    evaluating = seconds
                    with self._pause(meter):
                        self._evaluate(log, signals)
                    stop = self.ranks.largest(float(signals.number))[0]  # it may have been asked meanwhile
                if done or self._due(training.checkpoint_every or training.evaluate_every, fresh):
                    with self._pause(meter):
                        self._save(log)
                if stop or (signals.number and self.ranks.world == 1):
                    self._save(log)
                    number = int(stop) or signals.number
                    raise Interrupted(f"interrupted at step {self.step:,}, saved: --resume goes on", 128 + number)
                if done:
                    break
                if leg is not None and seconds - self.carried >= 60 * leg:
                    self._save(log)
                    log.say(f"step {self.step:,}, saved: the leg of {leg:g} minutes is over, --resume goes on")
                    return self._result("leg", {}, seconds, parameters)
                self._update(feed, seconds)
                log.tick(self.step, progress)
        finally:
            feed.close()
        return self._finish(log, signals, seconds, parameters)

    @property
    def seconds(self) -> float:
        """Of training, over all legs."""
        return self.carried + time.perf_counter() - self.begun

    def _pause(self, meter: Meter) -> AbstractContextManager[None]:
        """What is no update; those that a GPU still computes are waited for, since they are."""
        self._read_window()
        return meter.paused()

    def _due(self, every: int | None, fresh_tenth: bool) -> bool:
        """At its own interval, else ten times in a run, by steps or by time."""
        if self.step == 0:
            return False
        if every is not None:
            return self.step % every == 0
        if self.training.minutes is not None:
            return fresh_tenth
        return self.step % self.training.evaluation_interval == 0

    def _update(self, feed: Feed, seconds: float) -> None:
        training, precision, ranks = self.training, self.precision, self.ranks
        self.lr = training.lr * self.schedule.factor(self.step, seconds)
        self.optimiser.set_lr(self.lr)
        self._seed()
        batches = feed.update(self.step)
        sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        for number, batch in enumerate(batches, start=1):
            with ranks.accumulating(self.wrapped, last=number == len(batches)):
                loss = self._gradients(batch) if self.captured is None else self.captured(batch)
            sums += torch.stack((loss.total.detach().double(), loss.count.detach().double()))
        ranks.sum(sums)
        # gradients are of sums, averaged over ranks
        factor = (ranks.world / (sums[1].clamp(min=1) * (precision.scale or 1.0))).float()
        parameters = list(self.optimiser.named.values())
        norm = scale_and_clip(parameters, factor, training.clip, training.clip_by, ranks.sharded)
        accepted = precision.accept(norm)
        if accepted:
            self.optimiser.step()
        self.optimiser.zero_grad(keep=self.captured is not None)
        self.step += 1
        if self.ema is not None and accepted:
            self.ema.update(self.step)
        norm = norm.double() if accepted else torch.zeros_like(sums[0])
        self.window += torch.stack((*sums, norm, torch.ones_like(norm)))

    def _seed(self, *purpose: int) -> None:
        key = [self.training.seed, self.step, self.ranks.rank, *purpose]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))

    def _gradients(self, batch: Batch) -> Loss:
        with self.precision.autocast():
            loss: Loss = self.wrapped(batch)
        if self.precision.scale is None:
            self.precision.begin(self.ranks.largest(float(loss.count))[0])
        scale = self.precision.scale or 1.0
        (loss.total if scale == 1 else loss.total * scale).backward()
        return loss

    def _capture(self) -> Captured:
        accepted = "accepted is false, or one process on a GPU in bf16 or fp32"
        for what, wrong in (
            (f"on {self.ranks.device}", self.ranks.device.type != "cuda"),
            (f"over {self.ranks.world} ranks", self.ranks.world > 1),
            ("in fp16, whose scale changes", self.precision.scaled),
        ):
            if wrong:
                raise ValueError(f"training.capture=true cannot work {what}: {accepted}")
        return Captured(self._gradients, self.model)

    def _read_window(self) -> list[float]:
        """Waits for the device; raises if something in it is not a number."""
        loss, _, norm, updates = found = self.window.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            kept = checkpoints.names(self.folder.checkpoints)
            last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
            what = "the loss" if not math.isfinite(loss) else "the gradient"
            first = self.step - int(updates) + 1
            raise Stopped(
                f"{what} is no longer a number between steps {first:,} and {self.step:,}: {last}; "
                "a new run (--out) with a lower training.lr, a longer training.warmup or a tighter training.clip "
                "usually helps"
            )
        return found

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
        log.show(
            self.step,
            f"loss {values['loss']:.4f}, {rates['tokens_per_second']:,.0f} tokens/s, "
            f"{used / 2**30:.1f} GiB, {duration(left)} left",
        )

    def _evaluate(self, log: Log, signals: Signals) -> None:
        if self.evaluated == self.step:
            return
        self._read_window()
        found = self._measure("validation", self.training.evaluate_batches, signals)
        if found is None:
            return
        value = found[self.task.metric]
        log.write(self.step, "validation", {**found, "seconds": self.seconds})
        sign = -1.0 if self.task.higher_is_better else 1.0
        best = self.best
        if math.isfinite(value) and (best is None or sign * value < sign * best["measures"][self.task.metric]):
            with self._averaged():
                digest = self._save_model(self.folder.best(self.step))
            self.best = {"step": self.step, "measures": found, "sha256": digest}
        mark = ", the best so far" if self.best is not None and self.best["step"] == self.step else ""
        log.say(f"step {self.step:,}: validation {value:.4f} {self.task.metric}{mark}")
        if self.schedule.evaluated(value):
            log.say(f"step {self.step:,}: lr falls to {self.training.lr * self.schedule.scale:.3g}")
        self.evaluated = self.step

    def _measure(self, split: Split, batches: int | None, signals: Signals) -> dict[str, float] | None:
        training = self.training
        size = training.evaluate_batch or training.micro_batch or max(1, training.batch // self.ranks.world)
        # the same examples on any number of ranks, in micro-batches or not
        most = None if batches is None else batches * (training.evaluate_batch or training.batch)
        self._seed(1)
        self._note_peak()
        with self._averaged():
            found = evaluate(
                self.wired,
                self.sources[split],
                self.ranks,
                self.precision,
                batch=size,
                examples=most,
                stop=lambda: signals.number != 0,
            )
        self.untouched = self.ranks.device.type == "cuda"  # of a process on a CPU only the peak so far is known
        if self.untouched:
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        return found

    def _note_peak(self) -> None:
        """Of training: an evaluation, at another batch and without gradients, is left out."""
        if self.untouched:
            self.peak = max(self.peak, memory(self.ranks.device))

    def _averaged(self) -> AbstractContextManager[Any]:
        self.ranks.reshard(self.wired)
        return nullcontext() if self.ema is None else self.ema.in_place()

    def _tensors(self) -> dict[str, Tensor]:
        self.ranks.reshard(self.wired)
        found = {f"model/{name}": tensor for name, tensor in tensors_of(self.model).items()}
        found |= {f"ema/{name}": tensor for name, tensor in (self.ema.means if self.ema else {}).items()}
        return {**found, "window": self.window}

    def _save(self, log: Log) -> None:
        """A checkpoint of this moment, unless there is one or something in it is not a number."""
        if self.saved == self.step:
            return
        self._read_window()
        files = log.sync()
        optimiser = {f"optimiser/{name}": tensor for name, tensor in self.optimiser.tensors().items()}
        facts = {
            "config": plain(self.config),
            "seconds": self.seconds,
            "position": {"examples": self.step * self.training.batch, "epoch": self.order.indices(self.step)[1]},
            "random": {"seed": self.training.seed, "drawn_for": "seed, step, rank"},
            "evaluated": self.evaluated,
            "best": self.best,
            "schedule": self.schedule.state(),
            "precision": self.precision.state(),
            "totals": self.totals,
        }
        tensors = {**self._tensors(), **optimiser}
        checkpoints.write(self.folder.checkpoints, self.step, tensors, facts, self.ranks, files)
        if self.ranks.first:
            self.folder.prune(self.training.keep, None if self.best is None else self.best["step"])
        self.saved = self.step

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from there."""
        facts = checkpoint.facts
        prefix = "optimiser/"
        shapes = {n.removeprefix(prefix): s for n, s in checkpoint.shapes().items() if n.startswith(prefix)}
        room = self.optimiser.room(shapes)
        checkpoint.load_into({**self._tensors(), **{prefix + name: tensor for name, tensor in room.items()}})
        self.optimiser.load(room)
        self.schedule.load(facts["schedule"])
        self.precision.load(facts["precision"])
        self.step = self.saved = checkpoint.step
        self.carried, self.evaluated, self.best = facts["seconds"], facts["evaluated"], facts["best"]
        self.totals = facts["totals"]

    def _save_model(self, path: Path) -> str:
        """What can be loaded again by itself: the weights as they are now. Returns their digest, on every rank."""
        model = self.model
        if self.ranks.sharded:
            tensors = {name: whole(tensor).cpu() for name, tensor in tensors_of(self.model).items()}
            model = copy_of(self.task, self.config.model, tensors) if self.ranks.first else model

        def save() -> str:
            save_model(model, path)
            return digest_in(path)

        return self.ranks.decide(save)

    def _finish(self, log: Log, signals: Signals, seconds: float, parameters: int) -> Result:
        """The test, with the weights that were best on validation."""
        if self.best is not None:
            self.ranks.barrier()
            self.ranks.reshard(self.wired)
            path, digest = self.folder.best(self.best["step"]), self.best.get("sha256")
            damage = self.ranks.decide(lambda: damage_of(path, digest))
            if damage:
                log.say(f"{damage}: the last weights are tested instead of the best")
                self.best = None
            else:
                load_weights(self.model, path)
                self.ema = None  # the best weights are averages already
        log.say(f"step {self.step:,}: the test, {len(self.sources['test']):,} examples")
        measured = self._measure("test", None, signals)
        if measured is None:
            number = int(self.ranks.largest(float(signals.number))[0])
            raise Interrupted("interrupted before the test: --resume goes on", 128 + number)
        log.write(self.step, "test", {**measured, "seconds": seconds})
        with self._averaged():
            digest = self._save_model(self.folder.model)
        ended = "steps" if self.step >= self.training.steps else "minutes"
        if self.step < self.training.warmup:
            log.say(
                f"all {self.step:,} steps were warm-up, which takes {self.training.warmup:,}: "
                "the learning rate did not reach training.lr; --set training.warmup=... sets it"
            )
        result = dataclasses.replace(self._result(ended, measured, seconds, parameters), weights_sha256=digest)
        if self.ranks.first:
            self.folder.finish(dataclasses.asdict(result))
        log.say(f"test {measured[self.task.metric]:.4f} {self.task.metric}, weights of step {result.best_step:,}")
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
    """All splits at once: a test set that is missing is better missed before the training. Rank 0 downloads."""
    splits: tuple[Split, ...] = ("train", "validation", "test")
    made: dict[Split, Source] = {}
    ranks.decide(lambda: made.update({split: task.source(split) for split in splits}))
    return made or {split: task.source(split) for split in splits}
