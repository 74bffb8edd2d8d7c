"""Sparse attention on a CPU against dense attention: forward and backward, two threads, as ratios in one run.

    PYTHONPATH=src python benchmarks/sparse_cpu.py --out results/sparse_cpu.json

The two are timed in turn, so that other load on the machine affects both, and medians are compared.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from subquad.machine import commit
from subquad.ops import Block, Global, Local, Pattern, Strided, Summary, sparse_attention

PATTERNS: dict[str, tuple[Pattern, bool]] = {
    "strided l=128": (Local(128, 0) | Strided(128), True),
    "fixed l=128 c=32": (Block(128) | Summary(128, 32), True),
    "local 512": (Local(511, 0), True),
    "longformer 256+64 global": (Local(256) | Global(64), False),
}
WHICH = ("sparse", "dense")
PARTS = ("forward", "forward_backward")


def once(f: Callable[[], torch.Tensor], inputs: list[torch.Tensor], w: torch.Tensor) -> tuple[float, float]:
    """Seconds of the forward, and of the forward and backward."""
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    o = f()
    forward = time.perf_counter() - start
    o.backward(w)
    return forward, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/sparse_cpu.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for T in args.lengths:
        shape = (1, T, args.heads, args.width)
        for name, (pattern, causal) in PATTERNS.items():
            inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]
            q, k, v = inputs
            w = torch.randn(shape)

            def sparse(
                q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, p: Pattern = pattern, c: bool = causal
            ) -> torch.Tensor:
                return sparse_attention(q, k, v, p, causal=c)

            def dense(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, c: bool = causal) -> torch.Tensor:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=c).transpose(1, 2)

            repeat = args.repeat if T <= 4096 else max(3, args.repeat // 2)
            once(sparse, inputs, w)
            times = [(once(sparse, inputs, w), once(dense, inputs, w)) for _ in range(repeat)]
            row = {"pattern": name, "causal": causal, "T": T, "heads": args.heads, "width": args.width}
            for (at, which), (of, part) in product(enumerate(WHICH), enumerate(PARTS)):
                row[f"{which}_{part}_ms"] = 1e3 * median(t[at][of] for t in times)
            row["dense_over_sparse"] = row["dense_forward_backward_ms"] / row["sparse_forward_backward_ms"]
            rows.append(row)
            ours, theirs = (
                "{:8.1f} / {:8.1f} ms".format(*(row[f"{which}_{part}_ms"] for part in PARTS)) for which in WHICH
            )
            ratio = f"dense/sparse {row['dense_over_sparse']:.2f}"
            print(f"T={T:6d}  {name:26s} sparse {ours}   dense {theirs}   {ratio}", flush=True)
    report = {
        "what": "forward, and forward + backward, batch 1, float32; medians of runs in turn",
        "commit": commit(),
        "device": f"{platform.processor() or platform.machine()}, {args.threads} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
