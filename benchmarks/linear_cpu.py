"""Causal linear attention on a CPU against those peers that can be imported: forward, and forward + backward.

    PYTHONPATH=src python benchmarks/linear_cpu.py --out results/linear_cpu.json

All are timed in turn, round after round, so that other load on the machine affects all of them; medians are compared,
with quartiles beside them. Peers: fast-transformers' C++ kernel in its own attention layer (feature map and denominator
included, as in ours), whose results and gradients are compared first, and torch's softmax attention.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.machine import commit
from subquad.ops import linear_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
CASES = ((4096, 32), (4096, 64), (16384, 32))


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, impl="torch")


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def fast_transformers() -> Attention | None:
    try:
        from fast_transformers.attention.causal_linear_attention import CausalLinearAttention
        from fast_transformers.masking import LengthMask, TriangularCausalMask
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        full = LengthMask(torch.full((q.shape[0],), length))
        attention: Tensor = CausalLinearAttention(q.shape[-1])(q, k, v, TriangularCausalMask(length), full, full)
        return attention

    return attend


def once(f: Attention, inputs: list[Tensor], w: Tensor) -> tuple[float, float]:
    """Milliseconds of the forward, and of the forward and backward."""
    start = time.perf_counter()
    o = f(*inputs)
    forward = time.perf_counter() - start
    torch.autograd.grad(o, inputs, w)
    return 1e3 * forward, 1e3 * (time.perf_counter() - start)


def agree(f: Attention, g: Attention, inputs: list[Tensor], w: Tensor) -> None:
    def results(h: Attention) -> list[Tensor]:
        o = h(*inputs)
        return [o, *torch.autograd.grad(o, inputs, w)]

    for x, y in zip(results(f), results(g), strict=True):
        error = ((x - y).abs().max() / y.abs().max()).item()
        if error > 1e-4:
            raise SystemExit(f"the two do not compute the same thing: relative difference {error:.1e}")


def spread(times: list[float]) -> dict[str, float]:
    low, _, high = quantiles(times, n=4)
    return {"median_ms": median(times), "quartile_1_ms": low, "quartile_3_ms": high}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("pytorch-fast-transformers",):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/linear_cpu.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--heads", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    peers: dict[str, Attention] = {"subquad": ours, "softmax (torch)": softmax}
    fast = fast_transformers()
    if fast is not None:
        peers["fast-transformers"] = fast
    rows: list[dict[str, Any]] = []
    for length, width in CASES:
        shape = (1, length, args.heads, width)
        inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]
        w = torch.randn(shape)
        if fast is not None:
            agree(ours, fast, inputs, w)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for i in range(args.rounds + 2):
            for name, f in peers.items():
                if name == "softmax (torch)" and (length > 4096 or i > 4):
                    continue  # quadratic: a few rounds say enough
                measured = once(f, inputs, w)
                if i >= 2:
                    times[name].append(measured)
        row: dict[str, Any] = {"T": length, "heads": args.heads, "K": width, "V": width, "dtype": "float32"}
        for name, measured_ in times.items():
            if measured_:
                forward, both = (list(part) for part in zip(*measured_, strict=True))
                row[name] = {"forward": spread(forward), "forward_backward": spread(both), "rounds": len(both)}
        if fast is not None:
            pairs = zip(times["fast-transformers"], times["subquad"], strict=True)
            row["fast_transformers_over_subquad"] = {
                "of_medians": row["fast-transformers"]["forward_backward"]["median_ms"]
                / row["subquad"]["forward_backward"]["median_ms"],
                "median_of_rounds": median(theirs[1] / mine[1] for theirs, mine in pairs),
            }
        rows.append(row)
        print(json.dumps(row, indent=1))
    report = {
        "what": "causal linear attention, elu+1, normalised, batch 1",
        "device": processor(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load_average": os.getloadavg()[0],
        "versions": versions(),
        "commit": commit(),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
