"""The arena's second table: training steps a second and peak memory on byte text, as the sequence grows.

A step is forward, backward and AdamW of the small model on `batch` sequences. On a GPU it runs as the arena trains it:
the whole update as a CUDA graph if the mechanism can ("captured"). Exact softmax is measured twice: as a flash kernel,
and "naive", with the T x T matrix in memory as in the paper's implementation. Peak memory is without the graph.
"""

import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

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
    release,
    spread,
    tensor_bytes,
    time_beside,
)
from subquad.mechanisms import mechanism
from subquad.mechanisms.base import Mixer
from subquad.models import Classifier
from subquad.models.blocks import Block
from subquad.ops.rotary import Turns
from subquad.studies.columns import plain_table
from subquad.studies.lra.arena import BUSY
from subquad.studies.lra.recipes import directions, model_of
from subquad.studies.results import EfficiencyRow, EfficiencyTable, save, set_aside
from subquad.tasks.lra.pack import SUFFIX
from subquad.tasks.lra.task import SMALL
from subquad.tasks.lra.text import stored
from subquad.training.capture import Captured
from subquad.training.task import Batch

NAIVE = "softmax, naive"
LENGTHS = (1024, 2048, 3072, 4096, 8192, 16384)
BATCH = 32
LIMIT = {"cuda": 5.0, "cpu": 30.0}  # skip a length if a step is expected to take more seconds
SAFE = 0.8  # of the free memory


def _naive(mix: Mixer) -> Callable[..., Tensor]:
    """The definition of a mechanism as a function that a block can call."""

    def forward(x: Tensor, lengths: Tensor | None = None, turns: Turns | None = None) -> Tensor:  # noqa: ARG001
        return mix.reference(x, lengths)

    return forward


class Step(Subject):
    """A training step of a whole model, measured in the same way as a mechanism."""

    def __init__(self, name: str, shape: Shape, tokens: Tensor):
        self.name, self.shape = name, shape
        torch.manual_seed(0)
        named = "softmax" if name == NAIVE else name
        fields = {**SMALL, **model_of("text", named, "small"), "dropout": 0.0, "max_length": shape.length}
        self.model = Classifier(vocab=256, classes=2, **fields).to(shape.device)
        if name == NAIVE:
            for block in self.model.modules():
                if isinstance(block, Block):
                    block.mixer.forward = _naive(block.mixer)  # type: ignore[method-assign]
        self.mix = self.model  # type: ignore[assignment]
        self.x = tokens.to(shape.device)
        self.batch = {"tokens": self.x, "labels": (torch.arange(shape.batch) % 2).to(shape.device)}
        self.update: Callable[[Batch], bool] = self._update
        cuda = torch.device(shape.device).type == "cuda"
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=cuda, capturable=cuda)

    def training(self) -> None:
        self.model.train()
        self.update(self.batch)

    def _update(self, batch: Batch) -> bool:
        kind = torch.device(self.shape.device).type
        half = torch.autocast(kind, torch.bfloat16) if self.shape.dtype == "bfloat16" else contextlib.nullcontext()
        with half:
            loss = self.model.loss(batch["tokens"], batch["labels"])
        loss.backward()
        self.optimiser.step()
        self.model.zero_grad(set_to_none=True)
        return True

    def _changed(self) -> list[Tensor]:
        held = [t for state in self.optimiser.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *held]

    def capture(self) -> bool:
        """Run updates as a CUDA graph from now on; False if the mechanism cannot be captured."""
        captured = Captured(self._update, self._changed)
        try:
            captured(self.batch)
        except ValueError:
            return False
        self.update = captured
        return True

    def own_bytes(self) -> int:
        return tensor_bytes([*self._changed(), self.x])


