"""Where everything lies in the device memory that a rank shares with its peers: its arena.

::

    broken | hellos | progress | flags | lines of LL, of LL128 | SCRATCH

    (of these both halves) | SCRATCH of copy engines | words of pairs

    | zones of pairs, both halves of each

Every protocol has a region of its own: a word of data that happened to equal the flag of a line
would be taken for one. The halves of a region alternate by epoch and lie at fixed offsets, so that
a small call after a large one cannot overlap it. Calls of copy engines have a region without
halves, for the addresses of a captured copy are fixed: they begin only when all ranks have entered,
and a rank that enters has left its calls before. ``kernels/program.cuh`` knows the first fields.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FLAGS",
    "HELLOS",
    "HELLO_LINES",
    "HELLO_SLOTS",
    "MOST_BLOCKS",
    "REPORT_BYTES",
    "Workspace",
]

MOST_BLOCKS = 160
"""CUDA blocks a rank: one for each multiprocessor of the largest GPUs."""
FLAGS = 64
"""Pairs of blocks that may signal from one rank to another, each with a word for every replica."""

REPORT_BYTES = 32
HELLOS = 64
"""Where the hellos begin, ``u32[HELLO_SLOTS][source rank][HELLO_LINES][4]``."""
HELLO_SLOTS, HELLO_LINES, _LINE = 4, 5, 16  # two of the lines carry a factor
_PROGRESS = 16
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Workspace:
    """Offsets in bytes.

    Args:
        line_half: bytes of one half of LL's lines.
        wide_half: bytes of one half of LL128's lines.
        scratch_half: bytes of one half of SCRATCH.
        replicas: the most CUDA blocks that a block of a program may have.
        copied: bytes of the SCRATCH of calls of copy engines.

    """

    nranks: int
    line_half: int = 4 << 20
    wide_half: int = 10 << 20
    scratch_half: int = 8 << 20
    replicas: int = 64
    copied: int = 12 << 20
    zone_bytes: int = 7 << 20

    @property
    def hello_bytes(self) -> int:
        """What all ranks have said to one, itself included."""
        return HELLO_SLOTS * self.nranks * HELLO_LINES * _LINE

    @property
    def progress(self) -> int:
        """``Progress[MOST_BLOCKS]``, which only its owner touches."""
        return _up(HELLOS + self.hello_bytes)

    @property
    def flags(self) -> int:
        """``u64[source rank][FLAGS][replicas]``."""
        return _up(self.progress + MOST_BLOCKS * _PROGRESS)

    @property
    def lines(self) -> int:
        """The lines of LL."""
        return _up(self.flags + self.nranks * FLAGS * self.replicas * 8)

    @property
    def wide_lines(self) -> int:
        """The lines of LL128."""
        return self.lines + 2 * self.line_half

    @property
    def scratch(self) -> int:
        """SCRATCH of calls whose signals are words of their own."""
        return self.wide_lines + 2 * self.wide_half

    def half_of(self, protocol: str) -> int:
        """Bytes of one half of a protocol's region."""
        halves = {"LL": self.line_half, "LL128": self.wide_half, "Simple": self.scratch_half}
        return halves[protocol]

    @property
    def copies(self) -> int:
        """SCRATCH of calls of copy engines."""
        return self.scratch + 2 * self.scratch_half

    @property
    def zone_half(self) -> int:
        """Bytes of a half of the zone into which one peer sends."""
        return max(1, self.zone_bytes // (2 * self.nranks * _PAGE)) * _PAGE

    def pair(self, peer: int, *, sends: bool) -> int:
        """What a rank keeps for its half of a pair: hellos, flags, and the sequence numbers."""
        return _up(self.copies + self.copied) + (2 * peer + sends) * self._pair_bytes

    @property
    def pair_flags(self) -> int:
        """``u64[replicas]``, from where the half begins; its hellos are LL lines before."""
        return HELLO_SLOTS * _LINE

    @property
    def pair_sequence(self) -> int:
        """``u64[replicas]``, from where the half begins: the last call that each block ended."""
        return self.pair_flags + self.replicas * 8

    @property
    def _pair_bytes(self) -> int:
        return self.pair_sequence + self.replicas * 8

    def zone(self, sender: int) -> int:
        """Into which ``sender`` sends; two halves by the parity of the pair's calls."""
        return _up(self.pair(self.nranks, sends=False)) + 2 * sender * self.zone_half

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.zone(self.nranks)


def _up(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
