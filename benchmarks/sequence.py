"""One sequence of a million tokens: on one process, and over two processes that share it, on one GPU.

    python benchmarks/sequence.py --out DIR          both sections; figures to DIR/sequence.json
    python benchmarks/sequence.py --out DIR --sections alone --mechanism gated_deltanet --length 262144
    python benchmarks/sequence.py --tiny --out DIR   tiny sizes on the CPU, as a trial

alone   memory and tokens a second of a forward and backward: one sequence of all tokens, and as many tokens in 64
        sequences. Blocks are computed again in backward, the feed-forward goes in chunks. At first the inputs of the
        fewest blocks are kept (checkpoint=5), then, of one sequence, those of all (checkpoint=True)
ranks   the same sequence over two processes, which exchange over gloo, because NCCL refuses two processes on one GPU:
        losses and gradients in bf16 beside those of one process, both against float32, and the bytes that were sent

The weights are float32 and the arithmetic bf16, as in the trainer. Figures are written after each section.
"""

import argparse
import gc
import multiprocessing
import statistics
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import subquad
from subquad import LanguageModel, ranks
from subquad.machine import commit, machine, tell_commit
from subquad.measure.cost import once
from subquad.studies.results import save

Figures = dict[str, Any]

MODEL: Mapping[str, Any] = {"vocab": 256, "dim": 512, "depth": 12, "heads": 8, "ff_chunks": 64, "checkpoint": 5}
TINY: Mapping[str, Any] = {"vocab": 256, "dim": 32, "depth": 3, "heads": 2, "ff_chunks": 2, "checkpoint": 2}
LENGTH, ROWS, WORLD = 1 << 20, 64, 2
BARS: Mapping[str, Any] = {  # must, goal
    "peak memory of one process with all tokens in one sequence, GB": (40, 24),
    "tokens a second, one sequence over many of the same tokens": (0.9, 1.0),
    "error of the gradients in bf16 over two processes, over that of one": (2.0, 1.0),
}


def make(model: Mapping[str, Any], mechanism: str, device: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**model, mechanism=mechanism).to(device)


def tokens_of(rows: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (rows, length), generator=generator).to(device)


