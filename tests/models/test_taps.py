"""The convolution before each mixer equals torch's, both for whole sequences and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.models import LanguageModel, Seq2Seq, Transformer, reversible
from subquad.models.sampling import Sampling
from subquad.models.state import load_state, save_state
from subquad.models.taps import Recent, Taps
from subquad.training.config import TrainingConfig
from subquad.training.optimisers import Optimiser

TAPS = (1, 3, 7)
SMALL: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 3, "heads": 2, "taps": TAPS}


def model(mechanism: Any = "linear", **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**{**SMALL, "mechanism": mechanism, **fields}).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


def convolved(taps: Taps, x: Tensor) -> Tensor:
    """torch's convolution with one kernel per channel, which is zero between the taps."""
    reach, dim = taps.reach, x.shape[-1]
    kernel = torch.zeros(dim, 1, reach + 1, dtype=x.dtype)
    for back, weight in zip((0, *taps.taps), taps.weight, strict=True):
        kernel[:, 0, reach - back] = weight
    padded = nn.functional.pad(x.transpose(1, 2), (reach, 0))
    return nn.functional.conv1d(padded, kernel, groups=dim).transpose(1, 2)


@pytest.mark.parametrize("size", [1, 5, 7, 8, 30])
def test_values_and_gradients_are_those_of_a_convolution(size: int) -> None:
    torch.manual_seed(0)
    taps, x = Taps(4, TAPS).double(), torch.randn(2, size, 4, dtype=torch.float64, requires_grad=True)
    inputs = (x, taps.weight)
    ours, theirs = taps(x), convolved(taps, x)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_ring_of_the_last_tokens_is_enough(inplace: bool) -> None:
    torch.manual_seed(0)
    taps, x = Taps(4, TAPS).double(), torch.randn(2, 20, 4, dtype=torch.float64)
    whole, state = taps(x), taps.init_state(2)
    first, before = state, state.ring.clone()
    for t in range(20):
        y, state = taps.step(x[:, t], state, inplace)
        torch.testing.assert_close(y, whole[:, t])
    assert (state.ring.data_ptr() == first.ring.data_ptr()) is inplace
    assert inplace or torch.equal(first.ring, before)


def test_a_ragged_prompt_in_pieces_leaves_the_state_of_single_steps() -> None:
    torch.manual_seed(0)
    taps, x = Taps(4, TAPS).double(), torch.randn(3, 20, 4, dtype=torch.float64)
    lengths, more = torch.tensor([9, 1, 4]), torch.tensor([2, 11, 0])
    _, state = taps.prefill(x[:, :9], lengths, None)
    rest = torch.stack([x[row, n : n + 11] for row, n in enumerate(lengths)])
    y, state = taps.prefill(rest, more, state)
    whole = taps(x)
    for row, (n, m) in enumerate(zip(lengths.tolist(), more.tolist(), strict=True)):
        torch.testing.assert_close(y[row, :m], whole[row, n : n + m])
        alone: Recent = taps.init_state(1)
        for t in range(n + m):
            _, alone = taps.step(x[row : row + 1, t], alone)
        torch.testing.assert_close(state.ring[row], alone.ring[0])
        assert state.position[row] == n + m


@pytest.mark.parametrize("mechanism", ["linear", "softmax", ["linear", "local"]])
@pytest.mark.parametrize("fields", [{}, {"reversible": True}, {"norm_position": "post"}], ids=str)
def test_a_model_with_taps_steps_as_it_reads(mechanism: Any, fields: dict[str, Any]) -> None:
    lm, text = model(mechanism, **fields), tokens(2, 24)
    whole = lm(text)
    y, state = lm.prefill(text[:, :10])
    torch.testing.assert_close(y, whole[:, :10])
    for t in range(10, 24):
        y, state = lm.step(text[:, t], state)
        torch.testing.assert_close(y, whole[:, t])


def test_taps_see_no_later_token_and_the_row_above() -> None:
    lm, text = model(taps=(8,), depth=1, mechanism=("local", {"window": 1})), tokens(1, 24)
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    apart = (lm(text) - lm(changed)).abs().amax(-1)[0] > 1e-12
    assert apart.nonzero().flatten().tolist() == [10, 11, 18, 19]  # itself, a row down, and by the window the next


