"""Calls of GPU ranks: found, prepared, launched on a stream; on one node and on several."""
