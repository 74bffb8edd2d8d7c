from typing import Any

import pytest
import torch

from subquad.models import Seq2Seq

START = 1


def make(**fields: Any) -> Seq2Seq:
    return Seq2Seq(**{"vocab": 12, "dim": 16, "heads": 4, "depth": 2, "cross": "additive", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"mechanism": "softmax", "cross": "additive"},
        {"mechanism": "linear", "cross": "linear, softmax", "pool": (1, 2), "reversible": False},
        {"decoder_mechanism": "linear", "cross": "softmax", "positions": "rotary", "share": True, "tie": True},
        {"encoder_mechanism": "fnet", "mechanism": "linear", "reversible": True, "decoder_depth": 1},
        {"encoder_mechanism": "linformer", "cross": "linformer", "encoder_max_length": 9, "decoder_max_length": 7},
    ],
    ids=str,
)
def test_decoding_from_a_fixed_memory_is_teacher_forcing(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = make(**fields).double().eval()
    source, target = torch.randint(12, (3, 9)), torch.randint(12, (3, 7))
    source_lengths, prompts = torch.tensor([9, 4, 1]), torch.tensor([3, 1, 0])
    with torch.no_grad():
        whole = model(source, target, source_lengths)
        assert whole.shape == (3, 7, 12)
        memory, memory_lengths = model.encode(source, source_lengths)
        state = model.init_state(memory, memory_lengths, capacity=7)
        logits, state = model.prefill(target[:, :3], state, prompts)
        for b, n in enumerate(prompts.tolist()):
            torch.testing.assert_close(logits[b, :n], whole[b, :n])
        rows = torch.arange(3)
        for _ in range(4):
            at = state.decoder.position
            logits, state = model.step(target[rows, at], state)
            torch.testing.assert_close(logits, whole[rows, at])
        logits, _ = model.step(target[:, 0], model.init_state(model.encode(source)[0]))  # unpadded sources
        torch.testing.assert_close(logits, model(source, target)[:, 0])
        alone = model(source[1:2, :4], target[1:2, :5])
        padded = model(source, target, source_lengths, torch.tensor([7, 5, 2]))
        torch.testing.assert_close(padded[1:2, :5], alone)


def reversal(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Sources of ragged length, and targets that are a start token and the source backwards."""
    lengths = torch.randint(2, 6, (batch,), generator=generator)
    source = torch.randint(2, 12, (batch, 5), generator=generator)
    target = torch.zeros(batch, 6, dtype=torch.int64)
    target[:, 0] = START
    for row, (words, n) in enumerate(zip(source, lengths.tolist(), strict=True)):
        target[row, 1 : n + 1] = words[:n].flip(0)
    return source, target, lengths, lengths + 1


@pytest.mark.parametrize("cross", ["additive", "linear"])
def test_it_learns_to_reverse(cross: str) -> None:
    torch.manual_seed(0)
    model = make(dim=32, depth=1, mechanism="linear", cross=cross, positions="learned", max_length=8, tie=True)
    batch = reversal(24, torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model.loss(*batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    source, target, source_lengths, _ = batch
    written, token = [], target[:, 0]
    with torch.no_grad():
        state = model.eval().init_state(*model.encode(source, source_lengths))
        for _ in range(5):
            logits, state = model.step(token, state)
            token = logits.argmax(-1)
            written.append(token)
    right = torch.stack(written, 1) == target[:, 1:]
    there = torch.arange(5) < source_lengths[:, None]
    assert right[there].double().mean() > 0.95


def test_gradients_reach_the_encoder_and_padding_of_the_source_stays_out() -> None:
    model = make(mechanism="linear").double()
    source, target, lengths, target_lengths = reversal(4, torch.Generator().manual_seed(1))
    loss = model.loss(source, target, lengths, target_lengths)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(
        p.grad.abs().sum() > 0 for n, p in model.encoder.named_parameters() if "weight" in n and p.grad is not None
    )
    garbage, tail = source.clone(), target.clone()
    for b, n in enumerate(lengths.tolist()):
        garbage[b, n:], tail[b, n + 1 :] = 77, -5
    torch.testing.assert_close(model.loss(garbage, tail, lengths, target_lengths), loss)


def test_an_empty_source_is_no_memory() -> None:
    model = make().eval()
    logits = model(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([3, 0]))
    assert logits.isfinite().all()


def test_sides_have_their_own_keywords() -> None:
    model = Seq2Seq(source_features=5, target_vocab=9, dim=16, heads=4, depth=3, decoder_depth=1, pool=2)
    assert (model.config.encoder.depth, model.config.decoder.depth) == (3, 1)
    assert (model.config.encoder.pool, model.config.decoder.pool) == ((2,), (1,))
    assert model(torch.randn(2, 8, 5), torch.randint(9, (2, 4))).shape == (2, 4, 9)
    assert model.encode(torch.randn(2, 8, 5))[0].shape == (2, 1, 16)


def test_sharing() -> None:
    model = make(share=True, tie=True)
    assert model.target.weight is model.source.weight
    assert model.head is None
    assert sum(p.shape == (12, 16) for p in model.parameters()) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_dim": 32}, "decoder.dim=32 cannot work"),
        ({"cross": None}, "decoder.cross=None cannot work"),
        ({"cross": "local"}, "Local has no cross-attention"),
        ({"cross": "nystrom"}, "cross='nystrom' cannot work with causal=True: the output of a query depends"),
        ({"cross": ("mixed", {"parts": (("softmax", 2), ("clustered", 2))})}, "cross='mixed' cannot work"),
        ({"encoder_cross": "softmax"}, "encoder.cross=.* cannot work"),
        ({"decoder_causal": False}, "decoder.causal=False cannot work"),
        ({"share": True, "target_vocab": 13}, "share=True cannot work"),
        ({"tie": True, "target_positions": "sinusoidal_concat"}, "tie=True cannot work"),
        ({"decoder_mechanism": "fnet"}, "has no causal form"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_bad_input() -> None:
    model = make()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="source ranges from 12 to 12"):
        model(ids + 12, ids)
    with pytest.raises(ValueError, match="target ranges from -1 to -1"):
        model(ids, ids - 1)
    with pytest.raises(ValueError, match="target has batch 4: source has batch 2"):
        model(ids, torch.zeros(4, 3, dtype=torch.int64))
    state = model.init_state(*model.encode(ids))
    with pytest.raises(ValueError, match="state has batch 2: the input has batch 4"):
        model.step(torch.zeros(4, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="state=<State> cannot work"):
        model.step(ids[:, 0], state.decoder)
    with pytest.raises(TypeError, match="no field 'causal'"):
        make(causal=True)
