"""Kernels that come with the package are found without a compiler, and trusted only if whole."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from types import SimpleNamespace

import pytest

from ringcoll.errors import MachineError
from ringcoll.executors.cuda import cache as caching
from ringcoll.executors.cuda import compile as compiling
from ringcoll.executors.cuda.cache import KernelCache, compilations
from ringcoll.executors.cuda.compile import read_headers
from ringcoll.executors.cuda.loader import Loader
from ringcoll.executors.cuda.shipped import ShippedKernels, write_archive

SOURCES = [f"source {number}" for number in range(5)]
CUBINS = [bytes([number]) * (600_000 + number) for number in range(5)]  # more than one block


def write(folder, arch="sm_90", nvrtc=(12, 9)):
    cache = KernelCache(None)
    kernels = [
        (cache.key(source, arch), cubin) for source, cubin in zip(SOURCES, CUBINS, strict=True)
    ]
    return write_archive(folder, arch, kernels, version="1.0", nvrtc=nvrtc)


@pytest.fixture
def no_compiler(monkeypatch):
    def missing():
        raise MachineError("there is no NVRTC")

    monkeypatch.setattr(compiling, "_nvrtc", missing)


@pytest.fixture
def compiler(monkeypatch):
    """Stands for NVRTC; gives what it has compiled."""
    done: list[tuple[str, str]] = []

    def compile_kernel(source, arch, **_):
        done.append((source, arch))
        return f"{source} compiled for {arch}".encode()

    monkeypatch.setattr(caching, "compile_kernel", compile_kernel)
    monkeypatch.setattr(caching, "nvrtc_version", lambda: (13, 0))
    return done


def test_all_are_found_without_a_compiler(tmp_path, no_compiler):
    manifest = write(tmp_path / "compiled")
    assert len(manifest.blocks) == 3
    assert manifest.packed < manifest.nbytes == sum(map(len, CUBINS))
    cache = KernelCache(tmp_path / "cache", ShippedKernels(tmp_path / "compiled"))
    for number in (3, 0, 4, 1, 2):
        assert cache.stored(SOURCES[number], "sm_90")
        assert cache.get(SOURCES[number], "sm_90") == CUBINS[number]
    assert (cache.taken, cache.found, cache.compiled) == (5, 0, 0)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not cache.stored("another", "sm_90")
    with pytest.raises(MachineError, match="there is no NVRTC"):
        cache.get("another", "sm_90")


def test_the_package_comes_before_the_cache_and_that_before_the_compiler(tmp_path, compiler):
    folder = tmp_path / "cache"
    assert (
        KernelCache(folder).get(SOURCES[0], "sm_90", "all_reduce") == b"source 0 compiled for sm_90"
    )
    write(tmp_path / "compiled")
    shipped = ShippedKernels(tmp_path / "compiled")
    cache = KernelCache(folder, shipped)
    assert cache.get(SOURCES[0], "sm_90") == CUBINS[0]
    assert cache.get("another", "sm_90", "reduce") == b"another compiled for sm_90"
    again = KernelCache(folder, shipped)
    assert again.get("another", "sm_90") == b"another compiled for sm_90"
    assert (again.taken, again.found, again.compiled) == (0, 1, 0)
    assert len(compiler) == 2
    found = {each.call: each for each in compilations(folder)}
    assert set(found) == {"all_reduce", "reduce"}
    assert (found["reduce"].arch, found["reduce"].nvrtc) == ("sm_90", "13.0")
    assert found["reduce"].nbytes == len(b"another compiled for sm_90")


def test_the_driver_is_handed_the_bytes_of_the_package(tmp_path, no_compiler, monkeypatch):
    write(tmp_path)
    loaded: list[bytes] = []

    class Module:
        def load(self, cubin):
            loaded.append(cubin)

        def get_function(self, name):
            assert name == "ringcoll_kernel"
            return SimpleNamespace(ptr=77)

    pytest.importorskip("cupy", reason="the loader calls the driver through CuPy")
    monkeypatch.setattr("cupy.cuda.function.Module", Module)
    monkeypatch.setattr("cupy.cuda.Device", lambda _: _Nothing())
    monkeypatch.setattr(
        "cupy.cuda.driver",
        SimpleNamespace(CU_FUNC_ATTRIBUTE_NUM_REGS=4, funcGetAttribute=lambda *_: 32),
    )
    loader = Loader(KernelCache(None, ShippedKernels(tmp_path)))
    assert loader.available(SOURCES[2], (9, 0)) and not loader.available("another", (9, 0))
    assert loader.compile_ahead(SOURCES[2], (9, 0)).result() == CUBINS[2]
    assert loader.function(SOURCES[2], 0, (9, 0)) == 77
    assert loaded == [CUBINS[2]]
    loader.rest()


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize(
    "change",
    [
        (caching, "read_headers", lambda: {**read_headers(), "types.cuh": b"// new\n"}),
        (caching, "flags", lambda arch: (f"-arch={arch}", "-fmad=true")),
        ("ringcoll.version.__version__", "0.0.0"),
    ],
)
def test_a_change_of_what_they_are_made_from_finds_none(tmp_path, monkeypatch, compiler, change):
    write(tmp_path)
    monkeypatch.setattr(*change)
    cache = KernelCache(None, ShippedKernels(tmp_path))
    assert not cache.stored(SOURCES[0], "sm_90")
    assert cache.get(SOURCES[0], "sm_90") == b"source 0 compiled for sm_90"


def spoil(name, at):
    def spoil_file(folder):
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return spoil_file


def change_manifest(**changes):
    def change(folder):
        path = folder / "sm_90.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_place(place):
    def change(folder):
        path = folder / "sm_90.json"
        found = json.loads(path.read_text())
        key = next(iter(found["kernels"]))
        found["kernels"][key] = place
        path.write_text(json.dumps(found))

    return change


def change_size(folder):
    path = folder / "sm_90.json"
    found = json.loads(path.read_text())
    found["blocks"][0][2] -= 1
    path.write_text(json.dumps(found))


def ask_for_4_gib(folder):
    """Have the header of the first block ask for the largest dictionary, with a right checksum."""
    content = bytearray((folder / "sm_90.xz").read_bytes())
    end = 12 + 4 * content[12]  # of the header of xz's block, behind that of its stream
    filter_id = content.index(0x21, 12, end)
    content[filter_id + 2] = 40
    content[end : end + 4] = struct.pack("<I", zlib.crc32(content[12:end]))
    (folder / "sm_90.xz").write_bytes(content)


DAMAGE = {
    "no archive": lambda folder: (folder / "sm_90.xz").unlink(),
    "a byte of the archive": spoil("sm_90.xz", 40),
    "cut archive": lambda folder: (folder / "sm_90.xz").write_bytes(b""),
    "huge dictionary": ask_for_4_gib,
    "nested lists": lambda folder: (folder / "sm_90.json").write_text("[" * 200_000),
    "no JSON": lambda folder: (folder / "sm_90.json").write_text("(lambda: 1)()"),
    "a list": lambda folder: (folder / "sm_90.json").write_text("[]"),
    "other format": change_manifest(format=2),
    "other architecture": change_manifest(arch="sm_80"),
    "another field": change_manifest(more=1),
    "version": change_manifest(version=1),
    "NVRTC": change_manifest(nvrtc=["a", 1]),
    "NVRTC of one number": change_manifest(nvrtc=[13]),
    "blocks": change_manifest(blocks={}),
    "block of two": change_manifest(blocks=[[0, 1]]),
    "negative": change_manifest(blocks=[[-1, 1, 1]]),
    "huge": change_manifest(blocks=[[0, 1, 1 << 60]]),
    "kernels": change_manifest(kernels=[]),
    "outside of its block": change_place([0, 1_300_000, 10, "00"]),
    "no such block": change_place([9, 0, 1, "00"]),
    "a truth": change_place([True, 0, 1, "00"]),
    "no digest": change_place([0, 0, 1, 5]),
    "other digest": change_place([0, 0, 600_000, "00"]),
    "another kernel": change_place([0, 600_000, 600_000, "00"]),
    "shorter block": change_size,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_compiled_instead(tmp_path, caplog, compiler, damage):
    write(tmp_path)
    DAMAGE[damage](tmp_path)
    cache = KernelCache(None, ShippedKernels(tmp_path))
    assert cache.get(SOURCES[0], "sm_90") == b"source 0 compiled for sm_90"
    assert caplog.text.count("is not used, its kernels are compiled") == 1
    assert cache.get(SOURCES[1], "sm_90") == b"source 1 compiled for sm_90"
    assert caplog.text.count("is not used") == 1


def test_without_a_compiler_a_damaged_archive_has_no_kernel_once_read(tmp_path, no_compiler):
    write(tmp_path)
    DAMAGE["a byte of the archive"](tmp_path)
    loader = Loader(KernelCache(None, ShippedKernels(tmp_path)))
    assert loader.available(SOURCES[0], (9, 0))
    with pytest.raises(MachineError, match="there is no NVRTC"):
        loader.compile(SOURCES[0], (9, 0))
    assert not loader.available(SOURCES[0], (9, 0))


def test_a_python_without_lzma_compiles(tmp_path, caplog, compiler, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "lzma", None)
    cache = KernelCache(None, ShippedKernels(tmp_path))
    assert cache.get(SOURCES[0], "sm_90") == b"source 0 compiled for sm_90"
    assert "this Python was built without lzma" in caplog.text


@pytest.mark.parametrize(("cuda", "taken"), [(11, 0), (12, 1), (13, 1), (None, 1)])
def test_a_driver_of_an_older_cuda_is_not_given_them(tmp_path, compiler, cuda, taken):
    write(tmp_path)
    cache = KernelCache(None, ShippedKernels(tmp_path, cuda))
    cache.get(SOURCES[0], "sm_90")
    assert (cache.taken, len(compiler)) == (taken, 1 - taken)


@pytest.mark.parametrize(
    ("there", "arch", "taken"),
    [
        (["sm_80", "sm_86"], "sm_89", "sm_86"),
        (["sm_80"], "sm_89", "sm_80"),
        (["sm_80"], "sm_87", "sm_87"),  # an integrated GPU
        (["sm_86"], "sm_80", "sm_80"),
        (["sm_80"], "sm_90", "sm_90"),
        (["sm_100"], "sm_103", "sm_100"),
        (["sm_100"], "sm_120", "sm_120"),
        (["sm_120"], "sm_121", "sm_120"),
        ([], "sm_90", "sm_90"),
    ],
)
def test_a_later_minor_version_runs_the_cubins_of_an_earlier(
    tmp_path, compiler, there, arch, taken
):
    for name in there:
        write(tmp_path, name)
    shipped = ShippedKernels(tmp_path)
    assert shipped.arch_for(arch) == taken
    cache = KernelCache(None, shipped)
    cache.get(SOURCES[0], arch)
    assert cache.taken == (taken in there)
    assert compiler == ([] if taken in there else [(SOURCES[0], arch)])
