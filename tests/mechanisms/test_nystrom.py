import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad import build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.nystrom import Nystrom, pseudo_inverse
from subquad.ops.convolve import convolve


def make(**options: object) -> Nystrom:
    torch.manual_seed(0)
    mix = build("nystrom", **{"dim": 16, "heads": 2, "conv": 0, **options}).double().eval()
    assert isinstance(mix, Nystrom)
    return mix


def full(mix: Nystrom) -> Mixer:
    exact = build("softmax", dim=16, heads=2).double()
    exact.heads.load_state_dict(mix.heads.state_dict())
    return exact


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_as_many_landmarks_as_tokens_is_full_attention() -> None:
    mix, x = make(landmarks=20), 3 * tokens(3, 20, 16)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix.pattern(x), full(mix).pattern(x), rtol=1e-12, atol=1e-12)
    # rows of both kinds in one batch
    mix = make(landmarks=9)
    y, want = mix(x, lengths=torch.tensor([20, 9, 4])), full(mix)(x, lengths=torch.tensor([20, 9, 4]))
    torch.testing.assert_close(y[1:], want[1:], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(y[0], want[0], rtol=1e-3)


def test_tokens_that_are_constant_on_segments_are_no_approximation() -> None:
    """Every token then equals its landmark and A A⁺ A = A: the formula itself is exact, not only the branch for it."""
    mix = make(landmarks=6, iterations=25)
    x = 3 * tokens(2, 6, 16).repeat_interleave(4, dim=1)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("queries", "keys"), [(30, 5), (5, 30), (4, 4)])
def test_cross_attention_with_few_queries_or_few_keys_is_exact(queries: int, keys: int) -> None:
    mix, x, context = make(landmarks=6, conv=5), tokens(2, queries, 16), tokens(2, keys, 16, seed=2)
    torch.testing.assert_close(mix(x, context=context), full(mix)(x, context=context), rtol=1e-12, atol=1e-12)


def test_the_iteration_reaches_the_pseudo_inverse() -> None:
    a = (4 * tokens(5, 7, 7)).softmax(-1)
    z = pseudo_inverse(a, 30)
    torch.testing.assert_close(z, torch.linalg.pinv(a), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a @ z @ a, a, rtol=1e-9, atol=1e-9)
    wide = (4 * tokens(5, 4, 7)).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(wide, 30), torch.linalg.pinv(wide), rtol=1e-9, atol=1e-9)
    gaps = [float((a @ pseudo_inverse(a, rounds) @ a - a).abs().max()) for rounds in (0, 2, 4, 6, 8)]
    assert gaps == sorted(gaps, reverse=True)
    alone = pseudo_inverse(a[2], 6)  # a matrix does not depend on its neighbours
    torch.testing.assert_close(pseudo_inverse(a, 6)[2], alone, rtol=1e-12, atol=1e-12)


