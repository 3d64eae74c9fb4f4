"""Cubins that were compiled before: in memory, and in the user's cache folder.

A file is named by a digest of all that its cubin was made from, so that it is never outdated, only
unused. Any number of processes may share a folder: files are written aside and renamed, and two
that compile the same write the same. Nothing about the folder is ever an error: whatever cannot be
read or trusted is compiled again, and kept in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from ringcoll import version
from ringcoll.executors.cuda.compile import compile_kernel, flags, nvrtc_version, read_headers
from ringcoll.fabric.thread import OURS
from ringcoll.folders import contents, own_folder, user_folder, write_aside

_log = logging.getLogger("ringcoll")

# Magic, bytes of the cubin, digest of key and cubin; the cubin follows.
_HEADER = struct.Struct("<8sQ32s")
_MAGIC = b"RCCUBIN1"
_DIGEST_BYTES = 32


def kernel_folder(cache_dir: str | None) -> Path | None:
    """The folder of compiled kernels: the setting, or the user's cache; None without a home."""
    return user_folder(cache_dir, "kernels")


class KernelCache:
    """Compiles each source once; threads may share it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = _usable(folder)
        self.compiled = 0  # cubins
        self.found = 0  # cubins read from the folder
        self._writable = self.folder is not None
        self._headers = read_headers()
        self._lock = Lock()
        self._making: dict[bytes, Lock] = {}
        self._cubins: dict[bytes, bytes] = {}

    def get(self, source: str, arch: str) -> bytes:
        """The cubin of a source: from memory, from the folder, or compiled."""
        key = self._key(source, arch)
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            if key in self._cubins:
                return self._cubins[key]
            cubin = self._read(key)
            read = cubin is not None
            if cubin is None:
                cubin = compile_kernel(source, arch, headers=self._headers)
                self._write(key, cubin)
            with self._lock:
                self.found += read
                self.compiled += not read
                self._cubins[key] = cubin
            return cubin

    def stored(self, source: str, arch: str) -> bool:
        """Whether the folder has a file for a source, which :meth:`get` may still refuse."""
        return self.folder is not None and (self.folder / _name(self._key(source, arch))).exists()

    def compile_all(self, sources: Sequence[str], arch: str) -> list[bytes]:
        """The cubins of many sources, in order, on all cores: NVRTC runs without the GIL."""
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores, thread_name_prefix=f"{OURS}nvrtc") as pool:
            return list(pool.map(lambda source: self.get(source, arch), sources))

    def _key(self, source: str, arch: str) -> bytes:
        """A digest of all that the cubin depends on."""
        major, minor = nvrtc_version()
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in (
            version.__version__.encode(),
            f"nvrtc {major}.{minor}".encode(),
            *(flag.encode() for flag in flags(arch)),
            *(part for header in self._headers.items() for part in (header[0].encode(), header[1])),
            source.encode(),
        ):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.digest()

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
        cubin = content[_HEADER.size :]
        if content[: _HEADER.size] == _header(key, cubin):
            return cubin
        _log.warning("%s is compiled again: it is damaged", path)
        return None

    def _write(self, key: bytes, cubin: bytes) -> None:
        if self.folder is None or not self._writable:
            return
        try:
            write_aside(self.folder / _name(key), _header(key, cubin) + cubin)
        except OSError as error:
            self._writable = False  # one warning, not one a kernel
            _log.warning("compiled kernels are not kept in %s: %s", self.folder, error)


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


def _header(key: bytes, cubin: bytes) -> bytes:
    digest = hashlib.blake2b(key + cubin, digest_size=_DIGEST_BYTES).digest()
    return _HEADER.pack(_MAGIC, len(cubin), digest)
