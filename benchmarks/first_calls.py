"""How long the first call of each mechanism takes on a GPU, when Triton has compiled nothing yet.

    python benchmarks/first_calls.py --out DIR            figures to DIR/first_calls.json
    python benchmarks/first_calls.py --out DIR --mechanisms fixed,mixed --lengths 16384,4096

Each mechanism runs in a process of its own with an empty cache of compiled kernels, several processes side by side.
What any program pays once (torch's start on the GPU, Triton's driver) is left out. The first length shows what
compilation costs; the others, in the same process, what another length costs after it.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from subquad.machine import origin, tell_commit
from subquad.measure.cost import Decode, Shape, Subject, first_line
from subquad.mechanisms import MECHANISMS
from subquad.studies.results import save

BARS = {"seconds of the first call of a shape (must, goal)": (10, 4)}
SIZES: dict[str, Any] = {"dim": 512, "heads": 8, "batch": 4, "dtype": "bfloat16"}
TINY: dict[str, Any] = {"dim": 32, "heads": 2, "batch": 1}


def seconds(run: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def start(device: str) -> None:
    """What every program pays, whatever it computes."""
    if device == "cpu":
        return
    import triton

    square = torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()
    triton.runtime.driver.active.get_current_device()
    torch.cuda.synchronize()


def first_calls(name: str, causal: bool, lengths: list[int], device: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first training step, and of the first decoded token, at each length in turn."""
    found: dict[str, Any] = {"mechanism": name, "causal": causal}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        start(device)
        for length in lengths:
            try:
                subject = Subject(name, Shape(length=length, causal=causal, device=device, **sizes))
                row = {"training": seconds(subject.training, device)}
                if subject.mix.traits.state is not None:
                    row["decoding"] = seconds(lambda made=subject: Decode(made)(), device)  # type: ignore[misc]
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {first_line(error)}"}  # type: ignore[dict-item]
            found[str(length)] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS))
    parser.add_argument("--lengths", default="16384,4096")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, as a trial")
    given = parser.parse_args()
    tell_commit(given.commit)
    names = given.mechanisms.split(",")
    if unknown := set(names) - set(MECHANISMS):
        parser.error(f"--mechanisms has {', '.join(sorted(unknown))}: accepted are {', '.join(MECHANISMS)}")
    device, sizes = ("cpu", TINY) if given.tiny else ("cuda", SIZES)
    lengths = [64, 32] if given.tiny else [int(n) for n in given.lengths.split(",")]
    cases = [
        (name, causal)
        for name, causal in itertools.product(names, (True, False))
        if getattr(MECHANISMS[name].traits, "causal" if causal else "bidirectional")
    ]
    figures: dict[str, Any] = {"kind": "first calls", **origin(device), "sizes": sizes, "workers": given.workers}
    figures |= {"bars": BARS, "rows": []}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, context, max_tasks_per_child=1) as pool:
        jobs = {pool.submit(first_calls, *case, lengths, device, sizes): case for case in cases}
        for job in as_completed(jobs):
            name, causal = jobs[job]
            failed = job.exception()
            row = {"mechanism": name, "causal": causal, "error": str(failed)} if failed else job.result()
            figures["rows"].append(row)
            figures["rows"].sort(key=lambda row: (names.index(row["mechanism"]), not row["causal"]))
            print(f"{len(figures['rows'])} of {len(cases)}", row, flush=True)
            save(figures, given.out / "first_calls.json")
    sys.exit(any("error" in str(row) for row in figures["rows"]))


if __name__ == "__main__":
    main()
