"""Control messages between nodes: hellos, and signals that no data message replaces.

Each rank keeps a copy of the shared words of the ranks on other nodes. What a rank writes to its
own segment it also sends to the other nodes, which store it in the copy, so hellos are compared and
awaited as on one node. A signal to a rank of another node is stored in that rank's own segment.

A control message is a list of offsets and bytes; offsets are checked before anything is stored.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

import numpy as np

from ringcoll.errors import MachineError
from ringcoll.executors.shared_state import FLAGS, HELLO_WORDS, SharedState
from ringcoll.fabric import Fabric
from ringcoll.fabric.mpi import Messages

_COPY, _SIGNAL = 0, 1
_HELLO_SECONDS = 1.0
_HEAD = struct.Struct("<Q")  # which of the two
_PIECE = struct.Struct("<IIQ")  # offset, bytes; padded to a word
_WORD = struct.Struct("=Q")


class RemoteFlags:
    """The flags of a rank on another node: storing one sends it; they cannot be read."""

    def __init__(self, messages: Messages, rank: int) -> None:
        self._messages, self._rank = messages, rank

    def __setitem__(self, at: int, value: int) -> None:
        head = _HEAD.pack(_SIGNAL) + _PIECE.pack(8 * at, 8, 0)
        self._messages.post(self._rank, head + _WORD.pack(value))


class NodeSignals:
    """Keeps this rank's copies of other nodes' words, and their copies of its own, up to date."""

    def __init__(self, fabric: Fabric, shared_state: SharedState, messages: Messages) -> None:
        self.messages, self._shared_state = messages, shared_state
        nodes, self._rank = fabric.nodes, fabric.rank
        self.nodes = nodes
        self.remote = [rank for rank in range(fabric.nranks) if nodes[rank] != nodes[fabric.rank]]
        self.signals = {rank: RemoteFlags(messages, rank) for rank in self.remote}
        messages.receive_posts(self.remote, self._store)

    def announce(self, epoch: int, record: int | None) -> None:
        """Send a call's hello, and the text of number ``record`` if not None, to other nodes."""
        shared_state = self._shared_state
        hello = shared_state.hellos + (epoch & 3) * HELLO_WORDS
        payload = self._copied(
            ([] if record is None else [shared_state.record_span(record)])
            + [(8 * hello, 8 * HELLO_WORDS), (8 * shared_state.entered, 8)]
        )
        for rank in self.remote:
            self.messages.post(rank, payload)

    def announce_pair(self, peer: int, at: int, epoch: int, record: int) -> None:
        """Send the hello of a send or receive, of the pair at index ``at``, to its peer."""
        shared_state = self._shared_state
        hello = at + 8 + (epoch & 3) * HELLO_WORDS
        spans = [shared_state.record_span(record), (8 * hello, 8 * HELLO_WORDS), (8 * at, 8)]
        self.messages.post(peer, self._copied(spans))

    def settled(self, epoch: int, ranks: Iterable[int]) -> bool:
        """Whether all control messages have left and the hellos of these ranks have arrived."""
        words, at = self._shared_state.words, self._shared_state.entered
        return self.messages.flushed() and all(words[rank][at] >= epoch << 32 for rank in ranks)

    def await_hello(self, rank: int, epoch: int) -> None:
        """Wait briefly for a hello that was sent before a message that has arrived."""
        late = time.monotonic() + _HELLO_SECONDS
        while not self.settled(epoch, (rank,)) and time.monotonic() < late:
            self.messages.progress()

    def _copied(self, spans: Iterable[tuple[int, int]]) -> bytes:
        own = self._shared_state.bytes[self._rank]
        parts = [_HEAD.pack(_COPY)]
        for offset, length in spans:
            parts += [_PIECE.pack(offset, length, 0), own[offset : offset + length].tobytes()]
        return b"".join(parts)

    def _store(self, rank: int, payload: memoryview) -> None:
        """Store a control message: in the copy of the rank's words, or as signals to this rank."""
        shared_state = self._shared_state
        if not shared_state.words:
            return  # closed meanwhile
        if len(payload) < _HEAD.size:
            raise MachineError(
                f"rank {rank} posted a control message of {len(payload)} bytes, too few"
            )
        (kind,) = _HEAD.unpack_from(payload)
        low, high = 0, shared_state.scratch
        if kind == _SIGNAL:
            low = 8 * (shared_state.flags + rank * FLAGS)
            high = low + 8 * FLAGS
        memory = shared_state.bytes[rank if kind == _COPY else self._rank]
        at = _HEAD.size
        while at < len(payload):
            if len(payload) - at < _PIECE.size:
                raise MachineError(f"rank {rank} posted a truncated piece")
            offset, length, _ = _PIECE.unpack_from(payload, at)
            at += _PIECE.size
            inside = low <= offset and offset + length <= high and at + length <= len(payload)
            if not inside or offset % 8 or length % 8 or kind not in (_COPY, _SIGNAL):
                raise MachineError(f"rank {rank} posted {length} bytes for {offset}, no such place")
            memory[offset : offset + length] = np.frombuffer(payload, np.uint8, length, at)
            at += length


def open_node_signals(fabric: Fabric, shared_state: SharedState) -> NodeSignals | None:
    """The control messages of a communicator; None on one node."""
    if not fabric.nodes or fabric.messages is None:
        return None
    return NodeSignals(fabric, shared_state, fabric.messages)
