"""Starts the kernels of linear attention: with which launch parameters, in which order, on which scratch memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, launch_by_key, number_of, tile_of
from subquad.ops.linear import gated_kernels_triton as gated
from subquad.ops.linear import kernels_triton as kernels
from subquad.ops.linear.fused import Outputs, cut, segment_of, state_type
from subquad.ops.linear.spec import Inputs, Spec
from subquad.ops.packed import beside

Sums = tuple[Tensor, Tensor]  # s and z, or the same rows twice, which hold z after s


class Config(NamedTuple):
    chunk: int
    block: int  # columns of the state at a time: of V in forward and backward_v, of both in gradients, else of K
    warps: int
    stages: int
    registers: int = 255  # at most, so that more programs share a multiprocessor


WIDE = 64  # from this width of keys on, products read their operands from shared memory

# (kernel, causal, K, V, bytes per element) -> what measured best on an H200; other shapes follow `config`. "many":
# whole sequences, more than two for each multiprocessor
TUNED: dict[tuple[str, bool, int, int, int], Config] = {
    ("states", True, 64, 64, 2): Config(64, 64, 4, 3, 128),
    ("states", False, 64, 64, 2): Config(128, 64, 4, 2, 168),
    ("forward many", True, 64, 64, 2): Config(64, 64, 4, 3, 168),
    ("backward_q many", True, 64, 64, 2): Config(64, 64, 4, 3, 168),
    ("backward_kv many", True, 64, 64, 2): Config(64, 64, 4, 2, 255),
    ("backward_kv", False, 64, 64, 2): Config(64, 64, 4, 2, 168),
    # a program of one warp waits for no other, and all programs of MNIST's model fit the GPU at once
    ("forward many", True, 32, 32, 2): Config(32, 32, 1, 3, 255),
    ("backward_q many", True, 32, 32, 2): Config(32, 32, 1, 3, 255),
    ("backward_kv many", True, 32, 32, 2): Config(32, 32, 1, 3, 255),
    ("forward", True, 256, 64, 2): Config(64, 64, 8, 2, 255),
    ("backward_v", True, 256, 64, 2): Config(64, 64, 8, 2, 255),
    ("walk_s", True, 64, 64, 2): Config(64, 64, 4, 3, 128),
    ("walk_r", True, 64, 64, 2): Config(64, 64, 4, 3, 128),
}


def config(kernel: str, causal: bool, width_k: int, width_v: int, itemsize: int, many: bool = False) -> Config:
    """Launch parameters, from shapes alone: nothing is tuned at run time, so first calls and captures are cheap.

    backward_kv is launched as backward_k and backward_v, one after the other, where no program can hold a whole state.
    The chunks of walk_s, walk_r and gradients are the same.
    """
    k, v = tile_of(width_k), tile_of(width_v)
    tuned = TUNED.get((kernel, causal, k, v, itemsize))
    if many:
        tuned = TUNED.get((f"{kernel} many", causal, k, v, itemsize), tuned)
    if tuned:
        return tuned
    if kernel == "gradients":
        return Config(16, 32, 4, 1) if itemsize > 2 else Config(64, 64, 4 if max(k, v) <= 64 else 8, 1)
    across, along = (v, k) if kernel in ("forward", "backward_v") else (k, v)
    if itemsize > 2:  # exact products run on scalar units and want small tiles
        block = min(across, max(16, 2048 // along))
        return Config(16, block, 8 if block * along > 1024 else 4, 1)
    block = min(across, 64, max(16, 8192 // along))
    small = block * along <= 4096
    if kernel in ("walk_s", "walk_r"):
        return Config(64, block, 4, 3) if small else Config(64, block, 8, 2)
    return Config(64, block, 4, 3 if small else 2, 128 if small and not causal else 255)


class Walk(NamedTuple):
    """A kernel over tokens, of keys or of queries; a program walks a segment with some columns of K, of V, or all."""

    kernel: Any
    inputs: str  # the letters of the inputs that it reads; their strides are passed too
    over_keys: bool
    columns: str
    names: str = ""  # what the kernel calls its inputs, if not by their letters
    by_chunk: bool = False  # a program has one chunk, and takes the blocks of columns one after the other


WALKS = {
    "states": Walk(kernels.states, "KV", over_keys=True, columns="K"),
    "forward": Walk(kernels.forward, "QKV", over_keys=False, columns="V"),
    "backward_q": Walk(kernels.backward_q, "QKVO", over_keys=False, columns="K"),
    "backward_kv": Walk(kernels.backward_kv, "QKVO", over_keys=True, columns=""),
    "backward_k": Walk(kernels.backward_kv, "QKVO", over_keys=True, columns="K"),
    "backward_v": Walk(kernels.backward_kv, "QKVO", over_keys=True, columns="V"),
    "walk_s": Walk(gated.walk, "KV", over_keys=True, columns="K", names="XY"),
    "walk_r": Walk(gated.walk, "QO", over_keys=False, columns="K", names="XY"),
    "gradients": Walk(gated.gradients, "QKVO", over_keys=True, columns="KV", by_chunk=True),
}
_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,  # the interpreter has no bfloat16 dot
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Call:
    """Starts the kernels of one call; a tensor that is not there is replaced by one that is, and never read."""

    def __init__(self, x: Inputs, spec: Spec, do: Tensor | None = None, grads: Sequence[Tensor] | None = None) -> None:
        """`grads`: those of q, k and v in a backward, whose heads are contiguous, but rows may be further apart."""
        q, k, v, gate, lengths, cu = x[:6]
        self.x, self.spec, self.gated = x, spec, gate is not None
        self.inputs = {"Q": q, "K": k, "V": v, "O": q if do is None else do}
        self.segment = segment_of(q, k, spec.causal)
        self.heads, self.width_k, self.width_v = q.shape[2], q.shape[3], v.shape[3]
        self.gate = q if gate is None else gate
        self.rows = {f"G{name}": t.stride(1) for name, t in zip("QKV", grads or (), strict=False)}
        owner = q
        if cu is not None:  # the sequence of each slot: sequence n has slots from cu[n] // L + n on
            first = cu[:-1] // self.segment + torch.arange(x.sequences, device=q.device)
            slots = torch.arange(q.shape[1] // self.segment + x.sequences, device=q.device)
            owner = (torch.searchsorted(first, slots, right=True) - 1).to(torch.int32)
        self.where = (q if cu is None else cu, owner, q if lengths is None else lengths)
        # everything but the numbers in the tensors: calls of one kind launch the same kernels in the same way
        self.kind = number_of((
            *((t.dtype, t.shape, t.stride()) for t in (q, k, v)), spec, self.segment,
            None if gate is None else (gate.dtype, gate.stride()),
            None if lengths is None else lengths.dtype,
            None if cu is None else (cu.dtype, cu.shape),
            None if do is None else do.stride(), *self.rows.values(),
            torch.backends.cuda.matmul.allow_tf32,
        ))  # fmt: skip

    def cut(self, tokens: int) -> tuple[int, int, bool]:
        return cut(self.x, tokens, self.segment)

    def config(self, kernel: str) -> Config:
        slots, _, several = self.cut(self.x.q.shape[1])
        many = not several and slots * self.heads > 264
        return config(kernel, self.spec.causal, self.width_k, self.width_v, self.x.q.element_size(), many)

    def walk(self, name: str, *tensors: Tensor, **own: bool) -> None:
        """Start a kernel of WALKS on its tensors; `own` are the constants that not all of them have."""
        kernel, letters, over_keys, columns, names, by_chunk = WALKS[name]

        def plan() -> Plan:
            x, spec, cfg = self.x, self.spec, self.config(name)
            block_k, block_v = tile_of(self.width_k), tile_of(self.width_v)
            block_k = min(cfg.block, block_k) if "K" in columns else block_k
            block_v = min(cfg.block, block_v) if "V" in columns else block_v
            tokens = (x.k if over_keys else x.q).shape[1]
            slots, segments, _ = self.cut(tokens)
            if by_chunk:
                parts = blocks_of(self.segment, cfg.chunk)
            else:
                parts = blocks_of(self.width_k, block_k) * blocks_of(self.width_v, block_v)
            padded = x.lengths is not None and tokens == x.k.shape[1]  # else queries, which are never padded
            whole = self.width_k % block_k == 0 and self.width_v % block_v == 0 and tokens % cfg.chunk == 0
            gate = self.gate.stride()[:3] if self.gated else (0, 0, 0)
            numbers = {
                "eps": spec.eps, "T": tokens, "L": self.segment, "NS": segments, "SLOTS": slots,
                "gb": gate[0], "gt": gate[1], "gh": gate[2],
            }  # fmt: skip
            constants = {
                "K": self.width_k, "V": self.width_v, "H": self.heads, "C": cfg.chunk, "BK": block_k, "BV": block_v,
                "EVEN": whole and not padded and x.cu_seqlens is None, "MAP": spec.feature_map,
                "CAUSAL": spec.causal, "NORM": spec.normalize, "SIGNED": spec.signed, "GATED": self.gated,
                "PACKED": x.cu_seqlens is not None, "LENGTHS": padded, **self.rows, **own,
                "ONCE": not INTERPRETED and x.q.element_size() == 2 and tile_of(self.width_k) < WIDE,
                "DOT": _DOT[x.q.dtype], "ACC": tl.float64 if x.q.dtype is torch.float64 else tl.float32,
                "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            }  # fmt: skip
            for letter, called in zip(letters, names or letters, strict=True):
                strides = self.inputs[letter].stride()
                numbers |= {f"{called.lower()}b": strides[0], f"{called.lower()}h": strides[2]}
                constants[f"{called}T"] = strides[1]
            taken = kernel.arg_names  # a kernel names only what it needs
            return Plan(
                (slots * self.heads * parts,),
                tuple(numbers[name] for name in taken if name in numbers),
                {name: constants[name] for name in taken if name in constants},
                cfg.warps, cfg.stages, cfg.registers,
            )  # fmt: skip

        launch_by_key((self.kind, name, *own.values()), kernel, (*tensors, *self.where), plan)

    def kept(self) -> Sums:
        """Scratch for a state of each chunk, s [chunks, H, V, K] and z."""
        q, packed = self.x.q, self.x.cu_seqlens is not None
        chunk = self.config("gradients").chunk
        chunks = q.shape[1] // chunk + self.x.sequences if packed else q.shape[0] * blocks_of(q.shape[1], chunk)
        wide = state_type(q)
        kept = torch.bfloat16 if q.dtype is torch.bfloat16 else wide
        shape = (chunks, self.heads, self.width_v, self.width_k)
        return q.new_empty(shape, dtype=kept), q.new_empty(shape[:2] + shape[3:], dtype=wide)

    def scan(
        self, tokens: int, rows: Tensor, grows: Tensor | None, init: Sums | None, final: Sums | None, reverse: bool
    ) -> None:
        """Add up the rows of every sequence of so many tokens, in place (causal), and put the last sums in `final`.

        Causal, `final` takes one row more for each sequence, after those of the slots.
        """
        packed, causal, none = self.x.cu_seqlens is not None, self.spec.causal, (rows, rows)

        def plan() -> Plan:
            elements, (slots, segments, _) = rows.shape[2], self.cut(tokens)
            unroll = 16 if packed else min(16, 1 << (segments - 1).bit_length())
            block = min(2048 // unroll, 512, tile_of(elements))
            constants = {
                "K": self.width_k, "V": self.width_v, "CAUSAL": causal, "REVERSE": reverse,
                "GATED": grows is not None, "PACKED": packed, "INIT": init is not None, "FINAL": final is not None,
                "U": unroll, "BE": block, "ACC": tl.float64 if rows.dtype is torch.float64 else tl.float32,
            }  # fmt: skip
            programs = self.x.sequences * self.heads * blocks_of(elements, block)
            return Plan((programs,), (self.segment, segments, slots, self.heads), constants)

        tensors = (rows, rows if grows is None else grows, *(init or none), *(final or none), self.where[0])
        launch_by_key((self.kind, "scan", reverse, init is None, final is None), kernels.scan, tensors, plan)


def forward(
    x: Inputs, spec: Spec, o: Tensor, s: Tensor, z: Tensor, inv: Tensor | None, rows: Tensor | None
) -> None:  # fmt: skip
    """Fill o, s, z and, where given, one over each denominator and the state before each segment."""
    call, causal, keys = Call(x, spec), spec.causal, x.k.shape[1]
    slots, _, several = call.cut(keys)
    init = None if x.s0 is None or x.z0 is None else (x.s0, x.z0)
    if several:
        if rows is None:
            rows = s.new_empty((slots, call.heads, call.width_k * (call.width_v + 1)))
        grows = None if x.log_gate is None else rows.new_empty(rows.shape[:2])
        each = rows, rows, rows, rows, rows if grows is None else grows
        call.walk("states", x.k, x.v, call.gate, *each, SPLIT=True, INIT=False)
        call.scan(keys, rows, grows, init, None if causal else (s, z), reverse=False)
    elif not causal:
        call.walk("states", x.k, x.v, call.gate, s, z, *(init or (s, s)), s, SPLIT=False, INIT=init is not None)
    if not causal:
        init = s, z
    elif rows is not None:
        init = rows, rows
    call.walk(
        "forward", x.q, x.k, x.v, call.gate, o, o if inv is None else inv, *(init or (s, z)), s, z,
        SPLIT=causal and several, INIT=init is not None, SAVE=inv is not None,
    )  # fmt: skip


def backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, x: Inputs, spec: Spec, done: Outputs, together: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, s0 and z0. `together`: those of q, k and v may lie side by side."""
    _, s, z, saved_inv, _ = done
    if ds is None and dz is not None:
        ds = torch.zeros_like(s)
    if dz is None and ds is not None:
        dz = torch.zeros_like(z)
    dend = None if ds is None or dz is None else (ds.contiguous(), dz.contiguous())
    do = do if do.stride(-1) == 1 else do.contiguous()
    plain = x.log_gate is None
    grads = beside(*x[:3]) if together and plain and x.cu_seqlens is None else None
    if grads is None:
        grads = [t.new_empty(t.shape) if x.cu_seqlens is None else t.new_zeros(t.shape) for t in x[:3]]
    dinit = None if x.s0 is None or x.z0 is None else (torch.empty_like(x.s0), torch.empty_like(x.z0))
    inv = s.new_empty((0,)) if saved_inv is None else saved_inv
    call = Call(x, spec, do, grads)
    run = backward_plain if plain else backward_gated
    dg = run(call, do, dend, done, inv, grads, dinit)
    return *grads, dg, *(dinit or (None, None))


