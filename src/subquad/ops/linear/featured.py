"""Linear attention on random features that are computed where they are used, and never stored: a GPU's path.

The torch expression of the same is ops/random_features.py, whose features go into `linear_attention`.

kind        φ(x), ω·x being a score                                κ: the logarithm of a token's factor
softmax     exp(scale ω·x - largest) + eps                         largest - |scale x|²/2 - log(M)/2
relu        max(scale ω·x, 0) + eps                                0
gaussian    (sin, cos)((σ∘ω)·x/|x|) / √M                           0

o_t = Σ w_ts v_s / Σ w_ts with w_ts = φ(q_t)·φ(k_s) exp(κ_s), over s <= t when causal.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad import ranks
from subquad.ops.impl import Impl, choose, exporting, too_large
from subquad.ops.lengths import keep
from subquad.ops.linear.operators import operator
from subquad.ops.prefix import running_max

NOTHING = -1e30  # the largest exponent before the first key; finite, so that differences are numbers
PADDED = -1e38  # below NOTHING: a padded key has weight 0 even if it is the only one


class Kind(NamedTuple):
    mode: str  # of the kernels
    parts: int = 1  # features of a direction
    signed: bool = False
    unit: bool = False


KINDS = {
    "softmax": Kind("exp"),
    "relu": Kind("relu"),
    "gaussian": Kind("fourier", parts=2, signed=True, unit=True),
}


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, S, H, K]
    v: Tensor  # [B, S, H, V]
    directions: Tensor  # [H, M, K]
    least: Tensor  # [B, T, H] at least float32: added to a positive denominator; the least size of a signed one
    sigma: Tensor | None = None  # [H, K], for kinds with unit
    lengths: Tensor | None = None  # [B] of the keys
    s0: Tensor | None = None  # [B, H, features, V] the sums before the first token, at least float32
    z0: Tensor | None = None  # [B, H, features]
    max0: Tensor | None = None  # [B, H] the logarithm of their unit, for kind "softmax"


class Spec(NamedTuple):
    kind: str = "softmax"
    scale: float = 1.0
    eps: float = 0.0
    causal: bool = True


class Weights(NamedTuple):
    """What is known of each token before the sums; [B, T, H] if nothing else is said, None where a kind has no need."""

    inv: Tensor  # one over each denominator, which the kernels fill
    top_q: Tensor | None = None
    arg_q: Tensor | None = None
    top_k: Tensor | None = None
    arg_k: Tensor | None = None
    kappa: Tensor | None = None
    reach: Tensor | None = None  # the largest κ so far
    start: Tensor | None = None  # [B, H] and before the first token


class Result(NamedTuple):
    o: Tensor  # [B, T, H, V]
    s: Tensor  # [B, H, features, V] after the last token, in units of exp(max)
    z: Tensor  # [B, H, features]
    max: Tensor  # [B, H], for kind "softmax"


def featured_attention(x: Inputs, spec: Spec, state: bool = False) -> Result:
    """The arguments have been checked. Gradients go from o to q, k, v and sigma; a state has none.

    `state`: fill s, z and max, if causal.
    """
    x = x._replace(**{n: t if t.stride(-1) == 1 else t.contiguous() for n, t in zip("qkv", x[:3], strict=True)})
    x = x._replace(directions=x.directions.contiguous(), sigma=None if x.sigma is None else x.sigma.contiguous())
    return Result(*torch.ops.subquad.featured_attention(*x, *spec, state)[:4])


def fuses(impl: Impl, q: Tensor, k: Tensor, v: Tensor, directions: Tensor, causal: bool) -> bool:
    """Whether the kernels can take this call; otherwise features go through memory into `linear_attention`."""
    if ranks.active() is not None or exporting() or directions.requires_grad:
        return False
    if q.dtype == torch.float64 or not q.dtype == k.dtype == v.dtype or max(q.shape[-1], v.shape[-1]) > 256:
        return False
    if any(t.numel() == 0 for t in (q, k, v, directions)):
        return False
    wide = causal and q.dtype != torch.bfloat16 and max(q.shape[-1], v.shape[-1]) > 128
    return choose(impl, "featured_attention", q, too_large(q, WIDEST) if wide else None) == "triton"


WIDEST = 114688  # bytes of shared memory that the smallest tile of causal heads of 256 takes in float32
_N, _M = len(Inputs._fields), len(Spec._fields)


def _weigh(x: Inputs, spec: Spec, wide: torch.dtype) -> tuple[Weights, Tensor]:
    """The weights of tokens, and the largest κ [B, H] in the end."""
    from subquad.ops.linear import featured_triton

    kind, made = KINDS[spec.kind], Weights(x.q.new_empty(x.q.shape[:3], dtype=wide))
    first = NOTHING if kind.mode == "exp" else 0.0
    start = x.max0 if x.max0 is not None else x.k.new_full((x.k.shape[0], x.k.shape[2]), first, dtype=wide)
    if kind.mode == "exp":
        top_q, arg_q, _ = featured_triton.peaks(x, spec, made, x.q)
        top_k, arg_k, half = featured_triton.peaks(x, spec, made, x.k)
        made = made._replace(top_q=top_q, arg_q=arg_q, top_k=top_k, arg_k=arg_k)
        kappa = top_k - half - math.log(x.directions.shape[1]) / 2
    elif x.lengths is None:
        return made, start
    else:
        kappa = x.k.new_zeros(x.k.shape[:3], dtype=wide)
    mask, known = keep(x.lengths, x.k.shape[1]), kappa
    if mask is not None:
        kappa, known = kappa.masked_fill(~mask[..., None], PADDED), kappa.masked_fill(~mask[..., None], NOTHING)
    if spec.causal:
        reach = torch.maximum(running_max(known.mT).mT, start[:, None]).contiguous()
        return made._replace(kappa=kappa, reach=reach, start=start), reach[:, -1]
    largest = known.amax(1, keepdim=True)
    return made._replace(kappa=kappa - largest), largest[:, 0]


def _shapes(x: Inputs, spec: Spec, state: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o, s and z; the last two are empty if no state is asked for."""
    o, wide = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]), dtype=x.v.dtype), x.least.dtype
    shape = x.k.shape[0], x.k.shape[2], x.directions.shape[1] * KINDS[spec.kind].parts
    s, z = ((*shape, x.v.shape[3]), shape) if state else ((0,), (0,))
    return o, x.q.new_empty(s, dtype=wide), x.q.new_empty(z, dtype=wide)


