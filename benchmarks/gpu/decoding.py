"""Kernels of one step, and tokens of captured and kept loops against loops that are not captured.

`whole_models.py` times decoding of a whole model, and `generation.py` that of images.
"""

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import LanguageModel, Sampling, Streams
from subquad.models import decoding, generation, kept, streams
from subquad.models.sampling import Rows, draw_next
from subquad.models.state import leaves
from subquad.ops.cache import cached_attention, cached_attention_step
from subquad.ops.feed_forward import Mixed, feed_forward
from subquad.ops.linear.deferred import GROUP, linear_attention_step_in_place, make_queue, settle
from subquad.ops.linear.spec import Spec
from subquad.ops.rotary import turned, turns
from subquad.ops.row_linear import Norm, row_linear
from subquad.ops.short_conv import short_conv_step

from .bench import DEVICE, Case, Figures, Verdict, draw, graph_ms, poison

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SLACK = 1e-6


def wide(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


def rows(batch: int, width: int, outputs: int, dtype: torch.dtype, norm: Any, activation: Any) -> Verdict:
    found = Verdict()
    x = (draw(batch, 2 * width) + 1).to(dtype)[:, :width]
    w, bias = (draw(outputs, width) / width**0.5).to(dtype), draw(outputs, dtype=dtype)
    residual = None if batch % 2 else draw(batch, outputs, dtype=dtype)
    given = exact = None
    if norm != "none":
        shift = draw(width, dtype=dtype) if norm == "layer" else None
        shift_exact = None if shift is None else shift.double()
        given = Norm((1 + draw(width) / 4).to(dtype), shift, 1e-5, norm)
        exact = Norm(given.weight.double(), shift_exact, 1e-5, norm)
    poison()
    mine, plain = (
        row_linear(x, w, bias, norm=given, activation=activation, residual=residual, impl=impl)
        for impl in ("triton", "torch")
    )
    xd, wd, bd, rd = wide(x, w, bias, residual)
    true = row_linear(xd, wd, bd, norm=exact, activation=activation, residual=rd, impl="torch")
    found.compare("y", mine, plain, true, slack=SLACK)
    return found


def cache(batch: int, capacity: int, heads: int, width: int, dtype: torch.dtype, turning: bool) -> Verdict:
    """Rows of different lengths in a cache whose unwritten part holds NaN."""
    found = Verdict()
    k, v = (draw(batch, capacity, heads, width, dtype=dtype) for _ in range(2))
    position = torch.randint(0, capacity - 1, (batch,), device=DEVICE)
    position[0] = 0 if batch > 1 else capacity - 2
    unwritten = torch.arange(capacity, device=DEVICE) >= position[:, None]
    k[unwritten], v[unwritten] = torch.nan, torch.nan
    qkv = draw(batch, 3 * heads, width, dtype=dtype)
    q, new_k, new_v = qkv.chunk(3, 1)
    by = turns(position[:, None], width) if turning else None
    poison()
    o, *mine = cached_attention_step(q, new_k, new_v, k.clone(), v.clone(), position, by, impl="triton")
    _, *plain = cached_attention_step(q, new_k, new_v, k.clone(), v.clone(), position, by, impl="torch")
    keys, values = (t.nan_to_num(0) for t in plain)
    asking = q if by is None else turned(q[:, None], by)[:, 0]
    exactly = q.double() if by is None else turned(q[:, None].double(), by)[:, 0]
    scores = torch.einsum("bhk,bchk->bhc", exactly, keys.double()) * width**-0.5
    seen = torch.arange(capacity, device=DEVICE) < (position + 1)[:, None]
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    exact = torch.einsum("bhc,bchv->bhv", weights, values.double())
    found.compare("o", o, cached_attention(asking, keys, values, position + 1, impl="torch"), exact, slack=SLACK)
    for ours, theirs in zip(mine, plain, strict=True):
        found.bound("written", float((ours.float().nan_to_num(9) - theirs.float().nan_to_num(9)).abs().max()), 0.02)
    return found


def grouped(batch: int, capacity: int, heads: int, share: int, width: int, dtype: torch.dtype) -> Verdict:
    """Grouped queries: each of the `heads` of keys serves `share` heads of queries."""
    found = Verdict()
    k, v = (draw(batch, capacity, heads, width, dtype=dtype) for _ in range(2))
    q, count = draw(batch, heads * share, width, dtype=dtype), torch.randint(1, capacity, (batch,), device=DEVICE)
    poison()
    mine, plain = (cached_attention(q, k, v, count, impl=impl) for impl in ("triton", "torch"))
    exact = cached_attention(q.double(), k.double(), v.double(), count, impl="torch")
    found.compare("o", mine, plain, exact, slack=SLACK)
    return found


def linear(
    batch: int, heads: int, width: int, dtype: torch.dtype, turning: bool, feature_map: str, queued: bool
) -> Verdict:
    """Nine steps in place, with sums that wait in a queue or not."""
    found, count = Verdict(), 9
    s, z = draw(batch, heads, width, width).abs(), torch.rand(batch, heads, width, device=DEVICE) * 9 + 1
    position = torch.randint(0, 5000, (batch,), device=DEVICE)
    spec = Spec(True, feature_map, feature_map == "identity")
    queue = make_queue(torch.empty(0, device=DEVICE, dtype=dtype), position, heads, width, width) if queued else None
    if queue is not None:
        queue.keys.fill_(torch.nan)
        queue.values.fill_(torch.nan)
    mine, plain, exact = (s.clone(), z.clone()), (s.clone(), z.clone()), (s.double(), z.double())
    poison()
    for n in range(count):
        both, v = draw(batch, 2 * heads, width, dtype=dtype) / 2, draw(batch, heads, width, dtype=dtype)
        at = position + n
        by = turns(at[:, None], width) if turning else None
        o = linear_attention_step_in_place(both, v, *mine, queue, at, spec, by, "triton")
        rough = linear_attention_step_in_place(both, v, *plain, None, at, spec, by, "torch")
        true = linear_attention_step_in_place(both.double(), v.double(), *exact, None, at, spec, by, "torch")
        found.compare("o", o, rough, true, most=2.5, slack=SLACK)
    if queue is not None:
        settle(*mine, queue, count % GROUP, feature_map)
    found.compare("s", mine[0], plain[0], exact[0], most=3, slack=SLACK)
    return found


def angles(width: int) -> Verdict:
    """Cosines and sines of far positions, against the CPU."""
    from subquad.ops import turned_triton

    found, position = Verdict(), torch.tensor([[0], [3], [4099], [1 << 22]], device=DEVICE)
    ours, theirs = turned_triton.turns(position, width, 10000.0), turns(position.cpu(), width)
    for name, a, b in zip(("cos", "sin"), ours, theirs, strict=True):
        found.bound(name, float((a.cpu() - b).abs().max()), 1e-6)
    return found


def taps(dtype: torch.dtype) -> Verdict:
    found, back = Verdict(), torch.tensor([1, 2, 3, 27, 28, 29, 56], device=DEVICE)
    weight, ring = draw(8, 256, dtype=dtype), draw(100, 56, 256, dtype=dtype)
    other, position = ring.clone(), torch.randint(0, 999, (100,), device=DEVICE)
    for n in range(60):
        x = draw(100, 256, dtype=dtype)
        ours, _ = short_conv_step(x, weight, back, ring, position + n, inplace=True, impl="triton")
        exact, _ = short_conv_step(x.double(), weight.double(), back, other.double(), position + n, impl="torch")
        plain, _ = short_conv_step(x, weight, back, other, position + n, inplace=True, impl="torch")
        found.compare("y", ours, plain, exact, slack=SLACK)
    found.expect("ring", torch.equal(ring, other))
    return found


SAMPLINGS: dict[str, list[Sampling]] = {
    "plain": [Sampling()], "cool": [Sampling(temperature=0.8)], "greedy": [Sampling(temperature=0)],
    "mixed": [
        Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, min_p=0.05), Sampling(top_k=5, top_p=0.9),
        Sampling(repetition_penalty=1.7, exclude=(3, 5)), Sampling(temperature=0, exclude=(0,)),
    ],
}  # fmt: skip


