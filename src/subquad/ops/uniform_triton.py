"""`uniform.uniform` in kernels, in 32 bits."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def stream_of(seed, position):
    """What the numbers of a row are made of."""
    stream = _mix(_mix((seed >> 32).to(tl.uint32)) ^ seed.to(tl.uint32))
    return _mix(stream ^ position.to(tl.uint32))


@triton.jit
def uniform(stream, at):
    bits = _mix(stream + (at + 1).to(tl.uint32) * 0x1E3779B1)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
