"""The kernel of a cached step against the dense definition, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

import pytest
import torch

from subquad.ops.cache import cached_attention_step
from subquad.ops.rotary import turns
from tests.ops.own_process import compiled, interpreted
from tests.ops.test_cache import dense, inputs

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize(("size", "counts"), [(40, [1, 40, 17]), (300, [3, 300, 65])])
@pytest.mark.parametrize("widths", [(16, 16), (12, 20)])
def test_the_kernel_is_the_definition(
    size: int, counts: list[int], widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import cache_triton

    monkeypatch.setattr(cache_triton, "BLOCK", 1024)  # so that 300 keys are cut into splits
    q, k, v = inputs(3, size, 2, *widths, torch.float32)
    count = torch.tensor(counts)
    o = cache_triton.attend(q, k, v, count, 0.3)
    torch.testing.assert_close(o.double(), dense(q, k, v, count, 0.3), rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("size", [40, 300])
def test_queries_may_be_grouped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops import cache_triton

    monkeypatch.setattr(cache_triton, "BLOCK", 1024)
    q, _, _ = inputs(2, size, 6, 16, 12, torch.float32)
    _, k, v = inputs(2, size, 2, 16, 12, torch.float32)
    count = torch.tensor([3, size])
    o = cache_triton.attend(q, k, v, count, 0.3)
    keys, values = (x.repeat_interleave(3, 2) for x in (k, v))
    torch.testing.assert_close(o.double(), dense(q, keys, values, count, 0.3), rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("size", "counts"), [(40, [1, 40]), (300, [3, 300])])
def test_scores_may_be_additive(size: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops import cache_triton
    from subquad.ops.additive import additive_attention

    monkeypatch.setattr(cache_triton, "BLOCK", 1024)
    q, k, v = inputs(2, size, 2, 12, 20, torch.float32)
    count, score = torch.tensor(counts), torch.randn(2, 12)
    want = additive_attention(q[:, None].double(), k.double(), v.double(), count[:, None], score.double())[:, 0]
    for factor in (1.0, 100.0):  # far out tanh is flat, and must not overflow
        o = cache_triton.attend(factor * q, k, v, count, 1.0, score=score)
        assert bool(o.isfinite().all())
        if factor == 1:
            torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-5)


@interpreted
def test_strided_caches_are_read_where_they_lie() -> None:
    from subquad.ops import cache_triton

    q, k, v = inputs(2, 24, 4, 16, 16, torch.float32)
    count = torch.tensor([24, 7])
    half = cache_triton.attend(q[:, ::2], k[:, :, ::2], v[:, :, ::2], count, 0.3)
    torch.testing.assert_close(half.double(), dense(q, k, v, count, 0.3)[:, ::2], rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("block", [8192, 512])
@pytest.mark.parametrize("widths", [(16, 16), (12, 20)])
@pytest.mark.parametrize("turn", [False, True])
def test_a_step_writes_the_new_token_and_attends_to_it(
    widths: tuple[int, int], block: int, turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import cache_triton

    monkeypatch.setattr(cache_triton, "BLOCK", block)
    q, k, v = inputs(3, 120, 2, *widths, torch.float32)
    qkv = torch.randn(3, 2, 2 * widths[0] + widths[1])  # of one product
    q, k_t, v_t = qkv.split((widths[0], widths[0], widths[1]), -1)
    position = torch.tensor([0, 119, 64])
    by = turns(position[:, None], widths[0]) if turn else None
    made = []
    for impl in ("torch", "triton"):
        made.append(cached_attention_step(q, k_t, v_t, k.clone(), v.clone(), position, by, scale=0.3, impl=impl))
    for mine, plain in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    o, grown, _ = cached_attention_step(q, k_t, v_t, k, v, position + 1, by, scale=0.3, impl="triton")
    assert grown.shape[1] > k.shape[1]
    assert bool(o.isfinite().all())


@interpreted
def test_the_operator_of_a_step_is_well_formed() -> None:
    q, k, v = inputs(2, 24, 2, 16, 16, torch.float32)
    position = torch.tensor([3, 4])
    by = turns(position[:, None], 16)
    args = (q, q + 1, q + 2, k, v, position, *by, 0.25)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.subquad.cached_attention_step.default, args, test_utils=tests)
    double = q.double()
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        cached_attention_step(double, double, double, k.double(), v.double(), position, impl="triton")


@compiled
@pytest.mark.parametrize("splits", [1, 4])
def test_compiles_for_hopper(splits: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.cache_triton import BLOCK, decode

    constants = {
        "K": 32, "V": 32, "BK": 32, "BV": 32, "BC": BLOCK // 32, "SPLITS": splits, "NEW": splits > 1,
        "TURN": splits > 1, "ADDITIVE": splits == 1, "EARLY": True,
    }  # fmt: skip
    types = {**dict.fromkeys(("q", "k", "v", "kn", "vn", "weight"), "*bf16"), "n": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("high", "mass", "cos", "sin"), "*fp32")
    types["o"] = "*bf16" if splits == 1 else "*fp32"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in decode.arg_names}
    constexprs = {(decode.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=decode, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 227 * 1024
