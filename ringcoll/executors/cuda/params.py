"""The parameter of a launch, byte for byte as ``kernels/program.cuh`` declares it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.errors import LaunchRefused

__all__ = [
    "LARGEST",
    "Addresses",
    "Body",
    "Header",
    "factor_bytes",
    "launch_bytes",
    "pack",
    "padded",
    "start_of",
]

_HEAD = struct.Struct("<QQQIIII")
_LOCAL = struct.Struct("<QQQ")
_BUFFERS = struct.Struct("<QQQ16sQQIIII")

LARGEST = 32_764
"""Bytes that a launch may carry from CUDA 12.1 and sm_70 on."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a rank finds everything, as device addresses on its own GPU.

    Args:
        mappings: table of the blocks of symmetric memory; 0 where a call reaches none.
        hello: its INPUT and OUTPUT as peers reach them: mapping << 48 | offset, 0 if they cannot.
        user: its own INPUT and OUTPUT; 0 where it has none.
        factor: bytes of what its contributions are multiplied by, in the accumulator's type;
            empty where the operator has none.
        peer_buffers: every rank's INPUT, and OUTPUT, for copy engines; else empty.
        trace: its record of executed rows; 0 where none is kept.
        launch: the number under which the host keeps this rank's call, 32 bits.

    """

    rank: int
    workspaces: tuple[int, ...]
    report: int
    mappings: int = 0
    hello: tuple[int, int] = (0, 0)
    user: tuple[int, int] = (0, 0)
    factor: bytes = b""
    peer_buffers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    trace: int = 0
    launch: int = 0


@dataclass(frozen=True, slots=True)
class Body:
    """What a protocol makes of a program for the ranks that one launch carries.

    Args:
        half: bytes between the halves of the protocol's SCRATCH.

    """

    text: str
    words: tuple[tuple[int, ...], ...]
    programs: tuple[int, ...]
    packs: int
    half: int


@dataclass(frozen=True, slots=True)
class Header:
    """What does not depend on the program.

    Args:
        timeout: seconds that a wait may take.
        signature: of the call, 32 bits.
        mapped: whether peers' INPUT or OUTPUT may be reached: then all hellos are read first.
        replicas: CUDA blocks for each block of the program.

    """

    timeout: float
    signature: int
    total: bool
    mapped: bool
    replicas: int


def factor_bytes(op: ReduceOp | None, dtype: DType) -> bytes:
    """What this rank's contributions are multiplied by; empty where the operator has no factor."""
    return op.factor(dtype).tobytes() if op is not None and op.scales else b""


def start_of(array: npt.NDArray[Any] | None) -> int:
    """Where a view of device memory begins; 0 where there is none, or nothing in it."""
    address: int = 0 if array is None or not array.size else array.__array_interface__["data"][0]
    return address


def padded(words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Words of one length, a multiple of 16, so that fewer texts differ."""
    length = -(-max(1, *map(len, words)) // 16) * 16
    return tuple((*row, *(0,) * (length - len(row))) for row in words)


def launch_bytes(nranks: int, words: int, local: int) -> int:
    """Bytes that a launch carries."""
    return _HEAD.size + local * (_LOCAL.size + _BUFFERS.size + 8 * (nranks + words))


def pack(body: Body, header: Header, progress: int, local: Sequence[Addresses]) -> bytes:
    """``Args`` of ``kernels/program.cuh``.

    Args:
        progress: offset of the ``Progress`` words in an arena.
        local: of the ranks that the launch carries, in the order of ``body.words``.

    Raises:
        LaunchRefused: it is larger than what a launch may carry.

    """
    forever = header.timeout > 1e9
    parts = [
        _HEAD.pack(
            1 << 62 if forever else int(header.timeout * 1e9),
            body.packs,
            body.half,
            header.signature,
            header.total,
            header.replicas,
            header.mapped,
        )
    ]
    for at, words, program in zip(local, body.words, body.programs, strict=True):
        parts += [
            _LOCAL.pack(at.workspaces[at.rank] + progress, at.report, at.workspaces[at.rank]),
            struct.pack(f"<{len(at.workspaces)}Q", *at.workspaces),
            _BUFFERS.pack(
                at.mappings, *at.hello, at.factor, *at.user, at.rank, program, at.launch, 0
            ),
            struct.pack(f"<{len(words)}Q", *words),
        ]
    whole = b"".join(parts)
    if len(whole) > LARGEST:
        raise LaunchRefused(
            f"a launch for {len(local)} ranks of one GPU would carry {len(whole)} bytes, {LARGEST} "
            f"are possible: let fewer ranks share a GPU, or use fewer channels and steps"
        )
    return whole
