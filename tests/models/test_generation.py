import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import subquad
from subquad import LanguageModel, Seq2Seq, machine
from subquad.models import generation
from subquad.models.decoding import Lane, Recompute, Top, decoder_of, head_of, step
from subquad.models.footprint import bytes_per_stream, check_fits, largest_batch
from subquad.models.generation import generate
from subquad.models.sampling import Rows, Sampling, draw
from subquad.models.state import fork, join, leaves, load_state, map_state, save_state, select, size

GREEDY = Sampling(temperature=0)
CAUSAL = [name for name, cls in subquad.MECHANISMS.items() if cls.traits.causal]


def make(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab": 23, "dim": 16, "depth": 2, "heads": 2, "mechanism": mechanism, "max_length": 40, **changes}
    model = LanguageModel(**fields)
    for p in model.parameters():  # far from uniform predictions, so that tokens depend on the prefix
        p.data.mul_(1.5)
    return model.eval()


def by_forward(model: LanguageModel, prompt: list[int], steps: int, **how: Any) -> list[int]:
    """The definition: forward over the whole prefix for every token."""
    tokens = list(prompt)
    for _ in range(steps):
        logits = model(torch.tensor([tokens]))[:, -1]
        at = torch.tensor([len(tokens)])
        tokens += draw(logits, how["sampling"], torch.tensor([how["seed"]]), at).tolist()
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        (name, {key: value for key, value in options.items() if key not in ("parts", "layer")})
        for name in CAUSAL
        for options in subquad.MECHANISMS[name].small
        # forms that look ahead
        if options.get("strict_causal", True) and options.get("sortcut") is None
    ],
)
def test_every_mechanism_generates_what_its_forward_predicts(mechanism: str, options: dict[str, Any]) -> None:
    model = make((mechanism, options), heads=4)
    prompts, seeds = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10]], [3, 1 << 33, 5]
    made = model.generate(prompts, 9, seed=seeds, full=True, logprobs=True)
    with torch.no_grad():
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            assert made.tokens[row].tolist() == by_forward(model, prompt, 9, sampling=Sampling(), seed=seed)
            whole = torch.tensor([prompt + made.tokens[row].tolist()])
            scores = model(whole[:, :-1]).log_softmax(-1).gather(-1, whole[:, 1:, None])[0, len(prompt) - 1 :, 0]
            torch.testing.assert_close(made.logprobs[row], scores, rtol=1e-4, atol=1e-4)


def test_hybrids_and_stacks_with_one_stateless_layer() -> None:
    for mechanism, stateless in ((("linear", ("local", {"window": 3})), False), (("linear", "sinkhorn"), True)):
        model = make(mechanism)
        assert isinstance(decoder_of(model), Recompute) == stateless
        with torch.no_grad():
            expected = by_forward(model, [4, 5, 6], 12, sampling=Sampling(top_k=5), seed=2)
        assert model.generate([4, 5, 6], 12, sampling=Sampling(top_k=5), seed=2).tolist() == expected


@pytest.mark.parametrize("mechanism", ["linear", "softmax", "sinkhorn"])
def test_a_stream_depends_on_its_own_seed_alone(mechanism: str) -> None:
    model = make(mechanism)
    alone = model.generate([5, 6], 10, seed=77)
    crowd = model.generate([[1], [5, 6], [2, 3, 4], [5, 6]], 10, seed=[1, 77, 3, 78])
    assert torch.equal(crowd[1], alone)
    assert not torch.equal(crowd[3], alone)
    assert torch.equal(model.generate(torch.tensor([[5, 6], [5, 6]]), 10, seed=77), crowd[[1, 3]])


def test_padded_prompts_are_ragged_prompts() -> None:
    model = make()
    padded = torch.tensor([[1, 2, 3, 99999], [4, 99999, 99999, 99999]])
    out = model.generate(padded, 6, lengths=torch.tensor([3, 1]))
    assert torch.equal(out, model.generate([[1, 2, 3], [4]], 6))


def test_stop_tokens_end_a_stream_and_leave_the_others() -> None:
    model = make()
    free = model.generate([[1], [2], [3]], 30, full=True, logprobs=True)
    stop = int(free.tokens[0, 4])
    made = model.generate([[1], [2], [3]], 30, stop=stop, full=True, logprobs=True)
    for row in range(3):
        hits = (free.tokens[row] == stop).nonzero()
        end = int(hits[0]) + 1 if len(hits) else 30
        assert made.lengths[row] == end
        assert torch.equal(made.tokens[row, :end], free.tokens[row, :end])
        assert (made.tokens[row, end:] == stop).all()
        assert (made.logprobs[row, end:] == 0).all()


