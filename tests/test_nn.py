"""Mechanisms inside the layers of torch.nn."""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subquad
from subquad.mechanisms.base import Mixer
from subquad.nn import MultiheadAttention
from tests.mechanisms.laws import close, tokens

B, T, S, DIM, HEADS = 3, 13, 9, 16, 4
LENGTHS = torch.tensor([13, 6, 1])
PADDING = torch.arange(T) >= LENGTHS[:, None]
FLOAT_PADDING = torch.zeros(B, T, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)

BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {"feature_map": "relu"},
    "performer": {"features": 16},
    "local": {"window": 3},
    "nystrom": {"landmarks": 4, "conv": 3},
    "linformer": {"rank": 4, "max_length": T},
    "reformer": {"chunk": 4, "buckets": 4},
    "fnet": {},
    "mixed": {},
}
CAUSAL: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {},
    "performer": {"features": 16},
    "local": {"window": 3},
    "transformer_xl": {"memory": 5},
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def attention(mechanism: str = "linear", weights: int = 0, **fields: Any) -> MultiheadAttention:
    torch.manual_seed(weights)
    return MultiheadAttention(
        DIM, HEADS, mechanism=mechanism, **{"batch_first": True, "dtype": torch.float64, **fields}
    )


def copy_of(module: MultiheadAttention, mechanism: str, **options: Any) -> Mixer:
    """The mechanism made by `build`, with the module's weights."""
    mix = subquad.build(mechanism, dim=DIM, heads=HEADS, **options).double()
    mix.load_state_dict(module.mixer.state_dict())
    return mix.train(module.training)


def encoder_layer(**fields: Any) -> Any:
    torch.manual_seed(3)
    return nn.TransformerEncoderLayer(
        DIM, HEADS, 32, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **fields}
    )


def decoder_layer(**fields: Any) -> Any:
    torch.manual_seed(4)
    return nn.TransformerDecoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64, **fields)


def by_hand(layer: Any, mixed: Tensor, x: Tensor) -> Tensor:
    """A post-norm encoder layer, given the output of its attention for x."""
    x = layer.norm1(x + mixed)
    return layer.norm2(x + layer.linear2(layer.linear1(x).relu()))


