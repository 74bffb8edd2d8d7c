"""The kernel of the cross-entropy in pieces against the torch path, through Triton's interpreter, and for sm_90."""

import pytest
import torch
from torch import Tensor

from subquad.ops.cross_entropy import summed_cross_entropy
from subquad.ops.impl import Impl
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 150])
def test_losses_and_gradients_are_those_of_torch(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.ops import cross_entropy_triton as kernels

    torch.manual_seed(0)
    x, weight, bias = torch.randn(13, 8), 3 * torch.randn(vocab, 8), torch.randn(vocab)
    x, weight, bias = parts = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    ids, counted = torch.randint(vocab, (13,)), torch.arange(13) % 4 > 0

    def run(impl: Impl, pieces: int) -> list[Tensor]:
        total = summed_cross_entropy(x, weight, bias, ids, counted, pieces, impl=impl)
        with torch.no_grad():
            alone = summed_cross_entropy(x, weight, bias, ids, counted, pieces, impl=impl)
        torch.testing.assert_close(alone, total.detach())
        return [total, *torch.autograd.grad(total, parts)]

    want = run("torch", 2)
    close = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for block in (kernels.BLOCK, 64):
        monkeypatch.setattr(kernels, "BLOCK", block)
        monkeypatch.setattr(kernels, "WHOLE", 2 * block)
        for got, expected in zip(run("triton", 2), want, strict=True):
            torch.testing.assert_close(got, expected, **({"rtol": 1e-5, "atol": 1e-5} | close))


@compiled
@pytest.mark.parametrize("one", [True, False])
def test_compiles_for_hopper(one: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import cross_entropy_triton as kernels

    constants = {"BV": kernels.WHOLE if one else kernels.BLOCK, "ONE": one, "GRADS": True}
    types = {"logits": "*bf16", "grads": "*bf16", "ids": "*i64", "counted": "*u8", "losses": "*fp32", "V": "i32"}
    names = kernels.losses_of.arg_names
    constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernels.losses_of, signature=signature, constexprs=constexprs)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]
