"""Sparse attention on a GPU: correct first, then fast, beside dense attention and FlexAttention.

    PYTHONPATH=src python3 benchmarks/sparse.py --out DIR             about a minute; writes DIR/sparse.json
    PYTHONPATH=src python3 benchmarks/sparse.py --out DIR --tune      adds tile sizes of each pass to it, the best first
    PYTHONPATH=src python3 benchmarks/sparse.py --out DIR --flex      adds FlexAttention, which compiles for minutes

65,536 tokens in all, 16 heads of 64, bfloat16. Times are medians of single calls between device events, over
inputs that are larger than the cache. Processes that use no GPU compile the kernels first. The file is written after
each phase, and phases that would start later than `--seconds` are skipped.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from subquad.machine import commit, tell_commit
from subquad.ops import Block, Dilated, Global, Local, Pattern, Random, Strided, Summary, launch, sparse_attention
from subquad.ops.launch import Plan
from subquad.ops.sparse import api, kernels, triton_path
from subquad.ops.sparse.spec import Inputs, Spec
from subquad.ops.sparse.triton_path import CONFIGS, Config

TOKENS, HEADS, WIDTH = 65536, 16, 64
Patterns = Pattern | Sequence[Pattern]
STRIDED = Local(128, 0) | Strided(128)
FIXED = Block(128) | Summary(128, 32)
LONGFORMER = Local(256) | Global(64)
BIGBIRD = tuple(Block(64, 1, 1) | Global(64) | Random(3, 64, head=h, apart=2, first=1) for h in range(HEADS))
MIXED = Block(48) | Summary(50, 7, 1) | Dilated(5, 3) | Random(2, 24) | Global(3)
BARS: list[tuple[str, Patterns, bool, int, float | None]] = [  # name, pattern, causal, T, ms allowed
    ("strided l=128", STRIDED, True, 16384, 4.5),
    ("strided l=128", STRIDED, True, 65536, 5.5),
    ("fixed l=128 c=32", FIXED, True, 16384, 6.5),
    ("local 512", Local(511, 0), True, 16384, 2.4),
    ("longformer 256+64", LONGFORMER, False, 16384, 4.0),
    ("bigbird 64 r=3", BIGBIRD, False, 16384, None),
]
PATTERNS: list[tuple[str, Patterns, bool]] = list(dict.fromkeys(bar[:3] for bar in BARS))


class Shape(NamedTuple):
    """One full row and, if ragged, a second row of half its length."""

    T: int = 1100
    width: int = WIDTH
    key_heads: int = HEADS
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = False

    def tensors(self, device: str) -> list[Tensor]:
        g = torch.Generator(device).manual_seed(self.T)
        heads = (HEADS, self.key_heads, self.key_heads, HEADS)
        sizes = [(1 + self.ragged, self.T, H, self.width) for H in heads]
        return [torch.randn(size, generator=g, device=device).to(self.dtype) for size in sizes]

    def lengths(self, device: str) -> Tensor | None:
        return torch.tensor([self.T, self.T // 2 + 3], device=device) if self.ragged else None


CHECKS: list[tuple[str, Patterns, bool, Shape]] = [(*one, Shape()) for one in PATTERNS] + [
    ("strided, both ways", STRIDED, False, Shape(1037, key_heads=2, ragged=True)),
    ("fixed, both ways", FIXED, False, Shape(777, width=128, dtype=torch.float16)),
    ("fixed, both ways, columns at once", FIXED, False, Shape(4096)),
    ("fixed, both ways, columns at once", FIXED, False, Shape(4096, width=128, dtype=torch.float16)),
    ("longformer, causal", LONGFORMER, True, Shape(530, width=40, key_heads=1, dtype=torch.float32, ragged=True)),
    ("bigbird, causal", BIGBIRD, True, Shape(1100, key_heads=4)),
    ("mixed", MIXED, False, Shape(701, ragged=True)),
]


class Ahead:
    """Stands for a kernel: compiles it for the arguments of a launch, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