@pytest.fixture(autouse=True)
def no_fast_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of the fused kernels, which always compute softmax, whatever module the layer has."""
    called: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        fused = getattr(torch, name)

        def noted(*args: Any, fused: Any = fused, name: str = name, **kwargs: Any) -> Any:
            called.append(name)
            return fused(*args, **kwargs)

        monkeypatch.setattr(torch, name, noted)
    return called


def parameters_of(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_signatures_are_those_of_torch() -> None:
    ours, theirs = parameters_of(MultiheadAttention), parameters_of(nn.MultiheadAttention)
    assert ours[: len(theirs)] == theirs
    ours, theirs = parameters_of(MultiheadAttention.forward), parameters_of(nn.MultiheadAttention.forward)
    assert [("need_weights", True) if name == "need_weights" else (name, default) for name, default in ours] == theirs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mechanism", BIDIRECTIONAL)
def test_an_encoder_computes_the_mechanism(mechanism: str, training: bool, mode: str, no_fast_path: list[str]) -> None:
    """Also with padding, for which TransformerEncoder would nest tensors, and with layers replaced afterwards."""
    options, x = BIDIRECTIONAL[mechanism], tokens(B, T, DIM)
    encoder: Any = nn.TransformerEncoder(encoder_layer(), 2).train(training)
    assert encoder.use_nested_tensor
    for n, layer in enumerate(encoder.layers):
        layer.self_attn = attention(mechanism, weights=n, **options).train(training)
    for mask, lengths in ((None, None), (PADDING, LENGTHS), (FLOAT_PADDING, LENGTHS)):
        expected = x
        for layer in encoder.layers:
            mix = copy_of(layer.self_attn, mechanism, **options)
            expected = by_hand(layer, mix(expected, lengths), expected)
        with MODES[mode]():
            found = encoder(x, src_key_padding_mask=mask)
        kept = torch.ones_like(PADDING) if mask is None else ~PADDING
        close(found[kept], expected.detach()[kept], 1e-12)
    assert no_fast_path == []


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_a_causal_encoder_takes_the_masks_that_torch_makes(mechanism: str, no_fast_path: list[str]) -> None:
    options, x = {**CAUSAL[mechanism], "causal": True}, tokens(B, T, DIM)
    layer = encoder_layer()
    layer.self_attn = attention(mechanism, **options)
    layer.eval()
    mix = copy_of(layer.self_attn, mechanism, **options)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    float_mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    with torch.no_grad():
        expected, padded = (by_hand(layer, mix(x, lengths), x) for lengths in (None, LENGTHS))
        for mask in (None, FUTURE, float_mask):
            for is_causal in (True, False):
                close(layer(x, src_mask=mask, is_causal=is_causal), expected, 1e-12)
            close(encoder(x, mask=mask), expected, 1e-12)  # detects that the mask is causal
            found = encoder(x, mask=mask, src_key_padding_mask=PADDING if mask is FUTURE else FLOAT_PADDING)
            close(found[~PADDING], padded[~PADDING], 1e-12)
    every_head = FUTURE.expand(B * HEADS, T, T)
    close(layer.self_attn(x, x, x, attn_mask=every_head)[0], mix(x), 1e-12)
    assert no_fast_path == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_softmax_is_torchs_own_layer_with_its_weights(norm_first: bool, causal: bool, no_fast_path: list[str]) -> None:
    """The state dict of torch's encoder loads unchanged."""
    theirs = nn.TransformerEncoder(encoder_layer(norm_first=norm_first), 2, enable_nested_tensor=False)
    ours: Any = copy.deepcopy(theirs)
    for n, layer in enumerate(ours.layers):
        layer.self_attn = attention("softmax", weights=n, causal=causal)
    ours.load_state_dict(theirs.state_dict())
    x, mask = tokens(B, T, DIM), FUTURE if causal else None
    for padding in (None, PADDING):
        kept = torch.ones_like(PADDING) if padding is None else ~padding
        for training in (True, False):
            found, expected = (m.train(training)(x, mask, padding) for m in (ours, theirs))
            close(found[kept], expected[kept], 1e-12)
        with torch.no_grad():
            close(ours(x, mask, padding)[kept], expected.detach()[kept], 1e-12)
    assert no_fast_path == []
    with torch.no_grad():
        theirs(x)
    assert no_fast_path  # torch's own layers take the fast path in the same call, so this test can notice it


@pytest.mark.parametrize("cross", ["softmax", "linear", "performer"])
@pytest.mark.parametrize("own", ["softmax", "linear", "local"])
def test_a_decoder_computes_both_mechanisms(own: str, cross: str) -> None:
    decoder: Any = nn.TransformerDecoder(decoder_layer(), 1).eval()
    (layer,) = decoder.layers
    layer.self_attn = attention(own, causal=True, **CAUSAL[own]).eval()
    layer.multihead_attn = attention(cross, **BIDIRECTIONAL[cross]).eval()
    x, memory = tokens(B, T, DIM), tokens(B, S, DIM, seed=1)
    lengths = torch.tensor([9, 4, 2])
    padding = torch.arange(S) >= lengths[:, None]
    mine = copy_of(layer.self_attn, own, causal=True, **CAUSAL[own])
    other = copy_of(layer.multihead_attn, cross, **BIDIRECTIONAL[cross])
    h = layer.norm1(x + mine(x))
    h = layer.norm2(h + other(h, context=memory, context_lengths=lengths))
    expected = layer.norm3(h + layer.linear2(layer.linear1(h).relu()))
    for mask in (None, FUTURE):
        found = decoder(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        close(found, expected, 1e-12)
    found = decoder(x, memory, FUTURE, tgt_key_padding_mask=PADDING, memory_key_padding_mask=padding)
    close(found[~PADDING], expected[~PADDING], 1e-12)


def test_softmax_is_torchs_own_decoder_with_its_weights() -> None:
    theirs = nn.TransformerDecoder(decoder_layer(), 2)
    ours: Any = copy.deepcopy(theirs)
    for layer in ours.layers:
        layer.self_attn, layer.multihead_attn = attention("softmax", causal=True), attention("softmax")
    ours.load_state_dict(theirs.state_dict())
    x, memory = tokens(B, T, DIM), tokens(B, S, DIM, seed=1)
    close(ours(x, memory, tgt_mask=FUTURE), theirs(x, memory, tgt_mask=FUTURE), 1e-12)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "local", "nystrom"])
