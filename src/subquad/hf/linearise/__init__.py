"""A pretrained decoder whose attention becomes mostly linear and that keeps what it knows."""

from subquad.hf.linearise.measure import Measures
from subquad.hf.linearise.run import linearise
from subquad.hf.linearise.settings import LineariseSettings

__all__ = ["LineariseSettings", "Measures", "linearise"]
