"""Kernels of training (rotary, norms, linear layers, small tables, cross-entropy), and captured and compiled updates.

`whole_models.py` compares a whole model with a plain one, and times both.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import LanguageModel
from subquad.ops.column_sums import column_sums
from subquad.ops.cross_entropy import summed_cross_entropy
from subquad.ops.layer_norm import Drop, add_norm
from subquad.ops.lookup import lookup
from subquad.ops.perceptron import perceptron
from subquad.ops.projection import projection
from subquad.ops.rotary import turned_qkv, turns
from subquad.tasks.copy import Copy
from subquad.tasks.text import Text
from subquad.training.config import RunConfig, TrainingConfig
from subquad.training.distributed import Ranks
from subquad.training.evaluate import Wired
from subquad.training.feed import Feed
from subquad.training.loop import Run

from .bench import DEVICE, Case, Figures, Verdict, draw, error, graph_ms, poison

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Call = Callable[[list[Tensor], Any, bool], Tensor | tuple[Tensor, ...]]


def compare(run: Call, parts: list[Tensor], weights: list[Tensor]) -> Verdict:
    """Results and all gradients of run(parts, impl, whether in float64)."""

    def results(impl: str, exact: bool) -> list[Tensor]:
        leaves = [t.detach().clone().to(torch.float64 if exact else t.dtype).requires_grad_() for t in parts]
        poison()
        got = run(leaves, impl, exact)
        got = got if isinstance(got, tuple) else (got,)
        given = [w.to(o.dtype) for w, o in zip(weights, got, strict=False)]
        return [*(o.detach() for o in got), *torch.autograd.grad(got, leaves, given)]

    found = Verdict()
    for n, (a, p, e) in enumerate(
        zip(results("triton", False), results("torch", False), results("torch", True), strict=True)
    ):
        name = "result" if n < len(weights) else "gradient"
        found.compare(name, a, p, e, slack=2e-6)
        found.expect(f"type of {name}", a.dtype == p.dtype)
    return found


def rotary(dtype: torch.dtype, sizes: tuple[int, int, int, int, int], by_row: bool) -> Verdict:
    """Sizes B, T, H, K, V; positions of the tokens, or of the tokens of each row."""
    batch, length, heads, width, value_width = sizes
    at = torch.arange(length, device=DEVICE) + 1000
    at = at + 7 * torch.arange(batch, device=DEVICE)[:, None] if by_row else at
    usual, double = turns(at, width), turns(at, width, torch.float64)
    qkv = draw(batch, length, heads * (2 * width + value_width), dtype=dtype)
    weights = [draw(batch, length, heads, w, dtype=dtype) for w in (width, width, value_width)]
    weights[1] = draw(batch, heads, length, width, dtype=dtype).transpose(1, 2)  # as attention kernels give it

    def run(t: list[Tensor], impl: Any, exact: bool) -> tuple[Tensor, ...]:
        return turned_qkv(t[0], double if exact else usual, heads, heads * width, impl=impl)

    return compare(run, [qkv], weights)


def norm(
    kind: Any, rows: int, dim: int, post: bool, added: bool, out: torch.dtype | None, share: float = 0.0
) -> Verdict:
    parts = [3 * draw(rows, dim), draw(dim) + 1]
    parts += [draw(rows, dim, dtype=B16)] if added else []
    parts += [draw(dim)] if kind == "layer" else []
    drop = Drop(share, torch.randint(2**62, (1,), device=DEVICE)) if share else None

    def run(t: list[Tensor], impl: Any, exact: bool) -> tuple[Tensor, ...]:
        more, bias = t[2] if added else None, t[-1] if kind == "layer" else None
        kinds = {"norm": kind, "out": None if exact else out}
        return add_norm(t[0], more, t[1], bias, 1e-5, **kinds, post=post, drop=drop, impl=impl)

    return compare(run, parts, [draw(rows, dim), draw(rows, dim)])


def cross_entropy(dtype: torch.dtype, rows: int, dim: int, vocab: int) -> Verdict:
    ids, counted = torch.randint(vocab, (rows,), device=DEVICE), torch.rand(rows, device=DEVICE) > 0.2
    parts = [draw(rows, dim, dtype=dtype), draw(vocab, dim, dtype=dtype), draw(vocab, dtype=dtype)]

    def run(t: list[Tensor], impl: Any, exact: bool) -> Tensor:  # noqa: ARG001
        return summed_cross_entropy(t[0], t[1], t[2], ids, counted, 3, impl=impl)

    return compare(run, parts, [torch.ones((), device=DEVICE)])


def feed_forward(activation: Any, rows: int, dim: int, hidden: int, autocast: bool) -> Verdict:
    parts = [draw(rows, dim), draw(hidden, dim) / dim**0.5, draw(hidden), draw(dim, hidden) / hidden**0.5, draw(dim)]
    parts = parts if autocast else [t.bfloat16() for t in parts]

    def run(t: list[Tensor], impl: Any, exact: bool) -> Tensor:
        with torch.autocast(DEVICE, B16, enabled=autocast and not exact):
            return perceptron(t[0], t[1], t[2], t[3], t[4], activation=activation, impl=impl)

    return compare(run, parts, [draw(rows, dim, dtype=B16)])


def linear_layer(rows: int, dim: int, outputs: int, autocast: bool) -> Verdict:
    parts = [draw(rows, dim), draw(outputs, dim) / dim**0.5, draw(outputs)]
    parts = parts if autocast else [t.bfloat16() for t in parts]

    def run(t: list[Tensor], impl: Any, exact: bool) -> Tensor:
        with torch.autocast(DEVICE, B16, enabled=autocast and not exact):
            return projection(t[0], t[1], t[2], impl=impl)

    found = compare(run, parts, [draw(rows, outputs, dtype=B16)])
    ours, plain = (run(parts, impl, False) for impl in ("triton", "torch"))
    found.expect("the same result in each bit", torch.equal(ours, plain))
    return found


def sums(dtype: torch.dtype, rows: int, width: int) -> Verdict:
    """Of whole rows, of parts of rows, and of rows that lie across."""
    found, whole = Verdict(), draw(rows, width + 8, dtype=dtype) + 1
    for x in (whole[:, :width].contiguous(), whole[:, 8:], whole[:, 3 : width + 3], whole.mT.contiguous().mT):
        poison()
        ours = column_sums(x, torch.float32, impl="triton")
        found.compare("sums", ours, x.sum(0, dtype=torch.float32), x.double().sum(0), slack=1e-6)
        found.expect("the same twice", torch.equal(ours, column_sums(x, torch.float32, impl="triton")))
        found.within("rounded sums", column_sums(x, B16, impl="triton"), x.double().sum(0), 4e-3)
    return found


def table(dtype: torch.dtype, length: int, vocab: int, width: int, places: str) -> Verdict:
    ids = torch.randint(vocab, (3, length), device=DEVICE)
    ids[0] = vocab - 1  # many of one

    def run(t: list[Tensor], impl: Any, exact: bool) -> Tensor:  # noqa: ARG001
        return lookup(ids, *t, beside=places == "beside", impl=impl)

    parts = [draw(vocab, width, dtype=dtype), *([draw(length, width, dtype=dtype)] if places else [])]
    return compare(run, parts, [draw(3, length, 2 * width if places == "beside" else width, dtype=dtype)])


def captured(fields: dict[str, Any], updates: int = 20) -> Verdict:
    """Updates of the trainer, captured as a CUDA graph or not, lead to the same weights."""
    ends, found = [], Verdict()
    for capture in (False, True):
        task = Copy(length=64)
        settings = TrainingConfig(steps=1000, batch=32, capture=capture, precision="bf16")
        model = {"mechanism": "linear", "positions": "learned", "dim": 64, "depth": 2, "heads": 2, **fields}
        ranks = Ranks(torch.device(DEVICE, 0))
        run = Run(task, RunConfig(task=task.name, model=model, training=settings), None, ranks)
        feed = Feed(run.sources["train"], run.order, run.pieces, run.ranks)
        run.wired.train()
        for _ in range(updates):
            run._update(feed, 0.0)
        ends.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        feed.close()
    plain, ours = ends
    found.within("weights", ours, plain, 5e-2 if fields["dropout"] else 1e-2)  # dropout may draw in another order
    return found


def compiled(name: str) -> Verdict:
    """The task's step as one compiled graph, over lengths, against the same step without compiling."""
    from torch._dynamo.testing import CompileCounterWithBackend

    found = Verdict()
    model = LanguageModel(vocab=8192, dim=256, depth=2, heads=4, mechanism=name, positions="rotary").to(DEVICE)
    step, graphs = Wired(Text(), model), CompileCounterWithBackend("inductor")
    step.compile(backend=graphs, fullgraph=True)
    for length in (2048, 4096, 1024, 4096, 2048):
        tokens = torch.randint(8192, (2, length + 1), device=DEVICE)
        batch = {"tokens": tokens, "first": torch.zeros(2, dtype=torch.int64, device=DEVICE)}
        results = []
        for stance in ("default", "force_eager"):
            model.zero_grad()
            with torch.compiler.set_stance(stance), torch.autocast(DEVICE, B16):
                loss = step(batch)
            (loss.total / loss.count).backward()
            results.append((loss.total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (ours, gradients), (plain, plain_gradients) = results
        found.within("loss", ours, plain, 1e-3)
        worst = max(error(a, b) for a, b in zip(gradients, plain_gradients, strict=True))
        found.bound("gradients", worst, 0.1)
    found.bound("graphs", graphs.frame_count, 3)  # a length that was seen before compiles nothing
    return found


ROWS, DIM, HIDDEN = 32768, 768, 3072  # a GPT-2 small; the least time is that of its bytes on an H200


def rotary_times() -> Figures:
    length, heads = 8192, 12
    by = turns(torch.arange(length, device=DEVICE), DIM // heads)
    qkv = draw(ROWS // length, length, 3 * DIM, dtype=B16).requires_grad_()
    weights = [draw(ROWS // length, length, heads, DIM // heads, dtype=B16) for _ in range(3)]
    parts = turned_qkv(qkv, by, heads, DIM)
    return {
        "forward_ms": graph_ms(lambda: turned_qkv(qkv, by, heads, DIM)),
        "backward_ms": graph_ms(lambda: torch.autograd.grad(parts, qkv, weights, retain_graph=True)),
        "least_forward_ms": 0.048,
        "least_backward_ms": 0.072,
    }


def norm_times() -> Figures:
    x, y = draw(ROWS, DIM).requires_grad_(), draw(ROWS, DIM, dtype=B16).requires_grad_()
    w, b = torch.ones(DIM, device=DEVICE).requires_grad_(), torch.zeros(DIM, device=DEVICE).requires_grad_()
    weights = draw(ROWS, DIM), draw(ROWS, DIM, dtype=B16)
    both = add_norm(x, y, w, b, out=B16)
    return {
        "forward_ms": graph_ms(lambda: add_norm(x, y, w, b, out=B16)),
        "backward_ms": graph_ms(lambda: torch.autograd.grad(both, (x, y, w, b), weights, retain_graph=True)),
        "least_forward_ms": 0.072,
        "least_backward_ms": 0.096,
    }


@torch.no_grad()
def gelu_times() -> Figures:
    from subquad.ops import perceptron_triton

    hidden, gradient = draw(ROWS, HIDDEN, dtype=B16), draw(ROWS, HIDDEN, dtype=B16)
    return {
        "forward_ms": graph_ms(lambda: perceptron_triton.gelu(hidden)),
        "torch_ms": graph_ms(lambda: F.gelu(hidden)),
        "backward_ms": graph_ms(lambda: perceptron_triton.backward(hidden, gradient, False)),
        "least_forward_ms": 0.096,
        "least_backward_ms": 0.192,
    }


def linear_layer_times(rows: int, dim: int, outputs: int) -> Figures:
    """The gradients of a linear layer under autocast, by the op and by torch."""
    x, weights = draw(rows, dim, dtype=B16).requires_grad_(), draw(rows, outputs, dtype=B16)
    w, b = (draw(outputs, dim) / dim**0.5).requires_grad_(), draw(outputs).requires_grad_()
    figures: Figures = {}
    ways: tuple[tuple[str, Any], ...] = (("backward_ms", "triton"), ("torch_ms", "torch"))
    for name, impl in ways:
        with torch.autocast(DEVICE, B16):
            y = projection(x, w, b, impl=impl)

        def gradients(y: Tensor = y) -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, (x, w, b), weights, retain_graph=True)

        figures[name] = graph_ms(gradients)
    return figures


@torch.no_grad()
def sums_times(dtype: torch.dtype, rows: int, width: int) -> Figures:
    x = draw(rows, width, dtype=dtype)
    return {
        "ms": graph_ms(lambda: column_sums(x, torch.float32)),
        "torch_ms": graph_ms(lambda: x.sum(0, dtype=torch.float32)),
        "least_ms": x.numel() * x.element_size() / 4.2e9,
    }


def table_times(batch: int, vocab: int, width: int) -> Figures:
    length = ROWS // batch
    ids, weights = torch.randint(vocab, (batch, length), device=DEVICE), draw(batch, length, width)
    leaves = draw(vocab, width).requires_grad_(), draw(length, width).requires_grad_()
    figures: Figures = {"least_ms": weights.numel() / 4.2e9 * 4}
    ways: tuple[tuple[str, Any], ...] = (("", "triton"), ("torch_", "torch"))
    for name, impl in ways:
        y = lookup(ids, *leaves, impl=impl)

        def gradients(y: Tensor = y) -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, leaves, weights, retain_graph=True)

        def forward(impl: Any = impl) -> Tensor:
            return lookup(ids, *leaves, impl=impl)

        figures |= {f"{name}forward_ms": graph_ms(forward), f"{name}backward_ms": graph_ms(gradients)}
    return figures


@torch.no_grad()
def cross_entropy_times(rows: int, vocab: int) -> Figures:
    from subquad.ops import cross_entropy_triton

    logits, ids = draw(rows, vocab, dtype=B16), torch.randint(vocab, (rows,), device=DEVICE)
    counted = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    return {"ms": graph_ms(lambda: cross_entropy_triton.losses_and_gradients(logits, ids, counted, logits))}


TURNED = ((3, 129, 5, 32, 32), (2, 1000, 12, 64, 64), (1, 77, 3, 6, 10), (2, 64, 2, 128, 80))
NORMED = ((1000, 128), (333, 768), (50, 4096), (7, 100))
WAYS = ((False, True, B16), (False, True, None), (True, True, B16), (False, False, B16), (True, True, None))
LOGITS = ((500, 64, 8192), (300, 32, 50257), (100, 16, 10), (64, 16, 16384))
LAYERS = ((1000, 128, 384), (333, 768, 768), (77, 40, 100), (1, 64, 64), (40000, 128, 128))
SUMMED = ((1, 1), (1, 4096), (77, 33), (528, 256), (5000, 128), (32768, 384), (100000, 7), (3000, 4000))
TABLES = ((1, 1, 1), (1000, 256, 128), (5000, 257, 100), (32768, 16, 512), (3000, 512, 33))
SUMS = ((B16, 32768, 128), (B16, 32768, 384), (B16, 32768, 2304), (F32, 528, 256), (F32, 396, 512), (F32, 66, 32768))
PERCEPTRONS = ((1000, 128, 512), (333, 768, 3072), (77, 40, 100))
CAPTURED: tuple[dict[str, Any], ...] = (
    {"norm_position": "post", "activation": "relu", "dropout": 0.0},
    {"mechanism": "softmax", "dropout": 0.0},
    {"dropout": 0.1},
)
CHECKS = [
    *(Case("training", compiled, (name,)) for name in ("linear", "softmax")),
    *(Case("training", captured, (fields,)) for fields in CAPTURED),
    *(Case("training", rotary, given) for given in itertools.product((B16, F16, F32), TURNED, (False, True))),
    *(Case("training", norm, (kind, *size, *way)) for kind in ("layer", "rms") for size in NORMED for way in WAYS),
    *(Case("training", norm, ("layer", *size, post, True, B16, 0.1)) for size in NORMED for post in (True, False)),
    *(Case("training", cross_entropy, (dtype, *size)) for dtype in (B16, F32) for size in LOGITS),
    *(Case("training", linear_layer, (*size, autocast)) for size in LAYERS for autocast in (True, False)),
    *(Case("training", sums, (dtype, *size)) for dtype in (B16, F16, F32) for size in SUMMED),
    *(
        Case("training", table, (dtype, *size, places))
        for dtype, size, places in itertools.product((B16, F16, F32), TABLES, ("", "added", "beside"))
    ),
    *(
        Case("training", feed_forward, (activation, *size, autocast))
        for activation, size, autocast in itertools.product(("gelu", "relu"), PERCEPTRONS, (True, False))
    ),
]
TIMES = [
    Case("training", rotary_times),
    Case("training", norm_times),
    Case("training", gelu_times),
    *(Case("training", linear_layer_times, (ROWS, *size)) for size in ((128, 384), (128, 128), (DIM, 3 * DIM))),
    *(Case("training", sums_times, size) for size in SUMS),
    *(Case("training", table_times, (32, *size)) for size in ((256, 128), (512, 128), (256, 768))),
    Case("training", cross_entropy_times, (4096, 8192)),
    Case("training", cross_entropy_times, (1024, 50304)),
]