@given(lengths=st.lists(st.integers(1, 23), min_size=3, max_size=3), landmarks=st.integers(1, 25))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_landmarks_are_means_of_the_segments_of_the_rows_own_length(lengths: list[int], landmarks: int) -> None:
    mix, t = make(landmarks=landmarks), tokens(3, 23, 2, 8)
    got = mix._landmarks(t, torch.tensor(lengths))
    for row, n in enumerate(lengths):
        m = min(n, landmarks)
        want = torch.stack([t[row, n * i // m : n * (i + 1) // m].mean(0) for i in range(m)], dim=1)
        torch.testing.assert_close(got[row, :, :m], want)
        assert (got[row, :, m:] == 0).all()


def test_the_convolution_runs_over_the_values_of_its_own_head() -> None:
    mix, x = make(landmarks=6, conv=3), tokens(2, 20, 16)
    assert mix.conv is not None
    with torch.no_grad():
        mix.conv.weight.zero_()
        without = mix(x)
        mix.conv.weight[0, 0, 0] = 1  # head 0 adds the value before it, head 1 nothing
    v = mix.heads.split(x)[2]
    before = torch.zeros_like(v)
    before[:, 1:, 0] = v[:, :-1, 0]
    torch.testing.assert_close(mix(x), without + before.flatten(-2) @ mix.heads.out.weight.T)
    context = tokens(2, 20, 16, seed=2)
    torch.testing.assert_close(mix(x, context=context), mix.reference(x, context=context))
    assert make(landmarks=6).conv is None


def test_the_pattern_multiplies_the_values() -> None:
    mix, x = make(landmarks=6), tokens(2, 20, 16)
    o = torch.einsum("bhts,bshv->bthv", mix.pattern(x), mix._qkv(x)[2])
    torch.testing.assert_close(mix.heads.merge(o), mix(x), rtol=1e-12, atol=1e-12)


def test_half_precision_is_no_worse_than_twice_the_plain_expression() -> None:
    half, x = make(landmarks=8, conv=5).bfloat16(), (2 * tokens(2, 50, 16)).bfloat16()
    exact = make(landmarks=8, conv=5)
    exact.load_state_dict(half.state_dict())
    want = exact(x.double())
    ours, plain = ((f(x).double() - want).abs().max() for f in (half, half.reference))
    assert ours <= 2 * plain


def test_what_cannot_work_raises() -> None:
    with pytest.raises(ValueError, match="a landmark is a mean"):
        make(causal=True)
    with pytest.raises(ValueError, match="conv=4"):
        make(conv=4)
    with pytest.raises(ValueError, match="landmarks=0"):
        make(landmarks=0)


def test_autocast_keeps_the_inverse_in_single_precision() -> None:
    mix, x = make(landmarks=6).float(), 3 * tokens(2, 40, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(x)
        q, k, v = mix._project(x)
    assert y.dtype == q.dtype == torch.bfloat16
    o = mix._attend(q, k, v, None, None)  # here autocast rounds nothing
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mix.heads.merge(o), y)
    exact = mix._attend(q.double(), k.double(), v.double(), None, None)
    assert float((o - exact).abs().max().detach()) < 0.02 * float(exact.abs().max().detach())


@given(length=st.integers(1, 150), width=st.sampled_from([1, 3, 33, 131]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_banded_product_is_a_convolution(length: int, width: int) -> None:
    """Values and both gradients, at lengths around the block and for kernels wider than it."""
    results = []
    for banded in (True, False):
        v, kernel = tokens(2, length, 3, 4).requires_grad_(), tokens(3, width, seed=2).requires_grad_()
        if banded:
            y = convolve(v, kernel)
        else:
            plain = torch.nn.functional.conv2d(
                v.transpose(1, 2), kernel[:, None, :, None], padding=(width // 2, 0), groups=3
            )
            y = plain.transpose(1, 2)
        results.append((y, *torch.autograd.grad(y, (v, kernel), tokens(2, length, 3, 4, seed=3))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_the_attention_alone(dtype: torch.dtype) -> None:
    """Near the float64 result although the inverse enlarges what rounding left of the summaries."""
    half, x = make(landmarks=8).to(dtype), (2 * tokens(2, 300, 16)).to(dtype).requires_grad_()
    exact = make(landmarks=8)
    exact.load_state_dict(half.state_dict())
    y, row = half(x), x.detach().double().requires_grad_()
    want = exact(row)
    weight = tokens(2, 300, 16, seed=4)
    (grad,), (best,) = (torch.autograd.grad((t * weight).sum(), at) for t, at in ((y, x), (want, row)))
    for got, right in ((y, want), (grad, best)):
        assert float(((got - right).norm() / right.norm()).detach()) < 0.02


def test_equals_the_transformers_library_with_copied_weights() -> None:
    pytest.importorskip("transformers")
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=16, num_attention_heads=2, num_landmarks=6, segment_means_seq_len=48, conv_kernel_size=5
    )
    peer, mix = NystromformerSelfAttention(config).double().eval(), make(landmarks=6, conv=5)
    peer.init_option = "exact"  # norms of each matrix, in place of the largest of the batch
    for at, part in enumerate((peer.query, peer.key, peer.value)):
        part.load_state_dict({name: p[16 * at : 16 * at + 16] for name, p in mix.heads.qkv.state_dict().items()})
    assert mix.conv is not None
    peer.conv.load_state_dict(mix.conv.state_dict())
    x = 2 * tokens(3, 48, 16)
    torch.testing.assert_close(mix(x), mix.heads.out(peer(x)[0]), rtol=1e-12, atol=1e-12)


def test_equals_the_nystrom_attention_package_with_copied_weights() -> None:
    package = pytest.importorskip("nystrom_attention")
    peer = package.NystromAttention(16, dim_head=16, heads=1, num_landmarks=6, residual_conv_kernel=5).double()
    mix = make(heads=1, landmarks=6, conv=5)
    assert mix.conv is not None
    with torch.no_grad():
        mix.heads.qkv.weight.copy_(peer.to_qkv.weight)
        mix.heads.qkv.bias.zero_()
    mix.heads.out.load_state_dict(peer.to_out[0].state_dict())
    mix.conv.load_state_dict(peer.res_conv.state_dict())
    x = 2 * tokens(1, 48, 16)  # one row and one head, because its norms are the largest of the batch
    torch.testing.assert_close(mix(x), peer(x), rtol=1e-12, atol=1e-12)
