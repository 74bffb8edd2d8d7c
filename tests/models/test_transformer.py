import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.mechanisms import MECHANISMS, build
from subquad.models import Transformer
from subquad.ops import rotary

CAUSAL = [name for name, cls in MECHANISMS.items() if cls.traits.causal]


def small(name: str, **fields: Any) -> Transformer:
    """Two layers of a mechanism, with options for short sequences."""
    cls = MECHANISMS[name]
    fields = {"dim": 16, "heads": 4, "depth": 2, "max_length": 24, **fields}
    return Transformer(mechanism=(name, dict(cls.small[0])), **fields).double().eval()


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_makes_a_model(name: str) -> None:
    torch.manual_seed(0)
    model = small(name, causal=not MECHANISMS[name].traits.bidirectional)
    x, lengths = torch.randn(3, 14, 16, dtype=torch.float64, requires_grad=True), torch.tensor([14, 5, 0])
    y = model(x, lengths)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert x.grad is not None
    assert (x.grad[1, 5:] == 0).all()
    assert (y[1, 5:] == 0).all()
    assert (y[2] == 0).all()
    torch.testing.assert_close(y[1:2, :5], model(x[1:2, :5]))


@pytest.mark.parametrize("name", CAUSAL)
def test_prefill_and_step_are_forward(name: str) -> None:
    torch.manual_seed(0)
    model = small(name, causal=True)
    if model.traits.state is None:
        with pytest.raises(NotImplementedError, match=rf"prefill: layer 0 \({name}\) has no recurrent form"):
            model.prefill(torch.zeros(1, 3, 16, dtype=torch.float64))
        return
    check_recurrence(model, 19, [11, 3])


HYBRIDS: list[dict[str, Any]] = [
    {"mechanism": "linear, linear, softmax", "depth": 4},
    {"mechanism": ["additive", ("local", {"window": 3})], "norm_position": "post"},
    {"mechanism": "linear, softmax", "rotary": True, "norm": "rms", "activation": "swiglu"},
    {"mechanism": "linear, softmax", "reversible": True},
    {"mechanism": "softmax", "cross": "additive, linear"},
]


