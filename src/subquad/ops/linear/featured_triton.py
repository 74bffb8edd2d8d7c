"""Starts the kernels of linear attention on random features."""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, tile_of
from subquad.ops.linear import featured_kernels_triton as kernels
from subquad.ops.linear.featured import KINDS, Inputs, Spec, Weights

PROGRAMS = 1056  # enough to fill the chip: bidirectional sums are cut into that many
_WORK = {torch.bfloat16: torch.float32 if INTERPRETED else torch.bfloat16, torch.float64: torch.float64}
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class Config(NamedTuple):
    chunk: int
    features: int  # of a block
    warps: int
    stages: int = 1


def config(kernel: str, width_k: int, width_v: int, count: int, itemsize: int, room: int) -> Config:
    """Launch parameters from shapes alone. `room`: the shared memory that the device gives one program."""
    k, v = block_of(width_k, itemsize), block_of(width_v, itemsize)
    chunk = 64 if itemsize == 2 else 32
    features = min(chunk, block_of(count, itemsize))
    while chunk > 16 and shared(kernel, chunk, features, k, v, itemsize) > room:
        chunk //= 2
        features = min(features, chunk)
    wide = max(k, v) > 64 or itemsize > 2
    return Config(chunk, features, 8 if wide or kernel == "back_k" else 4, 2 if kernel == "walk" and not wide else 1)


def block_of(width: int, itemsize: int) -> int:
    """Columns of a tile. With tiles of 64 and of fewer in one kernel, ptxas 12.8 has made wrong code: see
    rule_launches_triton.py."""
    return max(tile_of(width), 64 if itemsize == 2 else 16)


def shared(kernel: str, chunk: int, features: int, k: int, v: int, itemsize: int) -> int:
    """About the bytes that a program needs there: tiles of tokens, directions, sums, features and scores."""
    tiles = chunk * (k + v) + features * (k + v) + 2 * chunk * features
    if kernel.startswith("back") or kernel == "read":
        tiles += chunk * (k + v) + chunk * chunk
    return tiles * itemsize


def room_of(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


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
        room = room_of(x.q)
        self.configs = {
            name: config(name, self.width_k, self.width_v, self.count, self.size, room)
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

    def walk(self, keys: bool, pull: Tensor | None = None, last: tuple[Tensor, Tensor] | None = None,
             ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sums before each chunk, [B·H·N, V, features] and [B·H·N, features], or in all, with N = 1."""
        x, w, spec = self.x, self.weights, self.spec
        a, b = (x.k, x.v) if keys else (x.q, self.do)
        assert b is not None
        top = w.top_k if keys else w.top_q
        tokens, rows = a.shape[1], self.batch * self.heads
        chunks = blocks_of(tokens, self.chunk)
        block_v = min(64, block_of(self.width_v, self.size))
        each = self.kind.parts * self.blocks * blocks_of(self.width_v, block_v)
        segments = 1 if spec.causal else min(chunks, max(1, PROGRAMS // (rows * each)))
        per = blocks_of(chunks, segments)
        count = rows * (chunks if spec.causal else segments)
        s = a.new_empty((count, self.width_v, self.all), dtype=self.work if spec.causal else self.wide)
        z = a.new_empty((count, self.all), dtype=self.wide)
        init = None if not keys or x.s0 is None else (x.s0, x.z0)
        tensors = (a, b, x.directions, x.sigma, top, w.kappa, w.reach, w.start, w.inv, pull, s, z,
                   *(init or (None, None)), *(last or (None, None)))  # fmt: skip
        numbers = (spec.scale, spec.eps, self.count**-0.5, tokens, chunks, per, segments,
                   a.stride(0), a.stride(2), b.stride(0), b.stride(2))  # fmt: skip
        self.start("walk", rows * segments * each, tensors, numbers, tokens, {"XT": a.stride(1), "YT": b.stride(1)},
                   KEYS=keys, INIT=init is not None, FINAL=last is not None, BV=block_v)  # fmt: skip
        if not spec.causal:
            s, z = s.unflatten(0, (rows, segments)).sum(1).to(self.work), z.unflatten(0, (rows, segments)).sum(1)
        return s, z

    def by_chunk(self, name: str, tensors: tuple[Any, ...], tokens: int) -> None:
        x, do = self.x, self.do
        inputs = {"Q": x.q, "K": x.k, "V": x.v} | ({} if do is None else {"O": do})
        chunks = blocks_of(tokens, self.chunk)
        apart = tuple(stride for t in inputs.values() for stride in (t.stride(0), t.stride(2)))
        numbers = (self.spec.scale, self.spec.eps, self.count**-0.5, tokens, chunks, *apart)
        strides = {f"{letter}T": t.stride(1) for letter, t in inputs.items()}
        self.start(name, self.batch * self.heads * chunks, tensors, numbers, tokens, strides)


def peaks(x: Inputs, spec: Spec, weights: Weights, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return Call(x, spec, weights).peaks(of)


def forward(x: Inputs, spec: Spec, weights: Weights, o: Tensor, last: tuple[Tensor, Tensor] | None) -> None:
    """Fill o, weights.inv and the last sums."""
    call = Call(x, spec, weights)
    s, z = call.walk(keys=True, last=last)
    tensors = (x.q, x.k, x.v, x.directions, x.sigma, weights.top_q, weights.top_k, weights.kappa, weights.reach,
               weights.start, x.least, s, z, o, weights.inv)  # fmt: skip
    call.by_chunk("read", tensors, call.queries)


def backward(
    do: Tensor, o: Tensor, x: Inputs, spec: Spec, weights: Weights
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and sigma."""
    call = Call(x, spec, weights, do)
    s, z = call.walk(keys=True)
    w = weights
    pull = torch.empty_like(w.inv)
    dq = x.q.new_empty(x.q.shape)
    parts: list[Tensor] = []

    def part(tokens: int) -> Tensor | None:
        if x.sigma is None:
            return None
        shape = call.batch, call.heads, blocks_of(tokens, call.chunk), call.width_k
        parts.append(do.new_empty(shape, dtype=call.wide))
        return parts[-1]

    of_queries = (x.q, x.k, x.v, do, o, x.directions, x.sigma, w.top_q, w.arg_q, w.top_k, w.kappa, w.reach, w.start,
                  x.least, w.inv, s, z, pull, dq, part(call.queries))  # fmt: skip
    call.by_chunk("back_q", of_queries, call.queries)
    del s, z, of_queries  # before the sums of queries take as much memory
    r, rz = call.walk(keys=False, pull=pull)
    dk, dv = x.k.new_empty(x.k.shape), x.v.new_empty(x.v.shape)
    of_keys = (x.q, x.k, x.v, do, x.directions, x.sigma, w.top_q, w.top_k, w.arg_k, w.kappa, w.reach, w.inv, pull,
               r, rz, dk, dv, part(call.keys))  # fmt: skip
    call.by_chunk("back_k", of_keys, call.keys)
    if x.sigma is None:
        return dq, dk, dv, None
    return dq, dk, dv, torch.cat(parts, 2).sum((0, 2)).to(x.sigma.dtype)


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
