"""subquad in Hugging Face's models."""

from subquad.hf.attention import register

__all__ = ["register"]
