"""Checks of kernels on a GPU against float64, and their times; `python -m benchmarks.gpu --help`."""
