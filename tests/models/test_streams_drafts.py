"""`Streams.propose`: a draft changes neither the text nor the state."""

from typing import Any

import pytest
import torch

import subquad
from subquad import LanguageModel, Sampling, Streams

REST = [3, 1, 4, 1, 5, 9, 2, 6, 5]
GREEDY = Sampling(temperature=0)
STATEFUL = [
    (name, {key: value for key, value in options.items() if key not in ("parts", "layer")})
    for name, cls in subquad.MECHANISMS.items()
    if cls.traits.causal and cls.traits.state
    for options in cls.small
    if options.get("strict_causal", True)  # a form that looks ahead reads in parallel what it would not write
]


def make(mechanism: Any = "linear", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab": 20, "dim": 16, "depth": 2, "heads": 4, "mechanism": mechanism, "max_length": 40}
    model = LanguageModel(**{**fields, **changes})
    for p in model.parameters():
        p.data.mul_(1.5)
    return model.eval()


def wrong(token: int) -> int:
    return (token + 1) % 20


@pytest.mark.parametrize(("mechanism", "options"), [*STATEFUL, ("sinkhorn", {})])
def test_a_draft_leaves_the_state_as_it_would_have_been(mechanism: str, options: dict[str, Any]) -> None:
    """Constant, window and growing states, and the tokens of a model without one; also where rings wrap around."""
    model = make((mechanism, options)).double()
    prompt, steps = [1, 2, 3, 4, 5, 6, 7], 14
    text = model.generate(prompt, steps, sampling=GREEDY).tolist()
    streams = Streams(model, slots=3, capacity=40, sampling=GREEDY)
    plain = Streams(model, slots=3, capacity=40, sampling=GREEDY)
    (id,), (other,) = streams.admit([prompt]), plain.admit([prompt])
    (company,) = streams.admit([[9, 8]])
    made: list[int] = []
    for right, add in ((3, True), (0, True), (2, False), (1, True)):  # right tokens, then a wrong one or none
        draft = text[len(made) : len(made) + right]
        draft += [wrong(text[len(made) + right])] * add
        checked = streams.propose({id: draft})[id]
        assert checked.accepted == right
        assert checked.tokens == text[len(made) : len(made) + right + 1]  # and the token that follows
        made += checked.tokens
        for _ in checked.tokens:
            token = plain.step()[other]
        assert token == made[-1]
        # the states hold the same: what follows them is the same. Beyond their position anything may stand
        with torch.no_grad():
            rest = torch.tensor([[made[-1], *REST]])
            after, expected = (s.decoder.prefill(rest, state=s.state(i))[0] for s, i in ((streams, id), (plain, other)))
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-11)
    while len(made) < steps:
        made.append(streams.step()[id])
    assert made == text
    assert company in streams.running


@pytest.mark.parametrize("mechanism", ["linear", "softmax", ("linear", ("local", {"window": 3}))])
def test_drawn_tokens_can_be_drafted_too(mechanism: Any) -> None:
    """Noise is a hash of seed and position, so the same token is drawn in parallel as in steps."""
    model = make(mechanism)
    for sampling in (
        Sampling(),
        Sampling(temperature=0.7, top_k=6, top_p=0.9),
        Sampling(repetition_penalty=1.7, exclude=(3,)),
    ):
        text = model.generate([1, 2, 3], 15, seed=5, sampling=sampling).tolist()
        streams = Streams(model, slots=2, capacity=40)
        streams.admit([[7, 7, 7]], seed=1)
        (id,) = streams.admit([[1, 2, 3]], seed=5, sampling=sampling)
        made: list[int] = []
        while len(made) < 15:
            draft = [*text[len(made) : len(made) + 3], 0][: 15 - len(made) - 1]
            made += streams.propose({id: draft})[id].tokens if draft else [streams.step()[id]]
        assert made == text


def test_a_repetition_penalty_counts_the_prompt_and_the_draft() -> None:
    model = make()
    with torch.no_grad():  # all logits positive, so that a penalised one falls to nearly 0
        model.head.bias.fill_(50)
    sampling = Sampling(temperature=0, repetition_penalty=1e6)
    text = model.generate([1, 2, 3], 14, sampling=sampling).tolist()
    assert len({1, 2, 3, *text}) == 17
    streams = Streams(model, slots=2, capacity=40)
    (id,) = streams.admit([[1, 2, 3]], sampling=sampling)
    made = streams.propose({id: text[:6]})[id].tokens
    made += streams.propose({id: text[7:11]})[id].tokens
    made += [streams.step()[id] for _ in range(2)]
    assert made == text


def test_log_probabilities_of_drafted_tokens_are_the_models() -> None:
    model = make()
    whole = model.generate([1, 2], 6, full=True, logprobs=True, sampling=GREEDY)
    streams = Streams(model, slots=2, capacity=20, sampling=GREEDY, top=3)
    (id,) = streams.admit([[1, 2]], top=3)
    checked = streams.propose({id: whole.tokens[0, :5].tolist()})[id]
    assert checked.tokens == whole.tokens[0].tolist()
    torch.testing.assert_close(torch.tensor([checked.logprobs]), whole.logprobs, rtol=1e-4, atol=1e-5)
    assert [top[0][0] for top in checked.top] == checked.tokens
    assert [len(top) for top in checked.top] == [3] * 6


def test_a_draft_ends_at_a_stop_token_and_where_the_stream_is_full() -> None:
    model = make()
    text = model.generate([1, 2], 10, seed=4).tolist()
    stop = next(token for token in text if text.index(token) > 1)
    streams = Streams(model, slots=2, capacity=6)
    stopping, filling = streams.admit([[1, 2]], seed=4, stop=stop), streams.admit([[1, 2]], seed=4)
    checked = streams.propose({stopping[0]: text[:9], filling[0]: text[:9]})
    assert checked[stopping[0]].tokens == text[: text.index(stop) + 1][:5]
    assert checked[filling[0]].tokens == text[:5]
    assert streams.running == []
    assert streams.step() == {}


def test_a_token_whose_rival_is_as_good_is_left_to_a_step() -> None:
    """A parallel pass could round the other way."""
    model = make()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[5] = 1.0
        model.head.bias[7] = 1.0 + 1e-6
    streams = Streams(model, slots=2, capacity=20, sampling=GREEDY)
    (id,) = streams.admit([[1]])
    assert streams.propose({id: [7, 7]})[id] == ([], 0, [], [])
    assert streams.step() == {id: 7}


def test_what_cannot_work_raises() -> None:
    streams = Streams(make(), slots=2, capacity=20)
    (id,) = streams.admit([[1]])
    with pytest.raises(ValueError, match="id=7"):
        streams.propose({7: [1]})
    for draft in ([20], [-1], ["a"], [True]):
        with pytest.raises(ValueError, match="drafts="):
            streams.propose({id: draft})  # type: ignore[dict-item]
    assert len(streams.propose({id: []})[id].tokens) == 1
