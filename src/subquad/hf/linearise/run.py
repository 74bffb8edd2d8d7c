"""`linearise`: a run in stages, each of which continues where an earlier call stopped.

    align    every layer that may be replaced learns the teacher's output from the teacher's input, all in one pass
    choose   the cost of each aligned layer alone decides which layers keep softmax
    distil   the student with the other layers replaced learns the teacher's logits
    measure  the student is saved, loaded again and measured

out/work/ holds checkpoints, metrics.jsonl and the tokens until the student is measured, and metrics.jsonl afterwards.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from subquad.checks import checked, refuse
from subquad.disk import blaming, check_folder, lock_folder, set_aside
from subquad.hf.linearise import learn, page
from subquad.hf.linearise import text as texts
from subquad.hf.linearise.measure import Measures, measure
from subquad.hf.linearise.models import Teacher, candidates, kept_of, load_teacher, make_student, quiet, replaced
from subquad.hf.linearise.settings import FREE_ON_RESUME, LineariseSettings
from subquad.machine import available
from subquad.studies.results import save
from subquad.training import checkpoints
from subquad.training.config import TrainingConfig, differences
from subquad.training.distributed import Ranks
from subquad.training.log import Log
from subquad.training.optimisers import Optimiser, scale_and_clip
from subquad.training.precision import Precision
from subquad.training.schedules import Schedule
from subquad.training.signals import Interrupted, Signals

WORK, REPORT, TOKENS = "work", "linearise.json", "tokens.safetensors"
STAGES = ("align", "choose", "distil")


@checked
def linearise(
    model: str | Path,
    out: str | Path,
    text: str | Path | Sequence[str | Path],
    *,
    minutes: float | None = None,
    device: str = "auto",
    measures: Measures | None = None,
    console: Console | None = None,
    **settings: Any,
) -> dict[str, Any] | None:
    """Make most attention layers of a pretrained decoder linear, and write a folder that AutoModelForCausalLM loads.

    subquad.hf.linearise("SmolLM2-135M", out="student", text=["novels"], keep=0.25, rule="gated_delta")

    `settings` are those of `LineariseSettings`. The same call again continues an unfinished run. `minutes`: save and
    stop after that time, and return None; otherwise the report is returned, which is also written to linearise.json
    and, as a page, to README.md. Of a finished run the same call returns the report.
    """
    out, chosen = Path(out), LineariseSettings(**settings)
    if minutes is not None and not 0 < minutes < math.inf:
        refuse("minutes", minutes, "a positive number")
    check_folder("out", out)
    if (out / REPORT).is_file():
        report = page.read(out / REPORT)
        _same(chosen, report["settings"], out)
        if report["model"] != str(model):
            refuse("model", str(model), f"that of the student in {out}, {report['model']}")
        return report
    if out.is_dir() and any(out.iterdir()) and not (out / WORK).is_dir():
        refuse("out", str(out), "an empty folder, or that of an earlier call")
    device = available(device)
    files = texts.text_files(text)
    with quiet():
        teacher = load_teacher(model, device)
        run = Run(teacher, str(model), out, chosen, measures or Measures(), device, console or Console(quiet=True))
        run.read_text(files)
        out.mkdir(parents=True, exist_ok=True)
        with lock_folder(out, "another process makes a student there"):
            return run.continue_for(minutes)


class Run:
    """One call of `linearise`."""

    def __init__(
        self, teacher: Teacher, name: str, out: Path, settings: LineariseSettings, measures: Measures, device: str,
        console: Console,
    ):  # fmt: skip
        self.teacher, self.name, self.out, self.settings, self.measures = teacher, name, out, settings, measures
        self.device, self.console, self.work = torch.device(device), console, out / WORK
        self.layers = candidates(teacher, settings)
        self.precision = Precision("auto" if self.device.type == "cpu" else "bf16", self.device)
        self.total = settings.align_steps + settings.distil_steps
        self.facts: dict[str, Any] = {"seconds": 0.0, "stage": "align"}
        self.step = 0
        self.copy: str | None = None
        self.loaded: checkpoints.Checkpoint | None = None
        self.curve: list[Tensor] = []  # of the steps since the last line
        if self.work.is_dir():
            self._look_back()

    # Before and after

    def _look_back(self) -> None:
        found, damaged = checkpoints.newest(self.work / "checkpoints")
        for path, sentence in damaged.items():
            said = f"{sentence}; it is now {set_aside(path).name}"
            self.console.print(said, markup=False, highlight=False, soft_wrap=True)
        if found is None:
            return
        with blaming(str(found.path)):
            _same(self.settings, found.facts["config"], self.out)
            self.facts = dict(found.facts["totals"])
            self.step, self.copy, self.loaded = self.facts["step"], found.history, found
            self.curve = [torch.tensor(point, device=self.device) for point in self.facts["curve"]]
            if self.facts["model"] != self.name:
                refuse("model", self.name, f"that of the run in {self.out}, {self.facts['model']}")

    def read_text(self, files: Sequence[Path]) -> None:
        """Tokenise, or read what an earlier call tokenised."""
        sha, settings = texts.digest(files), self.settings
        if self.facts.setdefault("text", sha) != sha:
            refuse("text", [str(file) for file in files], f"that of the run in {self.out}: these files differ")
        kept = self.work / TOKENS
        if self.loaded is not None and kept.is_file():
            parts = checkpoints.read_tensors(kept)
            self.tokens = texts.Tokens(*(parts[name] for name in texts.Tokens._fields))
            return
        least = max(settings.align_length, settings.distil_length)
        self.tokens = texts.tokenise(files, self.teacher.tokenizer, settings.held_out, least)
        self.facts |= {
            "model": self.name,
            "files": [file.name for file in files],
            "tokens": {name: len(part) for name, part in self.tokens._asdict().items()},
        }

    def continue_for(self, minutes: float | None) -> dict[str, Any] | None:
        self.work.mkdir(exist_ok=True)
        if not (self.work / TOKENS).is_file() or self.loaded is None:
            checkpoints.write_tensors(self.work / TOKENS, self.tokens._asdict())
        self.begun, self.before = time.monotonic(), float(self.facts["seconds"])
        self.until = math.inf if minutes is None else self.begun + 60 * minutes
        with (
            Log(self.work, self.console, "linearise", self.step, self.copy) as self.log,
            Signals(self.log) as self.signals,
        ):
            done = self._align() and self._choose() and self._distil()
            self._heed_signals()
            if not done or time.monotonic() > self.until:
                left = (
                    f"step {self.step:,} of {self.total:,}" if self.step < self.total else "learned, not measured yet"
                )
                self.log.say(f"time is up: {left}; the same call continues")
                return None
            return self._measure()

    def _heed_signals(self) -> None:
        if self.signals.number:
            message = f"interrupted at step {self.step:,}: the same call continues"
            raise Interrupted(message, 128 + self.signals.number)

    def _say(self, text: str) -> None:
        """Print what is measured next, unless the user asked to stop."""
        self._heed_signals()
        self.log.say(text)

    def _stopped(self) -> bool:
        return bool(self.signals.number) or time.monotonic() > self.until

    # The stages

    def _align(self) -> bool:
        settings = self.settings
        if self.facts["stage"] != "align":
            return True
        self.student = make_student(self.teacher, self.layers, settings)
        layers = replaced(self.student)
        model = nn.ModuleDict({str(n): layer for n, layer in layers.items()})
        optimiser, schedule = self._optimiser(model, settings.align_steps, settings.align_lr, 0.01)
        self._restore(model, optimiser)
        parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers.values()]
        one = torch.ones((), device=self.device)
        sizes = settings.align_batch, settings.align_length
        while self.step < settings.align_steps:
            if self._stopped():
                self._save(model, optimiser)
                return False
            x = texts.batch(self.tokens.train, *sizes, settings.seed, self.step).to(self.device)
            optimiser.set_lr(settings.align_lr * schedule.factor(self.step))
            errors = learn.align(self.teacher, layers, x, self.precision)
            for own in parameters:
                scale_and_clip(own, one, settings.clip, "norm", False)
            optimiser.step()
            optimiser.zero_grad()
            self.step += 1
            self.curve.append(torch.stack(list(errors.values())).mean())
            if self.step == 1:
                self.facts["first_error"] = {str(n): float(e) for n, e in errors.items()}
            self._tell("align", self.step == settings.align_steps)
            if self.step % settings.checkpoint_every == 0:
                self._save(model, optimiser)
        if settings.align_steps:
            x = texts.rows(self.tokens.choose, settings.align_length, settings.evaluate_rows).to(self.device)
            self.facts["aligned_error"] = self._errors(layers, x)
        self.facts["stage"] = "choose"
        self._save(model, optimiser)
        return True

    @torch.no_grad()
    def _errors(self, layers: Any, x: Tensor) -> dict[str, float]:
        """The aligned layers' errors on held-out text."""
        total = dict.fromkeys(layers, 0.0)
        for part in x.split(self.settings.align_batch):
            with learn.recorded(self.teacher.model, layers) as seen, self.precision.autocast():
                learn.trunk(self.teacher.model)(part, use_cache=False)
                for n, layer in layers.items():
                    hidden, wanted = seen[n]
                    gap = (layer(hidden)[0].float() - wanted.float()).square().sum() / wanted.float().square().sum()
                    total[n] += float(gap) * len(part) / len(x)
        return {str(n): value for n, value in total.items()}

    def _choose(self) -> bool:
        if self.facts["stage"] != "choose":
            return True
        if self._stopped():
            return False
        settings = self.settings
        if not hasattr(self, "student"):
            self.student = make_student(self.teacher, self.layers, settings)
            self._restore(self._modules(), None)
        layers = replaced(self.student)
        x = texts.rows(self.tokens.choose, settings.distil_length, settings.evaluate_rows).to(self.device)
        own, costs = learn.sweep(self.teacher, layers, x, self.precision, settings.distil_batch)
        ranks = sorted(self.layers, key=lambda n: -costs[n].kl)
        keep = set(ranks[: kept_of(self.teacher, settings, self.layers)])
        self.facts["sweep"] = {
            "teacher_perplexity": own,
            "layers": [
                {"layer": n, "kl": costs[n].kl, "perplexity": costs[n].perplexity, "rank": ranks.index(n) + 1}
                for n in self.layers
            ],
        }
        self.facts["kept"] = sorted(keep | (set(self.teacher.layers) - set(self.layers)))
        self.facts["stage"] = "distil"
        aligned = {n: layer.state_dict() for n, layer in layers.items() if n not in keep}
        self._make(aligned)
        self._save(self.student, None)
        self.log.say(f"layers that keep softmax: {self.facts['kept'] or 'none'}")
        return True

    def _make(self, aligned: dict[int, dict[str, Tensor]] | None) -> None:
        """The student whose chosen layers are replaced, with LoRA if wanted."""
        chosen = [n for n in self.teacher.layers if n not in self.facts["kept"]]
        self.student = make_student(self.teacher, chosen, self.settings).requires_grad_(True)
        for n, tensors in (aligned or {}).items():
            replaced(self.student)[n].load_state_dict(tensors)
        if self.settings.lora is not None:
            self.student = with_lora(self.student, self.settings.lora, self.settings.seed)

    def _modules(self) -> nn.Module:
        return nn.ModuleDict({str(n): layer for n, layer in replaced(self.student).items()})

    def _distil(self) -> bool:
        settings = self.settings
        if not hasattr(self, "student"):
            self._make(None)
        optimiser, schedule = self._optimiser(self.student, settings.distil_steps, settings.distil_lr, 0.1)
        self._restore(self.student, optimiser)
        parameters = [p for p in self.student.parameters() if p.requires_grad]
        one = torch.ones((), device=self.device)
        sizes = settings.distil_batch, settings.distil_length
        while self.step < self.total:
            if self._stopped():
                self._save(self.student, optimiser)
                return False
            x = texts.batch(self.tokens.train, *sizes, settings.seed, self.step).to(self.device)
            optimiser.set_lr(settings.distil_lr * schedule.factor(self.step - settings.align_steps))
            loss = learn.distil(self.teacher, self.student, x, self.precision)
            scale_and_clip(parameters, one, settings.clip, "norm", False)
            optimiser.step()
            optimiser.zero_grad()
            self.step += 1
            self.curve.append(loss)
            self._tell("distil", self.step == self.total)
            if self.step % settings.checkpoint_every == 0 or self.step == self.total:
                self._save(self.student, optimiser)
        return True

    def _measure(self) -> dict[str, Any]:
        student, settings = self.student, self.settings
        if settings.lora is not None:
            student = student.merge_and_unload()
        student = student.to(self.teacher.dtype).eval()
        student.save_pretrained(self.out)
        self.teacher.tokenizer.save_pretrained(self.out)
        seconds = self.before + time.monotonic() - self.begun
        learned = {
            "model": self.name, "settings": settings.to_dict(), "seconds": seconds, "tokens": self.facts["tokens"],
            "files": self.facts["files"], "curves": self.facts.get("curves", {}),
        }  # fmt: skip
        test = texts.rows(self.tokens.test, settings.distil_length, settings.evaluate_rows)
        report = page.report(learned, self.facts, self.teacher)
        report |= measure(self.teacher, self.out, test, settings, self.measures, self.device, self._say)
        report |= page.verdict(report)
        page.write(report, self.out)
        save(report, self.out / REPORT)
        shutil.rmtree(self.work / "checkpoints", ignore_errors=True)
        (self.work / TOKENS).unlink(missing_ok=True)
        return report

    # What the stages share

    def _optimiser(self, model: nn.Module, steps: int, lr: float, final: float) -> tuple[Optimiser, Schedule]:
        settings = self.settings
        config = TrainingConfig(
            steps=max(1, steps), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, schedule="cosine", final_lr=final,
            warmup=min(settings.warmup, steps // 2),
        )  # fmt: skip
        return Optimiser(config, model), Schedule(config)

    def _tell(self, stage: str, last: bool) -> None:
        """Write the mean of the last steps; the only place that waits for a GPU."""
        self.log.tick(self.step, self.step / max(1, self.total))
        every = max(1, min(20, self.total // 20))
        if self.step % every and not last:
            return
        mean = float(torch.stack(self.curve).mean())
        self.curve.clear()
        if not math.isfinite(mean):
            raise ValueError(
                f"{stage} gives {mean} at step {self.step:,}: begin again elsewhere with a lower {stage}_lr"
            )
        self.facts.setdefault("curves", {}).setdefault(stage, []).append([self.step, mean])
        self.log.write(self.step, stage, {"loss": mean})
        self.log.show(self.step, f"{stage} {mean:.4f}")

    def _save(self, model: nn.Module, optimiser: Optimiser | None) -> None:
        self.facts |= {"seconds": self.before + time.monotonic() - self.begun, "step": self.step}
        self.facts["curve"] = [float(point) for point in self.curve]
        tensors: dict[str, Tensor] = {f"model/{name}": p for name, p in model.named_parameters()}
        if optimiser is not None and self.facts["stage"] != "choose":
            tensors |= {f"optimiser/{name}": value for name, value in optimiser.tensors().items()}
        facts: dict[str, Any] = dict.fromkeys(checkpoints.FACTS)
        facts |= {"config": self.settings.to_dict(), "seconds": self.facts["seconds"], "totals": self.facts}
        folder, number = self.work / "checkpoints", self.step + STAGES.index(self.facts["stage"])
        if (folder / checkpoints.name_of(number)).is_dir():
            return  # nothing has changed since
        checkpoints.write(folder, number, tensors, facts, Ranks(self.device), self.log.sync())
        checkpoints.prune(folder, 2)
        self.loaded = None

    def _restore(self, model: nn.Module, optimiser: Optimiser | None) -> None:
        """The state of the checkpoint that this call found, once."""
        if self.loaded is None:
            return
        tensors = checkpoints.read_tensors(self.loaded.path / checkpoints.TENSORS)
        own = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        checkpoints.copy_into(own, dict(model.named_parameters()), str(self.loaded.path))
        others = {name.removeprefix("optimiser/"): t for name, t in tensors.items() if name.startswith("optimiser/")}
        if optimiser is not None and others:
            optimiser.load(others)
        self.loaded = None


def with_lora(student: Any, rank: int, seed: int) -> Any:
    """The student with adapters on its matrices; what else replaced layers have is trained as well."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora needs the package peft, which is not installed: pip install peft") from error
    new = {id(p) for layer in replaced(student).values() for p in layer.parameters()}
    matrices = {id(m.weight) for m in student.modules() if isinstance(m, nn.Linear)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
        with warnings.catch_warnings():  # peft asks transformers for something that is deprecated
            warnings.simplefilter("ignore", FutureWarning)
            student = get_peft_model(student, config)
    for p in student.parameters():
        if id(p) in new - matrices:
            p.requires_grad_(True)
    return student


def _same(settings: LineariseSettings, written: dict[str, Any], out: Path) -> None:
    """Refuse to continue with other settings."""
    plain = json.loads(json.dumps(settings.to_dict()))
    ours, theirs = ({k: v for k, v in d.items() if k not in FREE_ON_RESUME} for d in (plain, written))
    if changed := differences(ours, theirs):
        raise ValueError(f"{out} was begun with other settings: {'; '.join(changed)}; choose another folder")
