"""The parameter of a launch, byte for byte as ``kernels/program.cuh`` declares it."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.encode import Program
from ringcoll.errors import LaunchRefused

_HEAD = struct.Struct("<QQQIIII")
_LOCAL = struct.Struct("<QQQ")
_BUFFERS = struct.Struct("<QQQ16sQQIIII")  # the number of the call in the last word

TIMEOUT_WORD, PACKS_WORD, SIGNATURE_WORD, REPLICAS_WORD = 0, 1, 3, 4
"""Words of the head; signature and replicas are the low halves of theirs."""

HIGH_HALF = (1 << 64) - (1 << 32)
"""Of a word."""

GIVEN = 4
"""Addresses that a launch is given for each rank: INPUT, OUTPUT, and both as peers reach them."""

LARGEST = 32_764
"""Bytes of kernel parameters, from CUDA 12.1 and sm_70 on."""


class GivenAddress(int):
    """One of the addresses that a launch is given, or a place at an offset from it.

    A prepared call serves every array of its shape; :func:`address_words` finds these words.
    """

    number: int = 0  # below GIVEN; of sends and receives, below their number
    offset: int = 0

    def __add__(self, distance: int) -> GivenAddress:
        made = GivenAddress(int(self) + distance)
        made.number, made.offset = self.number, self.offset + distance
        return made


def given_address(value: int, number: int, offset: int = 0) -> GivenAddress:
    """An address that a launch is given as its ``number``, or that lies ``offset`` behind it."""
    made = GivenAddress(value)
    made.number, made.offset = number, offset
    return made


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses, on its own GPU, that a rank's kernel needs; 0 or empty where it needs none."""

    rank: int
    workspaces: tuple[int, ...]
    report: int
    mappings: int = 0  # table of the blocks of symmetric memory
    hello: tuple[int, int] = (0, 0)  # INPUT, OUTPUT: mapping << 48 | offset
    user: tuple[int, int] = (0, 0)  # INPUT, OUTPUT
    factor: bytes = b""  # in the accumulator's type
    peer_buffers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # for copy engines
    trace: int = 0  # its record of executed rows
    launch: int = 0  # the number under which the host keeps this rank's call, 32 bits
    scratch: tuple[int, ...] = ()  # of large calls, of each rank; (): in the workspaces

    def on(self, launch: int) -> Addresses:
        """The same for a call of another number, in a third of the time of ``replace``."""
        return Addresses(
            self.rank,
            self.workspaces,
            self.report,
            self.mappings,
            self.hello,
            self.user,
            self.factor,
            self.peer_buffers,
            self.trace,
            launch,
            self.scratch,
        )


@dataclass(frozen=True, slots=True)
class GenericForm:
    """What a generic kernel needs beside the words of one rank: see :mod:`.generic`."""

    lanes: int  # threads of a line; 0: protocol Simple
    elements: int  # see ``elements_word``
    shapes: tuple[int, ...]  # the end of its words


@dataclass(frozen=True, slots=True)
class Body:
    """Source text, and words for each rank that one launch carries."""

    text: str
    words: tuple[tuple[int, ...], ...]
    programs: tuple[int, ...]
    packs: int
    half: int  # bytes between the halves of the protocol's SCRATCH
    compared: tuple[int, ...] = ()  # for each rank, whose hellos it compares at the end: bits
    generic: GenericForm | None = None
    whole: bool = True  # LL: chunks in the user's memory are of whole 8-byte words


@dataclass(frozen=True, slots=True)
class Header:
    """The parameters that do not depend on the program."""

    timeout: float  # seconds that a wait may take
    signature: int  # of the call, 32 bits
    total: bool
    mapped: bool  # steps access peers' INPUT or OUTPUT: all hellos are read first
    replicas: int  # CUDA blocks for each block of the program


def factor_bytes(op: ReduceOp | None, dtype: DType) -> bytes:
    """The bytes of this rank's factor; empty where the operator has none."""
    return op.factor(dtype).tobytes() if op is not None and op.scales else b""


