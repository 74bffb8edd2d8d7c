"""Sparse attention on a GPU: correct first, then fast, beside dense attention and FlexAttention.

    PYTHONPATH=src python3 bench/sparse.py --out DIR             under three minutes; writes DIR/sparse.json
    PYTHONPATH=src python3 bench/sparse.py --out DIR --tune      tries tile sizes and prints the best of each pass

65,536 tokens in all, 16 heads of 64, bfloat16. Times are medians of single calls between device events, over
inputs that are larger than the cache.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from subquad.ops import (
    Block,
    Dilated,
    Global,
    Local,
    Pattern,
    Random,
    Strided,
    Summary,
    sparse_attention,
    sparse_triton,
)
from subquad.ops.sparse_triton import CONFIGS, Config

TOKENS, HEADS, WIDTH = 65536, 16, 64
STRIDED = Local(128, 0) | Strided(128)
FIXED = Block(128) | Summary(128, 32)
LONGFORMER = Local(256) | Global(64)
BIGBIRD = Block(64, 1, 1) | Global(64) | Random(3, 64, apart=2, first=1)
BARS: list[tuple[str, Pattern, bool, int, float | None]] = [  # name, pattern, causal, T, ms allowed
    ("strided l=128", STRIDED, True, 16384, 4.5),
    ("strided l=128", STRIDED, True, 65536, 5.5),
    ("fixed l=128 c=32", FIXED, True, 16384, 6.5),
    ("local 512", Local(511, 0), True, 16384, 2.4),
    ("longformer 256+64", LONGFORMER, False, 16384, 4.0),
    ("bigbird 64 r=3", BIGBIRD, False, 16384, None),
]
CHECKS: list[tuple[str, Pattern, bool]] = [
    ("strided", STRIDED, True),
    ("strided, both ways", STRIDED, False),
    ("fixed", FIXED, True),
    ("fixed, both ways", FIXED, False),
    ("local", Local(511, 0), True),
    ("local, short", Local(37, 5), False),
    ("longformer", LONGFORMER, False),
    ("longformer, causal", LONGFORMER, True),
    ("bigbird", BIGBIRD, False),
    ("bigbird, causal", BIGBIRD, True),
    ("dilated", Local(16) | Dilated(64, 4), False),
    ("three factors", Local(9, 0) | Strided(10) | Strided(100), True),
    ("mixed", Block(48) | Summary(50, 7, 1) | Dilated(5, 3) | Random(2, 24) | Global(3), False),
]


def error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The masked softmax in the type of its inputs; mask [B or 1, T, S]."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    s = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    p = torch.softmax(s.masked_fill(~mask[:, None], -inf), -1).nan_to_num(0)
    return torch.einsum("bhts,bshd->bthd", p, v)


def run(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    x = [y.detach().clone().requires_grad_() for y in (q, k, v)]
    o = f(*x)
    return [o.detach(), *torch.autograd.grad(o, x, w.to(o.dtype))]


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing wrote reads as NaN."""
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


SHAPES = [  # T, width, key heads, type, ragged
    (1100, 64, 4, torch.bfloat16, False),
    (1037, 64, 2, torch.bfloat16, True),
    (777, 128, 4, torch.float16, False),
    (530, 40, 1, torch.float32, True),
]