@pytest.mark.parametrize("fields", HYBRIDS, ids=lambda fields: str(fields["mechanism"]))
@settings(deadline=None, max_examples=6, derandomize=True)
@given(data=st.data())
def test_hybrids_as_recurrences(fields: dict[str, Any], data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Transformer(**{"dim": 16, "heads": 4, "depth": 2, "causal": True, **fields}).double().eval()
    prompts = data.draw(st.lists(st.integers(0, 8), min_size=2, max_size=3).filter(any))
    check_recurrence(model, 12, prompts)


@torch.no_grad()
def check_recurrence(model: Transformer, size: int, prompts: list[int]) -> None:
    """Ragged prompts, then a second ragged piece from the state, then single tokens, equal forward."""
    batch = len(prompts)
    x = torch.randn(batch, size, 16, dtype=torch.float64)
    memory: dict[str, Tensor] = {}
    if model.traits.cross:
        memory = {"memory": torch.randn(batch, 5, 16, dtype=torch.float64), "memory_lengths": torch.arange(batch) + 1}
    whole = model(x, **memory)
    lengths = torch.tensor(prompts)
    y, state = model.prefill(x[:, : max(prompts)], lengths, **memory)
    assert state.position.tolist() == prompts
    for b, n in enumerate(prompts):
        torch.testing.assert_close(y[b, :n], whole[b, :n])
        assert (y[b, n:] == 0).all()
    more = torch.tensor([2, 0, 1][:batch])
    piece = torch.stack([x[b, n : n + 2] for b, n in enumerate(prompts)])
    y, state = model.prefill(piece, more, state, **memory)
    for b, n in enumerate(prompts):
        torch.testing.assert_close(y[b, : more[b]], whole[b, n : n + int(more[b])])
    rows = torch.arange(batch)
    before = copy.deepcopy(state)
    for _ in range(2):
        out, after = model.step(x[rows, state.position], state, **memory)
        torch.testing.assert_close(out, whole[rows, state.position])
        for old, kept in zip(
            torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(before), strict=True
        ):
            assert torch.equal(old, kept)
        state, before = after, copy.deepcopy(after)
    state = model.init_state(batch, capacity=size)
    for t in range(3):
        out, state = model.step(x[:, t], state, **memory)
        torch.testing.assert_close(out, whole[:, t])
    assert state.position.tolist() == [3] * batch


def test_a_causal_stack_sees_no_future() -> None:
    model = Transformer(dim=16, heads=4, depth=3, mechanism="linear, softmax, local", causal=True).double().eval()
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    for t in (0, 4, 8):
        (grad,) = torch.autograd.grad(model(x)[0, t, :5].sum(), x)
        assert (grad[0, t + 1 :] == 0).all()
        assert (grad[0, : t + 1].abs().sum(-1) > 0).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_position": "post"},
        {"reversible": True},
        {"pool": (1, 2)},
        {"pool": 3, "mechanism": "local"},
        {"ff_chunks": 3},
        {"checkpoint": True, "norm": "rms"},
    ],
    ids=str,
)
def test_padding_is_invisible(fields: dict[str, Any]) -> None:
    model = Transformer(**{"dim": 16, "heads": 4, "depth": 2, **fields}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases start at zero, which would keep padding at zero
    x, lengths = torch.randn(3, 10, 16, dtype=torch.float64), torch.tensor([10, 4, 0])
    poisoned = x.clone()
    poisoned[1, 4:] = poisoned[2] = torch.nan
    y = model(poisoned, lengths)
    short = model.short_lengths(lengths)
    assert short is not None
    for b, n in enumerate(lengths.tolist()):
        if n:
            torch.testing.assert_close(y[b : b + 1, : short[b]], model(x[b : b + 1, :n]))
        assert (y[b, short[b] :] == 0).all()
    y.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_papers_model_is_the_authors_layer() -> None:
    """Post-norm, ReLU, a final norm: torch's own encoder layer with copied weights."""
    torch.manual_seed(0)
    ours = Transformer(dim=16, heads=4, depth=2, norm_position="post", activation="relu", ff_dim=32).double().eval()
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dtype=torch.float64)
    theirs = torch.nn.TransformerEncoder(
        layer, 2, torch.nn.LayerNorm(16, dtype=torch.float64), enable_nested_tensor=False
    )
    for mine, their in zip(ours.blocks, theirs.layers, strict=True):
        pairs = {
            their.self_attn.out_proj: mine.mixer.heads.out,
            their.linear1: mine.ff.inner,
            their.linear2: mine.ff.out,
            their.norm1: mine.mixer_residual.norm,
            their.norm2: mine.ff_residual.norm,
        }
        for to, source in pairs.items():
            to.load_state_dict(source.state_dict())
        their.self_attn.in_proj_weight.data.copy_(mine.mixer.heads.qkv.weight)
        their.self_attn.in_proj_bias.data.copy_(mine.mixer.heads.qkv.bias)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    lengths = torch.tensor([7, 3])
    with torch.no_grad():
        expected = theirs.eval()(x, src_key_padding_mask=torch.arange(7) >= lengths[:, None])
        torch.testing.assert_close(ours(x, lengths)[1, :3], expected[1, :3])
        torch.testing.assert_close(ours(x)[0], expected[0])


CROSS = [name for name, cls in MECHANISMS.items() if cls.traits.cross and not cls.joint_queries]


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_of_a_decoder_sees_no_later_query(name: str) -> None:
    """A mechanism may attend to a memory only if it treats each query separately; others are refused."""
    cls = MECHANISMS[name]
    parts = {"parts": (("linear", 2), ("softmax", 2))} if name == "mixed" else dict(cls.small[0])
    model = Transformer(dim=16, heads=4, depth=2, causal=True, cross=(name, parts), max_length=40).double().eval()
    x, memory = torch.randn(2, 40, 16, dtype=torch.float64), torch.randn(2, 38, 16, dtype=torch.float64)
    lengths = torch.tensor([38, 17])
    with torch.no_grad():
        whole = model(x, memory=memory, memory_lengths=lengths)
        torch.testing.assert_close(model(x[:, :9], memory=memory, memory_lengths=lengths), whole[:, :9])
        _, state = model.prefill(x[:, :39], memory=memory, memory_lengths=lengths)
        last, _ = model.step(x[:, 39], state, memory, lengths)
        torch.testing.assert_close(last, whole[:, 39])


def test_a_mixer_of_mixers_is_shrunk_once() -> None:
    torch.manual_seed(0)
    model = Transformer(dim=64, heads=4, depth=8, mechanism="mixed")
    outer, inner = model.blocks[0].mixer.out.weight, model.blocks[0].mixer.parts[0].heads.out.weight
    assert outer.std().item() == pytest.approx(1 / math.sqrt(3 * 64 * 16), rel=0.1)
    assert inner.std().item() == pytest.approx(1 / math.sqrt(3 * 32), rel=0.1)