class Hopper:
    """Stands for the driver that Triton asks when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


Run = Callable[..., None]


def each_pass(visit: Callable[[Run, str, tuple[Any, ...]], None]) -> Any:
    """Calls visit(f, kind, arguments) instead of running a pass as f(*arguments)."""

    def visitor(f: Run) -> Run:
        return lambda call, run, *rest: visit(f, run.kind, (call, run, *rest))

    names = ("_run_forward", "_run_dq", "_run_dkv")
    return replaced(triton_path, **{name: visitor(getattr(triton_path, name)) for name in names})


def call_on_cpu(pattern: Patterns, causal: bool, shape: Shape) -> None:
    # without autograd, whose threads do not survive a fork
    q, k, v, w = shape.tensors("cpu")
    lengths = shape.lengths("cpu")
    texts = tuple(p.to_json() for p in ([pattern] * HEADS if isinstance(pattern, Pattern) else pattern))
    for text, draws, shifts, own, shared in api._groups(texts, HEADS, shape.key_heads, True):
        qs, ks, vs, ws = (api._heads(x, h) for x, h in ((q, own), (k, shared), (v, shared), (w, own)))
        x = Inputs(qs, ks, vs, lengths, lengths)
        spec = Spec(text, draws, shifts, causal, shape.width**-0.5, return_lse=False, impl="triton")
        triton_path.backward(x, spec, *triton_path.forward(x, spec), ws, None)


def compile_ahead(job: tuple[str, Patterns, bool, Shape, tuple[str, Config] | None]) -> None:
    """Compiles the kernels of a call, or one of its passes with other tiles, into Triton's cache."""
    _, pattern, causal, shape, tiles = job
    triton.runtime.driver.set_active(Hopper())

    def visit(f: Run, kind: str, args: tuple[Any, ...]) -> None:
        if tiles is None or kind == tiles[0]:
            f(*args)

    def start(_: Any, kernel: Any, given: tuple[Tensor, ...], plan: Callable[[], Plan]) -> None:
        launch.start_plainly(Ahead(kernel), given, plan())

    ahead = {"launch_by_key": start, "_far": Ahead(kernels._far)}
    configs = CONFIGS | ({} if tiles is None else {(tiles[0], 128): tiles[1]})
    with replaced(triton_path, **ahead, CONFIGS=configs), each_pass(visit):
        call_on_cpu(pattern, causal, shape)


