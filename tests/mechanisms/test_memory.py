"""A memory equals its context: in values and gradients, in any order of rows, from disk, without the context's cost."""

from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import subquad
from subquad.mechanisms.base import Memory
from subquad.models import Seq2Seq
from subquad.models.state import fork, join, load_state, save_state, select
from tests.mechanisms import laws
from tests.mechanisms.laws import DIM, HEADS, Case, close, tokens

S = 30
LENGTHS = torch.tensor([S, 7, 0])
CONSTANT = ("efficient", "linear", "linformer", "performer", "rfa")


def over(found: Any) -> Callable[[Any], Any]:
    found = list(found)
    return pytest.mark.parametrize("case", [case for _, case in found], ids=[name for name, _ in found])


def gradients(case: Case, compute: Callable[..., Tensor]) -> dict[str, Tensor | None]:
    mix = case.build()
    x, context = tokens(3, 9, DIM).requires_grad_(), tokens(3, S, DIM, seed=2).requires_grad_()
    y = compute(mix, x, context)
    (y * tokens(*y.shape, seed=9)).sum().backward()
    return {"x": x.grad, "context": context.grad, **{name: p.grad for name, p in mix.named_parameters()}}


@over(laws.cases(cross=True))
def test_a_memory_is_its_context(case: Case) -> None:
    mix = case.build()
    x, context = tokens(3, 9, DIM), tokens(3, S, DIM, seed=2)
    for lengths in (None, LENGTHS):
        memory = mix.remember(context, lengths)
        assert isinstance(memory, mix.memory_type)
        for inputs in ({}, {"lengths": torch.tensor([9, 4, 2])}):
            want = mix(x, context=context, context_lengths=lengths, **inputs)
            close(mix(x, context=memory, **inputs), want)
        one = mix(x[:, :1], context=context, context_lengths=lengths)
        close(mix(x[:, :1], context=memory), one)
        with torch.no_grad():
            close(mix(x[:, :1], context=memory), one)
    assert (mix(x, context=mix.remember(context, LENGTHS))[2] == 0).all()
    dirty = context.clone()
    dirty[1, 7:] = torch.nan
    close(mix(x, context=mix.remember(dirty, LENGTHS)), mix(x, context=context, context_lengths=LENGTHS))


@over(laws.cases(cross=True))
def test_gradients_go_through_a_memory(case: Case) -> None:
    want = gradients(case, lambda mix, x, context: mix(x, context=context, context_lengths=LENGTHS))
    got = gradients(case, lambda mix, x, context: mix(x, context=mix.remember(context, LENGTHS)))
    for name, grad in want.items():
        found = got[name]
        assert (found is None) == (grad is None), name
        if found is not None and grad is not None:
            close(found, grad, 1e-7)


@over(laws.cases(cross=True))
def test_a_memory_is_a_value(case: Case) -> None:
    """Saved and loaded, indexed and stacked by batch: the same numbers; and it does not change when it is read."""
    mix = case.build()
    x, context = tokens(3, 9, DIM), tokens(3, S, DIM, seed=2)
    want = mix(x, context=context, context_lengths=LENGTHS)
    memory = mix.remember(context, LENGTHS)
    before = [t.clone() for t in memory]
    fields = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in memory._asdict().items()}
    loaded = type(memory)(**safetensors.torch.load(safetensors.torch.save(fields)))
    order = torch.tensor([2, 0, 1])
    rows = type(memory)(*(torch.cat((t[order][:1], t[order][1:])) for t in loaded))
    close(mix(x[order], context=rows), want[order])
    assert all(torch.equal(a, b) for a, b in zip(before, memory, strict=True))


