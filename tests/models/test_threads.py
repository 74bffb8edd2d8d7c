import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from subquad import LanguageModel
from subquad.models import threads
from subquad.models.sampling import Sampling
from subquad.models.state import leaves
from subquad.models.streams import Streams
from subquad.models.threads import SMALL, run_small

OURS = 3  # threads that the user asked for


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OURS)
    yield
    torch.set_num_threads(before)


def make(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab": 20, "dim": 16, "depth": 2, "heads": 2, "mechanism": mechanism, "positions": "none"}
    return LanguageModel(**{**fields, **changes}).eval()


def watch(model: LanguageModel) -> list[int]:
    """Record the number of threads of each prompt and each step from now on."""
    seen: list[int] = []
    for name in ("prefill", "step"):
        before(model, name, lambda: seen.append(torch.get_num_threads()))
    return seen


def before(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Call `first` whenever a method is called."""
    method = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    setattr(owner, name, both)


def in_thread(run: Callable[[], Any]) -> Any:
    """What `run` returns in a thread that never used torch before."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def test_only_small_work_gets_one_thread() -> None:
    assert run_small(SMALL - 1, torch.get_num_threads) == 1
    assert run_small(SMALL, torch.get_num_threads) == OURS
    assert torch.get_num_threads() == OURS
    torch.set_num_threads(1)  # the user's number is never exceeded
    assert run_small(SMALL, torch.get_num_threads) == run_small(0, torch.get_num_threads) == 1
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_number_of_threads(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        run_small(0, lambda: run_small(0, fail))
    assert torch.get_num_threads() == OURS


def test_small_models_generate_on_one_thread_and_large_ones_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for small, expected in ((SMALL, {1}), (0, {OURS})):
        monkeypatch.setattr(threads, "SMALL", small)
        model = make()
        seen = watch(model)
        model.generate([[1, 2, 3], [4, 5, 6]], 3)
        list(model.stream([1, 2], 3))
        streams = Streams(model, slots=2, capacity=8)
        streams.admit([[1, 2]])
        streams.step()
        assert set(seen) == expected
        assert len(seen) == 1 + 3 + 1 + 3 + 1 + 1
        assert torch.get_num_threads() == OURS


def test_the_work_grows_with_rows_width_and_state() -> None:
    def threads_of_a_step(model: LanguageModel, rows: int, capacity: int = 8) -> int:
        streams = Streams(model, slots=rows, capacity=capacity)
        streams.admit([[1]])
        seen = watch(model)
        streams.step()
        (number,) = seen
        return number

    assert threads_of_a_step(make(), 100) == 1
    assert threads_of_a_step(make(), 20000) == OURS
    assert threads_of_a_step(make(dim=1024, depth=1), 8) == OURS
    assert threads_of_a_step(make("softmax"), 10, 100) == 1
    assert threads_of_a_step(make("softmax"), 10, 20000) == OURS  # every step reads the whole cache


@pytest.mark.parametrize("steps", [20, None])
def test_between_the_tokens_of_a_stream_the_number_is_the_users(steps: int | None) -> None:
    stream = make().stream([1, 2], steps)
    next(stream)
    assert torch.get_num_threads() == OURS
    torch.set_num_threads(OURS + 1)
    next(stream)
    assert torch.get_num_threads() == OURS + 1
    del stream  # stopped halfway
    assert torch.get_num_threads() == OURS + 1


@pytest.mark.parametrize(("method", "call"), [("prefill", 1), ("step", 1), ("step", 7)])
def test_an_interrupt_in_the_middle_of_a_step(method: str, call: int) -> None:
    model = make(dropout=0.5).train()
    expected = model.generate([1, 2, 3], 8)
    calls = []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    before(model.transformer.blocks[1].mixer, method, interrupt)  # the layer before it has written its state
    with pytest.raises(KeyboardInterrupt):
        model.generate([1, 2, 3], 8)
    assert torch.get_num_threads() == OURS
    assert model.training
    assert torch.equal(model.generate([1, 2, 3], 8), expected)


def test_a_thread_that_starts_meanwhile_takes_the_users_number() -> None:
    """Its number is fixed when it first uses torch, which may be in the middle of a step of another thread."""
    assert run_small(0, lambda: in_thread(torch.get_num_threads)) == OURS
    assert run_small(0, lambda: run_small(0, lambda: in_thread(torch.get_num_threads))) == OURS


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_matrix_products_use_one_thread_too() -> None:
    """MKL computes them, and it has its own number of threads."""

    def mkl() -> str:
        info = torch.__config__.parallel_info()
        return next(line.split(":")[1].strip() for line in info.splitlines() if "mkl_get_max_threads" in line)

    assert mkl() == str(OURS)
    assert run_small(0, mkl) == "1"
    assert mkl() == str(OURS)


def test_where_the_number_cannot_be_set_for_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_thread_setters", lambda: None)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert run_small(0, torch.get_num_threads) == 1
    assert torch.get_num_threads() == OURS
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert run_small(0, torch.get_num_threads) == OURS


def test_threads_that_generate_at_once_keep_their_own_numbers() -> None:
    model = make()
    expected = [model.generate([1, 2], 12, seed=seed).tolist() for seed in range(4)]
    barrier = threading.Barrier(4)
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        torch.get_num_threads()
        torch.set_num_threads(seed + 1)
        barrier.wait()
        tokens = [model.generate([1, 2], 12, seed=seed).tolist() for _ in range(5)]
        results[seed] = tokens, torch.get_num_threads()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed in range(4):
        assert results[seed] == ([expected[seed]] * 5, seed + 1)
    assert torch.get_num_threads() == OURS


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_the_number_of_threads_changes_no_token(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single stream runs on one thread; in a large batch it runs on three."""
    model = make(mechanism, dim=64, heads=4)
    alone = model.generate([[5, 6]], 20, seed=77, full=True)
    prompts = [[5, 6]] * 300
    monkeypatch.setattr(threads, "SMALL", 0)
    crowd = model.generate(prompts, 20, seed=range(77, 377), full=True, sampling=Sampling())
    assert torch.equal(crowd.tokens[:1], alone.tokens)
    for (name, a), (_, b) in zip(leaves(alone.state), leaves(crowd.state), strict=True):
        torch.testing.assert_close(a, b[:1], rtol=1e-4, atol=1e-5, msg=name)


def _in_a_fork(model: LanguageModel, pipe: Any) -> None:
    pipe.send((model.generate([1, 2], 6, seed=3).tolist(), torch.get_num_threads()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_generates_too() -> None:
    model = make()
    expected = model.generate([1, 2], 6, seed=3).tolist()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_a_fork, args=(model, theirs))
    process.start()
    assert ours.poll(60), "the forked process hangs"
    assert ours.recv() == (expected, OURS)
    process.join()
