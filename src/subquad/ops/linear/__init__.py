"""Linear attention: api says what it computes, chunked and fused are its torch and its Triton path.

operators makes both known to torch; deferred is the step that writes its sums at every fourth token.
"""

from subquad.ops.linear.api import (
    LinearState,
    linear_attention,
    linear_attention_read,
    linear_attention_step,
    linear_attention_sums,
)

__all__ = ["LinearState", "linear_attention", "linear_attention_read", "linear_attention_step", "linear_attention_sums"]
