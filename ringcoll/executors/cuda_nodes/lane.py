"""A staging lane: pinned memory that a stream and the host use in turns, by counts and two kernels.

The counts only grow: the pieces that the stream has copied to host memory (*posted*), that the host
has processed (*done*) and that the stream has copied back (*taken*); *failed* is the piece whose
wait expired. Each count has one writer. The stream polls from a kernel of one thread; see
``kernels/staging.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.cuda.device import runtime
from ringcoll.cuda.memory import HostMapped, host_mapped
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack, padded
from ringcoll.executors.cuda.source import kernel_text
from ringcoll.executors.cuda_nodes.pieces import StagingCopy
from ringcoll.host.fence import Fence

_POST, _AWAIT = 1, 2
_POSTED, _DONE, _TAKEN, _FAILED = 0, 8, 16, 24
"""The counts, by word, on cache lines of their own: the host writes DONE, the device the others."""
_LINE = 64
_WORDS = 32
_ALL_DONE = (1 << 64) - 1
_FACTOR, _EXTRA_SECONDS = 2.0, 5.0
"""The stream's timeout is the host's, multiplied and extended: the host expires first, with the
better message."""


class StagingLane:
    """Pieces go to host memory and back in order; ``fence`` orders their data before the counts."""

    def __init__(
        self,
        ordinal: int,
        load: Callable[[str], int],
        slots: int,
        nbytes: int,
        fence: Fence | None,
    ) -> None:
        self.slots, self.nbytes, self._fence = slots, nbytes, fence
        self._function = load(staging_text())
        self._launches: dict[float, tuple[Launchable, Launchable]] = {}
        self._memory: HostMapped = host_mapped(
            8 * _WORDS + slots * nbytes + _LINE, ordinal=ordinal, what="staging between nodes"
        )
        self._words: Any = self._memory.host[: 8 * _WORDS].cast("Q")
        self._bytes = np.frombuffer(self._memory.host, np.uint8)
        # Slots begin on whole cache lines, wherever the allocation begins.
        self._first = 8 * _WORDS + -(self._bytes.ctypes.data + 8 * _WORDS) % _LINE
        self.enqueued = 0  # pieces of all calls
        self._given_up = False
        cuda = runtime()
        self._copy: Callable[[int, int, int, int, int], None] = cuda.memcpyAsync
        self._kinds = cuda.memcpyDeviceToHost, cuda.memcpyHostToDevice

    def slot(self, number: int) -> npt.NDArray[np.uint8]:
        """The slot of a piece, by the piece's number in its call."""
        start = self._first + number % self.slots * self.nbytes
        return self._bytes[start : start + self.nbytes]

    # -- the stream's side: the lane's device is the current one -----------------------------------

    def launches(self, timeout: float) -> tuple[Launchable, Launchable]:
        """The launches of the kernels that post and that wait, for a timeout in seconds."""
        found = self._launches.get(timeout)
        if found is None:
            found = self._launches[timeout] = (
                self._launch(_POST, timeout),
                self._launch(_AWAIT, timeout),
            )
        return found

    def _launch(self, what: int, timeout: float) -> Launchable:
        at = self._memory.device
        words = (what, *(at + 8 * word for word in (_POSTED, _DONE, _TAKEN, _FAILED)))
        header = Header(timeout * _FACTOR + _EXTRA_SECONDS, 0, False, False, 1)
        body = Body(staging_text(), padded([words]), (0,), 0, 0)
        parameter = pack(body, header, 0, [Addresses(0, (0,), 0)])
        return Launchable(self._function, 1, 1, 1, parameter)

    def put(
        self, number: int, copies: Sequence[StagingCopy], post: Launchable, stream: int
    ) -> None:
        """Enqueue the copies of a piece to its slot, and post it."""
        slot = self.slot(number).ctypes.data
        for copy in copies:
            self._copy(slot + copy.offset, copy.device, copy.nbytes, self._kinds[0], stream)
        post.launch(stream)

    def take(
        self, number: int, copies: Sequence[StagingCopy], wait: Launchable, stream: int
    ) -> None:
        """Enqueue a wait until the host has processed a piece, and the copies from its slot."""
        wait.launch(stream)
        slot = self.slot(number).ctypes.data
        for copy in copies:
            self._copy(copy.device, slot + copy.offset, copy.nbytes, self._kinds[1], stream)

    # -- the host's side -----------------------------------------------------------------------

    def posted(self, number: int) -> bool:
        """Whether the stream has posted a piece; pieces of all calls are numbered from 0."""
        return bool(self._words[_POSTED] > number)

    def done(self, number: int) -> None:
        """Count a piece as processed: the stream may copy it back."""
        if self._fence is not None:
            self._fence()
        self._words[_DONE] = number + 1
        if self._given_up:  # by another thread, whose word this one may have overwritten
            self._words[_DONE] = _ALL_DONE

    def give_up(self) -> None:
        """End the stream's waits; what it copies back is undefined."""
        self._given_up = True
        if self._memory.host:
            self._words[_DONE] = _ALL_DONE

    @property
    def failed(self) -> int:
        """The piece whose wait has expired, counted from 1; 0: none."""
        return int(self._words[_FAILED]) if self._memory.host else 0

    def close(self) -> None:
        """Free the pinned memory; nothing may be enqueued any more. Idempotent."""
        self._words, self._bytes = memoryview(b""), np.empty(0, np.uint8)
        self._launches.clear()
        self._memory.free()


def staging_text() -> str:
    """The source text of both kernels."""
    constants = {"RANKS": 1, "LOCAL": 1, "WORDS": len(padded([()])[0])}
    return kernel_text("staging", constants, "RC_KERNEL(1)", "staging::run(args);")