def compile_all(jobs: list[Any]) -> dict[str, Any]:
    start = time.perf_counter()
    failed = {}
    # fork before this process uses the GPU: children start fast and never touch the GPU
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("fork")) as pool:
        waiting = {pool.submit(compile_ahead, job): job for job in jobs}
        for done in as_completed(waiting):
            problem = done.exception()
            if problem is not None:
                name = f"{waiting[done][0]} {waiting[done][4]}"
                failed[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
                print("does not compile:", name, failed[name], flush=True)
    seconds = time.perf_counter() - start
    print(f"compiled for {len(jobs)} calls in {seconds:.1f} s", flush=True)
    return {"calls": len(jobs), "seconds": seconds, "failed": failed}


def error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The masked softmax in the type of its inputs; mask [B or 1, H or 1, T, S]."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    s = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    p = torch.softmax(s.masked_fill(~mask, -inf), -1).nan_to_num(0)
    return torch.einsum("bhts,bshd->bthd", p, v)


def gradients(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    x = [y.detach().clone().requires_grad_() for y in (q, k, v)]
    o = f(*x)
    return [o.detach(), *torch.autograd.grad(o, x, w.to(o.dtype))]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN."""
    kept = torch.empty, torch.empty_like

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    torch.empty, torch.empty_like = (poison(make) for make in kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


def check(name: str, pattern: Patterns, causal: bool, shape: Shape) -> dict[str, Any]:
    """Compare values and gradients with float64; at most twice the error of dense flash attention in the same type."""
    q, k, v, w = shape.tensors("cuda")
    lengths = shape.lengths("cuda")
    exact = [x.double() for x in (q, k, v, w)]
    heads = [pattern] if isinstance(pattern, Pattern) else pattern
    mask = torch.zeros(len(q), len(heads), shape.T, shape.T, dtype=torch.bool, device="cuda")
    for b, n in enumerate([shape.T] if lengths is None else lengths.tolist()):
        for h, one in enumerate(heads):
            mask[b, h, :n, :n] = one.dense(n, causal=causal, device=q.device)
    with poisoned():
        ours = partial(sparse_attention, pattern=pattern, causal=causal, lengths=lengths, impl="triton")
        got = gradients(ours, q, k, v, w)
    want = gradients(partial(reference, mask=mask), *exact)
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    if shape.dtype == torch.float32:
        allowed = [1e-5] * 4
    else:
        whole = torch.ones(1, 1, shape.T, shape.T, dtype=torch.bool, device="cuda")
        full = gradients(partial(reference, mask=whole.tril() if causal else whole), *exact)
        flash = gradients(partial(dense, causal=causal), q, k, v, w)
        allowed = [2 * error(a, b) for a, b in zip(flash, full, strict=True)]
    names = ("o", "dq", "dk", "dv")
    return {
        "pattern": name,
        "causal": causal,
        **shape._asdict(),
        "dtype": str(shape.dtype),
        "errors": dict(zip(names, errors, strict=True)),
        "allowed": dict(zip(names, allowed, strict=True)),
        "ok": all(e <= a for e, a in zip(errors, allowed, strict=True)),
    }


def correctness() -> list[dict[str, Any]]:
    rows = []
    for case in CHECKS:
        rows.append(row := check(*case))
        values = ", ".join(f"{n} {e:.1e} of {row['allowed'][n]:.1e}" for n, e in row["errors"].items())
        print(f"{'correct' if row['ok'] else 'WRONG'}: {row['pattern']} {row['dtype']} {values}", flush=True)
    return rows


def milliseconds(f: Callable[[], object], budget: float = 0.2) -> float:
    f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    repeat = max(5, min(50, int(budget / max(time.perf_counter() - start, 1e-5))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for before, after in events:
        before.record()
        f()
        after.record()
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in events)


def tensors(T: int, batch: int | None = None) -> list[Tensor]:
    shape = (TOKENS // T if batch is None else batch, T, HEADS, WIDTH)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(n < 3) for n in range(4)]


def timed(f: Callable[[Tensor, Tensor, Tensor], Tensor], T: int) -> tuple[float, float]:
    """Milliseconds of the forward, and of forward and backward."""
    q, k, v, w = tensors(T)

    def both() -> None:
        torch.autograd.grad(f(q, k, v), (q, k, v), w)

    with torch.no_grad():
        forward = milliseconds(lambda: f(q, k, v))
    return forward, milliseconds(both)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def bars() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    base: dict[tuple[bool, int], tuple[float, float]] = {}
    for name, pattern, causal, T, allowed in BARS:
        if (causal, T) not in base:
            base[causal, T] = timed(partial(dense, causal=causal), T)
        forward, both = timed(partial(sparse_attention, pattern=pattern, causal=causal), T)
        row: dict[str, Any] = {"pattern": name, "causal": causal, "T": T, "forward_ms": forward, "both_ms": both}
        row |= {"bar_ms": allowed, "ok": None if allowed is None else both <= allowed}
        row["dense_forward_ms"], row["dense_both_ms"] = base[causal, T]
        rows.append(row)
        verdict = "" if allowed is None else f"   bar {allowed} {'ok' if row['ok'] else 'MISSED'}"
        theirs = "{:.2f} / {:.2f}".format(*base[causal, T])
        print(f"{name:18s} T={T:6d}  {forward:6.3f} / {both:6.3f} ms   dense {theirs}{verdict}", flush=True)
    return rows


def flex(name: str, pattern: Patterns, causal: bool, T: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads = None if isinstance(pattern, Pattern) else HEADS
    try:
        block = create_block_mask(flex_mask(pattern, causal, T), None, heads, T, T, device="cuda")
        compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block).transpose(1, 2)

        forward, both = timed(call, T)
    except Exception as problem:  # report a peer that fails
        print(f"FlexAttention {name}: {problem}"[:300], flush=True)
        return {"pattern": name, "T": T, "error": f"{type(problem).__name__}: {str(problem)[:200]}"}
    print(f"FlexAttention {name}: {forward:.3f} / {both:.3f} ms", flush=True)
    return {"pattern": name, "T": T, "forward_ms": forward, "both_ms": both}


def flex_mask(pattern: Patterns, causal: bool, T: int) -> Callable[..., Tensor]:
    if isinstance(pattern, Pattern):
        return lambda _b, _h, i, j: pattern.mask(i, j, causal=causal)
    # one mask for each head: these patterns consist of whole blocks of 64
    at = torch.arange(0, T, 64, device="cuda")
    table = torch.stack([one.mask(at[:, None], at[None, :], length=T, causal=causal) for one in pattern])
    return lambda _b, h, i, j: table[h, i // 64, j // 64]


def launches(pattern: Patterns, causal: bool, T: int) -> list[tuple[Run, str, tuple[Any, ...]]]:
    """The passes of one forward and backward, so that each can be run again alone."""
    found: list[tuple[Run, str, tuple[Any, ...]]] = []

    def visit(f: Run, kind: str, args: tuple[Any, ...]) -> None:
        found.append((f, kind, args))
        f(*args)

    with each_pass(visit):
        q, k, v, w = tensors(T)
        torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
    return found


def passes() -> dict[str, dict[str, float]]:
    """Milliseconds of each kernel of a forward and backward, run alone."""
    report = {}
    for name, pattern, causal, T, _ in BARS:
        times: dict[str, float] = {}
        for f, kind, of in launches(pattern, causal, T):
            times[kind] = times.get(kind, 0.0) + milliseconds(partial(f, *of), 0.02)
        report[f"{name} T={T}"] = times
        print(f"{name} T={T}: " + ", ".join(f"{kind} {ms:.3f}" for kind, ms in times.items()), flush=True)
    return report


def first_calls() -> list[dict[str, Any]]:
    """Seconds of the first forward and backward at a new length, after another length was run."""
    rows: list[dict[str, Any]] = []
    for name, pattern, causal in PATTERNS:
        seconds: list[float] = []
        for T in (4096, 7000, 12345, 8192):
            q, k, v, w = tensors(T, batch=2)
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rows.append({"pattern": name, "seconds": seconds[1:], "ok": max(seconds[1:]) < 0.1})
        print(f"first call at a new T, {name}: " + ", ".join(f"{s:.4f}" for s in seconds[1:]) + " s", flush=True)
    return rows


def memory() -> list[dict[str, Any]]:
    """Bytes per token of forward and backward, beyond the inputs; batch 1."""
    rows: list[dict[str, Any]] = []
    for name, pattern, causal in PATTERNS:
        row: dict[str, Any] = {"pattern": name, "bytes_per_token": {}}
        for T in (16384, 32768, 65536):
            q, k, v, w = tensors(T, batch=1)
            gc.collect()  # garbage of an earlier phase must not be freed between the two readings
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
            row["bytes_per_token"][T] = (torch.cuda.max_memory_allocated() - before) / T
            del q, k, v, w
        rows.append(row)
        print(f"memory, {name}: " + ", ".join(f"{T} {n:.0f}" for T, n in row["bytes_per_token"].items()), flush=True)
    return rows


TILES = {  # queries, keys, warps, stages
    "forward": [(128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2),
                (128, 32, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3)],
    "dq": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 4, 3),
           (64, 128, 4, 2), (128, 128, 8, 2), (64, 32, 4, 3)],
    "dkv": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 128, 4, 2),
            (32, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2)],
}  # fmt: skip


def tuning_jobs() -> list[tuple[str, Patterns, bool, Shape, tuple[str, Config]]]:
    jobs = []
    for name, pattern, causal in PATTERNS:
        kinds: dict[str, None] = {}

        def visit(_f: Run, kind: str, _args: tuple[Any, ...], kinds: dict[str, None] = kinds) -> None:
            kinds.setdefault(kind)

        with each_pass(visit):
            call_on_cpu(pattern, causal, Shape(512))
        for kind in kinds:
            tiles = TILES[kind.split("_")[0]]
            jobs += [(name, pattern, causal, Shape(512), (kind, Config(*tile))) for tile in tiles]
    return jobs


def tune(failed: dict[str, Any], seconds: float) -> dict[str, dict[str, list[Any]]]:
    """Milliseconds of every pass with every tile size, the best first."""
    stop = time.perf_counter() + seconds
    report: dict[str, dict[str, list[Any]]] = {}
    for name, pattern, causal, T, _ in BARS:
        found: dict[str, list[Any]] = {}
        for f, kind, of in launches(pattern, causal, T):
            if kind in found or time.perf_counter() > stop:
                continue
            rows = []
            for tile in TILES[kind.split("_")[0]]:
                if f"{name} {(kind, Config(*tile))}" in failed:
                    continue
                with replaced(triton_path, CONFIGS=CONFIGS | {(kind, 128): Config(*tile)}):
                    try:
                        rows.append([milliseconds(partial(f, *of), 0.01), *tile])
                    except Exception as problem:  # skip tiles that do not fit
                        print(f"{kind} {tile}: {str(problem)[:100]}")
            found[kind] = sorted(rows)
            best = "  ".join(f"{tuple(r[1:])} {r[0]:.3f}" for r in found[kind][:4])
            print(f"{name} T={T} {kind:16s} {best}", flush=True)
        report[f"{name} T={T}"] = found
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--commit", help="commit of the running code, if git does not know it")
    parser.add_argument("--keep", type=Path, help="an earlier sparse.json: its figures are not measured again")
    parser.add_argument("--seconds", type=float, default=150.0, help="no phase starts later than this")
    args = parser.parse_args()
    tell_commit(args.commit)
    start = time.perf_counter()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    kept = json.loads(args.keep.read_text()) if args.keep else {}
    calls = [(*one, Shape(), None) for one in PATTERNS] + [(*one, None) for one in CHECKS[len(PATTERNS) :]]
    compiled = kept.get("compiled") or compile_all(calls + (tuning_jobs() if args.tune else []))
    report: dict[str, Any] = kept or {
        "what": f"{TOKENS} tokens, {HEADS} heads of {WIDTH}, bfloat16; medians of forward and of forward + backward",
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "compiled": compiled,
    }
    phases: dict[str, Callable[[], Any]] = {
        "correct": correctness,
        "bars": bars,
        "passes": passes,
        "first_calls": first_calls,
        "memory": memory,
    }
    if args.flex:  # on two bands, where FlexAttention is at its best, and on random blocks for each head
        phases |= {f"flex, {bar[0]}": partial(flex, *bar[:4]) for bar in reversed(BARS[3:])}
    if args.tune:
        phases["tune"] = lambda: tune(compiled["failed"], args.seconds - (time.perf_counter() - start))
    for name, phase in phases.items():
        if name in kept:
            continue
        spent = time.perf_counter() - start
        report[name] = phase() if spent < args.seconds else f"left out after {spent:.0f} s"
        (args.out / "sparse.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"-- {name}: {time.perf_counter() - start - spent:.1f} s", flush=True)
    if isinstance(report["correct"], str) or not all(row["ok"] for row in report["correct"]):
        sys.exit("results are wrong, or were not checked")


if __name__ == "__main__":
    main()