def compute(model: LanguageModel, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> float:
    """A forward and a backward; the loss."""
    model.zero_grad()
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        loss = model.loss(tokens)
    loss.backward()
    return float(loss.detach())


def alone(device: str, sizes: Mapping[str, Any], mechanism: str, length: int, rounds: int) -> Figures:
    """The two shapes take turns, and who is first changes, so that a drifting clock affects both; ratios are of one
    round. A call that is not timed goes before each that is: after a change of shape memory may move."""
    model = make(sizes, mechanism, device)
    shapes = {"one sequence": (1, length), f"{ROWS} sequences": (ROWS, length // ROWS)}
    batches = {name: tokens_of(*shape, device) for name, shape in shapes.items()}
    figures: Figures = {"tokens": length}
    rates: dict[str, list[float]] = {name: [] for name in shapes}
    for name, batch in batches.items():
        figures[name] = {"shape": list(shapes[name])} | first_call(model, batch, device)
    before = retries(device)
    for turn in range(rounds):
        for name in reversed(batches) if turn % 2 else batches:
            rates[name].append(rate(model, batches[name], device))
    one, many = rates.values()
    for name, found in rates.items():
        figures[name]["tokens_per_second"] = {"median": statistics.median(found), "all": found}
    figures["one sequence over many"] = statistics.median(a / b for a, b in zip(one, many, strict=True))
    figures["times that memory ran out and was given back"] = retries(device) - before
    del model
    model, batch = make({**sizes, "checkpoint": True}, mechanism, device), batches["one sequence"]
    kept = first_call(model, batch, device)
    found = [rate(model, batch, device) for _ in range(rounds)]
    kept["tokens_per_second"] = {"median": statistics.median(found), "all": found}
    figures["one sequence, the inputs of all blocks kept"] = kept
    return figures


def first_call(model: LanguageModel, batch: Tensor, device: str) -> Figures:
    """Loss and memory of a call, which compiles and chooses kernels too."""
    tidy()
    loss = compute(model, batch)
    if device != "cuda":
        return {"loss": loss, "peak_bytes": None}
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"loss": loss, "peak_bytes": peak, "reserved_bytes": reserved}


def rate(model: LanguageModel, batch: Tensor, device: str) -> float:
    """Tokens a second of a call, after one that is not timed."""
    compute(model, batch)
    return 1000 * batch.numel() / once(partial(compute, model, batch), device)


def retries(device: str) -> int:
    """How often the allocator had to give memory back to find some, which stops the GPU."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if device == "cuda" else 0


def share(rank: int, folder: str, device: str, sizes: Mapping[str, Any], mechanism: str, length: int) -> None:
    """One of the processes; the first writes gradients and figures."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    if device == "cuda":
        torch.cuda.set_device(0)
    model = make(sizes, mechanism, device)
    part, _, _ = ranks.shard(tokens_of(1, length, device), dist.group.WORLD)
    losses: list[float] = []
    times = []
    for _ in range(2):  # the first compiles and chooses kernels
        with subquad.sequence_parallel(dist.group.WORLD) as group:
            times.append(once(lambda: losses.append(compute(model, part)), device) / 1000)
    group.sum_gradients(model)
    if rank == 0:
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        tensors = gradients(model) | {
            "figures/loss": torch.tensor(losses[-1], dtype=torch.float64),
            "figures/seconds": torch.tensor(times[-1], dtype=torch.float64),
            "figures/peak_bytes": torch.tensor(peak),
            **{f"sent/{what}": torch.tensor(count) for what, count in group.sent.items()},
        }
        save_file(tensors, Path(folder) / "found.safetensors")
    dist.destroy_process_group()


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    named = ((name, p.grad) for name, p in model.named_parameters())
    return {f"grad/{name}": grad.detach().float().cpu().clone() for name, grad in named if grad is not None}


def over_ranks(device: str, sizes: Mapping[str, Any], mechanism: str, length: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        started = multiprocessing.get_context("spawn")
        processes = [
            started.Process(target=share, args=(rank, folder, device, sizes, mechanism, length))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"the processes ended with {[process.exitcode for process in processes]}")
        found = load_file(Path(folder) / "found.safetensors")
    tidy()
    model, tokens = make(sizes, mechanism, device), tokens_of(1, length, device)
    exact_loss = compute(model, tokens, torch.float32)
    exact = gradients(model)
    loss = compute(model, tokens)
    own = gradients(model)
    errors = {name: distance(of, exact) for name, of in (("one process", own), ("two processes", found))}
    return {
        "tokens": length,
        "loss": {"float32": exact_loss, "one process": loss, "two processes": float(found["figures/loss"])},
        "error of the gradients against float32": errors,
        "two processes over one": errors["two processes"] / errors["one process"],
        "seconds": float(found["figures/seconds"]),
        "peak_bytes of a process": int(found["figures/peak_bytes"]),
        "bytes sent by the first": {name[5:]: int(count) for name, count in found.items() if name.startswith("sent/")},
    }


def distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """|found - exact| / |exact| over all gradients together."""
    squares = [(float((found[name] - g).square().sum()), float(g.square().sum())) for name, g in exact.items()]
    above, below = (sum(part) for part in zip(*squares, strict=True))
    return float((above / below) ** 0.5)


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default="alone,ranks")
    parser.add_argument("--mechanism", default="linear")
    parser.add_argument("--length", type=int, default=None, help=f"tokens; by default {LENGTH:,}")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    device, sizes, length = ("cpu", TINY, 2048) if given.tiny else ("cuda", MODEL, LENGTH)
    length = given.length or length
    job = (device, sizes, given.mechanism, length)
    sections: dict[str, Callable[[], Figures]] = {
        "alone": partial(alone, *job, given.rounds),
        "ranks": partial(over_ranks, *job),
    }
    if unknown := set(given.sections.split(",")) - sections.keys():
        parser.error(f"--sections has {', '.join(sorted(unknown))}: accepted are {', '.join(sections)}")
    figures: Figures = {"kind": "sequence", "commit": commit(), "machine": machine(device)}
    figures |= {"model": dict(sizes), "mechanism": given.mechanism, "bars (must, goal)": BARS}
    for name in given.sections.split(","):
        try:
            figures[name] = sections[name]()
        except Exception as error:
            traceback.print_exc()
            figures[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        print(name, figures[name], flush=True)
        tidy()
        save(figures, given.out / "sequence.json")


if __name__ == "__main__":
    main()
