"""The arena's second table: training steps a second and peak memory on byte text, as the sequence grows.

A step is forward, backward and AdamW of the small model on `batch` sequences, on a GPU as the arena trains it: with
gradients from a CUDA graph where a mechanism can ("captured"). Exact softmax stands there twice: as a flash kernel, and
"naive", with the T x T matrix in memory as in the paper's implementation. Peak memory is without the graph.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from subquad.checks import check_count, counts, refuse
from subquad.data import files, imdb
from subquad.data.generated import generated
from subquad.disk import lock_folder
from subquad.machine import available, free_bytes, origin, readable
from subquad.measure.cost import (
    SLOW,
    Shape,
    Subject,
    first_line,
    first_run,
    grown,
    spread,
    tensor_bytes,
    time_beside,
)
from subquad.mechanisms import mechanism
from subquad.models import Classifier
from subquad.models.blocks import Block
from subquad.studies.lra.arena import BUSY
from subquad.studies.lra.recipes import mixer
from subquad.studies.results import save, set_aside
from subquad.tasks.lra.pack import SUFFIX
from subquad.tasks.lra.task import SMALL
from subquad.tasks.lra.text import stored
from subquad.training.capture import Captured
from subquad.training.task import Batch, Loss

Json = dict[str, Any]
NAIVE = "softmax, naive"
LENGTHS = (1024, 2048, 3072, 4096, 8192, 16384)
BATCH = 32
LIMIT = {"cuda": 5.0, "cpu": 30.0}  # seconds that a step may be expected to take
SAFE = 0.8  # of the free memory


class Step(Subject):
    """A training step of a whole model, measured as a mechanism is."""

    def __init__(self, name: str, shape: Shape, tokens: Tensor):
        self.name, self.shape = name, shape
        torch.manual_seed(0)
        named = "softmax" if name == NAIVE else name
        fields = {**SMALL, "mechanism": mixer("text", named), "dropout": 0.0, "max_length": shape.length}
        self.model = Classifier(vocab=256, classes=2, **fields).to(shape.device)
        if name == NAIVE:
            for block in self.model.modules():
                if isinstance(block, Block):
                    block.mixer.forward = block.mixer.reference  # type: ignore[method-assign,assignment]
        self.mix = self.model  # type: ignore[assignment]
        self.x = tokens.to(shape.device)
        self.batch = {"tokens": self.x, "labels": (torch.arange(shape.batch) % 2).to(shape.device)}
        self.gradients: Callable[[Batch], Loss] = self._gradients
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=shape.device != "cpu")

    def training(self) -> None:
        self.model.train()
        self.gradients(self.batch)
        self.optimiser.step()
        self.model.zero_grad(set_to_none=not isinstance(self.gradients, Captured))

    def _gradients(self, batch: Batch) -> Loss:
        kind = torch.device(self.shape.device).type
        half = torch.autocast(kind, torch.bfloat16) if self.shape.dtype == "bfloat16" else contextlib.nullcontext()
        with half:
            loss = self.model.loss(batch["tokens"], batch["labels"])
        loss.backward()
        return Loss(loss.detach(), loss.new_ones(()))

    def capture(self) -> bool:
        """From now on a graph computes the gradients, unless something in the mechanism waits for the GPU."""
        captured = Captured(self._gradients, self.model)
        try:
            captured(self.batch)
        except ValueError:
            return False
        self.gradients = captured
        return True

    def own_bytes(self) -> int:
        held = [t for state in self.optimiser.state.values() for t in state.values() if isinstance(t, Tensor)]
        return tensor_bytes([*self.model.parameters(), *self.model.buffers(), self.x, *held])


def efficiency(
    mechanisms: Sequence[str],
    out: Path,
    console: Console,
    *,
    device: str = "auto",
    lengths: Sequence[int] = LENGTHS,
    batch: int = BATCH,
    dtype: str | None = None,
) -> Json:
    """Measure, write `out` after each row, and return what it holds."""
    if not lengths or not counts(lengths):
        refuse("lengths", list(lengths), "integers of at least 1")
    check_count("batch", batch)
    place = available(device)
    free, tokens = free_bytes(place), batch * min(lengths)
    if 16 * SMALL["dim"] * tokens > free or batch * max(lengths) > free:
        refuse("batch", batch, f"a smaller one, or smaller lengths: {readable(free)} of memory are free")
    dtype = dtype or ("bfloat16" if torch.device(place).type == "cuda" else "float32")
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(out.parent, BUSY):
        return _measure(mechanisms, out, console, place, lengths, batch, dtype)


def _measure(
    mechanisms: Sequence[str], out: Path, console: Console, place: str, lengths: Sequence[int], batch: int, dtype: str
) -> Json:
    kind = torch.device(place).type
    text, source = byte_text(batch * max(lengths))
    set_aside(out, console)
    results: Json = {
        "kind": "lra-efficiency",
        **origin(place),
        "settings": {"batch": batch, "dtype": dtype, "text": source, "lengths": list(lengths)},
        "rows": [],
        "interrupted": False,
    }
    names = [NAIVE, "softmax", *(name for name in mechanisms if name != "softmax")]
    try:
        for length in sorted(lengths):
            tokens = text[: batch * length].view(batch, length)
            shape = Shape(length=length, batch=batch, causal=False, device=place, dtype=dtype)
            for name in names:
                row = _row(name, shape, tokens, results["rows"], LIMIT[kind])
                results["rows"].append(row)
                save(results, out)
                rate = row["steps_per_second"]
                said = row["skipped"] or f"{rate:.3g} steps/s, {readable(row['peak_bytes'])}"
                console.print(f"{name} at {length:,}: {said}", highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        results["interrupted"] = True
    save(results, out)
    return results


def byte_text(count: int) -> tuple[Tensor, str]:
    """(so many bytes, where from): reviews where they are, else random letters; nothing is downloaded for this."""
    if not (
        files.find(imdb.FOLDER) or any((generated() / "imdb").glob("*.npy")) or (generated() / f"imdb{SUFFIX}").exists()
    ):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(97, 123, (count,), generator=generator, dtype=torch.uint8), "random letters"
    text = torch.from_numpy(stored()["text"][:count].copy())
    return text.repeat(-(-count // len(text)))[:count], "IMDb reviews"


def _row(name: str, shape: Shape, tokens: Tensor, rows: Sequence[Json], limit: float) -> Json:
    row: Json = {"mechanism": name, "length": shape.length, "steps_per_second": None, "peak_bytes": None}
    row |= {"step_ms": None, "captured": False, "skipped": None}
    reason = _too_much(name, shape, rows, limit)
    if reason is not None:
        return {**row, "skipped": reason}
    try:
        step = Step(name, shape, tokens)
        peak, slow = first_run(step)
        row["captured"] = torch.device(shape.device).type == "cuda" and step.capture()
        times, _ = time_beside({"training": step.training}, shape.device, None, 0.5, 8, slow=slow, wait=False)
        found = spread(times["training"])
        assert found is not None
        row |= {"steps_per_second": 1000 / found["median"], "peak_bytes": peak, "step_ms": found}
    except (torch.OutOfMemoryError, MemoryError):
        row["skipped"] = "out of memory"
    except Exception as error:
        row["skipped"] = f"{type(error).__name__}: {first_line(error)}"
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        if torch.device(shape.device).type == "cuda":
            torch.cuda.empty_cache()
    return row


def _too_much(name: str, shape: Shape, rows: Sequence[Json], limit: float) -> str | None:
    """By what the length before cost."""
    before = [r for r in rows if r["mechanism"] == name]
    if before and before[-1]["skipped"]:
        return f"not tried: {before[-1]['skipped']}".replace("not tried: not tried", "not tried")
    if not before:
        return None
    last, cls = before[-1], mechanism("softmax" if name == NAIVE else name)
    seconds = grown(1 / last["steps_per_second"], last["length"], shape.length, cls.exponent)
    size = grown(last["peak_bytes"], last["length"], shape.length, 2.0 if name == NAIVE else cls.memory)
    if seconds > limit and seconds > SLOW:
        return f"about {seconds:.0f} s a step; the limit is {limit:.0f} s"
    free = SAFE * free_bytes(shape.device)
    return f"about {readable(size)}, {readable(free)} can be used" if size > free else None


def efficiency_tables(results: Json) -> list[Table]:
    """Steps a second and memory by length, and both over those of naive and of flash softmax at the longest shared."""
    rows = {(r["mechanism"], r["length"]): r for r in results["rows"]}
    names = list(dict.fromkeys(r["mechanism"] for r in results["rows"]))
    shared = {other: _longest(results["rows"], other) for other in (NAIVE, "softmax")}
    lengths = sorted({r["length"] for r in results["rows"]})
    settings = results["settings"]
    about = f"{settings['text']}, batch {settings['batch']}, {settings['dtype']}, {results['machine']['device']}"
    tables = []
    for title, key, shape in (
        ("training steps a second", "steps_per_second", "{:.3g}"),
        ("peak memory, GB", "peak_bytes", "{:.3g}"),
    ):
        table = Table(title=f"{title}: {about}", title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("mechanism", no_wrap=True)
        for length in lengths:
            table.add_column(f"{length:,}", justify="right", no_wrap=True)
        for other, label in ((NAIVE, "naive"), ("softmax", "flash")):
            table.add_column(f"{shared[other]:,} over {label}" if shared[other] else f"over {label}", justify="right")
        for name in names:
            found = [rows[name, length][key] if (name, length) in rows else None for length in lengths]
            scale = 1e9 if key == "peak_bytes" else 1
            cells = ["-" if value is None else shape.format(value / scale) for value in found]
            table.add_row(name, *cells, *(_over(rows, name, other, key, shared[other]) for other in shared))
        tables.append(table)
    return tables


def _longest(rows: Sequence[Json], name: str) -> int:
    """At which it was measured; 4,096, the paper's, where it was."""
    found = [r["length"] for r in rows if r["mechanism"] == name and r["steps_per_second"]]
    return 4096 if 4096 in found else max(found, default=0)


def _over(rows: dict[tuple[str, int], Json], name: str, other: str, key: str, length: int) -> str:
    ours, theirs = (rows.get((n, length), {}).get(key) for n in (name, other))
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"
