import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.mechanisms import MECHANISMS
from subquad.models import LanguageModel, Transformer, TransformerConfig, blocks, transformer
from subquad.models.blocks import FeedForward, Waiting, mean_pool, settled, shorten
from subquad.ops.layer_norm import Drop


def gradients(model: torch.nn.Module, y: Tensor) -> dict[str, Tensor]:
    """The parameters' gradients for one fixed direction of y."""
    model.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_position": "post", "final_norm": False},
        {"norm_position": "post", "autocast": True},
        {"norm": "rms", "checkpoint": True, "activation": "relu"},
        {"checkpoint": 2, "depth": 3, "ff_chunks": 2},
        {"final_norm": False, "activation": "swiglu"},
        {"taps": (1, 2), "rotary": True, "ff_chunks": 2},
        {"cross": "softmax"},
        {"pool": (1, 2), "causal": False},
        {"pool": (1, 2, 1), "causal": False, "rotary": True, "depth": 5, "checkpoint": 3},
        {"reversible": True},
    ],
)
def test_the_passes_of_a_gpu_give_the_same_model(
    fields: dict[str, Any], prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the torch path of their operations, whose kernels have their own tests."""
    torch.manual_seed(0)
    fields = dict(fields)
    autocast = fields.pop("autocast", False)
    model = Transformer(**{"dim": 8, "heads": 2, "depth": 2, "mechanism": "linear", "causal": True, **fields})
    model = model if autocast else model.double()
    x, memory = (torch.randn(2, size, 8).to(model.dtype) for size in (6, 3))
    given = {"memory": memory} if "cross" in fields else {}
    if prefill and not model.config.causal:
        pytest.skip("it has no state")

    @torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    def run() -> list[Tensor]:
        if not prefill:
            y = model(x, **given)
            return [y.detach(), *gradients(model, y).values()]
        y, state = model.prefill(x, **given)
        return [y, model.step(x[:, 0], state, **given)[0]]

    want = run()
    used: list[tuple[Any, ...]] = []

    def yes(*given: Any) -> bool:
        used.append(given)
        return True

    for module in (blocks, transformer):
        monkeypatch.setattr(module, "fuses", yes)
    monkeypatch.setattr(blocks, "replaces", yes)
    for a, b in zip(run(), want, strict=True):
        torch.testing.assert_close(a, b)
    assert used


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_feed_forward_is_its_formula(activation: str) -> None:
    ff = FeedForward(TransformerConfig(dim=6, heads=2, activation=activation, ff_dim=10)).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    h = x @ ff.inner.weight.T + ff.inner.bias
    if activation == "relu":
        h = h.clamp(min=0)
    elif activation == "gelu":
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    else:
        h = h[..., :10] * h[..., :10].sigmoid() * h[..., 10:]
    torch.testing.assert_close(ff(x), h @ ff.out.weight.T + ff.out.bias)


def test_feed_forward_widths() -> None:
    assert TransformerConfig(dim=96).ff_width == 384
    assert TransformerConfig(dim=96, activation="swiglu").ff_width == 256
    assert TransformerConfig(dim=96, ff_dim=7).ff_width == 7


@pytest.mark.parametrize("chunks", [2, 3, 20])
def test_chunked_feed_forward_is_the_whole(chunks: int) -> None:
    plain = Transformer(dim=8, heads=2, depth=2, dropout=0.2).double()
    chunked = Transformer(dim=8, heads=2, depth=2, dropout=0.2, ff_chunks=chunks).double()
    chunked.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    results = []
    for model in (plain, chunked):
        torch.manual_seed(3)
        y = model(x)
        results.append((y, gradients(model, y)))
    torch.testing.assert_close(results[0], results[1])
    with torch.no_grad():
        torch.testing.assert_close(chunked.eval()(x), plain.eval()(x))


def saved_bytes(model: torch.nn.Module, x: Tensor) -> int:
    """Bytes that backward keeps, counting a storage once and parameters not at all."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held = []  # so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert y.requires_grad
    return sum(kept.values())


def test_chunks_and_checkpoints_keep_less() -> None:
    x = torch.randn(2, 64, 8, requires_grad=True)
    wide = {"dim": 8, "heads": 2, "depth": 4, "ff_dim": 256}
    plain = saved_bytes(Transformer(**wide), x)
    chunked = saved_bytes(Transformer(**wide, ff_chunks=4), x)
    checkpointed = saved_bytes(Transformer(**wide, checkpoint=True), x)
    assert chunked < plain - 4 * 2 * 64 * 256 * 4  # at least one wide tensor per layer
    assert checkpointed <= 4 * 2 * 64 * 8 * 4 * 2 + 4096  # the inputs of each block and of the last norm


@pytest.mark.parametrize("mechanism", ["softmax", "linear, local", "routing"])
@pytest.mark.parametrize("cross", [None, "additive"])
@pytest.mark.parametrize("checkpoint", [True, 2])
def test_checkpointed_is_plain(mechanism: str, cross: str | None, checkpoint: bool | int) -> None:
    fields = {"dim": 8, "heads": 2, "depth": 3, "mechanism": mechanism, "causal": True, "cross": cross}
    fields |= {"dropout": 0.2, "ff_dropout": 0.1, "attention_dropout": 0.1}
    plain, saver = Transformer(**fields).double(), Transformer(**fields, checkpoint=checkpoint).double()
    saver.load_state_dict(plain.state_dict())
    x, lengths = torch.randn(2, 7, 8, dtype=torch.float64), torch.tensor([7, 4])
    memory = None if cross is None else torch.randn(2, 5, 8, dtype=torch.float64)
    results = []
    for model in (plain, saver):
        torch.manual_seed(3)
        y = model(x, lengths, memory)
        results.append((y, gradients(model, y)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that live, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                self.add(tensor.untyped_storage())
        self.most = max(self.most, self.bytes)
        return made

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def free(_: Any) -> None:
            del self.known[key]
            self.bytes -= size

        self.known[key] = weakref.ref(storage, free)
        self.bytes += size


def alive(**fields: Any) -> tuple[int, int]:
    """(bytes that live after a forward, the most during it and the backward) of a language model in bfloat16."""
    model = LanguageModel(vocab=16, dim=16, heads=2, mechanism="linear", ff_chunks=8, **fields)
    tokens = torch.randint(16, (1, 4097))
    with Alive() as count:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens)
        after = count.bytes
        loss.backward()
    return after, count.most


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_checkpoint_keeps_one_tensor_of_each_block(gpu: bool, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a block passes on two, which add up to its output; they are not both kept."""
    if gpu:
        for module in (blocks, transformer):
            monkeypatch.setattr(module, "fuses", lambda *_: True)
        monkeypatch.setattr(blocks, "replaces", lambda *_: True)
    one, fields = 4096 * 16 * 4, {"norm_position": position}
    few, many, groups = (alive(depth=d, checkpoint=kept, **fields) for d, kept in ((6, True), (10, True), (10, 6)))
    for at in (0, 1):  # after the forward, and at most; weights are small beside one
        assert many[at] - few[at] == pytest.approx(4 * one, abs=one / 4)
        assert many[at] - groups[at] == pytest.approx(4 * one, abs=one / 4)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(size=st.integers(1, 9), pool=st.integers(1, 5), data=st.data())
def test_mean_pool_ignores_padding(size: int, pool: int, data: st.DataObject) -> None:
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=3)))
    x = torch.randn(len(lengths), size, 2, dtype=torch.float64)
    pooled, short = mean_pool(x, lengths, pool), shorten(lengths, pool)
    assert short is not None
    assert pooled.shape == (len(lengths), -(-size // pool), 2)
    for b, n in enumerate(lengths.tolist()):
        groups = [x[b, i : min(i + pool, n)].mean(0) for i in range(0, n, pool)]
        assert len(groups) == short[b]
        for i, group in enumerate(groups):
            torch.testing.assert_close(pooled[b, i], group)
        assert (pooled[b, len(groups) :] == 0).all()
    torch.testing.assert_close(mean_pool(x, None, pool), mean_pool(x, torch.full_like(lengths, size), pool))


def test_pooled_queries_attend_to_everything() -> None:
    model = Transformer(dim=8, heads=2, depth=1, pool=2, mechanism="linear").double().eval()
    block = model.blocks[0]
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    short = torch.stack((x[0, :2].mean(0), x[0, 2:4].mean(0), x[0, 4]))[None]
    norm = block.mixer_residual.norm
    h = short + block.mixer(norm(short), context=norm(x))
    h = h + block.ff(block.ff_residual.norm(h))
    torch.testing.assert_close(model(x), model.norm(h))


def test_mixers_without_cross_attention_are_pooled_after_mixing() -> None:
    for fields in ({"mechanism": "local"}, {"rotary": True}):
        model = Transformer(dim=8, heads=2, depth=1, pool=2, **fields).double().eval()
        block = model.blocks[0]
        x = torch.randn(1, 4, 8, dtype=torch.float64)
        y = x + block.mixer(block.mixer_residual.norm(x))
        h = y.view(1, 2, 2, 8).mean(2)
        h = h + block.ff(block.ff_residual.norm(h))
        torch.testing.assert_close(model(x), model.norm(h))


@pytest.mark.parametrize("name", [name for name, cls in MECHANISMS.items() if cls.traits.bidirectional])
def test_a_pooling_layer_trains_every_parameter(name: str) -> None:
    """A parameter that never gets a gradient would stop data-parallel training."""
    model = Transformer(dim=8, heads=2, depth=1, pool=2, mechanism=name, max_length=12)
    model(torch.randn(2, 12, 8), lengths=torch.tensor([12, 7])).sum().backward()
    assert [found for found, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_order_of_norms(norm: str, position: str) -> None:
    model = Transformer(dim=8, heads=2, depth=2, norm=norm, norm_position=position, activation="relu").double().eval()
    h = x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert isinstance(model.norm, torch.nn.LayerNorm if norm == "layer" else torch.nn.RMSNorm)
    for block in model.blocks:
        first, second = block.mixer_residual.norm, block.ff_residual.norm
        if position == "pre":
            h = h + block.mixer(first(h))
            h = h + block.ff(second(h))
        else:
            h = first(h + block.mixer(h))
            h = second(h + block.ff(h))
    torch.testing.assert_close(model(x), model.norm(h))
    model.norm = torch.nn.Identity()
    torch.testing.assert_close(model(x), h)
    assert isinstance(Transformer(dim=8, heads=2, depth=1, final_norm=False).norm, torch.nn.Identity)


def test_a_branch_that_no_kernel_adds_is_dropped_all_the_same() -> None:
    torch.manual_seed(0)
    (x,) = settled(Waiting(torch.ones(1000, 64), torch.ones(1000, 64), Drop(0.25, torch.tensor([7]))))
    assert set(x.unique().tolist()) == {1.0, float(1 + torch.tensor(1 / 0.75))}
    assert abs(float((x == 1).float().mean()) - 0.25) < 0.01
