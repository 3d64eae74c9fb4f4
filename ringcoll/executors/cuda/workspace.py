"""The layout of a rank's workspace: the device memory that its peers map and write.

::

    broken | hellos | progress | flags | lines of LL, of LL128 | SCRATCH

    | SCRATCH of copy engines | words of pairs | zones of pairs

Lines of LL, lines of LL128, SCRATCH and each zone have two halves.

Every protocol has a region of its own: data of another protocol could equal a line's flag. The
halves of a region alternate by epoch and lie at fixed offsets, so that a small call after a large
one cannot overlap it. Calls of copy engines have a region without halves, because the addresses of
a captured copy are fixed: they begin only when all ranks have entered, so all earlier calls have
ended. Programs for which that holds as well, and whose ranks all end together, have both halves of
SCRATCH as one (``takes_both_halves``). ``kernels/program.cuh`` holds the first offsets.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

MOST_BLOCKS = 160
"""CUDA blocks a rank: one for each multiprocessor of the largest GPUs."""
FLAGS = 64
"""Pairs of blocks that may signal from one rank to another, each with a flag for every replica."""

LARGE_SCRATCH_BYTES = 256 << 20
"""SCRATCH of large calls, which has memory of its own: see :mod:`.large_scratch`."""

_REPORT_BYTES = 32
HELLOS = 64
"""Where the hellos begin, ``u32[HELLO_SLOTS][source rank][HELLO_STRIDE][4]``."""
HELLO_SLOTS, HELLO_LINES, FACTOR_LINES, _LINE = 4, 3, 2, 16
HELLO_STRIDE = HELLO_LINES + FACTOR_LINES
"""Lines from one rank's hello to the next: room for a factor, whatever the operator."""
_PROGRESS = 16
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Workspace:
    """Offsets in bytes."""

    nranks: int
    _: KW_ONLY
    line_half: int = 4 << 20  # one half of LL's lines
    wide_half: int = 205 << 16  # one half of LL128's lines: all_reduce of 8 MiB on 4 ranks
    scratch_half: int = 8 << 20  # one half of SCRATCH
    replicas: int = 128  # the most CUDA blocks that a block of a program may have
    pair_replicas: int = 64  # the most that a message may have
    copied: int = 11 << 20  # the SCRATCH of calls of copy engines
    zone_bytes: int = 7 << 20

    @property
    def report_bytes(self) -> int:
        """Bytes of a report, with a word for each rank that has left."""
        return -(-(_REPORT_BYTES + 4 * self.nranks) // 8) * 8

    @property
    def hello_bytes(self) -> int:
        """Bytes of the hellos that one rank receives from all ranks."""
        return HELLO_SLOTS * self.nranks * HELLO_STRIDE * _LINE

    @property
    def progress(self) -> int:
        """``Progress[MOST_BLOCKS]``, private to the rank."""
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
        """SCRATCH of protocol Simple."""
        return self.wide_lines + 2 * self.wide_half

    def region(self, protocol: str) -> tuple[int, int]:
        """Where a protocol's region begins, and the bytes of each of its halves."""
        regions = {
            "LL": (self.lines, self.line_half),
            "LL128": (self.wide_lines, self.wide_half),
            "Simple": (self.scratch, self.scratch_half),
        }
        return regions[protocol]

    @property
    def copies(self) -> int:
        """SCRATCH of copy engines."""
        return self.scratch + 2 * self.scratch_half

    @property
    def staged_bytes(self) -> int:
        """The part of SCRATCH of copy engines for large messages of one rank that are staged.

        0 for more than two ranks: a third may still be copying from there to its own memory what
        the receiver's last call of copy engines has left.
        """
        return self.copied // 2 // _PAGE * _PAGE if self.nranks == 2 else 0

    def staged(self, sender: int) -> int:
        """Where large messages of ``sender`` are staged."""
        return self.copies + sender * self.staged_bytes

    @property
    def zone_half(self) -> int:
        """Bytes of a half of the landing zone of one peer."""
        return max(1, self.zone_bytes // (2 * self.nranks * _PAGE)) * _PAGE

    def pair(self, peer: int, *, sends: bool) -> int:
        """Hellos, flags and sequence numbers of a rank's half of a pair."""
        return _up(self.copies + self.copied) + (2 * peer + sends) * self._pair_bytes

    @property
    def pair_flags(self) -> int:
        """``u64[pair_replicas]``, relative to the half, behind its hellos of two LL lines each."""
        return 2 * HELLO_SLOTS * _LINE

    @property
    def pair_sequence(self) -> int:
        """``u64[pair_replicas]``, relative to the half: the last call that each block has ended."""
        return self.pair_flags + self.pair_replicas * 8

    @property
    def _pair_bytes(self) -> int:
        return self.pair_sequence + self.pair_replicas * 8

    def zone(self, sender: int) -> int:
        """The landing zone of ``sender``; two halves by the parity of the pair's calls."""
        return _up(self.pair(self.nranks, sends=False)) + 2 * sender * self.zone_half

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.zone(self.nranks)


def _up(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