def test_gradients_are_those_of_the_mechanism(mechanism: str) -> None:
    options = BIDIRECTIONAL[mechanism]
    layer = encoder_layer()
    layer.self_attn = attention(mechanism, **options)
    mix = copy_of(layer.self_attn, mechanism, **options)
    weights = tokens(B, T, DIM, seed=5).masked_fill(PADDING[..., None], 0)
    x = tokens(B, T, DIM).requires_grad_()
    y = x.detach().clone().requires_grad_()
    (layer(x, src_key_padding_mask=PADDING) * weights).sum().backward()
    (by_hand(copy.deepcopy(layer), mix(y, LENGTHS), y) * weights).sum().backward()
    close(x.grad, y.grad, 1e-10)
    found = dict(layer.self_attn.mixer.named_parameters())
    for name, parameter in mix.named_parameters():
        close(found[name].grad, parameter.grad, 1e-10)


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_it_compiles_as_one_graph(mechanism: str) -> None:
    layer = encoder_layer()
    layer.self_attn = attention(mechanism, causal=True, **CAUSAL[mechanism])
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    x = tokens(B, T, DIM)
    for training in (True, False):
        encoder.train(training)
        found, expected = (m(x, FUTURE, PADDING, is_causal=True) for m in (compiled, encoder))
        close(found, expected, 1e-12)
    with pytest.raises(RuntimeError, match="key_padding_mask cannot work"):
        compiled(x, FUTURE, PADDING.flip(1), is_causal=True)
    with pytest.raises(RuntimeError, match="attn_mask cannot work"):
        compiled(x, ~FUTURE, PADDING, is_causal=True)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "performer", "local", "nystrom", "fnet"])
def test_under_autocast_it_is_the_mechanism_under_autocast(mechanism: str, no_fast_path: list[str]) -> None:
    options, x = BIDIRECTIONAL[mechanism], tokens(B, T, DIM, dtype=torch.float32)
    layer = encoder_layer(dtype=torch.float32)
    layer.self_attn = attention(mechanism, dtype=torch.float32, **options)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    (layer,) = encoder.layers
    mix = layer.self_attn.mixer
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = by_hand(layer, mix(x, LENGTHS), x)
        found = encoder(x, src_key_padding_mask=PADDING)
    assert torch.equal(found[~PADDING], expected[~PADDING])
    assert no_fast_path == []


def test_copies_are_independent_and_state_dicts_go_there_and_back() -> None:
    layer = encoder_layer()
    layer.self_attn = attention("performer", features=16)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        encoder: Any = nn.TransformerEncoder(layer, 2).eval()
    first, second = (layer.self_attn.mixer for layer in encoder.layers)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    assert not torch.equal(next(first.parameters()), next(second.parameters()))
    other: Any = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False).eval()
    for n, fresh in enumerate(other.layers):
        fresh.self_attn = attention("performer", weights=9, layer=n, features=16).eval()
    x = tokens(B, T, DIM)
    assert not torch.equal(other(x), encoder(x))
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(x), encoder(x))


