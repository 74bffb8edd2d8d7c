"""Random bits by index, for generated data: the same on every machine and in every batch."""

import numpy as np


def bits(seed: int, indices: np.ndarray, count: int) -> np.ndarray:
    """[B, count] uint64: splitmix64 of a counter; each index has 2^20 numbers of its own."""
    z: np.ndarray = np.uint64(seed * 0xD1342543DE82EF95 % 2**64) + (indices.astype(np.uint64)[:, None] << np.uint64(20))
    z = (z + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