def test_all_streams_stopped_ends_the_loop() -> None:
    model = make()
    calls = []
    stop = list(range(23))
    step = model.step
    model.step = lambda *a, **k: calls.append(1) or step(*a, **k)  # type: ignore[method-assign,func-returns-value]
    out = model.generate([[1], [2]], 39, stop=stop)
    assert out.shape == (2, 39)
    assert (out == out[:, :1]).all()
    assert len(calls) == generation.CHECK


def test_stream_gives_the_tokens_of_generate() -> None:
    model = make()
    expected = model.generate([[1, 2], [3]], 12, seed=4)
    rows = list(model.stream([[1, 2], [3]], 12, seed=4))
    assert torch.equal(torch.stack(rows, 1), expected)
    single = []
    for token in model.stream([1, 2], seed=4, stop=[int(expected[0, 7])]):
        single.append(token)
    first = expected[0].tolist().index(int(expected[0, 7]))
    assert single == expected[0, : first + 1].tolist()


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_an_endless_stream_grows_its_state(mechanism: str) -> None:
    model = make(mechanism, max_length=None)
    endless = model.stream([1], seed=4)
    assert [next(endless) for _ in range(90)] == model.generate([1], 90, seed=4).tolist()


def test_continuing_from_a_state_gives_the_same_tokens() -> None:
    for mechanism in ("linear", "softmax", ("local", {"window": 3}), "sinkhorn"):
        model = make(mechanism)
        whole = model.generate([[1, 2, 3], [4]], 20, seed=[1, 2])
        first = model.generate([[1, 2, 3], [4]], 8, seed=[1, 2], full=True)
        kept = {name: tensor.clone() for name, tensor in leaves(first.state)}
        rest = model.generate(first.tokens[:, -1:], 12, seed=[1, 2], state=first.state)
        assert torch.equal(torch.cat((first.tokens, rest), 1), whole)
        for name, tensor in leaves(first.state):  # using a state does not change it
            assert torch.equal(tensor, kept[name])


