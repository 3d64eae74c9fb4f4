"""Compiled kernels that come with the package: written when a wheel is built, only read afterwards.

For each architecture there is a manifest, ``sm_90.json``, and an archive, ``sm_90.xz``: blocks of
about 1 MiB of cubins, each block compressed alone. Neighbours resemble each other: an archive takes
a twentieth of its cubins. The manifest names each cubin by the digest of all that it was made
from, so that changed sources never find an outdated one, and holds the digest of its bytes. Git
does not hold these files; a checkout works without them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ringcoll import log
from ringcoll.bounded import evict
from ringcoll.folders import write_aside

FOLDER = Path(__file__).parents[2] / "compiled"
"""Where a wheel has them."""

_FORMAT = 1
_BLOCK = 1 << 20
_KEPT = 4  # blocks in memory
_LARGEST = 64 << 20  # bytes of a manifest, of a block, of a cubin, or to decompress one
_DAMAGE = (OSError, ValueError, MemoryError, RecursionError)  # of a file that is not used
_INTEGRATED = ((7, 2), (8, 7), (10, 1), (11, 0))  # compatible with themselves alone

_log = log.logger()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an archive holds."""

    arch: str
    version: str  # of ringcoll
    nvrtc: tuple[int, int]
    blocks: tuple[tuple[int, int, int], ...]  # first byte, bytes in the archive, bytes of cubins
    kernels: Mapping[str, tuple[int, int, int, str]]  # by key: block, first byte, bytes, digest

    @property
    def nbytes(self) -> int:
        """Bytes of the cubins."""
        return sum(size for _, _, size in self.blocks)

    @property
    def packed(self) -> int:
        """Bytes of the archive."""
        return sum(length for _, length, _ in self.blocks)


class ShippedKernels:
    """The archives of a folder; threads may share them.

    ``cuda``: the major version of CUDA that the driver serves; cubins of a later one are not used.
    """

    def __init__(self, folder: Path | None = None, cuda: int | None = None) -> None:
        self.folder = folder or FOLDER
        self._cuda = cuda
        self._lock = Lock()
        self._manifests: dict[str, Manifest | None] = {}
        self._blocks: dict[tuple[str, int], bytes] = {}  # the last ones read

    def arch_for(self, arch: str) -> str:
        """The shipped architecture whose cubins a GPU runs; its own where there is none.

        A cubin runs on later minor versions of its major version.
        """
        found = re.fullmatch(r"sm_(\d+)(\d)", arch)
        if found is None or self._manifest(arch) is not None:
            return arch
        major, minor = int(found[1]), int(found[2])
        if (major, minor) in _INTEGRATED:
            return arch
        lower = (
            f"sm_{major}{less}"
            for less in range(minor - 1, -1, -1)
            if (major, less) not in _INTEGRATED
        )
        return next((name for name in lower if self._manifest(name) is not None), arch)

    def has(self, key: bytes, arch: str) -> bool:
        """Whether there is a kernel, which :meth:`get` may still refuse."""
        manifest = self._manifest(arch)
        return manifest is not None and key.hex() in manifest.kernels

    def get(self, key: bytes, arch: str) -> bytes | None:
        """A cubin, checked; None where it is not shipped, or damaged."""
        manifest = self._manifest(arch)
        if manifest is None or key.hex() not in manifest.kernels:
            return None
        number, first, length, digest = manifest.kernels[key.hex()]
        try:
            cubin = self._read(manifest, number)[first : first + length]
            if len(cubin) != length or _digest(cubin) != digest:
                raise ValueError("the digest of a kernel differs from the manifest's")
        except _DAMAGE as error:
            with self._lock:
                self._manifests[arch] = None  # one warning, not one a kernel
            path = self.folder / f"{arch}.xz"
            _log.warning("%s is not used, its kernels are compiled: %s", path, error)
            return None
        return cubin

    def forked(self) -> None:
        """Forget, in a fork, the lock that a thread of the parent may hold."""
        self._lock = Lock()

    def manifests(self) -> Iterator[Manifest]:
        """What is shipped, by architecture."""
        if self.folder.is_dir():
            names = [path.stem for path in self.folder.glob("sm_*.json")]
            for arch in sorted(names, key=lambda name: (len(name), name)):
                manifest = self._manifest(arch)
                if manifest is not None:
                    yield manifest

    def _manifest(self, arch: str) -> Manifest | None:
        with self._lock:
            if arch not in self._manifests:
                self._manifests[arch] = self._opened(arch)
            return self._manifests[arch]

    def _opened(self, arch: str) -> Manifest | None:
        path = self.folder / f"{arch}.json"
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError("it is too large")
            manifest = parsed(path.read_bytes(), arch)
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            _log.warning("%s is not used, its kernels are compiled: %s", path, error)
            return None
        if self._cuda is not None and manifest.nvrtc[0] > self._cuda:
            text = "compiled kernels of CUDA %d are not used: the driver serves CUDA %d"
            _log.info(text, manifest.nvrtc[0], self._cuda)
            return None
        return manifest

    def _read(self, manifest: Manifest, number: int) -> bytes:
        """A block: kernels that are needed one after the other are mostly in the same ones."""
        with self._lock:
            found = self._blocks.get((manifest.arch, number))
        if found is not None:
            return found
        first, length, size = manifest.blocks[number]
        with (self.folder / f"{manifest.arch}.xz").open("rb") as file:
            file.seek(first)
            packed = file.read(length)
        block = _unpacked(packed, size)
        with self._lock:
            evict(self._blocks, _KEPT)
            self._blocks[manifest.arch, number] = block
        return block