def _some(like: Tensor, tensors: Any) -> tuple[Tensor, ...]:
    """An operator returns tensors: empty ones for None."""
    return tuple(like.new_empty((0,)) if t is None else t for t in tensors)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    from subquad.ops.linear import featured_triton

    x, spec, state = Inputs(*args[:_N]), Spec(*args[_N : _N + _M]), args[-1]
    made, largest = _weigh(x, spec, x.least.dtype)
    o, s, z = _shapes(x, spec, state)
    featured_triton.forward(x, spec, made, o, (s, z) if state else None)
    return o, s, z, largest.clone(), *_some(x.q, made)


def _forward_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, spec, state = Inputs(*args[:_N]), Spec(*args[_N : _N + _M]), args[-1]
    kind, wide = KINDS[spec.kind], x.least.dtype
    o, s, z = _shapes(x, spec, state)
    largest = x.k.new_empty((x.k.shape[0], x.k.shape[2]), dtype=wide)
    queries, keys = (t.new_empty(t.shape[:3], dtype=wide) for t in (x.q, x.k))
    made = Weights(queries)
    if kind.mode == "exp":
        numbers = (torch.empty_like(t, dtype=torch.int32) for t in (queries, keys))
        made = made._replace(top_q=queries, arg_q=next(numbers), top_k=keys, arg_k=next(numbers))
    if kind.mode == "exp" or x.lengths is not None:
        made = made._replace(kappa=keys)
        if spec.causal:
            made = made._replace(reach=keys, start=largest)
    return o, s, z, *(torch.empty_like(t) for t in (largest, *_some(x.q, made)))