def test_a_saved_state_continues_in_another_process(tmp_path: Path) -> None:
    names, expected, last = ("linear", "softmax", "sinkhorn"), [], {}
    for name in names:
        model = make(name)
        expected.append(model.generate([[1, 2, 3], [4]], 20, seed=[1, 2])[:, 8:].tolist())
        first = model.generate([[1, 2, 3], [4]], 8, seed=[1, 2], full=True)
        last[name] = first.tokens[:, -1:].tolist()
        model.save(tmp_path / name)
        save_state(first.state, tmp_path / f"{name}.safetensors")
    program = f"""
import subquad
from subquad.models.decoding import decoder_of
from subquad.models.state import load_state
for name, tokens in {last}.items():
    model = subquad.load({str(tmp_path)!r} + "/" + name)
    state = load_state({str(tmp_path)!r} + f"/{{name}}.safetensors", decoder_of(model).init_state(1))
    print(model.generate(tokens, 12, seed=[1, 2], state=state).tolist())
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stdout.splitlines() == [str(rows) for rows in expected]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(make().init_state(2), path)
    assert torch.equal(load_state(path, make().init_state(1)).position, torch.zeros(2, dtype=torch.int64))
    for other in (make(depth=3), make("softmax"), make(dim=32), make().double()):
        with pytest.raises(ValueError, match="another model"):
            load_state(path, other.init_state(1))
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="truncated"):
        load_state(path, make().init_state(1))


def test_a_state_that_was_changed_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.safetensors"
    save_state(make().init_state(2), path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: it is not what was saved"):
        load_state(path, make().init_state(1))
    assert not caplog.records
    tensors = {name: tensor.clone() for name, tensor in leaves(make().init_state(2))}
    save_file(tensors, path, metadata={"subquad": '{"format": 1, "kind": "state"}'})  # an old file without a digest
    load_state(path, make().init_state(1))
    assert "has no digest" in caplog.records[0].getMessage()


def test_one_prompt_forks_into_a_thousand() -> None:
    model = make()
    prompt = [1, 2, 3, 4]
    _, state = model.prefill(torch.tensor([prompt[:-1]]))
    out = model.generate(torch.full((1000, 1), prompt[-1]), 5, state=fork(state, 1000), seed=10)
    assert len({tuple(row) for row in out.tolist()}) > 300
    for row in (0, 500, 999):
        assert torch.equal(out[row], model.generate(prompt, 5, seed=10 + row))
    with pytest.raises(ValueError, match="one stream"):
        fork(fork(state, 2), 2)


def test_states_are_picked_and_joined() -> None:
    model = make("softmax")
    states = [model.prefill(torch.tensor([[1, 2]]), state=model.init_state(1, 16))[1] for _ in range(2)]
    both = join(states)
    assert size(both) == 2 * size(states[0])
    back = select(both, torch.tensor([1]))
    for (_, a), (_, b) in zip(leaves(back), leaves(states[1]), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="per stream in one state"):
        join([states[0], model.init_state(1, 5)])


def test_the_lower_half_of_an_image_given_the_upper() -> None:
    model = make(positions="grid", shape=(6, 6), max_length=36, vocab=24)
    image = torch.randint(23, (2, 36))
    start = torch.full((2, 1), 23)
    lower = model.generate(torch.cat((start, image[:, :18]), 1), 18, sampling=Sampling(exclude=(23,)), seed=1)
    assert lower.shape == (2, 18)
    assert lower.max() < 23
    with torch.no_grad():
        prefix = [23, *image[0, :18].tolist()]
        assert lower[0].tolist() == by_forward(model, prefix, 18, sampling=Sampling(exclude=(23,)), seed=1)


def test_repetition_penalty_sees_the_prompt_and_what_was_drawn() -> None:
    model = make()
    how = Sampling(temperature=0, repetition_penalty=1e6)
    with torch.no_grad():  # all logits positive, so that a penalised one falls to nearly 0
        model.head.bias.fill_(50)
    out = model.generate([[3, 4, 5], [6]], 15, sampling=how)
    for row, prompt in zip(out.tolist(), ([3, 4, 5], [6]), strict=True):
        assert len({*row, *prompt}) == len(row) + len(prompt)


def test_a_start_token_that_never_comes_can_be_penalised() -> None:
    model = make(vocab=257, mixture=2)
    made = model.generate([[256], [256]], 20, sampling=Sampling(temperature=0, repetition_penalty=1e6))
    assert all(len(set(row)) == 20 for row in made.tolist())


def test_dropout_is_off_and_the_mode_is_restored() -> None:
    model = make(dropout=0.5)
    expected = model.generate([1], 10)
    model.train()
    assert torch.equal(model.generate([1], 10), expected)
    assert list(model.stream([1], 10)) == expected.tolist()
    assert model.training


def test_each_module_gets_its_own_mode_back() -> None:
    model = make(dropout=0.5).train()
    model.transformer.blocks[0].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    model.generate([1], 3)
    assert [module.training for module in model.modules()] == modes
    left = model.stream([1], 10)
    next(left)
    assert [module.training for module in model.modules()] == modes  # also between tokens, where a caller may stop


def test_streams_of_one_model_do_not_switch_dropout_on_for_each_other() -> None:
    model = make(dropout=0.5).train()
    expected = model.generate([1], 12, seed=4).tolist()
    first, second = model.stream([2], 2), model.stream([1], 12, seed=4)
    next(first)
    tokens = [next(second), next(second)]
    list(first)  # began before the other one, and ends before it
    assert [*tokens, *second] == expected
    inner: list[int] = []
    outer = model.generate([1], 12, seed=4, told=lambda _: inner.extend(model.generate([3], 2).tolist()))
    assert outer.tolist() == expected
    assert model.training


def test_threads_share_a_model_in_training() -> None:
    model = make(dropout=0.5).train()
    expected = [model.generate([1], 10, seed=seed).tolist() for seed in range(3)]
    made: dict[int, list[list[int]]] = {}

    def work(seed: int) -> None:
        made[seed] = [model.generate([1], 10, seed=seed).tolist() for _ in range(8 + 4 * seed)]

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed in range(3):
        assert all(tokens == expected[seed] for tokens in made[seed])
    assert model.training


def test_sequence_to_sequence_models_generate_from_an_encoded_source() -> None:
    torch.manual_seed(0)
    model = Seq2Seq(vocab=23, dim=16, depth=2, heads=2, mechanism="linear", cross="softmax").eval()
    source, lengths = torch.randint(23, (2, 7)), torch.tensor([7, 4])
    state = model.init_state(*model.encode(source, lengths))
    out = model.generate([[0], [0]], 8, state=state, sampling=GREEDY)
    target = torch.zeros(2, 1, dtype=torch.int64)
    for _ in range(8):
        target = torch.cat((target, model(source, target, lengths)[:, -1:].argmax(-1)), 1)
    assert torch.equal(out, target[:, 1:])
    with pytest.raises(ValueError, match="state=None"):
        model.generate([[0], [0]], 8)


def test_memory_is_known_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, softmax = make("linear"), make("softmax", max_length=None)
    for model in (linear, softmax, make("sinkhorn"), make(("linear", "local")), make("mixed")):
        assert bytes_per_stream(model, 30) == size(decoder_of(model).init_state(1, 30))
    assert bytes_per_stream(linear, 10) == bytes_per_stream(linear, 10**9)
    assert bytes_per_stream(softmax, 10**9) > 10**9 * 2 * 2 * 16 * 4 - 1  # nothing of this size is allocated
    with monkeypatch.context() as patch:
        patch.setattr("subquad.models.footprint.free_bytes", lambda _: 10**7)
        most = largest_batch(linear, 100)
        check_fits(linear, most, 100)
        with pytest.raises(ValueError, match=f"at most {most}"):
            check_fits(linear, most + 1, 100)
    with pytest.raises(ValueError, match="batch=3 cannot work"):
        generate(softmax, [[1], [2], [3]], 10**10)


def test_streams_respect_the_memory_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("30000000\n")
    (tmp_path / "memory.current").write_text("10000000\n")
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / Path(path).name)
    within = largest_batch(make(), 100)
    monkeypatch.setattr("subquad.models.footprint.free_bytes", lambda _: 20_000_000)
    assert within == largest_batch(make(), 100) > 0


def test_without_a_compiler_steps_run_uncompiled_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def lacking(*args: Any, **kwargs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise InvalidCxxCompiler

        return run

    model = make()
    expected = model.generate([1], 6)
    monkeypatch.setattr(torch, "compile", lacking)
    with pytest.warns(UserWarning, match="no compiler was found"):
        assert torch.equal(model.generate([1], 6, compile=True), expected)


def test_other_failures_of_a_compiled_step_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("a bug")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        make().generate([1], 6, compile=True)


@pytest.mark.parametrize(
    ("mixture", "samplings"),
    [
        (2, [Sampling()]),
        (2, [Sampling(), Sampling(top_k=3)]),
        (None, [Sampling(temperature=0), Sampling(top_p=0.9, min_p=0.1, exclude=(3,), repetition_penalty=1.3)]),
    ],
)
def test_a_step_traces_as_one_graph(mixture: int | None, samplings: list[Sampling]) -> None:
    """What compiling needs, tested without a compiler: no graph break, and a state that is changed in place."""
    model = make(depth=1, mixture=mixture, vocab=257)
    state, token = model.init_state(2, 8), torch.tensor([3, 4])
    graphs: list[Any] = []

    def keep(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fast = torch.compile(step, backend=keep, fullgraph=True, dynamic=False)
    head = head_of(model)
    args = (head, Rows.of(samplings, head.values, model.device), None)
    plain = map_state(torch.clone, state), token.clone()
    with torch.no_grad():
        for _ in range(3):
            done, seen = torch.zeros(2, dtype=torch.bool), torch.zeros(2, 257, dtype=torch.bool)
            top = Top(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64))
            fast(model, *args, state, Lane(token, torch.arange(2), done, seen, None, top))
            expected = Lane(plain[1], torch.arange(2), done, seen.clone(), None, Top(*map(torch.clone, top)))
            step(model, *args, plain[0], expected)
            assert torch.equal(top.tokens, expected.top.tokens)
    assert len(graphs) == 1
    assert torch.equal(token, plain[1])
    assert state.position.tolist() == [3, 3]
    torch._dynamo.reset()


def wrong(model: LanguageModel, **changes: Any) -> Tensor:
    return model.generate(**{"prompt": [[1], [2]], "steps": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [[1], []]}, "empty row"),
        ({"prompt": torch.zeros(2, 3)}, "accepted are integers"),
        ({"prompt": torch.zeros(2, 0, dtype=torch.int64)}, "at least one"),
        ({"prompt": [[99], [1]]}, "ids from 0 to 22"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 41}, "max_length=40"),
        ({"seed": [1, 2, 3]}, "seed is"),
        ({"stop": 23}, "stop="),
        ({"lengths": torch.tensor([1, 1])}, "lengths came with a list"),
        ({"prompt": torch.ones(2, 3, dtype=torch.int64), "lengths": torch.tensor([0, 1])}, "lengths has a 0"),
        ({"sampling": Sampling(exclude=(23,))}, "exclude="),
    ],
)
def test_wrong_arguments_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong(make(positions="learned"), **changes)
    with pytest.raises(ValueError, match="state has batch 1"):
        wrong(make(), state=make().init_state(1))
