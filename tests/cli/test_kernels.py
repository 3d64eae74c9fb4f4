"""``ringcoll kernels`` lists what is there, and writes the archives of a wheel."""

from __future__ import annotations

import itertools
import json
import sys
import time
from types import SimpleNamespace

import pytest

from ringcoll.cli import main
from ringcoll.errors import MachineError
from ringcoll.executors.cuda import cache as caching
from ringcoll.executors.cuda import compile as compiling
from ringcoll.executors.cuda import shipped as shipping
from ringcoll.executors.cuda.cache import KernelCache, kernel_folder
from ringcoll.executors.cuda.shipped import ShippedKernels

SOURCES = ["one", "two", "three"]


def sources(ranks):
    return SOURCES[: len(ranks)]


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    """A cache and a package in folders of the test, three kernels and a compiler of 2 KiB each."""
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shipping, "FOLDER", tmp_path / "package")
    module = SimpleNamespace(RANKS=(2, 4, 8), standard_sources=sources)
    monkeypatch.setitem(sys.modules, "ringcoll.executors.cuda_nodes.standard", module)
    compiled = lambda source, arch, **_: f"{source}{arch}".encode().ljust(2048)  # noqa: E731
    monkeypatch.setattr(caching, "compile_kernel", compiled)
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9), getSupportedArchs=lambda: [80, 90, 100])
    monkeypatch.setattr(compiling, "_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(caching, "nvrtc_version", lambda: (12, 9))


def cells(out):
    return [line.split() for line in out.splitlines()]


def test_nothing_is_there_yet(capsys, tmp_path):
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert "the package carries no compiled kernels" in out
    assert f"in {tmp_path}/kernels: none" in out


def test_a_compilation_is_listed_with_its_call(capsys, tmp_path):
    cache = KernelCache(kernel_folder(None if tmp_path is None else str(tmp_path)))
    cache.get("one", "sm_90", "all_reduce count=4 dtype=float32 op=sum by LL")
    cache.get("two", "sm_80", "reduce count=4")
    (tmp_path / "kernels" / f"{'0' * 64}.cubin").write_bytes(b"damaged")
    (tmp_path / "kernels" / "no digest.cubin").write_bytes(b"damaged")
    assert main(["kernels"]) == 0
    rows = cells(capsys.readouterr().out)
    assert [row[:2] for row in rows if row[:1] in (["sm_80"], ["sm_90"])] == [
        ["sm_80", "1"],
        ["sm_90", "1"],
    ]
    last = [row for row in rows if len(row) > 5 and row[2].startswith("sm_")]
    assert [row[2] for row in last] == ["sm_80", "sm_90"]  # the last first
    assert " ".join(last[1][4:]) == "2 all_reduce count=4 dtype=float32 op=sum by LL"
    assert main(["kernels", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shipped"] == [] and found["cache"] == str(tmp_path / "kernels")
    assert [(each["arch"], each["call"], each["nbytes"]) for each in found["cached"]] == [
        ("sm_80", "reduce count=4", 2048),
        ("sm_90", "all_reduce count=4 dtype=float32 op=sum by LL", 2048),
    ]


def test_compilations_of_one_millisecond_are_listed_in_order(capsys, tmp_path, monkeypatch):
    times = itertools.count(1.8e9, 1e-5)
    clock = SimpleNamespace(time=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr(caching, "time", clock)
    cache = KernelCache(kernel_folder(str(tmp_path)))
    for number in range(8):
        cache.get(str(number), "sm_80", f"call {number}")
    assert main(["kernels", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["cached"]
    assert [each["call"] for each in found] == [f"call {number}" for number in range(7, -1, -1)]


def test_archives_are_written_listed_and_taken(capsys, tmp_path, monkeypatch):
    words = ["kernels", "sm_80", "sm_90", "--out", str(tmp_path / "package")]
    assert main([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nvrtc"] == "12.9"
    assert [(row["arch"], row["compiled"], row["bytes"]) for row in found["archs"]] == [
        ("sm_80", 3, 6144),
        ("sm_90", 3, 6144),
    ]
    assert main(["kernels"]) == 0
    rows = cells(capsys.readouterr().out)
    assert [row for row in rows if "12.9" in row] == [
        ["sm_80", "3", "0.0", "0.0", "12.9", "outdated:", "of", "other", "sources"],
        ["sm_90", "3", "0.0", "0.0", "12.9", "outdated:", "of", "other", "sources"],
    ]
    monkeypatch.setattr("ringcoll.executors.cuda.copy_gates.gate_text", lambda _: SOURCES[1])
    assert main(["kernels", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["shipped"]
    assert [(each["arch"], each["kernels"], each["outdated"]) for each in found] == [
        ("sm_80", 3, False),
        ("sm_90", 3, False),
    ]
    shipped = ShippedKernels(tmp_path / "package")
    cache = KernelCache(None, shipped)
    assert [cache.get(source, "sm_90") for source in SOURCES] == [
        f"{source}sm_90".encode().ljust(2048) for source in SOURCES
    ]
    assert cache.taken == 3
    assert main(["kernels", "sm_90", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["archs"]
    assert (row["compiled"], row["found"], row["shipped"]) == (0, 0, 3)
    assert main(words) == 0  # once more, from the cache
    assert cells(capsys.readouterr().out)[-1][:4] == ["sm_90", "0", "3", "0"]


def test_archives_need_an_architecture(capsys):
    assert main(["kernels", "--out", "there"]) == 2
    assert "need an architecture; add one" in capsys.readouterr().err


def test_ranks_are_those_of_the_communicators(capsys):
    assert main(["kernels", "sm_90", "--ranks", "2,4", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["archs"][0]["kernels"] == 2
    for wrong in ("1", "2,,4", "65", "two"):
        with pytest.raises(SystemExit):
            main(["kernels", "sm_90", "--ranks", wrong])
        assert "wanted numbers from 2 to 64" in capsys.readouterr().err


@pytest.mark.parametrize("has_cupy", [True, False])
@pytest.mark.parametrize("words", [["sm90"], ["sm_80", "90"], ["sm_x", "--json", "-"]])
def test_a_name_that_is_no_architecture_is_refused_first(words, has_cupy, capsys, monkeypatch):
    if not has_cupy:
        without_cupy(monkeypatch)
    assert main(["kernels", *words]) == 2
    out, err = capsys.readouterr()
    wrong = next(word for word in words if word != "sm_80")
    assert out == "" and err.count("\n") == 1
    assert f"{wrong!r} is no architecture of a GPU: write sm_" in err and "such as sm_90" in err


def test_no_header_comes_before_an_error(capsys, monkeypatch):
    assert main(["kernels", "sm_90", "sm_70"]) == 2
    out, err = capsys.readouterr()
    assert (out, "compiles for sm_80, sm_90, sm_100; not for 'sm_70'" in err) == ("", True)
    without_cupy(monkeypatch)
    assert main(["kernels", "sm_90"]) == 2
    out, err = capsys.readouterr()
    assert (out, "ranks on GPUs need CuPy" in err) == ("", True)


def without_cupy(monkeypatch):
    def missing():
        raise MachineError("ranks on GPUs need CuPy (no module): pip install it")

    monkeypatch.setattr(compiling, "_nvrtc", missing)
    monkeypatch.setattr(caching, "nvrtc_version", missing)