def test_depth_does_not_blow_up_the_residual() -> None:
    torch.manual_seed(0)
    model = Transformer(dim=64, heads=4, depth=24, final_norm=False)
    x = torch.randn(2, 16, 64)
    assert 0.8 < model(x).std() < 1.6
    assert model.blocks[0].mixer.heads.out.weight.std() < 0.2 * math.sqrt(1 / (3 * 64))


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "additive"])
def test_autocast(mechanism: str) -> None:
    torch.manual_seed(0)
    model = Transformer(dim=32, heads=4, depth=2, mechanism=mechanism, causal=True)
    x = torch.randn(2, 9, 32)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, torch.tensor([9, 9]))
        _, state = model.prefill(x[:, :8])
        last, _ = model.step(x[:, 8], state)
    y.sum().backward()
    assert (y - expected).norm() / expected.norm() < 0.03
    assert (last - expected[:, 8]).norm() / expected[:, 8].norm() < 0.03
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_bfloat16_and_deepcopy() -> None:
    model = Transformer(dim=32, heads=4, depth=2, mechanism="linear, softmax", causal=True, reversible=True).bfloat16()
    x = torch.randn(2, 9, 32).bfloat16()
    y = model(x)
    assert y.dtype == torch.bfloat16
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        twin.blocks[0].ff.out.weight.zero_()
    assert torch.equal(model(x), y)
    assert not torch.equal(twin(x), y)
    assert twin.config == model.config


def test_traits_of_the_whole_stack() -> None:
    def state(mechanism: str) -> str | None:
        return Transformer(dim=16, heads=4, depth=2, mechanism=mechanism, causal=True).traits.state

    assert state("linear") == "constant"
    assert state("linear, local") == "window"
    assert state("softmax, local") == "growing"
    assert Transformer(dim=16, heads=4, depth=1).traits.state is None


def test_layers_draw_differently_and_seeds_repeat() -> None:
    a, b, c = (Transformer(dim=16, heads=4, depth=2, mechanism="performer", seed=seed) for seed in (0, 0, 1))
    draws = [[t for n, t in m.named_buffers() if t.numel()] for m in (a, b, c)]
    assert all(torch.equal(x, y) for x, y in zip(draws[0], draws[1], strict=True))
    assert not torch.equal(draws[0][0], draws[2][0])
    half = len(draws[0]) // 2
    assert half
    assert not torch.equal(draws[0][0], draws[0][half])


def test_bad_input() -> None:
    model = Transformer(dim=16, heads=4, depth=2, causal=True)
    x = torch.randn(2, 5, 16)
    for bad in (torch.randn(2, 5, 8), torch.randn(5, 16), torch.zeros(2, 0, 16)):
        with pytest.raises(ValueError, match=r"x has shape .*: accepted is \[batch, T, 16\]"):
            model(bad)
    with pytest.raises(ValueError, match="x='x' cannot work: accepted is a tensor"):
        model("x")
    with pytest.raises(ValueError, match=r"x has dtype torch.int64"):
        model(x.long())
    with pytest.raises(ValueError, match=r"x has dtype torch.float64"):
        model(x.double())
    for lengths, what in (([5, 6], "ranges from 5 to 6"), ([-1, 3], "ranges from -1 to 3"), ([5], "has shape")):
        with pytest.raises(ValueError, match=f"lengths {what}"):
            model(x, torch.tensor(lengths))
    with pytest.raises(ValueError, match=r"lengths has dtype torch.float32"):
        model(x, torch.tensor([5.0, 5.0]))
    with pytest.raises(ValueError, match="memory was given: this model has no cross-attention"):
        model(x, memory=x)
    with pytest.raises(ValueError, match="memory_lengths came without memory"):
        model(x, memory_lengths=torch.tensor([1, 1]))
    state = model.init_state(2)
    with pytest.raises(ValueError, match="state has batch 2: the input has batch 3"):
        model.step(torch.randn(3, 16), state)
    with pytest.raises(ValueError, match=r"step takes one token, \[batch, 16\]"):
        model.step(x, state)
    with pytest.raises(ValueError, match="state is a state of 1 layers: accepted is"):
        model.step(x[:, 0], Transformer(dim=16, heads=4, depth=1, causal=True).init_state(2))
    with pytest.raises(ValueError, match=r"state=\(\) cannot work"):
        model.prefill(x, state=())


