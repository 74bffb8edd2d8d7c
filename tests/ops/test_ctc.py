"""CTC against all ways to say it, one by one, and against torch's own; through Triton's interpreter and for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.ops.ctc import MOST, ctc_loss
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")

ROWS = {  # targets and frames of each row
    "plain": ([[1, 2, 3], [3, 1, 2]], [9, 7]),
    "doubles": ([[1, 1, 2, 2, 2], [2, 2, 2, 1, 1]], [12, 8]),
    "ragged": ([[1, 2, 3, 1], [2], [], [4, 4]], [10, 10, 5, 3]),
    "just fit": ([[1, 2], [1, 1], [3]], [2, 3, 1]),
    "do not fit": ([[1, 2], [1, 1], [3, 1], [2]], [1, 2, 4, 0]),
    "one frame": ([[1], []], [1, 1]),
}


def draw(name: str, symbols: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    targets, frames = ROWS[name]
    torch.manual_seed(0)
    made = torch.zeros(len(targets), max(map(len, targets)), dtype=torch.int64)
    for row, said in zip(made, targets, strict=True):
        row[: len(said)] = torch.tensor(said)
    sizes = {"lengths": torch.tensor(frames), "target_lengths": torch.tensor([len(said) for said in targets])}
    return 3 * torch.randn(len(targets), max(frames), symbols), {"targets": made, **sizes}


def results(logits: Tensor, rows: dict[str, Tensor], **how: Any) -> tuple[Tensor, Tensor]:
    given = logits.clone().requires_grad_()
    loss = ctc_loss(given, **rows, **how)
    (grad,) = torch.autograd.grad((loss * torch.linspace(1, 2, len(loss))).sum(), given)
    return loss.detach(), grad


def one_by_one(p: Tensor, said: list[int]) -> float:
    """-log of the total probability of all alignments to the labels `said`, given p [T, symbols]."""
    total = 0.0
    for way in itertools.product(range(p.shape[1]), repeat=len(p)):
        if [symbol for symbol, _ in itertools.groupby(way) if symbol] == said:
            total += math.prod(float(p[t, symbol]) for t, symbol in enumerate(way))
    return -math.log(total)


@interpreted
@pytest.mark.parametrize("said", [[], [1], [2, 1], [1, 1], [1, 1, 2]])
def test_the_loss_is_that_of_all_ways_to_say_it(said: list[int]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 5, 3)
    rows = {"targets": torch.tensor([said], dtype=torch.int64), "lengths": torch.tensor([5])}
    for impl in ("torch", "triton"):
        loss = ctc_loss(logits, **rows, target_lengths=torch.tensor([len(said)]), impl=impl)
        assert float(loss) == pytest.approx(one_by_one(logits.double().softmax(-1)[0], said), rel=1e-5)


@interpreted
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    logits, rows = draw(name)
    wanted = results(logits.double(), rows, impl="torch")
    for got, exact in zip(results(logits, rows, impl="triton"), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@interpreted
def test_what_lies_behind_the_lengths_is_not_there() -> None:
    logits, rows = draw("ragged")
    loss, grad = results(logits, rows, impl="triton")
    changed = logits.clone()
    for row, frames in zip(changed, rows["lengths"].tolist(), strict=True):
        row[frames:] = torch.inf
    changed.nan_to_num_(posinf=1e4)
    padded = {**rows, "targets": torch.nn.functional.pad(rows["targets"], (0, 3), value=-1)}
    loss_again, grad_again = results(changed, padded, impl="triton")
    assert torch.equal(loss, loss_again)
    assert torch.equal(grad, grad_again)


@interpreted
def test_sixteen_bits_and_large_scores() -> None:
    logits, rows = draw("plain")
    large = (300 * logits).to(torch.bfloat16)
    exact = results(large.double(), rows, impl="torch")
    ours = results(large, rows, impl="triton")
    assert ours[1].dtype == torch.bfloat16
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=2e-2, atol=1e-3)


@interpreted
def test_what_is_no_number_stays_so_and_what_cannot_be_is_left_out() -> None:
    logits, rows = draw("plain")
    logits[0, 2] = torch.nan
    assert ctc_loss(logits, **rows, impl="triton").isnan().tolist() == [True, False]
    logits, rows = draw("plain")
    logits[:, 1, 0] = logits[:, 2, 3:] = -torch.inf
    wanted = results(logits.double().clamp(min=-1e3), rows, impl="torch")
    for got, exact in zip(results(logits, rows, impl="triton"), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@interpreted
def test_lengths_beyond_the_tensors_read_nothing_there() -> None:
    """Lengths are not checked by value, because that would wait for a GPU."""
    logits, rows = draw("plain")
    beyond = {**rows, "lengths": rows["lengths"].clamp(max=9) + 100, "target_lengths": rows["target_lengths"] + 50}
    most = {**rows, "lengths": torch.tensor([9, 9])}
    torch.testing.assert_close(results(logits, beyond, impl="triton"), results(logits, most, impl="triton"))


@interpreted
def test_what_it_cannot_do_is_refused() -> None:
    logits, rows = draw("plain")
    with pytest.raises(ValueError, match="float64"):
        ctc_loss(logits.double(), **rows, impl="triton")
    with pytest.raises(ValueError, match="2048 labels"):
        ctc_loss(logits, **{**rows, "targets": torch.ones(2, 2048, dtype=torch.int64)}, impl="triton")


@compiled
@pytest.mark.parametrize("places", [1, 49, 600, MOST + 1])
def test_compiles_for_hopper(places: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import ctc_triton

    constants = {"N": places, "W": triton.next_power_of_2(places)}
    signature, constexprs = {}, {}
    for i, name in enumerate(ctc_triton.both_ways.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        else:
            plain = {"T": "i32", "logp": "*fp32", "loss": "*fp32", "share": "*fp32"}
            signature[name] = plain.get(name, "*i64")
    source = ASTSource(fn=ctc_triton.both_ways, signature=signature, constexprs=constexprs)
    warps = ctc_triton.warps(constants["W"])
    assert 32 * warps * 255 <= 65536  # with the most registers a thread can have, those of a multiprocessor
    options = {"num_warps": warps, "num_stages": 1}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
