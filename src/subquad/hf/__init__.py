"""subquad in Hugging Face's models."""

from subquad.hf.attention import register
from subquad.hf.replace import replace

__all__ = ["register", "replace"]
