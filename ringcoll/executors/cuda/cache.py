"""Cubins that were compiled before: in memory, in the package, and in the user's cache folder.

A file is named by a digest of all that its cubin was made from, so that it is never outdated, only
unused. Any number of processes may share a folder: files are written aside and renamed, and two
that compile the same write the same. Nothing about the folder is ever an error: whatever cannot be
read or trusted is compiled again, and kept in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock

from ringcoll import log, version
from ringcoll.errors import MachineError
from ringcoll.executors.cuda.compile import compile_kernel, flags, nvrtc_version, read_headers
from ringcoll.executors.cuda.shipped import ShippedKernels
from ringcoll.fabric.thread import OURS
from ringcoll.folders import contents, own_folder, user_folder, write_aside

_log = log.logger()

# Magic, bytes that follow, digest of key and these: bytes of the record, the record, the cubin.
_HEADER = struct.Struct("<8sQ32s")
_RECORD = struct.Struct("<I")
_MAGIC = b"RCCUBIN2"
_DIGEST_BYTES = 32


def kernel_folder(cache_dir: str | None) -> Path | None:
    """The folder of compiled kernels: the setting, or the user's cache; None without a home."""
    return user_folder(cache_dir, "kernels")


@dataclass(frozen=True, slots=True)
class Compilation:
    """What a file of the folder says of its cubin."""

    arch: str
    version: str  # of ringcoll
    nvrtc: str
    time: float  # its end, in seconds since 1970
    seconds: float
    nbytes: int  # of the cubin
    call: str  # for which it was compiled