def check(job: tuple[tuple[str, Pattern, bool], int]) -> dict[str, Any]:
    """Values and gradients against float64; allowed is twice the error of dense flash attention in the same type."""
    (name, pattern, causal), shape = job
    T, D, Hkv, dtype, ragged = SHAPES[shape]
    g = torch.Generator("cuda").manual_seed(shape)
    q, k, v, w = (torch.randn(2, T, H, D, generator=g, device="cuda").to(dtype) for H in (4, Hkv, Hkv, 4))
    exact = [x.double() for x in (q, k, v, w)]
    lengths = torch.tensor([T, T // 2 + 3], device="cuda") if ragged else None
    mask = torch.zeros(2, T, T, dtype=torch.bool, device="cuda")
    for b, n in enumerate([T, T] if lengths is None else lengths.tolist()):
        mask[b, :n, :n] = pattern.dense(n, causal=causal, device=q.device)
    with poisoned():
        ours = partial(sparse_attention, pattern=pattern, causal=causal, lengths=lengths, impl="triton")
        got = run(ours, q, k, v, w)
    want = run(partial(reference, mask=mask), *exact)
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    if dtype == torch.float32:
        allowed = [1e-5] * 4
    else:
        whole = torch.ones(1, T, T, dtype=torch.bool, device="cuda")
        full = run(partial(reference, mask=whole.tril() if causal else whole), *exact)
        flash = run(partial(dense, causal=causal), q, k, v, w)
        allowed = [2 * error(a, b) for a, b in zip(flash, full, strict=True)]
    names = ("o", "dq", "dk", "dv")
    return {
        "pattern": name,
        "causal": causal,
        "T": T,
        "width": D,
        "key_heads": Hkv,
        "type": str(dtype),
        "ragged": ragged,
        "errors": dict(zip(names, errors, strict=True)),
        "allowed": dict(zip(names, allowed, strict=True)),
        "ok": all(e <= a for e, a in zip(errors, allowed, strict=True)),
    }


def correctness(pool: Executor) -> list[dict[str, Any]]:
    rows = list(pool.map(check, product(CHECKS, range(len(SHAPES)))))
    for row in rows:
        if not row["ok"]:
            which = ", ".join(f"{n} {row['errors'][n]:.1e} > {a:.1e}" for n, a in row["allowed"].items())
            print(f"WRONG {row['pattern']} T={row['T']} {row['type']}: {which}")
    print(f"correct: {sum(row['ok'] for row in rows)} of {len(rows)}", flush=True)
    return rows


def milliseconds(f: Callable[[], object], budget: float = 0.4) -> float:
    f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    repeat = max(5, min(100, int(budget / max(time.perf_counter() - start, 1e-5))))
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


def flex(pattern: Pattern, causal: bool, T: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    drawn = [a for a in pattern.atoms if isinstance(a, Random)]
    straight = [a for a in pattern.atoms if not isinstance(a, Random)]
    tables = [a.table(torch.arange(-(-T // a.block_size), device="cuda"), causal=causal, length=T) for a in drawn]

    def mask(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i < 0
        for atom in straight:
            seen = seen | atom.mask(i, j)
        for atom, table in zip(drawn, tables, strict=True):
            for n in range(atom.blocks):
                seen = seen | (table[i // atom.block_size, n] == j // atom.block_size)
        return seen & (j <= i) if causal else seen

    block = create_block_mask(mask, None, None, T, T, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o: Any = compiled(q, k, v, block_mask=block)
        return o.transpose(1, 2)

    return call


def bars(with_flex: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lengths = ((True, 16384), (True, 65536), (False, 16384))
    base = {(causal, T): timed(partial(dense, causal=causal), T) for causal, T in lengths}
    for name, pattern, causal, T, allowed in BARS:
        forward, both = timed(partial(sparse_attention, pattern=pattern, causal=causal), T)
        row: dict[str, Any] = {"pattern": name, "causal": causal, "T": T, "forward_ms": forward, "both_ms": both}
        row |= {"bar_ms": allowed, "ok": None if allowed is None else both <= allowed}
        row["dense_forward_ms"], row["dense_both_ms"] = base[causal, T]
        if with_flex and T == 16384 and not any(isinstance(a, Strided | Summary) for a in pattern.atoms):
            try:
                row["flex_forward_ms"], row["flex_both_ms"] = timed(flex(pattern, causal, T), T)
            except Exception as problem:
                row["flex_error"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        rows.append(row)
        print(
            f"{name:20s} T={T:6d}  {forward:6.3f} / {both:6.3f} ms   bar {allowed}  {'ok' if row['ok'] else ''}"
            f"   dense {base[causal, T][0]:.2f} / {base[causal, T][1]:.2f}"
            f"   flex {row.get('flex_forward_ms', float('nan')):.2f} / {row.get('flex_both_ms', float('nan')):.2f}",
            flush=True,
        )
    return rows


def breakdown() -> dict[str, dict[str, float]]:
    """Device time of each kernel in one forward and backward."""
    parts = {}
    for name, pattern, causal, T, _ in BARS:
        q, k, v, w = tensors(T)
        for _ in range(2):
            torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        order: dict[str, int] = {}
        events = [e for e in profile.events() if e.device_type.name == "CUDA"]
        for event in events:
            label = event.name[:60]
            times[label] = times.get(label, 0.0) + event.device_time / 3e3
            order[label] = order.get(label, 0) + 1
        parts[f"{name} T={T}"] = dict(sorted(times.items(), key=lambda x: -x[1])[:12])
        print(
            f"{name} T={T}: "
            + ", ".join(f"{n} x{order[n] // 3} {t:.3f}" for n, t in list(parts[f"{name} T={T}"].items())[:9])
        )
    return parts


def first_calls() -> list[dict[str, Any]]:
    """Seconds of the first forward and backward at a length never seen, after others were."""
    rows: list[dict[str, Any]] = []
    for name, pattern, causal in dict.fromkeys(bar[:3] for bar in BARS):
        for T in (4096, 8192, 7000, 12345):
            q, k, v, w = tensors(T, batch=2)
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
            torch.cuda.synchronize()
            rows.append({"pattern": name, "T": T, "seconds": time.perf_counter() - start})
        rows[-1]["worst"] = worst = max(r["seconds"] for r in rows[-3:])
        print(f"first call at a new T, {name}: {worst:.3f} s {'ok' if worst < 0.1 else 'SLOW'}", flush=True)
    return rows


def memory() -> list[dict[str, Any]]:
    """Bytes per token of forward and backward, beyond the inputs; batch 1."""
    rows: list[dict[str, Any]] = []
    for name, pattern, causal in dict.fromkeys(bar[:3] for bar in BARS):
        for T in (16384, 32768, 65536):
            q, k, v, w = tensors(T, batch=1)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
            peak = torch.cuda.max_memory_allocated() - before
            rows.append({"pattern": name, "T": T, "bytes_per_token": peak / T})
            del q, k, v, w
        small, large = rows[-3]["bytes_per_token"], rows[-1]["bytes_per_token"]
        print(f"memory, {name}: {small / 2**10:.1f} -> {large / 2**10:.1f} KiB a token", flush=True)
    return rows


TILES = {
    "forward": [(128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2),
                (128, 32, 4, 4), (64, 64, 4, 2), (128, 64, 4, 4)],
    "dq": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 4, 3),
           (128, 32, 4, 2), (64, 128, 4, 2), (128, 128, 8, 2), (64, 32, 4, 3)],
    "dkv": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 128, 4, 2),
            (32, 64, 4, 3), (32, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (16, 128, 4, 3), (64, 128, 4, 2)],
}  # fmt: skip
TUNED: list[tuple[str, Pattern, bool, int]] = [
    ("", Local(511, 0), True, 16384),
    ("_lattice", STRIDED, True, 16384),
    ("_random", BIGBIRD, False, 16384),
    ("_rows", LONGFORMER, False, 16384),
    ("_columns", LONGFORMER, False, 16384),
    ("_summary", FIXED, True, 16384),
]


def passes_to_tune() -> list[tuple[str, Pattern, bool, int, Config]]:
    jobs = []
    for suffix, pattern, causal, T in TUNED:
        for kind, tiles in TILES.items():
            if {"_rows": kind != "dkv", "_columns": kind == "dkv", "_summary": kind == "dkv"}.get(suffix, True):
                jobs += [(kind + suffix, pattern, causal, T, Config(*tile)) for tile in tiles]
    return jobs


def prepare(job: tuple[str, Pattern, bool, int, Config | None]) -> str | None:
    """Compiles what a job needs, in another process, into Triton's cache."""
    kind, pattern, causal, _, config = job
    if config is not None:
        CONFIGS[kind, 128] = config
    q, k, v, w = tensors(4096, batch=1)
    try:
        torch.autograd.grad(sparse_attention(q, k, v, pattern, causal=causal), (q, k, v), w)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:80]}"
    return None


def tune(pool: Executor) -> dict[str, list[dict[str, Any]]]:
    """The time of the kernels of one pass, for each tile size, on the pattern that stresses it."""
    jobs = passes_to_tune()
    failed = list(pool.map(prepare, jobs))
    found: dict[str, list[dict[str, Any]]] = {}
    kernels = {"forward": "_forward", "dq": "_dq", "dkv": "_dkv"}
    for job, problem in zip(jobs, failed, strict=True):
        kind, pattern, causal, T, config = job
        if problem:
            print(f"{kind} {tuple(config)}: {problem}")
            continue
        kept = CONFIGS.get((kind, 128))
        CONFIGS[kind, 128] = config
        x = tensors(T)

        def once(x: list[Tensor] = x, p: Pattern = pattern, c: bool = causal) -> None:
            torch.autograd.grad(sparse_attention(x[0], x[1], x[2], p, causal=c), x[:3], x[3])

        once()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                once()
            torch.cuda.synchronize()
        name = kernels[kind.split("_")[0]]
        spent = [e.device_time for e in profile.events() if e.name == name]
        # several launches of one kernel in a call: the pass is told by its place
        launches = len(spent) // 5
        at = {"_rows": launches - 1, "_columns": launches - 1, "_lattice": launches - 1, "_summary": launches - 1}
        place = at.get(kind[len(kind.split("_")[0]) :], 0)
        ms = median(spent[place::launches]) / 1e3
        found.setdefault(kind, []).append({"config": list(config), "ms": ms})
        if kept is None:
            del CONFIGS[kind, 128]
        else:
            CONFIGS[kind, 128] = kept
    for kind, rows in found.items():
        rows.sort(key=lambda r: r["ms"])
        print(f"{kind:16s} " + "  ".join(f"{tuple(r['config'])} {r['ms']:.3f}" for r in rows[:5]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for long")
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, Any] = {
        "what": f"{TOKENS} tokens, {HEADS} heads of {WIDTH}, bfloat16; medians of forward and of forward + backward",
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "fused_causal": sparse_triton._fused(tensors(16384)[0]),
    }
    name = "sparse_tune.json" if args.tune else "sparse.json"
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        if args.tune:
            report["tune"] = tune(pool)
        else:
            if not args.no_checks:
                report["correct"] = correctness(pool)
            list(pool.map(prepare, [("", pattern, causal, T, None) for _, pattern, causal, T, _ in BARS]))
    if not args.tune:
        report["bars"] = bars(not args.no_flex)
        report["kernels"] = breakdown()
        report["first_calls"] = first_calls()
        report["memory"] = memory()
    (args.out / name).write_text(json.dumps(report, indent=2) + "\n")
    if not all(r["ok"] for r in report.get("correct", [])):
        sys.exit("wrong results")


if __name__ == "__main__":
    main()
