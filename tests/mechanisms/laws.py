"""The laws of the contract as functions of a case, so that they can run over MECHANISMS and over planted bugs."""

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Mixer, Traits
from subquad.mechanisms.compressed import Compressed
from subquad.mechanisms.efficient import Efficient
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.linformer import Linformer
from subquad.mechanisms.local import Local
from subquad.mechanisms.mixed import Mixed
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.patterned import Patterned
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.recurrent import Recurrent
from subquad.mechanisms.rfa import RFA
from subquad.mechanisms.routing import Routing
from subquad.mechanisms.sinkhorn import Sinkhorn
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.transformer_xl import TransformerXL

DIM, HEADS, T = 32, 4, 41  # 41 tokens: no block divides them


class Case(NamedTuple):
    cls: type[Mixer]
    options: dict[str, Any]
    length: int = T  # of the sequences in the laws, at least 34

    @property
    def dim(self) -> int:
        return int(self.options["dim"])

    @property
    def heads(self) -> int:
        return int(self.options["heads"])

    def build(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Mixer:
        """The module with every parameter changed from its initial value, so that an initial zero hides no term."""
        torch.default_generator.manual_seed(
            1
        )  # torch.manual_seed formats the stack for each kind of GPU: a millisecond
        mix = self.cls(self.cls.options_type(**{**self.options, **changes})).to(dtype).eval()
        with torch.no_grad():
            for p in mix.parameters():
                p.add_(torch.randn(p.shape, dtype=torch.float64).to(dtype) * 0.1)
        return mix

    def scaled(self, size: int, **changes: Any) -> Mixer:
        """The module at its default options for sequences of `size`, one head (two where heads are shared out)."""
        own = {"dim": 16, "heads": 1 if self.cls is not Mixed else 2, "causal": self.options["causal"]}
        if self.cls.traits.fixed_length:
            own["max_length"] = size
        return self.cls(self.cls.options_type(**{**own, **changes}))


@functools.cache
def _all_cases() -> list[tuple[str, Case, Traits]]:
    """Every mechanism with its small options, causal and not, and what such an instance can do."""
    found = []
    for name, cls in MECHANISMS.items():
        for number, small in enumerate(cls.small):
            for causal in (False, True):
                base: dict[str, Any] = {"dim": DIM, "heads": HEADS, "causal": causal}
                if cls.traits.fixed_length or "max_length" not in cls.unused:
                    base["max_length"] = T + 6
                case = Case(cls, {**base, **small})
                try:
                    traits = case.build().traits
                except ValueError:
                    continue  # one direction only; test_laws checks that every promised direction occurs
                found.append((f"{name}-{'causal' if causal else 'bidirectional'}-{number}", case, traits))
    return found


def cases(**wanted: bool) -> Iterator[tuple[str, Case]]:
    """The cases with these traits."""
    for name, case, traits in _all_cases():
        if all(bool(getattr(traits, trait)) == value for trait, value in wanted.items()):
            yield name, case


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(mix: Mixer, compute: Callable[..., Tensor], x: Tensor, **inputs: Any) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    mix.zero_grad()
    y = compute(x, **inputs)
    (y * tokens(*y.shape, seed=9)).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in mix.named_parameters()}}