def backward_plain(
    call: Call, do: Tensor, dend: Sums | None, done: Outputs, inv: Tensor, grads: Sequence[Tensor], dinit: Sums | None
) -> None:
    """Fill the gradients of q, k and v and of the first s and z."""
    (o, s, z, _, before), (dq, dk, dv) = done, grads
    x, causal, none = call.x, call.spec.causal, (inv, inv)
    slots, _, several = call.cut(x.q.shape[1])
    init: Sums | None = None if x.s0 is None or x.z0 is None else (x.s0, x.z0)
    if not causal:
        init = s, z
    elif before is not None and len(before):
        init = before, before
    pull = torch.empty_like(inv)
    sums = None
    if several:
        rows = s.new_empty((slots, call.heads, call.width_k * (call.width_v + 1)))
        sums = rows, rows
    after, first = dend, dinit
    if not causal:  # R and r are the same after every token, and before
        after = dinit or (torch.empty_like(s), torch.empty_like(z))
        sums = sums or after
        first = None

    start = None if several or causal else dend
    call.walk(
        "backward_q", x.q, x.k, x.v, o, inv, do, pull, dq, *(init or none), *(start or none), *(sums or none),
        SPLIT=several, INIT=init is not None, START=start is not None,
    )  # fmt: skip
    if several:
        call.scan(x.q.shape[1], rows, None, dend, None if causal else after, reverse=True)
        after = sums if causal else after
    k, v = tile_of(call.width_k), tile_of(call.width_v)
    together = k * v <= 4096 and call.config("backward_k").block == k and call.config("backward_v").block == v
    for name in ("backward_kv",) if together else ("backward_v", "backward_k"):
        call.walk(
            name, x.q, x.k, x.v, inv, do, pull, dk, dv, *(after or none), *(first or none),
            SPLIT=several, INIT=after is not None,
            DK=name != "backward_v", DV=name != "backward_k", FINAL=first is not None,
        )  # fmt: skip


