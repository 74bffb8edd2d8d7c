"""Check kernels on a GPU against float64, then time them.

    python -m benchmarks.gpu --out DIR                                    all parts; figures to DIR/gpu.json
    python -m benchmarks.gpu --parts features,steps --checks-only --seconds 90
    python -m benchmarks.gpu --only threads,"tokens linear" --checks-only    what has one of these in its name

Run it from the root of the repository; without installing, with PYTHONPATH=src. Checks run first, in many processes.
Times follow in one process, while nothing else may use the GPU. The exit status is 1 if a check or a time failed.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from subquad.machine import origin, tell_commit
from subquad.studies.results import save

from .bench import DEVICE, check_all, cores, time_all

PARTS = ("steps", "ordered", "features", "scores", "decoding", "training", "serving")


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--seconds", type=float, default=600, help="at most for the checks, and again for the times")
    parser.add_argument("--out", type=Path, help="a folder for gpu.json")
    parser.add_argument("--workers", type=int, default=cores(), help="processes that check")
    parser.add_argument("--commit", help="what is measured, where there is no git history to ask")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--checks-only", action="store_true")
    only.add_argument("--times-only", action="store_true")
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}: accepted are {', '.join(PARTS)}")
    if DEVICE == "cpu":
        parser.error("torch finds no GPU")
    tell_commit(given.commit)
    modules: list[Any] = [importlib.import_module(f".{name}", __package__) for name in names]
    checks, times = (
        [case for m in modules for case in getattr(m, kind) if any(word in case.name for word in given.only.split(","))]
        for kind in ("CHECKS", "TIMES")
    )
    figures: dict[str, Any] = {"kind": "gpu checks", **origin(DEVICE), "parts": names, "checks": [], "times": []}
    begun = time.monotonic()
    if not given.times_only:
        figures["checks"] = check_all(checks, given.seconds, given.workers)
        right = sum(record["ok"] for record in figures["checks"])
        print(f"{right} of {len(figures['checks'])} checks are right, {time.monotonic() - begun:.0f} s", flush=True)
    if not given.checks_only:
        figures["times"] = time_all(times, given.seconds)
    if given.out:
        save(figures, given.out / "gpu.json")
    sys.exit(0 if all(record["ok"] for record in figures["checks"] + figures["times"]) else 1)


if __name__ == "__main__":
    main()
