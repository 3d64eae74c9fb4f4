"""Calls of CPU ranks: found, prepared, run on a thread; messages are moved beside them."""
