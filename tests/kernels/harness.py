"""The kernels' arithmetic, compiled for the host and called on numpy arrays."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

import ringcoll
from ringcoll.dtypes import DTYPES, OPS, op_of, premul_sum
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.source import OPERATORS as OPERATORS
from ringcoll.executors.cuda.source import TYPES as TYPES

KERNELS = Path(ringcoll.__file__).parent / "kernels"
HERE = Path(__file__).parent
CPU = HERE / "cpu"


def is_legal(dtype, name):
    try:
        (premul_sum(1) if name == "premul_sum" else op_of(name)).check(dtype)
    except ArgumentError:
        return False
    return True


LEGAL = [(d, name) for d in DTYPES for name in (*OPS, "premul_sum") if is_legal(d, name)]


def build(command, folder):
    """Compile every type and every legal operator on it into a library in ``folder``."""
    lines = ['#include "harness.hpp"']
    lines += [f"EXPORT_TYPE({TYPES[d.name]})" for d in DTYPES]
    lines += [f"EXPORT_OPERATOR({TYPES[d.name]}, {OPERATORS[name]})" for d, name in LEGAL]
    source, library = folder / "arithmetic.cpp", folder / "arithmetic.so"
    source.write_text("\n".join(lines) + "\n")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-shared"]
    paths = [f"-I{path}" for path in (CPU, KERNELS, HERE)]
    sources = [str(source), str(CPU / "machine.cpp")]
    done = subprocess.run(
        [*command, *flags, *paths, *sources, "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return Harness(ctypes.CDLL(str(library)), done.stderr)


class Harness:
    """The compiled library; ``warnings`` is what its compiler said."""

    def __init__(self, library, warnings):
        self.library, self.warnings = library, warnings

    def _call(self, name, size, out, *arguments):
        pointers = [_pointer(a) if isinstance(a, np.ndarray) else a for a in arguments]
        function = getattr(self.library, name)
        function.restype = None
        function(*pointers, _pointer(out), ctypes.c_uint64(size))
        return out

    def widen(self, dtype, raw):
        out = np.empty(raw.size, dtype.accumulator)
        return self._call(f"widen_{TYPES[dtype.name]}", raw.size, out, raw)

    def narrow(self, dtype, value):
        out = np.empty(value.size, dtype.numpy)
        return self._call(f"narrow_{TYPES[dtype.name]}", value.size, out, value)

    def load(self, dtype, name, raw, factor):
        out = np.empty(raw.size, dtype.accumulator)
        return self._call(f"load_{_pair(dtype, name)}", raw.size, out, raw, factor)

    def combine(self, dtype, name, left, right):
        return self._call(
            f"combine_{_pair(dtype, name)}", left.size, np.empty_like(left), left, right
        )

    def finish(self, dtype, name, total, nranks):
        size = ctypes.c_uint32(nranks)
        return self._call(
            f"finish_{_pair(dtype, name)}", total.size, np.empty_like(total), total, size
        )

    def layout(self, dtype):
        """Bytes of an element, bytes of an accumulator, and whether the two differ."""
        tag = TYPES[dtype.name]
        words = (getattr(self.library, f"{w}_{tag}") for w in ("raw_size", "acc_size", "wide"))
        return tuple(word() for word in words)


def _pair(dtype, name):
    return f"{TYPES[dtype.name]}_{OPERATORS[name]}"


def _pointer(array):
    if not array.flags.c_contiguous:
        raise ValueError("an array that is not contiguous")
    return ctypes.c_void_p(array.ctypes.data)
