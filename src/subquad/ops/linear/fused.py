"""The Triton path of linear attention, as far as shapes decide it. Nothing here imports triton or waits for a GPU."""

import torch
from torch import Tensor

from subquad.ops.linear.spec import Inputs, Spec

# Measured on an H200, 132 multiprocessors: 256 causal walks fill it without being cut, fewer are cut into some four
# programs for each; the sums of the bidirectional form are shorter programs, and eight are better there.
WALKS = 256
PROGRAMS = 528
MIN_SEGMENT = 256

# o, s, z, one over each denominator, the state before each segment with z after s; None where not needed
Outputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def state_type(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def segment_of(q: Tensor, k: Tensor, causal: bool) -> int:
    """Tokens per segment: the shortest power of two that leaves no more programs than keep the chip busy."""
    b, h = q.shape[0], q.shape[2]
    longest = max(q.shape[1], k.shape[1])
    length = MIN_SEGMENT
    programs = WALKS if causal and b * h >= WALKS else PROGRAMS if causal else 2 * PROGRAMS
    while length < longest and b * h * longest > length * programs:
        length *= 2
    return length


def cut(x: Inputs, tokens: int, segment: int) -> tuple[int, int, bool]:
    """Slots, which are pairs of a sequence and a segment, segments per sequence, and whether there may be several.

    In a pack only the device knows the lengths: slots are an upper bound, and segments per sequence are not used.
    """
    if x.cu_seqlens is not None:
        return tokens // segment + x.sequences, 1, True
    segments = -(-tokens // segment)
    return x.q.shape[0] * segments, segments, segments > 1


def outputs(x: Inputs, spec: Spec, save: bool) -> Outputs:
    """What `forward` fills."""
    q, n, state = x.q, x.sequences, state_type(x.q)
    h, width_k, width_v = x.k.shape[2], x.k.shape[3], x.v.shape[3]
    shape = (q.shape[0], q.shape[1], h, width_v)
    # packed: outputs after the last sequence stay zero
    o = q.new_empty(shape) if x.cu_seqlens is None else q.new_zeros(shape)
    s = q.new_empty((n, h, width_k, width_v), dtype=state)
    z = q.new_empty((n, h, width_k), dtype=state)
    inv = q.new_empty(shape[:3], dtype=state) if save and spec.normalize else None
    slots, _, several = cut(x, x.k.shape[1], segment_of(q, x.k, spec.causal))
    keep = save and spec.causal and several
    rows = q.new_empty((slots, h, width_k * (width_v + 1)), dtype=state) if keep else None
    return o, s, z, inv, rows


def forward(x: Inputs, spec: Spec, save: bool) -> Outputs:
    from subquad.ops.linear import launches_triton

    done = outputs(x, spec, save)
    launches_triton.forward(x, spec, *done)
    return done


def backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, x: Inputs, spec: Spec, done: Outputs, together: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, s0 and z0, from those of o, s and z and from what `forward` returned.

    `together`: those of q, k and v may lie side by side in one tensor, as q, k and v do.
    """
    from subquad.ops.linear import launches_triton

    return launches_triton.backward(do, ds, dz, x, spec, done, together)