def padded(words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Words padded to one length, a multiple of 16, so that fewer texts differ."""
    length = -(-max(1, *map(len, words)) // 16) * 16
    return tuple((*row, *(0,) * (length - len(row))) for row in words)


def compared_ranks(program: Program, local: Sequence[Addresses]) -> tuple[int, ...]:
    """For each rank those that have entered when it ends, without itself: bit p % 32 of rank p."""
    found = []
    for at in local:
        rest, bits = program.heard[at.rank] & ~(1 << at.rank), 0
        while rest:
            rest, bits = rest >> 32, bits | rest & 0xFFFFFFFF
        found.append(bits)
    return tuple(found)


def nanoseconds(timeout: float) -> int:
    """A timeout in seconds as kernels take it."""
    return 1 << 62 if timeout > 1e9 else int(timeout * 1e9)


def launch_bytes(nranks: int, words: int, local: int) -> int:
    """Bytes that a launch carries."""
    return _HEAD.size + local * (_LOCAL.size + _BUFFERS.size + 8 * (nranks + words))


def pack(body: Body, header: Header, progress: int, local: Sequence[Addresses]) -> bytes:
    """``Args`` of ``kernels/program.cuh``, at most LARGEST bytes, of ranks as in ``words``."""
    parts = [
        _HEAD.pack(
            nanoseconds(header.timeout),
            body.packs,
            body.half,
            header.signature,
            header.total,
            header.replicas,
            header.mapped,
        )
    ]
    compared = body.compared or (0,) * len(local)
    for at, words, program, bits in zip(local, body.words, body.programs, compared, strict=True):
        parts += [
            _LOCAL.pack(at.workspaces[at.rank] + progress, at.report, at.workspaces[at.rank]),
            struct.pack(f"<{len(at.workspaces)}Q", *at.workspaces),
            _BUFFERS.pack(
                at.mappings, *at.hello, at.factor, *at.user, at.rank, program, at.launch, bits
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


def program_word(at: Addresses) -> int:
    """The first word of the program of a launch's only rank."""
    return (_HEAD.size + _LOCAL.size + _BUFFERS.size) // 8 + len(at.workspaces)


def number_word(at: Addresses) -> int:
    """The word whose low half is the number of the call of a launch's only rank."""
    return program_word(at) - 1


AddressWords = tuple[tuple[tuple[int, int], ...], ...]
"""Of each address that a launch is given: the words that hold it, and what each adds to it."""


def address_words(body: Body, local: Sequence[Addresses], given: int = GIVEN) -> AddressWords:
    """Where the bytes of :func:`pack` hold the addresses that a launch is given for each rank."""
    found: list[tuple[tuple[int, int], ...]] = []
    first = _HEAD.size // 8
    for at, own in zip(local, body.words, strict=True):
        first += _LOCAL.size // 8 + len(at.workspaces)
        words = (at.mappings, *at.hello, 0, 0, *at.user, 0, 0, *own)
        found += given_words(words, first, given)
        first += len(words)
    return tuple(found)


def given_words(words: Sequence[int], first: int, given: int) -> AddressWords:
    """Which words of one rank, the first of them number ``first``, hold which given address."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(given)]
    for at, word in enumerate(words, first):
        if isinstance(word, GivenAddress):
            found[word.number].append((at, word.offset))
    return tuple(map(tuple, found))


def fixed_words(held: AddressWords, at: Addresses) -> tuple[tuple[int, int, int], ...]:
    """Word, number and offset of the addresses in front of the program of a launch's only rank."""
    first = program_word(at)
    return tuple(
        (word, number, offset)
        for number, words in enumerate(held)
        for word, offset in words
        if word < first
    )


class Parameter:
    """The bytes of ``Args`` in memory of their own, with the addresses of the last launch."""

    __slots__ = ("address", "address_words", "filled", "flat", "words")

    def __init__(self, packed: bytes | array[int], address_words: AddressWords = ()) -> None:
        self.words = packed if isinstance(packed, array) else array("Q", packed)
        self.address, _ = self.words.buffer_info()
        self.address_words = address_words
        self.flat = tuple(
            (word, number, offset)
            for number, held in enumerate(address_words)
            for word, offset in held
        )
        self.filled: tuple[int, ...] = ()
        """The addresses of the last launch; (): they are not known."""

    def fill(self, addresses: tuple[int, ...]) -> None:
        """Write the addresses of a launch; those of a launch before are in no kernel's memory."""
        words = self.words
        for word, number, offset in self.flat:
            words[word] = addresses[number] + offset
        self.filled = addresses
