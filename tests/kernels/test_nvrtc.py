"""The kernels' arithmetic compiles for GPUs, and nothing in it is fused, flushed or approximate."""

from __future__ import annotations

import pytest

from tests.kernels.harness import KERNELS, LEGAL, OPERATORS, TYPES

FLAGS = ["-std=c++17", "-ftz=false", "-fmad=false", "-prec-div=true"]

FOLD = """
#include "ops.cuh"

template <class T, template <class> class Op>
RC_DEVICE void fold(void* memory, rc::u32 nranks) {
    using Raw = typename T::Raw;
    const typename T::Acc factor = *static_cast<typename T::Acc*>(memory);
    Raw* raw = static_cast<Raw*>(memory) + 2 * threadIdx.x + sizeof(typename T::Acc);
    const auto left = Op<T>::load(raw[0], factor);
    const auto right = Op<T>::load(raw[1], factor);
    raw[0] = T::narrow(Op<T>::finish(Op<T>::combine(left, right), nranks));
}
"""


def source():
    """One kernel that folds two contributions by every operator on every type."""
    calls = "".join(
        f"    fold<rc::{TYPES[dtype.name]}, rc::{OPERATORS[name]}>(memory[{k}], nranks);\n"
        for k, (dtype, name) in enumerate(LEGAL)
    )
    head = 'extern "C" __global__ void every(void* const* memory, rc::u32 nranks) {\n'
    return f"{FOLD}\n{head}{calls}}}\n"


def compiled():
    """The compiled program's PTX; test_matrix.py makes cubins of every operator."""
    nvrtc = pytest.importorskip("cupy", reason="NVRTC is reached through CuPy").cuda.nvrtc
    program = nvrtc.createProgram(source(), "every.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*FLAGS, "-arch=compute_90", f"-I{KERNELS}"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert "warning" not in nvrtc.getProgramLog(program)
    text = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    return text


def test_nothing_is_fused_flushed_or_approximate():
    text = compiled()
    if isinstance(text, bytes):
        text = text.decode()
    assert "add.rn.f32" in text
    assert "div.rn.f64" in text
    for wrong in ("fma.", ".ftz", ".approx", "div.full"):
        assert wrong not in text
