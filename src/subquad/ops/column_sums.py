"""The sums of the columns of a matrix: the gradient of a bias, and what joins the parts that programs have summed.

torch's sum over the rows of a long and narrow matrix takes ten times as long as reading it.
"""

import torch
from torch import Tensor

from subquad.ops.impl import Impl, choose, traced


def column_sums(x: Tensor, dtype: torch.dtype, *, impl: Impl = "auto") -> Tensor:
    """x [R, D] -> [D] in the type given; sums are float32, in an order that depends on shapes alone. No gradient."""
    if traced() or choose(impl, "column_sums", x, _unsupported(x, dtype)) == "torch":
        return x.sum(0, dtype=dtype)
    from subquad.ops import column_sums_triton

    return column_sums_triton.column_sums(x, dtype)


def _unsupported(x: Tensor, dtype: torch.dtype) -> str | None:
    if not all(kind in (torch.float32, torch.bfloat16, torch.float16) for kind in (x.dtype, dtype)):
        return f"it sums float32, bfloat16 and float16, not {x.dtype} into {dtype}"
    return "no elements" if x.numel() == 0 else None
