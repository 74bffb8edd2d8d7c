import pytest

from subquad.measure.cost import Row, Spread
from subquad.measure.growth import Crossover, between, crossover, crossovers, exponent, growths, steady_times


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_fitted_exponent_of_an_exact_power_is_that_power(power: float) -> None:
    lengths = [512, 1024, 4096]
    assert exponent(lengths, [3.7 * n**power for n in lengths]) == pytest.approx(power)


def test_one_length_has_no_exponent() -> None:
    assert exponent([512], [1.0]) is None
    assert exponent([], []) is None


def test_the_crossover_is_where_the_ratio_stays_below_one() -> None:
    lengths = [256, 512, 1024, 2048]
    assert crossover(lengths, [700 / n for n in lengths]) == 700
    assert crossover(lengths, [0.5, 0.5, 0.4, 0.3]) == 256  # below everywhere
    assert crossover(lengths, [0.5, 2.0, 1.5, 1.1]) is None  # not below at the longest
    assert 512 < (crossover(lengths, [0.9, 1.2, 0.8, 0.5]) or 0) < 1024  # a single short length below 1 does not count
    assert crossover([], []) is None


def test_between_measured_lengths_on_log_axes_and_never_beyond() -> None:
    assert between([100, 400], [1.0, 16.0], 200) == pytest.approx(4.0)
    assert between([100, 400], [1.0, 16.0], 400) == 16.0
    assert between([100, 400], [1.0, 16.0], 401) is None
    assert between([100, 400], [1.0, 16.0], 99) is None


def test_growth_and_crossovers_of_rows_use_the_longest_lengths_that_were_measured() -> None:
    rows = []
    for n in (512, 1024, 2048, 4096):
        row = Row(mechanism="linear", length=n, causal=True)
        if n < 4096:
            time = 50.0 if n == 512 else n / 100  # the shortest length is only overhead
            row.training_ms, row.peak_bytes = Spread(time, time, time), 1000 * n
            row.training_ratio, row.memory_ratio = Spread(1500 / n, 0, 0), 2.0
        rows.append(row)
    rows.append(Row(mechanism="local", length=512, causal=True, skipped="for a test"))
    linear, local = growths(rows)
    assert linear.lengths_used == [512, 1024, 2048]
    assert linear.memory == pytest.approx(1.0)
    assert linear.documented_time == 1.0
    assert local.time is None
    assert local.lengths_used == []
    assert crossovers(rows) == [Crossover(mechanism="linear", training=1500, forward=None, memory=None)]


def test_a_slow_minute_of_the_machine_does_not_change_the_curve() -> None:
    rows = []
    for name, at_16 in (("softmax", 10.0), ("linear", 5.0), ("local", 8.0)):
        for n in (16, 32):
            softmax = 10.0 * (n / 16) ** 2
            time = softmax if name == "softmax" else at_16 * n / 16
            slow = 3.0 if (name, n) == ("linear", 32) else 1.0  # slows this measurement and its softmax equally
            row = Row(mechanism=name, length=n, causal=True)
            row.training_ms = Spread(slow * time, 0.0, 0.0)
            row.training_ratio = Spread(time / softmax, 0.0, 0.0)
            rows.append(row)
    lengths, times = steady_times(rows, "linear")
    assert lengths == [16, 32]
    assert times == pytest.approx([5.0, 10.0])
    assert [found.time for found in growths(rows)] == pytest.approx([2.0, 1.0, 1.0])
