"""Starts the kernels of efficient attention."""

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import INTERPRETED, Plan, blocks_of, fitting, launch, shared_memory, tile_of
from subquad.ops.lengths import zero_padding
from subquad.ops.linear import normalised_kernels_triton as kernels
from subquad.ops.linear.featured_triton import PROGRAMS, Config, block_of
from subquad.ops.linear.normalised import NOTHING, Inputs, Last

_WORK = {torch.bfloat16: torch.float32 if INTERPRETED else torch.bfloat16, torch.float64: torch.float64}
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


def config(kernel: str, width_k: int, width_v: int, itemsize: int, room: int, causal: bool) -> Config:
    """Launch parameters from shapes alone; `features` are columns of V. `room`: shared memory for one program."""
    k = block_of(width_k, itemsize)
    chunk, block = 64 if itemsize == 2 and k <= 128 else 32, min(block_of(width_v, itemsize), 64)
    while chunk > 16 and (6 * chunk * k + 2 * chunk * block + 2 * k * block + chunk * chunk) * itemsize > room:
        chunk //= 2
    blocks = [block] if itemsize > 4 else [n for n in (64, 32, 16) if n <= block]
    block = fitting(blocks, lambda n: shared(chunk, k, n, itemsize, causal), room)
    wide = k > 64 or itemsize > 2
    heavy = kernel in ("back_k", "back_q", "walk_queries")
    return Config(chunk, block, 8 if wide or heavy else 4, 2 if kernel == "walk_keys" and not wide else 1)


def shared(chunk: int, k: int, block: int, itemsize: int, causal: bool) -> int:
    """The bytes that a program of the kernel that takes most needs there."""
    parts = 2 if itemsize > 2 else 1  # a product of float32 splits its operands
    # `read`, and `back_k` if not causal: sums, which are float32 if not causal, and rows of tokens
    sums = 2 * k * block * (itemsize if causal else max(itemsize, 4))
    tokens = (parts * chunk * k + chunk * block) * itemsize
    # `back_k` if causal
    back = (3 * parts * chunk * k + 2 * chunk * block) * itemsize
    return max(sums + tokens, back)


