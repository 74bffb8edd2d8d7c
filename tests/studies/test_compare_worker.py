from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.measure.cost import Row, Spread
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.local import Local
from subquad.studies.compare_worker import Bench
from subquad.studies.settings import Settings
from tests.studies.in_process import work

TINY: dict[str, Any] = {"dim": 8, "heads": 2, "repeats": 1, "threads": 1}


def test_a_row_holds_every_figure() -> None:
    row = Bench(Settings(lengths=(32,), **TINY)).row("linear", 32, True)
    for field in ("forward_ms", "training_ms", "decode_ms", "forward_ratio", "training_ratio", "decode_ratio"):
        figure = getattr(row, field)
        assert 0 < figure.low <= figure.median <= figure.high, field
    assert row.peak_bytes > 0
    assert row.memory_ratio > 0
    assert row.error is None
    assert row.skipped is None
    assert row.state_bytes == 2 * 4 * (4 + 1) * 4 + 8  # H K (V + 1) floats and a position


def test_a_state_that_grows_is_that_of_the_length() -> None:
    bench = Bench(Settings(**TINY))
    assert bench.row("softmax", 32, True).state_bytes == 2 * 32 * 8 * 4 + 8
    assert bench.row("softmax", 64, True).state_bytes == 2 * 64 * 8 * 4 + 8


def test_a_mechanism_that_raises_is_recorded_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Linear, *args: Any) -> Tensor:
        raise RuntimeError("no luck today\nsecond line")

    monkeypatch.setattr(Linear, "_forward", fails)
    settings = Settings(mechanisms=("linear", "softmax"), lengths=(16,), **TINY)
    jobs = [{"kind": "row", "mechanism": name, "length": 16, "causal": True} for name in ("linear", "softmax")]
    events = list(work(settings, jobs, []))
    assert [event["begin"]["mechanism"] for event in events if "begin" in event] == ["linear", "softmax"]
    broken, whole = [event["row"] for event in events if "row" in event]
    assert broken.error == "RuntimeError: no luck today"
    assert broken.training_ms is None
    assert whole.error is None
    assert whole.training_ms.median > 0


def test_out_of_memory_is_a_reason_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Local, *args: Any) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(Local, "_forward", fails)
    row = Bench(Settings(**TINY)).row("local", 16, True)
    assert row.error is None
    assert "out of memory" in row.skipped


def test_what_cannot_be_is_skipped_with_its_reason() -> None:
    bench = Bench(Settings(causal=True, **TINY))
    assert bench.row("fnet", 16, True).skipped == "has no causal form"
    odd = Bench(Settings(dim=9, heads=3, threads=1))
    assert "heads=3" in (odd.row("mixed", 16, True).skipped or "")


def test_what_does_not_fit_is_not_tried() -> None:
    bench = Bench(Settings(memory=4_000_000, limit=1e6, **TINY))
    fits, large = bench.row("gmlp", 512, True), bench.row("gmlp", 4096, True)
    assert fits.skipped is None
    assert large.skipped.startswith("does not fit: about ")
    assert large.peak_bytes is None
    first = Bench(Settings(memory=4_000_000, limit=1e6, **TINY)).row("gmlp", 4096, True)  # nothing shorter was measured
    assert first.skipped.startswith("does not fit: about ")


def test_what_would_take_too_long_is_not_tried() -> None:
    before = Row(mechanism="linear", length=16, causal=True, training_ms=Spread(9000.0, 3000.0, 9000.0))
    row = Bench(Settings(limit=4.0, **TINY), [before]).row("linear", 32, True)
    assert row.skipped == ("too slow: a training step took 3 s at T = 16, so about 6 s here; the limit is 4 s")
    other_form = Bench(Settings(limit=4.0, **TINY), [before]).row("linear", 32, False)
    assert other_form.skipped is None


def test_without_softmax_the_others_still_have_their_times() -> None:
    before = Row(mechanism="softmax", length=8, causal=True, training_ms=Spread(9000.0, 9000.0, 9000.0))
    row = Bench(Settings(**TINY), [before]).row("linear", 32, True)
    assert row.training_ms.median > 0
    assert row.training_ratio is None
    assert row.memory_ratio is None


def test_warming_up_meets_what_goes_wrong_without_a_word() -> None:
    jobs = [
        {"kind": "warm", "mechanism": name, "length": 32, "causal": causal}
        for name, causal in (("linear", True), ("fnet", True))  # fnet has no causal form
    ]
    found = list(work(Settings(lengths=(32,), **TINY), jobs, []))
    assert [event["warmed"] for event in found if "warmed" in event] == ["linear", "fnet"]
