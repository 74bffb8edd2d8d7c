"""Measure fused linear attention on a GPU: correctness first, then time, memory and bandwidth against other programs.

    python benchmarks/linear.py --out DIR            everything; figures to DIR/linear.json
    python benchmarks/linear.py --check              correctness only
    python benchmarks/linear.py --tune [--widths 64x64,256x64]    search launch parameters, print the best

Correct means: the error against float64 is at most twice that of the plain torch expression in the same type, for the
output, the states and every gradient; large inputs give no NaN; results are the same when compiled, captured in a graph
or checkpointed. Processes that use no GPU compile the kernels first.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.machine import commit, tell_commit
from subquad.ops.linear import fused
from subquad.ops.linear.operators import attend, fused_step
from subquad.ops.linear.spec import Inputs, Spec

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
}
TOKENS, HEADS, LENGTHS = 65536, 16, (1024, 4096, 16384, 65536)
BARS = {  # milliseconds: must, goal
    "causal forward": {1024: (0.30, 0.20), 4096: (0.30, 0.20), 16384: (0.30, 0.25), 65536: (0.30, 0.25)},
    "causal forward+backward": dict.fromkeys(LENGTHS, (1.1, 0.8)),
    "bidirectional forward": dict.fromkeys(LENGTHS, (0.30, 0.20)),
    "bidirectional forward+backward": dict.fromkeys(LENGTHS, (1.0, 0.6)),
}
WIDTHS = ((32, 32), (128, 128), (256, 64))  # besides 64 and 64
SMALL = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if SMALL else "cuda"


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    tensors = {name: options.pop(name) for name in Inputs._fields if name in options}
    return attend(Inputs(q, k, v, **tensors), Spec(**options), "triton")


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    log_gate: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """The chunked torch expression: products in the input's type, sums over chunks in at least float32."""
    options: dict[str, Any] = {
        "causal": causal, "feature_map": feature_map, "signed": signed, "normalize": normalize, "eps": eps,
    }  # fmt: skip
    if cu_seqlens is not None:
        cuts = cu_seqlens.tolist()
        parts = []
        for n, (a, b) in enumerate(itertools.pairwise(cuts)):
            parts.append(
                plain(
                    q[:, a:b], k[:, a:b], v[:, a:b], **options, lengths=None, cu_seqlens=None,
                    log_gate=None if log_gate is None else log_gate[:, a:b],
                    s0=None if s0 is None else s0[n : n + 1], z0=None if z0 is None else z0[n : n + 1], chunk=chunk,
                )
            )  # fmt: skip
        return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    b, t, h, _ = q.shape
    s_len, width_k, width_v = k.shape[1], k.shape[3], v.shape[3]
    fq, fk = MAPS[feature_map](q), MAPS[feature_map](k)
    if lengths is not None:
        keep = torch.arange(s_len, device=k.device) < lengths[:, None]  # [B, S]
        fk = fk * keep[:, :, None, None]
        if log_gate is not None:
            log_gate = log_gate * keep[:, :, None]
    state = fk.new_zeros((b, h, width_k, width_v), dtype=acc) if s0 is None else s0.to(acc)
    norm = fk.new_zeros((b, h, width_k), dtype=acc) if z0 is None else z0.to(acc)
    if causal:
        pad = -t % chunk
        fq, fk, vp = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)) for x in (fq, fk, v))  # [B, N, C, H, ·]
        gate = torch.zeros((b, t, h), device=q.device, dtype=acc) if log_gate is None else log_gate.to(acc)
        age = F.pad(gate, (0, 0, 0, pad)).unflatten(1, (-1, chunk)).cumsum(2)  # [B, N, C, H]
        whole = age[:, :, -1]
        at = age.transpose(2, 3)
        pair = (at[..., :, None] - at[..., None, :]).tril().exp().tril()  # [B, N, H, C, C]
        a = torch.einsum("bnthk,bnshk->bnhts", fq, fk).to(acc) * pair
        late = (whole[:, :, None] - age).exp()[..., None]
        kw = fk if log_gate is None else (fk * late).to(fk.dtype)
        kv = torch.einsum("bnshk,bnshv->bnhkv", kw, vp).to(acc)
        kz = kw.to(acc).sum(2)
        if log_gate is None:
            states = torch.cumsum(torch.cat((state[:, None], kv), 1), 1)
            norms = torch.cumsum(torch.cat((norm[:, None], kz), 1), 1)
        else:
            run, runz = [state], [norm]
            for n in range(kv.shape[1]):
                fade = whole[:, n].exp()
                run.append(run[-1] * fade[..., None, None] + kv[:, n])
                runz.append(runz[-1] * fade[..., None] + kz[:, n])
            states, norms = torch.stack(run, 1), torch.stack(runz, 1)
        state, norm = states[:, -1], norms[:, -1]
        fade = age.exp()[..., None]
        num = torch.einsum("bnhts,bnshv->bnthv", a.to(v.dtype), vp).to(acc)
        num = num + torch.einsum("bnthk,bnhkv->bnthv", fq, states[:, :-1].to(fq.dtype)).to(acc) * fade
        den = a.sum(-1).transpose(2, 3)
        den = den + torch.einsum("bnthk,bnhk->bnth", fq.to(acc), norms[:, :-1]) * fade[..., 0]
        num, den = num.flatten(1, 2)[:, :t], den.flatten(1, 2)[:, :t]
    else:
        state = state + torch.einsum("bshk,bshv->bhkv", fk, v).to(acc)
        norm = norm + fk.to(acc).sum(1)
        num = torch.einsum("bthk,bhkv->bthv", fq, state.to(fq.dtype)).to(acc)
        den = torch.einsum("bthk,bhk->bth", fq.to(acc), norm)
    if normalize:
        den = torch.where(den < 0, -1.0, 1.0) * den.abs().clamp(min=eps) if signed else den + eps
        num = num / den[..., None]
    if lengths is not None and t == s_len:
        num = num * keep[:, :, None, None]
    return num.to(q.dtype), state, norm


