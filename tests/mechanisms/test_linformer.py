from pathlib import Path

import pytest
import torch
from torch import Tensor

from subquad import Transformer, build
from subquad.mechanisms.linformer import Linformer


def linformer(**options: object) -> Linformer:
    torch.manual_seed(0)
    mix = build("linformer", **{"dim": 16, "heads": 2, "max_length": 24, **options}).double().eval()
    assert isinstance(mix, Linformer)
    return mix


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("share", ["none", "heads", "keyvalue", "layer"])
def test_with_identity_projections_it_is_full_attention(share: str) -> None:
    mix, full = linformer(rank=24, share=share), build("softmax", dim=16, heads=2).double()
    with torch.no_grad():
        for rows in (mix.key_rows, mix.value_rows):
            if rows is not None:
                rows.copy_(torch.eye(24).expand_as(rows))
    full.heads.load_state_dict(mix.heads.state_dict())
    x, context = tokens(2, 24, 16), tokens(2, 24, 16, seed=2)
    torch.testing.assert_close(mix(x), full(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix.pattern(x), full.pattern(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix(x[:, :5], context=context), full(x[:, :5], context=context), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("share", "matrices"), [("none", 24 * 12), ("heads", 24), ("keyvalue", 12), ("layer", 1)])
def test_twelve_layers_of_twelve_heads_have_as_many_matrices_as_the_paper_counts(share: str, matrices: int) -> None:
    layers = [linformer(dim=24, heads=12, rank=5, share=share, layer=i) for i in range(12)]
    if share == "layer":
        for layer in layers[1:]:
            layer.share_with(layers[0])
    found = {id(p): p for layer in layers for name, p in layer.named_parameters() if "rows" in name}
    assert sum(p.shape[0] for p in found.values()) == matrices


def test_shared_layers_learn_one_matrix() -> None:
    first, second = linformer(rank=5, share="layer"), linformer(rank=5, share="layer", layer=1)
    second.share_with(first)
    x = tokens(1, 20, 16)
    second(first(x)).sum().backward()
    both = first.key_rows.grad
    assert second.key_rows.grad is both
    first.zero_grad()
    first(x).sum().backward()
    assert both is not None
    assert first.key_rows.grad is not None
    assert not torch.allclose(both, first.key_rows.grad)


def test_only_matching_shared_layers_join() -> None:
    mix = linformer(rank=5, share="layer")
    alone = linformer(rank=5)
    own = mix.key_rows, alone.key_rows
    mix.share_with(alone)
    alone.share_with(mix)
    assert mix.key_rows is own[0]
    assert alone.key_rows is own[1]
    with pytest.raises(ValueError, match=r"\(6, 24\).*\(5, 24\)"):
        mix.share_with(linformer(rank=6, share="layer"))


def test_a_short_row_uses_the_first_columns() -> None:
    mix, cut = linformer(rank=5), linformer(rank=5, max_length=9)
    with torch.no_grad():
        for ours, theirs in zip(cut.parameters(), mix.parameters(), strict=True):
            ours.copy_(theirs[..., :9] if theirs.shape[-1] == 24 else theirs)
    x = tokens(2, 24, 16)
    want = cut(x[:, :9])
    torch.testing.assert_close(mix(x[:, :9]), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix(x, lengths=torch.tensor([9, 9]))[:, :9], want, rtol=1e-12, atol=1e-12)


def test_the_pattern_multiplies_the_values() -> None:
    mix = linformer(rank=5, share="none")
    x = tokens(2, 20, 16)
    v = mix._qkv(x)[2]
    o = torch.einsum("bhts,bshv->bthv", mix.pattern(x), v)
    torch.testing.assert_close(mix.heads.merge(o), mix(x), rtol=1e-12, atol=1e-12)


def test_what_cannot_work_raises() -> None:
    with pytest.raises(ValueError, match="E and F mix all positions"):
        linformer(causal=True)
    with pytest.raises(ValueError, match=r'share=.*"keyvalue"'):
        linformer(share="head")
    with pytest.raises(ValueError, match="rank=0"):
        linformer(rank=0)
    with pytest.raises(ValueError, match=r"context .*max_length=24"):
        linformer()(tokens(1, 3, 16), context=tokens(1, 25, 16))


def test_autocast() -> None:
    mix = linformer(rank=5).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(tokens(2, 20, 16).float(), lengths=torch.tensor([20, 7]))
    torch.testing.assert_close(
        y.double(), mix.double()(tokens(2, 20, 16), lengths=torch.tensor([20, 7])), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("size", [24, 17])
def test_equals_the_linformer_package_with_copied_weights(size: int) -> None:
    peer = pytest.importorskip("linformer.linformer").LinformerSelfAttention(16, 24, k=5, heads=2).double()
    mix = linformer(rank=5)
    with torch.no_grad():
        mix.heads.qkv.weight.copy_(torch.cat((peer.to_q.weight, peer.to_k.weight, peer.to_v.weight)))
        mix.heads.qkv.bias.zero_()
        mix.key_rows.copy_(peer.proj_k.T)
        assert mix.value_rows is not None
        mix.value_rows.copy_(peer.proj_v.T)
    mix.heads.out.load_state_dict(peer.to_out.state_dict())
    x, context = tokens(2, 11, 16), tokens(2, size, 16, seed=2)
    torch.testing.assert_close(mix(context), peer(context), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mix(x, context=context), peer(x, context=context), rtol=1e-12, atol=1e-12)


def test_a_stack_shares_one_matrix_and_saves_it_once(tmp_path: Path) -> None:
    stack = {"dim": 16, "heads": 2, "depth": 3, "mechanism": "linformer", "max_length": 20}
    shared = Transformer(**stack, options={"rank": 5, "share": "layer"})
    matrices = {id(block.mixer.key_rows) for block in shared.blocks}
    assert len(matrices) == 1
    shared.save(tmp_path)
    loaded = Transformer.load(tmp_path)
    assert len({id(block.mixer.key_rows) for block in loaded.blocks}) == 1
    x = torch.randn(1, 20, 16)
    assert torch.equal(loaded(x), shared.eval()(x))
    apart = Transformer(**stack, options={"rank": 5, "share": "keyvalue"})
    assert len({id(block.mixer.key_rows) for block in apart.blocks}) == 3