@pytest.mark.parametrize("fields", [{"checkpoint": True}, {"reversible": True, "ff_chunks": 2}], ids=str)
def test_gradients_reach_the_taps_however_activations_are_kept(fields: dict[str, Any]) -> None:
    plain = {**fields, "checkpoint": False, "ff_chunks": 1}
    found = []
    for given in (fields, plain):
        lm = model(**given)
        lm.loss(tokens(2, 12)).backward()
        found.append([p.grad for p in lm.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other)


def test_generation_from_states_is_that_of_the_whole_prefix() -> None:
    lm = model(depth=2).float()
    made = torch.cat((tokens(2, 5), lm.generate(tokens(2, 5), 20, sampling=Sampling(temperature=0))), dim=1)
    for t in range(5, 25):
        assert torch.equal(lm(made[:, :t])[:, -1].argmax(-1), made[:, t])


def test_a_saved_model_has_its_taps(tmp_path: Any) -> None:
    lm = model()
    lm.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert again.config.transformer.taps == TAPS
    torch.testing.assert_close(again(tokens(1, 9)), lm(tokens(1, 9)))


def test_an_optimiser_does_not_treat_taps_as_matrices() -> None:
    lm = model()
    optimiser = Optimiser(TrainingConfig(optimiser="muon", weight_decay=0.1), lm)
    weights = {id(block.taps.weight) for block in lm.transformer.blocks}
    for part in optimiser.parts:
        for group in part.param_groups:
            if weights & {id(p) for p in group["params"]}:
                assert group["weight_decay"] == 0
                assert not isinstance(part, torch.optim.Muon)


def test_nor_is_the_convolution_inside_a_mechanism() -> None:
    lm = model("gated_deltanet", taps=())
    optimiser = Optimiser(TrainingConfig(optimiser="muon", weight_decay=0.1), lm)
    weights = {id(block.mixer.conv.weight) for block in lm.transformer.blocks}
    matrices = {id(block.mixer.into.weight) for block in lm.transformer.blocks}
    for part in optimiser.parts:
        held = {id(p) for group in part.param_groups for p in group["params"]}
        assert not (weights & held) or not isinstance(part, torch.optim.Muon)
        assert not (matrices & held) or isinstance(part, torch.optim.Muon)
        for group in part.param_groups:
            assert not weights & {id(p) for p in group["params"]} or group["weight_decay"] == 0


@pytest.mark.parametrize("taps", [(0,), (1, 1), (-1,), (True,), (1.5,), ("2",), 3, None, "12", [[1]]])
def test_taps_must_look_back(taps: Any) -> None:
    with pytest.raises(ValueError, match="taps"):
        model(taps=taps)


@pytest.mark.parametrize("mechanism", ["linear", "fnet", "nystrom"])
@pytest.mark.parametrize("fields", [{}, {"pool": 2}, {"reversible": True}], ids=str)
def test_an_encoder_taps_both_sides_and_no_padding(mechanism: Any, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {"dim": 8, "depth": 2, "heads": 2, "taps": (1, 3), "mechanism": mechanism, **fields}
    encoder = Transformer(**how).double().eval()
    assert [tuple(block.taps.weight.shape) for block in encoder.blocks] == [(5, 8)] * 2
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    lengths = torch.tensor([12, 7, 1])
    y, short = encoder(x, lengths), encoder.short_lengths(lengths)
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(y[row, : short[row]], encoder(x[row : row + 1, :n])[0])


def test_an_encoder_without_other_mixing_sees_its_taps() -> None:
    torch.manual_seed(0)
    encoder = Transformer(dim=8, depth=1, heads=2, taps=(2,), mechanism=("local", {"window": 0})).double().eval()
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    changed = x.clone()
    changed[0, 5, 0] += 1
    apart = (encoder(x) - encoder(changed)).abs().amax(-1)[0] > 1e-12
    assert apart.nonzero().flatten().tolist() == [3, 5, 7]


def test_saved_taps_of_causal_models_load_as_before() -> None:
    """One row for the token and one for each tap, called weight: what checkpoints hold."""
    taps = Taps(4, TAPS)
    assert {name: tuple(t.shape) for name, t in taps.state_dict().items()} == {"weight": (4, 4)}


def test_the_decoder_of_two_stacks_has_taps() -> None:
    torch.manual_seed(0)
    pair = Seq2Seq(**SMALL, mechanism="linear").double().eval()
    source, target = tokens(2, 6), tokens(2, 12)
    whole, state = pair(source, target), pair.init_state(*pair.encode(source))
    for t in range(12):
        y, state = pair.step(target[:, t], state)
        torch.testing.assert_close(y, whole[:, t])


def test_a_state_only_fits_the_taps_it_came_from(tmp_path: Path) -> None:
    near, far, none = (model(taps=taps) for taps in ((1, 3), (1, 7), ()))
    text = tokens(2, 9)
    for other in (far, none):
        _, state = other.prefill(text)
        with pytest.raises(ValueError, match="state"):
            near.step(text[:, 0], state)
        with pytest.raises(ValueError, match="state"):
            near.prefill(text, state=state)
    _, state = near.prefill(text)
    with pytest.raises(ValueError, match="state"):
        far.generate(text, 3, state=state)
    save_state(state, tmp_path / "s.safetensors")
    again = load_state(tmp_path / "s.safetensors", near.init_state(1))
    torch.testing.assert_close(near.step(text[:, 0], again)[0], near.step(text[:, 0], state)[0])


def test_eval_reads_no_random_state_in_reversible_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reversible, "_rng_states", lambda _: pytest.fail("dice"))
    model(reversible=True).loss(tokens(2, 9)).backward()
