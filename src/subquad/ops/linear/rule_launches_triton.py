"""Starts the kernels of the rules that multiply the state by a matrix, in order, on scratch memory."""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, tile_of
from subquad.ops.linear import rule_kernels_triton as kernels
from subquad.ops.linear.rule_fused import CHUNK
from subquad.ops.linear.spec import RuleInputs

# Columns of the tiles in bfloat16, narrower states are padded. With tiles of 64 and of 32 columns in one kernel, ptxas
# 12.8 reads a uniform register that it never wrote: the matrix units then read from a wrong place.
WIDTH = 64


class Config(NamedTuple):
    block: int  # columns of V in one program, or in one turn of its loop; of K in decay and gradients
    warps: int
    stages: int = 1


def config(kernel: str, width_k: int, width_v: int, half: bool) -> Config:
    """Launch parameters, from shapes alone: nothing is tuned at run time.

    half: operands in bfloat16. In float32 they take twice the space, and exact products are not the matrix units' work.
    """
    wide = max(width_k, width_v) > 128
    if kernel == "decay":
        return Config(min(tile_of(width_k), kernels.BLOCK.value), 4)
    if kernel == "invert":
        return Config(16, 1 if half and width_k <= 64 else 4)
    if kernel in ("walk", "walk_back"):
        return Config(min(tile_of(width_v), 32 if half and not wide else 16), 4, 3 if half and not wide else 1)
    if kernel == "gradients":
        return Config(WIDTH if half else 32, 4 if half else 8)
    return Config(WIDTH if half else 32, 4 if kernel == "solve" or width_k <= 64 else 8)


def blocks(kernel: str, width_k: int, width_v: int, half: bool) -> tuple[int, int]:
    """Columns of K and of V in the tiles of a kernel."""
    block, least = config(kernel, width_k, width_v, half).block, WIDTH if half else 32
    if kernel in ("decay", "gradients"):
        return block, least
    if kernel == "solve":
        return block, block
    whole = tile_of(width_k)
    return max(whole, least) if kernel == "read" else whole, block


