"""A made-up run of `subquad compare`, with everything such a run can hold."""

import base64
import json
import math
from pathlib import Path
from typing import Any

from subquad.mechanisms import MECHANISMS

LENGTHS = (512, 1024, 2048, 4096, 8192)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def spread(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.15 * value}


def results() -> dict[str, Any]:
    """Softmax grows with T², the others with T; `gmlp` is skipped at the end, `rfa` fails once."""
    rows: list[dict[str, Any]] = []
    crossovers = []
    for place, (name, cls) in enumerate(MECHANISMS.items()):
        causal = cls.traits.causal
        for length in LENGTHS:
            row: dict[str, Any] = {"mechanism": name, "length": length, "causal": causal}
            row |= dict.fromkeys(("skipped", "error"))
            softmax = 1.1 * (length / 512) ** 2
            time = softmax if name == "softmax" else (2 + place / 7) * length / 512
            row |= dict.fromkeys(("forward_ms", "training_ms", "forward_ratio", "training_ratio", "decode_ms"))
            row |= dict.fromkeys(("decode_ratio", "peak_bytes", "memory_ratio", "state_bytes"))
            if name == "gmlp" and length == LENGTHS[-1]:
                row["skipped"] = "needs 4.1 GB, <3.2 GB are free"
            elif name == "rfa" and length == 1024:
                row["error"] = "RuntimeError: made up & escaped"
            else:
                row |= {"forward_ms": spread(time / 3), "training_ms": spread(time)}
                row |= {"forward_ratio": spread(time / softmax), "training_ratio": spread(time / softmax)}
                row |= {"peak_bytes": 4096 * length + place, "memory_ratio": 1 + place / 4096 / length}
                if cls.traits.state:
                    row |= {"decode_ms": spread(0.1), "decode_ratio": spread(1.0), "state_bytes": 8 * length}
            rows.append(row)
        crossing = round(512 * (2 + place / 7) / 1.1)
        crossovers.append(
            {"mechanism": name, "training": None if name == "softmax" else crossing, "forward": None, "memory": None}
        )
    quality: list[dict[str, Any]] = [
        {
            "mechanism": name,
            "task": "digits",
            "metric": "bits/dim",
            "value": 2 + place / 10,
            "lower_is_better": True,
            "steps": 40,
            "seconds": 3.5 + place,
            "curve": [[step, 2 + place / 10 + math.exp(-step / 9)] for step in range(1, 41)],
        }
        for place, name in enumerate(("softmax", "linear", "local"))
    ]
    return {
        "kind": "compare",
        "subquad": "0.1.0",
        "commit": "0123abc",
        "date": "2026-11-16T00:00:00+00:00",
        "machine": {"device": "cpu", "cpu": "Made-up 9000", "threads": 2, "python": "3.11", "torch": "2.13.0"},
        "settings": {"lengths": list(LENGTHS), "dim": 64, "heads": 2, "batch": 1, "dtype": "float32", "causal": None},
        "rows": rows,
        "growth": [
            {"mechanism": name, "time": 0.97, "memory": 1.0, "documented_time": cls.exponent, "documented_memory": 1.0}
            for name, cls in MECHANISMS.items()
        ],
        "crossovers": crossovers,
        "quality": quality,
        "quality_missing": [{"mechanism": "fnet", "task": "digits", "reason": "has no causal form"}],
        "pictures": [{"title": "linear </script> generated", "file": "digits_linear.png"}],
        "interrupted": False,
    }


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**results(), **changes}))
    (folder / "digits_linear.png").write_bytes(PIXEL)
    return folder