def backward_gated(
    call: Call, do: Tensor, dend: Sums | None, done: Outputs, inv: Tensor, grads: Sequence[Tensor], dinit: Sums | None
) -> Tensor:
    """Fill the gradients of q, k and v and of the first s and z; that of log_gate."""
    (o, s, _, _, before), x, none = done, call.x, (inv, inv)
    slots, _, several = call.cut(x.q.shape[1])
    dg = call.gate.new_empty(call.gate.shape) if x.cu_seqlens is None else call.gate.new_zeros(call.gate.shape)
    # z has gradients where outputs were divided by it, or where the caller uses it
    with_z = call.spec.normalize or dend is not None
    pull, (kept_s, kept_z), (kept_r, kept_rz) = torch.empty_like(inv), call.kept(), call.kept()
    init: Sums | None = None if x.s0 is None or x.z0 is None else (x.s0, x.z0)
    if before is not None and len(before):
        init = before, before
    call.walk(
        "walk_s", x.k, x.v, call.gate, o, inv, pull, kept_s, kept_z, inv, *(init or none), *none, inv,
        SPLIT=several, INIT=init is not None, BACK=False, WITH_Z=with_z, FINAL=False,
    )  # fmt: skip
    if several:  # rows: what each segment adds to R, then R after it
        extra = 0 if dinit is None else x.sequences
        rows = s.new_empty((slots + extra, call.heads, call.width_k * (call.width_v + 1)))
        grows, reach = s.new_empty(rows.shape[:2]), s.new_empty(kept_s.shape[:2])
        begin: Sums | None = None
        ends: Sums | None = (rows, rows)
    else:
        rows = grows = reach = inv
        begin, ends = dend, dinit
    call.walk(
        "walk_r", x.q, do, call.gate, o, inv, pull, kept_r, kept_rz, reach, *(begin or none), *(ends or none), grows,
        SPLIT=several, INIT=begin is not None, BACK=True, WITH_Z=with_z, FINAL=dinit is not None,
    )  # fmt: skip
    if several:
        call.scan(x.q.shape[1], rows, grows, dend, dinit, reverse=True)
    if dinit is not None and not with_z:
        dinit[1].zero_()
    call.walk(
        "gradients", x.q, x.k, x.v, call.gate, inv, do, pull, kept_s, kept_z, kept_r, kept_rz, reach, rows, *grads, dg,
        SPLIT=several, WITH_Z=with_z,
    )  # fmt: skip
    return dg


