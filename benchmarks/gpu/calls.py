"""Where things lie in an arena, what a kernel is told, and which grids are tried: no GPU needed."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ARENA",
    "INPUT",
    "MAX_BYTES",
    "OUTPUT",
    "Point",
    "defines",
    "failure",
    "pack_call",
    "parameters",
    "points",
    "source",
]

LINE = 16
PACK = 8
MAX_RANKS = 8
MAX_BLOCKS = 128
MAX_BYTES = 1 << 20
WATCH = 32
"""Threads of the watch warp, beside the workers of a block."""

EPOCHS = 0
CLAIM = 1024
HELLOS = 4096
SCRATCH = 1 << 16
STAGE = 4 << 20
HALF = 2 * STAGE
INPUT = SCRATCH + 2 * HALF
OUTPUT = INPUT + MAX_BYTES
ARENA = OUTPUT + MAX_BYTES

HOST_WORDS = 8
"""32-bit words of the host's record: abort, reason, rank, epoch, phase, block, thread, missing."""

REASONS = {1: "deadline expired", 2: "aborted", 3: "the ranks called different things"}
PHASES = ("data of one_shot", "data to reduce", "reduced data", "hello")
SIZES = {
    "one_shot": (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10),
    "two_shot": (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20),
}
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel at one size in one grid.

    Attributes:
        algorithm: ``one_shot`` or ``two_shot``.
        dtype: ``bfloat16`` or ``float32``.
        nbytes: bytes that each rank contributes.
        blocks: blocks of each rank.
        workers: threads of a block that move data; one warp more watches.

    """

    algorithm: str
    dtype: str
    nbytes: int
    blocks: int
    workers: int

    def __post_init__(self) -> None:
        if self.nbytes % PACK or not 0 < self.nbytes <= MAX_BYTES:
            raise ValueError(f"{self.nbytes} bytes: must be a multiple of {PACK} up to {MAX_BYTES}")
        if not 1 <= self.blocks <= MAX_BLOCKS:
            raise ValueError(f"{self.blocks} blocks: must be 1 to {MAX_BLOCKS}")

    @property
    def kernel(self) -> str:
        """The entry's name in ``yardstick.cu``."""
        return f"{self.algorithm}_{self.dtype}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.workers + WATCH

    @property
    def signature(self) -> int:
        """What all ranks must have in common, as 32 bits."""
        return zlib.crc32(repr((self.algorithm, self.dtype, self.nbytes, self.blocks)).encode())


def source(name: str) -> str:
    """The text of a ``.cu`` file of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def defines(nranks: int) -> tuple[str, ...]:
    """The compiler's options that tell ``yardstick.cu`` the layout."""
    if not 2 <= nranks <= MAX_RANKS:
        raise ValueError(f"{nranks} ranks: must be 2 to {MAX_RANKS}")
    macros = {
        "NRANKS": nranks,
        "MAX_BLOCKS": MAX_BLOCKS,
        "MAX_THREADS": 512 + WATCH,
        "EPOCHS": EPOCHS,
        "CLAIM": CLAIM,
        "HELLOS": HELLOS,
        "SCRATCH": SCRATCH,
        "HALF": HALF,
        "STAGE": STAGE,
    }
    return tuple(f"-D{name}={value}" for name, value in macros.items())


def items(algorithm: str, nbytes: int, nranks: int) -> int:
    """How many elements the threads share: packs, or packs of one chunk.

    Raises:
        ValueError: the lines do not fit one stage of the scratch.

    """
    packs = nbytes // PACK
    count = packs if algorithm == "one_shot" else -(-packs // nranks)
    if nranks * count * LINE > STAGE:
        raise ValueError(
            f"{algorithm} of {nbytes} bytes on {nranks} ranks does not fit the scratch"
        )
    return count


def points(nranks: int, *, most_blocks: int = MAX_BLOCKS) -> Iterator[Point]:
    """All kernels, sizes and grids worth timing.

    Args:
        nranks: ranks that take part.
        most_blocks: blocks of a rank that are sure to be resident together.

    """
    for dtype in DTYPES:
        for algorithm, sizes in SIZES.items():
            for nbytes in sizes:
                count = items(algorithm, nbytes, nranks)
                grids = set()
                for workers, most in ((128, 64), (256, 64), (512, 32), (512, 128)):
                    width = min(workers, -(-count // WATCH) * WATCH)
                    blocks = min(-(-count // width), most, most_blocks)
                    grids.add((blocks, width))
                for blocks, width in sorted(grids):
                    yield Point(algorithm, dtype, nbytes, blocks, width)


def pack_call(
    point: Point,
    rank: int,
    arenas: Sequence[int],
    host: int,
    *,
    deadline_ns: int,
    launch: int,
) -> bytes:
    """The struct ``Call`` of one rank.

    Args:
        point: what is called.
        rank: whose call.
        arenas: addresses of all ranks' arenas as this rank's device sees them.
        host: address of the host's record.
        deadline_ns: how long a wait may last.
        launch: a number that the hello carries along.

    """
    nranks = len(arenas)
    peers = [arenas[(rank + 1 + k) % nranks] for k in range(nranks - 1)]
    peers += [0] * (MAX_RANKS - 1 - len(peers))
    packs = point.nbytes // PACK
    own = arenas[rank]
    return struct.pack(
        "=7Q5Q6I",
        *peers,
        own,
        own + INPUT,
        own + OUTPUT,
        host,
        deadline_ns,
        rank,
        packs,
        -(-packs // nranks),
        point.signature,
        launch,
        0,
    )


def parameters(*values: bytes) -> tuple[int, tuple[object, ...]]:
    """An array of pointers as cuLaunchKernel takes it.

    Args:
        values: each parameter's bytes.

    Returns:
        Its address, and what must be kept while it is used.

    """
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    pointers = (ctypes.c_void_p * max(1, len(buffers)))(*map(ctypes.addressof, buffers))
    return ctypes.addressof(pointers), (pointers, *buffers)


def failure(words: Sequence[int]) -> str | None:
    """What the host's record says, or None if nothing failed."""
    _, reason, rank, epoch, phase, block, thread, missing = words
    if not reason:
        return None
    absent = [peer for peer in range(MAX_RANKS) if missing >> peer & 1]
    return (
        f"{REASONS.get(reason, reason)}: rank {rank}, call {epoch}, block {block}, "
        f"thread {thread}, waiting for {PHASES[phase]} from ranks {absent}"
    )
