"""Measurements: time, memory and quality of mechanisms and models, written as JSON."""
