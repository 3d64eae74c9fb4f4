"""The host as ringcoll uses it: shared memory, file descriptors, memory limits and fences.

Nothing here knows of ranks.
"""
