"""Data sets, one file each."""
