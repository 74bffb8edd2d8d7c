import math

import pytest
import torch
from torch import Tensor

from subquad import build
from subquad.mechanisms.compressed import Compressed
from subquad.ops import dense
from tests.mechanisms.laws import Largest


def make(**options: object) -> Compressed:
    torch.manual_seed(0)
    mix = build("compressed", **{"dim": 16, "heads": 2, **options}).double().eval()
    assert isinstance(mix, Compressed)
    if mix.nothing is not None:
        torch.nn.init.normal_(mix.nothing)
    return mix


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def average(mix: Compressed) -> None:
    """Let a slot be the mean of its tokens."""
    with torch.no_grad():
        for conv in (mix.key, mix.value):
            conv.weight.copy_(torch.eye(8, dtype=torch.float64)[:, :, None].repeat(2, 1, 1) / mix.options.stride)
            assert conv.bias is not None
            conv.bias.zero_()


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_stride_one_with_identity_weights_is_full_attention(causal: bool, rotary: bool) -> None:
    mix = make(stride=1, causal=causal, rotary=rotary)
    average(mix)
    full = build("softmax", dim=16, heads=2, causal=causal, rotary=rotary).double()
    full.heads.load_state_dict(mix.heads.state_dict())
    x, lengths = tokens(3, 14, 16), torch.tensor([14, 5, 1])
    torch.testing.assert_close(mix(x, lengths=lengths), full(x, lengths=lengths), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix.pattern(x), full.pattern(x), rtol=1e-12, atol=1e-12)


def test_slots_of_equal_tokens_are_those_tokens() -> None:
    """With means for slots, repeating each token `stride` times leaves attention as it was."""
    mix = make(stride=3)
    average(mix)
    full = build("softmax", dim=16, heads=2).double()
    full.heads.load_state_dict(mix.heads.state_dict())
    x = tokens(2, 7, 16)
    got = mix(x.repeat_interleave(3, dim=1))[:, ::3]
    torch.testing.assert_close(got, full(x), rtol=1e-12, atol=1e-12)


def test_a_causal_query_reads_exactly_the_finished_slots() -> None:
    mix, x = make(stride=3, causal=True), tokens(1, 13, 16)
    y = mix(x)
    for token in range(13):
        changed = x.clone()
        changed[:, token] += 1
        differs = (mix(changed) - y).abs().amax(-1)[0] > 1e-9
        end = token // 3 * 3 + 2
        # it changes its own query if that reads two slots or more, and all other queries once its slot is finished
        want = [t == token >= 5 or t >= end for t in range(13)]
        assert differs.tolist() == want, token


def test_before_the_first_slot_a_query_reads_the_learned_nothing() -> None:
    mix, x = make(stride=4, causal=True), tokens(2, 9, 16)
    assert mix.nothing is not None
    want = mix.heads.merge(mix.nothing.expand(2, 3, -1, -1))
    torch.testing.assert_close(mix(x)[:, :3], want)
    torch.testing.assert_close(mix(x[:, :2]), want[:, :2])
    assert not torch.allclose(mix(x)[:, 3], want[:, 0])
    assert make(stride=4).nothing is None
    assert make(stride=1, causal=True).nothing is None


