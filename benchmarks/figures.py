"""The figures that ship with the package: every mechanism against exact softmax, causal and bidirectional.

    PYTHONPATH=src python3 benchmarks/figures.py --device cpu --out DIR      about seven minutes on two quiet cores
    PYTHONPATH=src python3 benchmarks/figures.py --device cuda --out DIR

    PYTHONPATH=src python3 benchmarks/figures.py --device cuda --forms causal --minutes 8 --earlier DIR --out PART
    PYTHONPATH=src python3 benchmarks/figures.py --device cuda --forms causal --decode 64 --earlier DIR --out PART
    PYTHONPATH=src python3 benchmarks/figures.py --quality --forms causal --out DIR    six minutes on two quiet cores
    PYTHONPATH=src python3 benchmarks/figures.py --merge PART --out DIR

Writes DIR/cpu_causal.json and DIR/cpu_bidirectional.json (or cuda_...), which belong in src/subquad/studies/figures.
What DIR, or the folder of --earlier, has already is not measured again: run the program again until no file is
"interrupted". With --lengths and --mechanisms it measures a part, and with --minutes it stops by itself.
--decode measures one decoding step with other batches, at one length. --quality trains every mechanism shortly on the
digits that ship with the package, on the CPU, and adds the results to the files that exist in DIR, for both devices.
--merge puts the rows in the files of PART, or those of --mechanisms, into the files in DIR.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.machine import commit, machine, tell_commit
from subquad.measure.cost import Row
from subquad.studies.compare import compare, joined
from subquad.studies.quality import quality
from subquad.studies.results import BatchRow, Comparison, load, save
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


DECODED = 16384  # the length at which --decode starts
FORMS = {"causal": None, "bidirectional": False}
QUALITY = ("quality", "quality_missing", "quality_measured")  # fields of a Comparison


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


def merge(source: Path, target: Path, names: tuple[str, ...] | None) -> None:
    """Put rows from one file, all or those of some mechanisms, into another; say in it where they come from.

    A part that has all rows of the file takes its place, and only the quality of the file stays.
    """
    part = load(source, Comparison)
    if names is not None:
        part.rows = [row for row in part.rows if row.mechanism in names]
    whole = load(target, Comparison) if target.exists() else None
    if whole is None:
        results = part
    elif {row.key for row in whole.rows} <= {row.key for row in part.rows}:
        results = replace(part, **{name: getattr(whole, name) for name in QUALITY})
        results.settings["task"] = whole.settings["task"]
    else:
        results = joined([whole, part])
    if whole is not None and part.batches:
        results.batches = with_batches(whole.batches, part.batches)
    save(results, target)


def with_batches(old: list[BatchRow] | None, new: list[BatchRow]) -> list[BatchRow]:
    rows = {(row.mechanism, row.length, row.batch): row for row in (*(old or []), *new)}
    return list(rows.values())


def decode(out: Path, earlier: Comparison, batches: list[int], length: int, some: dict[str, Any]) -> Comparison:
    """Time a decoding step of each mechanism that has one in the earlier figures, with other batches."""
    found = [row.mechanism for row in earlier.rows if row.length == length and row.decode_ms is not None]
    names = [name for name in found if name in some.get("mechanisms", found)]
    rows: list[BatchRow] = []
    for batch in batches:
        shape = {**SHAPES[str(earlier.settings["device"]).partition(":")[0]], "batch": batch, "lengths": (length,)}
        settings = Settings(
            device=earlier.settings["device"], decode_only=True, **{**shape, "mechanisms": tuple(names)}
        )
        results = compare(settings, out / f"batch_{batch}", Console(file=sys.stdout), remember=False)
        rows += [BatchRow(**{f.name: getattr(row, f.name) for f in fields(Row)}, batch=batch) for row in results.rows]
    return replace(earlier, batches=with_batches(earlier.batches, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--forms", default="causal,bidirectional")
    parser.add_argument("--mechanisms", help="names with commas between them; by default all that have the form")
    parser.add_argument("--lengths", help="lengths with commas between them; by default all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after the figure that takes it beyond")
    parser.add_argument("--earlier", type=Path, help="a folder with figures that are not measured again")
    parser.add_argument("--decode", help="batches with commas between them: time decoding alone")
    parser.add_argument("--commit", help="the commit that is measured, if the copy has no git history")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", type=Path, help="measure nothing: take rows from the files in this folder")
    parser.add_argument("--quality", action="store_true", help="measure only quality and add it to the existing files")
    options = parser.parse_args()
    tell_commit(options.commit)
    some: dict[str, Any] = {"mechanisms": tuple(options.mechanisms.split(","))} if options.mechanisms else {}
    if options.quality:
        learn(options.out, options.forms.split(","), some)
        return
    if options.merge:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in sorted(options.merge.glob("*.json")):
            merge(path, options.out / path.name, some.get("mechanisms"))
        return
    until = time.monotonic() + 60 * options.minutes
    for form in options.forms.split(","):
        name = f"{options.device}_{form}.json"
        path = (options.earlier or options.out) / name
        earlier = load(path, Comparison) if path.exists() else None
        if options.decode:
            if earlier is None:
                parser.error(f"{path} is missing: --decode adds to figures")
            length = int(options.lengths or DECODED)
            batches = [int(n) for n in options.decode.split(",")]
            save(decode(options.out / form, earlier, batches, length, some), options.out / name)
            continue
        shape = {**SHAPES[options.device], **some}
        if options.lengths:
            shape["lengths"] = tuple(int(n) for n in options.lengths.split(","))
        # None: mechanisms with a causal form are causal; the others are bidirectional, against a bidirectional softmax
        settings = Settings(device=options.device, causal=FORMS[form], **shape)
        how = {"remember": False, "earlier": earlier.rows if earlier else (), "seconds": until - time.monotonic()}
        results = compare(settings, options.out / form, Console(file=sys.stdout), **how)
        save(results if earlier is None else joined([earlier, results]), options.out / name)


if __name__ == "__main__":
    main()