def test_bad_memory() -> None:
    model = Transformer(dim=16, heads=4, depth=2, causal=True, cross="softmax")
    x = torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match="memory is missing: this model has cross-attention"):
        model(x)
    with pytest.raises(ValueError, match=r"memory has shape \[2, 4, 8\]: accepted is \[2, S, 16\]"):
        model(x, memory=torch.randn(2, 4, 8))
    with pytest.raises(ValueError, match=r"memory has shape \[3, 4, 16\]"):
        model(x, memory=torch.randn(3, 4, 16))
    with pytest.raises(ValueError, match="memory_lengths ranges from 1 to 7"):
        model(x, memory=torch.randn(2, 4, 16), memory_lengths=torch.tensor([1, 7]))


def test_no_state_without_causality() -> None:
    model = Transformer(dim=16, heads=4, depth=2)
    for call in (lambda: model.init_state(2), lambda: model.prefill(torch.randn(1, 2, 16))):
        with pytest.raises(NotImplementedError, match="causal=False"):
            call()


ROTARY = [name for name, cls in MECHANISMS.items() if "rotary" not in cls.unused]


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("fields", [{}, {"checkpoint": True}, {"reversible": True}, {"pool": (2, 1)}], ids=str)
def test_a_stack_turns_as_its_mixers_do_alone(name: str, fields: dict[str, Any]) -> None:
    """Turns that the stack makes once for all layers give the numbers of each layer's own."""
    torch.manual_seed(0)
    causal = "pool" not in fields
    if not (MECHANISMS[name].traits.causal if causal else MECHANISMS[name].traits.bidirectional):
        return
    model = small(name, rotary=True, causal=causal, **fields)
    alone = copy.deepcopy(model)
    for block in alone.blocks:
        block.mixer.turn_width = None
    x, lengths = torch.randn(2, 11, 16, dtype=torch.float64), torch.tensor([11, 6])
    results = []
    for stack in (model, alone):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = stack(given, lengths)
        values = [y, *torch.autograd.grad(y.square().sum(), [given, *stack.parameters()], allow_unused=True)]
        if model.traits.state:
            y, state = stack.prefill(x[:, :5], lengths.clamp(max=5))
            z, state = stack.prefill(x[:, 5:9], lengths.sub(5).clamp(0, 4), state)
            values += [y, z, stack.step(x[:, 9], state)[0]]
        results.append(values)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_stack_makes_its_turns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    made = rotary._turns

    def count(at: Tensor, *how: Any) -> Any:
        calls.append(tuple(at.shape))
        return made(at, *how)

    monkeypatch.setattr(rotary, "_turns", count)
    mechanism = ["softmax", "linear", ("linear", {"feature_map": "taylor", "features": 6}), "retnet", "reformer"]
    model = Transformer(dim=16, heads=2, depth=10, mechanism=mechanism, causal=True, rotary=True).eval()
    x = torch.randn(2, 7, 16)
    model(x)
    assert calls == [(7,), (7,)]  # for heads of 8 channels, and of 6
    _, state = model.prefill(x)
    _, state = model.prefill(x, None, state)
    model.step(x[:, 0], state)
    assert calls[2:] == [(7,), (7,), (2, 7), (2, 7), (2, 1), (2, 1)]


def test_turns_of_other_positions() -> None:
    """A part of a sequence, with the turns of its own positions, as a mixer sees it behind a state."""
    torch.manual_seed(0)
    mix = build("linear", dim=16, heads=2, causal=True, rotary=True).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    _, state = mix.prefill(x[:, :4])
    want, _ = mix.prefill(x[:, 4:], None, state)
    by = rotary.turns(torch.arange(4, 9), 8, torch.float64)
    got, _ = mix.prefill(x[:, 4:], None, state._replace(position=torch.zeros(2, dtype=torch.int64)), by)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=r"turns.cos is \[5, 1, 4\] on cpu: accepted is \[9, 1, 4\]"):
        mix(x, turns=by)
    with pytest.raises(ValueError, match="turns was given, but this Softmax has no rotary positions"):
        build("softmax", dim=16, heads=2)(x.float(), turns=by)
    with pytest.raises(ValueError, match="turns was given, but this Compressed computes its own"):
        build("compressed", dim=16, heads=2, rotary=True).double()(x, turns=by)
    mix = build("softmax", dim=16, heads=2, rotary=True).double()
    own = rotary.turns(torch.arange(x.shape[1]), mix.turn_width)
    with pytest.raises(ValueError, match="turns cannot work with a context"):
        mix(x, context=x, turns=own)


def test_threads_do_not_share_turns() -> None:
    model = Transformer(dim=16, heads=2, depth=3, causal=True, rotary=True).eval()
    inputs = [torch.randn(1, size, 16) for size in range(3, 35)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(model, inputs * 3), [model(x) for x in inputs] * 3, strict=True):
            assert torch.equal(got, want)
