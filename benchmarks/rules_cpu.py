"""The rules that multiply the state by a matrix, on a CPU: in chunks, beside the loop over tokens that defines them.

    PYTHONPATH=src python benchmarks/rules_cpu.py --out results/rules_cpu.json

Both are timed in turn, round after round, so that what else the machine does falls on each of them; a ratio is the
median of those of the rounds. Their results are compared first. The forward is timed without gradients; the forward and
backward, for which the loop keeps every state, over fewer tokens. The loop is timed in one thread too: its operations
are small, and threads that share them wait for each other. A call that is not timed precedes each timed one, because
torch starts its threads again when their number changes.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from linear_cpu import processor, spread, versions
from torch import Tensor

from subquad.machine import commit
from subquad.ops import linear_attention
from subquad.ops.linear.rules import RuleName, rule_step

Attention = Callable[..., Tensor]
CASES: tuple[tuple[RuleName, str], ...] = (
    ("gated", "channel"),
    ("delta", "none"),
    ("gated_delta", "head"),
    ("gated_delta", "channel"),
)


def chunks(rule: RuleName) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None) -> Tensor:
        return linear_attention(
            q, k, v, rule=rule, log_gate=log_gate, beta=beta, feature_map="identity", normalize=False, impl="torch"
        )

    return attend


def loop(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None) -> Tensor:
    s, o = q.new_zeros(*q.shape[::2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        gate, rate = (None if x is None else x[:, t] for x in (log_gate, beta))
        y, s = rule_step(q[:, t], k[:, t], v[:, t], gate, rate, s)
        o.append(y)
    return torch.stack(o, 1)


def make(rule: RuleName, gate: str, length: int, heads: int, width: int) -> list[Tensor | None]:
    """q, k of length 1, v, and gates that remember hundreds of tokens."""
    q, k, v = (torch.randn(1, length, heads, width) for _ in range(3))
    log_gate = None if gate == "none" else -0.01 * torch.rand(1, length, heads, width)
    log_gate = log_gate[..., 0].contiguous() if log_gate is not None and gate == "head" else log_gate
    return [q, F.normalize(k, dim=-1), v, log_gate, torch.rand(1, length, heads) if "delta" in rule else None]


def forward(f: Attention, inputs: list[Tensor | None]) -> list[Tensor]:
    with torch.no_grad():
        return [f(*inputs)]


def both_ways(f: Attention, inputs: list[Tensor | None]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    o = f(*inputs)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def compare(
    work: Callable[[Attention, list[Tensor | None]], list[Tensor]],
    rule: RuleName,
    inputs: list[Tensor | None],
    rounds: int,
) -> dict[str, Any]:
    """Milliseconds of both, and how many times as long the loop takes."""
    for x, y in zip(work(chunks(rule), inputs), work(loop, inputs), strict=True):
        error = ((x - y).abs().max() / y.abs().max()).item()
        if error > 1e-4:
            raise SystemExit(f"{rule}: the two do not compute the same thing: relative difference {error:.1e}")
    threads = torch.get_num_threads()
    contenders = (("chunks", chunks(rule), threads), ("loop", loop, threads), ("loop_in_one_thread", loop, 1))
    times: dict[str, list[float]] = {name: [] for name, _, _ in contenders}
    for _ in range(rounds):
        for name, f, many in contenders:
            torch.set_num_threads(many)
            work(f, inputs)
            start = time.perf_counter()
            work(f, inputs)
            times[name].append(1e3 * (time.perf_counter() - start))
    torch.set_num_threads(threads)
    result: dict[str, Any] = {name: spread(measured) for name, measured in times.items()}
    for name in ("loop", "loop_in_one_thread"):
        ratios = [slow / fast for slow, fast in zip(times[name], times["chunks"], strict=True)]
        result[f"{name}_over_chunks"] = {"median_of_rounds": median(ratios), "least": min(ratios)}
    return {**result, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rules_cpu.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for rule, gate in CASES:
        row: dict[str, Any] = {"rule": rule, "gate": gate, "heads": args.heads, "K": args.width, "V": args.width}
        row["dtype"] = "float32"
        for name, work, length in (("forward", forward, 4096), ("forward_backward", both_ways, 1024)):
            inputs = make(rule, gate, length, args.heads, args.width)
            row[name] = {"T": length, **compare(work, rule, inputs, args.rounds)}
        rows.append(row)
        print(json.dumps(row, indent=1))
    report = {
        "what": "gated and delta rules in chunks over the loop over tokens, batch 1",
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