def efficiency(
    mechanisms: Sequence[str],
    out: Path,
    console: Console,
    *,
    device: str = "auto",
    lengths: Sequence[int] = LENGTHS,
    batch: int = BATCH,
    dtype: str | None = None,
) -> EfficiencyTable:
    """Measure, write `out` after each row, and return what it holds."""
    if not lengths or not counts(lengths):
        refuse("lengths", list(lengths), "integers of at least 1")
    check_count("batch", batch)
    place = available(device)
    free = free_bytes(place)
    if 16 * SMALL["dim"] * batch * min(lengths) > free or batch * max(lengths) > free:
        refuse("batch", batch, f"a smaller one, or smaller lengths: {readable(free)} of memory are free")
    cuda = torch.device(place).type == "cuda"
    dtype, limit = dtype or ("bfloat16" if cuda else "float32"), LIMIT["cuda" if cuda else "cpu"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(out.parent, BUSY):
        text, source = byte_text(batch * max(lengths))
        set_aside(out, console)
        settings = {"batch": batch, "dtype": dtype, "text": source, "lengths": list(lengths)}
        results = EfficiencyTable(**origin(place), settings=settings)
        names = [NAIVE, "softmax", *(name for name in mechanisms if name != "softmax")]
        try:
            for length in sorted(lengths):
                tokens = text[: batch * length].view(batch, length)
                shape = Shape(length=length, batch=batch, causal=False, device=place, dtype=dtype)
                for name in names:
                    row = _row(name, shape, tokens, results.rows, limit)
                    release(place)
                    results.rows.append(row)
                    save(results, out)
                    figures = row.skipped or f"{row.steps_per_second:.3g} steps/s, {readable(row.peak_bytes or 0)}"
                    console.print(f"{name} at {length:,}: {figures}", highlight=False, markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            results.interrupted = True
        save(results, out)
    return results


def byte_text(count: int) -> tuple[Tensor, str]:
    """(`count` bytes, their source): reviews if they are on this machine, else random letters. Downloads nothing."""
    here = generated()
    if not (files.find(imdb.FOLDER) or any((here / "imdb").glob("*.npy")) or (here / f"imdb{SUFFIX}").exists()):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(97, 123, (count,), generator=generator, dtype=torch.uint8), "random letters"
    text = torch.from_numpy(stored()["text"][:count].copy())
    return text.repeat(-(-count // len(text)))[:count], "IMDb reviews"


def _row(name: str, shape: Shape, tokens: Tensor, rows: Sequence[EfficiencyRow], limit: float) -> EfficiencyRow:
    row = EfficiencyRow(mechanism=name, length=shape.length, skipped=_too_much(name, shape, rows, limit))
    if row.skipped is not None:
        return row
    try:
        step = Step(name, shape, tokens)
        peak, slow = first_run(step)
        row.captured = torch.device(shape.device).type == "cuda" and step.capture()
        times, _ = time_beside({"training": step.training}, shape.device, None, 0.5, 8, slow=slow, wait=False)
        row.step_ms, row.peak_bytes = spread(times["training"]), peak
        row.steps_per_second = 1000 / statistics.median(times["training"])
    except (torch.OutOfMemoryError, MemoryError):
        row.skipped = "out of memory"
    except Exception as error:
        row.skipped = f"{type(error).__name__}: {first_line(error)}"
    return row


def _too_much(name: str, shape: Shape, rows: Sequence[EfficiencyRow], limit: float) -> str | None:
    """Why to skip a row, judged by the cost of the length before; None if it should be measured."""
    last = next((row for row in reversed(rows) if row.mechanism == name), None)
    if last is None:
        return None
    if last.steps_per_second is None or last.peak_bytes is None:
        return f"not tried: {last.skipped}".replace("not tried: not tried", "not tried")
    cls = mechanism("softmax" if name == NAIVE else name.partition("+")[0])
    seconds = grown(1 / last.steps_per_second, last.length, shape.length, cls.exponent)
    size = grown(last.peak_bytes, last.length, shape.length, 2.0 if name == NAIVE else cls.memory)
    if seconds > limit and seconds > SLOW:
        return f"about {seconds:.0f} s a step; the limit is {limit:.0f} s"
    free = SAFE * free_bytes(shape.device)
    return f"about {readable(size)}, {readable(free)} can be used" if size > free else None


def efficiency_tables(results: EfficiencyTable) -> list[Table]:
    """Steps a second and memory by length, and both relative to naive and to flash softmax at one length."""
    rows = {(row.mechanism, row.length): row for row in results.rows}
    names, lengths = list(dict.fromkeys(row.mechanism for row in results.rows)), sorted({n for _, n in rows})
    settings = results.settings
    about = f"{settings['text']}, batch {settings['batch']}, {settings['dtype']}, {results.machine['device']}"
    shared, over = {}, []
    for other, label in ((NAIVE, "naive"), ("softmax", "flash")):
        measured = [row.length for row in results.rows if row.mechanism == other and row.steps_per_second]
        shared[other] = 4096 if 4096 in measured else max(measured, default=0)  # 4,096 as in the paper, or the longest
        over.append(f"{shared[other]:,} over {label}" if shared[other] else f"over {label}")
    tables = []
    for title, field, scale in (
        ("training steps a second", "steps_per_second", 1.0),
        ("peak memory, GB", "peak_bytes", 1e9),
    ):
        columns = ["mechanism", *(f"{length:,}" for length in lengths), *over]
        table = plain_table(f"{title}: {about}", columns, folds=over)
        figures = {at: getattr(row, field) for at, row in rows.items()}
        for name in names:
            ours = [figures.get((name, length)) for length in lengths]
            cells = ["-" if value is None else f"{value / scale:.3g}" for value in ours]
            for other, length in shared.items():
                mine, theirs = figures.get((name, length)), figures.get((other, length))
                cells.append("-" if mine is None or theirs is None else f"{mine / theirs:.2f}")
            table.add_row(name, *cells)
        table.caption, table.caption_justify = directions(names) or None, "left"
        tables.append(table)
    return tables
