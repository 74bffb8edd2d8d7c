import copy

import pytest
import torch
from torch import Tensor

from subquad.models import Transformer

from .test_blocks import gradients, saved_bytes


def plainly(model: Transformer, x: Tensor, lengths: Tensor | None, memory: Tensor | None) -> Tensor:
    """The same couplings with ordinary autograd."""
    a = b = x
    for block in model.blocks:
        for residual, _, branch in block.branches(lengths, None):
            a, b = b, a + residual.dropout(branch(residual.norm(b), memory))
    y = model.norm((a + b) / 2)
    return y if lengths is None else y.masked_fill((torch.arange(x.shape[1]) >= lengths[:, None])[..., None], 0)


def make(**fields: object) -> Transformer:
    return Transformer(**{"dim": 8, "heads": 2, "depth": 3, "reversible": True, **fields})


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mechanism", ["softmax", "linear, reformer", "sinkhorn", "routing"])
def test_reversible_is_plain_in_values_and_gradients(mechanism: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = make(mechanism=mechanism, dropout=dropout, ff_dropout=dropout).double()
    x, lengths = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True), torch.tensor([7, 4])
    twin = copy.deepcopy(model)  # some mixers update buffers in forward
    results = []
    for run, used in ((lambda: model(x, lengths), model), (lambda: plainly(twin, x, lengths, None), twin)):
        torch.manual_seed(3)
        x.grad = None
        y = run()
        after = torch.get_rng_state()
        results.append((y, gradients(used, y), x.grad))
        assert torch.equal(after, torch.get_rng_state())  # backward does not change the random state
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_memory_gets_its_gradient() -> None:
    model = make(cross="linear", causal=True, dropout=0.2).double()
    x, memory = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    results = []
    for run in (lambda: model(x, memory=memory), lambda: plainly(model, x, None, memory)):
        torch.manual_seed(3)
        x.grad = memory.grad = None
        y = run()
        results.append((y, gradients(model, y), x.grad, memory.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)
    assert model(x, memory=memory.detach()).requires_grad


def test_depth_costs_no_memory() -> None:
    x = torch.randn(2, 64, 8, requires_grad=True)
    shallow, deep = (saved_bytes(make(depth=depth), x) for depth in (2, 10))
    assert shallow == deep
    plain = [saved_bytes(make(depth=depth, reversible=False), x) for depth in (2, 10)]
    assert plain[1] > 4 * plain[0]
    assert deep < plain[0]


def test_frozen_parameters_and_no_grad() -> None:
    model = make(depth=2)
    model.blocks[0].requires_grad_(False)
    x = torch.randn(1, 4, 8)
    y = model(x)
    found = gradients(model, y)
    assert not any(name.startswith("blocks.0") for name in found)
    assert any(name.startswith("blocks.1") for name in found)
    with torch.no_grad():
        torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("how", ["autocast", "half"])
def test_sixteen_bits_reconstruct_what_was_added(how: str) -> None:
    torch.manual_seed(0)
    exact = make(depth=6).double()
    model = make(depth=6)
    model.load_state_dict(exact.state_dict())
    x = torch.randn(2, 16, 8)
    expected = gradients(exact, exact(x.double()))
    if how == "half":
        model = model.bfloat16()
        x = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = model(x)
    found = gradients(model, y.float())
    for name, grad in expected.items():
        error = (found[name].double() - grad).norm() / grad.norm().clamp(min=1e-6)
        assert error < 0.1 or grad.norm() < 1e-3, name


def test_backward_runs_in_the_types_of_forward() -> None:
    torch.manual_seed(0)
    model = make(depth=4, dim=32)
    x = torch.randn(2, 16, 32)
    found = []
    for run in (lambda: model(x), lambda: plainly(model, x, None, None)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run()
        found.append(gradients(model, y))
    for name, grad in found[1].items():  # in another type the relative difference would be about 4e-3
        assert grad.norm() < 0.1 or (found[0][name] - grad).norm() < 1e-5 * grad.norm(), name


def test_prefill_and_step_use_both_streams() -> None:
    model = make(causal=True, mechanism="linear, softmax").double().eval()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    y, state = model.prefill(x[:, :4])
    last = []
    for t in (4, 5):
        out, state = model.step(x[:, t], state)
        last.append(out)
    torch.testing.assert_close(torch.cat((y, torch.stack(last, 1)), 1), model(x))
