import copy
import math
from typing import Any

import pytest
import torch

from subquad.models import LanguageModel


def make(**fields: Any) -> LanguageModel:
    return LanguageModel(**{"vocab": 11, "dim": 16, "heads": 4, "depth": 2, "mechanism": "linear", **fields})


KINDS: list[dict[str, Any]] = [
    {"positions": "sinusoidal"},
    {"positions": "sinusoidal_concat", "norm_position": "post", "activation": "relu"},
    {"positions": "learned", "max_length": 12, "mechanism": "softmax, linear"},
    {"positions": "grid", "shape": (2, 3, 2), "tie": True},
    {"positions": "rotary", "mechanism": "softmax"},
    {"positions": "none", "mechanism": ["additive", ("local", {"window": 2})]},
]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: fields["positions"])
def test_ragged_prompts_and_steps_are_forward(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = make(**fields).double().eval()
    tokens, prompts = torch.randint(11, (3, 12)), torch.tensor([7, 2, 0])
    with torch.no_grad():
        whole = model(tokens)
        assert whole.shape == (3, 12, 11)
        logits, state = model.prefill(tokens[:, :7], prompts)
        for b, n in enumerate(prompts.tolist()):
            torch.testing.assert_close(logits[b, :n], whole[b, :n])
        rows = torch.arange(3)
        for _ in range(5):
            at = state.position
            logits, state = model.step(tokens[rows, at], state)
            torch.testing.assert_close(logits, whole[rows, at])
        assert state.position.tolist() == [12, 7, 5]
        # a prompt in two pieces; the second continues at a different position in each row
        piece = torch.stack([tokens[0, 9:11], tokens[1, 4:6], tokens[2, 2:4]])
        _, state = model.prefill(tokens[:, :9], torch.tensor([9, 4, 2]))
        logits, _ = model.prefill(piece, state=state)
        torch.testing.assert_close(logits[1], whole[1, 4:6])
        torch.testing.assert_close(logits[2], whole[2, 2:4])


def test_loss_is_that_of_the_next_token() -> None:
    model = make().double()
    tokens, lengths = torch.randint(11, (2, 6)), torch.tensor([6, 3])
    nats = -model(tokens).log_softmax(-1)
    rows = [nats[0, t, tokens[0, t + 1]] for t in range(5)] + [nats[1, t, tokens[1, t + 1]] for t in range(2)]
    torch.testing.assert_close(model.loss(tokens, lengths), torch.stack(rows).mean())
    targets = torch.roll(tokens, -1, 1)
    targets[:, -1] = -100
    targets[1, 2:] = -100
    torch.testing.assert_close(model.loss(tokens, targets=targets), torch.stack(rows).mean())
    garbage = tokens.clone()
    garbage[1, 3:] = -7  # padding may hold anything
    torch.testing.assert_close(model.loss(garbage, lengths), torch.stack(rows).mean())


def test_it_starts_near_uniform_and_learns() -> None:
    torch.manual_seed(0)
    model = make(dim=32, positions="learned", max_length=16)
    tokens = torch.randint(11, (4, 16))
    first = model.loss(tokens).item()
    assert first == pytest.approx(math.log(11), abs=0.15)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model.loss(tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1


def test_tied_weights_are_one_tensor() -> None:
    tied, loose = make(tie=True), make()
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in (("tied", tied), ("loose", loose))}
    assert count["loose"] - count["tied"] == 11 * 16 + 11
    tokens = torch.randint(11, (2, 5))
    y = tied.transformer(tied.embedding(tokens))
    torch.testing.assert_close(tied(tokens), y @ tied.embedding.weight.T)
    tied.loss(tokens).backward()
    assert (tied.embedding.weight.grad.abs().sum(-1) > 0).all()  # as outputs, all are used
    twin = copy.deepcopy(tied)
    assert torch.equal(twin(tokens), tied(tokens))


def test_outputs_of_another_kind() -> None:
    model = make(outputs=30)
    assert model(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 30)
    with pytest.raises(ValueError, match="outputs=30; use forward"):
        model.loss(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": False}, "causal=False cannot work"),
        ({"cross": "softmax"}, "cross=.* cannot work"),
        ({"vocab": None, "features": 3}, "vocab=None cannot work"),
        ({"tie": True, "positions": "sinusoidal_concat"}, "tie=True cannot work"),
        ({"tie": True, "outputs": 30}, "tie=True cannot work"),
        ({"mechanism": "fnet"}, "has no causal form"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_bad_steps() -> None:
    model = make(positions="learned", max_length=3)
    state = model.init_state(2)
    with pytest.raises(ValueError, match=r"step takes one token per row, \[batch\]"):
        model.step(torch.zeros(2, 1, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="state has batch 2: the input has batch 3"):
        model.step(torch.zeros(3, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="ranges from 11 to 11"):
        model.step(torch.full((2,), 11), state)
    with pytest.raises(ValueError, match=r"state=\(\) cannot work: accepted is a state of init_state or prefill"):
        model.step(torch.zeros(3, dtype=torch.int64), ())
    for _ in range(3):
        _, state = model.step(torch.zeros(2, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="tokens reaches T=4: this model was built with max_length=3"):
        model.step(torch.zeros(2, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="state has batch 2: the input has batch 3"):
        model.prefill(torch.zeros(3, 2, dtype=torch.int64), state=state)


def test_autocast_loss_is_float32() -> None:
    model = make()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(torch.randint(11, (2, 6)))
    assert loss.dtype == torch.float32
    loss.backward()


@pytest.mark.parametrize("checkpoint", [True, 2])
def test_checkpointed_is_plain(checkpoint: bool | int) -> None:
    """The embedding is computed again too, with the same dropout."""
    fields: dict[str, Any] = {"vocab": 11, "dim": 8, "depth": 3, "heads": 2, "dropout": 0.2, "embedding_dropout": 0.3}
    plain, saver = (LanguageModel(**fields, checkpoint=kept).double() for kept in (False, checkpoint))
    saver.load_state_dict(plain.state_dict())
    tokens, lengths = torch.randint(11, (2, 7)), torch.tensor([7, 4])
    results = []
    for model in (plain, saver):
        torch.manual_seed(3)
        loss = model.loss(tokens, lengths)
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    for wrong in ([1, 2], torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="tokens"):
            saver(wrong)


def test_compiles_as_one_graph() -> None:
    model = make(checkpoint=False, dropout=0.0)
    tokens, lengths = torch.randint(11, (2, 6)), torch.tensor([6, 3])
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(tokens, lengths)
    torch.testing.assert_close(loss, model.loss(tokens, lengths))
    loss.backward()
    state = model.init_state(2)
    with torch.no_grad():
        logits, _ = torch.compile(model.step, fullgraph=True, backend="eager")(tokens[:, 0], state)
        torch.testing.assert_close(logits, model(tokens)[:, 0])
