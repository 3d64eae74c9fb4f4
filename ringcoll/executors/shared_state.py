"""The shared memory of a communicator's ranks on one host: entered epochs, hellos, flags, SCRATCH.

Every rank owns one segment. All words are 8 bytes, aligned, with one writer:

* *entered*: the newest epoch that the rank has entered. It only grows: "entered >= base".
* *hello*: signature, number of the record that explains it, the user's buffers (mapping << 48 |
  offset), in place or not and the count where the record leaves it open, premul_sum's factor. Four
  slots by epoch & 3: a rank in call x still compares the hellos of x - 1, and a peer can be in
  x + 1.
* *flags*: for each other rank the counts that it posts here, (epoch << 32 | count), never reset.
* *pairs*: the same for point-to-point, one set for each context, peer and direction. Messages are
  one context, the v-variants made of sends and receives another: neither waits for the other.
* *records*: text by which an error shows both sides.
* *ports*: when a paced port or link is free again, and the two words of a lock.

Then SCRATCH: two halves for collectives by epoch & 1, and for each context two landing zones for
each peer.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ringcoll.fabric import Fabric
from ringcoll.host.pages import advise, discard

Words: TypeAlias = "memoryview[int]"
"""Words of 8 bytes: a memoryview of format "Q"."""

Times: TypeAlias = "memoryview[float]"
"""The same words as seconds, format "d"."""

HELLO_WORDS = 8
HUGE_SCRATCH = 256 << 10
"""Bytes of SCRATCH that a call needs before it is on huge pages, where ranks are threads."""

FLAGS = 64
"""Flag words for each ordered pair of ranks: one for each pair of blocks that signals."""

CONTEXTS = MESSAGES, VECTOR = 0, 1
"""Of point-to-point: messages, and the v-variants of sends and receives."""

ANY_COUNT = "count=*"
"""What the record of a call has where its count, which its hello has, would be."""

_PAIR_FLAGS = 8
RECORDS = 256
"""Calls whose text a rank keeps, for error messages: more than a communicator caches."""
_RECORD_BYTES = 512
_PAGE = 4096
_SCALAR = struct.Struct("dd")
_HEAD = struct.Struct("Q")


def digest(text: str) -> int:
    """64 bits by which ranks compare what they call; not 0.

    Two checksums of zlib's, one from each end: hashlib would load OpenSSL into every rank.
    """
    data = text.encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1]) or 1


@dataclass(slots=True)
class Hello:
    """What a rank publishes when it enters a call; see the module's docstring.

    Only a prepared call that takes another count writes to its own.
    """

    signature: int
    record: int
    send: int = 0
    recv: int = 0
    in_place: bool = False
    scalar: complex | None = None
    count: int = 0  # 0: the record has it


class SharedState:
    """The segments of all ranks, each with ``scratch`` bytes of SCRATCH; collective."""

    def __init__(self, fabric: Fabric, scratch: int) -> None:
        n = fabric.nranks
        self.fabric, self.rank, self.nranks = fabric, fabric.rank, n
        self.entered = 0
        self.numbers = itertools.count(1)
        self.record_numbers = [0] * RECORDS
        """The number of the text that this rank keeps in each slot, number % RECORDS."""
        self.hellos = 8
        self.signatures = tuple(self.hellos + slot * HELLO_WORDS for slot in range(4))
        """Where a rank's words hold the hello of each epoch & 3, which begins with a signature."""
        self.flags = self.hellos + 4 * HELLO_WORDS
        self.pairs = self.flags + n * FLAGS
        # A peer's pair words: two directions, each with an entered word, four hellos and flags.
        self.pair_words = 8 + 4 * HELLO_WORDS + _PAIR_FLAGS
        self.ports = self.pairs + len(CONTEXTS) * n * 2 * self.pair_words
        words = self.ports + n + 2
        self.records = -(-words * 8 // 64) * 64
        self.scratch = -(-(self.records + RECORDS * _RECORD_BYTES) // _PAGE) * _PAGE
        # An eighth of SCRATCH is for each context: a landing zone and its twin for each peer.
        self.zone_bytes = scratch // 8 // (2 * n) // 64 * 64
        zones = len(CONTEXTS) * 2 * n * self.zone_bytes
        self.half_bytes = (scratch - zones) // 2 // _PAGE * _PAGE
        self.zones = self.scratch + 2 * self.half_bytes
        total = self.zones + zones
        views = fabric.share(total, what="the shared state of a communicator")
        self._own = views[self.rank]
        self._huge = False
        self.bound: list[Callable[[], None]] = []
        """What drops views of this memory when it is released."""
        advise(self._own, huge=False)
        # Ranks of other nodes share no memory: this rank keeps a copy of their words.
        views = [view if len(view) else memoryview(bytearray(self.scratch)) for view in views]
        self.words: list[Words] = [view[: self.records].cast("Q") for view in views]
        self.bytes: list[npt.NDArray[Any]] = [np.frombuffer(view, np.uint8) for view in views]
        self.times: list[Times] = [view[: self.records].cast("d") for view in views]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part; pages that no call has used take no memory."""
        return self._own.nbytes

    def need(self, nbytes: int) -> None:
        """Let this rank's SCRATCH be on huge pages once a call needs so much of it."""
        if nbytes > HUGE_SCRATCH and not self._huge:
            self._huge = True
            advise(self._own, huge=True)

    def discard(self) -> None:
        """Give back the pages of this rank's halves of SCRATCH; no call may be running.

        Those of processes stay reserved, so that no call can find memory short.
        """
        discard(self._own[self.scratch : self.zones])
        self._huge = False
        advise(self._own, huge=False)

    # -- the call's hello ------------------------------------------------------------------

    def enter(self, epoch: int, hello: Hello, pair: int = 0) -> None:
        """Publish that this rank has entered ``epoch``: the hello first, the entered word last.

        ``pair`` is the index of one direction of a pair; 0: a collective, whose words come first.
        """
        words, at = self.words[self.rank], pair + self.signatures[epoch & 3]
        words[at] = hello.signature
        words[at + 1] = hello.record
        words[at + 2] = hello.send
        words[at + 3] = hello.recv
        words[at + 4] = hello.count << 1 | hello.in_place
        scalar = hello.scalar
        if scalar is not None:
            words[at + 7] = isinstance(scalar, int)
            if isinstance(scalar, int):
                words[at + 5] = scalar % (1 << 64)
            else:
                parts = _SCALAR.pack(scalar.real, scalar.imag)
                words[at + 5], words[at + 6] = struct.unpack("QQ", parts)
        words[pair + self.entered] = epoch << 32

    def hello(self, rank: int, epoch: int, pair: int = 0) -> Hello:
        """The hello of ``rank`` at ``epoch``, which it must have entered."""
        words, at = self.words[rank], pair + self.signatures[epoch & 3]
        scalar: complex = words[at + 5]
        if not words[at + 7]:
            scalar = complex(*_SCALAR.unpack(struct.pack("QQ", words[at + 5], words[at + 6])))
        in_place, count = bool(words[at + 4] & 1), words[at + 4] >> 1
        return Hello(
            words[at], words[at + 1], words[at + 2], words[at + 3], in_place, scalar, count
        )

    def hello_bytes(self, epoch: int, *, scaled: bool) -> list[bytes]:
        """All hellos' buffers, and factors if ``scaled``: 0.3 µs a rank, a Hello takes 2."""
        first = self.signatures[epoch & 3] + 2
        last = first + (6 if scaled else 3)
        return [words[first:last].tobytes() for words in self.words]

    # -- a pair's hello --------------------------------------------------------------------

    def pair(self, peer: int, *, sends: bool, context: int = MESSAGES) -> int:
        """The index of the pair with ``peer`` in a rank's words."""
        return self.pairs + (2 * (context * self.nranks + peer) + int(sends)) * self.pair_words

    def zone(self, sender: int, epoch: int, context: int) -> slice:
        """Where the bytes of a pair's call land in the receiver's memory."""
        number = 2 * (context * self.nranks + sender) + (epoch & 1)
        start = self.zones + number * self.zone_bytes
        return slice(start, start + self.zone_bytes)

    @staticmethod
    def pair_flags(at: int) -> int:
        """The index of the flags that the peer posts to a rank's side of the pair at ``at``."""
        return at + 8 + 4 * HELLO_WORDS

    # -- records ---------------------------------------------------------------------------

    def keeps_record(self, number: int) -> bool:
        """Whether this rank's text ``number`` has not been overwritten by a later one."""
        return self.record_numbers[number % RECORDS] == number

    def record(self, number: int, text: str) -> None:
        """Keep the text of a call where the peers can read it; ``number`` is from ``numbers``."""
        self.record_bytes(number, text.encode())

    def record_bytes(self, number: int, text: bytes) -> None:
        """The same of a text in UTF-8."""
        slot, data = number % RECORDS, text[: _RECORD_BYTES - 8]
        self.record_numbers[slot] = number
        at = self.records + slot * _RECORD_BYTES
        _HEAD.pack_into(self._own, at, number << 16 | len(data))
        self._own[at + 8 : at + 8 + len(data)] = data

    def record_span(self, number: int) -> tuple[int, int]:
        """Offset and bytes, in whole words, of this rank's text ``number``."""
        at = self.records + number % RECORDS * _RECORD_BYTES
        head = int(self.bytes[self.rank][at : at + 8].view(np.uint64)[0])
        return at, 8 + -(-(head & 0xFFFF) // 8) * 8

    def recorded(self, rank: int, number: int) -> str:
        """The text that ``rank`` keeps under ``number``."""
        at = self.records + number % RECORDS * _RECORD_BYTES
        row = self.bytes[rank]
        head = int(row[at : at + 8].view(np.uint64)[0])
        if head >> 16 != number:
            return "a call whose record is gone"
        length = min(head & 0xFFFF, _RECORD_BYTES - 8)
        return row[at + 8 : at + 8 + length].tobytes().decode(errors="replace")

    def shown(self, rank: int, epoch: int) -> str:
        """The text of the call that ``rank`` has entered as its ``epoch``."""
        hello = self.hello(rank, epoch)
        text = self.recorded(rank, hello.record)
        return text.replace(ANY_COUNT, f"count={hello.count}", 1) if hello.count else text

    def close(self) -> None:
        """Release the memory; the fabric unmaps it."""
        for forget in self.bound:
            forget()
        for words in self.words:
            words.release()
        for times in self.times:
            times.release()
        self.words, self.times, self.bytes = [], [], []
        self._own = memoryview(b"")
