"""The update rules of the running sum S [K, V], by the names of ONNX's LinearAttention operator.

rule          update at token t                                takes                default feature map, normalize
linear        S ← S + k vᵀ                                                          elu+1, True
gated         S ← Diag(a) S + k vᵀ                             log_gate             elu+1, True
delta         S ← S + β k (v - Sᵀk)ᵀ                           beta                 identity, False
gated_delta   S ← Diag(a) S, then S ← S + β k (v - Sᵀk)ᵀ       log_gate and beta    identity, False

k here is φ(k). a = exp(log_gate) is one number per head, or one per head and column of k. The sum z, by which outputs
are divided where normalize is on, obeys the rule as if it were one more column of S with values of one:
z ← Diag(a) z + k, or z ← z + β k (1 - zᵀk).

ONNX's operator has a scale, but no feature map and no divisor. Its output and its present state are

    linear_attention(scale * q, k, v, rule=rule, feature_map="identity", normalize=False, log_gate=decay, beta=beta,
                     initial_state=LinearState(past_state, zeros [B, H, K]), return_state=True)

with heads apart ([B, T, H·D] there), and k, v, decay and beta repeated where several query heads share them.

`linear`, and `gated` with a number per head, are sums of outer products, computed by chunked.py and kernels_triton.py.
The others multiply the state by a matrix at each token: rule_chunked.py and rule_kernels_triton.py compute them.
"""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from subquad.checks import check_strided, refuse, shown
from subquad.ops.lengths import readable, zero_padding

RuleName = Literal["linear", "gated", "delta", "gated_delta"]


class Rule(NamedTuple):
    """What a rule takes, and its defaults."""

    gated: bool
    delta: bool
    feature_map: str
    normalize: bool


RULES: dict[str, Rule] = {
    "linear": Rule(False, False, "elu+1", True),
    "gated": Rule(True, False, "elu+1", True),
    "delta": Rule(False, True, "identity", False),
    "gated_delta": Rule(True, True, "identity", False),
}
assert tuple(RULES) == get_args(RuleName)


def rule_of(name: str | None, causal: bool, log_gate: Tensor | None, beta: Tensor | None) -> Rule:
    """The rule of that name, or the one that the inputs mean; refuse inputs that it has no use for, or lacks."""
    asked = "log_gate" if name is None else f"rule={name!r}"
    name = name or ("linear" if log_gate is None else "gated")
    if name not in RULES:
        refuse("rule", name, f"one of {', '.join(RULES)}")
    rule = RULES[name]
    for given, wanted, argument in ((log_gate, rule.gated, "log_gate"), (beta, rule.delta, "beta")):
        if given is None and wanted:
            raise ValueError(f"rule={name!r} without {argument}: accepted is rule={name!r} with {argument}")
        if given is not None and not wanted:
            users = ", ".join(other for other, r in RULES.items() if (r.gated if argument == "log_gate" else r.delta))
            raise ValueError(f"{argument} with rule={name!r}: accepted is {argument} with one of the rules {users}")
    if not causal and name != "linear":
        raise ValueError(f"{asked} with causal=False: accepted is causal=True, since a decay or a delta needs an order")
    return rule


def check_gate(log_gate: Tensor, q: Tensor, letters: str, lengths: Tensor | None = None) -> None:
    """log_gate must have a number, or one for each column, of q [..., H, K]: logarithms of decays in [0, 1].

    Padding may hold anything.
    """
    shape = tuple(q.shape)
    if log_gate.shape not in (shape[:-1], shape) or not _real(log_gate, q):
        accepted = f"floating point numbers of shape {letters} = {shape[:-1]} or {shape} on {q.device}"
        raise ValueError(f"log_gate is {shown(log_gate)}: accepted are {accepted}")
    check_strided("log_gate", log_gate)
    if readable(log_gate) and not bool((zero_padding(log_gate.detach(), lengths) <= 0).all()):
        raise ValueError("log_gate has values above 0 or NaN: accepted are logarithms of a decay in [0, 1]")


def check_beta(beta: Tensor, q: Tensor, letters: str, lengths: Tensor | None = None) -> None:
    """beta must have a number in [0, 2] for each token and head of q [..., H, K]. Padding may hold anything."""
    shape = tuple(q.shape[:-1])
    if beta.shape != shape or not _real(beta, q):
        accepted = f"floating point numbers of shape {letters} = {shape} on {q.device}"
        raise ValueError(f"beta is {shown(beta)}: accepted are {accepted}")
    check_strided("beta", beta)
    values = zero_padding(beta.detach(), lengths) if readable(beta) else None
    if values is not None and not bool(((values >= 0) & (values <= 2)).all()):
        raise ValueError("beta has values outside [0, 2] or NaN: accepted are rates of writing in [0, 2]")


def _real(x: Tensor, q: Tensor) -> bool:
    return x.is_floating_point() and x.device == q.device


def rule_step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """One token, as the rule is written: q, k [..., K], v [..., V], state [..., K, V] -> o [..., V], the new state."""
    if log_gate is not None:
        fade = log_gate.to(state.dtype).exp()
        fade = fade[..., None] if fade.dim() == k.dim() else fade[..., None, None]
        state = state.mul_(fade) if inplace else state * fade
    if beta is not None:
        v = beta[..., None].to(state.dtype) * (v - (k[..., None, :] @ state)[..., 0, :])
    write = state.addcmul_ if inplace else state.addcmul
    state = write(k[..., None], v[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :], state
