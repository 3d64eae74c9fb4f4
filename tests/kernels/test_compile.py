"""Sources that include the package's headers become cubins, or errors that say what to do."""

from __future__ import annotations

import logging
import re
import struct
import sys

import pytest

from ringcoll.errors import ArgumentError, MachineError
from ringcoll.executors.cuda import compile as compiling
from ringcoll.executors.cuda import ll, workspace
from ringcoll.executors.cuda.compile import arch_of, compile_kernel, nvrtc_version, read_headers
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.message_copies import message_gate_text
from tests.kernels import cuda12

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

SOURCE = """
#include "ops.cuh"
extern "C" __global__ void kernel(float* x) {
    x[0] = rc::Sum<rc::Float32>::combine(x[1] * x[2], x[3]);
}
"""


def machine_of(cubin: bytes) -> int:
    """The architecture that an ELF file for CUDA says it is for, in the flags of its header."""
    assert cubin[:4] == b"\x7fELF"
    (word,) = struct.unpack_from("<I", cubin, 48)
    # Where the number stands depends on the version of the ABI, the eighth byte.
    return word >> 8 & 0xFF if cubin[8] >= 8 else word & 0xFF


def registers_of(cubin: bytes) -> int:
    """Registers of a thread of the only kernel, where an ELF file for sm_86 says them."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", cubin, at + k * size) for k in range(count)]
    texts = [s for s in sections if cubin[sections[names][4] + s[0] :].startswith(b".text.")]
    ((*_, info),) = texts
    return int(info >> 24)


@pytest.mark.parametrize("text", [gate_text, message_gate_text])
def test_a_gate_leaves_most_registers_to_other_kernels(text):
    if nvrtc_version() < (12, 4):
        pytest.skip("before CUDA 12.4 no kernel can limit its registers")
    assert 0 < registers_of(compile_kernel(text(8), "sm_86")) <= 32


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_cubin_is_for_the_architecture(arch):
    assert machine_of(compile_kernel(SOURCE, arch)) == int(arch.removeprefix("sm_"))


@pytest.mark.parametrize(
    ("home", "header", "name"),
    [
        *(
            (workspace, "program.cuh", name)
            for name in ("MOST_BLOCKS", "HELLO_SLOTS", "HELLO_LINES", "FACTOR_LINES", "HELLOS")
        ),
        (ll, "system.cuh", "SYNC_THREADS"),
    ],
)
def test_the_host_and_the_kernels_have_one_constant(home, header, name):
    text = read_headers()[header].decode()
    (value,) = re.findall(rf"constexpr u(?:32|64) {name} = (\d+);", text)
    assert getattr(home, name) == int(value)


def test_oldest_gpus_are_served_by_cuda_12():
    assert machine_of(cuda12.compile_kernel(SOURCE, "sm_70")) == 70
    # The two libraries do not mix: CuPy's still answers for itself.
    assert machine_of(compile_kernel(SOURCE, "sm_90")) == 90
    assert machine_of(cuda12.compile_kernel(SOURCE, "sm_70")) == 70


def test_same_source_same_cubin():
    assert compile_kernel(SOURCE, "sm_90") == compile_kernel(SOURCE, "sm_90")


def test_names_of_architectures():
    assert [arch_of(8, 6), arch_of(9, 0), arch_of(10, 0)] == ["sm_86", "sm_90", "sm_100"]


def test_the_current_folder_offers_no_headers(tmp_path, monkeypatch):
    (tmp_path / "ops.cuh").write_text("#error of the current folder")
    (tmp_path / "system.cuh").write_text("#error of the current folder")
    monkeypatch.chdir(tmp_path)
    compile_kernel(SOURCE, "sm_90")


def test_an_error_shows_the_log_and_the_lines():
    source = "\n".join([*(f"// line {n}" for n in range(1, 6)), "int x = nonsense;", "// after"])
    with pytest.raises(MachineError) as raised:
        compile_kernel(source, "sm_90")
    text = str(raised.value)
    assert text.startswith("the kernel 'ringcoll' does not compile for sm_90 with NVRTC ")
    assert 'ringcoll(6): error: identifier "nonsense" is undefined' in text
    assert text.endswith(
        "ringcoll, line 6:\n"
        "     4 | // line 4\n"
        "     5 | // line 5\n"
        ">    6 | int x = nonsense;\n"
        "     7 | // after"
    )


def test_an_error_in_a_header_shows_its_lines():
    headers = {**read_headers(), "wrong.cuh": b"#pragma once\nint f( {}\n"}
    with pytest.raises(MachineError, match=r"wrong\.cuh, line 2:\n.*pragma once\n> +2 \| int f"):
        compile_kernel('#include "wrong.cuh"', "sm_90", headers=headers)


def test_a_missing_header_is_named():
    with pytest.raises(MachineError, match=r'cannot open source file "absent\.cuh"'):
        compile_kernel('#include "absent.cuh"', "sm_90")


def test_a_long_log_is_cut():
    source = "\n".join(f"int x{n} = y{n};" for n in range(60))
    with pytest.raises(MachineError, match=r"\n\.\.\. and \d+ lines more\n") as raised:
        compile_kernel(source, "sm_90")
    assert len(str(raised.value).splitlines()) < 60


def test_a_warning_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "ringcoll"):
        compile_kernel("__global__ void kernel() { int unused; }", "sm_90")
    assert "unused" in caplog.text


def test_a_dropped_architecture_needs_cuda_12():
    if nvrtc_version() < (13, 0):
        pytest.skip("CUDA 12 still has it")
    with pytest.raises(MachineError, match=r"not for 'sm_70': .*pip install .*\[cu12\]"):
        compile_kernel(SOURCE, "sm_70")


def test_a_future_architecture_needs_a_newer_compiler():
    with pytest.raises(MachineError, match=r"not for 'sm_990': .* pip install -U"):
        compile_kernel(SOURCE, "sm_990")


def test_an_architecture_between_others_needs_another_cuda():
    # Neither CUDA 12 nor 13 has it.
    with pytest.raises(MachineError, match=r"not for 'sm_102': another CUDA may, pip install"):
        compile_kernel(SOURCE, "sm_102")


def test_a_word_is_no_architecture():
    with pytest.raises(ArgumentError, match=r"^'hopper' is no architecture .*such as sm_90"):
        compile_kernel(SOURCE, "hopper")


@pytest.fixture
def forgetful():
    """CuPy is looked for again, before the test and after it."""
    compiling._nvrtc.cache_clear()
    yield
    compiling._nvrtc.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_without_cupy_the_extras_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MachineError, match=r"need CuPy .*\[cu13\]'.*\[cu12\]'"):
        compile_kernel(SOURCE, "sm_90")


@pytest.mark.usefixtures("forgetful")
def test_without_nvrtc_the_extras_are_named(monkeypatch):
    class Missing:
        @staticmethod
        def getVersion():  # noqa: N802
            raise RuntimeError("CuPy failed to load libnvrtc.so.13\nand more")

    monkeypatch.setattr("cupy.cuda.nvrtc", Missing)
    with pytest.raises(MachineError, match=r"libnvrtc.so.13\): pip install -e '.*\[cu13\]'"):
        nvrtc_version()
