"""torch.compile of a whole model, of its blocks and of a training step: one graph, which serves all lengths."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from subquad.models import LanguageModel
from subquad.ops import additive
from subquad.tasks.text import Text
from subquad.training.evaluate import Wired

# warnings of torch itself, while it loads its compiler and while it traces
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

LENGTHS = (23, 31, 40, 23, 57)
MOST = 2  # graphs: one for the first length, and one for any


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(mechanism: Any, depth: int, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"positions": "rotary", **fields}
    return LanguageModel(vocab=256, dim=16, depth=depth, heads=2, mechanism=mechanism, **fields)


def gradients(loss: Tensor, model: LanguageModel) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def same_numbers(
    model: LanguageModel,
    compiled: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    lengths: tuple[int, ...] = LENGTHS,
) -> None:
    for size in lengths:
        tokens = torch.randint(256, (2, size))
        with torch.compiler.set_stance("force_eager"):
            want = gradients(plain(tokens), model)
        for a, b in zip(gradients(compiled(tokens), model), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_whole_model_serves_all_lengths() -> None:
    model, graphs = make("softmax, linear", 2), CompileCounterWithBackend("aot_eager")
    same_numbers(model, torch.compile(model.loss, backend=graphs, fullgraph=True), model.loss)
    assert graphs.frame_count == MOST


def test_a_compiled_model_has_the_loss_of_its_output_layer_outside() -> None:
    """`loss` calls the model, which is compiled, for vectors; `pieces` of the loss can then follow."""
    model, graphs = make("linear", 1), CompileCounterWithBackend("aot_eager")
    model.compile(backend=graphs, fullgraph=True)
    same_numbers(model, lambda tokens: model.loss(tokens, pieces=3), model.loss)
    assert graphs.frame_count == MOST


@pytest.mark.parametrize("mechanism", ["softmax", "linear", ("local", {"window": 4}), ("strided", {"stride": 4})])
def test_blocks_share_a_graph(mechanism: Any) -> None:
    """Ten blocks: torch gives up compiling a function after eight graphs, and then runs it uncompiled."""
    model, graphs = make(mechanism, 10), CompileCounterWithBackend("eager")
    for block in model.transformer.blocks:
        block.compile(backend=graphs, fullgraph=True)
    same_numbers(model, model.loss, model.loss)
    assert graphs.frame_count == MOST


@pytest.mark.parametrize("fields", [{}, {"checkpoint": True}, {"depth": 3, "checkpoint": 2}], ids=str)
def test_a_training_step_serves_all_lengths(fields: dict[str, Any]) -> None:
    model, graphs = make("linear", **{"depth": 2, **fields}), CompileCounterWithBackend("aot_eager")
    step = Wired(Text(), model)
    step.compile(backend=graphs, fullgraph=True)

    def loss(tokens: Tensor) -> Tensor:
        return step({"tokens": tokens.to(torch.uint8), "first": torch.zeros(2, dtype=torch.int64)}).total

    same_numbers(model, loss, loss)
    assert graphs.frame_count == MOST


@pytest.mark.parametrize(
    ("mechanism", "most"),
    [
        ("transformer_xl", MOST),
        # one more: for lengths within a block, or of whole blocks, or which are computed in one piece
        ("efficient", MOST + 1), (("transformer_xl", {"memory": 32}), MOST + 1), (("sinkhorn", {"block": 8}), MOST + 1),
        ("compressed", MOST + 1),
        ("performer", MOST + 1), ("additive", MOST + 1),
    ],
    ids=str,
)  # fmt: skip
def test_few_graphs_serve_all_lengths(mechanism: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive, "PAIRS", 2**14)  # of 30 tokens and fewer in one piece
    model, graphs = make(mechanism, 1, positions="sinusoidal").eval(), CompileCounterWithBackend("eager")
    loss = torch.compile(model.loss, backend=graphs, fullgraph=True)
    same_numbers(model, loss, model.loss, (23, 40, 31, 96, 130))
    assert graphs.frame_count <= most


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_a_second_generation_compiles_nothing(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs, compiler = make(mechanism, 2).eval(), CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **how: compiler(*args, backend=graphs, **how))
    prompt = torch.randint(256, (1, 5))
    for seed in (1, 2, 3):
        want = model.generate(prompt, 6, seed=seed, compile=False)
        assert torch.equal(model.generate(prompt, 6, seed=seed, compile=True), want)
        assert graphs.frame_count == 1
    if mechanism == "linear":  # a state of constant size, whatever was read
        model.generate(torch.randint(256, (1, 9)), 8, seed=4, compile=True)
        assert graphs.frame_count == 1
