"""Generation measured: images or tokens a second, latency a token, bytes of state a stream.

Times are of the whole loop, sampling included, after the step was compiled and captured. All mechanisms run at the same
batch sizes, and each also runs at the largest batch that fits into memory.
"""

import itertools
import platform
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from subquad.machine import commit
from subquad.measure.cost import DTYPES, first_line, once
from subquad.models import LanguageModel
from subquad.models.decoding import Loop, decoder_of, values_of
from subquad.models.footprint import bytes_per_stream, largest_batch
from subquad.models.generation import UNROLL
from subquad.models.sampling import Sampling
from subquad.models.state import leaves, positions
from subquad.studies.results import save
from subquad.studies.settings import GenerationSettings
from subquad.tasks.images import Images

MODELS: dict[str, dict[str, Any]] = {  # "Transformers are RNNs", §4.2
    "mnist": {"depth": 8, "length": 784},
    "cifar10": {"depth": 16, "length": 3072},
}
START = 256  # the token before the first pixel

Figures = dict[str, Any]


def paper_model(
    name: str, mechanism: Any = "linear", device: Any = "cpu", dtype: Any = None, depth: int | None = None
) -> LanguageModel:
    """The image model of the paper with any mechanism; `depth` layers instead of the paper's."""
    torch.manual_seed(0)
    size = {"depth": depth or MODELS[name]["depth"], "max_length": MODELS[name]["length"]}
    model = Images(name).make_model({**Images.model, **size, "mechanism": mechanism})
    return model.to(device, dtype).eval()


def make_loop(
    model: Any, batch: int, capacity: int, *, compile: bool = False, lanes: int = 1, unroll: int = 1, seed: int = 0
) -> Loop:
    """A loop whose streams hold only the start token, the last of the vocabulary."""
    device = model.device
    state = decoder_of(model).init_state(batch, capacity)
    token = torch.full((batch,), model.config.embedding.vocab - 1, device=device)
    seeds = torch.arange(batch, device=device) + seed
    values = values_of(model)
    outside = tuple(range(values - 1, values)) if values == model.config.embedding.vocab else ()
    return Loop(model, state, token, seeds, Sampling(exclude=outside), compile=compile, lanes=lanes, unroll=unroll)


def rewind(loop: Loop, start: int, position: int = 0) -> None:
    """Reset the loop in place to the first token, or set it to a position as if that many tokens had been read."""
    if position == 0:
        fresh = loop.decoder.init_state(1, 1)
        for (_, tensor), (_, first) in zip(leaves(loop.state), leaves(fresh), strict=True):
            tensor.copy_(first if first.shape[1:] == tensor.shape[1:] else torch.zeros_like(tensor[:1]))
    for counter in positions(loop.state):
        counter.fill_(position)
    loop.token.fill_(start)


def run_steps(loop: Loop, steps: int, out: Tensor | None = None) -> Tensor:
    out = torch.empty(steps, len(loop.token), dtype=torch.int64, device=loop.token.device) if out is None else out
    for i, (token, _) in enumerate(loop.advance(steps)):
        out[i] = token
    return out


def seconds(loop: Loop, steps: int) -> float:
    """Time of `steps` steps from where the loop stands."""
    return once(partial(run_steps, loop, steps), str(loop.token.device)) / 1000


def measure(
    model: Any,
    batch: int,
    length: int,
    *,
    compile: bool = False,
    lanes: int = 1,
    unroll: int = 1,
    at: Sequence[int] | None = None,
    steps: int = 16,
) -> Figures:
    """Figures of generating `length` tokens in `batch` streams.

    at: time only `steps` steps at each of these positions and integrate by the trapezium rule, for loops that would
    take too long. The figures say so.
    """
    begun = time.perf_counter()
    loop = make_loop(model, batch, length, compile=compile, lanes=lanes, unroll=unroll)
    start = int(loop.token[0])
    run_steps(loop, min(length, loop.warm + 2 * loop.group + (-loop.warm) % loop.group))
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    prepared = time.perf_counter() - begun
    times: list[float] = []
    if at is None:
        rewind(loop, start)
        total, how = seconds(loop, length), "whole loop"
    else:
        for position in at:
            rewind(loop, start, min(position, length - steps))
            times.append(seconds(loop, steps) / steps)
        area = float(torch.trapezoid(torch.tensor(times), torch.tensor(at, dtype=torch.float32)))
        total = length * (area / (at[-1] - at[0]) if len(at) > 1 else times[0])
        how = f"{steps} steps at positions {list(at)}, integrated"
    return {
        "batch": batch,
        "length": length,
        "sequences_per_second": batch / total,
        "tokens_per_second": batch * length / total,
        "milliseconds_per_step": 1000 * total / length,
        "loop_seconds": total,
        "timed": how,
        "milliseconds_at": [1000 * spent for spent in times],
        "bytes_of_state_per_stream": bytes_per_stream(model, length),
        "captured": loop.graph is not None,
        "compiled": compile,
        "lanes": len(loop.lanes),
        "preparation_seconds": prepared,
    }


def sweep(options: GenerationSettings) -> Iterator[Figures]:
    """Every mechanism at every length, at each batch and at the largest that its memory allows, up to `most`."""
    shape = {name: getattr(options, name) for name in ("dim", "depth", "heads")}
    batches = [int(batch) for batch in options.parts("batches")]
    for name, length in itertools.product(options.names(), map(int, options.parts("lengths"))):
        model = LanguageModel(vocab=START + 1, mechanism=name, max_length=length, **shape)
        model = model.to(options.device, DTYPES[options.dtype]).eval()
        biggest, steps = min(options.most, largest_batch(model, length)), min(options.steps, length)
        at = sorted({0, length // 4, length // 2, 3 * length // 4, length - steps})
        for batch in sorted({*(b for b in batches if b <= biggest), max(1, biggest)}):
            row: Figures = {"mechanism": name, "largest_batch": batch >= biggest, "batch": batch, "length": length}
            try:
                if biggest < 1:
                    raise MemoryError("not one stream fits into memory")
                row |= measure(model, batch, length, compile=options.compile, unroll=UNROLL, at=at, steps=steps)
            except (RuntimeError, MemoryError) as error:
                row["error"] = first_line(error)
            yield row


def bench(console: Console, out: Path, options: GenerationSettings) -> Figures:
    """`sweep` with a line printed for each figure, written to `out` as JSON."""
    figures: Figures = facts(options.device)
    figures |= {**{name: getattr(options, name) for name in ("dim", "depth", "heads", "dtype")}, "rows": []}
    for row in sweep(options):
        figures["rows"].append(row)
        mark = "*" if row["largest_batch"] else " "
        line = f"{row['mechanism']:15s} length {row['length']:6d}  batch {row['batch']:5d}{mark} {row.get('error', '')}"
        if "error" not in row:
            line += f"{row['sequences_per_second']:10.2f} sequences/s {row['tokens_per_second']:11.0f} tokens/s "
            line += f"{row['milliseconds_per_step']:9.3f} ms a token  {row['bytes_of_state_per_stream']:,} bytes of "
            line += "state a stream"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    save(figures, out)
    console.print(f"* the largest batch that memory, or {options.most} streams, allows; figures: {out}", soft_wrap=True)
    return figures


def facts(device: str = "cpu") -> Figures:
    """The device and the versions that figures were measured with."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
