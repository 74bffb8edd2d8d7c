"""Steps over a pattern's cache, of transformer_xl's ring and of compressed's slots, and of the mechanisms with them."""

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad import LanguageModel
from subquad.models.state import leaves
from subquad.ops.slots import Convolution, Slots, slots_step
from subquad.ops.sparse.cache import SparseCache
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Random, Strided, Summary
from subquad.ops.sparse.relative_step import relative_step

from . import mechanism_times
from .bench import DEVICE, Case, Verdict, capture, draw, error, poison

HEADS = 4
PATTERNS: dict[str, Any] = {
    "local5": Local(5, 0),
    "local128": Local(128, 0),
    "local700": Local(700, 0),
    "longformer": Local(256, 0) | Global(3),
    "dilated": [
        Dilated(60, 3) | Global(1),
        Dilated(60, 3) | Global(1),
        Local(60) | Global(1),
        Dilated(7, 5) | Global(1),
    ],
    "strided": Local(128, 0) | Strided(128),
    "fixed": [Block(128) | Summary(128, 32, n) for n in (0, 0, 1, 2)],
    "fixed_heads": [Block(64), Block(64), Summary(64, 16), Summary(64, 16, 1)],
    "bigbird": [
        Block(64, 1) | Global(64) | Random(3, 64, 1_000_003 * 7 + 2**40, h, apart=2, first=1) for h in range(HEADS)
    ],
    "summary_global": [Local(9) | Global(4) | Summary(5, 2)] * HEADS,
    "dense": Dense(),
}
TYPES = (
    (torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 48), (torch.float16, 128), (torch.bfloat16, 16),
    (torch.bfloat16, 256),
)  # fmt: skip


def slack(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-4


def pattern(name: str, dtype: torch.dtype, width: int, seed: int, longest: int = 2500) -> Verdict:
    """Six steps of rows of different lengths, in place or not; slots that nothing was written to hold NaN."""
    torch.manual_seed(seed)
    found, cache, batch = Verdict(), SparseCache(PATTERNS[name]), 5
    value_width = 40 if width == 64 else width
    position = torch.randint(0, longest, (batch,))
    position[0], position[1] = 0, 1
    tokens = int(position.max())
    empty = cache.empty(batch, HEADS, width, tokens + 40, torch.empty(0, device=DEVICE, dtype=dtype))
    shape = *empty.k.shape[:3], value_width
    unwritten = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    empty = empty._replace(k=torch.full_like(empty.k, torch.nan), v=unwritten)
    k, v = (draw(batch, tokens, HEADS, w, dtype=dtype) for w in (width, value_width))
    state = cache.extend(empty, k, v, position.to(DEVICE))
    exact = state._replace(
        k=state.k.double().nan_to_num(0.0), v=state.v.double().nan_to_num(0.0), position=state.position.clone()
    )
    plain = state._replace(k=exact.k.to(dtype), v=exact.v.to(dtype), position=state.position.clone())
    for n in range(6):
        q, k, v = draw(batch, 3 * HEADS, max(width, value_width), dtype=dtype).chunk(3, 1)
        q, k, v = q[..., :width], k[..., :width], v[..., :value_width]
        poison()
        o, state = cache.step(q, k, v, state, inplace=bool(n % 3), impl="triton")
        true, exact = cache.step(q.double(), k.double(), v.double(), exact, impl="torch")
        rough, plain = cache.step(q, k, v, plain, impl="torch")
        found.compare("o", o, rough, true, slack=slack(dtype))
        found.expect("position", torch.equal(state.position, exact.position))
    found.expect("cache", torch.equal(state.k.double().nan_to_num(0.0), exact.k))
    return found


def relative(dtype: torch.dtype, width: int, back: int) -> Verdict:
    found, batch = Verdict(), 5
    bias = draw(HEADS, width, dtype=dtype), draw(HEADS, width, dtype=dtype), draw(back + 1, HEADS, width, dtype=dtype)
    ring = [draw(batch, back, HEADS, width, dtype=dtype) for _ in range(2)]
    position = torch.tensor([0, 3, back, 5 * back + 1, 9], device=DEVICE)
    mine, plain = ([*(t.clone() for t in ring), position.clone()] for _ in range(2))
    exact = [*(t.double() for t in ring), position.clone()]
    u, w, far = (t.double() for t in bias)
    for _ in range(4):
        q, k, v = draw(batch, 3 * HEADS, width, dtype=dtype).chunk(3, 1)
        poison()
        o = relative_step(q, k, v, mine[0], mine[1], mine[2], bias, width**-0.5, impl="triton")
        true = relative_step(
            q.double(), k.double(), v.double(), exact[0], exact[1], exact[2], (u, w, far), width**-0.5, impl="torch"
        )
        rough = relative_step(q, k, v, plain[0], plain[1], plain[2], bias, width**-0.5, impl="torch")
        found.compare("o", o, rough, true, slack=slack(dtype))
        found.expect("state", all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True)))
    return found