def step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor, snew: Tensor,
    znew: Tensor, spec: Spec,
) -> Tensor:  # fmt: skip
    """o of one token for every row and head; snew and znew, which may be s and z themselves, are filled."""
    b, h, width_k = q.shape
    width_v = v.shape[2]
    block_k = tile_of(width_k)
    block_v = min(tile_of(width_v), max(16, 4096 // block_k))
    o = q.new_empty(v.shape, dtype=v.dtype)
    g, rate = q if log_gate is None else log_gate, q if beta is None else beta
    constants = {
        "K": width_k, "V": width_v, "BK": block_k, "BV": block_v, "MAP": spec.feature_map, "SIGNED": spec.signed,
        "NORM": spec.normalize, "GATE": 0 if log_gate is None else log_gate.dim() - 1, "DELTA": beta is not None,
        "INPLACE": snew is s, "ACC": tl.float64 if s.dtype is torch.float64 else tl.float32,
    }  # fmt: skip
    strides = tuple(d for x in (q, k, v, g, rate, s, z) for d in x.stride()[:2])
    warps = min(4, max(1, block_k * block_v // 512))
    plan = Plan((b * h,), (spec.eps, h, *strides), constants, warps)
    launch(kernels.step, (q, k, v, g, rate, s, z, o, snew, znew), plan)
    return o
