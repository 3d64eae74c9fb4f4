"""The kernels' own source on a CPU: g++ compiles it, machine.cpp runs its CUDA threads."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ringcoll

if TYPE_CHECKING:
    import pytest

KERNELS = Path(ringcoll.__file__).parent / "kernels"
CPU = Path(__file__).parent / "cpu"
"""The folder of ``system.cuh`` for a CPU, and of the machine that it declares."""

# Texts with the same macros and headers are compiled at once, each in a namespace of its own: what
# they have in common is most of the compiler's work.
ONE = """
namespace text_{number} {{
#define ringcoll_kernel kernel_{number}
{text}
#undef ringcoll_kernel
}}
"""
CALL = """
extern "C" void call_{number}(const rc::Args* args) {{ text_{number}::kernel_{number}(*args); }}
"""
REST = """
#pragma GCC diagnostic ignored "-Wunused-function"
extern "C" unsigned args_bytes() { return sizeof(rc::Args); }
extern "C" unsigned lanes() { return rc::WARP; }
"""

FOLDER = "TEST_STAND_INS"
"""The variable that tells the processes of one run where the others build."""

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter")
# Kernels throw nothing: tables for exceptions are a twentieth of the compiler's work.
LEAN = ("-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables")
# Distributions have their compilers check each longjmp: one to another stack ends the process.
UNCHECKED = "-U_FORTIFY_SOURCE"
# A GPU refuses what misses an aligned address; the processor would read it.
ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
FLAGS = ("-std=c++17", UNCHECKED, "-pthread", *ALIGNED, *LEAN, *WARNINGS)


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """A C++ compiler of this machine, else the one of the package ziglang; None without both."""
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return (found,)
    # Its C++ library, which nothing here uses, it would build itself first: for minutes.
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++", "-nostdlib++")
    return None


if TYPE_CHECKING:
    needs_compiler: pytest.MarkDecorator
else:

    def __getattr__(name: str) -> pytest.MarkDecorator:
        """``needs_compiler``: only tests have it, and programs do not import pytest for it."""
        if name != "needs_compiler":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import pytest

        return pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def includes(kernels: Path) -> tuple[Path, Path]:
    """The folders of headers: ``system.cuh`` of the kernels' own CPU folder, or of ours, first."""
    own = kernels / "cpu"
    return own if own.exists() else CPU, kernels


@dataclass(frozen=True)
class Kernel:
    """A compiled text: one of those in a shared library."""

    library: ctypes.CDLL
    number: int

    def args_bytes(self) -> int:
        return int(self.library.args_bytes())

    def lanes(self) -> int:
        """The threads of a warp here: those that share a line, else 1."""
        return int(self.library.lanes())

    def launch(self, args: object, blocks: int, locals_: int, threads: int, calls: int) -> None:
        kernel = ctypes.cast(self.library[f"call_{self.number}"], ctypes.c_void_p)
        self.library.launch(kernel, args, self.lanes(), blocks, locals_, threads, calls)


_compiled: dict[tuple[str, Path], Kernel] = {}


def library(text: str, kernels: Path = KERNELS) -> Kernel:
    """The generated text, compiled once."""
    if (text, kernels) not in _compiled:
        _compile([text], kernels)
    return _compiled[text, kernels]


def _compile(texts: Sequence[str], kernels: Path) -> None:
    # The process has the C library; to look for symbols in a C++ library takes a tenth of the time.
    alone = () if "ziglang" in (compiler() or ()) else ("-nostdlib",)
    machine = _machine("machine", kernels)
    flags = ("-O0", "-fPIC", "-shared", *alone)
    made = _built(_source(texts), includes(kernels), ".so", *flags, parts=(machine,))
    built = ctypes.CDLL(str(made))
    for number, text in enumerate(texts):
        _compiled.setdefault((text, kernels), Kernel(built, number))


def _source(texts: Sequence[str]) -> str:
    """One source of texts that are alike, and what calls their kernels."""
    calls = [CALL.format(number=number) for number in range(len(texts))]
    return "".join([together(texts), REST, *calls])