def slots(dtype: torch.dtype, width: int, stride: int) -> Verdict:
    found, batch = Verdict(), 6
    pair = [
        Convolution(draw(HEADS * width, width, stride, dtype=dtype) / 10, draw(HEADS * width, dtype=dtype))
        for _ in range(2)
    ]
    wide = [Convolution(*(t.double() for t in one)) for one in pair]
    nothing = draw(HEADS, width, dtype=dtype) if stride > 1 else None
    mine = [
        Slots(draw(batch, 12, HEADS, width, dtype=dtype), draw(batch, stride - 1, HEADS, width, dtype=dtype))
        for _ in range(2)
    ]
    exact = [Slots(*(t.double() for t in one)) for one in mine]
    position = torch.arange(batch, device=DEVICE)
    position_exact = position.clone()
    bar = 1e-5 if dtype == torch.float32 else 5e-3
    for _ in range(5):
        k, v = draw(2, batch, HEADS, width, dtype=dtype)
        poison()
        count = slots_step(k, v, mine[0], mine[1], position, pair[0], pair[1], nothing, impl="triton")
        more = None if nothing is None else nothing.double()
        true = slots_step(
            k.double(), v.double(), exact[0], exact[1], position_exact, wide[0], wide[1], more, impl="torch"
        )
        for ours, theirs in zip(mine, exact, strict=True):
            for name, a, b in zip(ours._fields, ours, theirs, strict=True):
                if b.numel():
                    found.within(name, a, b, bar)
        found.expect("count", torch.equal(count, true))
        found.expect("position", torch.equal(position, position_exact))
    return found


def mechanism(name: str, options: dict[str, Any]) -> Verdict:
    """Captured steps after a prompt against forward in float64; forward itself is the plain path."""
    batch, prompt, steps, found = 3, 700, 24, Verdict()
    torch.manual_seed(0)
    base = subquad.build(name, dim=256, heads=4, causal=True, **options).eval().to(DEVICE)
    x = draw(batch, prompt + steps, 256)
    lengths, rows = torch.tensor([prompt, prompt - 5, 300], device=DEVICE), torch.arange(batch, device=DEVICE)
    with torch.no_grad():
        exact = base.double()(x.double())
        base.float()
        for dtype in (torch.float32, torch.bfloat16):
            mix = subquad.build(name, dim=256, heads=4, causal=True, **options).eval().to(DEVICE)
            mix.load_state_dict(base.state_dict())
            mix, y = mix.to(dtype), x.to(dtype)
            _, state = mix.prefill(y[:, :prompt], lengths, mix.init_state(batch, prompt + steps))
            at = state.position.clone()
            token = y[rows, at].clone()
            step = capture(lambda: mix.step(token, state, inplace=True)[0], list(state))  # noqa: B023
            forward, errors, allowed = mix(y), [], []
            for n in range(steps):
                token.copy_(y[rows, at + n])
                errors.append(error(step(), exact[rows, at + n]))
                allowed.append(error(forward[rows, at + n], exact[rows, at + n]))
            worst = max(errors, key=lambda e: (e != e, e))  # NaN is the worst
            found.bound(f"{str(dtype).removeprefix('torch.')} steps", worst, 2.5 * max(allowed) + 1e-5)
    return found