Case = dict[str, Any]


def cases() -> list[Case]:
    """Shapes, types and options whose values, states and gradients are checked."""
    base: Case = {"b": 2, "t": 1000, "h": 4, "k": 64, "v": 64, "dtype": "bfloat16", "map": "elu+1"}
    table: list[Case] = [
        base | {"causal": c, "dtype": d} for d in ("bfloat16", "float16", "float32") for c in (True, False)
    ]
    table += [base | {"causal": c, "init": True} for c in (True, False)]
    table += [
        base | {"causal": True, "gate": True, "init": True, "dtype": d} for d in ("bfloat16", "float16", "float32")
    ]
    table += [base | {"causal": c, "lengths": (1000, 333)} for c in (True, False)]
    table += [base | {"causal": True, "lengths": (1000, 0), "gate": True, "init": True}]
    cuts = (0, 100, 100, 613, 2000, 2001)
    table += [base | {"b": 1, "t": 2001, "causal": c, "cu": cuts, "init": True} for c in (True, False)]
    table += [base | {"b": 1, "t": 2001, "causal": True, "cu": cuts, "gate": True, "dtype": "float32"}]
    table += [base | {"causal": c, "map": m} for m in ("relu", "exp") for c in (True, False)]
    table += [base | {"causal": c, "map": "identity", "signed": True, "eps": 1.0} for c in (True, False)]
    table += [
        base | {"causal": True, "map": "identity", "normalize": False, "dtype": d} for d in ("bfloat16", "float32")
    ]
    for k, v in ((16, 16), (32, 32), (48, 80), (128, 128), (256, 64), (64, 256), (256, 256)):
        table += [base | {"causal": c, "k": k, "v": v} for c in (True, False)]
    table += [base | {"causal": True, "k": k, "v": v, "gate": True, "init": True} for k, v in ((128, 128), (256, 64))]
    table += [base | {"causal": True, "k": 256, "v": 64, "dtype": d} for d in ("float16", "float32")]
    table += [base | {"causal": True, "t": t, "init": True} for t in (1, 17, 256)]
    table += [base | {"causal": False, "t": 300, "s": 700, "lengths": (700, 123)}]
    table += [base | {"causal": c, "view": True} for c in (True, False)]
    # so many short sequences that each is one program
    table += [base | {"causal": True, "b": 40, "t": 200, "h": 8, "k": n, "v": n, "view": True, "dtype": d}
              for n in (32, 64) for d in ("bfloat16", "float16")]  # fmt: skip
    table += [base | {"causal": True, "b": 1, "h": 1, "t": 1 << 20}]
    table += [base | {"causal": c, "b": 1, "h": 2, "t": 65536, "dtype": d}
              for d in ("bfloat16", "float16", "float32") for c in (True, False)]  # fmt: skip
    table += [base | {"causal": True, "gate": True, "b": 1, "h": 2, "t": 16384}]
    if SMALL:
        table = [c | {"b": min(c["b"], 2), "h": 1, "t": min(c["t"], 70), "k": min(c["k"], 16), "v": min(c["v"], 16)}
                 for c in table if "cu" not in c and "s" not in c and c["dtype"] != "bfloat16"][:6]  # fmt: skip
        table = [c | ({"lengths": (70, 33)} if "lengths" in c else {}) for c in table]
    return table


