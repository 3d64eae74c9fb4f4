"""A cubin is compiled once, whoever asks, and nothing wrong with the folder is ever an error."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringcoll.cli import main
from ringcoll.errors import MachineError
from ringcoll.executors.cuda import cache as caching
from ringcoll.executors.cuda.cache import KernelCache, kernel_folder
from ringcoll.executors.cuda.compile import compile_kernel, read_headers

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

ROOT = Path(__file__).parents[2]
ARCH = "sm_90"


def text(number: int) -> str:
    return (
        '#include "types.cuh"\n'
        f'extern "C" __global__ void kernel(rc::u32* x) {{ x[threadIdx.x] = {number}; }}\n'
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kernels"


def kept(folder: Path) -> Path:
    """The one file of a folder."""
    (path,) = folder.iterdir()
    return path


def outcome(cache: KernelCache) -> tuple[int, int]:
    return cache.compiled, cache.found


def test_compiled_then_remembered_then_found(folder):
    first = KernelCache(folder)
    cubin = first.get(text(1), ARCH)
    assert first.get(text(1), ARCH) is cubin
    assert outcome(first) == (1, 0)
    second = KernelCache(folder)
    assert second.get(text(1), ARCH) == cubin == compile_kernel(text(1), ARCH)
    assert outcome(second) == (0, 1)


def test_only_the_user_can_look_into_the_folder(folder):
    KernelCache(folder).get(text(1), ARCH)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept(folder).stat().st_mode & 0o777 == 0o600


def test_without_a_folder_memory_serves():
    cache = KernelCache(None)
    assert cache.get(text(1), ARCH) is cache.get(text(1), ARCH)
    assert outcome(cache) == (1, 0)


def spoil_byte(at: int):
    def spoil(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return spoil


def spoil_to_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def spoil_to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def spoil_to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def spoil_by_another_kernel(path: Path) -> None:
    folder = path.parent.parent / "another"
    KernelCache(folder).get(text(2), ARCH)
    kept(folder).replace(path)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "short of its header": lambda path: os.truncate(path, 20),
    "cut": lambda path: os.truncate(path, 1000),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "other magic": spoil_byte(0),
    "other length": spoil_byte(8),
    "other digest": spoil_byte(20),
    "other cubin": spoil_byte(-1),
    "another kernel": spoil_by_another_kernel,
    "link": spoil_to_link,
    "folder": spoil_to_folder,
    "pipe": spoil_to_pipe,
    "writable for others": lambda path: path.chmod(0o606),
    "writable for a group": lambda path: path.chmod(0o660),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(folder, caplog, damage):
    cubin = KernelCache(folder).get(text(1), ARCH)
    DAMAGE[damage](kept(folder))
    cache = KernelCache(folder)
    assert cache.get(text(1), ARCH) == cubin
    assert outcome(cache) == (1, 0)
    assert "is compiled again" in caplog.text
    if damage != "folder":  # which cannot be replaced by a file
        assert outcome(after := KernelCache(folder)) == (0, 0)
        assert after.get(text(1), ARCH) == cubin
        assert outcome(after) == (0, 1)
    assert [path.name for path in folder.iterdir()] == [kept(folder).name]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_write_to_is_refused(folder, caplog, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    cache = KernelCache(folder)
    assert cache.folder is None
    assert f"others may write to it (mode {mode:o})" in caplog.text
    cache.get(text(1), ARCH)
    assert outcome(cache) == (1, 0)
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_refused(folder, caplog, monkeypatch):
    KernelCache(folder).get(text(1), ARCH)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    cache = KernelCache(folder)
    assert cache.folder is None
    assert f"it belongs to user {owner}" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "kernels")
    cache.get(text(1), ARCH)
    assert cache.folder is None
    assert "Not a directory" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_once(folder, caplog):
    cache = KernelCache(folder)
    folder.rmdir()
    cache.compile_all([text(1), text(2)], ARCH)
    assert cache.compiled == 2
    assert caplog.text.count("compiled kernels are not kept") == 1


def test_a_disk_that_is_full_leaves_nothing_behind(folder, monkeypatch):
    class Full:
        def __init__(self, *args):
            os.close(args[0])

        def __enter__(self):
            raise OSError(28, "No space left on device")

        def __exit__(self, *args): ...

    cache = KernelCache(folder)
    monkeypatch.setattr(os, "fdopen", Full)
    cache.get(text(1), ARCH)
    assert list(folder.iterdir()) == []


def test_a_source_that_does_not_compile_is_tried_again():
    cache = KernelCache(None)
    for _ in range(2):
        with pytest.raises(MachineError, match="does not compile"):
            cache.get("nonsense", ARCH)
    assert outcome(cache) == (0, 0)


def keys_of(monkeypatch) -> dict[str, bytes]:
    """The key of one source, and its keys after something else has changed."""

    def key(number=1, arch=ARCH):
        return caching._file_key(KernelCache(None).key(text(number), arch))

    keys = {
        "itself": key(),
        "source": key(number=2),
        "architecture": key(arch="sm_100"),
    }
    changes = {
        "flags": (caching, "flags", lambda arch: (f"-arch={arch}", "-fmad=true")),
        "ringcoll": ("ringcoll.version.__version__", "0.0.0"),
        "nvrtc": (caching, "nvrtc_version", lambda: (12, 0)),
        "header": (caching, "read_headers", lambda: {**read_headers(), "types.cuh": b"// new\n"}),
        "name": (caching, "read_headers", lambda: {f"a{k}": v for k, v in read_headers().items()}),
        "one header": (caching, "read_headers", lambda: {"a": b"bc"}),
        "cut otherwise": (caching, "read_headers", lambda: {"ab": b"c"}),
        "new header": (caching, "read_headers", lambda: {**read_headers(), "x.cuh": b""}),
    }
    for name, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            keys[name] = key()
    return keys


def test_the_key_is_of_all_that_a_cubin_is_made_from(monkeypatch):
    keys = keys_of(monkeypatch)
    assert len(set(keys.values())) == len(keys)
    assert keys_of(monkeypatch) == keys


def test_a_changed_header_is_compiled(folder, tmp_path, monkeypatch):
    kernels = tmp_path / "headers"
    kernels.mkdir()
    source = '#include "value.cuh"\n__global__ void kernel(int* x) { *x = VALUE; }\n'
    cubins = []
    for value in (1, 2, 1):
        (kernels / "value.cuh").write_text(f"#define VALUE {value}\n")
        monkeypatch.setattr(caching, "read_headers", lambda: read_headers(kernels))
        cubins.append(KernelCache(folder).get(source, ARCH))
    assert cubins[0] == cubins[2] != cubins[1]
    assert len(list(folder.iterdir())) == 2


def test_threads_compile_a_source_once():
    cache = KernelCache(None)
    sources = [text(number % 2) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(lambda source: cache.get(source, ARCH), sources))
    assert outcome(cache) == (2, 0)
    assert len({id(cubin) for cubin in cubins}) == 2


def test_many_sources_come_back_in_order(folder):
    sources = [text(number) for number in (3, 1, 2, 3)]
    cubins = KernelCache(folder).compile_all(sources, ARCH)
    assert cubins == [compile_kernel(source, ARCH) for source in sources]
    assert KernelCache(folder).compile_all([], ARCH) == []


PROCESS = """
import hashlib, json, pathlib, sys
from ringcoll.executors.cuda.cache import KernelCache
cache = KernelCache(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sources = json.loads(sys.stdin.readline())
print(*(hashlib.sha256(cubin).hexdigest() for cubin in cache.compile_all(sources, "sm_90")))
"""


def test_processes_share_a_folder(folder):
    sources = [text(number) for number in range(6)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps(sources)}\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    cache = KernelCache(folder)
    wanted = [hashlib.sha256(cubin).hexdigest() for cubin in cache.compile_all(sources, ARCH)]
    assert said == [wanted] * 4
    assert outcome(cache) == (0, 6)
    assert {path.suffix for path in folder.iterdir()} == {".cubin"}


def test_the_folder_follows_setting_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/user")
    assert kernel_folder("mine") == tmp_path / "mine" / "kernels"
    assert kernel_folder(None) == Path("/var/cache/user/ringcoll/kernels")
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert kernel_folder(None) == Path("/home/somebody/.cache/ringcoll/kernels")


def stand_in(monkeypatch, sources: list[str]) -> None:
    """Let the command compile these sources."""
    module = types.SimpleNamespace(RANKS=(2,), standard_sources=lambda _: sources)
    monkeypatch.setitem(sys.modules, "ringcoll.executors.cuda_nodes.standard", module)


def test_command_fills_the_folder(tmp_path, monkeypatch, capsys):
    sources = [text(1), text(2)]
    stand_in(monkeypatch, sources)
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))
    for arch, made, found in [("sm_90", 2, 0), ("sm_90", 0, 2), ("sm_100", 2, 0)]:
        assert main(["kernels", arch]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"2 kernels, kept in {tmp_path}/kernels"
        assert said[2].split()[:5] == ["arch", "compiled", "found", "in", "package"]
        assert said[3].split()[:3] == [arch, str(made), str(found)]
    cache = KernelCache(kernel_folder(str(tmp_path)))
    cache.compile_all(sources, "sm_90")
    assert outcome(cache) == (0, 2)


def test_command_refuses_what_it_cannot_do(tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch, [text(1)])
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))
    assert main(["kernels", "hopper"]) == 2
    assert "'hopper' is no architecture" in capsys.readouterr().err
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert main(["kernels", "sm_90"]) == 2
    assert "cannot write kernels there; set RINGCOLL_CACHE_DIR" in capsys.readouterr().err
