"""The figures that ship with the package: every mechanism against exact softmax, causal and bidirectional.

    PYTHONPATH=src python3 benchmarks/figures.py --device cpu --out DIR      about seven minutes on two quiet cores
    PYTHONPATH=src python3 benchmarks/figures.py --device cuda --out DIR     about four minutes

    PYTHONPATH=src python3 benchmarks/figures.py --quality --forms causal --out DIR    six minutes on two quiet cores
    PYTHONPATH=src python3 benchmarks/figures.py --merge FROM --mechanisms gla,deltanet --out DIR

Writes DIR/cpu_causal.json and DIR/cpu_bidirectional.json (or cuda_...), which belong in src/subquad/studies/figures.
--quality trains every mechanism shortly on the digits that ship with the package, on the CPU, and adds the results to
the files that exist in DIR, for both devices. --merge takes figures of some mechanisms from the files in FROM, which
a later run of this program wrote, into those in DIR. Ratios stay those to the softmax of the run they come from.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.machine import commit, machine, tell_commit
from subquad.measure import growth
from subquad.mechanisms import MECHANISMS
from subquad.studies.compare import compare
from subquad.studies.quality import quality
from subquad.studies.results import Comparison, load, save
from subquad.studies.settings import Settings

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


FORMS = {"causal": None, "bidirectional": False}


def learn(out: Path, forms: list[str], some: dict[str, Any]) -> None:
    """Train each mechanism for the same few steps and write the results into the figures of every device."""
    for form in forms:
        settings = Settings(device="cpu", causal=FORMS[form], task="digits", **some)
        found = []
        for name in settings.mechanisms:
            found.append(quality(settings, name))
            print(form, name, found[-1].get("value", found[-1].get("reason")), flush=True)
        about = {"machine": machine("cpu"), "commit": commit(), "steps": settings.steps}
        for path in sorted(out.glob(f"*_{form}.json")):
            results = json.loads(path.read_text())
            results["settings"]["task"] = settings.task
            for key, records in (
                ("quality", [record for record in found if "value" in record]),
                ("quality_missing", [record for record in found if "value" not in record]),
            ):
                others = [record for record in results[key] if record["mechanism"] not in settings.mechanisms]
                results[key] = others + records
            if some:
                results["added"] = [*results.get("added", []), {"quality": list(settings.mechanisms), **about}]
            else:
                results["quality_measured"] = about
            save(results, path)


def merge(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Put the rows of these mechanisms from one file into another; say in it where they come from."""
    new, results = load(source, Comparison), load(target, Comparison)
    for key in ("dim", "heads", "batch", "device", "dtype", "lengths"):
        if new.settings[key] != results.settings[key]:
            raise SystemExit(f"{source} has {key}={new.settings[key]}, {target} has {results.settings[key]}")
    results.rows = [row for row in results.rows if row.mechanism not in names]
    results.rows += [row for row in new.rows if row.mechanism in names]
    results.growth, results.crossovers = growth.growths(results.rows), growth.crossovers(results.rows)
    known = {*results.settings["mechanisms"], *names}
    results.settings["mechanisms"] = [name for name in MECHANISMS if name in known]
    about = {"rows": list(names), "commit": new.commit, "date": new.date, "machine": new.machine}
    results.added = [*(results.added or []), about]
    save(results, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--forms", default="causal,bidirectional")
    parser.add_argument("--mechanisms", help="names with commas between them; by default all that have the form")
    parser.add_argument("--commit", help="the commit that is measured, if the copy has no git history")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--merge", type=Path, help="measure nothing: take rows of --mechanisms from the files in this folder"
    )
    parser.add_argument("--quality", action="store_true", help="measure only quality and add it to the existing files")
    options = parser.parse_args()
    tell_commit(options.commit)
    some: dict[str, Any] = {"mechanisms": tuple(options.mechanisms.split(","))} if options.mechanisms else {}
    if options.quality:
        learn(options.out, options.forms.split(","), some)
        return
    if options.merge:
        for path in sorted(options.merge.glob("*.json")):
            merge(path, options.out / path.name, some["mechanisms"])
        return
    for form in options.forms.split(","):
        # None: mechanisms with a causal form are causal; the others are bidirectional, against a bidirectional softmax
        settings = Settings(device=options.device, causal=FORMS[form], **SHAPES[options.device], **some)
        results = compare(settings, options.out / form, Console(file=sys.stdout), remember=False)
        save(results, options.out / f"{options.device}_{form}.json")


if __name__ == "__main__":
    main()