def build(case: Case) -> tuple[list[Tensor], Case]:
    gen = torch.Generator(DEVICE).manual_seed(len(json.dumps(case)))
    dtype = getattr(torch, case["dtype"])
    b, t, h, k, v = (case[x] for x in ("b", "t", "h", "k", "v"))
    s = case.get("s", t)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=gen)

    if case.get("view"):
        q, key, val = draw(b, t, 3, h, k).to(dtype).unbind(2)
    else:
        q, key, val = draw(b, t, h, k).to(dtype), draw(b, s, h, k).to(dtype), draw(b, s, h, v).to(dtype)
    n = len(case["cu"]) - 1 if "cu" in case else b
    gate = -F.softplus(draw(b, t, h) - 3) if case.get("gate") else None
    s0 = draw(n, h, k, v) if case.get("init") else None
    z0 = draw(n, h, k).abs() * 3 if case.get("init") else None
    options: Case = {
        "causal": case["causal"],
        "feature_map": case["map"],
        "signed": case.get("signed", False),
        "normalize": case.get("normalize", True),
        "eps": case.get("eps", 1e-6),
        "lengths": torch.tensor(case["lengths"], device=DEVICE) if "lengths" in case else None,
        "cu_seqlens": torch.tensor(case["cu"], device=DEVICE, dtype=torch.int32) if "cu" in case else None,
    }
    return [x for x in (q, key, val, gate, s0, z0) if x is not None], options


