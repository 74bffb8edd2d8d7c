import pytest
import torch

from subquad.machine import allocation_peak
from subquad.measure.cost import (
    Decode,
    Sample,
    Shape,
    Spread,
    Subject,
    Yardstick,
    calls_for,
    grown,
    once,
    peak_bytes,
    spread,
    time_beside,
)


def test_spread_is_median_and_quartiles() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(median=3.0, low=3.0, high=3.0)
    assert spread([1, 2, 3, 4, 5]) == Spread(median=3, low=2, high=4)


def test_the_peak_counts_what_is_held_at_once() -> None:
    def run() -> None:
        kept = torch.empty(1000, dtype=torch.float32)
        for _ in range(5):
            torch.empty(3000, dtype=torch.float32)  # freed at once, five times
        del kept

    assert allocation_peak(run) == 4 * (1000 + 3000)
    assert allocation_peak(run) == 4 * (1000 + 3000)


def test_the_peak_of_a_training_step_grows_as_documented_and_is_the_same_each_time() -> None:
    peaks = [peak_bytes(Subject("gmlp", Shape(length=n, dim=8))) for n in (256, 512, 256)]
    assert peaks[0] == peaks[2]
    assert 3 < peaks[1] / peaks[0] < 4.2  # the parameters are [T, T]


def test_the_peak_holds_parameters_and_input() -> None:
    subject = Subject("synthesizer", Shape(length=64, dim=16))
    assert peak_bytes(subject) > subject.own_bytes() > sum(4 * p.numel() for p in subject.mix.parameters())


def test_a_mechanism_is_timed_between_two_samples_of_the_yardstick() -> None:
    order: list[str] = []
    yardstick = Yardstick(Shape(length=8, dim=8))
    yardstick.runs = {"forward": lambda: order.append("softmax")}
    times, ratios = time_beside({"forward": lambda: order.append("ours")}, "cpu", yardstick, 60.0, most=4, slow=True)
    blocks = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert blocks == ["softmax", "ours", "softmax", "ours", "softmax"]
    assert order.count("ours") == len(times["forward"]) == len(ratios["forward"]) == 4
    time_beside({"forward": lambda: order.append("next")}, "cpu", yardstick, 60.0, most=2, slow=True)
    assert order[-1] == "softmax"
    assert order[order.index("next") - 1] == "softmax"


def test_without_a_yardstick_there_are_times_and_no_ratios() -> None:
    times, ratios = time_beside({"forward": lambda: None}, "cpu", None, 60.0, most=2)
    assert len(times["forward"]) == 2
    assert ratios["forward"] == []


def test_quick_calls_are_timed_in_groups() -> None:
    assert calls_for(1000.0) == 1
    assert calls_for(0.5) == 4
    assert calls_for(0.0) == 50
    calls: list[int] = []
    assert once(lambda: calls.append(1), "cpu", sample=Sample(7)) >= 0
    assert len(calls) == 7


def test_each_sample_of_decoding_starts_at_the_end_of_the_sequence() -> None:
    for name in ("softmax", "linear", "compressed"):
        decode = Decode(Subject(name, Shape(length=12, dim=8, batch=2)))
        for _ in range(2):
            once(decode, "cpu", sample=Sample(5))
            assert decode.state.position.tolist() == [18, 18], name  # 12 read, 1 to grow the cache, 5 timed


def test_estimates() -> None:
    assert grown(10.0, 512, 1024, 2.0) == 40.0


def test_prompts_are_read_in_parts_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("softmax", "local", "compressed"):
        subject = Subject(name, Shape(length=12, dim=8, batch=3))
        whole = Decode(subject)
        monkeypatch.setattr("subquad.measure.cost.PREFILLED", 24)
        parts = Decode(subject)
        monkeypatch.undo()
        assert all(torch.allclose(a, b) for a, b in zip(whole.start, parts.start, strict=True)), name
        assert parts.bytes == whole.bytes
        assert parts.graph is None  # there is no GPU
        assert parts.uncaptured is None
