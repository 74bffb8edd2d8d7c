"""Which share of the time of a transformer block its mixer takes, as the sequence grows."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from subquad.measure.cost import Sample, once
from subquad.models.blocks import Block
from subquad.models.config import TransformerConfig

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


@torch.no_grad()
def block_share(
    mechanisms: Sequence[str] = ("softmax", "linear"),
    lengths: Sequence[int] = LENGTHS,
    dim: int = 128,
    heads: int = 4,
    repeats: int = 5,
    device: str = "cpu",
) -> dict[str, Any]:
    """Forward time of the mixer divided by that of its block; samples of the two alternate."""
    rows = []
    for name in mechanisms:
        torch.manual_seed(0)
        config = TransformerConfig(dim=dim, depth=1, heads=heads, mechanism=name, dropout=0.0)
        block = Block(config, 0).to(device).eval()
        for length in lengths:
            stream = (torch.randn(1, length, dim, device=device),)
            inner = block.mixer_residual.read(stream)
            sample = Sample(max(1, 1024 // length))

            mix, whole = partial(block.mixer, inner), partial(block, stream, None, None, None)
            samples = [(once(mix, device, sample), once(whole, device, sample)) for _ in range(repeats + 1)]
            del samples[0]  # the first one warms up
            mixer, whole_block = (statistics.median(times) for times in zip(*samples, strict=True))
            share = statistics.median(a / b for a, b in samples)  # noise can make it exceed 1 for tiny blocks
            rows.append(
                {"mechanism": name, "length": length, "mixer_ms": mixer, "block_ms": whole_block, "share": share}
            )
    settings = {"dim": dim, "heads": heads, "repeats": repeats, "batch": 1, "causal": False, "feed_forward": 4 * dim}
    machine = {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {"kind": "share", "machine": machine, "settings": settings, "rows": rows}
