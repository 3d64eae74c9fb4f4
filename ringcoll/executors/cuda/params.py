"""The parameter of a launch, byte for byte as ``kernels/program.cuh`` declares it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.errors import LaunchRefused

_HEAD = struct.Struct("<QQQIIII")
_LOCAL = struct.Struct("<QQQ")
_BUFFERS = struct.Struct("<QQQ16sQQIIII")

LARGEST = 32_764
"""Bytes of kernel parameters, from CUDA 12.1 and sm_70 on."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The device addresses that a rank's kernel needs, on its own GPU.

    Args:
        mappings: table of the blocks of symmetric memory; 0 without mapped buffers.
        hello: its INPUT and OUTPUT in symmetric memory, mapping << 48 | offset; 0 outside of it.
        user: its INPUT and OUTPUT; 0 without.
        factor: bytes of its factor in the accumulator's type; empty without.
        peer_buffers: every rank's INPUT, and OUTPUT, for copy engines; else empty.
        trace: its record of executed rows; 0 without.
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
    """Source text, and words for each rank that one launch carries.

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
    """The parameters that do not depend on the program.

    Args:
        timeout: seconds that a wait may take.
        signature: of the call, 32 bits.
        mapped: whether steps access peers' INPUT or OUTPUT: then all hellos are read first.
        replicas: CUDA blocks for each block of the program.

    """

    timeout: float
    signature: int
    total: bool
    mapped: bool
    replicas: int


def factor_bytes(op: ReduceOp | None, dtype: DType) -> bytes:
    """The bytes of this rank's factor; empty where the operator has none."""
    return op.factor(dtype).tobytes() if op is not None and op.scales else b""


def start_of(array: npt.NDArray[Any] | None) -> int:
    """The address of a view of device memory; 0 of None and of an empty view."""
    address: int = 0 if array is None or not array.size else array.__array_interface__["data"][0]
    return address


def padded(words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Words padded to one length, a multiple of 16, so that fewer texts differ."""
    length = -(-max(1, *map(len, words)) // 16) * 16
    return tuple((*row, *(0,) * (length - len(row))) for row in words)


def launch_bytes(nranks: int, words: int, local: int) -> int:
    """Bytes that a launch carries."""
    return _HEAD.size + local * (_LOCAL.size + _BUFFERS.size + 8 * (nranks + words))


def pack(body: Body, header: Header, progress: int, local: Sequence[Addresses]) -> bytes:
    """``Args`` of ``kernels/program.cuh``.

    Args:
        progress: offset of the ``Progress`` words in a workspace.
        local: of the ranks that the launch carries, in the order of ``body.words``.

    Raises:
        LaunchRefused: it is larger than :data:`LARGEST`.

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
            f"a launch for {len(local)} ranks of one GPU needs {len(whole)} bytes of parameters, "
            f"the limit is {LARGEST}: let fewer ranks share a GPU, or use fewer channels and steps"
        )
    return whole
