"""What the lesson on decays and delta rules shows is what the rules do."""

import pytest
import torch

from subquad.ops.linear.rules import RULES as KNOWN
from subquad.report import rules
from subquad.report.rules import FADE, OVERLAP, RULES, SLOW_FADE, TOLD, WIDTH, errors, memory, read_back, written


def test_every_rule_of_the_op_is_shown() -> None:
    assert list(RULES) == list(KNOWN)
    for name, rule in RULES.items():
        assert ("β" in rule.update) == KNOWN[name].delta
        assert ("Diag(a)" in rule.update) == KNOWN[name].gated


def test_three_pictures_are_read_back_as_the_lesson_says() -> None:
    three, seven, five = written()
    found = {read.rule: (read.first, read.second) for read in read_back()}

    def close(image: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(image, wanted, rtol=1e-5, atol=1e-5)

    close(found["linear"][0], three + OVERLAP * seven + five)
    close(found["linear"][1], OVERLAP * (three + five) + seven)
    close(found["gated"][0], FADE**2 * three + FADE * OVERLAP * seven + five)
    close(found["gated"][1], OVERLAP * (FADE**2 * three + five) + FADE * seven)
    close(found["delta"][0], five)  # exactly what was written last
    # b was exact when it was written; the third pair moved it by as much as a and b overlap
    before = three + OVERLAP * (seven - OVERLAP * three)
    close(found["delta"][1], seven + OVERLAP * (five - before))
    close(found["gated_delta"][0], five)


def test_errors_are_those_of_random_keys() -> None:
    """Of a sum it is that of the other pairs: (N - 1) / K on average."""
    assert float(errors("linear", 64).mean()) == pytest.approx(63 / WIDTH, rel=0.1)
    assert float(errors("delta", TOLD)[-1]) < 1e-10  # the last pair is exact
    assert float(errors("gated_delta", TOLD)[-1]) < 1e-10
    for pairs in (8, 32, 128):
        assert float(errors("delta", pairs).mean()) < float(errors("linear", pairs).mean())
    old = errors("delta", TOLD)
    assert float(old[:8].mean()) > 1 > float(old[-8:].mean())


def test_of_keys_at_right_angles_nothing_is_lost_without_a_decay() -> None:
    keys, values = torch.eye(WIDTH)[None], torch.randn(1, WIDTH, 5)
    faded = SLOW_FADE ** torch.arange(WIDTH - 1.0, -1, -1)[:, None]
    for rule, wanted in (("linear", 1), ("delta", 1), ("gated", faded), ("gated_delta", faded)):
        torch.testing.assert_close(keys[0] @ memory(rule, keys, values, SLOW_FADE)[0], wanted * values[0])


def test_the_curves_hold_these_errors() -> None:
    views = rules.curves()["views"]
    by_count, by_age = ({one["name"]: one["points"] for one in view["series"]} for view in views)
    assert list(by_count) == list(by_age) == list(RULES)
    assert by_count["delta"][4] == [rules.COUNTS[4], pytest.approx(float(errors("delta", rules.COUNTS[4]).mean()))]
    assert [age for age, _ in by_age["delta"]] == [*range(1, TOLD, 4)]
    assert by_age["gated"][3][1] == pytest.approx(float(errors("gated", TOLD)[-13]))
    assert by_age["linear"][0][1] == pytest.approx(float(errors("linear", TOLD)[-1]))