def run(
    fn: Callable[..., tuple[Tensor, ...]], case: Case, tensors: list[Tensor], options: Case, weights: list[Tensor]
) -> list[Tensor]:
    """Outputs, states and gradients of every input, for fixed weights on the three outputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    rest = iter(leaves[3:])
    gate = next(rest) if case.get("gate") else None
    s0, z0 = (next(rest), next(rest)) if case.get("init") else (None, None)
    out = fn(*leaves[:3], **options, log_gate=gate, s0=s0, z0=z0)
    grads = torch.autograd.grad(out, leaves, [w.to(x.dtype) for w, x in zip(weights, out, strict=True)])
    return [*(x.detach() for x in out), *grads]


def check(case: Case) -> Case:
    """Errors of ours and of the plain expression against float64, by name."""
    torch.set_num_threads(1)
    names = ["o", "s", "z", "dq", "dk", "dv"]
    names += ["dgate"] if case.get("gate") else []
    names += ["ds0", "dz0"] if case.get("init") else []
    tensors, options = build(case)
    b, t, h, v = (case[x] for x in ("b", "t", "h", "v"))
    n = len(case["cu"]) - 1 if "cu" in case else b
    shapes = (b, t, h, v), (n, h, case["k"], v), (n, h, case["k"])
    gen = torch.Generator(DEVICE).manual_seed(7)
    weights = [torch.randn(s, device=DEVICE, generator=gen) for s in shapes]
    weights[0] = weights[0].to(tensors[0].dtype)
    weights[1:] = [w * 1e-4 for w in weights[1:]]  # else the states would dominate the outputs in dk and dv
    result: Case = {"case": case}
    ours = run(fused_attention, case, tensors, options, weights)
    exact = run(plain, case, [x.double() for x in tensors], options, weights)
    rough = run(plain, case, tensors, options, weights)
    ok = True
    for name, a, p, e in zip(names, ours, rough, exact, strict=True):
        scale = e.double().norm().clamp(min=1e-30)
        mine, theirs = (float((x.double() - e).norm() / scale) for x in (a, p))
        theirs = theirs if math.isfinite(theirs) else math.inf  # the plain expression overflows float16 at 64k
        result[name] = (mine, theirs)
        ok &= bool(torch.isfinite(a).all()) and mine <= 2 * theirs + 3e-7
    result["ok"] = ok
    return result


def special(name: str) -> Case:
    """Checks that do not compare errors; each raises if it fails."""
    torch.set_num_threads(1)
    dtype = torch.float32 if SMALL else torch.bfloat16
    b, t, h, w = (1, 40, 1, 16) if SMALL else (2, 3000, 4, 64)
    case: Case = {
        "b": b,
        "t": t,
        "h": h,
        "k": w,
        "v": w,
        "dtype": str(dtype).split(".")[1],
        "map": "elu+1",
        "causal": True,
    }
    tensors, options = build(case)

    def loss(*x: Tensor) -> Tensor:
        out = fused_attention(*x, **options, log_gate=None, s0=None, z0=None)
        return out[0].float().square().sum() + out[1].square().sum() * 1e-6

    def grads(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        return list(torch.autograd.grad(fn(*leaves), leaves))

    if name == "large":
        for kind in ("elu+1", "relu", "identity"):
            for causal in (True, False):
                for d in (dtype,) if SMALL else (torch.bfloat16, torch.float16, torch.float32):
                    big = [(torch.rand_like(x, dtype=torch.float32) * 2e4 - 1e4).to(d) for x in tensors]
                    opts = options | {"causal": causal, "feature_map": kind, "signed": kind == "identity", "eps": 1e-6}
                    big = [x.requires_grad_() for x in big]
                    out = fused_attention(*big, **opts, log_gate=None, s0=None, z0=None)
                    for x in (*out, *torch.autograd.grad(out[0].float().sum(), big)):
                        assert bool(torch.isfinite(x).all()), f"{kind} {d} causal={causal}"
    if name == "gate -1e4":
        gate = torch.zeros(b, t, h, device=DEVICE)
        gate[:, t // 3] = -1e4
        gate[:, t // 2 :] = -1e4
        gate.requires_grad_()
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = fused_attention(*leaves, **options, log_gate=gate, s0=None, z0=None)
        for x in (*out, *torch.autograd.grad(out[0].float().square().sum(), [*leaves, gate])):
            assert bool(torch.isfinite(x).all()), name
        v = leaves[2].detach().float()
        gap = (out[0].detach().float() - v)[:, t // 2 :].abs().max()
        assert float(gap) < 0.02 * float(v.abs().max()), "a closed gate must leave o = v"
    if name == "compile":
        ours, compiled = grads(loss, tensors), grads(torch.compile(loss, fullgraph=True), tensors)
        assert all(torch.allclose(x, y, rtol=1e-2, atol=1e-3) for x, y in zip(ours, compiled, strict=True)), name
    if name == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        ours = grads(loss, tensors)
        again = grads(lambda *x: checkpoint(loss, *x, use_reentrant=False), tensors)
        assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)), name
    if name == "graph" and not SMALL:
        for cu in (None, (0, 700, 701, 3000)):
            opts = options | {"cu_seqlens": None if cu is None else torch.tensor(cu, device=DEVICE, dtype=torch.int32)}
            given = tensors if cu is None else [x[:1] for x in tensors]
            leaves = [x.detach().clone().requires_grad_() for x in given]

            def work(leaves: list[Tensor] = leaves, opts: Case = opts) -> list[Tensor]:
                out = fused_attention(*leaves, **opts, log_gate=None, s0=None, z0=None)
                return [*out, *torch.autograd.grad(out[0].float().square().sum(), leaves)]

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held = work()
            with torch.no_grad():
                for x in leaves:
                    x.copy_(torch.randn_like(x))
            graph.replay()
            for x, y in zip(held, work(), strict=True):
                assert torch.equal(x, y), name
    if name == "step":
        for gated in (False, True):
            q, k, v = (x[:, 0] for x in tensors)
            s = torch.randn(b, h, w, w, device=DEVICE)
            z = torch.rand(b, h, w, device=DEVICE)
            g = -torch.rand(b, h, device=DEVICE) if gated else None
            spec = Spec(feature_map="elu+1", signed=False, normalize=True, eps=1e-6)
            more = {x: y[:, None].double() for x, y in (("q", q), ("k", k), ("v", v))}
            exact = plain(
                *more.values(),
                **options,
                log_gate=None if g is None else g[:, None].double(),
                s0=s.double(),
                z0=z.double(),
            )
            o1, s1, z1 = fused_step(q, k, v, g, None, s, z, spec, inplace=False)
            o2, s2, z2 = fused_step(q, k, v, g, None, s, z, spec, inplace=True)
            assert torch.equal(o1, o2), name
            assert torch.equal(s1, s), name
            assert torch.equal(z1, z), name
            assert s2 is s, name
            assert z2 is z, name
            for x, y, tol in (
                (o1, exact[0][:, 0], 1e-2 if not SMALL else 1e-5),
                (s1, exact[1], 1e-6),
                (z1, exact[2], 1e-6),
            ):
                assert float((x.double() - y).norm() / y.norm()) < tol, name
    return {"case": name, "ok": True}


SPECIAL = ("large", "gate -1e4", "compile", "checkpoint", "graph", "step")


class Hopper:
    """Stands for the driver that Triton asks when it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_ahead(job: tuple[Case, str | None, tuple[Any, ...]]) -> None:
    """Compile the kernels of a case, or one of them with other launch parameters, into Triton's cache."""
    import triton

    from subquad.ops.linear import launches_triton

    case, only, parameters = job
    triton.runtime.driver.set_active(Hopper())

    def compile_only(key: Any, kernel: Any, tensors: Any, plan: Any) -> None:
        if only is None or only == name_of(key):
            grid, numbers, constants, warps, stages, registers, _ = plan()
            options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
            kernel.warmup(*tensors, *numbers, grid=grid, **constants, **options)

    starts: Any = launches_triton
    starts.launch_by_key = compile_only
    if only is not None:
        override(case, only, parameters)
    b, t, h, k, v = (case[x] for x in ("b", "t", "h", "k", "v"))
    s, n, dtype = case.get("s", t), len(case["cu"]) - 1 if "cu" in case else b, getattr(torch, case["dtype"])
    q, key, val = (torch.empty(b, x, h, w, dtype=dtype) for x, w in ((t, k), (s, k), (s, v)))
    if case.get("view"):
        q, key, val = torch.empty(b, t, 3, h, k, dtype=dtype).unbind(2)
    init = [torch.empty(n, h, k, v), torch.empty(n, h, k)] if case.get("init") else [None, None]
    given: tuple[Any, ...] = (
        q, key, val, torch.zeros(b, t, h) if case.get("gate") else None,
        torch.tensor(case["lengths"]) if "lengths" in case else None,
        torch.tensor(case["cu"], dtype=torch.int32) if "cu" in case else None, *init,
    )  # fmt: skip
    spec = Spec(
        case["causal"], case["map"], case.get("signed", False), case.get("normalize", True), case.get("eps", 1e-6)
    )
    for save in (False, True) if case.get("timed") else (True,):
        out = fused.forward(Inputs(*given), spec, save)
    ds, dz = (None if case.get("timed") else torch.empty_like(end) for end in out[1:3])
    fused.backward(torch.empty_like(out[0]), ds, dz, Inputs(*given), spec, out)


