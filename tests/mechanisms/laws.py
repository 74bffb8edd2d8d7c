"""The laws of the contract as functions of a case, so that they run over MECHANISMS and over planted bugs alike."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.mixed import Mixed

DIM, HEADS, T = 32, 4, 41  # 41 tokens: no block divides them


class Case(NamedTuple):
    cls: type[Mixer]
    options: dict[str, Any]

    def build(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Mixer:
        """The module with every parameter moved off its initial value, so that no zero initialisation hides a term."""
        torch.manual_seed(1)
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


def cases(**wanted: bool) -> Iterator[tuple[str, Case]]:
    """Every mechanism with its small options, causal and not; `wanted` filters by instance traits."""
    for name, cls in MECHANISMS.items():
        for number, small in enumerate(cls.small):
            for causal in (False, True):
                base: dict[str, Any] = {"dim": DIM, "heads": HEADS, "causal": causal}
                if cls.traits.fixed_length or "max_length" not in cls.unused:
                    base["max_length"] = T + 6
                try:
                    case = Case(cls, {**base, **small})
                    traits = case.build().traits
                except ValueError:
                    continue  # one direction only; test_laws checks that every promised direction occurs
                if all(bool(getattr(traits, trait)) == value for trait, value in wanted.items()):
                    yield f"{name}-{'causal' if causal else 'bidirectional'}-{number}", case


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
    """A change of how it is computed leaves the values of the tokens and every gradient as they were."""
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
    x, lengths = tokens(4, T, DIM), torch.tensor([T, 17, 0, 1])
    for inputs in ({}, {"lengths": lengths}):
        close(mix(x, **inputs), mix.reference(x, **inputs))
        fast, slow = gradients(mix, mix, x, **inputs), gradients(mix, mix.reference, x, **inputs)
        for name, want in slow.items():
            got = fast[name]
            assert (got is None) == (want is None), f"gradient of {name}"
            if got is not None and want is not None:
                close(got, want, 1e-7)


def large_tokens_equal_reference(case: Case) -> None:
    """Where exponentials under- or overflow unless somebody minds, and choices are extreme."""
    mix = case.build()
    x, lengths = 30 * tokens(3, T, DIM), torch.tensor([T, 17, 1])
    with torch.no_grad():
        want = mix.reference(x, lengths)
        close(mix(x, lengths), want, 1e-9 * max(1.0, float(want.abs().max())))


def repeated_tokens(*shape: int) -> Tensor:
    """Tokens of a vocabulary of three: many are equal, and so are many of whatever is compared, ranked or sorted."""
    word = torch.randint(3, shape[:-1], generator=torch.Generator().manual_seed(7))
    return tokens(3, shape[-1], seed=6)[word]


def ties_are_broken_alike(case: Case) -> None:
    """Laws 1 and 4 on repeated tokens."""
    mix = case.build()
    counts = [T, 29, 18]
    x, lengths = repeated_tokens(3, T, DIM), torch.tensor(counts)
    with torch.no_grad():
        y = mix(x, lengths)
        close(y, mix.reference(x, lengths))
        for row, n in enumerate(counts):
            close(y[row, :n], mix(x[row : row + 1, :n])[0])


def autocast_is_half_precision(case: Case) -> None:
    """forward, prefill and step of a float32 module under autocast, about as exact as the module in bfloat16."""
    mix, half, exact = (case.build(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    x, lengths = tokens(2, T, DIM, dtype=torch.bfloat16), torch.tensor([T, 17])
    states = bool(mix.traits.state)

    def run(mix: Mixer, x: Tensor) -> list[Tensor]:
        y = mix(x, lengths)
        if not states:
            return [y]
        part, state = mix.prefill(x[:, :20])
        more, state = mix.prefill(x[:, 20:29], state=state)
        steps = []
        for t in range(29, T):
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
    x, lengths = tokens(2, T, DIM), torch.tensor([T, 17])
    want = mix(x, lengths)
    with torch.inference_mode():
        close(mix(x, lengths), want)
        if mix.traits.state:
            y, state = mix.prefill(x[:, :20], lengths=torch.tensor([20, 17]))
            close(y[0], want[0, :20])
            close(mix.step(x[:, 20], state)[0][0], want[0, 20])


def cross_equals_reference(case: Case) -> None:
    mix = case.build()
    x, context = tokens(3, 9, DIM), tokens(3, 30, DIM, seed=2)
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
    """Central differences along one direction of x and each parameter: catches what forward and reference both lack."""
    mix = case.build()
    x = tokens(2, 23, DIM)
    grads = gradients(mix, mix, x)
    weight = tokens(2, 23, DIM, seed=9)
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


def strictly_causal(case: Case) -> None:
    mix = case.build()
    x = tokens(2, T, DIM)
    with torch.no_grad():
        y = mix(x)
        for t in (1, 2, 7, 8, 16, 20, 33, 40):
            close(mix(x[:, :t]), y[:, :t])  # nothing changes when T grows
        at = torch.arange(T)
        later = at >= at[1:, None]  # [T-1, T]: row t-1 has another future from t on, for every t
        for scale in (1.0, 30.0):
            changed = torch.where(later[..., None], scale * tokens(T - 1, T, DIM, seed=1), x[0])
            same = torch.where(later[..., None], 0, mix(changed))
            close(same, torch.where(later[..., None], 0, y[0]))


def recurrence_equals_forward(case: Case, splits: list[int], first: list[int]) -> None:
    """Ragged prompts of lengths `first`, then pieces cut at `splits`, the last part by steps."""
    mix = case.build()
    x = tokens(len(first), T, DIM)
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
        size = min(size, T - longest - int((at - lengths)[0]))
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
    x = tokens(3, T, DIM)
    want = mix(x)
    y, state = mix.prefill(x[:, :20], state=mix.init_state(3, capacity=T))
    close(y, want[:, :20])
    saved = safetensors.torch.save({name: t.contiguous() for name, t in state._asdict().items()})
    loaded = type(state)(**safetensors.torch.load(saved))
    order = torch.tensor([2, 0, 1])
    rows = type(state)(*(t[order] for t in loaded))
    stacked = type(state)(*(torch.cat((t[:1], t[1:])) for t in rows))
    sizes = [t.shape for t in stacked]
    for t in range(20, T):
        y_t, stacked = mix.step(x[order, t], stacked)
        close(y_t, want[order, t])
    assert mix.traits.state != "growing" or [t.shape for t in stacked] == sizes, "reallocated inside its capacity"


def state_goes_into_a_rebuilt_module(case: Case) -> None:
    """Another instance with the same options and loaded weights continues where the first one stopped."""
    mix, again = case.build(), case.build(seed=5)
    again.load_state_dict(mix.state_dict())
    x = tokens(2, 30, DIM)
    with torch.no_grad():
        want = mix(x)
        _, state = mix.prefill(x[:, :20])
        y, state = again.prefill(x[:, 20:25], state=state)
        close(y, want[:, 20:25])
        y, state = mix.step(x[:, 25], state)
        close(again.step(x[:, 26], state)[0], want[:, 26])


def padding_is_invisible(case: Case, lengths: list[int]) -> None:
    mix = case.build()
    x = tokens(len(lengths), T, DIM)
    for row, n in enumerate(lengths):
        x[row, n:] = (math.nan, 1e9, -1e9)[row % 3]
    y = mix(x, lengths=torch.tensor(lengths))
    for row, n in enumerate(lengths):
        assert (y[row, n:] == 0).all()
        if n:
            close(y[row, :n], mix(x[row : row + 1, :n])[0])


def empty_rows_have_finite_gradients(case: Case) -> None:
    mix = case.build()
    for name, grad in gradients(mix, mix, tokens(3, T, DIM), lengths=torch.tensor([T, 0, 1])).items():
        assert grad is None or torch.isfinite(grad).all(), name


def rows_are_independent(case: Case) -> None:
    mix = case.build()
    x = tokens(3, T, DIM)
    y = mix(x)
    for row in range(3):
        close(mix(x[row : row + 1])[0], y[row])


def evaluation_is_deterministic(case: Case) -> None:
    mix = case.build()
    x = tokens(2, T, DIM)
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
    """Nor with padding or with dropout. Behind a state some keep large blocks, but none that grow as T²."""
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
    x = tokens(2, 1, DIM)
    close(mix(x), mix.reference(x))
    if mix.traits.state:
        y, _ = mix.step(x[:, 0], mix.init_state(2))
        close(y, mix(x)[:, 0])


def large_half_precision_is_finite(case: Case) -> None:
    mix = case.build(torch.bfloat16)
    x = (100 * tokens(2, T, DIM)).to(torch.bfloat16).requires_grad_()
    y = mix(x, lengths=torch.tensor([T, 12]))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    if mix.traits.state:
        y, state = mix.prefill(x.detach())
        assert torch.isfinite(mix.step(x.detach()[:, 0], state)[0]).all()


def permutation_equivariant(case: Case) -> None:
    mix = case.build()
    x, order = tokens(2, T, DIM), torch.randperm(T, generator=torch.Generator().manual_seed(4))
    close(mix(x[:, order]), mix(x)[:, order])


def pattern_is_a_picture(case: Case) -> None:
    mix = case.build()
    x = tokens(2, 19, DIM)
    weights = mix.pattern(x)
    heads = HEADS if "heads" not in case.cls.unused else weights.shape[1]
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
            ):  # views and in-place are no memory
                numel = t.untyped_storage().nbytes() // t.element_size()
                self.total += numel
                if numel > self.numel:
                    self.numel, self.op = numel, str(func)
        return out


class Call(torch.nn.Module):
    """One way of calling a mechanism, as a module of tensors to tensors: what torch.export and torch.compile take."""

    def __init__(self, mix: Mixer, form: str):
        super().__init__()
        self.mix, self.form = mix, form

    def forward(self, x: Tensor, other: Any = None) -> Any:
        if self.form == "plain":
            return self.mix(x)
        if self.form == "lengths":
            return self.mix(x, lengths=other)
        if self.form == "cross":
            return self.mix(x, context=other[0], context_lengths=other[1])
        if self.form == "prefill":
            return self.mix.prefill(x, lengths=other)
        if self.form == "continue":
            return self.mix.prefill(x, state=other)
        return self.mix.step(x[:, 0], other)

    def inputs(self, batch: int, size: int) -> tuple[Any, ...]:
        like = next(self.mix.buffers())
        x = tokens(batch, size, DIM, dtype=like.dtype)
        lengths = torch.tensor([size, *range(1, batch)])[:batch].clamp(max=size)
        if self.form == "plain":
            return (x,)
        if self.form in ("lengths", "prefill"):
            return x, lengths
        if self.form == "cross":
            context = tokens(batch, size // 2 + 3, DIM, seed=2, dtype=like.dtype)
            return x, (context, lengths.flip(0).clamp(max=context.shape[1]))
        with torch.no_grad():
            state = self.mix.init_state(batch, capacity=2 * T)
            return x, self.mix.prefill(tokens(batch, 6, DIM, seed=3, dtype=like.dtype), state=state)[1]


def forms(case: Case) -> list[str]:
    """The ways in which this case's module can be called."""
    traits = case.build().traits
    cross = ["cross"] if traits.cross else []
    return ["plain", "lengths", *cross, *(["prefill", "continue", "step"] if traits.state else [])]


