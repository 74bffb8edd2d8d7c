"""On a GPU with less shared memory than Hopper, kernels take tiles that fit: compiled, not estimated."""

from pathlib import Path
from typing import Any

import pytest
import torch

import subquad

pytest.importorskip("triton")
from tests.ops.devices import H200, RTX_4090, Device, pretending
from tests.ops.own_process import compiled

slow = pytest.mark.slow
CASES = [
    ("local", 64, torch.float32, False),
    ("longformer", 128, torch.float32, False),
    ("efficient", 256, torch.float32, True),
    ("efficient", 256, torch.bfloat16, False),
    ("sinkhorn", 128, torch.float32, True),
    pytest.param("clustered", 64, torch.float32, True, marks=slow),
    pytest.param("clustered", 128, torch.float32, True, marks=slow),
    pytest.param("clustered", 128, torch.float32, False, marks=slow),
    pytest.param("reformer", 256, torch.float32, True, marks=slow),
    pytest.param("routing", 128, torch.float32, True, marks=slow),
    pytest.param("transformer_xl", 64, torch.float32, True, marks=slow),
    pytest.param("linear", 256, torch.float32, True, marks=slow),
    pytest.param("performer", 256, torch.bfloat16, True, marks=slow),
    pytest.param("performer", 128, torch.float32, True, marks=slow),
    pytest.param("deltanet", 128, torch.float32, True, marks=slow),
    pytest.param("additive", 128, torch.float32, True, marks=slow),
]


def train(name: str, width: int, dtype: torch.dtype, causal: bool, **options: Any) -> None:
    torch.manual_seed(0)
    if name == "sinkhorn":  # asks for the device itself
        options["impl"] = "triton"
    mix = subquad.build(name, dim=width, heads=1, causal=causal, **options).to(dtype)
    mix(torch.randn(1, 512, width, dtype=dtype, requires_grad=True)).sum().backward()


def most(device: Device, cache: Path, *case: Any) -> int:
    """The bytes of shared memory of the largest program that a training step starts."""
    with pretending(device, cache):
        train(*case)
        assert device.started
        distinct = {(kernel, str(plan)): (kernel, tensors, plan) for kernel, tensors, plan in device.started}
        return max(device.shared(*one) for one in distinct.values())


@compiled
@pytest.mark.parametrize(("name", "width", "dtype", "causal"), CASES)
def test_programs_fit_on_a_gpu_with_99_kilobytes(
    name: str, width: int, dtype: torch.dtype, causal: bool, tmp_path: Path
) -> None:
    device = RTX_4090()
    assert most(device, tmp_path, name, width, dtype, causal) <= device.room


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["performer", "clustered"])
def test_programs_of_wide_float32_fit_on_hopper(name: str, tmp_path: Path) -> None:
    device, width = H200(), {"performer": 256, "clustered": 128}[name]
    assert most(device, tmp_path, name, width, torch.float32, True) <= device.room
