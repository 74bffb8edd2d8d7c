"""torch.export and torch.compile take every mechanism, in every form, and give eager's values and gradients.

The default run takes one set of options and the commonest forms. All options, all forms and Inductor, which needs a C++
compiler: `pytest -m slow -n auto tests/mechanisms/test_export.py`, about half an hour on two cores.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from subquad.mechanisms import MECHANISMS
from tests.mechanisms import laws, programs
from tests.mechanisms.laws import DIM, Case, T, tokens

# warnings of torch itself, while it loads its compiler and while it traces
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# Mechanisms that cannot be exported for every length, with the reason in their mathematics.
# There are none: if the number of steps depends on the length, ops.opaque makes the loop one operator.
STATIC_ONLY: dict[str, str] = {}

FEW_TOKENS = 17  # of programs for one length: several blocks, which are unrolled, and none divides them
CASES = list(laws.cases())
FEW = [(name, case) for name, case in CASES if name.endswith("-0")]
MORE = [(name, case) for name, case in CASES if not name.endswith("-0")]
FORMS = {name: programs.forms(case) for name, case in CASES}


def over(found: Iterable[tuple[str, Case]], *wanted: str) -> Any:
    pairs = [(name, case, form) for name, case in found for form in FORMS[name] if form in wanted]
    return pytest.mark.parametrize(
        ("case", "form"), [p[1:] for p in pairs], ids=[f"{n}-{form}" for n, _, form in pairs]
    )


def dynamic(found: Iterable[tuple[str, Case]]) -> list[tuple[str, Case]]:
    return [(name, case) for name, case in found if name.split("-")[0] not in STATIC_ONLY]


@over(dynamic(FEW), "plain")
def test_one_exported_program_serves_any_batch_and_length(case: Case, form: str) -> None:
    programs.export_serves_any_size(case, form)


@over([(name, case) for name, case in FEW if name.startswith("local-")], "prefill")
def test_one_exported_program_prefills_any_batch(case: Case, form: str) -> None:
    programs.export_serves_any_size(case, form)


@pytest.mark.slow
@over(dynamic(FEW), "lengths", "cross", "prefill")
def test_one_exported_program_serves_any_size_in_other_forms(case: Case, form: str) -> None:
    programs.export_serves_any_size(case, form)


@pytest.mark.slow
@over(dynamic(MORE), "plain", "lengths", "cross", "prefill")
def test_one_exported_program_serves_any_size_with_other_options(case: Case, form: str) -> None:
    programs.export_serves_any_size(case, form)


@over(FEW, "plain")
def test_export_without_gradients(case: Case, form: str) -> None:
    programs.export_keeps_numbers(case, form, grad=False, size=FEW_TOKENS)


@over(FEW, "step")
def test_export_of_a_step(case: Case, form: str) -> None:
    programs.export_keeps_numbers(case, form)


@pytest.mark.parametrize("kernel", ["softmax", "trig"])
@pytest.mark.parametrize("grad", [False, True])
def test_export_of_each_kind_of_random_features(kernel: str, grad: bool) -> None:
    """Their backward is written by hand, and an exported program loses it."""
    case = Case(MECHANISMS["performer"], {"dim": DIM, "heads": 4, "causal": True, "features": 12, "kernel": kernel})
    programs.export_keeps_numbers(case, "lengths", grad)


@pytest.mark.parametrize(("name", "options"), [("additive", {}), ("clustered", {"clusters": 4, "topk": 6, "block": 5})])
def test_dropout_in_a_program_for_any_length(name: str, options: dict[str, Any]) -> None:
    """Backward computes the loop again, with the same dropout as forward."""
    case = Case(MECHANISMS[name], {"dim": DIM, "heads": 4, "causal": True, "dropout": 0.3, **options})
    any_size = torch.export.Dim.DYNAMIC
    shapes = {"x": {0: any_size, 1: any_size}}
    program = torch.export.export(case.build().train(), (tokens(3, T, DIM),), dynamic_shapes=shapes).module()

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return (program(x) * tokens(2, 17, DIM, seed=4)).sum()

    x, direction = tokens(2, 17, DIM), tokens(2, 17, DIM, seed=5)
    (grad,) = torch.autograd.grad(run(x.requires_grad_()), x)
    with torch.no_grad():
        assert not torch.equal(program(x), program(x))
        slope = (run(x + 1e-6 * direction) - run(x - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@over(CASES, "plain", "lengths", "cross", "prefill", "continue", "step")
@pytest.mark.parametrize("grad", [False, True])
def test_export_of_every_form(case: Case, form: str, grad: bool) -> None:
    programs.export_keeps_numbers(case, form, grad)


@pytest.mark.slow
@over(dynamic(FEW), "plain")
def test_strict_export(case: Case, form: str) -> None:
    programs.export_serves_any_size(case, form, strict=True)


@over(FEW, "lengths")
def test_compile_without_a_break(case: Case, form: str) -> None:
    programs.compile_keeps_numbers(case, form, "aot_eager", size=FEW_TOKENS)


@pytest.mark.slow
@over(CASES, "plain", "cross", "prefill", "continue", "step")
def test_compile_of_every_form(case: Case, form: str) -> None:
    programs.compile_keeps_numbers(case, form, "aot_eager")


@pytest.mark.slow
@over(FEW, "plain", "lengths", "cross")
def test_compile_for_any_size(case: Case, form: str) -> None:
    programs.compile_keeps_numbers(case, form, "aot_eager", dynamic=True)


@pytest.mark.slow
@over(FEW, "lengths", "cross", "step")
def test_inductor(case: Case, form: str) -> None:
    """Needs a C++ compiler."""
    programs.compile_keeps_numbers(case, form, "inductor", dtype=torch.float32)
