from typing import Any

import pytest

from subquad.measure import growth
from subquad.measure.cost import Row
from subquad.studies.conclusions import conclusions
from subquad.studies.results import Comparison, Quality, from_json

Rows = list[dict[str, Any]]


def row(name: str, length: int, ratio: float | None, state: int | None = None, token: float | None = None) -> Any:
    spread = {"median": ratio, "low": ratio, "high": ratio}
    return {
        "mechanism": name,
        "length": length,
        "training_ratio": None if ratio is None else spread,
        "forward_ratio": None,
        "memory_ratio": None,
        "state_bytes": state,
        "decode_ms": None if token is None else {"median": token, "low": token, "high": token},
    }


def learned(error: float = 0.01, **values: float) -> Rows:
    shared = {"standard_error": error, "metric": "bits/dim", "task": "digits", "steps": 150}
    return [{"mechanism": name, "value": value, **shared} for name, value in values.items()]


def say(rows: Rows, quality: Rows | None = None) -> list[str]:
    measured = from_json(list[Row], rows, "rows")
    trained = from_json(list[Quality], quality or learned(linear=2.0), "quality")
    sentences = conclusions(Comparison(rows=measured, crossovers=growth.crossovers(measured), quality=trained))
    assert len(sentences) == 3
    for sentence in sentences:
        assert sentence.endswith(".")
        assert "nan" not in sentence.lower()
        assert "None" not in sentence
    return sentences


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        (
            {"linear": (1.5, 0.05), "local": (0.5, 0.1)},
            "Speed: at 4,096 tokens linear trains fastest: it is 20 times as fast as softmax; "
            "linear takes less time than softmax from about 656 tokens on.",
        ),
        (
            {"linear": (0.5, 0.2), "local": (0.9, 0.1)},
            "Speed: at 4,096 tokens local trains fastest: it is 10 times as fast as softmax; linear is 5 times as fast "
            "as softmax; linear takes less time than softmax at every length measured.",
        ),
        (
            {"linear": (3.0, 1.5), "local": (2.0, 1.2)},
            "Speed: at 4,096 tokens nothing trains clearly faster than softmax: local takes 1.2 times as long; linear "
            "takes 1.5 times as long.",
        ),
        (
            {"local": (0.5, 1.01)},
            "Speed: at 4,096 tokens nothing trains clearly faster than softmax: local takes about as long as softmax.",
        ),
        ({"local": (None, None)}, "Speed: nothing could be timed beside softmax."),
        (  # too slow for the longest length
            {"linear": (2.0, None), "local": (0.5, 0.25)},
            "Speed: at 4,096 tokens local trains fastest: it is 4 times as fast as softmax.",
        ),
    ],
)
def test_speed(ratios: dict[str, tuple[float | None, ...]], sentence: str) -> None:
    rows = [row("softmax", length, 1.0) for length in (512, 4096)]
    for name, values in ratios.items():
        rows += [row(name, length, ratio) for length, ratio in zip((512, 4096), values, strict=True)]
    assert say(rows)[0] == sentence


def test_memory() -> None:
    rows = [row("linear", n, 1.0, 8000, 0.5) for n in (512, 4096)]
    cache = [row("softmax", n, 1.0, n * 1000, 20.0) for n in (512, 4096)]
    assert say(rows + cache)[1] == (
        "Memory: to continue after 4,096 tokens linear keeps 8 kB, as at every length, and softmax a cache of 4.1 MB, "
        "512 times as much; the next token takes 500 µs and 20 ms."
    )
    assert say([row("linear", 4, 1.0, 8000), row("softmax", 4, 1.0, 400)])[1] == (
        "Memory: to continue after 4 tokens linear keeps 8 kB and softmax a cache of 400 B, which is less."
    )
    assert say(cache)[1] == "Memory: the states of linear and softmax were not both measured."


@pytest.mark.parametrize(
    ("quality", "sentence"),
    [
        (
            learned(linear=2.2, local=2.0, softmax=2.01, routing=2.25),
            "Quality: after 150 steps each, local learned best, 2.00 ± 0.02 bits/dim on unseen digits; softmax is "
            "within the noise of that; linear and routing are 0.20 to 0.25 behind (one training each).",
        ),
        (
            learned(linear=2.0, local=2.5),
            "Quality: after 150 steps each, linear learned best, 2.00 ± 0.02 bits/dim on unseen digits; local is 0.50 "
            "behind (one training each).",
        ),
        (
            learned(error=0.5, linear=2.0, local=2.5, softmax=2.1),
            "Quality: after 150 steps each, linear learned best, 2.00 ± 1.00 bits/dim on unseen digits; all others are "
            "within the noise of that (one training each).",
        ),
        (
            learned(linear=2.0),
            "Quality: linear alone was trained, and reaches 2.00 ± 0.02 bits/dim on unseen digits after 150 steps.",
        ),
    ],
)
def test_quality(quality: Rows, sentence: str) -> None:
    assert say([row("softmax", 512, 1.0)], quality)[2] == sentence
