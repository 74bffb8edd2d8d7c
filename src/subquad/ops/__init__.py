"""Shared computations: functions of (q, k, v) on [B, T, H, D], usable in anybody's model."""

from subquad.ops.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary

__all__ = ["Block", "Dense", "Dilated", "Global", "Local", "Pattern", "Random", "Strided", "Summary"]
