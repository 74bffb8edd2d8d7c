"""Starts the kernels of linear attention on random features."""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, fitting, launch, shared_memory, tile_of
from subquad.ops.linear import featured_kernels_triton as kernels
from subquad.ops.linear.featured import KINDS, Inputs, Spec, Weights

LEAST = 16  # chunks at a time
PROGRAMS = 1056  # enough to fill the chip: bidirectional sums are cut into that many
_WORK = {torch.bfloat16: torch.float32 if INTERPRETED else torch.bfloat16, torch.float64: torch.float64}
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class Config(NamedTuple):
    chunk: int
    features: int  # of a block
    warps: int
    stages: int = 1


def config(
    kernel: str, width_k: int, width_v: int, count: int, itemsize: int, room: int, causal: bool
) -> Config:  # fmt: skip
    """Launch parameters from shapes alone. `room`: the shared memory that the device gives one program."""
    k, v = block_of(width_k, itemsize), block_of(width_v, itemsize)
    chunks = (64, 32, 16) if itemsize == 2 else (32, 16)
    most = block_of(count, itemsize)
    chunk = fitting(chunks, lambda n: shared(kernel, n, min(n, most), k, v, itemsize, causal), room)
    features = min(chunk, most)
    wide = max(k, v) > 64 or itemsize > 2
    return Config(chunk, features, 8 if wide or kernel == "back_k" else 4, 2 if kernel == "walk" and not wide else 1)


def block_of(width: int, itemsize: int) -> int:
    """Columns of a tile. With tiles of 64 and of fewer in one kernel, ptxas 12.8 has made wrong code: see
    rule_launches_triton.py."""
    return max(tile_of(width), 64 if itemsize == 2 else 16)


def shared(kernel: str, chunk: int, features: int, k: int, v: int, itemsize: int, causal: bool) -> int:
    """About the bytes that a program needs there: tiles of tokens, directions, sums, features and scores."""
    tiles = chunk * (k + v) + features * (k + v) + 2 * chunk * features
    if kernel.startswith("back") or kernel == "read":
        tiles += chunk * (k + v) + chunk * chunk
    if kernel == "back_q" and itemsize == 4 and causal:  # a product of float32 splits its operands
        tiles += chunk * max(k, v)
    return tiles * itemsize