class KernelCache:
    """Compiles each source once; threads may share it."""

    def __init__(self, folder: Path | None, shipped: ShippedKernels | None = None) -> None:
        self.folder = _usable(folder)
        self.compiled = 0  # cubins
        self.found = 0  # cubins read from the folder
        self.taken = 0  # cubins that came with the package
        self._shipped = shipped
        self._writable = self.folder is not None
        self._headers = read_headers()
        names = (part for name, text in self._headers.items() for part in (name.encode(), text))
        self._common = _digest(version.__version__.encode(), *names)
        self._lock = Lock()
        self._making: dict[bytes, Lock] = {}
        self._cubins: dict[bytes, bytes] = {}

    def get(self, source: str, arch: str, call: str = "") -> bytes:
        """The cubin of a source: from memory, the package, the folder, or compiled for a call."""
        key = self.key(source, arch)
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            if key in self._cubins:
                return self._cubins[key]
            cubin = self._from_package(source, arch)
            taken = cubin is not None
            if cubin is None:
                cubin = self._read(_file_key(key))
            found = cubin is not None and not taken
            if cubin is None:
                cubin = self._compile(key, source, arch, call)
            with self._lock:
                self.taken += taken
                self.found += found
                self.compiled += not (taken or found)
                self._cubins[key] = cubin
            return cubin

    def stored(self, source: str, arch: str) -> bool:
        """Whether package or folder have a source's cubin, which :meth:`get` may still refuse."""
        if self._shipped is not None:
            near = self._shipped.arch_for(arch)
            if self._shipped.has(self.key(source, near), near):
                return True
        if self.folder is None:
            return False
        try:
            return (self.folder / _name(_file_key(self.key(source, arch)))).exists()
        except MachineError:  # no NVRTC
            return False

    def compile_all(self, sources: Sequence[str], arch: str, call: str = "") -> list[bytes]:
        """The cubins of many sources, in order, on all cores: NVRTC runs without the GIL."""
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores, thread_name_prefix=f"{OURS}nvrtc") as pool:
            return list(pool.map(lambda source: self.get(source, arch, call), sources))

    def forked(self) -> None:
        """Forget, in a fork, the locks that threads of the parent hold while they compile."""
        self._lock, self._making = Lock(), {}
        if self._shipped is not None:
            self._shipped.forked()

    def key(self, source: str, arch: str) -> bytes:
        """A digest of all that the cubin depends on, but for the compiler's version."""
        return _digest(self._common, *(flag.encode() for flag in flags(arch)), source.encode())

    def _from_package(self, source: str, arch: str) -> bytes | None:
        if self._shipped is None:
            return None
        near = self._shipped.arch_for(arch)
        return self._shipped.get(self.key(source, near), near)

    def _compile(self, key: bytes, source: str, arch: str, call: str) -> bytes:
        start = time.perf_counter()
        cubin = compile_kernel(source, arch, headers=self._headers)
        seconds = round(time.perf_counter() - start, 3)
        _log.debug("compiled a kernel for %s in %g s: %s", arch, seconds, call)
        record = Compilation(
            arch,
            version.__version__,
            "{}.{}".format(*nvrtc_version()),
            round(time.time(), 6),  # those of one millisecond are listed in order, too
            seconds,
            len(cubin),
            call,
        )
        self._write(_file_key(key), cubin, record)
        return cubin

    def _read(self, key: bytes) -> bytes | None:
        if self.folder is None:
            return None
        path = self.folder / _name(key)
        try:
            content = contents(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s is compiled again: %s", path, error)
            return None
        try:
            return _parsed(key, content)[1]
        except ValueError as error:
            _log.warning("%s is compiled again: %s", path, error)
            return None

    def _write(self, key: bytes, cubin: bytes, record: Compilation) -> None:
        if self.folder is None or not self._writable:
            return
        text = json.dumps(asdict(record)).encode()
        rest = _RECORD.pack(len(text)) + text + cubin
        try:
            write_aside(self.folder / _name(key), _header(key, rest) + rest)
        except OSError as error:
            self._writable = False  # one warning, not one a kernel
            _log.warning("compiled kernels are not kept in %s: %s", self.folder, error)


def compilations(folder: Path) -> list[Compilation]:
    """What the files of a folder say; files that are damaged or of another format are left out."""
    found = []
    for path in folder.glob("*.cubin"):
        with contextlib.suppress(OSError, ValueError):
            found.append(_parsed(bytes.fromhex(path.stem), contents(path))[0])
    return found


def _parsed(key: bytes, content: bytes) -> tuple[Compilation, bytes]:
    """Record and cubin of a file.

    Raises:
        ValueError: it is not as it was written.

    """
    rest = content[_HEADER.size :]
    if content[: _HEADER.size] != _header(key, rest) or len(rest) < _RECORD.size:
        raise ValueError("it is damaged")
    end = _RECORD.size + _RECORD.unpack_from(rest)[0]
    found = json.loads(rest[_RECORD.size : end])
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "float": (int, float), "int": (int,)}
    names = {field.name: kinds[str(field.type)] for field in fields(Compilation)}
    if not isinstance(found, dict) or set(found) != set(names):
        raise ValueError("its record has other fields")
    if any(not isinstance(found[name], kind) for name, kind in names.items()):
        raise ValueError("a field of its record is of another type")
    return Compilation(**found), rest[end:]


def _file_key(key: bytes) -> bytes:
    """The key of a file: another version of NVRTC may compile otherwise.

    Raises:
        MachineError: there is no NVRTC, which would compile it.

    """
    return _digest(key, "nvrtc {}.{}".format(*nvrtc_version()).encode())


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def _usable(folder: Path | None) -> Path | None:
    """The folder, made if need be, if only this user writes to it."""
    if folder is None:
        return None
    try:
        own_folder(folder)
    except OSError as error:
        _log.warning("compiled kernels are not kept in %s: %s", folder, error)
        return None
    return folder


def _name(key: bytes) -> str:
    return f"{key.hex()}.cubin"


def _header(key: bytes, rest: bytes) -> bytes:
    digest = hashlib.blake2b(key + rest, digest_size=_DIGEST_BYTES).digest()
    return _HEADER.pack(_MAGIC, len(rest), digest)
