"""Softmax over keys in another order than time's: reformer, routing, sinkhorn and clustered."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.ops.clusters import (
    balanced,
    cluster_means,
    cluster_sums,
    half_bits,
    hamming_clusters,
    hamming_codes,
    nearest,
    sign_bits,
)
from subquad.ops.ordered import (
    Order,
    Rule,
    by_asking,
    by_blocks,
    by_lists,
    by_place,
    by_rank,
    ordered_attention,
    to_lists,
)

from . import mechanism_times
from .bench import DEVICE, Case, Verdict, draw, error, poison

KINDS = ("rank", "rank1", "ahead", "place", "asking", "lists", "tolists", "blocks")
SLACK = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 3e-5}


def attention(seed: int, longest: int = 700) -> Verdict:
    """One drawn case: values, gradients, and the same bits a second time."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    kind = KINDS[seed // 3 % len(KINDS)]
    width = rng.choice([16, 24, 64, 64, 80, 128, *([256, 200] if dtype != torch.float32 else [])])
    batch, heads, length = rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 63, 64, 65, 200, 257, 700])
    rounds = rng.choice([1, 2, 4]) if kind in ("rank", "ahead", "place") else 1
    buckets, chunk = rng.choice([1, 4, 8]), rng.choice([5, 16, 64, 100])
    length = min(length, longest)
    if kind == "blocks":
        chunk = rng.choice([16, 64, 100])
        length = chunk * rng.randint(1, max(1, min(6, longest // chunk)))

    def make(tokens: int) -> Tensor:
        return draw(batch, tokens, heads, width, dtype=dtype)

    def bucket(many: int) -> Tensor:
        drawn = torch.randint(0, buckets, (batch, heads, many, length), device=DEVICE)
        if rng.random() < 0.5 and length > 4:
            drawn[0, :, :, length - length // 3 :] = -1  # padding
        return drawn

    def pick(most: int) -> Tensor:
        return torch.rand(batch, heads, buckets, length, device=DEVICE).argsort(-1)[..., :most].int()

    def strided() -> Tensor:
        together = draw(batch, length, 3, heads, width, dtype=dtype)
        return together[:, :, 0] if rng.random() < 0.5 else make(length)

    q, k, v = strided(), strided(), strided()
    given: list[Tensor] = [q, k, v]
    scale = width**-0.5
    order: Order
    if kind in ("rank", "ahead", "place"):
        given = [q, v]  # keys are the queries
        rule = Rule(causal=True, ahead=kind == "ahead", apart=True, unit=True)
        if kind == "rank":
            order = by_rank(bucket(rounds), buckets, chunk)
        else:
            order = by_place(bucket(rounds), buckets, chunk, kind == "ahead")
            rule = rule._replace(causal=kind == "place")
    elif kind == "rank1":
        given, order, rule = [q, v], by_rank(bucket(1), buckets, chunk), Rule(causal=True, scale=scale)
    elif kind == "asking":
        order, rule = by_asking(bucket(1), bucket(1), buckets, chunk), Rule(causal=True, scale=scale)
    elif kind == "lists":
        asking, asked = pick(min(length, rng.choice([1, 40, 128]))), pick(min(length, rng.choice([7, 64, 128])))
        if rng.random() < 0.5:
            asking[..., asking.shape[-1] // 2 + 1 :] = -1
        order, rule = by_lists(asking, asked), Rule(causal=rng.random() < 0.5, scale=scale)
    elif kind == "tolists":
        size = rng.choice([3, 32, 100])
        given = [q, make(buckets * size), make(buckets * size)]
        keys = torch.arange(buckets * size, device=DEVICE).view(buckets, size).expand(batch, heads, -1, -1).clone()
        if rng.random() < 0.5:
            keys[..., size // 2 + 1 :] = -1
        order, rule = to_lists(bucket(1)[:, :, 0], keys), Rule(once=True, scale=scale)
    else:
        given = [q, make(2 * length), make(2 * length)]
        first = rng.random() < 0.5
        order = by_blocks((batch, heads), length // chunk, chunk, first, torch.device(DEVICE))
        rule = Rule(causal=rng.random() < 0.5, scale=scale)
    weight = draw(*q.shape, dtype=dtype)

    def run(wide: torch.dtype, impl: Any) -> list[Tensor]:
        leaves = [t.detach().to(wide).requires_grad_() for t in given]
        o = ordered_attention(leaves[0], leaves[1] if len(leaves) == 3 else None, leaves[-1], order, rule, impl=impl)
        return [o.detach(), *torch.autograd.grad((o * weight.to(wide)).sum(), leaves)]

    exact, plain = run(torch.float64, "torch"), run(dtype, "torch")
    poison()
    ours, again = run(dtype, "triton"), run(dtype, "triton")
    names = ("o", "dq", "dk", "dv") if len(given) == 3 else ("o", "dq", "dv")
    found = Verdict()
    shift = 1e-3 * float(weight.double().norm())  # a gradient of about 0 has no digits
    for name, a, b, p, e in zip(names, ours, again, plain, exact, strict=True):
        found.compare(name, a, p, e, slack=SLACK[dtype], least=1e-9 if name == "o" else shift)
        found.expect(f"{name} differs the second time", torch.equal(a, b))
    text = f"{kind} {dtype} B{batch} T{length} H{heads} D{width} rounds {rounds} buckets {buckets} chunk {chunk}"
    found.wrong = [f"{wrong} ({text})" for wrong in found.wrong]
    return found


def clusters(dtype: torch.dtype, width: int, count: int) -> Verdict:
    """Labels may differ where two products are equal but for rounding: at most one of a thousand."""
    found, batch, length, heads = Verdict(), 2, 700, 3
    x, centroids = draw(batch, length, heads, width, dtype=dtype), draw(heads, 2, count, width, dtype=dtype)
    lengths = torch.tensor([length, 90], device=DEVICE)
    counted = torch.arange(length, device=DEVICE) < lengths[:, None, None]
    for signed in (False, True):
        ours = nearest(x, centroids, signed=signed, impl="triton").long()
        theirs = nearest(x, centroids, signed=signed, impl="torch")
        found.bound(f"nearest signed={signed}", float((ours != theirs).double().mean()), 1e-3)
    label = torch.randint(-1, count, (batch, heads, length), device=DEVICE)
    poison()
    sums, sizes = cluster_sums(x, label, count)
    means, true_sizes = cluster_means(x.double().transpose(1, 2), label, count)
    found.within("sums", sums, means * true_sizes[..., None], 1e-5)
    found.expect("sizes", bool((sizes == true_sizes).all()))
    grid, window = 2.0**-11.5, 100
    ours = balanced(x, centroids[:, 0].contiguous(), window, grid, lengths)
    near = torch.einsum("hck,bthk->bhct", centroids[:, 0].float(), x.float())
    steps = (near / grid).round().masked_fill(~counted[:, :, None], -torch.inf)
    best = steps.sort(dim=-1, descending=True, stable=True).indices[..., :window]
    wanted = torch.where(steps.gather(-1, best) == -torch.inf, -1, best).sort(-1).values
    found.bound("balanced", float((ours.long().sort(-1).values != wanted).double().mean()), 1e-3)
    planes = draw(63, width + 1, dtype=dtype)
    _, codes = hamming_codes(half_bits(x, planes), 8, 5, lengths)
    _, plain = hamming_clusters(sign_bits(x.transpose(1, 2), planes), 8, 5, lengths[:, None].expand(-1, heads))
    bar = 1e-3 if dtype == torch.float32 else 0.5  # one bit that differs moves a centroid, and its tokens
    found.bound("hamming", float((codes != plain)[counted.expand_as(codes)].double().mean()), bar)
    return found


def mechanism(name: str, options: dict[str, Any], length: int, ragged: bool) -> Verdict:
    """Values, all gradients and steps in float32 against float64; a hash may differ where a product is about 0."""
    torch.manual_seed(0)
    impl = "auto" if name == "sinkhorn" and ragged else "triton"
    fast = subquad.build(name, dim=96, heads=3, impl=impl, **options).to(DEVICE).train()
    slow = subquad.build(name, dim=96, heads=3, impl="torch", **options).to(DEVICE).double().train()
    slow.load_state_dict(fast.state_dict())
    x, weight = draw(3, length, 96), draw(3, length, 96)
    lengths = torch.tensor([length, length // 2, 1], device=DEVICE) if ragged else None
    poison()

    def run(mix: Any, given: Tensor) -> dict[str, Tensor]:
        if name == "sinkhorn":
            mix.eval()  # in training it draws noise
        given = given.clone().requires_grad_()
        y = mix(given, lengths=lengths)
        (y * weight.to(y.dtype)).sum().backward()
        assert given.grad is not None
        return {"y": y.detach(), "dx": given.grad, **{n: p.grad for n, p in mix.named_parameters()}}

    found, ours, exact = Verdict(), run(fast, x), run(slow, x.double())
    for key, value in ours.items():
        found.within("y" if key == "y" else "gradients", value, exact[key], 2e-3)
    if fast.traits.state is not None and lengths is None:
        fast.eval()
        with torch.no_grad():
            wanted = fast(x)
            y, state = fast.prefill(x[:, : length // 2])
            made = [y]
            for t in range(length // 2, length):
                y, state = fast.step(x[:, t], state, inplace=t % 2 == 0)
                made.append(y[:, None])
            found.bound("steps", error(torch.cat(made, 1), wanted), 2e-3)
    return found


MECHANISMS: list[tuple[str, dict[str, Any], int, bool]] = [
    ("reformer", {"causal": True, "rounds": 3, "chunk": 16, "buckets": 4}, 150, False),
    ("reformer", {"causal": True, "buckets": (2, 4), "rotary": True}, 200, True),
    ("reformer", {"rounds": 2, "chunk": 32, "buckets": 4}, 150, True),
    ("reformer", {"causal": True, "strict_causal": False}, 300, False),
    ("routing", {"causal": True, "clusters": 4, "window": 16}, 150, False),
    ("routing", {"causal": True, "clusters": 4, "window": 16, "share_qk": False}, 150, False),
    ("routing", {"clusters": 8, "window": 40}, 300, True),
    ("routing", {"clusters": 4, "window": 200}, 150, False),
    ("sinkhorn", {"causal": True, "block": 32}, 160, False),
    ("sinkhorn", {"block": 64, "rotary": True}, 256, False),
    ("sinkhorn", {"block": 64}, 200, True),
    ("clustered", {"clusters": 8, "topk": 8}, 300, True),
    ("clustered", {"clusters": 8, "improved": False}, 300, False),
    ("clustered", {"causal": True}, 300, False),
    ("clustered", {"causal": True, "improved": False, "clusters": 20, "block": 32}, 300, True),
]
CHECKS = [
    *(Case("ordered", mechanism, given) for given in MECHANISMS),
    *(Case("ordered", attention, (seed,)) for seed in range(60)),
    *(
        Case("ordered", clusters, given)
        for given in itertools.product((torch.bfloat16, torch.float32), (64, 20), (16, 100))
    ),
]  # fmt: skip


def timed(time: Callable[..., Any], length: int, *given: Any) -> list[Case]:
    """With as many clusters of routing as give windows of 128 tokens."""
    routing = {"clusters": length // 128, "window": 128}
    return [
        Case("ordered", time, (name, *given, routing if name == "routing" else None))
        for name in ("reformer", "routing", "sinkhorn", "clustered")
        if time is mechanism_times.training or name in ("reformer", "routing")
    ]


TIMES = [
    *(one for causal in (True, False) for one in timed(mechanism_times.training, 16384, 16384, causal)),
    *(one for batch in (4, 64) for one in timed(mechanism_times.decoding, 16384, batch)),
    *(one for causal in (True, False) for one in timed(mechanism_times.training, 65536, 65536, causal)),
]