def model(name: str, positions: str) -> Verdict:
    """Captured steps of a model, whose projections are fused with the step, against its forward in float32."""
    torch.manual_seed(0)
    made = LanguageModel(vocab=31, dim=256, depth=2, heads=4, mechanism=name, positions=positions).eval().to(DEVICE)
    tokens, found = torch.randint(31, (3, 420), device=DEVICE), Verdict()
    with torch.no_grad():
        exact = made(tokens)
        room = made.init_state(3, tokens.shape[1])  # a captured step cannot make a cache longer
        _, state = made.prefill(tokens[:, :400], state=room)
        _, state = made.step(tokens[:, 400], state)
        token = tokens[:, 401].clone()
        step = capture(lambda: made.step(token, state, inplace=True)[0], [t for _, t in leaves(state)])
        for t in range(401, 420):
            token.copy_(tokens[:, t])
            found.within("logits", step(), exact[:, t], 1e-4)
    return found


def compiled(name: str) -> Verdict:
    """A step under torch.compile against one that is not compiled."""
    found = Verdict()
    mix = subquad.build(name, dim=256, heads=4, causal=True).eval().to(DEVICE, torch.bfloat16)
    x = draw(3, 600, 256, dtype=torch.bfloat16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, ours = mix.prefill(x, None, mix.init_state(3, 700))
        theirs = type(ours)(*(t.clone() for t in ours))

        def step(token: Tensor, state: Any) -> Any:
            return mix.step(token, state, inplace=True)

        fast = torch.compile(step)
        for t in range(4):
            y, ours = step(x[:, t], ours)
            z, theirs = fast(x[:, t], theirs)
            found.within("y", z, y, 0.02)
        found.expect("position", torch.equal(ours.position, theirs.position))
    return found


MECHANISMS: list[tuple[str, dict[str, Any]]] = [
    ("local", {}), ("strided", {}), ("fixed", {}), ("longformer", {}), ("bigbird", {}), ("compressed", {}),
    ("transformer_xl", {}), ("mixed", {}),
    ("local", {"rotary": True}), ("fixed", {"combine": "heads"}), ("compressed", {"rotary": True}),
]  # fmt: skip
MODELS = (
    ("local", "rotary"), ("fixed", "rotary"), ("bigbird", "sinusoidal"), ("transformer_xl", "sinusoidal"),
    ("compressed", "sinusoidal"),
)  # fmt: skip
SLOTS = ((torch.bfloat16, 64, 3), (torch.float32, 64, 3), (torch.bfloat16, 40, 4), (torch.float32, 128, 1))
CHECKS = [
    *(Case("steps", compiled, (name,)) for name in ("softmax", "local", "compressed", "transformer_xl")),
    *(Case("steps", mechanism, given) for given in MECHANISMS),
    *(Case("steps", model, given) for given in MODELS),
    *(
        Case("steps", pattern, (name, *given, n))
        for n, (name, given) in enumerate(itertools.product(PATTERNS, TYPES))
    ),
    *(
        Case("steps", relative, (*given, back))
        for given in ((torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 40))
        for back in (7, 512)
    ),
    *(Case("steps", slots, given) for given in SLOTS),
]  # fmt: skip
TIMED = (
    "softmax", "linear", "local", "longformer", "transformer_xl", "strided", "bigbird", "fixed", "compressed", "mixed",
)  # fmt: skip
TIMES = [Case("steps", mechanism_times.decoding, (name, batch)) for batch in (4, 64) for name in TIMED]
