"""CUDA as ringcoll uses it: devices, streams, device memory, and the arrays of other libraries.

Nothing here knows of ranks. CuPy is imported where a device is touched, never by importing these
modules.
"""