def test_weights_that_do_not_fit_are_named() -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True).double()
    linear = attention("linear")
    linear.load_state_dict(theirs.state_dict())  # the same projections, to continue training from
    assert torch.equal(linear.mixer.heads.qkv.weight, theirs.in_proj_weight)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mixer\.heads\.qkv\.weight"):
        attention("fnet").load_state_dict(theirs.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*mixer\.heads\.qkv\.bias"):
        linear.load_state_dict(nn.MultiheadAttention(DIM, HEADS, bias=False).state_dict())


@pytest.mark.parametrize("batch_first", [True, False])
def test_layouts_are_those_of_torch(batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first).double().eval()
    ours = attention("softmax", batch_first=batch_first).eval()
    ours.load_state_dict(theirs.state_dict())
    x, context = tokens(B, T, DIM), tokens(B, S, DIM, seed=1)
    if not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    close(ours(x, x, x)[0], theirs(x, x, x)[0], 1e-12)
    padding = PADDING[:, :S]
    found = ours(x, context, context, padding)
    assert found[1] is None
    close(found[0], theirs(x, context, context, padding)[0], 1e-12)
    alone, other = tokens(T, DIM), tokens(S, DIM, seed=1)
    close(ours(alone, alone, alone)[0], theirs(alone, alone, alone)[0], 1e-12)
    close(ours(alone, other, other, padding[1])[0], theirs(alone, other, other, padding[1])[0], 1e-12)


def test_the_options_are_those_of_build() -> None:
    module = attention("local", window=5, causal=True, rotary=True, seed=3, dtype=None)
    assert (
        module.mixer.options
        == subquad.build("local", dim=DIM, heads=HEADS, window=5, causal=True, rotary=True, seed=3).options
    )
    assert (module.embed_dim, module.num_heads, module.batch_first, module.dropout) == (DIM, HEADS, True, 0.0)
    assert attention(dtype=torch.bfloat16, device="meta").mixer.heads.out.weight.dtype == torch.bfloat16
    assert attention("softmax", dropout=0.25).mixer.options.dropout == 0.25
    default = MultiheadAttention(DIM, HEADS)
    assert type(default.mixer) is subquad.MECHANISMS["linear"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bias": False}, r"bias=False cannot work: accepted is True"),
        ({"add_bias_kv": True}, r"add_bias_kv=True cannot work: accepted is False"),
        ({"add_zero_attn": True}, r"add_zero_attn=True cannot work: accepted is False"),
        ({"kdim": 8}, r"kdim=8 cannot work: accepted is 16"),
        ({"vdim": 8}, r"vdim=8 cannot work: accepted is 16"),
        ({"batch_first": None}, r"batch_first=None cannot work: accepted is True or False"),
        ({"dtype": torch.int64}, r"dtype=torch.int64 cannot work"),
        ({"dropout": 0.1}, r"dropout=0.1 has no meaning for Linear"),
        ({"mechanism": "linea"}, r"unknown mechanism 'linea'; did you mean 'linear'"),
        ({"mechanism": "nystrom", "causal": True}, r"causal=True cannot work"),
        ({"mechanism": "linformer"}, r"max_length=None cannot work"),
    ],
)
def test_impossible_modules_are_named(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        attention(**fields)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((0, 4), "embed_dim=0 cannot work"),
        ((16, 0), "num_heads=0 cannot work"),
        ((16, 3), "num_heads=3 cannot work: accepted is a divisor of embed_dim=16"),
        (("16", 4), "embed_dim='16' cannot work"),
    ],
)
def test_sizes_are_named_as_torch_names_them(sizes: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        MultiheadAttention(*sizes)


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="linear has no option 'window'"):
        attention(window=3)
    with pytest.raises(TypeError, match="heads is the same as num_heads"):
        attention(heads=3)


@pytest.mark.parametrize("mechanism", ["retnet", "gla", "mamba2", "deltanet", "gated_deltanet"])
def test_what_is_causal_only_stands_in_a_causal_layer(mechanism: str) -> None:
    """With torch's masks and right padding; as an encoder's layer it is refused."""
    layer: Any = nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, dtype=torch.float64).eval()
    layer.self_attn = attention(mechanism=mechanism, causal=True)
    x, mask = tokens(B, T, DIM), nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    y = layer(x, src_mask=mask, is_causal=True)
    torch.testing.assert_close(y[:, :5], layer(x[:, :5]))
    padded = layer(x, src_mask=mask == -torch.inf, src_key_padding_mask=torch.arange(T).expand(B, T) >= 5)
    torch.testing.assert_close(padded[:, :5], y[:, :5])
    with pytest.raises(ValueError, match=r"causal=False cannot work: .* is causal only; pass causal=True"):
        attention(mechanism=mechanism)


X, Y = tokens(B, T, DIM), tokens(B, S, DIM, seed=1)