def same_values(call: Call, program: torch.nn.Module, batch: int, size: int) -> None:
    got, want = (tree_leaves(run(*call.inputs(batch, size))) for run in (program, call))
    for a, b in zip(got, want, strict=True):
        close(a, b)


def same_gradients(call: Call, program: torch.nn.Module, batch: int, size: int, tolerance: float = 1e-7) -> None:
    """Everything that comes out, and the gradients of x and of each parameter."""
    results = []
    for run in (program, call):
        x, *other = call.inputs(batch, size)
        x.requires_grad_()
        run.zero_grad()
        out = tree_leaves(run(x, *other))
        (out[0] * tokens(*out[0].shape, seed=9, dtype=out[0].dtype)).sum().backward()
        grads = [p.grad for _, p in sorted(run.named_parameters())]
        results.append([None if t is None else t.detach() for t in (*out, x.grad, *grads)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None), "a gradient is missing"
        if a is not None:
            close(a, b, tolerance)


def export_keeps_numbers(case: Case, form: str, grad: bool = True, **how: Any) -> None:
    """A program exported for one batch and length gives eager's values, and its gradients if it was to have any."""
    call = Call(case.build(), form)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(call, call.inputs(3, T), **how).module()
    if grad:
        same_gradients(call, program, 3, T)
    else:
        same_values(call, program, 3, T)
    with torch.no_grad():
        same_values(call, program, 3, T)


def export_serves_any_size(case: Case, form: str, **how: Any) -> None:
    """One program for any batch and any length, shorter than every block or longer, gives what eager gives."""
    call = Call(case.build(), form)
    any_size = torch.export.Dim.DYNAMIC  # export fails where a size turns out to be a constant
    row, both = {0: any_size}, {0: any_size, 1: any_size}
    others: dict[str, Any] = {"plain": (), "lengths": (row,), "prefill": (row,), "cross": ((both, row),)}
    shapes = dict(zip(("x", "other"), (both, *others[form]), strict=False))
    program = torch.export.export(call, call.inputs(3, T), dynamic_shapes=shapes, **how).module()
    same_gradients(call, program, 3, T)
    sizes = [(3, 10), (5, 16), (2, 40), (1, 46)]
    if form != "prefill":  # a prompt shorter than the stride of `compressed` leaves a state of another kind
        sizes += [(2, 2), (4, 3), (1, 7), (2, 8)]
    if not call.mix.traits.fixed_length:
        sizes += [(2, 131), (2, 192)]
    with torch.no_grad():
        for batch, size in sizes:
            same_values(call, program, batch, size)


def compile_keeps_numbers(
    case: Case, form: str, backend: str, dynamic: bool | None = None, dtype: torch.dtype = torch.float64
) -> None:
    """Compiled without a break, values and gradients are eager's; `dynamic`: at several sizes."""
    torch.compiler.reset()
    call = Call(case.build(dtype), form)
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch, size in ((3, T), (2, 7), (5, 46)) if dynamic else ((3, T),):
        same_gradients(call, compiled, batch, size, 1e-7 if dtype == torch.float64 else 1e-3)
