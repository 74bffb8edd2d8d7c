"""Laws over drawn cases: head widths, options, lengths and thresholds that nobody chose. The same in every run.

SUBQUAD_DRAWS sets how many cases a mechanism and direction get.
"""

import ast
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subquad
from subquad.mechanisms import MECHANISMS
from subquad.ops.sparse import torch_path
from tests.mechanisms import laws
from tests.mechanisms.draws import (
    THRESHOLDS,
    VALUES,
    directions,
    drawn_case,
    drawn_thresholds,
    own_options,
    set_threshold,
)
from tests.mechanisms.laws import tokens

DRAWS = int(os.environ.get("SUBQUAD_DRAWS", "2"))
SPECS = [(name, causal, number) for name in MECHANISMS for causal in directions(name) for number in range(DRAWS)]
drawn = pytest.mark.parametrize(
    ("name", "causal", "number"), SPECS, ids=[f"{n}-{'causal' if c else 'bidirectional'}-{i}" for n, c, i in SPECS]
)


@drawn
def test_laws_hold_for_drawn_cases(name: str, causal: bool, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, draw = drawn_case(name, causal, number), random.Random(f"lengths {name} {causal} {number}")
    for threshold, value in drawn_thresholds(f"{name} {causal} {number}").items():
        set_threshold(monkeypatch, threshold, value)
    traits = case.build().traits
    laws.forward_equals_reference(case)
    laws.gradient_is_the_slope(case)
    laws.padding_is_invisible(case, [draw.randint(0, case.length) for _ in range(3)])
    if causal and case.options.get("strict_causal", True):
        laws.strictly_causal(case)
    if traits.state:
        splits = [draw.choice((1, 1, 2, 3, 9)) for _ in range(6)]
        laws.recurrence_equals_forward(case, splits, [draw.randint(1, 25) for _ in range(3)])
    if traits.cross and not case.options.get("rotary"):
        laws.cross_equals_reference(case)


@drawn
def test_autocast_holds_for_drawn_cases(name: str, causal: bool, number: int) -> None:
    laws.autocast_is_half_precision(drawn_case(name, causal, number + 100))


@drawn
def test_gradients_are_sane_for_drawn_cases(name: str, causal: bool, number: int) -> None:
    laws.gradients_are_sane(drawn_case(name, causal, number + 200))


@pytest.mark.parametrize("tau", [0.6, 0.3])
@pytest.mark.parametrize("gate", [False, True])
def test_gradients_of_a_sharp_kernel_are_sane(tau: float, gate: bool) -> None:
    options = {"dim": 32, "heads": 2, "causal": gate, "gate": gate, "tau": tau}
    laws.gradients_are_sane(laws.Case(MECHANISMS["rfa"], options, 200))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_large_tokens_with_signed_features_are_sane(causal: bool) -> None:
    mix = laws.Case(MECHANISMS["performer"], {"dim": 32, "heads": 2, "causal": causal, "kernel": "trig"}).build(
        torch.float16
    )
    for name, grad in laws.gradients(mix, mix, 3 * tokens(2, 200, 32, dtype=torch.float16)).items():
        assert grad is None or grad.abs().max() < 1e4, name


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_option_is_drawn(name: str) -> None:
    # the signed maps of linear are left out: no bound keeps their denominators from zero
    assert set(VALUES[name]) == own_options(name)


class Call(NamedTuple):
    """A module that meets a threshold, at which length, with tokens of which size."""

    name: str
    options: dict[str, Any]
    length: int = 41
    size: float = 1.0


CALLS = {
    "ops.additive.PAIRS": Call("additive", {}),
    "mechanisms.clustered.PAIRS_A_KEY": Call("clustered", {"clusters": 4, "topk": 6}),
    "mechanisms.efficient.BLOCK": Call("efficient", {"causal": True}, size=50.0),
    "mechanisms.efficient.LIMIT": Call("efficient", {"causal": True}),
    "ops.convolve.BLOCK": Call("nystrom", {"landmarks": 6}),
    "mechanisms.nystrom.PIECES": Call("nystrom", {"landmarks": 6}, 48),
    "ops.dense.PAIRS": Call("softmax", {"dropout": 1e-12}),
    "ops.dense.ROWS": Call("softmax", {"causal": True}),
    "ops.linear.chunked.BLOCK": Call("linear", {"causal": True}, 600),
    "ops.linear.chunked.SEGMENT": Call("linear", {"causal": True}, 300),
    "ops.linear.rule_chunked.CHUNK": Call("deltanet", {"causal": True}),
    "ops.linear.rule_chunked.HEADS": Call("deltanet", {"causal": True}, 600),
    "ops.linear.rule_chunked.SEGMENT": Call("deltanet", {"causal": True}),
    "ops.prefix.SUM_BLOCK": Call("efficient", {"causal": True}),
    "ops.prefix.MAX_BLOCK": Call("performer", {"causal": True, "features": 9}),
    "ops.sparse.tiles.TILE": Call("longformer", {"window": 3, "dilation": 2}),
    "ops.sparse.tiles.BUDGET": Call("strided", {"stride": 5}),
    "ops.sparse.cache.ROWS": Call("local", {"causal": True, "window": 5}),
    "ops.sparse.cache.GATHERED": Call("strided", {"causal": True, "stride": 5}),
}


class Operations(TorchDispatchMode):
    """Records the operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(f"{func} {[tuple(t.shape) for t in args if isinstance(t, Tensor)]}")
        return out


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_both_sides_of_a_threshold_compute_the_same(threshold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the two sides do differ: other operations run, or the same ones on other shapes."""
    call = CALLS[threshold]
    mix = laws.Case(MECHANISMS[call.name], {"dim": 24, "heads": 2, "causal": False, **call.options}).build()
    mix.train(call.options.get("dropout", 0) > 0)
    x = call.size * tokens(2, call.length, 24)
    ways, results = set(), []
    tiles: list[str] = []
    attend = torch_path.attend_tiles  # inside an operator, which operations do not show

    def watched(q: Tensor, k: Tensor, *rest: Any) -> Any:
        tiles.append(f"tile {tuple(q.shape)} {tuple(k.shape)}")
        return attend(q, k, *rest)

    monkeypatch.setattr(torch_path, "attend_tiles", watched)
    for value in (None, *THRESHOLDS[threshold]):
        if value is not None:
            set_threshold(monkeypatch, threshold, value)
        given = x.clone().requires_grad_()
        tiles.clear()
        with Operations() as operations:
            y = mix(given)
            if mix.traits.state:
                state = mix.prefill(given[:, :9])[1]
                y = torch.cat((y, mix.prefill(given[:, 9:], state=state)[0]), 1)
            (grad,) = torch.autograd.grad(y.square().sum(), given)
        ways.add((*operations.names, *tiles))
        results.append((y.detach(), grad))
    assert len(ways) > 1, f"no value of {threshold} changes what is computed: the sequence is too short"
    for y, grad in results[1:]:
        torch.testing.assert_close(y, results[0][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-7, atol=1e-7)


ELSEWHERE = {  # constants that are not thresholds of a torch path, or that another test covers
    "mechanisms.clustered.CHUNK": "of exported programs; mechanisms/test_export.py",
    "mechanisms.efficient.NOTHING": "stands for minus infinity",
    "mechanisms.efficient.PADDED": "stands for minus infinity",
    "mechanisms.performer.NOTHING": "stands for minus infinity",
    "mechanisms.picture.SIZE": "of a picture",
    "mechanisms.recurrent.EPS": "of the definition",
    "mechanisms.recurrent.WIDTH": "of the definition",
    "mechanisms.reformer.SELF": "of the definition",
    "mechanisms.sinkhorn.ABSENT": "stands for zero",
    "ops.additive.GPU_PAIRS": "PAIRS on a GPU",
    "ops.additive_triton.HELD": "ops/test_additive.py",
    "ops.additive_triton.NARROW": "of registers",
    "ops.additive_triton.OTHERS": "ops/test_additive.py",
    "ops.additive_triton.QUERIES": "ops/test_additive.py",
    "ops.additive_triton.ROWS": "ops/test_additive.py",
    "ops.additive_triton.SHARED": "ops/test_additive.py",
    "ops.buckets_triton.MEMBERS": "ops/test_clusters_triton.py",
    "ops.cache.BLOCK": "ops/test_cache.py",
    "ops.cache_triton.BLOCK": "ops/test_cache_triton.py",
    "ops.cache_triton.LOG2E": "a number of mathematics",
    "ops.cache_triton.PROGRAMS": "ops/test_cache_triton.py",
    "ops.clusters_triton.LEAST": "a GPU's; ops/test_clusters_triton.py",
    "ops.clusters_triton.SPLITS": "a GPU's; ops/test_clusters_triton.py",
    "ops.clusters_triton.TOKENS": "ops/test_clusters_triton.py",
    "ops.convolve_triton.CHUNK": "ops/test_convolve.py",
    "ops.column_sums_triton.COLUMNS": "ops/test_column_sums.py",
    "ops.column_sums_triton.PROGRAMS": "a GPU's; ops/test_column_sums.py has more rows than programs",
    "ops.convolve_triton.PROGRAMS": "ops/test_convolve.py",
    "ops.cross_entropy_triton.BLOCK": "ops/test_cross_entropy.py",
    "ops.cross_entropy_triton.WHOLE": "ops/test_cross_entropy.py",
    "ops.ctc.MOST": "ops/test_ctc.py",
    "ops.ctc.NEVER": "stands for minus infinity",
    "ops.ctc_triton.PLACES": "ops/test_ctc.py",
    "ops.feed_forward.ROWS": "a GPU's; ops/test_feed_forward.py computes both ways",
    "ops.groups.SPARE": "a bit that is never the nearest",
    "ops.layer_norm.WIDEST": "ops/test_layer_norm.py",
    "ops.layer_norm.WIDEST_ALONE": "a GPU's; ops/test_layer_norm.py computes both ways",
    "ops.layer_norm_triton.PROGRAMS": "a GPU's; ops/test_layer_norm.py has more rows than programs",
    "ops.layer_norm_triton.TILE": "ops/test_layer_norm.py",
    "ops.linear.chunked.FORGET": "stands for minus infinity",
    "ops.linear.deferred.GROUP": "ops/test_linear_deferred.py",
    "ops.linear.deferred_triton.TILE": "ops/test_linear_deferred.py",
    "ops.linear.featured.NOTHING": "stands for minus infinity",
    "ops.linear.featured.PADDED": "stands for minus infinity",
    "ops.linear.featured.WIDEST": "a GPU's; ops/test_shared_memory.py",
    "ops.linear.featured_triton.LEAST": "ops/test_featured.py",
    "ops.linear.featured_triton.PROGRAMS": "ops/test_featured.py",
    "ops.linear.plain.CHUNK": "ops/test_linear.py, with a smaller one",
    "ops.linear.rule_fused.WIDEST": "a GPU's; ops/test_shared_memory.py",
    "ops.linear.fused.MIN_SEGMENT": "ops/test_linear_triton.py",
    "ops.linear.fused.PROGRAMS": "ops/test_linear_triton.py",
    "ops.linear.fused.WALKS": "ops/test_linear_triton.py",
    "ops.linear.normalised.NOTHING": "stands for minus infinity",
    "ops.linear.rule_fused.CHUNK": "ops/test_rules_triton.py",
    "ops.linear.launches_triton.WIDE": "ops/test_linear_triton.py",
    "ops.linear.rule_launches_triton.WIDTH": "ops/test_rules_triton.py",
    "ops.lookup.LARGEST": "a GPU's; ops/test_lookup.py computes both ways",
    "ops.lookup_triton.PROGRAMS": "a GPU's; ops/test_lookup.py has more tokens than programs",
    "ops.ordered.TILE": "ops/test_ordered.py",
    "ops.perceptron_triton.PROGRAMS": "a GPU's; ops/test_perceptron.py has more rows than programs",
    "ops.perceptron_triton.WARPS": "changes no number",
    "ops.random_features.SHORT": "stands for zero",
    "ops.relative_triton.SCRATCH": "ops/test_relative.py",
    "ops.relative_triton.SMALL": "ops/test_relative.py",
    "ops.rotary_triton.TILE": "ops/test_rotary_triton.py",
    "ops.rotary_triton.WARPS": "changes no number",
    "ops.row_linear.FEW": "ops/test_row_linear.py",
    "ops.row_linear.MANY": "models/test_fused_step.py",
    "ops.row_linear.ROWS": "ops/test_row_linear.py",
    "ops.row_linear.WIDEST": "ops/test_row_linear.py",
    "ops.row_linear_triton.PROGRAMS": "ops/test_row_linear.py",
    "ops.row_linear_triton.TILE": "ops/test_row_linear.py",
    "ops.short_conv_triton.WIDE": "a GPU's; ops/test_step_kernels.py",
    "ops.slots_triton.WEIGHTS": "ops/test_slots_triton.py",
    "ops.sparse.cache_triton.BLOCK": "ops/sparse/test_cache_triton.py",
    "ops.sparse.cache_triton.FEW": "ops/sparse/test_cache_triton.py",
    "ops.sparse.cache_triton.LOG2E": "a number of mathematics",
    "ops.sparse.cache_triton.PROGRAMS": "ops/sparse/test_cache_triton.py",
    "ops.sparse.patterns.COUNTED": "ops/sparse/test_patterns.py",
    "ops.sparse.patterns.DENSEST": "ops/sparse/test_patterns.py",
    "ops.sparse.reads.ALL": "stands for infinity",
    "ops.sparse.split.PIECE": "mechanisms/test_split.py",
    "ops.sparse.triton_path.MANY": "ops/sparse/test_triton.py, with a smaller one",
    "ops.sparse.triton_path.SPLIT": "ops/sparse/test_triton.py",
    "ops.triangular.ROWS": "ops/test_triangular.py",
    "ops.uniform.AT_ONCE": "ops/test_layer_norm.py",
    "ops.uniform.MASK": "of the definition",
}


def test_every_threshold_is_known() -> None:
    package, numbers = Path(subquad.__file__).parent, set()
    for path in [*package.glob("mechanisms/*.py"), *package.glob("ops/**/*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_number(node.value):
                name = node.targets[0].id
                if name.isupper():
                    numbers.add(".".join((*path.relative_to(package).with_suffix("").parts, name)))
    assert numbers == set(THRESHOLDS) | set(ELSEWHERE)
    assert set(CALLS) == set(THRESHOLDS)


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.Tuple):
        return all(map(_is_number, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