def override(case: Case, kernel: str, parameters: tuple[Any, ...]) -> None:
    from subquad.ops.linear import launches_triton

    for name in (kernel, f"{kernel} many"):
        launches_triton.TUNED[(name, case["causal"], case["k"], case["v"], 2)] = launches_triton.Config(*parameters)


def name_of(key: tuple[Any, ...]) -> str:
    """backward_kv is also launched as backward_k and backward_v."""
    return str(key[1])


def compile_all(jobs: list[tuple[Case, str | None, tuple[Any, ...]]]) -> list[bool]:
    """Whether each job compiles. Children are forked before this process uses the GPU, so they start without one."""
    if SMALL or not torch.cuda.is_available():
        return [True] * len(jobs)
    start = time.time()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("fork")) as pool:
        done = [pool.submit(compile_ahead, job) for job in jobs]
        problems = [x.exception() for x in done]
    for (case, only, parameters), problem in zip(jobs, problems, strict=True):
        if problem is not None:
            print(f"does not compile: {only or case} {parameters} {type(problem).__name__} {str(problem)[:80]}")
    print(f"compiled for {len(jobs)} calls in {time.time() - start:.0f} s", flush=True)
    return [problem is None for problem in problems]


def timed_case(t: int, k: int, v: int, causal: bool) -> Case:
    shape = {"b": TOKENS // t, "t": t, "h": HEADS, "k": k, "v": v}
    return shape | {"dtype": "bfloat16", "map": "elu+1", "causal": causal, "timed": True}


def attempt(job: Any) -> Case:
    try:
        return special(job) if isinstance(job, str) else check(job)
    except Exception as error:
        return {"case": job, "ok": False, "error": f"{type(error).__name__}: {error}"[:600]}


def pool_map(fn: Callable[[Any], Any], jobs: list[Any]) -> list[Any]:
    """Run jobs in parallel, because a case takes longer on the host than on the GPU."""
    workers = min(16, os.cpu_count() or 1, len(jobs))
    if SMALL or workers < 2:
        return [fn(j) for j in jobs]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return list(pool.imap(fn, jobs, chunksize=1))


def check_all() -> list[Case]:
    # slow cases first, so that no worker has a long one at the end
    results = pool_map(attempt, [*SPECIAL, *cases()])
    worst = 0.0
    for r in results:
        if isinstance(r["case"], str):
            print(f"{'ok  ' if r['ok'] else 'FAIL'} {r['case']} {r.get('error', '')}")
            continue
        label = " ".join(f"{k}={v}" for k, v in r["case"].items())
        ratios = {k: v[0] / max(v[1], 1e-12) for k, v in r.items() if isinstance(v, tuple)}
        peak = max(ratios, key=lambda k: ratios[k]) if ratios else ""
        note = f"worst {peak} {r[peak][0]:.1e} = {ratios[peak]:.2f} x plain" if ratios else r.get("error", "")
        worst = max(worst, *ratios.values()) if r["ok"] and ratios else worst
        print(f"{'ok  ' if r['ok'] else 'FAIL'} {note:36s} {label}")
        if not r["ok"]:
            print("     ", {k: (f"{v[0]:.1e}", f"{v[1]:.1e}") for k, v in r.items() if isinstance(v, tuple)})
    print(f"{sum(r['ok'] for r in results)} of {len(results)} checks passed")
    return results


def median(fn: Callable[[], Any], rep: int = 40) -> float:
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=10, rep=rep, return_mode="median"))


