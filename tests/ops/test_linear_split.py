"""Linear attention by all its rules over ranks that share the sequence equals that of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from subquad import ranks
from subquad.ops import LinearState, linear_attention
from tests.together import together

B, H, K, V = 2, 2, 4, 3
SIZES = {2: ((11, 6), (1, 16)), 4: ((5, 2, 9, 1), (4, 4, 4, 5))}
RULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear_exp": {"feature_map": "relu", "normalize": False},
    "signed": {"feature_map": "identity", "eps": 0.1},
    "callable": {"feature_map": torch.square},
    "gated": {"gate": "head"},
    "channels": {"gate": "channel", "normalize": False},
    "channels_divided": {"gate": "channel", "feature_map": "elu+1", "normalize": True},
    "delta": {"rule": "delta"},
    "gated_delta": {"rule": "gated_delta", "gate": "head"},
    "channels_delta": {"rule": "gated_delta", "gate": "channel", "feature_map": "relu", "normalize": True, "eps": 0.1},
    "bidirectional": {"causal": False},
    "bidirectional_plain": {"causal": False, "feature_map": "identity", "normalize": False},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def inputs_of(length: int, rule: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = {"q": torch.randn(B, length, H, K), "k": torch.randn(B, length, H, K), "v": torch.randn(B, length, H, V)}
    if rule.get("gate") is not None:
        gate = -torch.rand(B, length, H, K) * 2
        gate[:, 3] = -torch.inf  # forgets all
        x["log_gate"] = gate if rule["gate"] == "channel" else gate[..., 0].contiguous()
    if "delta" in str(rule.get("rule")):
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        x["beta"] = torch.rand(B, length, H) * 1.5
    return {name: t.to(dtype) for name, t in x.items()}


def assert_close(found: Tensor, wanted: Tensor, part: slice = slice(None), name: str = "") -> None:
    """The part of what is wanted, within the tolerance of its largest number."""
    tolerance = TOLERANCE[found.dtype]
    most = tolerance * float(wanted.detach().abs().max().clamp(min=1))
    torch.testing.assert_close(found, wanted[:, part], rtol=tolerance, atol=most, msg=lambda m: f"{name}: {m}")


def check(name: str, sizes: tuple[int, ...], kind: str, dtype: torch.dtype) -> dict[str, int]:
    rule, rank, total = dict(RULES[name]), dist.get_rank(), sum(sizes)
    x = inputs_of(total, rule, dtype)
    rule.pop("gate", None)
    lengths = torch.tensor([total, total // 2]) if kind == "padded" else None
    cu = torch.tensor([0, 3, 3, total // 2, total]) if kind == "packed" else None
    if cu is not None:
        x = {key: t[:1] for key, t in x.items()}
    rows = B if cu is None else len(cu) - 1
    start: Any = None
    if kind in ("state", "packed") and "bidirectional" not in name:
        start = (
            torch.rand(rows, H, K, V, dtype=dtype).requires_grad_(),
            torch.rand(rows, H, K, dtype=dtype).requires_grad_(),
        )
    ends = start is not None
    whole: dict[str, Any] = {key: t.clone().requires_grad_() for key, t in x.items()}
    how: dict[str, Any] = {"initial_state": LinearState(*start), "return_state": True} if start else {}
    expected = linear_attention(**whole, **rule, **how, lengths=lengths, cu_seqlens=cu)
    own: dict[str, Any] = {
        key: ranks.shard(t, dist.group.WORLD, sizes=sizes)[0].clone().requires_grad_() for key, t in x.items()
    }
    _, part_lengths, part_cu = ranks.shard(x["q"], dist.group.WORLD, sizes=sizes, lengths=lengths, cu_seqlens=cu)
    own_start = tuple(t.detach().clone().requires_grad_() for t in start) if start else ()
    how = {"initial_state": LinearState(*own_start), "return_state": True} if start else {}
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        found = linear_attention(**own, **rule, **how, lengths=part_lengths, cu_seqlens=part_cu)
    o, state = found if ends else (found, ())
    wanted, last = expected if ends else (expected, ())
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    assert_close(o, wanted, part)
    for one, other in zip(state, last, strict=True):
        assert_close(one, other)
    torch.manual_seed(7)
    weight = torch.randn_like(wanted)
    states = [torch.randn_like(t) for t in last]
    # every rank reads the last state, with a weight of its own
    loss = (o * weight[:, part]).sum()
    loss = loss + sum((t * w).sum() * (rank + 1) for t, w in zip(state, states, strict=True))
    loss.backward()
    many = sum(range(1, len(sizes) + 1))
    ((wanted * weight).sum() + sum((t * w).sum() * many for t, w in zip(last, states, strict=True))).backward()
    for key, t in own.items():
        assert_close(t.grad, whole[key].grad, part, key)
    for one, other in zip(own_start, start or (), strict=True):
        grad = torch.zeros_like(one) if one.grad is None else one.grad
        dist.all_reduce(grad)
        wished = torch.zeros_like(other) if other.grad is None else other.grad
        assert_close(grad, wished)
    return dict(group.sent)


def check_sixteen_bits(name: str, sizes: tuple[int, ...]) -> None:
    """At most twice the error of one rank, both against float64."""
    rule, rank = dict(RULES[name]), dist.get_rank()
    x = {key: t.to(torch.bfloat16) for key, t in inputs_of(sum(sizes), rule, torch.float32).items()}
    rule.pop("gate", None)
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def gradients(x: dict[str, Tensor], cut: slice = slice(None)) -> list[Tensor]:
        own = {key: t[:, cut].clone().requires_grad_() for key, t in x.items()}
        o: Any = linear_attention(**own, **rule)  # type: ignore[call-overload]
        o.backward(torch.ones_like(o))
        return [o.detach(), *(t.grad for t in own.values() if t.grad is not None)]

    exact, plain = gradients({key: t.double() for key, t in x.items()}), gradients(x)
    with ranks.sequence_parallel(dist.group.WORLD):
        found = gradients(x, part)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        squares = torch.stack([(one - wanted[:, part]).square().sum(), (other - wanted)[:, part].square().sum()])
        dist.all_reduce(squares)
        assert squares[0] <= 4 * squares[1] + 1e-6 * wanted.square().sum()


@pytest.mark.parametrize("name", RULES)
def test_the_parts_equal_the_whole(name: str) -> None:
    for kind in ("plain", "padded", "state", "packed"):
        together(2).run(check, name, SIZES[2][0], kind, torch.float64)
    together(2).run(check, name, SIZES[2][1], "padded", torch.float32)
    together(4).run(check, name, SIZES[4][0], "padded", torch.float64)
    together(4).run(check, name, SIZES[4][1], "packed", torch.float32)


@pytest.mark.parametrize("name", ["linear", "gated", "channels", "gated_delta", "bidirectional"])
def test_sixteen_bits_lose_no_more_than_on_one_rank(name: str) -> None:
    together(2).run(check_sixteen_bits, name, (40, 33))


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("name", ["linear", "gated", "channels", "delta", "channels_delta", "bidirectional"])
def test_the_bytes_do_not_depend_on_the_length(name: str, world: int) -> None:
    few, many = (
        together(world).run(check, name, tuple(n * f for n in SIZES[world][1]), "plain", torch.float32) for f in (1, 5)
    )
    assert few == many
    columns = V + 1 if name not in ("channels", "delta") else V
    state, by = B * H * K * columns, {"gated": B * H, "channels": B * H * K}.get(name, 0)
    by = B * H * K * K if "delta" in name else by
    if name == "bidirectional":
        assert few[0] == {"states": 2 * (2 * state * (world - 1) // world) * 4}  # forward and backward
    else:
        assert few[0] == {"states": (world - 1) * (2 * state + by) * 4}
