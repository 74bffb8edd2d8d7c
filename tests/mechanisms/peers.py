"""What others released, where it is installed: their plain functions, to be compared with copied weights on the CPU."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fla_naive(op: str) -> ModuleType:
    """The naive functions of an op of flash-linear-attention; the package itself imports only where Triton is."""
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        pytest.skip("flash-linear-attention is not installed")
    pytest.importorskip("einops", reason="einops is not installed, which flash-linear-attention needs")
    spec = importlib.util.spec_from_file_location(f"fla_{op}", Path(package.origin).parent / "ops" / op / "naive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def copy_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Every parameter of the module, from ours."""
    assert set(weights) == set(dict(module.named_parameters()))
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name].detach())


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """torch's causal convolution, then SiLU: x [B, T, C], weight [4, C] with the token's own row first."""
    kernel = weight.flip(0).T[:, None]
    return F.silu(F.conv1d(F.pad(x.mT, (3, 0)), kernel, groups=x.shape[-1]).mT)


def same_gradients(ours: Tensor, theirs: Tensor, x: Tensor, tolerance: float) -> None:
    """The outputs, and the gradients of a weighted sum of them with respect to x."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(8)).to(ours)
    one, other = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
