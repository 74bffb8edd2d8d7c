"""The figures that ship with the package: every mechanism against exact softmax, causal and bidirectional.

    PYTHONPATH=src python3 bench/figures.py --device cpu --out DIR      about seven minutes on two quiet cores
    PYTHONPATH=src python3 bench/figures.py --device cuda --out DIR     about four minutes

Writes DIR/cpu_causal.json and DIR/cpu_bidirectional.json (or cuda_...), which belong in src/subquad/bench/figures.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.bench.compare import compare, save
from subquad.bench.settings import Settings

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "dtype": "bfloat16",
        "dim": 512,
        "heads": 8,
        "batch": 4,
        "lengths": (1024, 4096, 16384, 65536),
        "repeats": 1,
        "seconds": 0.1,
        "limit": 1.0,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--forms", default="causal,bidirectional")
    parser.add_argument("--mechanisms", help="names with commas between them; by default all that have the form")
    parser.add_argument("--commit", help="the commit that is measured, where the copy has no history")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    some: dict[str, Any] = {"mechanisms": tuple(options.mechanisms.split(","))} if options.mechanisms else {}
    for form in options.forms.split(","):
        # None: causal where there is a causal form, and the rest bidirectional beside a bidirectional softmax
        causal = {"causal": None, "bidirectional": False}[form]
        settings = Settings(device=options.device, causal=causal, **SHAPES[options.device], **some)
        results = compare(settings, options.out / form, Console(file=sys.stdout), remember=False)
        results["commit"] = options.commit or results["commit"]
        save(results, options.out / f"{options.device}_{form}.json")


if __name__ == "__main__":
    main()
