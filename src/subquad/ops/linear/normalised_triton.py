"""Starts the kernels of efficient attention."""

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from subquad.ops.impl import shared_memory
from subquad.ops.launch import INTERPRETED, Plan, blocks_of, launch, tile_of
from subquad.ops.linear import normalised_kernels_triton as kernels
from subquad.ops.linear.featured_triton import PROGRAMS, Config, block_of
from subquad.ops.linear.normalised import NOTHING, Inputs, Last

_WORK = {torch.bfloat16: torch.float32 if INTERPRETED else torch.bfloat16, torch.float64: torch.float64}
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


def config(kernel: str, width_k: int, width_v: int, itemsize: int, room: int) -> Config:
    """Launch parameters from shapes alone; `features` are columns of V. `room`: shared memory for one program."""
    k = block_of(width_k, itemsize)
    chunk, block = 64 if itemsize == 2 and k <= 128 else 32, min(block_of(width_v, itemsize), 64)
    while chunk > 16 and (6 * chunk * k + 2 * chunk * block + 2 * k * block + chunk * chunk) * itemsize > room:
        chunk //= 2
    wide = k > 64 or itemsize > 2
    heavy = kernel in ("back_k", "back_q")
    return Config(chunk, block, 8 if wide or heavy else 4, 2 if kernel.startswith("sum") and not wide else 1)


class Call:
    """The kernels of one call; a tensor that is not there is replaced by q, and never read."""

    def __init__(self, x: Inputs, causal: bool, do: Tensor | None = None) -> None:
        self.x, self.causal = x, causal
        self.inputs = {"Q": x.q, "K": x.k, "V": x.v, "O": x.q if do is None else do}
        self.batch, self.queries, self.heads, self.width_k = x.q.shape
        self.keys_count, self.width_v, self.rows = x.k.shape[1], x.v.shape[3], x.q.shape[0] * x.q.shape[2]
        self.work = _WORK.get(x.q.dtype, torch.float32)
        self.wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        self.size = 2 if x.q.dtype == torch.bfloat16 else self.work.itemsize
        self.room = shared_memory(x.q)
        self.chunk = self.config("back_k").chunk

    def config(self, kernel: str) -> Config:
        return config(kernel, self.width_k, self.width_v, self.size, self.room)

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
        chunks, blocks = blocks_of(tokens, self.chunk), blocks_of(self.width_v, self.config("sum_keys").features)
        return min(chunks, max(1, PROGRAMS // (self.rows * blocks)))

    def sums(self, tokens: int) -> tuple[int, Tensor, Tensor]:
        """How many of each row to sum, and what to fill: causal of each chunk, otherwise of segments."""
        segments = blocks_of(tokens, self.chunk) if self.causal else self.segments(tokens)
        shape = self.rows * segments, self.width_v, block_of(self.width_k, self.size)
        s = self.x.q.new_empty(shape, dtype=self.work if self.causal else self.wide)
        return segments, s, s.new_empty(shape[::2], dtype=self.wide)

    def scan(self, name: str, tokens: int, *tensors: Tensor | None, **own: Any) -> None:
        block_k = block_of(self.width_k, self.size)
        constants: dict[str, Any] = {
            "K": self.width_k, "V": self.width_v, "BK": block_k, "BE": max(1, 1024 // block_k),
            "ACC": _TL[self.wide], **own,
        }  # fmt: skip
        kernel = getattr(kernels, name)
        constants = {p: constants[p] for p in kernel.arg_names if p in constants}
        given = tuple(self.x.q if t is None else t for t in tensors)
        programs = self.rows * blocks_of(self.width_v, constants["BE"])
        launch(kernel, given, Plan((programs,), (blocks_of(tokens, self.chunk),), constants))

    def keys(self, last: Last | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """S, z and m before each chunk, or in all, and the last m, [B·H, K]."""
        x = self.x
        segments, s, z = self.sums(self.keys_count)
        if self.causal:
            m = torch.empty_like(z)
            self.start("sum_keys", "KV", self.keys_count, segments, s, z, m, x.lengths)
            zrows, mrows = torch.empty_like(z), torch.empty_like(m)
            init = (None,) * 3 if x.s0 is None else (x.s0, x.z0, x.max0)
            self.scan("scan_keys", self.keys_count, s, z, m, zrows, mrows, *init, *(last or (None,) * 3),
                      INIT=x.s0 is not None, FINAL=last is not None)  # fmt: skip
            end = torch.maximum(*(t.unflatten(0, (self.rows, -1))[:, -1] for t in (m, mrows)))
            return s, zrows, mrows, end
        k = x.k.detach()
        if x.lengths is not None:  # a key that is not there is not the largest
            there = torch.arange(k.shape[1], device=k.device) < x.lengths[:, None]
            k = k.masked_fill(~there[..., None, None], torch.finfo(k.dtype).min)
        m = k.amax(1).to(self.wide).clamp(min=NOTHING).flatten(0, 1)  # [B·H, K]
        m = F.pad(m, (0, z.shape[-1] - self.width_k)).contiguous()
        self.start("sum_keys", "KV", self.keys_count, segments, s, z, m, x.lengths)
        return *(t.unflatten(0, (self.rows, segments)).sum(1) for t in (s, z)), m, m


def forward(x: Inputs, causal: bool, o: Tensor, last: Last | None) -> None:
    """Fill o and the last sums."""
    call = Call(x, causal)
    s, z, m, _ = call.keys(last)
    call.start("read", "QKV", call.queries, None, s, z, m, o)


def backward(do: Tensor, x: Inputs, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    call = Call(x, causal, do)
    dq, dk, dv = (t.new_empty(t.shape) for t in x[:3])
    s, z, m, end = call.keys()
    segments, r, each = call.sums(call.queries)
    call.start("back_q", "QKVO", call.queries, None, s, z, m, dq, dk, r, each)
    if causal:
        del s
        rz = torch.empty_like(each)
        call.scan("scan_queries", call.queries, r, each, rz, m, end)
    else:
        call.start("sum_queries", "QO", call.queries, segments, z, r)
        r = r.unflatten(0, (call.rows, segments)).sum(1)
        rz = (s * r).sum(1) / z.clamp(min=1e-30)  # the channel's mean of all pulls, for every key
    call.start("back_k", "QKVO", call.keys_count, None, dk, z, m, r, rz, dk, dv, x.lengths)
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