@pytest.mark.parametrize(
    ("module", "inputs", "fields", "error"),
    [
        ({}, (X, X, X), {"need_weights": True}, r"need_weights=True cannot work: accepted is False; .*mixer\.pattern"),
        ({}, (X, X, X.clone()), {}, "key and value are different tensors"),
        ({}, (X, Y, Y.clone()), {}, "key and value are different tensors"),
        ({"causal": True}, (X, Y, Y), {}, "query and key are different tensors, but Linear was built with causal=True"),
        ({"mechanism": "fnet"}, (X, Y, Y), {}, "query and key are different tensors, but FNet has no cross-attention"),
        ({"mechanism": "gla", "causal": True}, (X, Y, Y), {}, "different tensors, but GLA has no cross-attention"),
        ({}, (X, *(Y[:2],) * 2), {}, "key has batch 2: query has batch 3"),
        ({}, (X[..., :8],) * 3, {}, r"query has shape \[3, 13, 8\]"),
        ({}, (X, *(Y[..., :8],) * 2), {}, r"key has shape \[3, 9, 8\]"),
        ({}, (X[0, 0],) * 3, {}, r"query has shape \[16\]: accepted is \[B, T, 16\], or \[T, 16\]"),
        ({"batch_first": False}, (X[None],) * 3, {}, r"query has shape .* accepted is \[T, B, 16\]"),
        ({}, (None,) * 3, {}, "query has shape NoneType"),
        ({}, (X.float(),) * 3, {}, "query has dtype torch.float32"),
        ({}, (X, X, X), {"key_padding_mask": PADDING.flip(1)}, "key_padding_mask cannot work: .* right padding"),
        ({}, (X, X, X), {"key_padding_mask": FLOAT_PADDING.flip(1)}, "key_padding_mask cannot work"),
        ({}, (X, X, X), {"key_padding_mask": FLOAT_PADDING - 1}, "key_padding_mask cannot work"),
        ({}, (X, X, X), {"key_padding_mask": PADDING.int()}, "key_padding_mask has dtype torch.int32"),
        ({}, (X, X, X), {"key_padding_mask": PADDING[:, :S]}, r"key_padding_mask has shape \[3, 9\]"),
        ({}, (X, X, X), {"key_padding_mask": [13, 6, 1]}, "key_padding_mask has shape list"),
        ({}, (X, X, X), {"key_padding_mask": PADDING.to("meta")}, "key_padding_mask is on meta"),
        ({}, (X[0],) * 3, {"key_padding_mask": PADDING[:1]}, r"key_padding_mask has shape \[1, 13\]"),
        ({}, (X, X, X), {"attn_mask": FUTURE}, "attn_mask was given, but this module was built with causal=False"),
        ({}, (X, Y, Y), {"attn_mask": FUTURE[:, :S]}, "attn_mask was given, but this module attends to another"),
        ({"causal": True}, (X, X, X), {"attn_mask": FUTURE.T}, "attn_mask cannot work: accepted is the causal mask"),
        ({"causal": True}, (X, X, X), {"attn_mask": FUTURE * 1.0}, "attn_mask cannot work"),
        ({"causal": True}, (X, X, X), {"attn_mask": FUTURE[:S]}, r"attn_mask has shape \[9, 13\]"),
        ({"causal": True}, (X, X, X), {"attn_mask": FUTURE.T, "is_causal": True}, "attn_mask cannot work"),
        ({}, (X, X, X), {"is_causal": True}, "is_causal=True cannot work: .* causal=False"),
        ({}, (X, Y, Y), {"is_causal": True}, "is_causal=True cannot work"),
        ({"causal": True}, (X, X, X), {"is_causal": None}, "is_causal=None cannot work"),
    ],
)
def test_unsupported_arguments_are_named(module: Any, inputs: Any, fields: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        attention(**module)(*inputs, **fields)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # warned once per process
def test_nested_tensors_are_refused_with_the_way_out() -> None:
    """The first layer is torch's own, so the encoder nests tensors: it only looks at the first layer."""
    encoder: Any = nn.TransformerEncoder(encoder_layer(), 2).eval()
    encoder.layers[1].self_attn = attention().eval()
    x = tokens(B, T, DIM)
    with torch.no_grad(), pytest.raises(ValueError, match="use_nested_tensor = False"):
        encoder(x, src_key_padding_mask=PADDING)
    encoder.use_nested_tensor = False
    with torch.no_grad():
        assert encoder(x, src_key_padding_mask=PADDING).shape == x.shape


def test_torchs_kernel_refuses_the_placeholders_of_the_weights() -> None:
    """If a later version of torch takes its fast path anyway, it fails."""
    layer, x = encoder_layer(), tokens(B, T, DIM)
    layer.self_attn = attention()
    fused = torch._native_multi_head_attention
    weights = (layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias, layer.self_attn.out_proj.weight)
    with pytest.raises(NotImplementedError, match="whose weights are those of its mixer"):
        fused(x, x, x, DIM, HEADS, *weights, layer.self_attn.out_proj.bias)
