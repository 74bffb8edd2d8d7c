"""Cost over length: a layer's time and memory per sample at N = 2^9 .. 2^16, and the time of whole models.

Paper     Katharopoulos et al. 2020, arXiv:2006.16236, §4.1.2: attention forward and backward on made-up input, the
          batch inversely proportional to N, time and peak memory divided by the batch
          Child et al. 2019, arXiv:1904.10509, Table 2: time for an iteration of training with dense, fixed and strided
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.measure.cost import Sample, Shape, Subject, calibrate, first_line, grown, once, peak_bytes, release, spread
from subquad.measure.growth import Growth, amount, exponent
from subquad.mechanisms import build, mechanism
from subquad.studies.results import Json, ScalingRow, to_json
from subquad.tasks.kinds import is_lstm
from subquad.training.capture import Captured
from subquad.training.evaluate import Wired
from subquad.training.precision import AtOnce
from subquad.training.task import Batch, Loss, Task

LENGTHS = tuple(2**n for n in range(9, 17))
DIM, HEADS = 256, 8
REFORMER_4: Mapping[str, Any] = {"rounds": 4, "chunk": 32, "buckets": 64}  # of the paper's baseline
CONTENDERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "linear": ("linear", {}),
    "softmax": ("softmax", {}),
    "reformer-4": ("reformer", REFORMER_4),
    "lstm": ("lstm", {}),
}


class Recurrent(nn.LSTM):
    """One LSTM layer in place of a mixer."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Contender(Subject):
    """A layer with this paper's options, whose time and memory are measured as in `subquad compare`."""

    def __init__(self, label: str, shape: Shape):
        super().__init__("linear", shape)  # for the input and the gradient
        (name, options), self.name = CONTENDERS[label], label
        if is_lstm(name):
            self.mix: Any = Recurrent(shape.dim, shape.dim, batch_first=True)
        else:
            self.mix = build(name, dim=shape.dim, heads=shape.heads, causal=True, **options)
        self.mix.to(self.x.device, self.x.dtype)


def layers(
    *,
    lengths: Sequence[int] = LENGTHS,
    contenders: Sequence[str] = tuple(CONTENDERS),
    tokens: int = 65536,
    dim: int = DIM,
    heads: int = HEADS,
    device: str = "cpu",
    dtype: str = "float32",
    limit: float = 10.0,
    samples: int = 5,
) -> Iterator[ScalingRow]:
    """A row for each contender and length, forward + backward: time and peak memory a sample, or why there is none.

    tokens  per batch: a batch holds tokens / N samples
    limit   skip a length if one training step is expected to take more seconds
    """
    for label in contenders:
        if label not in CONTENDERS:
            raise ValueError(f"rows has {label!r}: accepted are {', '.join(CONTENDERS)}")
        before: tuple[int, int, float] | None = None  # length, samples, ms a sample
        for length in sorted(lengths):
            batch = max(1, tokens // length)
            row = ScalingRow(mechanism=CONTENDERS[label][0], label=label, length=length, batch=batch, causal=True)
            expected = 0.0 if before is None else _expected(label, *before, length, batch) / 1000
            if expected > limit:
                row.skipped = f"too slow: about {expected:.2g} s for a step, the limit is {limit:g} s"
            else:
                shape = Shape(length=length, dim=dim, heads=heads, batch=batch, device=device, dtype=dtype)
                try:
                    _measure(row, shape, samples)
                    before = length, batch, row.training_ms.median if row.training_ms else 0.0
                except (torch.OutOfMemoryError, MemoryError):
                    row.skipped = "out of memory"
                except RuntimeError as error:  # does not affect the other lengths
                    row.error = first_line(error)
            yield row
            release(device)


def _measure(row: ScalingRow, shape: Shape, samples: int) -> None:
    """Measure time and peak memory, both divided by the number of sequences in the batch."""
    subject = Contender(row.label, shape)
    row.peak_bytes = peak_bytes(subject) // shape.batch
    how = calibrate(subject.training, shape.device)
    row.training_ms = spread([once(subject.training, shape.device, how) / shape.batch for _ in range(samples)])


def _expected(label: str, before: int, samples: int, ms: float, length: int, batch: int) -> float:
    """The expected ms of a training step, from the time of a sample at the length before."""
    name, _ = CONTENDERS[label]
    if is_lstm(name):  # its steps run one after another, however many samples there are
        return grown(ms * samples, before, length, 1.0)
    return grown(ms, before, length, mechanism(name).exponent) * batch


def growth(rows: Sequence[ScalingRow]) -> list[Growth]:
    """Exponents of time and memory a sample over the four longest lengths that were measured."""
    growths = []
    for label in dict.fromkeys(row.label for row in rows):
        timed = [row for row in rows if row.label == label and row.training_ms][-4:]
        lengths = [row.length for row in timed]
        time = exponent(lengths, [amount(row, "training_ms") or 0.0 for row in timed])
        memory = exponent(lengths, [row.peak_bytes or 0 for row in timed])
        growths.append(Growth(mechanism=label, time=time, memory=memory, lengths_used=lengths))
    return growths


class Iteration:
    """Forward, backward and update of a task's model on one batch, as in training.

    compile  use torch.compile; capture  all of it from a CUDA graph, like training.capture
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        batch: Batch,
        *,
        precision: str = "bf16",
        compile: bool = False,
        capture: bool = False,
    ):
        self.batch, self.precision = batch, precision
        self.device = next(iter(batch.values())).device
        self.model = model.train()
        self.wired = Wired(task, model)
        if compile:
            self.wired.compile()
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=self.device.type == "cuda", capturable=capture
        )
        at_once = capture and precision == "bf16" and not compile  # as the trainer does
        self.loss = AtOnce(self.wired, torch.bfloat16) if at_once else self.wired
        self.update = Captured(self._update, self._changed) if capture else self._update

    def __call__(self) -> None:
        self.update(self.batch)

    def _update(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss: Loss = self.loss(batch)
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def _changed(self) -> list[Tensor]:
        states = [value for state in self.optimiser.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *states]


def iterations(
    makers: Mapping[str, Callable[[], Iteration]], *, rounds: int = 8, on_line: Callable[[str], None] = lambda _: None
) -> dict[str, Json]:
    """Milliseconds an iteration of each model, and its ratio to the first one's of the same round.

    All are warmed up first; then they take turns, so that a drifting GPU clock affects all of them equally.
    """
    runs: dict[str, Iteration] = {}
    for name, make in makers.items():
        begun = time.perf_counter()
        runs[name] = run = make()
        for _ in range(3):
            run()
        once(run, str(run.device))
        on_line(f"{name}: ready after {time.perf_counter() - begun:.0f} s")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(once(run, str(run.device), Sample(2)))
    yardstick = next(iter(times.values()))
    return {
        name: {
            "iteration_ms": to_json(spread(ours)),
            "ratio": to_json(spread([a / b for a, b in zip(ours, yardstick, strict=True)])),
            "parameters": sum(p.numel() for p in runs[name].model.parameters()),
            "batch": {key: list(tensor.shape) for key, tensor in runs[name].batch.items()},
        }
        for name, ours in times.items()
    }
