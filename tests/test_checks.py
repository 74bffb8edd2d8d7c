"""Errors name the argument, its value and what is accepted, and are raised before any work is done."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import subquad
from subquad import LanguageModel, Sampling, Seq2Seq, Streams, Transformer, build, ops
from subquad.checks import MASKS, check_plain, checked, shown
from subquad.mechanisms import MECHANISMS
from subquad.models import LSTM, Classifier, Matcher
from subquad.ops import LinearState

# wrong types are passed on purpose, so the type checker must ignore these
Local: Any = ops.Local
linear_attention: Any = ops.linear_attention
linear_attention_step: Any = ops.linear_attention_step
sparse_attention: Any = ops.sparse_attention
similarity_attention: Any = ops.similarity_attention
Q = torch.randn(2, 6, 2, 4)
T = torch.randn(2, 2, 4)
X = torch.randn(2, 6, 8)
META = Q.to("meta")
STATE = LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4))
IDS = torch.randint(0, 11, (2, 6))
SMALL: dict[str, Any] = {"dim": 8, "depth": 1, "heads": 2, "mechanism": "linear"}


def model() -> LanguageModel:
    return LanguageModel(**SMALL, vocab=11).eval()


def generate(**changes: Any) -> Any:
    return model().generate(**{"prompt": [[1], [2]], "steps": 3, **changes})


WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("k=ndarray", lambda: linear_attention(Q, Q.numpy(), Q)),
    ("v=None", lambda: linear_attention(Q, Q, None)),
    (r"lengths=\[3\]", lambda: linear_attention(Q, Q, Q, lengths=[3])),
    (r"causal=\(1, 2\)", lambda: linear_attention(Q, Q, Q, causal=(1, 2))),
    ("normalize=''", lambda: linear_attention(Q, Q, Q, normalize="")),
    ("eps=inf", lambda: linear_attention(Q, Q, Q, eps=float("inf"))),
    ("initial_state.s=3", lambda: linear_attention(Q, Q, Q, initial_state=LinearState(3, None))),
    ("feature_map gave None", lambda: linear_attention(Q, Q, Q, feature_map=lambda _: None)),
    ("k_t={}", lambda: linear_attention_step(T, {}, T, STATE)),
    ("log_gate is Tensor\\(torch.float32, .*, meta\\)", lambda: linear_attention_step(
        T, T, T, STATE, log_gate=torch.zeros(2, 2, device="meta"))),
    ("q=None", lambda: sparse_attention(None, Q, Q, Local(3))),
    ("lengths=3", lambda: sparse_attention(Q, Q, Q, Local(3), lengths=3)),
    ("lengths ranges from 1 to 7", lambda: sparse_attention(Q, Q, Q, Local(3), lengths=torch.tensor([7, 1]))),
    (r"return_lse=\(1, 2\)", lambda: sparse_attention(Q, Q, Q, Local(3), return_lse=(1, 2))),
    ("pattern=", lambda: sparse_attention(Q, Q, Q, [3])),
    ("q has shape", lambda: sparse_attention(Q[..., :0], Q[..., :0], Q[..., :0], Local(3))),
    ("v is torch.float32 on meta", lambda: sparse_attention(Q, Q, META, Local(3))),
    ("k is torch.float32 on meta", lambda: sparse_attention(Q, META, Q, Local(3))),
    ("lengths is on meta", lambda: sparse_attention(Q, Q, Q, Local(3), lengths=torch.zeros(2, device="meta").long())),
    ("v is torch.float32 on meta", lambda: linear_attention(Q, Q, META)),
    ("v is torch.float32 on meta", lambda: similarity_attention(Q, Q, META, lambda *_: Q)),
    ("sim gave None", lambda: similarity_attention(Q, Q, Q, lambda *_: None)),
    ("state.k is", lambda: ops.SparseCache(Local(3)).attend(
        Q, Q, Q, ops.SparseCache(Local(3)).empty(2, 2, 4, 9, like=META))),
    ("j=Tensor", lambda: Local(3).mask(torch.arange(3), torch.arange(3, device="meta"))),
    ("T=inf", lambda: Local(3).dense(float("inf"))),
    ("device='cuda:99'", lambda: Local(3).dense(3, device="cuda:99")),
    ("before=Tensor", lambda: Local(torch.ones(2))),
    ("buckets=Tensor", lambda: build("reformer", dim=8, heads=2, buckets=torch.randn(2))),
    ("x is on meta", lambda: build("softmax", dim=8, heads=2)(X.to("meta"))),
    ("x has layout", lambda: build("softmax", dim=8, heads=2)(X.to_sparse())),
    ("lengths is on meta", lambda: build("softmax", dim=8, heads=2)(X, torch.zeros(2, device="meta").long())),
    ("mix=3", lambda: subquad.approximation_error(3, X)),
    ("directory=3", lambda: subquad.load(3)),
    ("device='x'", lambda: subquad.load("nowhere", device="x")),
    ("embedding='learned'", lambda: LanguageModel(**SMALL, vocab=11, embedding="learned")),
    ("embedding='learned'", lambda: LanguageModel(embedding="learned")),
    ("prompt='RO' .* a tensor or a list of integers or a list of lists of integers or", lambda: generate(prompt="RO")),
    ("norm_eps='x'", lambda: Transformer(**SMALL, norm_eps="x")),
    ("mechanism={}", lambda: Transformer(**{**SMALL, "mechanism": {}})),
    ("targets is on meta", lambda: model().loss(IDS, targets=IDS.to("meta"))),
    ("target_lengths=3", lambda: Seq2Seq(**SMALL, vocab=11)(IDS, IDS, target_lengths=3)),
    ("b_lengths has shape", lambda: Matcher(**SMALL, vocab=11)(IDS, IDS, b_lengths=torch.tensor([1]))),
    ("prompt='RO'", lambda: model().generate("RO", 3)),
    ("prompt=ndarray", lambda: generate(prompt=np.array([[1, 2]]))),
    ("prompt is on meta", lambda: generate(prompt=IDS.to("meta"))),
    ("steps=inf", lambda: generate(steps=float("inf"))),
    ("lanes=inf", lambda: generate(lanes=float("inf"))),
    ("lanes=0", lambda: generate(lanes=0)),
    (r"sampling=\[\]", lambda: generate(sampling=[])),
    ("sampling={'top_k': 3}", lambda: generate(sampling={"top_k": 3})),
    ("state holds 3", lambda: generate(state=3)),
    ("state is a State of", lambda: generate(state=LSTM(vocab=11, dim=8).init_state(2))),
    ("state is on meta", lambda: generate(state=Transformer(**SMALL, causal=True).to("meta").init_state(2))),
    ("sampling and top_k came together", lambda: generate(sampling=Sampling(), top_k=3)),
    ("top_p=2.0", lambda: generate(top_p=2.0)),
    ("model is a str", lambda: Streams("x", slots=1, capacity=1)),
    ("stop=", lambda: Streams(model(), slots=1, capacity=3, stop=[11])),
    (r"stop=\[\[1\]\]", lambda: Streams(model(), slots=1, capacity=3, stop=cast(Any, [[1]]))),
    ("top_k='x'", lambda: Streams(model(), slots=1, capacity=3, top_k="x")),
    ("sampling and temperature", lambda: Streams(model(), slots=1, capacity=3, sampling=Sampling(), temperature=0.5)),
    ("prompts ranges from 0 to 99", lambda: Streams(model(), slots=1, capacity=3).admit([0, 99])),
    ("state holds 3", lambda: subquad.models.fork(3, 3)),
    ("like holds 3", lambda: subquad.models.load_state("nowhere", 3)),
    ("path='nowhere/x'", lambda: subquad.models.save_state(STATE, "nowhere/x")),
]  # fmt: skip


@pytest.mark.parametrize(("says", "call"), WRONG, ids=[f"{number}-{says}" for number, (says, _) in enumerate(WRONG)])
def test_wrong_arguments_are_named(says: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=says):
        call()


MASKED: list[Callable[..., Any]] = [
    lambda **mask: build("linear", dim=8, heads=2)(X, **mask),
    lambda **mask: build("linear", dim=8, heads=2).reference(X, **mask),
    lambda **mask: build("linear", dim=8, heads=2, causal=True).prefill(X, **mask),
    lambda **mask: build("linear", dim=8, **mask),
    lambda **mask: model()(IDS, **mask),
    lambda **mask: model().loss(IDS, **mask),
    lambda **mask: model().generate([1], 2, **mask),
    lambda **mask: Classifier(**SMALL, vocab=11, classes=2)(IDS, **mask),
    lambda **mask: Transformer(**SMALL)(X, **mask),
    lambda **mask: LanguageModel(**SMALL, vocab=11, **mask),
    lambda **mask: linear_attention(Q, Q, Q, **mask),
    lambda **mask: sparse_attention(Q, Q, Q, Local(2), **mask),
    lambda **mask: similarity_attention(Q, Q, Q, lambda *_: Q, **mask),
]


@pytest.mark.parametrize("call", MASKED)
def test_a_mask_is_answered_with_lengths_and_patterns(call: Callable[..., Any]) -> None:
    for name in ("mask", "attn_mask", "attention_mask", "key_padding_mask"):
        assert name in MASKS
        with pytest.raises(TypeError, match=f"{name}.*lengths.*pattern"):
            call(**{name: torch.ones(2, 6)})


def test_other_keywords_are_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Mixer\.forward has no argument 'length'; did you mean 'lengths'\?"):
        build("linear", dim=8)(X, length=torch.tensor([1, 2]))


def test_missing_fields_of_a_model_are_named() -> None:
    with pytest.raises(TypeError, match="LanguageModelConfig needs dim"):
        LanguageModel(vocab=11)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_on_meta_gives_shapes_and_meets_no_other_device(name: str) -> None:
    cls = MECHANISMS[name]
    fixed = {"max_length": 8} if cls.traits.fixed_length else {}
    mix = build(name, dim=8, heads=2, causal=not cls.traits.bidirectional, **fixed).eval()
    with pytest.raises(ValueError, match="x is on meta: this module is on cpu"):
        mix(X.to("meta"))
    mix.to("meta")
    assert mix(X.to("meta")).shape == X.shape
    with pytest.raises(ValueError, match="x is on cpu: this module is on meta"):
        mix(X)


@pytest.mark.parametrize(
    ("hint", "fits", "not_fits"),
    [
        (int, [0, -3], [True, 1.0, "1", None, 2**63, np.int64(3)]),
        (float, [0, 0.5], [True, float("nan"), float("-inf"), "1", 10**400]),
        (bool | None, [True, None], [0, "", np.bool_(True)]),
        (Literal["a", "b"], ["a"], ["c", 1, None, ["a"], torch.ones(2)]),
        (Sequence[int], [[1], (), range(3)], ["12", b"12", [1.5], [True], torch.ones(2), np.ones(2), {1: 2}, None]),
        (int | tuple[int, ...], [1, (1, 2), [1]], [(1, "a"), 1.5]),
        (Callable[[Tensor], Tensor] | None, [None, print], [3]),
        (Tensor, [torch.ones(2), torch.nn.Parameter(torch.ones(2))], [np.ones(2), [1.0]]),
        (Any, [None, 3], []),
    ],
)
def test_values_are_compared_with_hints(hint: Any, fits: list[Any], not_fits: list[Any]) -> None:
    for value in fits:
        check_plain("argument", value, hint)
    for value in not_fits:
        with pytest.raises(ValueError, match=r"argument=.* cannot work: accepted is "):
            check_plain("argument", value, hint)


def test_lists_are_named_in_words() -> None:
    hint = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[int | str]
    words = "a tensor or a list of integers or a list of lists of integers or a list of items that are each an integer"
    with pytest.raises(ValueError, match=f"argument='RO' cannot work: accepted is {words} or a name$"):
        check_plain("argument", "RO", hint)


def test_an_error_never_prints_a_large_value() -> None:
    for value in (torch.randn(300, 300), np.ones((300, 300)), [0] * 10**6, "x" * 10**6, {n: n for n in range(1000)}):
        assert len(shown(value)) < 100


def test_checks_leave_signature_compilation_and_export_alone() -> None:
    @checked
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    assert torch.equal(torch.compile(scale, fullgraph=True, backend="eager")(X, by=3.0), X * 3)
    torch._dynamo.reset()

    class Scale(torch.nn.Module):
        forward = checked(lambda self, x: x * 2)  # noqa: ARG005

    program = torch.export.export(Scale(), (X,))
    assert torch.equal(program.module()(X), X * 2)
    mix, seen = build("linear", dim=8, heads=2), []
    mix.register_forward_hook(lambda _, inputs, output: seen.append((inputs, output)))
    y = mix(X)
    assert seen[0][0][0] is X
    assert seen[0][1] is y


def test_settings_of_sampling_are_keywords_too() -> None:
    torch.manual_seed(0)
    lm, how = model(), {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = lm.generate([1, 2], 8, sampling=Sampling(**how))
    assert torch.equal(lm.generate([1, 2], 8, **how), expected)
    assert list(lm.stream([1, 2], 8, **how)) == expected.tolist()
    streams = Streams(lm, slots=1, capacity=12, **how)
    streams.admit([1, 2])
    assert [streams.step()[0] for _ in range(8)] == expected.tolist()


def test_continuing_needs_the_last_token_again() -> None:
    torch.manual_seed(0)
    lm, greedy = model(), {"temperature": 0.0}
    whole = lm.generate([[1, 2]], 9, **greedy)
    first = lm.generate([[1, 2]], 4, full=True, **greedy)
    more = lm.generate(first.tokens[:, -1:], 5, state=first.state, **greedy)
    assert torch.equal(torch.cat((first.tokens, more), 1), whole)
    streams = Streams(lm, slots=2, capacity=16, **greedy)
    (one,) = streams.admit([1, 2])
    for _ in range(4):
        last = streams.step()[one]
    (two,) = streams.admit([[last]], state=streams.state(one))
    assert [streams.step()[two] for _ in range(5)] == whole[0, 4:].tolist()


def test_a_stream_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="state holds 3"):
        model().stream([1], 3, state=3)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"Linear needs more memory than there is .*dim=1000000000\)", lambda: build("linear", dim=10**9)),
        (r"LanguageModel needs more memory .*vocab=10", lambda: LanguageModel(vocab=10**15, dim=8, depth=1)),
        (r"init_state needs more memory .*batch=1", lambda: build("linear", dim=8, causal=True).init_state(10**15)),
        (r"needs more memory .*capacity=1000", lambda: LanguageModel(vocab=9, dim=8, depth=1).generate([1], 10**18)),
    ],
    ids=range(4),
)
def test_sizes_that_fit_no_memory_are_named(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(MemoryError, match=message):
        call()