class Call:
    """The kernels of one call; a tensor that is not there is replaced by q, and never read."""

    def __init__(self, x: Inputs, spec: Spec, weights: Weights, do: Tensor | None = None) -> None:
        self.x, self.spec, self.weights, self.kind = x, spec, weights, KINDS[spec.kind]
        self.do = do
        self.batch, self.queries, self.heads, self.width_k = x.q.shape
        self.keys, self.width_v, self.count = x.k.shape[1], x.v.shape[3], x.directions.shape[1]
        self.work = _WORK.get(x.q.dtype, torch.float32)
        self.wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        self.size = 2 if x.q.dtype == torch.bfloat16 else self.work.itemsize
        room = shared_memory(x.q.device)
        self.configs = {
            name: config(name, self.width_k, self.width_v, self.count, self.size, room, spec.causal)
            for name in ("peaks", "walk", "read", "back_q", "back_k")
        }
        # sums are before each chunk, so all who read them have the same chunks, and the same blocks of features
        chunk = min(c.chunk for c in self.configs.values())
        features = min(c.features for c in self.configs.values())
        self.configs = {name: c._replace(chunk=chunk, features=features) for name, c in self.configs.items()}
        self.chunk, self.blocks = chunk, blocks_of(self.count, features)
        self.all = self.kind.parts * self.blocks * features

    def start(self, name: str, programs: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], tokens: int,
              strides: dict[str, int], **own: Any) -> None:  # fmt: skip
        cfg, x = self.configs[name], self.x
        block_k, block_v = block_of(self.width_k, self.size), block_of(self.width_v, self.size)
        even = tokens % cfg.chunk == 0 and block_k == self.width_k and block_v == self.width_v
        constants: dict[str, Any] = {
            **strides, "K": self.width_k, "V": self.width_v, "M": self.count, "H": self.heads, "C": cfg.chunk,
            "F": cfg.features, "NB": self.blocks, "BK": block_k, "BV": block_v, "PARTS": self.kind.parts,
            "EVEN": even, "MODE": self.kind.mode, "UNIT": self.kind.unit,
            "PLAIN": x.directions.dtype == x.q.dtype or self.work == torch.float64 or x.q.dtype == torch.float32,
            "GATED": self.weights.kappa is not None, "CAUSAL": self.spec.causal, "SIGNED": self.kind.signed,
            "FAST": self.work == torch.bfloat16, "DOT": _TL[self.work], "ACC": _TL[self.wide],
            "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3", **own,
        }  # fmt: skip
        kernel = getattr(kernels, name)
        constants = {p: constants[p] for p in kernel.arg_names if p in constants}
        given = tuple(x.q if t is None else t for t in tensors)
        launch(kernel, given, Plan((programs,), numbers, constants, cfg.warps, cfg.stages))

    def peaks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token the largest scaled score, its direction, and |x|²/2, [B, T, H]."""
        shape = x.shape[:3]
        top, half = (x.new_empty(shape, dtype=self.wide) for _ in range(2))
        arg = x.new_empty(shape, dtype=torch.int32)
        chunks = blocks_of(x.shape[1], self.chunk)
        numbers = (self.spec.scale, x.shape[1], chunks, x.stride(0), x.stride(2))
        self.start("peaks", self.batch * self.heads * chunks, (x, self.x.directions, top, arg, half), numbers,
                   x.shape[1], {"XT": x.stride(1)})  # fmt: skip
        return top, arg, half

    def slabs(self, tokens: int) -> list[tuple[int, int]]:
        """First and number of the chunks to take at a time: so many that their sums take as much memory as q."""
        chunks = blocks_of(tokens, self.chunk)
        if not self.spec.causal:
            return [(0, chunks)]
        per = max(LEAST, chunks * self.chunk * self.width_k // (self.width_v * self.all))
        return [(first, min(per, chunks - first)) for first in range(0, chunks, per)]

    def carry(self) -> tuple[Tensor, Tensor]:
        """The sums between slabs: zeros before the first."""
        shape = self.batch * self.heads, self.width_v, self.all
        return self.x.q.new_zeros(shape, dtype=self.wide), self.x.q.new_zeros(shape[::2], dtype=self.wide)

    def walk(
        self, keys: bool, slab: tuple[int, int], carry: tuple[Tensor, Tensor], *, pull: Tensor | None = None,
        init: tuple[Tensor, Tensor] | None = None, last: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sums before each chunk of a slab, [B·H·N, V, features] and [B·H·N, features], or in all, with N = 1.

        It goes on from a state `init`, or else from `carry`, where it leaves the sums to the next slab.
        """
        x, w, spec = self.x, self.weights, self.spec
        a, b = (x.k, x.v) if keys else (x.q, self.do)
        assert b is not None
        top = w.top_k if keys else w.top_q
        tokens, rows, (first, per) = a.shape[1], self.batch * self.heads, slab
        chunks = blocks_of(tokens, self.chunk)
        block_v = min(64, block_of(self.width_v, self.size))
        each = self.kind.parts * self.blocks * blocks_of(self.width_v, block_v)
        segments = 1
        if not spec.causal:
            segments = min(chunks, max(1, PROGRAMS // (rows * each)))
            per = blocks_of(chunks, segments)
        count = rows * (per if spec.causal else segments)
        s = a.new_empty((count, self.width_v, self.all), dtype=self.work if spec.causal else self.wide)
        z = a.new_empty((count, self.all), dtype=self.wide)
        begins = 1 if init is not None else 2 if spec.causal else 0
        tensors = (a, b, x.directions, x.sigma, top, w.kappa, w.reach, w.start, w.inv, pull, s, z,
                   *(init or (None, None)), *carry, *(last or (None, None)))  # fmt: skip
        numbers = (spec.scale, spec.eps, self.count**-0.5, tokens, chunks, first, per, segments,
                   a.stride(0), a.stride(2), b.stride(0), b.stride(2))  # fmt: skip
        self.start("walk", rows * segments * each, tensors, numbers, tokens, {"XT": a.stride(1), "YT": b.stride(1)},
                   KEYS=keys, INIT=begins, FINAL=last is not None, BV=block_v)  # fmt: skip
        if not spec.causal:
            s, z = s.unflatten(0, (rows, segments)).sum(1).to(self.work), z.unflatten(0, (rows, segments)).sum(1)
        return s, z

    def by_chunk(self, name: str, slab: tuple[int, int], tensors: tuple[Any, ...], tokens: int) -> None:
        x, do = self.x, self.do
        inputs = {"Q": x.q, "K": x.k, "V": x.v} | ({} if do is None else {"O": do})
        apart = tuple(stride for t in inputs.values() for stride in (t.stride(0), t.stride(2)))
        numbers = (self.spec.scale, self.spec.eps, self.count**-0.5, tokens, blocks_of(tokens, self.chunk), *slab)
        strides = {f"{letter}T": t.stride(1) for letter, t in inputs.items()}
        self.start(name, self.batch * self.heads * slab[1], tensors, numbers + apart, tokens, strides)


def peaks(x: Inputs, spec: Spec, weights: Weights, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return Call(x, spec, weights).peaks(of)


def forward(x: Inputs, spec: Spec, weights: Weights, o: Tensor, last: tuple[Tensor, Tensor] | None) -> None:
    """Fill o, weights.inv and the last sums."""
    call, w = Call(x, spec, weights), weights
    carry = call.carry()
    slabs = call.slabs(call.queries)
    for i, slab in enumerate(slabs):
        init = None if i > 0 or x.s0 is None or x.z0 is None else (x.s0, x.z0)
        s, z = call.walk(True, slab, carry, init=init, last=last if i == len(slabs) - 1 else None)
        tensors = (x.q, x.k, x.v, x.directions, x.sigma, w.top_q, w.top_k, w.kappa, w.reach, w.start, x.least, s, z, o,
                   w.inv)  # fmt: skip
        call.by_chunk("read", slab, tensors, call.queries)
        del s, z, tensors  # so that the next slab takes their memory


def backward(
    do: Tensor, o: Tensor, x: Inputs, spec: Spec, weights: Weights
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and sigma."""
    call, w = Call(x, spec, weights, do), weights
    pull = torch.empty_like(w.inv)
    dq, dk, dv = (t.new_empty(t.shape) for t in x[:3])
    parts: list[Tensor | None] = [None, None]
    if x.sigma is not None:
        counts = (blocks_of(tokens, call.chunk) for tokens in (call.queries, call.keys))
        parts = [do.new_empty((call.batch, call.heads, n, call.width_k), dtype=call.wide) for n in counts]
    carry = call.carry()
    for slab in call.slabs(call.queries):
        s, z = call.walk(True, slab, carry)
        tensors = (x.q, x.k, x.v, do, o, x.directions, x.sigma, w.top_q, w.arg_q, w.top_k, w.kappa, w.reach, w.start,
                   x.least, w.inv, s, z, pull, dq, parts[0])  # fmt: skip
        call.by_chunk("back_q", slab, tensors, call.queries)
        del s, z, tensors
    carry = call.carry()
    for slab in reversed(call.slabs(call.keys)):
        s, z = call.walk(False, slab, carry, pull=pull)
        of_keys = (x.q, x.k, x.v, do, x.directions, x.sigma, w.top_q, w.top_k, w.arg_k, w.kappa, w.reach, w.inv, pull,
                   s, z, dk, dv, parts[1])  # fmt: skip
        call.by_chunk("back_k", slab, of_keys, call.keys)
        del s, z, of_keys
    if x.sigma is None:
        return dq, dk, dv, None
    return dq, dk, dv, torch.cat([t for t in parts if t is not None], 2).sum((0, 2)).to(x.sigma.dtype)


def step(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, sigma: Tensor | None, s: Tensor, z: Tensor,
    last: Tensor, spec: Spec, low: float,
) -> Tensor:  # fmt: skip
    """o of one token for every row and head; the state is changed in place."""
    kind, (batch, heads, width_k), width_v, count = KINDS[spec.kind], q.shape, v.shape[2], directions.shape[1]
    o = v.new_empty(v.shape)
    block_v = tile_of(width_v)
    features = min(tile_of(count), max(16, 4096 // max(block_v, tile_of(width_k))))
    constants = {
        "K": width_k, "V": width_v, "M": count, "H": heads, "F": features, "BK": tile_of(width_k), "BV": block_v,
        "PARTS": kind.parts, "MODE": kind.mode, "UNIT": kind.unit, "ACC": _TL[s.dtype],
    }  # fmt: skip
    numbers = (spec.scale, spec.eps, count**-0.5, low, math.log(count) / 2)
    strides = tuple(d for x in (q, k, v) for d in x.stride()[:2])
    tensors = (q, k, v, directions, s if sigma is None else sigma, s, z, last, o)
    launch(kernels.step, tensors, Plan((batch * heads,), numbers + strides, constants, 8))
    return o
