"""What ranks that share a sequence send each other, by formula: the bytes of one layer, forward and backward.

The formulas are for self-attention over parts of equal size, without padding, that are longer than a window. The tests
compare them with the bytes that `ranks` counts. B batch, T tokens of all ranks, P ranks, D width, H heads, K key width,
V value width, M features; states are float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from subquad.checks import check_count, refuse
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.recurrent import WIDTH, Recurrent

FLOAT32 = 4


class Call(NamedTuple):
    """Sequences [batch, length] over a number of ranks, with activations of `size` bytes a number."""

    batch: int
    length: int
    ranks: int
    size: int = 2

    def gathered(self, numbers: float) -> float:
        """Every rank sends so many bytes to each of the others."""
        return self.ranks * (self.ranks - 1) * numbers

    def added_up(self, numbers: float) -> float:
        """So many bytes on every rank are added up over all ranks, round a ring and back."""
        return 2 * (self.ranks - 1) * numbers

    def passed_on(self, numbers: float) -> float:
        """Every rank but one sends so many bytes to its neighbour."""
        return (self.ranks - 1) * numbers

    @property
    def part(self) -> float:
        """The tokens of a rank."""
        return self.length / self.ranks


def linear(mix: Any, call: Call) -> float:
    """S and z, [M, V + 1] a head: all-gathered, and their gradients; bidirectional, added up, and their gradients."""
    state = mix._init_state(1, None).s
    numbers = call.batch * FLOAT32 * (state.numel() + state[..., 0].numel())
    return 2 * (call.gathered(numbers) if mix.options.causal else call.added_up(numbers))


def efficient(mix: Any, call: Call) -> float:
    """With the softmax of keys: S, z and the largest logit, [K, V + 2] a head, and their gradients."""
    if not mix.options.causal or mix.options.normalize != "softmax":
        refuse("mix", mix, 'efficient with causal=True and normalize="softmax"')
    keys = mix.options.heads * mix.width
    return 2 * call.gathered(call.batch * FLOAT32 * keys * (mix.width + 2))


def gated(mix: Recurrent, call: Call) -> float:
    """S and z, [K, V + 1] a head, and a number by which the state before is multiplied."""
    heads = mix.options.heads
    return _rule(mix, call, heads * mix.keys * (mix.values + 1), heads)


def gated_by_channel(mix: Recurrent, call: Call) -> float:
    """S [K, V] a head, and K numbers."""
    numbers = mix.options.heads * mix.keys
    return _rule(mix, call, numbers * mix.values, numbers)


def delta(mix: Recurrent, call: Call) -> float:
    """S [K, V] a head, and a K x K matrix."""
    numbers = mix.options.heads * mix.keys
    return _rule(mix, call, numbers * mix.values, numbers * mix.keys)


def _rule(mix: Recurrent, call: Call, state: int, change: int) -> float:
    """A state and its gradient, how the state before changes, and a short convolution's last tokens, with gradients."""
    found = call.gathered(call.batch * FLOAT32 * (2 * state + change))
    if mix.conv is not None:
        found += 2 * call.passed_on(call.batch * call.size * (WIDTH - 1) * mix.parts[0])
    return found


def local(mix: Any, call: Call) -> float:
    """Keys and values of a window, for one neighbour or both, and their gradients."""
    sides = 1 if mix.options.causal else 2
    return 2 * sides * call.passed_on(call.batch * call.size * mix.options.window * 2 * mix.options.dim)


def transformer_xl(mix: Any, call: Call) -> float:
    """As local, and which of the tokens there are."""
    sides = 1 if mix.options.causal else 2
    there = sides * call.passed_on(call.batch * mix.options.memory)
    return there + 2 * sides * call.passed_on(call.batch * call.size * mix.options.memory * 2 * mix.options.dim)


def strided(mix: Any, call: Call) -> float:
    """Queries, keys, values and outputs of the heads of the other ranks, and their gradients."""
    share = (call.ranks - 1) / call.ranks
    return 2 * 4 * share * call.batch * call.length * mix.options.dim * call.size


def linformer(mix: Any, call: Call) -> float:
    """E k and F v, [rank, K] a head, added up, and their gradients."""
    return 2 * 2 * call.added_up(call.batch * call.size * mix.options.rank * mix.options.dim)


def softmax(mix: Any, call: Call) -> float:
    """Keys and values to all ranks, once more in backward, and their gradients back."""
    return 3 * call.gathered(call.batch * call.size * call.part * 2 * mix.options.dim)


def ring(mix: Any, call: Call) -> float:
    """Ring attention: keys and values go round, in backward with their gradients."""
    steps = call.ranks - 1
    return 3 * steps * call.ranks * call.batch * call.size * call.part * 2 * mix.options.dim


FORMULAS: dict[str, Callable[[Any, Call], float]] = {
    "linear": linear,
    "efficient": efficient,
    "retnet": gated,
    "gla": gated_by_channel,
    "mamba2": gated,
    "deltanet": delta,
    "gated_deltanet": delta,
    "local": local,
    "transformer_xl": transformer_xl,
    "strided": strided,
    "fixed": strided,
    "linformer": linformer,
    "softmax": softmax,
}


def traffic(mix: Mixer, call: Call) -> float:
    """The bytes that all ranks together send for a forward and a backward of this layer."""
    for name in ("batch", "length", "ranks"):
        check_count(name, getattr(call, name))
    name = next((name for name, cls in MECHANISMS.items() if cls is type(mix)), "")
    if name not in FORMULAS:
        refuse("mix", type(mix).__name__, f"one of {', '.join(FORMULAS)}")
    return FORMULAS[name](mix, call)