@over(laws.cases(cross=True))
def test_narrow_types(case: Case) -> None:
    """In bf16, and in float32 under autocast: finite, and as close to the result of the context as bf16 allows."""
    x, context = tokens(3, 9, DIM), tokens(3, S, DIM, seed=2)
    exact = case.build()(x, context=context, context_lengths=LENGTHS)
    for autocast in (False, True):
        dtype = torch.float32 if autocast else torch.bfloat16
        mix = case.build(dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            memory = mix.remember(context.to(dtype), LENGTHS)
            got = mix(x.to(dtype), context=memory)
            plain = mix(x.to(dtype), context=context.to(dtype), context_lengths=LENGTHS)
        assert got.dtype == plain.dtype
        error, usual = ((y.double() - exact).norm() for y in (got, plain))
        assert torch.isfinite(got).all()
        assert error <= 2 * usual + 1e-3 * exact.norm()
        if autocast:
            outside = mix(x.to(dtype), context=memory)  # made under autocast, read outside of it
            assert outside.dtype == dtype


@over((name, case) for name, case in laws.cases(cross=True) if name.split("-")[0] in CONSTANT)
def test_some_memories_do_not_grow(case: Case) -> None:
    mix = case.build()
    short, long = (mix.remember(tokens(2, size, DIM)) for size in (3, S))
    assert [t.shape for t in short] == [t.shape for t in long]


def test_what_cannot_work() -> None:
    mix, other = (subquad.build(name, dim=DIM, heads=HEADS) for name in ("softmax", "additive"))
    x = torch.randn(2, 5, DIM)
    memory = mix.remember(x)
    with pytest.raises(ValueError, match=r"context is a subquad.mechanisms.softmax.Memory: .* Additive's remember"):
        other(x, context=memory)
    with pytest.raises(ValueError, match=r"context is a builtins.tuple"):
        mix(x, context=(x, x))
    with pytest.raises(ValueError, match=r"context.k has batch 2: x has batch 3"):
        mix(torch.randn(3, 5, DIM), context=memory)
    with pytest.raises(ValueError, match=r"context.k has shape \[2, 5, 1, 8\]: this Softmax remembers"):
        mix(x, context=subquad.build("softmax", dim=8).remember(torch.randn(2, 5, 8)))
    with pytest.raises(ValueError, match="context_lengths was given with a memory"):
        mix(x, context=memory, context_lengths=torch.tensor([5, 5]))
    with pytest.raises(ValueError, match=r"context has shape \[2, 5, 3\]"):
        mix.remember(torch.randn(2, 5, 3))
    with pytest.raises(ValueError, match="context_lengths ranges from 0 to 6"):
        mix.remember(x, torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="causal"):
        subquad.build("softmax", dim=DIM, causal=True).remember(x)
    with pytest.raises(ValueError, match="Local has no cross-attention"):
        subquad.build("local", dim=DIM).remember(x)
    with pytest.raises(ValueError, match="context=<Memory> cannot work: accepted is a tensor"):
        mix.reference(x, context=memory)


def make(cross: Any) -> Seq2Seq:
    torch.manual_seed(0)
    sizes = {"max_length": 400} if cross == "linformer" else {}
    return Seq2Seq(vocab=12, dim=32, heads=4, depth=2, mechanism="linear", cross=cross, **sizes).eval()


def step_cost(model: Seq2Seq, size: int) -> int:
    with torch.no_grad():
        state = model.init_state(torch.randn(2, size, 32))
        # a CPU's fused kernel is not counted
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.step(torch.zeros(2, dtype=torch.int64), state)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("cross", CONSTANT)
def test_a_step_to_constant_memory_costs_the_same_at_any_length(cross: str) -> None:
    model = make(cross)
    assert step_cost(model, 100) == step_cost(model, 400)


@pytest.mark.parametrize(("cross", "stride"), [("softmax", 1), ("additive", 1), ("compressed", 3)])
def test_a_step_to_a_growing_memory_costs_its_attention_alone(cross: str, stride: int) -> None:
    """Scores and weighted values: a multiply and an add a channel, slot, row and layer; the memory is not projected."""
    model = make(cross)
    rows, layers, products, slots = 2, 2, 2, 300 // stride
    assert step_cost(model, 400) - step_cost(model, 100) == 2 * products * slots * 32 * rows * layers


def test_what_keeps_the_context_has_the_common_memory() -> None:
    mix = subquad.build("nystrom", dim=DIM, heads=HEADS)
    assert isinstance(mix.remember(torch.randn(2, 5, DIM)), Memory)


@pytest.mark.parametrize("cross", ["softmax", "additive", "linear", "compressed, performer", "mixed"])
def test_states_with_memories_are_values(cross: str, tmp_path: Any) -> None:
    """A decoder's state forks, joins, and comes back from disk with what it remembers of its source."""
    spec = ("mixed", {"parts": (("softmax", 2), ("linear", 2))}) if cross == "mixed" else cross
    model = make(spec)
    source, lengths = torch.randint(12, (3, 9)), torch.tensor([9, 4, 6])
    start = torch.zeros(3, 1, dtype=torch.int64)
    state = model.init_state(*model.encode(source, lengths))
    want = model.generate(start, 6, state=state)
    parts = join([select(state, slice(n, n + 1)) for n in (0, 1, 2)])
    assert torch.equal(model.generate(start, 6, state=parts), want)
    save_state(state, tmp_path / "state")
    loaded = load_state(tmp_path / "state", model.init_state(torch.zeros(1, 1, 32)))
    assert torch.equal(model.generate(start, 6, state=loaded), want)
    two = model.generate(start[:2], 6, state=fork(select(state, slice(1, 2)), 2), seed=[1, 1])
    assert torch.equal(two, want[1:2].expand(2, -1))