class Call:
    """The kernels of one call; a tensor that is not there is replaced by q, and never read."""

    def __init__(self, x: Inputs, causal: bool, do: Tensor | None = None) -> None:
        self.x, self.causal = x, causal
        self.inputs = {"Q": x.q, "K": x.k, "V": x.v, "O": x.q if do is None else do}
        self.batch, self.queries, self.heads, self.width_k = x.q.shape
        self.keys, self.width_v, self.rows = x.k.shape[1], x.v.shape[3], x.q.shape[0] * x.q.shape[2]
        self.work = _WORK.get(x.q.dtype, torch.float32)
        self.wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        self.size = 2 if x.q.dtype == torch.bfloat16 else self.work.itemsize
        self.room = shared_memory(x.q.device)
        self.chunk = self.config("back_k").chunk

    def config(self, kernel: str) -> Config:
        return config(kernel, self.width_k, self.width_v, self.size, self.room, self.causal)

    def start(self, name: str, letters: str, tokens: int, segments: int | None, *tensors: Any, **own: Any) -> None:
        """Start a kernel on all chunks, or on so many segments; `letters` are the inputs that it reads, which come
        first."""
        cfg, inputs = self.config(name), [self.inputs[letter] for letter in letters]
        chunks, block_k = blocks_of(tokens, cfg.chunk), block_of(self.width_k, self.size)
        numbers: tuple[Any, ...] = (tokens, chunks)
        programs = self.rows * chunks
        if segments is not None:
            numbers += (blocks_of(chunks, segments), segments)
            programs = self.rows * segments * blocks_of(self.width_v, cfg.features)
        numbers += tuple(stride for t in inputs for stride in (t.stride(0), t.stride(2)))
        constants: dict[str, Any] = {
            **{f"{letter}T": t.stride(1) for letter, t in zip(letters, inputs, strict=True)},
            "K": self.width_k, "V": self.width_v, "H": self.heads, "C": cfg.chunk, "BK": block_k, "BV": cfg.features,
            "EVEN": tokens % cfg.chunk == 0 and block_k == self.width_k and self.width_v % cfg.features == 0,
            "CAUSAL": self.causal, "LENGTHS": self.x.lengths is not None, "DOT": _TL[self.work],
            "ACC": _TL[self.wide], "PREC": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3", **own,
        }  # fmt: skip
        kernel = getattr(kernels, name)
        constants = {p: constants[p] for p in kernel.arg_names if p in constants}
        given = tuple(self.x.q if t is None else t for t in (*inputs, *tensors))
        launch(kernel, given, Plan((programs,), numbers, constants, cfg.warps, cfg.stages))

    def segments(self, tokens: int) -> int:
        if self.causal:
            return 1
        chunks = blocks_of(tokens, self.chunk)
        blocks = blocks_of(self.width_v, self.config("walk_keys").features)
        return min(chunks, max(1, PROGRAMS // (self.rows * blocks)))

    def empty_sums(self, tokens: int, segments: int) -> tuple[Tensor, Tensor]:
        count = self.rows * (blocks_of(tokens, self.chunk) if self.causal else segments)
        shape, block = (count, self.width_v, block_of(self.width_k, self.size)), self.x.q
        s = block.new_empty(shape, dtype=self.work if self.causal else self.wide)
        return s, block.new_empty((count, shape[2]), dtype=self.wide)

    def joined(self, sums: Tensor, segments: int) -> Tensor:
        return sums if self.causal else sums.unflatten(0, (self.rows, segments)).sum(1)

    def walk_keys(self, last: Last | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """S, z and m before each chunk, or in all."""
        x, segments = self.x, self.segments(self.keys)
        s, z = self.empty_sums(self.keys, segments)
        if self.causal:
            m = torch.empty_like(z)
        else:
            k = x.k.detach()
            if x.lengths is not None:  # a key that is not there is not the largest
                least = torch.finfo(k.dtype).min
                k = k.masked_fill(zero_padding(torch.ones_like(k[:, :, :1, :1]), x.lengths) == 0, least)
            m = k.amax(1).to(self.wide).clamp(min=NOTHING).flatten(0, 1)  # [B·H, K]
            m = F.pad(m, (0, z.shape[-1] - self.width_k)).contiguous()
        init = (None,) * 3 if x.s0 is None else (x.s0, x.z0, x.max0)
        self.start("walk_keys", "KV", self.keys, segments, s, z, m, *init, *(last or (None,) * 3), x.lengths,
                   INIT=x.s0 is not None, FINAL=last is not None)  # fmt: skip
        return self.joined(s, segments), self.joined(z, segments), m

    def walk_queries(self, pulls: Tensor, s: Tensor | None, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """R and P after each chunk, or in all."""
        segments = self.segments(self.queries)
        r, rz = self.empty_sums(self.queries, segments)
        self.start("walk_queries", "QKO", self.queries, segments, pulls, r, z, m, r, rz)
        r = self.joined(r, segments)
        if s is not None:
            rz = (s * r).sum(1) / z.clamp(min=1e-30)  # the channel's mean of all pulls, for every key
        return r, rz


def forward(x: Inputs, causal: bool, o: Tensor, last: Last | None) -> None:
    """Fill o and the last sums."""
    call = Call(x, causal)
    s, z, m = call.walk_keys(last)
    call.start("read", "QKV", call.queries, None, s, z, m, o)


def backward(do: Tensor, x: Inputs, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    call = Call(x, causal, do)
    dq, dk, dv = (t.new_empty(t.shape) for t in x[:3])
    s, z, m = call.walk_keys()
    call.start("back_q", "QKVO", call.queries, None, s, z, m, dq, dk)
    sums = None if causal else s
    del s
    r, rz = call.walk_queries(dk, sums, z, m)
    call.start("back_k", "QKVO", call.keys, None, dk, z, m, r, rz, dk, dv, x.lengths)
    return dq, dk, dv


def step(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, most: Tensor) -> Tensor:
    """o of one token for every row and head; the state is changed in place."""
    (batch, heads, width_k), width_v = q.shape, v.shape[2]
    o = v.new_empty(v.shape)
    block_k = tile_of(width_k)
    constants = {
        "K": width_k, "V": width_v, "H": heads, "BK": block_k, "BV": min(tile_of(width_v), max(16, 4096 // block_k)),
        "ACC": _TL[s.dtype],
    }  # fmt: skip
    strides = tuple(d for x in (q, k, v) for d in x.stride()[:2])
    launch(kernels.step, (q, k, v, s, z, most, o), Plan((batch * heads,), strides, constants, 4))
    return o
