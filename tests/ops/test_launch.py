"""How kernels are started: by the private launcher of a known Triton, or else by kernel[grid](...)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from subquad.ops import launch
from subquad.ops.launch import Plan


class Kernel:
    """Notes how it was started."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> Any:
            self.calls.append((grid, args, options))
            return SimpleNamespace(run=self.run, function=7, packed_metadata=8)

        return start

    def run(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_READY", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 9, raising=False)


def test_a_known_version_is_asked_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_known", True)
    kernel, x, plan = Kernel(), torch.zeros(8), Plan((2, 3), (1.5,), {"N": 4, "M": 5}, warps=8)
    launch.launch(kernel, (x,), plan)
    launch.launch(kernel, (x,), plan)
    options = {"num_warps": 8, "num_stages": 1, "maxnreg": 255}
    assert kernel.calls[0][::2] == ((2, 3), {"N": 4, "M": 5, **options})
    assert kernel.calls[1] == (2, 3, 1, 9, 7, 8, None, None, None, x.data_ptr(), 1.5, None, None)
    for other in (x.double(), x[1:]):  # another type, another alignment
        launch.launch(kernel, (other,), plan)
        assert len(kernel.calls[-1]) == 3, "compiled anew"
    launch.launch(kernel, (x,), plan._replace(numbers=(2.5,)))
    assert kernel.calls[-1][1][1:] == (2.5,)


def test_any_other_version_is_called_as_its_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_known", False)
    kernel, x = Kernel(), torch.zeros(8)
    for _ in range(2):
        launch.launch(kernel, (x,), Plan((2,), (1.5,), {"N": 4}))
        grid, (given, number), options = kernel.calls[-1]
        assert (grid, number, options["N"], options["num_warps"]) == ((2,), 1.5, 4, 4)
        assert given is x
