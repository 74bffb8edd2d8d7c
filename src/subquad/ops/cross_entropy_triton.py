"""The kernel of `summed_cross_entropy`: a program reads the logits of one token once, and writes their gradient.

Legend: N tokens, V vocabulary, BV logits of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, launch

WHOLE = 16384  # up to so many logits stay in registers; others are read twice
BLOCK = 8192
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _store(grads, x, id, real, top, log, n, v, V):
    g = tl.exp((x - top) - log) - tl.where(v == id, 1.0, 0.0)
    tl.store(grads + n * V + v, tl.where(real, g, 0.0).to(grads.dtype.element_ty), mask=v < V)


@triton.jit
def losses_of(
    logits, ids, counted, losses, grads, V, BV: tl.constexpr, ONE: tl.constexpr, GRADS: tl.constexpr
):  # fmt: skip
    """-log softmax(l)[id] of each token, and softmax(l) - [v = id]; 0 for tokens that do not count."""
    n = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BV)
    id = tl.load(ids + n)
    real = tl.load(counted + n) != 0
    own = tl.load(logits + n * V + id).to(tl.float32)
    if ONE:
        x = tl.load(logits + n * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        top = tl.maximum(tl.max(x, 0), LOWEST)
        log = tl.log(tl.sum(tl.exp(x - top), 0))
    else:
        m, s = tl.full((BV,), LOWEST, tl.float32), tl.zeros((BV,), tl.float32)
        for v0 in range(0, V, BV):
            x = tl.load(logits + n * V + v0 + v, mask=v0 + v < V, other=-float("inf")).to(tl.float32)
            new = tl.maximum(m, x)
            s = s * tl.exp(m - new) + tl.exp(x - new)
            m = new
        top = tl.max(m, 0)
        log = tl.log(tl.sum(s * tl.exp(m - top), 0))
    tl.store(losses + n, tl.where(real, (top - own) + log, 0.0))
    if GRADS and ONE:
        _store(grads, x, id, real, top, log, n, v, V)
    elif GRADS:
        for v0 in range(0, V, BV):
            x = tl.load(logits + n * V + v0 + v, mask=v0 + v < V, other=-float("inf")).to(tl.float32)
            _store(grads, x, id, real, top, log, n, v0 + v, V)


def losses_and_gradients(logits: Tensor, ids: Tensor, counted: Tensor, grads: Tensor | None) -> Tensor:
    """The losses [N], float32, and in `grads`, which may be the logits, their gradients [N, V]"""
    size, vocab = logits.shape
    losses = logits.new_empty(size, dtype=torch.float32)
    one = vocab <= WHOLE
    block = triton.next_power_of_2(vocab) if one else BLOCK
    constants = {"BV": block, "ONE": one, "GRADS": grads is not None}
    tensors = logits, ids, counted.view(torch.uint8), losses, logits if grads is None else grads
    launch(losses_of, tensors, Plan((size,), (vocab,), constants, 8 if block >= 4096 else 4))
    return losses
