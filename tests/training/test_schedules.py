import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.training.config import TrainingConfig
from subquad.training.schedules import Schedule


def _factors(**fields: Any) -> list[float]:
    schedule = Schedule(TrainingConfig(**fields))
    return [schedule.factor(step) for step in range(fields["steps"])]


def test_warm_up_rises_to_one() -> None:
    assert _factors(steps=8, warmup=4, schedule="constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_and_linear_end_at_final_lr() -> None:
    cosine = _factors(steps=10, schedule="cosine", final_lr=0.1)
    assert cosine[0] == 1
    assert cosine[5] == pytest.approx(0.55)
    assert cosine[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.9)))
    linear = _factors(steps=12, warmup=2, schedule="linear")
    assert linear[:3] == [0.5, 1, 1]
    assert linear[7] == pytest.approx(0.5)


def test_inverse_square_root_is_highest_at_the_end_of_the_warm_up() -> None:
    factors = _factors(steps=64, warmup=4, schedule="inverse_sqrt")
    assert factors[:4] == [0.25, 0.5, 0.75, 1]
    assert factors[15] == pytest.approx(math.sqrt(4 / 16))
    assert factors[63] == pytest.approx(math.sqrt(4 / 64))


def test_step_falls_once() -> None:
    assert _factors(steps=5, schedule="step", drop_at=3, drop_to=0.1) == [1, 1, 1, 0.1, 0.1]


def test_plateau_falls_after_evaluations_that_are_not_better() -> None:
    schedule = Schedule(TrainingConfig(schedule="plateau", patience=2, factor=0.5))
    told = [schedule.evaluated(value) for value in (3.0, 2.0, 2.5, 2.1, 1.9, 1.95, 1.95, 1.95, 1.95)]
    assert told == [False, False, False, True, False, False, True, False, True]
    assert schedule.factor(100) == 0.125
    again = Schedule(TrainingConfig(schedule="plateau", patience=2, factor=0.5))
    again.load(schedule.state())
    assert again.state() == schedule.state()
    assert again.factor(100) == 0.125


def test_plateau_of_a_measure_that_should_be_high() -> None:
    schedule = Schedule(TrainingConfig(schedule="plateau", patience=1), higher_is_better=True)
    assert not schedule.evaluated(0.5)
    assert not schedule.evaluated(0.6)
    assert schedule.evaluated(0.6)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    schedule=st.sampled_from(["cosine", "linear"]),
    steps=st.integers(1, 1000),
    warmup=st.integers(0, 1200),
    final=st.floats(0, 1),
)
def test_the_schedule_ends_with_the_time(schedule: Any, steps: int, warmup: int, final: float) -> None:
    config = TrainingConfig(steps=steps, warmup=warmup, schedule=schedule, final_lr=final, minutes=2.0)
    made = Schedule(config)
    assert made.progress(0, 120) == 1
    assert made.progress(steps, 0) == 1
    factor = made.factor(steps // 2, 120)
    if warmup < steps:
        assert factor <= final + 1e-9
    times = [made.factor(warmup, seconds) for seconds in range(0, 121, 10)]
    assert times == sorted(times, reverse=True)  # it never rises again
    assert all(0 <= value <= 1 for value in times)


def test_time_moves_every_schedule_but_not_the_warm_up() -> None:
    config = TrainingConfig(steps=1000, warmup=100, schedule="step", drop_at=500, minutes=1.0)
    assert Schedule(config).factor(200, 0) == 1
    assert Schedule(config).factor(200, 40) == pytest.approx(0.1)
    assert Schedule(config).factor(49, 0) == 0.5
