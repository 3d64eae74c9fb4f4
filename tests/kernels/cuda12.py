"""CUDA 12's NVRTC, for the GPUs that CUDA 13 has dropped, beside a CuPy for either."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest

from ringcoll.executors.cuda.compile import flags, read_headers


def compile_kernel(source: str, arch: str, *, hasty: bool = False) -> bytes:
    """The cubin of a source that includes the package's headers; skips where NVRTC is missing.

    ``hasty``: with little optimisation, where NVRTC has the option.
    """
    nvrtc = _library()
    headers = read_headers()
    names = [name.encode() for name in headers]
    program = ctypes.c_void_p()
    texts = ctypes.c_char_p * len(headers)
    named = texts(*headers.values()), texts(*names)
    program_at = ctypes.byref(program)
    _check(nvrtc.nvrtcCreateProgram(program_at, source.encode(), b"source", len(headers), *named))
    try:
        some = ["--Ofast-compile=max"] if hasty and _version(nvrtc) >= (12, 9) else []
        words = [flag.encode() for flag in (*flags(arch), *some)]
        options = (ctypes.c_char_p * len(words))(*words)
        failed = nvrtc.nvrtcCompileProgram(program, len(words), options)
        if failed:
            log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            pytest.fail(log.decode())
        return _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program_at)


def _library() -> ctypes.CDLL:
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "lib" / "libnvrtc.so.12"
        if path.exists():
            # CuPy loads CUDA 13's for all to see: this one keeps to its own symbols.
            return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
    pytest.skip("needs nvidia-cuda-nvrtc-cu12")


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _content(size_of, fetch, program) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(fetch(program, content))
    return content.raw


def _check(status: int) -> None:
    if status != 0:
        pytest.fail(f"NVRTC's status is {status}")
