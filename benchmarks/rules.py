"""Measure the gated and delta rules on a GPU: correctness first, then time beside flash-linear-attention.

    python benchmarks/rules.py --out DIR                everything; figures to DIR/rules.json
    python benchmarks/rules.py --checks 40 --seed 3 --lengths ""     forty random cases only
    python benchmarks/rules.py --checks 0 --rules delta              times of one rule only
    python benchmarks/rules.py --peers FOLDER           where a copy of flash-linear-attention lies, if not installed
    python benchmarks/rules.py --checks 0 --warm 13     in 13 processes, what it chooses from is compiled first
    python benchmarks/rules.py --checks 72 --out DIR --lengths ""    again: only what was not done in time before
    python benchmarks/rules.py --parts                  milliseconds of each kernel

Correct means: error against float64 at most twice that of the plain chunked torch expression in the same type, or 1e-5
in float32, for the output, the last state and every gradient, over random shapes, lengths, packs, gates and rates, with
memory that was filled with NaN before. A gradient that is zero but for rounding is compared with the largest one.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu.bench import poison
from torch import Tensor

from subquad.machine import commit, tell_commit
from subquad.ops import LinearState, linear_attention
from subquad.ops.linear import rule_launches_triton as launches
from subquad.ops.linear.rule_operators import recur
from subquad.ops.linear.spec import RuleInputs

Case = dict[str, Any]
TOKENS, HEADS, LENGTHS = 65536, 16, (1024, 4096, 16384, 65536)
MUST = {  # at 16k: milliseconds for gates of a head, else the time of flash-linear-attention by which ours is divided
    "gated": (0.40, 1.25), "gla": 1.2, "delta": 1.5, "gated_delta": 1.5,
}  # fmt: skip
LATE = "not done in time"
RULES = ("gated", "gla", "delta", "gated_delta")  # gla: a gate for each channel


def plain(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, beta: Tensor | None, s0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The chunked expression in torch: products in the input's type, sums and states in at least float32."""
    dtype, acc = q.dtype, torch.promote_types(q.dtype, torch.float32)
    (b, t, h, width), chunk = q.shape, 32
    pad = -t % chunk
    s = q.new_zeros(b, h, width, v.shape[-1], dtype=acc) if s0 is None else s0.to(acc)
    g = torch.zeros_like(k, dtype=acc) if gate is None else gate.to(acc)
    g = (g[..., None].expand_as(k) if g.dim() == 3 else g).clamp(min=-110)
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3) for x in (q, k, v, g))
    rate = None if beta is None else F.pad(beta.to(acc), (0, 0, 0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3)
    age = g.cumsum(-2)  # [B, N, H, C, K]
    low = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()

    def products(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        decay = (age[..., :, None, :] - age[..., None, :, :]).masked_fill(~mask[..., None], -torch.inf).exp()
        seen = (y[..., None, :, :] * decay).to(dtype)  # [B, N, H, C, C, K]
        return (seen @ x[..., None])[..., 0].to(acc)

    scores = products(q, k, low)
    if rate is not None:
        a = products(k, k, low.tril(-1)) * rate[..., None]
        eye = torch.eye(chunk, dtype=acc, device=q.device).expand_as(a)
        solved = torch.linalg.solve_triangular(a + eye, eye, upper=False, unitriangular=True).to(dtype)
        u = solved @ (rate[..., None] * v).to(dtype)
        w = solved @ (rate[..., None] * age.exp() * k).to(dtype)
    o = []
    for n in range(q.shape[1]):
        held = s.to(dtype)
        new = v[:, n] if rate is None else u[:, n] - w[:, n] @ held
        o.append((q[:, n] * age[:, n].exp()).to(dtype) @ held + scores[:, n].to(dtype) @ new)
        whole = age[:, n, :, -1:]
        s = s * whole.exp().mT + ((k[:, n] * (whole - age[:, n]).exp()).to(dtype).mT @ new).to(acc)
    return torch.stack(o, 1).transpose(2, 3).flatten(1, 2)[:, :t], s


def each(case: Case, x: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """`plain` over the sequences of a pack, or over rows without their padding."""
    spans = [(b, 0, n) for b, n in enumerate(case["lengths"])] if case["lengths"] else None
    if case["cu"]:
        spans = [(0, a, b) for a, b in itertools.pairwise(case["cu"])]
    names = ("q", "k", "v", "gate", "beta")
    if spans is None:
        whole: list[Any] = [x[name] for name in (*names, "s0")]
        return plain(*whole)
    outputs, states = [], []
    for i, (row, start, stop) in enumerate(spans):
        given = [x[name] for name in names]
        part: list[Any] = [None if y is None else y[row : row + 1, start:stop] for y in given]
        s0 = None if x["s0"] is None else x["s0"][i : i + 1]
        if stop == start:
            like = part[2]
            none = like.new_zeros(1, like.shape[2], part[1].shape[3], like.shape[3], dtype=torch.float32)
            o, s = like, none if s0 is None else s0
        else:
            o, s = plain(*part, s0)  # type: ignore[call-arg]
        outputs.append(F.pad(o, (0, 0, 0, 0, 0, case["t"] - stop)) if case["lengths"] else o)
        states.append(s)
    return torch.cat(outputs, 0 if case["lengths"] else 1), torch.cat([s.to(states[0].dtype) for s in states])


def draw_case(rng: random.Random, number: int) -> Case:
    rule = RULES[number % len(RULES)]
    t = rng.choice((1, 5, 63, 64, 65, 200, 511, 1000))
    b = rng.choice((1, 2, 3))
    packed = rng.random() < 0.25
    cu = [0, *sorted(rng.randint(0, t) for _ in range(3)), t] if packed else None
    return {
        "rule": rule, "channel": rule == "gla", "b": 1 if packed else b, "t": t, "h": rng.choice((1, 2, 5)),
        "k": rng.choice((8, 16, 32, 64, 64, 72, 128, 256)), "v": rng.choice((8, 32, 64, 64, 80, 128, 256)),
        "dtype": rng.choice(("bfloat16", "bfloat16", "float32", "float16")), "cu": cu,
        "lengths": [rng.randint(0, t) for _ in range(b)] if not packed and rng.random() < 0.3 else None,
        "init": rng.random() < 0.5, "steep": rng.choice((0.02, 0.1, 1.0, 10.0, 100.0)), "view": rng.random() < 0.3,
        "keys": rng.choice(("random", "random", "repeated")), "seed": number,
    }  # fmt: skip


def build(case: Case) -> dict[str, Tensor | None]:
    gen = torch.Generator("cuda").manual_seed(case["seed"])
    b, t, h, k, v = (case[name] for name in ("b", "t", "h", "k", "v"))
    dtype = getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=gen)

    keys = F.normalize(draw(1, 1, h, k).expand(b, t, h, k) if case["keys"] == "repeated" else draw(b, t, h, k), dim=-1)
    x: dict[str, Tensor | None] = {
        "q": draw(b, t, h, k).to(dtype),
        "k": keys.to(dtype),
        "v": draw(b, t, h, v).to(dtype),
    }
    if case["view"] and k == v:
        x["q"], x["k"], x["v"] = torch.stack([x["q"], x["k"], x["v"]], 2).unbind(2)  # type: ignore[list-item]
    shape = (b, t, h, k) if case["channel"] else (b, t, h)
    x["gate"] = -torch.rand(shape, device="cuda", generator=gen) * case["steep"] if case["rule"] != "delta" else None
    beta = torch.rand((b, t, h), device="cuda", generator=gen) if "delta" in case["rule"] else None
    x["beta"] = beta if beta is None or case["keys"] == "random" else torch.ones_like(beta)
    rows = b if case["cu"] is None else len(case["cu"]) - 1
    x["s0"] = draw(rows, h, k, v) if case["init"] else None
    return x


def outputs_and_gradients(
    fn: Callable[..., tuple[Tensor, Tensor]], x: dict[str, Tensor | None], w: Any
) -> list[Tensor]:
    leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in x.items()}
    out = fn(leaves)
    wanted = [t for t in leaves.values() if t is not None]
    used = [n for n, o in enumerate(out) if o.requires_grad]  # the state of empty rows does not
    weights = [w[n].to(out[n].dtype) for n in used]
    grads = torch.autograd.grad([out[n] for n in used], wanted, weights, materialize_grads=True)
    return [*(o.detach() for o in out), *grads]


def check(case: Case) -> Case:
    """Errors of ours and of the plain expression against float64, by name."""
    x = build(case)
    device = "cuda"
    lengths = None if case["lengths"] is None else torch.tensor(case["lengths"], device=device)
    cu = None if case["cu"] is None else torch.tensor(case["cu"], device=device, dtype=torch.int32)

    def ours(y: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        poison()
        q, k, v, gate, beta, s0 = y.values()
        assert q is not None
        assert k is not None
        assert v is not None
        if case["rule"] == "gated":
            before = None if s0 is None else LinearState(s0, torch.zeros_like(s0[..., 0]))
            o, after = linear_attention(
                q, k, v, log_gate=gate, feature_map="identity", normalize=False, lengths=lengths, cu_seqlens=cu,
                initial_state=before, return_state=True, impl="triton",
            )  # fmt: skip
            return o, after.s
        return recur(RuleInputs(q, k, v, gate, beta, lengths, cu, s0), False, "triton")

    gen = torch.Generator(device).manual_seed(1)
    rows = case["b"] if cu is None else len(case["cu"]) - 1
    shapes = (case["b"], case["t"], case["h"], case["v"]), (rows, case["h"], case["k"], case["v"])
    w = [torch.randn(s, device=device, generator=gen) for s in shapes]
    w[0] = w[0].to(x["q"].dtype).double()  # type: ignore[union-attr]
    w[1] *= 0.1
    names = ["o", "s", *(f"d{name}" for name, t in x.items() if t is not None)]
    wide = {name: None if t is None else t.double() for name, t in x.items()}
    found: Case = {"case": case}
    mine = outputs_and_gradients(ours, x, w)
    exact, rough = (outputs_and_gradients(lambda y: each(case, y), y, w) for y in (wide, x))
    ok = True
    largest = max(float(e.norm()) for e in exact)
    for name, a, r, e in zip(names, mine, rough, exact, strict=True):
        scale = e.norm().clamp(min=1e-6 * largest + 1e-30)
        error, allowed = (float((t.double() - e).norm() / scale) for t in (a, r))
        found[name] = (error, allowed)
        nothing = float((a.double() - e).norm()) <= 0.01 * torch.finfo(x["q"].dtype).eps * largest  # type: ignore[union-attr]
        slack = 1e-5 if case["dtype"] == "float32" else 1e-6
        ok &= bool(torch.isfinite(a).all()) and (error <= 2 * allowed + slack or nothing)
    found["ok"] = ok
    return found


def attempt(case: Case) -> Case:
    try:
        return check(case)
    except Exception as error:
        where = [
            f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in traceback.extract_tb(error.__traceback__)[-4:]
        ]
        return {"case": case, "ok": False, "failed": f"{type(error).__name__}: {str(error)[:100]}", "where": where}


def check_all(count: int, seed: int, seconds: float, workers: int, earlier: list[Case]) -> list[Case]:
    """Random cases in several processes, because most of the time is compilation; what is not done in time is wrong.

    Cases that ended in an earlier run are not checked again.
    """
    rng, begun = random.Random(seed), time.monotonic()
    drawn = [draw_case(rng, number) for number in range(count)]
    results = [record for record in earlier if record["case"] in drawn and record.get("failed") != LATE]
    cases = [case for case in drawn if case not in [record["case"] for record in results]]
    # a process for each case: after an illegal access to memory a process can do nothing more on the GPU
    with ProcessPoolExecutor(
        max(1, min(len(cases), workers)), multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        jobs = {pool.submit(attempt, case): case for case in cases}
        try:
            for job in as_completed(jobs, timeout=seconds):
                results.append(job.result())
                if not results[-1]["ok"]:
                    print("WRONG", json.dumps(results[-1]), flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
    done = {result["case"]["seed"] for result in results}
    results += [{"case": case, "ok": False, "failed": LATE} for case in cases if case["seed"] not in done]
    good = sum(r["ok"] for r in results)
    print(f"{good} of {count} random cases are right, {time.monotonic() - begun:.0f} s", flush=True)
    return sorted(results, key=lambda r: r["case"]["seed"])


def median(fn: Callable[[], Any], rep: int = 40) -> float:
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=10, rep=rep, return_mode="median"))


def inputs(rule: str, t: int, k: int = 64, v: int = 64) -> list[Tensor]:
    """q, k, v and, where the rule has them, gate and beta, in bfloat16, with decays as trained models have them."""
    b = TOKENS // t
    q, key, value = (torch.randn(b, t, HEADS, d, device="cuda", dtype=torch.bfloat16) for d in (k, k, v))
    x = [q, F.normalize(key.float(), dim=-1).bfloat16(), value]
    shape = (b, t, HEADS, k) if rule == "gla" else (b, t, HEADS)
    if rule != "delta":
        x.append(
            F.logsigmoid(torch.randn(shape, device="cuda") + (0.0 if rule == "gla" else 3.0))
            / (16 if rule == "gla" else 1)
        )
    if "delta" in rule:
        x.append(torch.rand(b, t, HEADS, device="cuda").bfloat16())
    return [y.requires_grad_() for y in x]


def ours(rule: str) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        gate = rest[0] if rule != "delta" else None
        beta = rest[-1] if "delta" in rule else None
        name: Any = "gated" if rule == "gla" else rule
        return linear_attention(q, k, v, rule=name, log_gate=gate, beta=beta, feature_map="identity", normalize=False)

    return call


def peers() -> dict[str, Callable[..., Tensor]]:
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return {
        "gated": lambda q, k, v, g: chunk_simple_gla(q, k, v, g, scale=1.0)[0],
        "gla": lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0],
        "delta": lambda q, k, v, b: chunk_delta_rule(q, k, v, b, scale=1.0)[0],
        "gated_delta": lambda q, k, v, g, b: chunk_gated_delta_rule(q, k, v, g, b, scale=1.0)[0],
    }


def compile_peers(part: int, parts: int, rules: list[str], folder: Path | None) -> None:
    """Run the other library with every `parts`-th of the launches that it chooses from, so that they are compiled."""
    from triton.runtime.autotuner import Autotuner

    chosen = Autotuner.prune_configs

    def some(self: Any, kwargs: Any) -> Any:
        configs = chosen(self, kwargs)
        return configs[part::parts] or configs[:1]

    Autotuner.prune_configs = some
    choose_quickly()
    if folder:
        sys.path.insert(0, str(folder))
    others = peers()
    for rule in rules:
        x = inputs(rule, LENGTHS[0])
        with contextlib.suppress(Exception):  # what fails is reported where it is timed
            torch.autograd.grad(others[rule](*x).sum(), x)


def measure(fn: Callable[..., Tensor], x: list[Tensor]) -> dict[str, Any]:
    """Milliseconds of forward, and of forward and backward, where it runs."""
    found: dict[str, Any] = {}
    try:
        with torch.no_grad():
            found["forward"] = median(lambda: fn(*x))
            do = torch.randn_like(fn(*x))
        found["forward_backward"] = median(lambda: torch.autograd.grad(fn(*x), x, do))
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def choose_quickly() -> None:
    """Let the other library time each launch that it chooses from for 20 ms instead of 100, after 5 instead of 25."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def bench(call: Callable[[], Any], quantiles: Any) -> Any:
        return do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.do_bench = property(lambda _: bench)


def speed(lengths: list[int], rules: list[str], found: Case) -> Iterator[None]:
    """Adds to `found` the times of ours and of flash-linear-attention, by length and rule."""
    others: dict[str, Callable[..., Tensor]] = {}
    with contextlib.suppress(ImportError):
        others = peers()
    for t, rule in itertools.product(lengths, rules):
        x = inputs(rule, t)
        row: Case = {"ours": measure(ours(rule), x)}
        if rule in others:
            row["fla"] = measure(others[rule], x)
            with torch.no_grad():
                a, b = ours(rule)(*x).float(), others[rule](*x).float()
            row["difference"] = float((a - b).norm() / b.norm())
        found.setdefault(str(t), {})[rule] = row
        print(t, rule, json.dumps(row), flush=True)
        yield
        del x
        torch.cuda.empty_cache()


def parts() -> Case:
    """Milliseconds of each kernel, forward and backward, at 16k."""
    found: Case = {}
    start = launches.Call.start
    for rule in RULES[1:]:
        x = inputs(rule, 16384)
        calls: list[Any] = []

        def note(self: Any, name: str, *args: Any, _calls: list[Any] = calls, **own: Any) -> None:
            _calls.append((name, lambda: start(self, name, *args, **own)))
            start(self, name, *args, **own)

        launches.Call.start = note  # type: ignore[method-assign, assignment]
        o = ours(rule)(*x)
        torch.autograd.grad(o, x, torch.randn_like(o))
        launches.Call.start = start  # type: ignore[method-assign]
        found[rule] = [(name, round(median(again, 20), 4)) for name, again in calls]
        print(rule, found[rule], flush=True)
        calls.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for rules.json")
    parser.add_argument("--checks", type=int, default=60, help="how many random cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="at most for the checks")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 3), help="processes that check")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="sequence lengths to time")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--warm", type=int, default=0, help="processes that compile for the other library before")
    parser.add_argument("--parts", action="store_true", help="the time of each kernel, and nothing else")
    parser.add_argument("--peers", type=Path, help="a folder that holds flash-linear-attention")
    parser.add_argument("--commit", help="what is measured, where there is no git history to ask")
    args = parser.parse_args()
    tell_commit(args.commit)
    if args.peers:
        sys.path.insert(0, str(args.peers))
    if args.parts:
        parts()
        return
    import triton

    report: Case = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": sys.version.split()[0], "commit": commit(), "tokens": TOKENS, "heads": HEADS,
        "date": time.strftime("%Y-%m-%d"), "seed": args.seed, "must": MUST,
    }  # fmt: skip

    def keep() -> None:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "rules.json").write_text(json.dumps(report, indent=1, default=str) + "\n")

    begun = time.monotonic()
    choose_quickly()
    if args.warm:
        with ProcessPoolExecutor(args.warm, multiprocessing.get_context("spawn")) as pool:
            given = args.warm, args.rules.split(","), args.peers
            list(pool.map(compile_peers, range(args.warm), *([one] * args.warm for one in given)))
        print(f"the launches of flash-linear-attention are compiled, {time.monotonic() - begun:.0f} s", flush=True)
    path = args.out / "rules.json" if args.out else None
    earlier = json.loads(path.read_text())["checks"] if path and path.exists() else []
    if args.checks:
        report["checks"] = check_all(args.checks, args.seed, args.seconds, args.workers, earlier)
    else:
        report["checks"] = []
    keep()
    report["speed"] = {}
    for _ in speed([int(t) for t in args.lengths.split(",") if t], args.rules.split(","), report["speed"]):
        keep()
    sys.exit(0 if all(r["ok"] for r in report["checks"]) else 1)


if __name__ == "__main__":
    main()