def test_the_last_slot_of_a_bidirectional_row_is_completed_with_zeros() -> None:
    mix, x = make(stride=3), tokens(1, 7, 16)
    _, k, _ = mix.heads.split(x)
    partial = mix._compress(*(torch.cat((k[:, 6:], torch.zeros_like(k[:, :2])), 1),) * 2)[0]
    want = torch.einsum("hok,hk->ho", mix.key.weight[..., 0].unflatten(0, (2, -1)), k[0, 6])
    assert mix.key.bias is not None
    torch.testing.assert_close(partial[0, 0], want + mix.key.bias.view(2, 8))
    weights = mix.pattern(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(weights[..., 0], weights[..., 2])  # tokens of a slot share its weight


def test_the_state_grows_by_one_slot_per_stride() -> None:
    mix, x = make(stride=5, causal=True), tokens(2, 40, 16)
    state = mix.init_state(2, capacity=40)
    assert state.k.shape == state.v.shape == (2, 8, 2, 8)
    assert state.last_k.shape == (2, 4, 2, 8)
    _, state = mix.prefill(x[:, :33], state=state)
    assert state.k.shape[1] == 8
    _, half = make(stride=5, causal=True).bfloat16().prefill(x.bfloat16())
    assert half.k.dtype == half.last_v.dtype == torch.bfloat16
    state = mix.init_state(2, capacity=1)
    for t in range(40):
        _, state = mix.step(x[:, t], state)
    assert 8 <= state.k.shape[1] < 40


def test_a_long_continued_prompt_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "ROWS", 4)
    mix, x = make(stride=3, causal=True), tokens(2, 40, 16)
    want = mix(x)
    y, state = mix.prefill(x[:, :5], torch.tensor([5, 1]))
    later = torch.stack((x[0, 5:30], x[1, 1:26]))
    y, state = mix.prefill(later, torch.tensor([25, 10]), state)
    torch.testing.assert_close(y[0], want[0, 5:30])
    torch.testing.assert_close(y[1, :10], want[1, 1:11])
    assert state.position.tolist() == [30, 11]
    y, _ = mix.prefill(torch.stack((x[0, 30:36], x[1, 11:17])), state=state)
    torch.testing.assert_close(y, torch.stack((want[0, 30:36], want[1, 11:17])))


@torch.no_grad()
def test_dropout_keeps_the_mean() -> None:
    mix, x = make(stride=2, causal=True, dropout=0.5), tokens(1, 12, 16)
    want = mix(x)
    mix.train()
    torch.manual_seed(0)
    draws = mix(x.expand(6000, -1, -1))
    error = (draws.mean(0) - want[0]).abs() / (draws.std(0) / math.sqrt(6000) + 1e-12)
    assert float(error.max()) < 6
    assert float(draws.std(0)[2:].min()) > 0


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_keeps_no_matrix_of_queries_and_slots(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PAIRS", 1 << 14)
    mix, x = make(causal=causal, dropout=0.1, heads=1).train(), tokens(1, 600, 16).requires_grad_()
    with Largest() as largest:
        mix(x, lengths=torch.tensor([590])).sum().backward()
    assert largest.numel < 600 * 200 / 2, largest.op


def test_what_cannot_work_raises() -> None:
    with pytest.raises(ValueError, match="stride=0"):
        make(stride=0)


@pytest.mark.parametrize("causal", [False, True])
def test_autocast(causal: bool) -> None:
    mix, x, lengths = make(causal=causal).float(), tokens(2, 20, 16), torch.tensor([20, 7])
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(x.float(), lengths=lengths)
        if causal:
            prompt, state = mix.prefill(x.float()[:, :11])
            torch.testing.assert_close(prompt, mix(x.float())[:, :11], rtol=0.05, atol=0.05)
            step, _ = mix.step(x.float()[:, 11], state)
            torch.testing.assert_close(step, mix(x.float())[:, 11], rtol=0.05, atol=0.05)
    torch.testing.assert_close(y.double(), mix.double()(x, lengths=lengths), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_memory_compressed_attention_package_with_copied_weights(causal: bool) -> None:
    package = pytest.importorskip("memory_compressed_attention")
    peer, mix = package.MemoryCompressedAttention(16, heads=1, causal=causal).double(), make(heads=1, causal=causal)
    x = tokens(2, 24, 16)
    x[..., 0] = 1
    with torch.no_grad():
        # its null slot competes with the others: a first channel that is 1 in every query gives it weight 0
        peer.to_qkv.weight[0] = torch.eye(16)[0]
        peer.null_k[..., 0] = -1e5
        peer.null_v.normal_()
        mix.heads.qkv.weight.copy_(peer.to_qkv.weight)
        mix.heads.qkv.bias.zero_()
        if mix.nothing is not None:
            mix.nothing.copy_(peer.null_v[0])
    for conv in (mix.key, mix.value):
        conv.load_state_dict(peer.compress_fn.conv.state_dict())
    mix.heads.out.load_state_dict(peer.to_out.state_dict())
    torch.testing.assert_close(mix(x), peer(x), rtol=1e-12, atol=1e-12)
