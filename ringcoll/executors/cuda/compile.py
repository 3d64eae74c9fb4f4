"""From generated source text to a cubin, by NVRTC through CuPy: needs no GPU.

A cubin and never PTX: an older driver refuses a newer toolkit's PTX. The headers go in from memory,
so that what was compiled is what was digested, and nothing in the current folder, where NVRTC looks
first, takes their place.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringcoll import log
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.folders import pip_install

_KERNELS = Path(__file__).parents[2] / "kernels"
_LOG_LINES = 40
_NAME = "ringcoll"  # of every kernel's text, in errors

_log = log.logger()

_stop = ctypes.create_string_buffer(2)
"""A text of no byte while compilations go on, of one when they are to end."""


def advice() -> str:
    """How to install NVRTC, and CuPy with it."""
    return f"{pip_install('cu13')}, or with a driver before 580 {pip_install('cu12')}"


def arch_of(major: int, minor: int) -> str:
    """NVRTC's name of a device's compute capability, such as "sm_90"."""
    return f"sm_{major}{minor}"


def flags(arch: str) -> tuple[str, ...]:
    """The options of NVRTC: IEEE 754 arithmetic, nothing fused and no denormal flushed."""
    return (
        f"-arch={arch}",
        "-std=c++17",
        "-ftz=false",
        "-fmad=false",
        "-prec-div=true",
        "-prec-sqrt=true",
    )


def read_headers(folder: Path = _KERNELS) -> dict[str, bytes]:
    """The contents of the kernels' files by the names under which they include each other."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.cuh"))}


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's major and minor number; without NVRTC a MachineError with what to install."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def has_nvrtc() -> bool:
    """Whether kernels can be compiled here."""
    try:
        _nvrtc()
    except MachineError:
        return False
    return True


def check_archs(*archs: str) -> None:
    """Refuse what is no architecture, also without NVRTC, and what NVRTC cannot compile for."""
    numbers = {}
    for arch in archs:
        found = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if found is None:
            raise ArgumentError(
                f"{arch!r} is no architecture of a GPU: write sm_ and the digits of its compute "
                f"capability, such as sm_90 for 9.0"
            )
        numbers[arch] = int(found[1])
    nvrtc = _nvrtc()
    known = sorted(nvrtc.getSupportedArchs())
    for arch, number in numbers.items():
        if number in known:
            continue
        names = ", ".join(f"sm_{each}" for each in known)
        message = f"{_title(nvrtc)} compiles for {names}; not for {arch!r}"
        if number < known[0]:
            message += f": GPUs before it need CUDA 12, {pip_install('cu12')}"
        elif number > known[-1]:
            message += ": a newer GPU needs a newer NVRTC, pip install -U nvidia-cuda-nvrtc"
        else:  # such as 110, which CUDA 12 lacks, though it has 120
            message += f": another CUDA may, {advice()}"
        raise MachineError(message)


def compile_kernel(source: str, arch: str, *, headers: Mapping[str, bytes] | None = None) -> bytes:
    """The cubin of a kernel; other threads run meanwhile. An error holds the compiler's text."""
    nvrtc = _nvrtc()
    if _stop.value:
        raise MachineError("no kernel is compiled any more: the program ends")
    check_archs(arch)
    if headers is None:
        headers = read_headers()
    names = [header.encode() for header in headers]
    program = nvrtc.createProgram(source, _NAME, list(headers.values()), names)
    try:
        _make_stoppable(nvrtc, program)
        try:
            nvrtc.compileProgram(program, flags(arch))
        except nvrtc.NVRTCError as error:
            if _stop.value:
                raise MachineError("the compilation has been stopped: the program ends") from None
            log = nvrtc.getProgramLog(program).strip() or str(error)
            texts = {**headers, _NAME: source.encode()}
            raise MachineError(
                f"the kernel {_NAME!r} does not compile for {arch} with {_title(nvrtc)}:\n"
                f"{_shortened(log)}{_surroundings(log, texts)}"
            ) from None
        log = nvrtc.getProgramLog(program).strip()
        if log:
            _log.debug("%s of %r for %s: %s", _title(nvrtc), _NAME, arch, log)
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def stop_compiling() -> None:
    """End all compilations of this process within one phase of NVRTC, and begin no other.

    A process whose threads compile while the library is being unloaded crashes.
    """
    _stop.value = b"1"


def _make_stoppable(nvrtc: Any, program: int) -> None:
    """Let NVRTC look at ``_stop`` now and then, which it can from 12.9 on."""
    set_callback = _flow_callback(nvrtc.getVersion()[0])
    if set_callback is not None:
        # strlen takes a pointer, returns whether to stop, and needs no GIL.
        set_callback(program, ctypes.cast(_libc().strlen, ctypes.c_void_p), ctypes.addressof(_stop))


@functools.cache
def _flow_callback(major: int) -> Any:
    """``nvrtcSetFlowCallback`` of the library that CuPy has loaded; None where it has none."""
    try:
        loaded = ctypes.CDLL(f"libnvrtc.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        function = loaded.nvrtcSetFlowCallback
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p,) * 3, ctypes.c_int
    return function


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.cache
def _nvrtc() -> Any:
    """CuPy's module, once it has found the library."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise MachineError(f"ranks on GPUs need CuPy ({error}): {advice()}") from error
    try:
        nvrtc.getVersion()
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise MachineError(
            f"kernels are compiled by NVRTC, which CuPy does not find ({why}): {advice()}"
        ) from error
    return nvrtc


def _title(nvrtc: Any) -> str:
    return "NVRTC {}.{}".format(*nvrtc.getVersion())


def _shortened(log: str) -> str:
    lines = log.splitlines()
    left = len(lines) - _LOG_LINES
    return "\n".join([*lines[:_LOG_LINES], *([f"... and {left} lines more"] if left > 0 else [])])


def _surroundings(log: str, texts: Mapping[str, bytes]) -> str:
    """The lines around the first error: the generated source is in no file."""
    found = re.search(r"^(.+)\((\d+)\): .*error", log, re.MULTILINE)
    if found is None or found[1] not in texts:
        return ""
    number = int(found[2])
    lines = texts[found[1]].decode(errors="replace").splitlines()
    shown = range(max(1, number - 2), min(len(lines), number + 2) + 1)
    marked = (f"{'>' if n == number else ' '}{n:5} | {lines[n - 1]}" for n in shown)
    return "\n".join([f"\n{found[1]}, line {number}:", *marked])
