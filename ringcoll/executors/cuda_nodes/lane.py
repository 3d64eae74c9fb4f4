"""A staging lane: pinned memory that a stream and the host use in turns, by counts and two kernels.

The counts only grow: the pieces that the stream has *posted* in host memory, that the host has
*done* and that the stream has *taken* back; *failed* is a piece whose wait expired. Each count has
one writer. The stream polls from a kernel of one thread; see ``kernels/staging.cuh``.
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
from ringcoll.executors.cuda_nodes.pieces import Move
from ringcoll.host.fence import Fence

_POST, _AWAIT = 1, 2
_POSTED, _DONE, _TAKEN, _FAILED = 0, 8, 16, 24
"""Words, on cache lines of their own: the host writes one of them, the device the others."""
_LINE = 64
_WORDS = 32
_EVER = (1 << 64) - 1
_PATIENCE = 2.0, 5.0
"""The stream's timeout is so many times the host's, and so many seconds more: the host fails first,
with the better message."""


class Lane:
    """Pieces that go to host memory and back in one order; ``fence`` orders data before counts."""

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
        # Slots begin on whole lines, whatever the allocation does.
        self._first = 8 * _WORDS + -(self._bytes.ctypes.data + 8 * _WORDS) % _LINE
        self.enqueued = 0  # pieces, ever
        self._over = False
        cuda = runtime()
        self._copy: Callable[[int, int, int, int, int], None] = cuda.memcpyAsync
        self._kinds = cuda.memcpyDeviceToHost, cuda.memcpyHostToDevice

    def slot(self, number: int) -> npt.NDArray[np.uint8]:
        """The memory of a piece, by its number in its call."""
        start = self._first + number % self.slots * self.nbytes
        return self._bytes[start : start + self.nbytes]

    # -- the stream's side: whoever calls has made the device current ------------------------------

    def launches(self, timeout: float) -> tuple[Launchable, Launchable]:
        """The launches that post and await, for a timeout in seconds."""
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
        times, more = _PATIENCE
        header = Header(timeout * times + more, 0, False, False, 1)
        body = Body(staging_text(), padded([words]), (0,), 0, 0)
        parameter = pack(body, header, 0, [Addresses(0, (0,), 0)])
        return Launchable(self._function, 1, 1, 1, parameter)

    def put(self, number: int, moves: Sequence[Move], post: Launchable, stream: int) -> None:
        """Enqueue the copies of a piece to its slot, and post it."""
        slot = self.slot(number).ctypes.data
        for move in moves:
            self._copy(slot + move.slot, move.device, move.nbytes, self._kinds[0], stream)
        post.launch(stream)

    def take(self, number: int, moves: Sequence[Move], wait: Launchable, stream: int) -> None:
        """Enqueue the copies of a piece from its slot, once the host has done it."""
        wait.launch(stream)
        slot = self.slot(number).ctypes.data
        for move in moves:
            self._copy(move.device, slot + move.slot, move.nbytes, self._kinds[1], stream)

    # -- the host's side -----------------------------------------------------------------------

    def posted(self, number: int) -> bool:
        """Whether the stream has posted a piece, by its number among all, from 0."""
        return bool(self._words[_POSTED] > number)

    def done(self, number: int) -> None:
        """Count a piece as done: the stream may take it back."""
        if self._fence is not None:
            self._fence()
        self._words[_DONE] = number + 1
        if self._over:  # meanwhile
            self._words[_DONE] = _EVER

    def give_up(self) -> None:
        """Release the stream's waits; what it takes back is garbage."""
        self._over = True
        if self._memory.host:
            self._words[_DONE] = _EVER

    @property
    def failed(self) -> int:
        """The piece whose wait has expired; 0: none."""
        return int(self._words[_FAILED]) if self._memory.host else 0

    def close(self) -> None:
        """Free the memory; nothing may be enqueued any more. Idempotent."""
        self._words, self._bytes = memoryview(b""), np.empty(0, np.uint8)
        self._launches.clear()
        self._memory.free()


def staging_text() -> str:
    """The source text of both kernels."""
    constants = {"RANKS": 1, "LOCAL": 1, "WORDS": len(padded([()])[0])}
    return kernel_text("staging", constants, "1", "staging::run(args);")
