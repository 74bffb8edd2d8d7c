"""Which path "auto" takes, without a GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subquad.ops import impl

GPU: Any = SimpleNamespace(device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl, "HAS_TRITON", True)


def test_auto_takes_kernels_on_a_gpu() -> None:
    assert impl.choose("auto", "an op", GPU) == "triton"
    assert impl.choose("auto", "an op", GPU, "too wide") == "torch"


def test_one_switch_takes_the_torch_path_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl, "KERNELS", False)
    assert impl.choose("auto", "an op", GPU) == "torch"
    assert impl.choose("triton", "an op", GPU) == "triton"  # an explicit choice is honoured


@pytest.mark.parametrize(("value", "kernels"), [("0", False), ("1", True), (None, True)])
def test_the_switch_is_an_environment_variable(value: str | None, kernels: bool) -> None:
    env = {name: text for name, text in os.environ.items() if name != "SUBQUAD_KERNELS"}
    env |= {} if value is None else {"SUBQUAD_KERNELS": value}
    code = "from subquad.ops import impl; print(impl.KERNELS)"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(kernels)


def test_torch_func_sees_plain_expressions() -> None:
    seen = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(impl.choose("auto", "an op", GPU))
        return x.square()

    torch.func.grad(loss)(torch.tensor(1.0))
    assert seen == ["torch"]
