"""Memory of GPUs: making it, reaching a peer's, and reading the arrays of other libraries.

CuPy is imported where a device is touched, never by importing these modules.
"""