def draws(values: int, dtype: torch.dtype, sampling: str) -> Verdict:
    """The same tokens as torch draws, but where a draw falls between two by rounding."""
    found, batch = Verdict(), 48
    some = SAMPLINGS[sampling]
    each = Rows.of(some if len(some) == 1 else some * (batch // len(some)), values, torch.device(DEVICE))
    seeds, logits = torch.arange(batch, device=DEVICE), (3 * draw(batch, values)).to(dtype)
    seen, stop = torch.rand(batch, values, device=DEVICE) < 0.1, torch.tensor([1, 2], device=DEVICE)
    made = []
    for impl in ("triton", "torch"):
        token, done = torch.zeros(batch, device=DEVICE).long(), torch.zeros(batch, device=DEVICE).bool()
        logprob = torch.zeros(batch, device=DEVICE)
        draw_next(logits, each, seeds, seeds * 7, seen, token, done, stop, logprob, impl)
        made.append((token, logprob))
    (ours, ours_log), (theirs, theirs_log) = made
    same = ours == theirs
    found.bound("tokens that differ", float((~same).double().mean()), 1 / batch)
    found.bound("logprob", float((ours_log - theirs_log)[same].abs().max()), 1e-4)
    return found


def feeding(dim: int, norm: Any, pre: bool, activation: Any) -> Verdict:
    found, batch = Verdict(), 5000

    def make(*size: int) -> Tensor:
        scale = size[-1] ** 0.5 if len(size) > 1 and size[0] != batch else 4
        return (draw(*size) / scale).bfloat16()

    shift = make(dim) if norm == "layer" else None
    parts = (make(batch, dim), make(4 * dim, dim), make(4 * dim), make(dim, 4 * dim), make(dim), 1 + make(dim), shift)
    post = None if pre else 1 + make(dim)
    mixed = Mixed(make(batch, dim), make(dim, dim), make(dim), post, None if pre or norm == "rms" else make(dim))

    def run(given: Any, other: Mixed, impl: Any) -> Tensor:
        return feed_forward(*given, eps=1e-5, activation=activation, norm=norm, pre=pre, mixed=other, impl=impl)

    poison()
    ours = run(parts, mixed, "triton")
    found.compare("y", ours, run(parts, mixed, "torch"), run(wide(*parts), Mixed(*wide(*mixed)), "torch"), slack=SLACK)
    found.expect("differs the second time", all(torch.equal(ours, run(parts, mixed, "triton")) for _ in range(5)))
    return found


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Without captured steps."""
    with contextlib.ExitStack() as stack:
        for module in (decoding, generation, streams):
            stack.enter_context(patch.object(module, "captures", lambda _: False))
        yield


MODELS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear", "positions": "rotary"},
    "softmax": {"mechanism": "softmax", "positions": "rotary"},
    "local": {"mechanism": ("local", {"window": 16}), "positions": "rotary"},
    "post": {"mechanism": "linear", "norm_position": "post", "activation": "relu"},
    "taps": {"mechanism": "linear", "taps": (1, 2, 5), "positions": "learned", "max_length": 400},
    "deltanet": {"mechanism": "gated_deltanet"},
    "swiglu": {"mechanism": ["linear", "softmax"], "activation": "swiglu", "norm": "rms", "positions": "rotary"},
}


def make_model(name: str, dtype: torch.dtype = F32) -> Any:
    torch.manual_seed(0)
    model = LanguageModel(vocab=97, dim=64, depth=2, heads=4, **MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(DEVICE, dtype).eval()


def tokens(name: str, dtype: torch.dtype, batch: int, steps: int = 100) -> Verdict:
    """A kept loop writes what a new one writes, with the same state; in float32 also what an eager one writes."""
    found, model = Verdict(), make_model(name, dtype)
    prompt = torch.randint(97, (batch, 11), device=DEVICE)
    how: dict[str, Any]
    for how in ({"temperature": 0.0}, {"seed": 5}, {"seed": 7, "top_k": 10, "temperature": 0.8, "stop": 3}):
        with eager():
            plain = model.generate(prompt, steps, full=True, **how)
        first, second = (model.generate(prompt, steps, full=True, **how) for _ in range(2))
        model.generate(prompt.flip(0), steps, full=True, **{**how, "seed": 99})
        third = model.generate(prompt, steps, full=True, **how)
        for again in (second, third):
            found.expect("kept tokens", torch.equal(first.tokens, again.tokens))
            pairs = zip(leaves(first.state), leaves(again.state), strict=True)
            found.expect("kept state", all(torch.equal(a, b) for (_, a), (_, b) in pairs))
        apart = float((plain.tokens != first.tokens).double().mean())
        found.bound("tokens that differ", apart, 0.0 if dtype == F32 else 1.0)  # in 16 bits a draw may flip
    continued = [model.generate(first.tokens[:, -1:], 20, state=first.state, seed=3) for _ in range(2)]
    found.expect("continued", torch.equal(*continued))
    return found


def together() -> Verdict:
    """A stream does not depend on others that come and go, nor on a kept loop."""
    found, model, runs = Verdict(), make_model("softmax"), []
    for _ in range(2):
        running, out = Streams(model, slots=4, capacity=200), []
        numbers = running.admit([[1, 2, 3], [4, 5]], seed=[1, 2])
        for n in range(30):
            out.append(dict(running.step()))
            if n == 10:
                running.admit([[9]], seed=4, sampling=Sampling(temperature=0.5, repetition_penalty=1.2))
            if n == 20:
                running.retire(numbers[1])
        runs.append(out)
        del running
    lone = model.generate([1, 2, 3], 30, seed=1).tolist()
    found.expect("second run", runs[0] == runs[1])
    found.expect("alone", [drawn[0] for drawn in runs[0]] == lone)
    found.expect("stream", list(model.stream([1, 2, 3], 30, seed=1)) == lone)
    return found


def changes(name: str) -> Verdict:
    """Kept loops see every change of the weights, and are forgotten with the model."""
    found, model = Verdict(), make_model(name)
    alive: Any = weakref.ref(model)

    def same(label: str) -> Any:
        first, second = (alive().generate([1, 2, 3], 40, seed=1) for _ in range(2))
        with eager():
            plain = alive().generate([1, 2, 3], 40, seed=1)
        found.expect(label, torch.equal(first, second) and torch.equal(first, plain))
        return first

    before = same("start")
    with torch.no_grad():
        model.head.weight.add_(torch.randn_like(model.head.weight))
    found.expect("new weights count", not torch.equal(before, same("changed in place")))
    model.head.weight = torch.nn.Parameter(torch.randn_like(model.head.weight))
    same("replaced")
    model.head.weight.data = torch.randn_like(model.head.weight)
    same("data replaced")
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
    same("loaded")
    model.cpu()
    model.to(DEVICE)
    same("moved")
    model.bfloat16()
    model.generate([1, 2, 3], 40)
    model.float()
    same("cast")
    for n in range(12):
        model.generate([1, 2, 3], 20 + 100 * n)
    kept.forget(model)
    del model
    gc.collect()
    found.expect("the model is freed", alive() is None)
    return found


def threads(name: str) -> Verdict:
    """Four threads generate with one model, each on a stream of its own."""
    found, model = Verdict(), make_model(name)
    wanted = [model.generate([1, 2, 3], 70, seed=seed).tolist() for seed in range(4)]
    right = [0] * 4

    def run(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                right[seed] += model.generate([1, 2, 3], 70, seed=seed).tolist() == wanted[seed]

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    found.expect(f"right texts of ten: {right}", right == [10] * 4)
    return found


@torch.no_grad()
def row_times(count: int, width: int, outputs: int) -> Figures:
    """Microseconds of a product with weights that the cache does not hold, beside the library's."""
    weights = [draw(outputs, width, dtype=B16) for _ in range(24 if count == 1 else 12)]
    x = draw(count, width, dtype=B16)

    def ours() -> None:
        for w in weights:
            row_linear(x, w, impl="triton")

    def library() -> None:
        for w in weights:
            F.linear(x, w)

    each = 1000 / len(weights)
    return {"ours_us": graph_ms(ours, 2) * each, "library_us": graph_ms(library, 2) * each}


NORMS, ACTIVATIONS = ("none", "layer", "rms"), ("none", "gelu", "relu")
SIZES = (
    (1, 768, 2304), (1, 768, 768), (2, 768, 3072), (1, 3072, 768), (5, 48, 40), (8, 256, 1000), (9, 256, 256),
    (16, 768, 2304), (33, 96, 72), (64, 512, 512), (256, 768, 2304), (256, 3072, 768), (300, 200, 100), (1, 11008, 64),
    (3, 768, 8192),
)  # fmt: skip
CACHES = (
    (1, 4500, 12, 64, B16, True), (3, 100, 2, 32, F16, False), (64, 700, 8, 32, B16, True),
    (2, 1000, 4, 128, F32, True), (256, 300, 12, 64, B16, True), (2, 70, 2, 80, B16, True),
)  # fmt: skip
GROUPED = ((1, 4500, 4, 3, 64, B16), (16, 700, 8, 4, 128, B16), (64, 300, 2, 7, 64, F32))
SUMS = (
    (1, 12, 64, B16, True, "elu+1"), (256, 12, 64, B16, True, "elu+1"), (5, 8, 32, F16, False, "relu"),
    (3, 2, 128, F32, True, "elu+1"), (7, 3, 80, B16, True, "identity"), (64, 8, 32, F32, False, "exp"),
)  # fmt: skip
CHECKS = [
    *(
        Case("decoding", rows, (*size, dtype, *how))
        for n, size in enumerate(SIZES)
        for dtype in (B16, F16)
        for how in sorted({(NORMS[n % 3], ACTIVATIONS[n // 2 % 3]), ("layer", "gelu")})
    ),
    *(Case("decoding", cache, given) for given in CACHES),
    *(Case("decoding", grouped, given) for given in GROUPED),
    *(Case("decoding", linear, (*given, queued)) for given in SUMS for queued in (False, True)),
    *(Case("decoding", angles, (width,)) for width in (32, 64, 128)),
    *(Case("decoding", taps, (dtype,)) for dtype in (B16, F32)),
    *(Case("decoding", draws, given) for given in itertools.product((257, 8192, 50257), (B16, F32), SAMPLINGS)),
    *(
        Case("decoding", feeding, given)
        for given in ((256, "layer", False, "relu"), (256, "layer", True, "gelu"), (64, "rms", True, "gelu"))
    ),
    *(Case("decoding", tokens, (name, *how)) for name in MODELS for how in ((F32, 1), (B16, 3), (B16, 40))),
    *(Case("decoding", tokens, (name, kind, 100)) for name in ("linear", "softmax", "taps") for kind in (F32, B16)),
    Case("decoding", together),
    *(Case("decoding", run, (name,)) for run in (changes, threads) for name in ("linear", "softmax")),
]
TIMES = [
    Case("decoding", row_times, (count, *shape))
    for count in (1, 64, 256)
    for shape in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 8192))
]
