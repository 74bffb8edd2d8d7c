"""Sums that are written at every fourth step, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

import pytest
import torch

from subquad import LanguageModel
from subquad.models.decoding import Loop, defer, settle
from subquad.models.sampling import Sampling
from subquad.models.state import leaves
from subquad.ops.feature_maps import FEATURE_MAPS
from subquad.ops.linear import LinearState, deferred, linear_attention_step
from subquad.ops.linear.deferred import GROUP, deferred_linear_attention_step, make_queue
from subquad.ops.linear.spec import Spec
from subquad.ops.rotary import turned, turns
from tests.ops.own_process import compiled, interpreted, outside

pytest.importorskip("triton")


def start(rows: int, heads: int, width_k: int, width_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    s, z = torch.randn(rows, heads, width_k, width_v), torch.rand(rows, heads, width_k) + 1
    return s, z, torch.tensor([0, 5, 1 << 33][:rows])


@interpreted
@pytest.mark.parametrize("feature_map", ["elu+1", "identity"])
@pytest.mark.parametrize("widths", [(16, 16), (12, 20), (80, 72)])
def test_a_group_of_steps_is_as_many_single_ones(widths: tuple[int, int], feature_map: str) -> None:
    s, z, position = start(3, 2, *widths)
    state = LinearState(s.clone(), z.clone())
    queue = make_queue(s, position, 2, *widths)
    for part in queue[:2]:
        part.fill_(float("nan"))  # what was not written is not read
    spec = Spec(True, feature_map, FEATURE_MAPS[feature_map].signed)
    for t in range(2 * GROUP + 3):
        q, k = torch.randn(2, 3, 2, widths[0]).unbind(0)
        v = torch.randn(3, 2, widths[1])
        wanted, state = linear_attention_step(q, k, v, state, feature_map=feature_map, impl="triton")
        o = deferred_linear_attention_step(q, k, v, s, z, queue, position, spec)
        position += 1
        torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(s, state.s) == (t % GROUP == GROUP - 1)
        assert torch.equal(z, state.z) == (t % GROUP == GROUP - 1)
    deferred.settle(s, z, queue, 3, feature_map)
    torch.testing.assert_close((s, z), tuple(state))


@interpreted
def test_projections_are_read_where_they_lie_and_lanes_are_views() -> None:
    s, z, position = start(3, 2, 16, 16)
    qkv = torch.randn(3, 2, 3, 16)
    q, k, v = qkv.unbind(2)
    wanted, state = linear_attention_step(q, k, v, LinearState(s, z), impl="triton")
    for rows in (slice(0, 1), slice(1, 3)):
        queue = make_queue(s, position[rows], 2, 16, 16)
        o = deferred_linear_attention_step(q[rows], k[rows], v[rows], s[rows], z[rows], queue, position[rows], Spec())
        deferred.settle(s[rows], z[rows], queue, 1)
        torch.testing.assert_close(o, wanted[rows])
    torch.testing.assert_close((s, z), tuple(state))
    with pytest.raises(ValueError, match="K and V contiguous"):
        deferred_linear_attention_step(q, k, v, s.mT, z, make_queue(s, position, 2, 16, 16), position, Spec())


@interpreted
@pytest.mark.parametrize("own_rows", [False, True])
def test_heads_are_turned_by_the_positions_of_their_rows(own_rows: bool) -> None:
    s, z, position = start(3, 2, 12, 16)
    q, k = torch.randn(2, 3, 2, 12).unbind(0)
    v = torch.randn(3, 2, 16)
    by = turns(position[:, None] if own_rows else torch.tensor([7]), 12)
    wanted_q, wanted_k = (turned(x[:, None], by)[:, 0] for x in (q, k))
    for queue in (make_queue(s, position, 2, 12, 16), None):  # None: written at once
        mine = LinearState(s.clone(), z.clone())
        state = LinearState(s, z)
        for t in range(2):
            wanted, state = linear_attention_step(wanted_q, wanted_k, v, state, impl="triton")
            o = deferred_linear_attention_step(q, k, v, *mine, queue, position + t, Spec(), by)
            torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-4)
        if queue is not None:
            deferred.settle(*mine, queue, 2)
        torch.testing.assert_close(tuple(mine), tuple(state))


@interpreted
def test_turns_of_a_step_are_those_of_a_sequence() -> None:
    from subquad.ops import turned_triton

    position = torch.tensor([[0], [5], [4097], [10_000_000]])
    for width in (2, 12, 64):
        for got, wanted in zip(turned_triton.turns(position, width, 10000.0), turns(position, width), strict=True):
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


@interpreted
def test_the_operator_is_well_formed() -> None:
    s, z, position = start(2, 2, 16, 16)
    q, k, v = torch.randn(3, 2, 2, 16).unbind(0)
    turned = (torch.rand(2, 1, 1, 8), torch.rand(2, 1, 1, 8))
    queue = make_queue(s.zero_(), position, 2, 16, 16)
    args = (q, k, v, s, z, *queue, position, *turned, True, "elu+1", False, True, 1e-6)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.linear_attention_step_deferred.default, args, test_utils=tests)


@interpreted
def test_a_model_steps_on_deferred_states_as_on_its_own() -> None:
    torch.manual_seed(0)
    mechanism = (("linear", {"impl": "triton"}), ("linear", {"impl": "torch"}), "softmax")
    model = LanguageModel(vocab=23, dim=32, depth=3, heads=2, mechanism=mechanism).eval()
    tokens = torch.randint(23, (9, 2))
    with torch.no_grad():
        _, plain = model.prefill(tokens[:3].T, state=model.init_state(2, 16))
        _, state = model.prefill(tokens[:3].T, state=model.init_state(2, 16))
        late = defer(model, state)
        assert [type(layer).__name__ for layer in late.layers] == ["Deferred", "State", "State"]
        for token in tokens[3:9]:
            wanted, plain = model.step(token, plain)
            outputs, late = model.step(token, late, inplace=True)
            torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-4)
        settle(model, late, 6)
        for name, tensor in leaves(state):
            torch.testing.assert_close(tensor, dict(leaves(plain))[name], rtol=1e-5, atol=1e-5)
        outputs, _ = model.step(tokens[0], defer(model, state), inplace=True)
        torch.testing.assert_close(outputs, model.step(tokens[0], plain)[0], rtol=1e-4, atol=1e-4)


@interpreted
def test_a_loop_in_groups_writes_what_single_steps_write() -> None:
    torch.manual_seed(0)
    model = LanguageModel(vocab=23, dim=32, depth=2, heads=2, mechanism=("linear", {"impl": "triton"})).eval()
    loops = []
    for group in (1, 8):
        token, seeds = torch.tensor([1, 2, 3]), torch.arange(3)
        loop = Loop(model, model.init_state(3), token, seeds, Sampling(), logprobs=True)
        loop.group, loop.record, loop.record_logprob = group, torch.zeros(group, 3).long(), torch.zeros(group, 3)
        loops.append((loop, [(token.clone(), score.clone()) for token, score in loop.advance(19)]))
    (one, single), (eight, grouped) = loops
    for (token, score), (other, scored) in zip(single, grouped, strict=True):
        assert torch.equal(token, other)
        torch.testing.assert_close(score, scored, rtol=1e-4, atol=1e-4)
    for (name, tensor), (_, other) in zip(leaves(one.state), leaves(eight.state), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4, msg=name)


@outside
def test_nothing_is_put_off_where_it_saves_nothing() -> None:
    model = LanguageModel(vocab=23, dim=16, depth=2, heads=2, mechanism="linear")
    state = model.init_state(2)
    assert all(a is b for a, b in zip(defer(model, state).layers, state.layers, strict=True))


@compiled
@pytest.mark.parametrize("width", [32, 128])
def test_compiles_for_hopper(width: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.linear import deferred_triton

    fn = deferred_triton.kernel
    half = {"q", "k", "v", "o", "keys", "values"}
    constants = {
        "K": width, "V": width, "BK": width, "BV": 4096 // width if width > 64 else width, "GROUP": GROUP,
        "MAP": "elu+1", "SIGNED": False, "NORM": True, **dict.fromkeys(deferred_triton.STRIDES, 8 * width),
        "TURN": True, "EARLY": True,
    }  # fmt: skip
    kinds = {"eps": "fp32", "start": "*i64", "position": "*i64", **dict.fromkeys(("s", "z", "cos", "sin"), "*fp32")}
    signature, constexprs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = kinds.get(name, "*bf16" if name in half else "i32")
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs)
    options = {"num_warps": deferred_triton.warps(constants["BK"], constants["BV"]), "num_stages": 1}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= 227 * 1024
