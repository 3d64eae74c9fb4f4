"""Symmetric memory: arrays of one size on every rank, which all ranks reach without a copy."""