class Call:
    """The tensors of one call, and how its kernels see them."""

    def __init__(self, x: RuleInputs, do: Tensor | None = None) -> None:
        q, k, v, do = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (*x[:3], do))
        assert q is not None
        assert k is not None
        assert v is not None
        gate = x.log_gate
        self.kind = 0 if gate is None else gate.dim() - 2  # [B, T, H] is 1, [B, T, H, K] is 2
        if gate is not None and self.kind == 2 and gate.stride(-1) != 1:
            gate = gate.contiguous()
        self.x, self.q, self.k, self.v, self.do, self.gate, self.beta = x, q, k, v, do, gate, x.beta
        self.length, self.heads, self.width_k, self.width_v = q.shape[1], q.shape[2], k.shape[3], v.shape[3]
        self.segments = -(-self.length // CHUNK)
        self.slots, owner = x.sequences * self.segments, q
        if x.cu_seqlens is not None:  # the sequence of each slot: sequence n has slots from cu[n] // CHUNK + n on
            self.slots = self.length // CHUNK + x.sequences
            first = x.cu_seqlens[:-1] // CHUNK + torch.arange(x.sequences, device=q.device)
            owner = torch.searchsorted(first, torch.arange(self.slots, device=q.device), right=True) - 1
            owner = owner.to(torch.int32)
        self.where = (q if x.cu_seqlens is None else x.cu_seqlens, owner, q if x.lengths is None else x.lengths)
        self.steep = (False, True) if self.kind == 2 else (False,)
        self.half = q.dtype is torch.bfloat16
        self.buffer = torch.bfloat16 if self.half else torch.float32  # of what is kept from kernel to kernel

    def tokens(self, width: int) -> Tensor:
        """Scratch of that width for each token and head."""
        return self.q.new_empty((*self.q.shape[:3], width), dtype=self.buffer)

    def states(self) -> Tensor:
        """Scratch for the state of every chunk."""
        return self.q.new_empty((self.slots, self.heads, self.width_k, self.width_v), dtype=self.buffer)

    def share(self, kernel: str) -> int:
        """How many programs share a chunk and head, or a sequence and head, each with some columns."""
        block_k, block_v = blocks(kernel, self.width_k, self.width_v, self.half)
        if kernel in ("decay", "gradients"):
            return blocks_of(self.width_k, block_k)
        return 1 if kernel in ("invert", "solve") else blocks_of(self.width_v, block_v)

    def start(
        self, name: str, tensors: tuple[Tensor | None, ...], strided: dict[str, Tensor | None], **own: bool
    ) -> None:  # fmt: skip
        """Start a kernel on its tensors; q stands for those that are not there, and is not read then.

        The kernel also takes the strides of `strided`, in this order: from row to row and from head to head as numbers,
        and from token to token as a constant, or as a number for a gate (G) or a rate (B) of each head.
        """
        x, kernel = self.x, getattr(kernels, name)
        cfg = config(name, self.width_k, self.width_v, self.half)
        block_k, block_v = blocks(name, self.width_k, self.width_v, self.half)
        numbers = [self.length, CHUNK, self.segments]
        constants: dict[str, Any] = {}
        if name == "gradients":
            numbers.append(x.q.shape[0] * self.length)
        for letter, t in strided.items():
            strides = (0, 0, 0) if t is None else t.stride()[:3]
            if letter in "GB" and name != "decay":
                numbers += strides
            else:
                numbers += strides[::2]
                constants[f"{letter}T"] = strides[1]
        whole = self.length % CHUNK == 0 and self.width_k % block_k == 0 and self.width_v % block_v == 0
        # operands of tf32x3 take three times the shared memory, and wider ones do not fit
        exact = "tf32x3" if self.q.dtype is torch.float16 and self.width_k <= 128 else "ieee"
        constants |= {
            "K": self.width_k, "V": self.width_v, "H": self.heads, "C": CHUNK, "BK": block_k, "BV": block_v,
            "EVEN": whole and x.lengths is None and x.cu_seqlens is None,
            "PACKED": x.cu_seqlens is not None, "LENGTHS": x.lengths is not None, "GATE": self.kind,
            "DELTA": x.beta is not None, "EXACT": not self.half,
            "SUM": tl.float32 if self.half else tl.float64,  # of log gates: a strong one costs those after it no digits
            "DOT": tl.bfloat16 if self.half and not INTERPRETED else tl.float32,
            "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else exact, **own,
        }  # fmt: skip
        wanted = {name: constants[name] for name in kernel.fn.__annotations__}  # the constants
        programs = (x.sequences if name.startswith("walk") else self.slots) * self.heads * self.share(name)
        plan = Plan((programs,), tuple(numbers), wanted, cfg.warps, cfg.stages)
        launch(kernel, (*(self.q if t is None else t for t in tensors), *self.where), plan)


class Walked(NamedTuple):
    """What `walk` leaves behind, and what it took."""

    q: Tensor  # decayed from the chunk's start, where each channel has its gate
    k: Tensor  # decayed to the chunk's end, likewise
    fade: Tensor | None  # the decay of each chunk, likewise
    worst: Tensor | None  # and the steepest of some channels, which decides how `read` and `gradients` go
    w: Tensor | None
    new: Tensor  # V', or v
    rows: Tensor  # the state before each chunk


def walk(call: Call, final: Tensor, inverse: Tensor | None, backward: bool) -> Walked:
    """Everything up to V' and the states; the last state goes to `final`, and T to `inverse` in the forward pass."""
    q, k, v, gate, beta, x = call.q, call.k, call.v, call.gate, call.beta, call.x
    fade = worst = w = None
    new: Tensor = v
    qd, kd = q, k
    if call.kind == 2:
        kd, qd = call.tokens(call.width_k), call.tokens(call.width_k) if backward else q
        fade = kd.new_empty((call.slots, call.heads, call.width_k), dtype=torch.float32)
        worst = fade.new_empty((call.slots, call.heads, call.share("decay")))
        call.start("decay", (q, k, gate, qd, kd, fade, worst), {"Q": q, "K": k, "G": gate}, QUERIES=backward)
    if beta is not None:
        w, new = call.tokens(call.width_k), call.tokens(call.width_v)
        if not backward:
            call.start("invert", (k, gate, beta, inverse), {"K": k, "G": gate, "B": beta})
        call.start("solve", (k, v, gate, beta, inverse, w, new), {"K": k, "V": v, "G": gate, "B": beta})
    rows = call.states()
    call.start(
        "walk", (kd, new, w, gate, fade, rows, new, x.s0, final), {"K": kd, "U": new, "G": gate}, INIT=x.s0 is not None
    )
    return Walked(qd, kd, fade, worst, w, new, rows)


def forward(x: RuleInputs, o: Tensor, s: Tensor, inverse: Tensor | None) -> None:
    """Fill o, the last state s and, for a delta rule, the inverses T [B, T, H, CHUNK]."""
    call = Call(x)
    done = walk(call, s, inverse, backward=False)
    for steep in call.steep:
        tensors = call.q, call.k, done.new, call.gate, done.worst, done.rows, o
        strided = {"Q": call.q, "K": call.k, "U": done.new, "G": call.gate}
        call.start("read", tensors, strided, BACK=False, STEEP=steep)


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, inverse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, beta and s0. The walk is done again: only the inverses were kept."""
    call = Call(x, do)
    q, k, v, gate, beta = call.q, call.k, call.v, call.gate, call.beta
    final = q.new_empty((x.sequences, call.heads, call.width_k, call.width_v), dtype=torch.float32)
    done = walk(call, final, inverse, backward=True)
    dnew, drows, ds0 = call.tokens(call.width_v), call.states(), torch.empty_like(final)
    for steep in call.steep:
        strided = {"Q": q, "K": k, "U": call.do, "G": gate}
        call.start("read", (q, k, call.do, gate, done.worst, None, dnew), strided, BACK=True, STEEP=steep)
    end = None if ds is None else ds.contiguous()
    tensors = done.q, done.k, done.w, gate, done.fade, call.do, dnew, drows, end, ds0
    strided = {"Q": done.q, "K": done.k, "O": call.do, "G": gate}
    call.start("walk_back", tensors, strided, END=end is not None)
    make = torch.Tensor.new_empty if x.cu_seqlens is None else torch.Tensor.new_zeros  # tokens after a pack
    dq, dk, dv = (make(t, t.shape) for t in (q, k, v))
    parts = call.share("gradients"), *q.shape[:3]
    dgate = None if gate is None else make(final, gate.shape if call.kind == 2 else parts)
    dbeta = None if beta is None else make(final, parts)
    kept = inverse, done.rows, done.new, drows, dnew
    for steep in call.steep:
        inputs = q, k, v, gate, done.worst, beta, call.do
        strided = {"Q": q, "K": k, "V": v, "O": call.do, "G": gate, "B": beta, "N": done.new}
        call.start("gradients", (*inputs, *kept, dq, dk, dv, dgate, dbeta), strided, STEEP=steep)
    if beta is None:
        dv.copy_(dnew)
    if gate is not None and dgate is not None:
        dgate = (dgate if call.kind == 2 else dgate.sum(0)).to(gate.dtype)
    if beta is not None and dbeta is not None:
        dbeta = dbeta.sum(0).to(beta.dtype)
    return dq, dk, dv, dgate, dbeta, None if x.s0 is None else ds0