def same_after(change: Callable[[], None], mix: Mixer, x: Tensor, lengths: Tensor) -> None:
    """Outputs and all gradients are the same before and after `change`, which changes how they are computed."""
    found = []
    for changed in (False, True):
        if changed:
            change()
        given = x.clone().requires_grad_()
        y = torch.cat([row[:n] for row, n in zip(mix(given, lengths), lengths.tolist(), strict=True)])
        found.append((y, *torch.autograd.grad(y.square().sum(), (given, *mix.parameters()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def forward_equals_reference(case: Case) -> None:
    mix = case.build()
    x, lengths = tokens(4, case.length, case.dim), torch.tensor([case.length, 17, 0, 1])
    for inputs in ({}, {"lengths": lengths}):
        close(mix(x, **inputs), mix.reference(x, **inputs))
        fast, slow = gradients(mix, mix, x, **inputs), gradients(mix, mix.reference, x, **inputs)
        for name, want in slow.items():
            got = fast[name]
            assert (got is None) == (want is None), f"gradient of {name}"
            if got is not None and want is not None:
                close(got, want, 1e-7)


def large_tokens_equal_reference(case: Case) -> None:
    """With large tokens, naive exponentials under- or overflow, and choices are extreme."""
    mix = case.build()
    x, lengths = 30 * tokens(3, case.length, case.dim), torch.tensor([case.length, 17, 1])
    with torch.no_grad():
        want = mix.reference(x, lengths)
        close(mix(x, lengths), want, 1e-9 * max(1.0, float(want.abs().max())))


def repeated_tokens(*shape: int) -> Tensor:
    """Tokens from a vocabulary of three: many are equal, and so are many of the values that are ranked or sorted."""
    word = torch.randint(3, shape[:-1], generator=torch.Generator().manual_seed(7))
    return tokens(3, shape[-1], seed=6)[word]


def ties_are_broken_alike(case: Case) -> None:
    """Laws 1 and 4 on repeated tokens."""
    mix = case.build()
    counts = [case.length, 29, 18]
    x, lengths = repeated_tokens(3, case.length, case.dim), torch.tensor(counts)
    with torch.no_grad():
        y = mix(x, lengths)
        close(y, mix.reference(x, lengths))
        for row, n in enumerate(counts):
            close(y[row, :n], mix(x[row : row + 1, :n])[0])


def autocast_is_half_precision(case: Case) -> None:
    """Under autocast, forward, prefill and step of a float32 module are about as exact as the module in bfloat16."""
    half = case.build(torch.bfloat16)
    mix, exact = copy.deepcopy(half).float(), copy.deepcopy(half).double()  # the same weights, so the same buckets
    x, lengths = tokens(2, case.length, case.dim, dtype=torch.bfloat16), torch.tensor([case.length, 17])
    states = bool(mix.traits.state)

    def run(mix: Mixer, x: Tensor) -> list[Tensor]:
        y = mix(x, lengths)
        if not states:
            return [y]
        part, state = mix.prefill(x[:, :20])
        more, state = mix.prefill(x[:, 20:29], state=state)
        steps = []
        for t in range(29, case.length):
            y_t, state = mix.step(x[:, t], state)
            steps.append(y_t)
        return [y, part, more, torch.stack(steps)]

    with torch.no_grad():
        want, plain = run(exact, x.double()), run(half, x)
        with torch.autocast("cpu", torch.bfloat16):
            got = run(mix, x.float())
    assert all(torch.isfinite(y).all() for y in got)
    for y, same, best in zip(got, plain, want, strict=True):
        # medians, because a token that rounding puts into another bucket is wrong all over, in one as in the other
        error, allowed = (float((t.double() - best).abs().median()) for t in (y, same))
        assert error <= 2 * allowed + 1e-3 * float(best.abs().max()), f"error {error}, in bfloat16 {allowed}"


def inference_mode_works(case: Case) -> None:
    mix = case.build()
    x, lengths = tokens(2, case.length, case.dim), torch.tensor([case.length, 17])
    want = mix(x, lengths)
    with torch.inference_mode():
        close(mix(x, lengths), want)
        if mix.traits.state:
            y, state = mix.prefill(x[:, :20], lengths=torch.tensor([20, 17]))
            close(y[0], want[0, :20])
            close(mix.step(x[:, 20], state)[0][0], want[0, 20])


def cross_equals_reference(case: Case) -> None:
    mix = case.build()
    x, context = tokens(3, 9, case.dim), tokens(3, 30, case.dim, seed=2)
    lengths, context_lengths = torch.tensor([9, 4, 2]), torch.tensor([30, 7, 0])
    for inputs in ({}, {"lengths": lengths}, {"context_lengths": context_lengths}):
        close(mix(x, context=context, **inputs), mix.reference(x, context=context, **inputs))
    want = mix(x[1:2], context=context[1:2, :7])
    dirty = context.clone()
    dirty[1, 7:] = math.nan
    close(mix(x, context=dirty, context_lengths=context_lengths)[1:2], want)
    assert (mix(x, context=context, context_lengths=context_lengths)[2] == 0).all()
    close(mix(x, context=x, context_lengths=torch.tensor([9, 9, 9])), mix(x, context=x))


def gradient_is_the_slope(case: Case) -> None:
    """Central differences along one direction of x and each parameter: finds errors in both forward and reference."""
    mix = case.build()
    x = tokens(2, 23, case.dim)
    grads = gradients(mix, mix, x)
    weight = tokens(2, 23, case.dim, seed=9)
    step = 1e-6
    named = {"x": x, **dict(mix.named_parameters())}
    for name, tensor in named.items():
        direction = tokens(*tensor.shape, seed=3)
        ends = []
        with torch.no_grad():
            for sign in (step, -step):
                tensor.add_(sign * direction)
                ends.append(float((mix(x) * weight).sum()))
                tensor.sub_(sign * direction)
        slope = (ends[0] - ends[1]) / (2 * step)
        grad = grads[name]
        got = 0.0 if grad is None else float((grad * direction).sum())
        assert abs(got - slope) <= 1e-4 * max(1.0, abs(slope)), f"gradient of {name}: {got}, slope {slope}"


def second_derivative_is_right_or_refused(case: Case) -> None:
    """The gradient of a gradient along one direction against central differences."""
    mix, x, weight = case.build(), tokens(2, 23, case.dim).requires_grad_(), tokens(2, 23, case.dim, seed=9)
    along, step = tokens(2, 23, case.dim, seed=3), 1e-6

    def slope(x: Tensor, differentiable: bool = False) -> Tensor:
        loss = (mix(x).square() * weight).sum()
        return (torch.autograd.grad(loss, x, create_graph=differentiable)[0] * along).sum()

    try:
        (got,) = torch.autograd.grad(slope(x, differentiable=True), x)
    except RuntimeError as error:
        if not re.search("second derivative|no autograd formula|not implemented", str(error)):
            raise
        return
    want = (slope(x + step * along) - slope(x - step * along)) / (2 * step)
    assert abs((got * along).sum() - want) <= 1e-4 * max(1.0, abs(want))


def torch_func_agrees(case: Case) -> None:
    mix, x, weight = case.build(), tokens(2, 23, case.dim), tokens(2, 23, case.dim, seed=9)

    def loss(x: Tensor) -> Tensor:
        return (mix(x).square() * weight).sum()

    leaf = x.clone().requires_grad_()
    close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])


def strictly_causal(case: Case) -> None:
    mix = case.build()
    x = tokens(2, case.length, case.dim)
    with torch.no_grad():
        y = mix(x)
        for t in (1, 2, 7, 8, 16, 20, 33, case.length - 1):
            close(mix(x[:, :t]), y[:, :t])  # nothing changes when T grows
        at = torch.arange(case.length)
        later = at >= at[1:, None]  # [T-1, T]: row t-1 has a different future from t on, for every t
        for scale in (1.0, 30.0):
            changed = torch.where(
                later[..., None], scale * tokens(case.length - 1, case.length, case.dim, seed=1), x[0]
            )
            same = torch.where(later[..., None], 0, mix(changed))
            close(same, torch.where(later[..., None], 0, y[0]))


def recurrence_equals_forward(case: Case, splits: list[int], first: list[int]) -> None:
    """Ragged prompts of lengths `first`, then pieces cut at `splits`, then steps for the rest."""
    mix = case.build()
    x = tokens(len(first), case.length, case.dim)
    want = mix(x)
    lengths = torch.tensor(first)
    longest = max(first)
    y, state = mix.prefill(x[:, :longest], lengths)
    for row, n in enumerate(first):
        close(y[row, :n], want[row, :n])
        assert (y[row, n:] == 0).all()
    assert state.position.tolist() == first
    at = lengths.clone()
    for size in splits:
        size = min(size, case.length - longest - int((at - lengths)[0]))
        if size < 1:
            continue
        piece = torch.stack([x[row, int(n) : int(n) + size] for row, n in enumerate(at)])
        before = [t.clone() for t in state]
        if size == 1:
            part, new = mix.step(piece[:, 0], state)
            part = part[:, None]
        else:
            part, new = mix.prefill(piece, state=state)
        for kept, now in zip(before, state, strict=True):
            assert torch.equal(kept, now), "the old state was changed"
        for row, n in enumerate(at):
            close(part[row], want[row, int(n) : int(n) + size])
        state, at = new, at + size
        assert state.position.tolist() == at.tolist()


def state_is_a_value(case: Case) -> None:
    """Preallocated, saved and loaded, indexed and stacked by batch, continued: the same numbers."""
    mix = case.build()
    x = tokens(3, case.length, case.dim)
    want = mix(x)
    y, state = mix.prefill(x[:, :20], state=mix.init_state(3, capacity=case.length))
    close(y, want[:, :20])
    saved = safetensors.torch.save({name: t.contiguous() for name, t in state._asdict().items()})
    loaded = type(state)(**safetensors.torch.load(saved))
    order = torch.tensor([2, 0, 1])
    rows = type(state)(*(t[order] for t in loaded))
    stacked = type(state)(*(torch.cat((t[:1], t[1:])) for t in rows))
    sizes = [t.shape for t in stacked]
    for t in range(20, case.length):
        y_t, stacked = mix.step(x[order, t], stacked)
        close(y_t, want[order, t])
    assert mix.traits.state != "growing" or [t.shape for t in stacked] == sizes, "reallocated inside its capacity"


def state_goes_into_a_rebuilt_module(case: Case) -> None:
    """Another instance with the same options and loaded weights continues where the first one stopped."""
    mix, again = case.build(), case.build(seed=5)
    again.load_state_dict(mix.state_dict())
    x = tokens(2, 30, case.dim)
    with torch.no_grad():
        want = mix(x)
        _, state = mix.prefill(x[:, :20])
        y, state = again.prefill(x[:, 20:25], state=state)
        close(y, want[:, 20:25])
        y, state = mix.step(x[:, 25], state)
        close(again.step(x[:, 26], state)[0], want[:, 26])


def padding_is_invisible(case: Case, lengths: list[int]) -> None:
    mix = case.build()
    x = tokens(len(lengths), case.length, case.dim)
    for row, n in enumerate(lengths):
        x[row, n:] = (math.nan, 1e9, -1e9)[row % 3]
    y = mix(x, lengths=torch.tensor(lengths))
    for row, n in enumerate(lengths):
        assert (y[row, n:] == 0).all()
        if n:
            close(y[row, :n], mix(x[row : row + 1, :n])[0])


def empty_rows_have_finite_gradients(case: Case) -> None:
    mix = case.build()
    for name, grad in gradients(
        mix, mix, tokens(3, case.length, case.dim), lengths=torch.tensor([case.length, 0, 1])
    ).items():
        assert grad is None or torch.isfinite(grad).all(), name


def rows_are_independent(case: Case) -> None:
    mix = case.build()
    x = tokens(3, case.length, case.dim)
    y = mix(x)
    for row in range(3):
        close(mix(x[row : row + 1])[0], y[row])


def evaluation_is_deterministic(case: Case) -> None:
    mix = case.build()
    x = tokens(2, case.length, case.dim)
    y = mix(x)
    assert torch.equal(mix(x), y)
    assert torch.equal(copy.deepcopy(mix)(x), y)
    other = case.build(seed=5)
    other.load_state_dict(mix.state_dict())
    assert torch.equal(other(x), y), "something that matters is not in the state dict"
    mix.redraw(torch.Generator().manual_seed(3))
    again = mix(x)
    mix.redraw(torch.Generator().manual_seed(3))
    assert torch.equal(mix(x), again)
    mix.redraw()
    close(mix(x), y)


def nothing_is_square(case: Case, size: int = 2048) -> None:
    """No tensor has T² elements, also with padding and dropout. After a state some are large, but they grow slower."""
    mix = case.scaled(size)
    x = tokens(1, size, 16, dtype=torch.float32).requires_grad_()
    lengths = torch.tensor([size - 5])
    runs: dict[str, Callable[[], Tensor]] = {"plain": lambda: mix(x), "lengths": lambda: mix(x, lengths)}
    if "dropout" not in case.cls.unused:
        noisy = case.scaled(size, dropout=0.1).train()
        runs["dropout"] = lambda: noisy(x, lengths)
    for name, run in runs.items():
        with Largest() as largest:
            run().sum().backward()
        found = f"{name}: a tensor of {largest.numel} elements at T={size}, made by {largest.op}"
        assert largest.numel < size * size, found
    if mix.traits.state:
        sizes = []
        for part in (x[:, : size // 4], x[:, : size // 2]):
            with torch.no_grad():
                state = mix.prefill(part)[1]
            with Largest() as largest:
                mix.prefill(part, state=state)[0].sum().backward()
            sizes.append(largest.numel)
        assert sizes[1] < 3 * sizes[0], f"behind a state: tensors of {sizes} elements, made by {largest.op}"


def cost_grows_as_documented(case: Case, small: int = 1024, large: int = 4096) -> None:
    """Elements written by all operations, and bytes kept for backward, at two lengths."""
    written, saved = [], []
    for size in (small, large):
        mix = case.scaled(size)
        x = tokens(1, size, 16, dtype=torch.float32).requires_grad_()
        kept: dict[int, int] = {}

        def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y = mix(x)
            y.sum().backward()
        written.append(largest.total)
        saved.append(sum(kept.values()))
    ratio = math.log(large / small)
    assert math.log(written[1] / written[0]) / ratio <= case.cls.exponent + 0.1, written
    assert math.log(saved[1] / saved[0]) / ratio <= case.cls.memory + 0.1, saved


def one_token_works(case: Case) -> None:
    mix = case.build()
    x = tokens(2, 1, case.dim)
    close(mix(x), mix.reference(x))
    if mix.traits.state:
        y, _ = mix.step(x[:, 0], mix.init_state(2))
        close(y, mix(x)[:, 0])


def large_half_precision_is_finite(case: Case) -> None:
    for dtype, size in ((torch.bfloat16, 100), (torch.float16, 20)):  # float16 ends at 65,504, about 40³
        mix = case.build(dtype)
        x = (size * tokens(2, case.length, case.dim)).to(dtype).requires_grad_()
        y = mix(x, lengths=torch.tensor([case.length, 12]))
        y.float().sum().backward()
        assert y.dtype == dtype
        assert torch.isfinite(y).all()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        if mix.traits.state:
            y, state = mix.prefill(x.detach())
            assert torch.isfinite(mix.step(x.detach()[:, 0], state)[0]).all()


def permutation_equivariant(case: Case) -> None:
    mix = case.build()
    x, order = tokens(2, case.length, case.dim), torch.randperm(case.length, generator=torch.Generator().manual_seed(4))
    close(mix(x[:, order]), mix(x)[:, order])


def pattern_is_a_picture(case: Case) -> None:
    mix = case.build()
    x = tokens(2, 19, case.dim)
    weights = mix.pattern(x)
    heads = case.heads if "heads" not in case.cls.unused else weights.shape[1]
    assert weights.shape == (2, heads, 19, 19)
    assert torch.isfinite(weights).all()
    assert (weights != 0).any()
    if case.options["causal"] and getattr(mix.options, "strict_causal", True):
        assert (weights.triu(1) == 0).all(), "the picture shows the future"


class Largest(TorchDispatchMode):
    """Watches every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.total, self.op = 0, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if (
                isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known
            ):  # views and in-place operations take no memory
                numel = t.untyped_storage().nbytes() // t.element_size()
                self.total += numel
                if numel > self.numel:
                    self.numel, self.op = numel, str(func)
        return out


def gradients_are_sane(case: Case) -> None:
    """Outputs and gradients are finite and of moderate size for tokens of size one, in every type used in training."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mix = case.build(dtype)
        grads = gradients(mix, mix, tokens(2, case.length, case.dim, dtype=dtype))
        for name, grad in grads.items():
            if grad is not None:
                largest = float(grad.float().abs().max())
                assert largest < 1e4, f"{dtype}: a gradient of {name} is {largest}"


LIMITS: dict[str, dict[str, Any]] = {  # options that remove the approximation from sequences of 20 tokens
    "softmax": {},
    "local": {"window": 20},
    "strided": {"stride": 1},
    "fixed": {"block": 20, "summary": 1},
    "longformer": {"window": 20, "global_tokens": 0},
    "bigbird": {"block": 20, "random": 0},
    "clustered": {"clusters": 2, "topk": 20, "block": 6},
    "routing": {"clusters": 1, "window": 20, "share_qk": False},
    "sinkhorn": {"block": 20},
    "linformer": {"rank": 20, "max_length": 20},
    "compressed": {"stride": 1},
    "nystrom": {"landmarks": 20, "conv": 0},
    "synthesizer": {"kind": "dot", "max_length": 20},
    "transformer_xl": {"memory": 20},
    # formulas of their own, without random features
    "linear": {},
    "efficient": {},
    "performer": {"kernel": "relu", "features": 0},
    "rfa": {"features": 20_000, "tau": 1.2},  # nearly removed: the noise is far below the effect of a wrong scale
}


def limit(cls: type[Mixer], causal: bool) -> Case:
    """The mechanism at its exact limit, with heads 12 wide: with a power of two, a wrong scale could go unnoticed."""
    name = next(name for name, known in MECHANISMS.items() if issubclass(cls, known))
    return Case(cls, {"dim": 36, "heads": 3, "causal": causal, **LIMITS[name]})


def limit_is_torch_attention(case: Case) -> None:
    """Law 6, for a case of `limit`: torch's attention of the same q, k and v, with torch's own scale, or a formula."""
    mix, x = case.build(), tokens(2, 20, case.dim)
    scale, tolerance = None, 1e-9
    with torch.no_grad():
        if isinstance(mix, Routing):
            q, k, v = mix.qkv(x).unflatten(-1, (3, case.heads, -1)).unbind(2)
            q, k = (F.layer_norm(t, t.shape[-1:]) for t in (q, k))
            out: Any = mix.out
        else:
            heads: Any = mix.heads
            (q, k, v), out = heads.split(x), heads.out
        if isinstance(mix, RFA):  # of unit vectors, and τ² in place of √K
            mix.sigma.fill_(1)
            q, k, scale = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), 1.2**-2
            tolerance = 0.02
        if isinstance(mix, Linformer):
            for rows in (mix.key_rows, mix.value_rows):
                rows.copy_(torch.eye(20))
        if isinstance(mix, Compressed):
            for conv in (mix.key, mix.value):
                conv.weight.copy_(torch.eye(12)[..., None].repeat(3, 1, 1))
                conv.bias.zero_()
        if isinstance(mix, TransformerXL):
            for parameter in (mix.relative.weight, mix.u, mix.w):
                parameter.zero_()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        causal = case.options["causal"]
        if isinstance(mix, Linear | Performer):
            q, k = (F.elu(t) + 1 if isinstance(mix, Linear) else F.relu(t / 12**0.25) + 1e-3 for t in (q, k))
            weights = (q @ k.mT).tril() if causal else q @ k.mT
            want = weights @ v / (weights.sum(-1, keepdim=True) + (1e-6 if isinstance(mix, Linear) else 0))
        elif isinstance(mix, Efficient):
            total = k.exp().cumsum(2) if causal else k.exp().sum(2, keepdim=True)  # up to each query, of each feature
            weights = (q.softmax(-1) / total) @ k.exp().mT
            want = (weights.tril() if causal else weights) @ v
        else:
            want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        torch.testing.assert_close(mix(x), out(want.transpose(1, 2).flatten(2)), rtol=tolerance, atol=tolerance)


DROPPING: dict[str, dict[str, Any]] = {  # options with which a key reaches a query through one weight
    "softmax": {},
    "additive": {},
    "reformer": {"rounds": 1, "buckets": 1, "chunk": 20},
    "routing": {"clusters": 1, "window": 20},
    "clustered": {"clusters": 2, "topk": 20, "block": 6},
    "sinkhorn": {"block": 20},
    "linformer": {"rank": 20, "max_length": 20},
    "compressed": {"stride": 1},
    "nystrom": {"landmarks": 20, "conv": 0},
    "synthesizer": {"kind": "random+dot", "max_length": 20},
    "transformer_xl": {"memory": 20},
}


def dropping(cls: type[Mixer], causal: bool, **changes: Any) -> Case:
    name = next(name for name, known in MECHANISMS.items() if issubclass(cls, known))
    return Case(cls, {"dim": 20, "heads": 1, "causal": causal, "dropout": 0.3, **DROPPING[name], **changes})


def dropout_has_its_rate(case: Case) -> None:
    """For a case of `dropping`: 30% of weights are zero and the others are divided by 0.7, however it is computed.

    Token s is the unit vector s, and so is its value: the output of query t is its row of weights.
    """
    mix, x = case.build(), torch.eye(20, dtype=torch.float64).expand(150, -1, -1)
    with torch.no_grad():
        _show_weights(mix)
        want = mix(x)[0]
        mix.train()
        torch.manual_seed(0)
        outputs = [mix(x)]
        if mix.traits.state:
            first, state = mix.prefill(x[:, :7])
            second, state = mix.prefill(x[:, 7:18], state=state)
            steps = []
            for t in (18, 19):
                y, state = mix.step(x[:, t], state)
                steps.append(y)
            outputs.append(torch.cat((first, second, torch.stack(steps, 1)), 1))
    twice = isinstance(mix, Sinkhorn) and not case.options["causal"]  # a key in the own and in the sorted block
    factors = 2 if isinstance(mix, Nystrom) and mix.options.landmarks < 20 else 1  # of which each is dropped
    rate = 0.3**2 if twice else 1 - 0.7**factors
    for y in outputs:
        weighs = (want > 1e-6).expand_as(y)
        kept = y.abs() > 1e-9
        share = float((~kept)[weighs].double().mean())
        assert abs(share - rate) < 0.015 * factors, f"dropped {share:.3f} of the weights, asked for {rate:.3f}"
        total = float(y.sum() / (150 * want.sum()))
        assert abs(total - 1) < 0.02 * factors, f"the weights that are left add up to {total:.3f} of all"
        if not twice:
            close(y[weighs & kept], (want / 0.7**factors).expand_as(y)[weighs & kept])


@torch.no_grad()
def _show_weights(mix: Any) -> None:
    """Values and outputs are the tokens themselves."""
    eye = torch.eye(20)
    layers = [getattr(mix, "heads", mix).out]
    if hasattr(mix, "value") and isinstance(mix.value, torch.nn.Linear):
        layers.append(mix.value)
    else:
        qkv = mix.heads.qkv if hasattr(mix, "heads") else mix.qkv
        qkv.weight[-20:], qkv.bias[-20:] = eye, 0
    for layer in layers:
        layer.weight.copy_(eye)
        layer.bias.zero_()
    if isinstance(mix, Linformer):
        mix.value_rows.copy_(eye)
    if isinstance(mix, Compressed):
        mix.value.weight.copy_(eye[..., None])
        mix.value.bias.zero_()


FAR: dict[str, tuple[int, dict[str, Any]]] = {  # start positions of sequences that cross 2¹⁶ or 2²⁴ tokens
    "softmax": (65_529, {}),
    "compressed": (65_529, {"stride": 3}),
    "strided": (65_529, {"stride": 6}),
    "fixed": (65_529, {"block": 8, "summary": 2}),
    "longformer": (65_529, {"window": 4, "dilation": (1, 3), "global_tokens": 2}),
    "bigbird": (65_529, {"block": 3, "random": 2}),
    "reformer": (65_529, {"rounds": 2, "chunk": 3, "buckets": 4}),
    "routing": (65_529, {"clusters": 3, "window": 4}),
    "local": (2**24 - 7, {"window": 4}),
    "mixed": (2**24 - 7, {"parts": (("local", 1, {"window": 4}), ("local", 1, {"window": 2}))}),
    "transformer_xl": (2**24 - 7, {"memory": 4, "rotary": False}),
    "linear": (2**24 - 7, {}),
    "performer": (2**24 - 7, {"features": 9}),
    "rfa": (2**24 - 7, {"features": 9, "gate": True}),
    "efficient": (2**24 - 7, {"normalize": "scaling", "rotary": False}),
    "retnet": (2**24 - 7, {}),
    "gla": (2**24 - 7, {"rotary": False}),
    "mamba2": (2**24 - 7, {"rotary": False, "state": 5}),
    "deltanet": (2**24 - 7, {"rotary": False}),
    "gated_deltanet": (2**24 - 7, {"rotary": False}),
}


def far(cls: type[Mixer]) -> Case:
    name = next(name for name, known in MECHANISMS.items() if issubclass(cls, known))
    start, options = FAR[name]
    return Case(cls, {"dim": 12, "heads": 2, "causal": True, "rotary": True, **options}, start)


def far_positions_follow_the_definition(case: Case) -> None:
    """For a case of `far`: tokens after a state at a far position, whose cache holds zeros."""
    mix, x = case.build(), tokens(2, 14, case.dim)
    y = _behind(mix, x, case.length)
    if isinstance(mix, Softmax | Compressed | Patterned) and not isinstance(mix, Local):
        want = _among_zeros(mix, x, case.length)
    elif isinstance(mix, Linear | RFA | Performer):
        q, k, v = mix.heads.split(x)
        q, k = (turned(t, case.length) for t in (q, k))
        if isinstance(mix, RFA) and mix.gate is not None:
            weights = mix._weights(q, k, torch.sigmoid(mix.gate(x)))
        else:
            weights = mix._weights(q, k)
        want = mix.heads.merge(torch.einsum("bhts,bshv->bthv", weights, v))
    elif isinstance(mix, Efficient):
        q, k, v = mix.heads.split(x)
        o = torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k).tril(), v)
        want = mix.heads.merge(o / torch.arange(case.length + 1, case.length + 15)[:, None, None])
    elif isinstance(mix, Recurrent):
        want = mix.reference(x)  # only distances matter, and the sums are empty
    else:  # only distances matter, once the state is out of reach
        y, want = y[:, 5:], _behind(mix, x, 0)[:, 5:]
    close(y, want, 1e-7)


def turned(t: Tensor, start: int) -> Tensor:
    """Rotary positions by complex numbers: channels j and j + K/2 by p/10000^(2j/K), t [B, T, H, K] from `start` on."""
    half = t.shape[-1] // 2
    angles = [[(start + p) / 10000 ** (j / half) for j in range(half)] for p in range(t.shape[1])]
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))[:, None]
    pairs = torch.complex(t[..., :half], t[..., half:]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


def _behind(mix: Any, x: Tensor, start: int) -> Tensor:
    """Prompts and steps after an empty state with position `start`."""
    state = mix.init_state(len(x), capacity=min(start, 65_529) + x.shape[1])
    first, state = mix.prefill(x[:, :5], state=state._replace(position=torch.full_like(state.position, start)))
    second, state = mix.prefill(x[:, 5:11], state=state)
    steps = []
    for t in range(11, x.shape[1]):
        y, state = mix.step(x[:, t], state)
        steps.append(y)
    assert state.position.tolist() == [start + x.shape[1]] * len(x)
    return torch.cat((first, second, torch.stack(steps, 1)), 1)


def _among_zeros(mix: Any, x: Tensor, start: int) -> Tensor:
    """Softmax over what a query reads: e⁰ for each zero key before `start`, and the keys of x by the definition."""
    q, k, v = mix.heads.split(x)
    at, stride = torch.arange(start, start + x.shape[1])[:, None], getattr(mix.options, "stride", 1)
    if isinstance(mix, Compressed):
        slots = x.shape[1] // stride
        k, v = (torch.stack(mix._slots(t, conv), 1) for t, conv in ((k, mix.key), (v, mix.value)))
        ends = start + stride * torch.arange(1, slots + 1) - 1
        allowed = torch.cat((torch.ones(len(at), start // stride, dtype=torch.bool), ends <= at), 1)
        k = torch.cat([turned(k[:, [n]], int(end)) for n, end in enumerate(ends)], 1)
    else:
        k, j = turned(k, start), torch.arange(start + x.shape[1])
        read = mix._allowed(at, j[None], start + x.shape[1]) if isinstance(mix, Patterned) else True
        allowed = (j <= at) & read
    weights = (torch.einsum("bthk,bshk->bhts", turned(q, start), k) / q.shape[-1] ** 0.5).exp()
    before, now = allowed.tensor_split([allowed.shape[-1] - k.shape[1]], -1)
    weights = weights * now
    return mix.heads.merge(
        torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + before.sum(-1, keepdim=True)), v)
    )


def half_precision_is_as_exact_as_the_definition(case: Case) -> None:
    """The error is at most twice that of the plain expression in the same type, both against float64."""
    exact = case.build()
    for dtype in (torch.bfloat16, torch.float16):
        mix, x = case.build(dtype), tokens(2, case.length, case.dim, dtype=dtype)
        with torch.no_grad():
            want = exact(x.double())
            # medians, because a token that rounding puts into another bucket is wrong all over, in one as in the other
            error, allowed = (float((y.double() - want).abs().median()) for y in (mix(x), mix.reference(x)))
        assert error <= 2 * allowed + 1e-4, f"{dtype}: error {error}, of the plain expression {allowed}"


def long_sums_keep_their_digits(case: Case) -> None:
    """Errors do not grow over eight hundred tokens in bfloat16, neither in forward nor in steps."""
    half, exact = (case.build(dtype) for dtype in (torch.bfloat16, torch.float64))
    x = tokens(1, 800, case.dim, dtype=torch.bfloat16) + 0.5  # the sums grow, and a token becomes small in comparison
    with torch.no_grad():
        want, state, steps = exact(x.double()), half.init_state(1), []
        for t in range(800):
            y, state = half.step(x[:, t], state)
            steps.append(y)
        for y in (half(x), torch.stack(steps, 1)):
            error = (y.double() - want).abs().mean((0, 2))
            early, late = float(error[20:120].mean()), float(error[-100:].mean())
            assert late <= 2 * early, f"errors grow from {early:.2g} to {late:.2g}"