operator(
    "featured_attention",
    "Tensor q, Tensor k, Tensor v, Tensor directions, Tensor least, Tensor? sigma, Tensor? lengths, Tensor? s0, "
    "Tensor? z0, Tensor? max0, str kind, float scale, float eps, bool causal, bool state",
    4 + len(Weights._fields), _forward, _forward_shapes,
)  # fmt: skip


def _backward(do: Tensor, o: Tensor, *args: Any) -> tuple[Tensor, ...]:
    from subquad.ops.linear import featured_triton

    x, spec, kept = Inputs(*args[:_N]), Spec(*args[_N : _N + _M]), args[_N + _M :]
    made = Weights(*(None if t.shape == (0,) else t for t in kept))  # type: ignore[arg-type]
    do = do if do.stride(-1) == 1 else do.contiguous()
    return _some(do, featured_triton.backward(do, o, x, spec, made))


def _backward_shapes(do: Tensor, o: Tensor, *args: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    x = Inputs(*args[:_N])
    return _some(do, (None if t is None else t.new_empty(t.shape) for t in (x.q, x.k, x.v, x.sigma)))


operator(
    "featured_attention_backward",
    "Tensor do, Tensor o, Tensor q, Tensor k, Tensor v, Tensor directions, Tensor least, Tensor? sigma, "
    "Tensor? lengths, Tensor? s0, Tensor? z0, Tensor? max0, str kind, float scale, float eps, bool causal, "
    + ", ".join(f"Tensor {name}" for name in Weights._fields),
    4, _backward, _backward_shapes,
)  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.spec = inputs[_N : _N + _M]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:_N], output[0], *output[4:])


def _gradient(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: checkpointing computes them at every reading
    inputs, o, kept = tensors[:_N], tensors[_N], tensors[_N + 1 :]
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, dsigma = torch.ops.subquad.featured_attention_backward(do, o, *inputs, *ctx.spec, *kept)
    gradients = [dq, dk, dv, None, None, None if inputs[5] is None else dsigma]
    return *gradients, *[None] * (_N + _M + 1 - len(gradients))


torch.library.register_autograd("subquad::featured_attention", _gradient, setup_context=_setup)


def featured_step(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, sigma: Tensor | None, state: tuple[Tensor, ...], spec: Spec,
    low: float, inplace: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """One token without gradients: q, k [B, H, K], v [B, H, V] -> o [B, H, V] and the new state.

    The state is s, z and the logarithm of their unit [B, H], or for "gaussian" the number of tokens [B, H]. `low` is
    the least denominator, or for "gaussian" what it is in units of the root of that number, as rfa.py says.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    s, z, last = state if inplace else (t.clone(memory_format=torch.contiguous_format) for t in state)
    sigma = None if sigma is None else sigma.contiguous()
    o = torch.ops.subquad.featured_step(q, k, v, directions.contiguous(), sigma, s, z, last, *spec[:3], low)
    return o, (s, z, last)


def _step(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, sigma: Tensor | None, s: Tensor, z: Tensor, last: Tensor,
    kind: str, scale: float, eps: float, low: float,
) -> Tensor:  # fmt: skip
    from subquad.ops.linear import featured_triton

    return featured_triton.step(q, k, v, directions, sigma, s, z, last, Spec(kind, scale, eps), low)


def _step_shape(_q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


operator(
    "featured_step",
    "Tensor q, Tensor k, Tensor v, Tensor directions, Tensor? sigma, Tensor(a!) s, Tensor(b!) z, Tensor(c!) last, "
    "str kind, float scale, float eps, float low",
    1, _step, _step_shape,
)  # fmt: skip