def together(texts: Sequence[str]) -> str:
    """One source of texts that begin with the same macros and headers."""
    found = [_head(texts[0])]
    for number, text in enumerate(texts):
        own = text.removeprefix(found[0]).replace(" ::Op;", f" text_{number}::Op;")
        found.append(ONE.format(number=number, text=own))
    return "".join(found)


def by_head(texts: Iterable[str]) -> list[list[str]]:
    """Texts, each once, by the macros and headers they begin with."""
    heads: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        heads.setdefault(_head(text), []).append(text)
    return list(heads.values())


def _head(text: str) -> str:
    return "".join(itertools.takewhile(lambda line: line[0] == "#", text.splitlines(True)))


@functools.cache
def program(text: str, *flags: str, kernels: Path = KERNELS) -> Path:
    """The generated text and the machine as a program."""
    parts = [_machine(name, kernels, *flags) for name in ("machine", "main")]
    return _built(_source([text]), includes(kernels), "", "-O0", *flags, parts=parts)


def _machine(name: str, kernels: Path, *flags: str) -> Path:
    """A source of the CPU's folder, compiled once for all texts: a third of each one's work."""
    folder, _ = includes(kernels)
    text = (folder / f"{name}.cpp").read_text()
    return _built(text, (folder,), ".o", "-O1", "-fPIC", "-c", *flags)


def compile_all(texts: Iterable[str], kernels: Path = KERNELS) -> None:
    """Compile ahead what :func:`library` will return, on all cores."""
    missing = by_head(text for text in texts if (text, kernels) not in _compiled)
    folder()  # which threads that made it at once would make twice
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_compile, missing, itertools.repeat(kernels)))


def headers_of(text: str) -> set[Path]:
    """The kernels' headers that a text includes, as the compiler found them."""
    source = folder() / f"includes-{os.getpid()}.cpp"
    source.write_text(text)
    said = _run([*(compiler() or ()), *FLAGS, *_searched(includes(KERNELS)), "-MM", str(source)])
    source.unlink()
    return {Path(word).resolve() for word in said.split() if word.endswith(".cuh")}


@functools.cache
def folder() -> Path:
    """What has been built, for this process and all that it starts from then on."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    # A mapped library may be removed; the rest lives as long as the process.
    keep = tempfile.TemporaryDirectory(prefix="ringcoll-stand-in-")
    _kept.append(keep)
    os.environ[FOLDER] = keep.name
    return Path(keep.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _built(
    text: str, headers: Sequence[Path], suffix: str, *flags: str, parts: Sequence[Path] = ()
) -> Path:
    name = _name(text, headers, (*flags, *(part.name for part in parts)))
    target = folder() / f"{name}{suffix}"
    # Ranks, which are threads or processes, may want the same kernel at once; some are killed.
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            os.utime(target)
        else:
            source, made = (folder() / f"{name}-{os.getpid()}{end}" for end in (".cpp", ".made"))
            source.write_text(text)
            command = [*(compiler() or ()), *FLAGS, *flags, *_searched(headers)]
            _run([*command, "-o", str(made), str(source), *map(str, parts)])
            source.unlink()
            made.rename(target)
    return target


def _searched(headers: Sequence[Path]) -> list[str]:
    return [f"-I{folder}" for folder in headers]


def _name(text: str, headers: Sequence[Path], flags: tuple[str, ...]) -> str:
    """Stands for all that decides what the compiler makes of a text."""
    paths = (path for found in headers for path in sorted(found.glob("*.[ch]*")))
    read = [(path.name, _read(path, path.stat().st_mtime_ns)) for path in paths]
    whole = (_version(), FLAGS, flags, text, read)
    return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()


@functools.cache
def _read(path: Path, _changed: int) -> bytes:
    return path.read_bytes()


@functools.cache
def _version() -> str:
    return _run([*(compiler() or ()), "--version"])


def forget(kept: Path, room: int = 256 << 20) -> None:
    """Remove what earlier runs have built, but for ``room`` bytes of what was used last."""
    found = []
    for path in kept.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run's, which it has renamed
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    for _, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0:
            path.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
