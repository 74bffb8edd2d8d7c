from pathlib import Path

import pytest
import torch

from subquad.models import LSTM, load
from subquad.models.state import select


def model(**changes: object) -> LSTM:
    torch.manual_seed(0)
    return LSTM(**{"vocab": 7, "dim": 12, "depth": 2, **changes}).eval()


def test_steps_and_prefills_in_any_split_equal_forward() -> None:
    lstm, tokens = model(), torch.randint(7, (3, 9))
    wanted = lstm(tokens)
    first, state = lstm.prefill(tokens[:, :4])
    outputs = [first]
    for i in range(4, 9):
        before = state.hidden.clone()
        y, new = lstm.step(tokens[:, i], state)
        assert torch.equal(before, state.hidden)  # the old state is unchanged
        outputs.append(y[:, None])
        state = new
    torch.testing.assert_close(torch.cat(outputs, 1), wanted)
    assert state.position.tolist() == [9, 9, 9]


def test_ragged_prompts_end_where_each_row_ends() -> None:
    lstm, tokens, lengths = model(), torch.randint(7, (3, 6)), torch.tensor([6, 0, 3])
    start = lstm.prefill(tokens[:, :2])[1]
    _, state = lstm.prefill(tokens, lengths, start)
    for row, n in enumerate(lengths.tolist()):
        alone = select(start, slice(row, row + 1))
        if n:
            _, alone = lstm.prefill(tokens[row : row + 1, :n], state=alone)
        torch.testing.assert_close(state.cell[row], alone.cell[0])
        assert state.position[row] == alone.position[0]


def test_one_direction_sees_no_future_and_both_directions_see_no_padding() -> None:
    causal, tokens = model(), torch.randint(7, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 7
    torch.testing.assert_close(causal(tokens)[:, :5], causal(changed)[:, :5])
    both = LSTM(features=3, dim=8, depth=2, bidirectional=True, outputs=5).eval()
    x, lengths = torch.randn(2, 8, 3), torch.tensor([5, 8])
    out = both(x, lengths)
    torch.testing.assert_close(out[0, :5], both(x[:1, :5])[0])
    assert not torch.allclose(both(x)[0, 0], both(x.flip(1))[0, 0])


def test_it_generates_what_forward_predicts_and_saves(tmp_path: Path) -> None:
    lstm = model(dropout=0.3)
    with torch.no_grad():
        made = lstm.generate(torch.tensor([[1, 2]]), 6, seed=3)
        assert made.shape == (1, 6)
        lstm.save(tmp_path)
        again = load(tmp_path)
        assert isinstance(again, LSTM)
        assert torch.equal(again.generate(torch.tensor([[1, 2]]), 6, seed=3), made)
        assert float(lstm.loss(torch.cat((torch.tensor([[1, 2]]), made), 1))) > 0


def test_what_cannot_work_raises() -> None:
    with pytest.raises(TypeError, match="heads"):
        LSTM(vocab=7, heads=2)
    with pytest.raises(ValueError, match="outputs"):
        LSTM(features=7)
    with pytest.raises(ValueError, match="convolutions=1 cannot work"):
        LSTM(features=3, outputs=5, convolutions=1)
    both = LSTM(features=3, dim=8, bidirectional=True, outputs=5)
    with pytest.raises(NotImplementedError, match="both directions"):
        both.init_state(1)
    with pytest.raises(ValueError, match="state"):
        model().prefill(torch.zeros(2, 3, dtype=torch.int64), state=model().init_state(1))