def write_archive(
    folder: Path,
    arch: str,
    kernels: Sequence[tuple[bytes, bytes]],
    *,
    version: str,
    nvrtc: tuple[int, int],
) -> Manifest:
    """Write the archive and the manifest of an architecture; ``kernels``: keys and cubins."""
    import lzma

    blocks: list[tuple[int, int, int]] = []
    index: dict[str, tuple[int, int, int, str]] = {}
    archive, block = bytearray(), bytearray()
    # A window larger than a block would only cost the reader time.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2 * _BLOCK}]

    def end() -> None:
        packed = lzma.compress(bytes(block), filters=filters)
        blocks.append((len(archive), len(packed), len(block)))
        archive.extend(packed)
        block.clear()

    for key, cubin in kernels:
        index[key.hex()] = len(blocks), len(block), len(cubin), _digest(cubin)
        block += cubin
        if len(block) >= _BLOCK:
            end()
    if block:
        end()
    manifest = Manifest(arch, version, nvrtc, tuple(blocks), index)
    content = {
        "format": _FORMAT,
        "arch": arch,
        "version": version,
        "nvrtc": nvrtc,
        "blocks": blocks,
        "kernels": index,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_aside(folder / f"{arch}.xz", bytes(archive))
    write_aside(folder / f"{arch}.json", json.dumps(content, separators=(",", ":")).encode())
    for name in (f"{arch}.xz", f"{arch}.json"):
        (folder / name).chmod(0o644)  # other users may use what this one installs
    return manifest


def parsed(content: bytes, arch: str) -> Manifest:
    """A manifest as :func:`write_archive` writes it.

    Raises:
        ValueError: it is anything else.

    """
    found = json.loads(content)
    names = {"format", "arch", "version", "nvrtc", "blocks", "kernels"}
    if not isinstance(found, dict) or set(found) != names or found["format"] != _FORMAT:
        raise ValueError(f"it is no manifest of format {_FORMAT}")
    if found["arch"] != arch or not isinstance(found["version"], str):
        raise ValueError("it is of another architecture")
    if not isinstance(found["blocks"], list) or not isinstance(found["kernels"], dict):
        raise ValueError("blocks or kernels are missing")
    blocks = tuple(_three(block) for block in found["blocks"])
    kernels: dict[str, tuple[int, int, int, str]] = {}
    for key, place in found["kernels"].items():
        if not isinstance(place, list) or len(place) != 4 or not isinstance(place[3], str):
            raise ValueError("the place of a kernel has four parts")
        number, first, length = _three(place[:3])
        if number >= len(blocks) or first + length > blocks[number][2]:
            raise ValueError("a kernel lies outside of its block")
        kernels[key] = number, first, length, place[3]
    if not isinstance(found["nvrtc"], list):
        raise ValueError("the version of NVRTC is missing")
    major, minor, _ = _three([*found["nvrtc"], 0])
    return Manifest(arch, found["version"], (major, minor), blocks, kernels)


def _three(values: Any) -> tuple[int, int, int]:
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError("three integers belong together")
    if any(type(value) is not int or not 0 <= value <= _LARGEST for value in values):
        raise ValueError(f"an integer is not between 0 and {_LARGEST}")
    first, second, third = values
    return first, second, third


def _unpacked(packed: bytes, size: int) -> bytes:
    try:
        import lzma
    except ImportError as error:
        raise ValueError("this Python was built without lzma") from error
    try:
        # A damaged header may ask for a dictionary of 4 GiB.
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LARGEST)
        block = decompressor.decompress(packed, max_length=size + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(str(error)) from error
    if len(block) != size:
        raise ValueError(f"a block has {len(block)} bytes instead of {size}")
    return block


def _digest(cubin: bytes) -> str:
    return hashlib.blake2b(cubin, digest_size=32).hexdigest()