def inputs(t: int, k: int = 64, v: int = 64, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> list[Tensor]:
    b = TOKENS // t
    shapes = (b, t, HEADS, k), (b, t, HEADS, k), (b, t, HEADS, v)
    return [torch.randn(s, device="cuda", dtype=dtype).requires_grad_(grad) for s in shapes]


OPTIONS: Case = {
    "feature_map": "elu+1", "signed": False, "normalize": True, "eps": 1e-6,
    "lengths": None, "cu_seqlens": None, "log_gate": None, "s0": None, "z0": None,
}  # fmt: skip


def times(fn: Callable[..., Tensor], t: int, k: int = 64, v: int = 64) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward."""
    x = inputs(t, k, v, grad=True)
    with torch.no_grad():
        ahead = median(lambda: fn(*x))
        do = torch.randn_like(fn(*x))
    return ahead, median(lambda: torch.autograd.grad(fn(*x), x, do))


def replay(fn: Callable[[], Any]) -> float:
    """Milliseconds of the device alone: in a CUDA graph of four calls, the host's launch time does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            fn()
    return median(graph.replay) / 4


def ours(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: fused_attention(q, k, v, causal=causal, **OPTIONS)[0]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def peers() -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {"flash softmax": flash}
    with contextlib.suppress(Exception):
        from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn

        found["fla chunk"] = lambda q, k, v: chunk_linear_attn(
            F.elu(q) + 1, F.elu(k) + 1, v, normalize=True, scale=1.0
        )[0]
        found["fla fused_chunk"] = lambda q, k, v: fused_chunk_linear_attn(
            F.elu(q) + 1, F.elu(k) + 1, v, normalize=True, scale=1.0
        )[0]
    return found


def copy_bandwidth() -> float:
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / median(lambda: b.copy_(a)) * 1e3


def peak_memory(causal: bool) -> float:
    """Bytes above inputs, outputs and gradients of forward + backward at 64k, over the bytes of one input."""
    x = inputs(65536, grad=True)
    do = torch.randn_like(x[0])
    out: tuple[Tensor, ...] = ()
    grads: tuple[Tensor, ...] = ()
    for _ in range(2):
        out, grads = (), ()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = fused_attention(*x, causal=causal, **OPTIONS)
        grads = torch.autograd.grad(out[0], x, do)
        torch.cuda.synchronize()
    held = sum(y.numel() * y.element_size() for y in (*out, *grads))
    return (torch.cuda.max_memory_allocated() - before - held) / (x[0].numel() * x[0].element_size())


def step_bandwidth(batch: int, width: int = 64) -> tuple[float, float]:
    """Milliseconds of one in-place step over all heads, and state bytes read and written per second."""
    q, k, v = (torch.randn(batch, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    s = torch.randn(batch, HEADS, width, width, device="cuda")
    z = torch.rand(batch, HEADS, width, device="cuda") + 1
    spec = Spec(feature_map="elu+1", signed=False, normalize=True, eps=1e-6)
    with torch.no_grad():
        ms = median(lambda: fused_step(q, k, v, None, None, s, z, spec, inplace=True))
    return ms, 2 * (s.numel() + z.numel()) * 4 / ms * 1e3


def sweep(candidates: list[int]) -> dict[str, Any]:
    """Device time of the causal bars for several numbers of programs; keeps the best one relative to the bars."""
    tried: dict[int, dict[str, list[float]]] = {}
    cost: dict[int, float] = {}
    for programs in candidates:
        fused.PROGRAMS = programs
        rows = tried[programs] = {}
        cost[programs] = 0.0
        for t in LENGTHS:
            x = inputs(t, grad=True)
            row = rows[str(t)] = [replay(partial(forward, x, True)), replay(partial(forward_backward, x, True))]
            cost[programs] += row[0] / BARS["causal forward"][t][0] + row[1] / BARS["causal forward+backward"][t][0]
        print(f"programs {programs:5d}: " + "  ".join(f"{a:.3f}/{b:.3f}" for a, b in rows.values()), flush=True)
    fused.PROGRAMS = min(cost, key=lambda programs: cost[programs])
    print(f"programs: {fused.PROGRAMS}", flush=True)
    return {"tried": tried, "used": fused.PROGRAMS}


def speed(candidates: list[int]) -> Case:
    figures: Case = {"copy bandwidth, bytes/s": copy_bandwidth(), "ms": {}, "bars": {}}
    if candidates:
        figures["programs"] = sweep(candidates)
    print(f"copy {figures['copy bandwidth, bytes/s'] / 1e12:.2f} TB/s")
    table = figures["ms"]
    graphs = figures["ms in a CUDA graph"] = {}
    for t in LENGTHS:
        for name, causal in (("causal", True), ("bidirectional", False)):
            table[f"{name} K=V=64 T={t}"] = times(ours(causal), t)
            x = inputs(t, grad=True)
            graphs[f"{name} K=V=64 T={t}"] = (
                replay(partial(forward, x, causal)),
                replay(partial(forward_backward, x, causal)),
            )
    for k, v in WIDTHS:
        for t in (1024, 65536):
            for name, causal in (("causal", True), ("bidirectional", False)):
                try:
                    table[f"{name} K={k} V={v} T={t}"] = times(ours(causal), t, k, v)
                except Exception as error:
                    print(f"K={k} V={v} T={t}: {error}")
    for name, fn in peers().items():
        for t in LENGTHS:
            if name == "flash softmax" and t > 16384:
                continue
            try:
                table[f"{name} T={t}"] = times(fn, t)
            except Exception as error:
                print(f"{name} T={t}: {error}")
    for name, (ahead, both) in table.items():
        print(f"{name:34s} forward {ahead:7.3f}   forward+backward {both:7.3f}")
    for bar, limits in BARS.items():
        kind, what = bar.split(" ", 1)
        for t, (must, goal) in limits.items():
            value = table[f"{kind} K=V=64 T={t}"][what != "forward"]
            met = "goal" if value <= goal else "must" if value <= must else "missed"
            alone = graphs[f"{kind} K=V=64 T={t}"][what != "forward"]
            figures["bars"][f"{bar} T={t}"] = {"ms": value, "graph": alone, "must": must, "goal": goal, "met": met}
            print(f"{bar:32s} T={t:6d} {value:6.3f} (graph {alone:.3f})  must {must:.2f}  goal {goal:.2f}  {met}")
    figures["memory above inputs, outputs, gradients / one input, T=65536"] = {
        name: peak_memory(causal) for name, causal in (("causal", True), ("bidirectional", False))
    }
    print("memory", figures["memory above inputs, outputs, gradients / one input, T=65536"])
    figures["step"] = {}
    for batch in (256, 1024, 4096):
        ms, rate = step_bandwidth(batch)
        share = rate / figures["copy bandwidth, bytes/s"]
        figures["step"][batch] = {"ms": ms, "bytes/s": rate, "share of copy": share}
        print(f"step batch {batch:5d}: {ms:.3f} ms, {share:.1%} of copy bandwidth")
    return figures


def grid(kernel: str, k: int, v: int) -> list[tuple[Any, ...]]:
    """Launch parameters worth trying: chunk, block, warps, stages, register cap."""
    widest = v if kernel in ("forward", "backward_v") else k
    return [
        (chunk, block, warps, stages, cap)
        for block in {min(widest, 32), min(widest, 64)}
        for chunk, warps, caps in ((64, 4, (128, 168, 255)), (128, 8, (128,)))
        for cap in caps
        for stages in (1, 2, 3, 4)
    ]


def forward(x: list[Tensor], causal: bool) -> Tensor:
    with torch.no_grad():
        return ours(causal)(*x)


def forward_backward(x: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    out = ours(causal)(*x)
    return torch.autograd.grad(out, x, out.detach())


def launches(x: list[Tensor], causal: bool) -> list[tuple[str, Callable[[], None]]]:
    """The kernels of one forward and backward by name, so that each can be run again alone."""
    from subquad.ops.linear import launches_triton

    found: list[tuple[str, Callable[[], None]]] = []
    starts: Any = launches_triton
    run = starts.launch_by_key

    def visit(key: Any, kernel: Any, tensors: Any, plan: Any) -> None:
        run(key, kernel, tensors, plan)
        found.append((name_of(key), partial(run, key, kernel, tensors, plan)))

    starts.launch_by_key = visit
    try:
        forward_backward(x, causal)
    finally:
        starts.launch_by_key = run
    return found


def tune(widths: list[tuple[int, int]]) -> Case:
    """Milliseconds of every kernel with every set of launch parameters, at two lengths, the best first."""
    from subquad.ops import launch
    from subquad.ops.linear import launches_triton

    kernels = ("states", "forward", "backward_q", "backward_kv", "backward_v", "backward_k")
    trials: list[tuple[Case, str | None, tuple[Any, ...]]] = [
        (timed_case(t, k, v, causal), name, values)
        for (k, v), causal, name in itertools.product(widths, (True, False), kernels)
        for values in grid(name, k, v)
        for t in (1024, 65536)
    ]
    rows: dict[str, list[Any]] = {}
    for (case, name, values), fine in zip(trials, compile_all(trials), strict=True):
        if not fine or name is None:
            continue
        known = dict(launches_triton.TUNED)
        override(case, name, values)
        launch._READY.clear()
        try:
            found = launches(inputs(case["t"], case["k"], case["v"], grad=True), case["causal"])
            for ms in [median(work, 10) for one, work in found if one == name]:
                rows.setdefault(f"{name} {case['k']}x{case['v']} causal={case['causal']} T={case['t']}", []).append(
                    [ms, *values]
                )
        except Exception as error:  # skip parameters that do not fit
            print(f"{name} {values}: {type(error).__name__} {str(error)[:80]}")
        launches_triton.TUNED.clear()
        launches_triton.TUNED.update(known)
    for name, row in rows.items():
        row.sort()
        print(f"{name}: " + ", ".join(f"{ms:.3f} {values}" for ms, *values in row[:5]))
    return rows


def facts() -> Case:
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
        "tokens": TOKENS,
        "heads": HEADS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for linear.json (or linear_tune.json)")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--tune", action="store_true", help="search launch parameters")
    parser.add_argument("--programs", default="", help="numbers of programs to choose from, e.g. 264,528,1056")
    parser.add_argument("--commit", help="the measured commit, if there is no git history")
    parser.add_argument("--widths", default="64x64", help="K x V to tune, e.g. 64x64,128x128")
    args = parser.parse_args()
    tell_commit(args.commit)
    report: Case = facts()
    start = time.time()
    passed = True
    if args.tune:
        report["tune"] = tune([(int(k), int(v)) for k, v in (w.split("x") for w in args.widths.split(","))])
    else:
        shapes = [(64, 64, t) for t in LENGTHS] + [(k, v, t) for k, v in WIDTHS for t in (1024, 65536)]
        timed = [] if args.check else [timed_case(t, k, v, c) for k, v, t in shapes for c in (True, False)]
        # the widest take longest
        needed = sorted((*timed, *cases()), key=lambda case: -case["k"] * case["v"])
        compile_all([(case, None, ()) for case in needed])
        report["checks"] = check_all()
        passed = all(r["ok"] for r in report["checks"])
        print(f"checks took {time.time() - start:.0f} s", flush=True)
        if not args.check:
            report |= speed([int(n) for n in args.programs.split(",") if n])
    print(f"{time.time() - start:.0f} s in all")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "linear_tune.json" if args.tune else "linear.json"
        (args.out / name).write_text(json.dumps(report, indent=1, default=str) + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
